"""What earlier sweeps said: verdicts for the strips, and how long each lane took."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core import strict_json
from harness.schedule.estimates import Estimates
from harness.sweep import run_folder
from harness.sweep.results import NOT_RUN

#: How many runs a strip shows.
SHOWN = 30


@dataclass(frozen=True)
class Mark:
    """One run of one cell."""

    run: str
    verdict: str
    worse: bool


@dataclass(frozen=True)
class History:
    """The earlier runs of one folder.

    Attributes:
        marks: by cell name, the oldest run first.
        seconds: of each lane by cell name, evidence and lane, from the newest run that ran it.
        left_out: names of the cells that the newest run left out.

    """

    marks: dict[str, list[Mark]] = field(default_factory=dict)
    seconds: dict[tuple[str, str, str], float] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    @property
    def estimates(self) -> Estimates:
        """How long lanes take, by these runs and the committed receipts."""
        return Estimates(self.seconds, self.left_out)


def read(runs: Path, before: str) -> History:
    """Read the finished runs before the one named `before`; one whose results cannot be read is passed over."""
    marks: dict[str, list[Mark]] = {}
    seconds: dict[tuple[str, str, str], float] = {}
    left_out: frozenset[str] = frozenset()
    for folder in reversed(run_folder.earlier(runs, before)[:SHOWN]):
        run = _run(folder)
        if run is None:
            continue
        left_out = frozenset(cell.name for cell in run if cell.verdict == NOT_RUN)
        for cell in run:
            marks.setdefault(cell.name, []).append(Mark(folder.name, cell.verdict, cell.worse))
            seconds |= cell.seconds
    return History(marks, seconds, left_out)


@dataclass(frozen=True)
class _Cell:
    """What counts of one cell of an earlier run."""

    name: str
    verdict: str
    worse: bool
    seconds: dict[tuple[str, str, str], float]


def _run(folder: Path) -> list[_Cell] | None:
    """Read the cells of one run; None where its results are damaged, or of another shape."""
    try:
        document = strict_json.loads((folder / run_folder.RESULTS).read_bytes())
        return [_cell(cell) for cell in document["cells"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _cell(cell: dict[str, Any]) -> _Cell:
    name, verdict, evidence = (_text(cell[key]) for key in ("name", "verdict", "evidence"))
    worse = any(change["worse"] for change in cell["changes"])
    lanes = {(name, evidence, _text(lane["lane"])): float(lane["seconds"]) for lane in cell["lanes"]}
    return _Cell(name, verdict, worse, lanes)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value
