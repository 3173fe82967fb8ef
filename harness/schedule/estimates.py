"""How long lanes take: from the committed receipts, and from earlier runs where a sweep knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from harness.core import strict_json
from harness.core.words import LaneName
from harness.pack.model import Pack
from harness.schedule.task import Task
from harness.verdict.cell import Cell

#: What a lane is taken to last, in seconds, of which no receipt tells.
UNKNOWN = 120.0
#: By receipt (``TARGET.EVIDENCE``) and lane, in seconds.
Durations = Mapping[tuple[str, str], float]


def of_pack(pack: Pack) -> Durations:
    """Read the seconds of a pack's lanes from its committed receipts.

    Receipts that cannot be read are `check`'s business.
    """
    found: dict[tuple[str, str], float] = {}
    for path in pack.receipts.glob("*.json"):
        try:
            lanes = strict_json.loads(path.read_bytes())["lanes"]
            found |= {(path.stem, name): float(lane["seconds"]) for name, lane in lanes.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


class Estimates:
    """How long lanes take: as in an earlier run, else as in the committed receipts, else nobody knows."""

    def __init__(self, earlier: Mapping[tuple[str, str, str], float] | None = None, urgent: Iterable[str] = ()) -> None:
        """Take what earlier runs say.

        Args:
            earlier: seconds by cell name, evidence and lane.
            urgent: the names of the cells that the newest of them left out.

        """
        self._earlier = earlier or {}
        self._urgent = frozenset(urgent)
        self._receipts: dict[str, Durations] = {}

    def of(self, task: Task) -> Task:
        """Return the task with its expected seconds, and whether it was left out last time."""
        cell = task.cell
        return replace(task, seconds=self._seconds(cell, task.lane), urgent=cell.name in self._urgent)

    def _seconds(self, cell: Cell, lane: LaneName) -> float | None:
        known = self._earlier.get((cell.name, str(cell.evidence), lane))
        if known is None:  # of another release too: another release of the same kernels is the best guess there is
            if cell.pack.name not in self._receipts:
                self._receipts[cell.pack.name] = of_pack(cell.pack)
            known = self._receipts[cell.pack.name].get((f"{cell.target}.{cell.evidence}", lane))
        return known


def expected_seconds(task: Task) -> float:
    """Return how long a lane is taken to last."""
    return UNKNOWN if task.seconds is None else task.seconds


def at_least(tasks: Iterable[Task], jobs: int) -> float | None:
    """Return a bound below which no schedule of these tasks comes, in seconds; None where no duration is known."""
    known = [(task.seconds, min(task.cores, jobs)) for task in tasks if task.seconds is not None]
    together = sum(seconds * cores for seconds, cores in known) / jobs
    return max(together, *(seconds for seconds, _ in known)) if known else None
