"""The records in ``advisories/``: one OSV file for each pack, made of packs by `check --advisories`.

A version is affected or not affected only where a lane judged exactly that version.
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


class State(StrEnum):
    """What is known of one version; `NOT_JUDGED` also where a lane ran and could not judge it."""

    AFFECTED = "affected"
    UNAFFECTED = "not affected"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Judged:
    """What was shown of one version: the state, and in words how each target showed it."""

    state: State
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advisory:
    """One bug of one package.

    Attributes:
        identifier: of the record.
        package: on the package index, normalized.
        silent: whether nothing tells the user: no error, no warning.
        report: a URL, or a path in the repository while that has none.
        workaround: that a check of the pack shows; may be empty.
        judged: by version.
        document: the OSV record itself.

    """

    identifier: str
    package: str
    silent: bool
    report: str
    workaround: str
    judged: dict[Version, Judged]
    document: dict[str, Any]

    def of(self, version: Version) -> Judged:
        """Return what was shown of a version; a local build counts as its release."""
        return self.judged.get(Version(version.public), Judged(State.NOT_JUDGED))


def load(path: Path) -> Advisory:
    """Load one record.

    Raises:
        HarnessError: it cannot be read, or is none of ours; the text names the file.

    """
    try:
        document: Any = strict_json.loads(path.read_bytes())
        (affected,) = document["affected"]
        known = document["database_specific"]
        judged = {
            Version(label): Judged(State(one["state"]), tuple(one["evidence"]))
            for label, one in known["judged"].items()
        }
        stated = {Version(label) for label in affected["versions"]}
        advisory = Advisory(
            identifier=document["id"],
            package=str(canonicalize_name(affected["package"]["name"])),
            silent=known["silent"],
            report=known["report"],
            workaround=known["workaround"],
            judged=judged,
            document=document,
        )
    except (OSError, strict_json.StrictJsonError, InvalidVersion, KeyError, TypeError, ValueError) as error:
        where = f"{path.parent.name}/{path.name}"
        said = f"{type(error).__name__}: {error}"[:300]
        raise HarnessError(f"{where}: {said}. Next: runner.py check --advisories --write, in a clone") from None
    if stated != {version for version, one in judged.items() if one.state == State.AFFECTED}:
        said = "affected.versions are not the versions that database_specific.judged calls affected"
        raise HarnessError(f"{path.name}: {said}. Next: runner.py check --advisories --write, in a clone")
    return advisory


def load_all(folder: Path) -> list[Advisory]:
    """Load every record of a folder, in the order of their names.

    Raises:
        HarnessError: there is none, or one of them cannot be read: an audit without it would say too little.

    """
    paths = sorted(folder.glob(f"{PREFIX}*.json"))
    if not paths:
        raise HarnessError(f"no records in {folder}. Next: --advisories DIR, or runner.py check --advisories --write")
    return [load(path) for path in paths]
