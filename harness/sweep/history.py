"""What earlier nights said: verdicts for the strips, and how long each lane took."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import durations
from harness.pack import Pack
from harness.sweep import night
from harness.sweep.cell import Task
from harness.sweep.results import NOT_RUN

#: How many nights a strip shows.
NIGHTS = 30


@dataclass(frozen=True)
class Mark:
    """One night of one cell."""

    night: str
    verdict: str
    worse: bool


@dataclass(frozen=True)
class History:
    """The earlier nights of one folder.

    Attributes:
        marks: by cell name, the oldest night first.
        seconds: of each lane by cell name, evidence and lane, from the newest night that ran it.
        left_out: names of the cells that the newest night did not run.

    """

    marks: dict[str, list[Mark]] = field(default_factory=dict)
    seconds: dict[tuple[str, str, str], float] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()


def read(nights: Path, before: str) -> History:
    """Read the finished nights before the one named `before`; a night whose results cannot be read is passed over."""
    marks: dict[str, list[Mark]] = {}
    seconds: dict[tuple[str, str, str], float] = {}
    left_out: frozenset[str] = frozenset()
    for folder in reversed(night.earlier(nights, before)[:NIGHTS]):
        cells = list(_cells(folder))
        left_out = frozenset(cell["name"] for cell in cells if cell["verdict"] == NOT_RUN)
        for cell in cells:
            worse = any(change["worse"] for change in cell["changes"])
            marks.setdefault(cell["name"], []).append(Mark(folder.name, cell["verdict"], worse))
            for lane in cell["lanes"]:
                seconds[cell["name"], cell["evidence"], lane["lane"]] = lane["seconds"]
    return History(marks, seconds, left_out)


def _cells(folder: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from json.loads((folder / night.RESULTS).read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError, TypeError):
        return


class Estimates:
    """How long lanes take: as in an earlier night, else as in the committed receipts, else nobody knows."""

    def __init__(self, history: History) -> None:
        """Begin with what the nights say."""
        self._history = history
        self._receipts: dict[str, dict[tuple[str, str], float]] = {}

    def of(self, task: Task) -> Task:
        """Return the task with its expected seconds, and whether it was left out last night."""
        cell = task.cell
        known = self._history.seconds.get((cell.name, str(cell.evidence), task.lane))
        if known is None:  # of the newest release too: another release of the same kernels is the best guess there is
            known = self._of_pack(cell.pack).get((f"{cell.target}.{cell.evidence}", task.lane))
        return replace(task, seconds=known, urgent=cell.name in self._history.left_out)

    def _of_pack(self, pack: Pack) -> dict[tuple[str, str], float]:
        if pack.name not in self._receipts:
            self._receipts[pack.name] = durations.of_pack(pack)
        return self._receipts[pack.name]
