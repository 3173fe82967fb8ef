"""What people know of and wait for: deviations that a sweep names and that make it fail no longer.

They stand in one TOML file beside the packs, which people review like code. An entry holds what the cell said when it
was acknowledged; as soon as the cell says something else, it needs attention again. Of several entries of one cell the
last counts, so that `runner.py ack` only ever appends.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli

from harness.core import files, structure
from harness.core.errors import HarnessError
from harness.sweep.results import NOT_HERE, NOT_RUN, CellRow, ChangeRow

NAME = "acknowledged.toml"
#: Cells of which a sweep says nothing.
UNJUDGED_CELLS = {NOT_HERE, NOT_RUN}
HEAD = "# Deviations that are known: a sweep names them and does not fail for them, until they change.\n"


@dataclass(frozen=True)
class State:
    """What a cell says, without what differs from night to night: the numbers of a figure, the version of a release.

    Attributes:
        verdict: of the cell.
        changes: the kind of everything that got worse, and the figure that it is about.
        deviation: how the verdict differs from what pack.toml states.
        reason: why it is so, such as the control that failed.

    """

    verdict: str
    changes: tuple[str, ...] = ()
    deviation: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Entry:
    """One deviation that somebody knows.

    Attributes:
        cell: its name in results.json.
        says: what it said then.
        reason: in the words of who acknowledged it, such as a thread of upstream's.
        date: when.

    """

    cell: str
    says: State
    reason: str
    date: dt.date


@dataclass(frozen=True)
class _Document:
    acknowledged: tuple[Entry, ...] = ()


def beside(packs: Path) -> Path:
    """Return the file that stands beside a folder of packs."""
    return packs.absolute().parent / NAME


def state_of(row: CellRow) -> State:
    """Return what a row says."""
    worse = sorted({f"{change.kind} {change.about}".strip() for change in row.changes if change.worse})
    return State(row.verdict, tuple(worse), row.deviation, row.reason)


def read(path: Path) -> dict[str, Entry]:
    """Return the last entry of each cell; none where there is no file.

    Raises:
        HarnessError: the file cannot be read, is no TOML, or holds something else.

    """
    try:
        document = tomli.loads(path.read_text(encoding="utf-8"))
        entries = structure.structure(document, _Document).acknowledged
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise HarnessError(f"{path} cannot be read ({error.strerror}). Next: --acknowledged FILE") from None
    except ValueError as error:  # which a file that is no UTF-8, a TOMLDecodeError and a StructureError are
        raise HarnessError(f"{path}: {error}. Next: mend it; runner.py ack --help shows what it holds") from None
    return {one.cell: one for one in entries}


def add(path: Path, entry: Entry) -> None:
    """Append an entry."""
    read(path)  # nothing is appended to a file that could not be read afterwards
    says = {name: value for name, value in asdict(entry.says).items() if value}
    lines = [
        "\n[[acknowledged]]",
        f"cell = {_toml(entry.cell)}",
        f"date = {entry.date.isoformat()}",
        f"reason = {_toml(entry.reason)}",
        *(f"says.{name} = {_toml(value)}" for name, value in says.items()),
    ]
    before = path.read_text(encoding="utf-8") if path.exists() else HEAD
    files.write_atomic(path, before.rstrip("\n") + "\n" + "\n".join(lines) + "\n")


def _toml(value: Any) -> str:  # noqa: ANN401 - a text, or several
    """Write a value as TOML: its basic strings and arrays are JSON's, but for the character DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def is_known(row: CellRow, entries: dict[str, Entry]) -> bool:
    """Whether a row deviates and says what was acknowledged."""
    entry = entries.get(row.name)
    return entry is not None and row.deviates and state_of(row) == entry.says


def applied(rows: Iterable[CellRow], entries: dict[str, Entry]) -> Iterator[CellRow]:
    """Yield the rows; those that say what was acknowledged are known, and those that are well again say so."""
    for row in rows:
        entry = entries.get(row.name)
        if entry is None or row.verdict in UNJUDGED_CELLS:
            yield row
        elif not row.deviates:
            gone = ChangeRow("acknowledged", worse=False, text=f"on {entry.date}, and well now: the entry can go")
            yield replace(row, changes=(*row.changes, gone))
        else:
            known = f"since {entry.date}: {entry.reason}" if is_known(row, entries) else ""
            yield replace(row, known=known)
