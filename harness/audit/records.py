"""The records in ``advisories/``: one OSV file for each pack, read back by `audit`.

What `audit` says of a version stands in the record's ``database_specific``, so that the two cannot differ. A version
is affected or not affected only where a lane judged exactly that version.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.core import strict_json
from harness.core.errors import HarnessError

#: Where the records lie: in the repository, and beside this package where it is installed from a wheel.
FOLDER = Path(__file__).resolve().parents[2] / "advisories"
#: OSV keeps ``x_`` for databases that it does not collect; the rest is the name of the command that reads ours.
PREFIX = "x_WRONG-NUMERICS-"
ECOSYSTEM = "PyPI"
#: Characters of a message: it may quote what a record holds.
LONGEST_MESSAGE = 300


class State(StrEnum):
    """What is known of one version; `NOT_JUDGED` also where a lane ran and could not judge it."""

    AFFECTED = "affected"
    UNAFFECTED = "not affected"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Judged:
    """What was shown of one version.

    Attributes:
        state: affected, not affected or, with the reason, not judged.
        evidence: how each target showed it, in words.
        reason: why it could not be judged; empty of others.

    """

    state: State
    evidence: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Period:
    """One stretch of versions with the bug: the first and the last judged affected, and what is known of its ends."""

    first: str
    last: str
    since: str
    fixed: str


@dataclass(frozen=True)
class Advisory:
    """One bug of one package.

    Attributes:
        identifier: of the record.
        pack: the folder of the pack that proves it.
        package: on the package index, normalized.
        title: what goes wrong.
        kind: wrong-result, crash, ...
        silent: whether nothing tells the user: no error, no warning.
        link: to the report: a URL, or a path in the repository while that has none.
        workaround: that a check of the pack shows; may be empty.
        judged: by version, as the index writes it.
        periods: the stretches with the bug, the oldest first.

    """

    identifier: str
    pack: str
    package: str
    title: str
    kind: str
    silent: bool
    link: str
    workaround: str
    judged: dict[str, Judged]
    periods: tuple[Period, ...]

    def of(self, version: str) -> Judged:
        """Return what was shown of a version, which is compared by value: 0.8 is 0.8.0. Local parts do not count."""
        wanted = Version(version).public
        found = [one for label, one in self.judged.items() if Version(label) == Version(wanted)]
        return found[0] if found else Judged(State.NOT_JUDGED)

    def period_of(self, version: str) -> Period | None:
        """Return the stretch that an affected version lies in."""
        wanted = Version(Version(version).public)
        found = [one for one in self.periods if Version(one.first) <= wanted <= Version(one.last)]
        return found[0] if found else None


def _take(table: object, key: str, kind: type) -> Any:  # noqa: ANN401 - of the kind that was asked for
    value = table.get(key) if isinstance(table, dict) else None
    if type(value) is not kind:
        raise ValueError(f"{key}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def _texts(table: object, key: str) -> tuple[str, ...]:
    values = _take(table, key, list)
    if not all(type(one) is str for one in values):
        raise ValueError(f"{key}: expected texts")
    return tuple(values)


def _judged(table: object) -> Judged:
    return Judged(State(_take(table, "state", str)), _texts(table, "evidence"), _take(table, "reason", str))


def _period(table: object) -> Period:
    first, last, since, fixed = (
        _take(table, key, str) for key in ("first_affected", "last_affected", "since", "fixed")
    )
    Version(first), Version(last)
    return Period(first, last, since, fixed)


def _advisory(document: object) -> Advisory:
    affected = _take(document, "affected", list)
    if len(affected) != 1:
        raise ValueError(f"affected: one package a record, not {len(affected)}")
    package = _take(affected[0], "package", dict)
    if package.get("ecosystem") != ECOSYSTEM:
        raise ValueError(f"affected.package.ecosystem: not {ECOSYSTEM}")
    known = _take(document, "database_specific", dict)
    judged = {label: _judged(one) for label, one in _take(known, "judged", dict).items()}
    for label in judged:
        Version(label)
    affected_ones = {label for label, one in judged.items() if one.state == State.AFFECTED}
    if affected_ones != set(_texts(affected[0], "versions")):
        raise ValueError("affected.versions: not the versions that database_specific.judged calls affected")
    return Advisory(
        identifier=_take(document, "id", str),
        pack=_take(known, "pack", str),
        package=str(canonicalize_name(_take(package, "name", str))),
        title=_take(document, "summary", str),
        kind=_take(known, "kind", str),
        silent=_take(known, "silent", bool),
        link=_take(known, "report", str),
        workaround=_take(known, "workaround", str),
        judged=judged,
        periods=tuple(_period(one) for one in _take(known, "periods", list)),
    )


def load(path: Path) -> Advisory:
    """Load one record.

    Raises:
        HarnessError: it cannot be read, or is none of ours; the text names the file.

    """
    where = f"{path.parent.name}/{path.name}"
    again = "Next: runner.py advisories --write, in a clone of the repository"
    try:
        return _advisory(strict_json.loads(path.read_bytes()))
    except OSError as error:
        raise HarnessError(f"{where}: it cannot be read ({error.strerror}). {again}") from None
    except (strict_json.StrictJsonError, InvalidVersion, ValueError) as error:
        raise HarnessError(f"{where}: {str(error)[:LONGEST_MESSAGE]}. {again}") from None


def load_all(folder: Path) -> list[Advisory]:
    """Load every record of a folder, in the order of their names.

    Raises:
        HarnessError: there is none, or one of them cannot be read: an audit without it would say too little.

    """
    paths = sorted(folder.glob(f"{PREFIX}*.json"))
    if not paths:
        raise HarnessError(f"no advisories in {folder}. Next: --advisories DIR, or runner.py advisories --write")
    return [load(path) for path in paths]
