"""The queue: which lane goes next. Pure bookkeeping; nothing here runs anything."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness.schedule.estimates import expected_seconds
from harness.schedule.places import Placement, Places
from harness.schedule.task import Task

#: Left out last time, then what needs quiet (it waits for others, so the sooner it is through the better), then those
#: of several GPUs, then those of several cores, then the longest first with what waits for it; then as they came.
Rank = tuple[bool, bool, int, int, float, int]


def _rank(task: Task, after_it: float, place: int) -> Rank:
    quiet = task.cell.measures or task.exclusive
    return (not task.urgent, not quiet, -task.gpus, -task.cores, -expected_seconds(task) - after_it, place)


@dataclass
class Queue:
    """The tasks that may begin, in the order in which they do."""

    _ready: list[tuple[Rank, Task]] = field(default_factory=list)
    _places: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._ready)

    def put(self, task: Task, after_it: float = 0.0) -> None:
        """Add a task that may begin; `after_it`: the seconds of the lanes that wait for its end."""
        bisect.insort(self._ready, (_rank(task, after_it, next(self._places)), task), key=lambda entry: entry[0])

    def take(self, places: Places, wanted: Callable[[Task], bool]) -> tuple[Task, Placement] | None:
        """Take the first task for which there is a place; None where there is none.

        Nothing passes a task that waits for GPUs of the same architecture, or for the cores: so a lane that needs
        several GPUs or several cores (`Task.cores`) gets them. For one that needs a GPU for itself, the emptiest of its
        architecture is kept free, and the others go on: no lane is added there, so that the fewest lanes of any GPU
        become fewer. One is kept at a time, and lanes that need one for themselves take turns. `wanted` says whether a
        task still makes sense: one that does not is dropped.
        """
        blocked: set[str] = set()
        kept: dict[str, str] = {}  # of an architecture: the number of a GPU
        position = 0
        while position < len(self._ready) and not places.full and "" not in blocked:
            entry = self._ready[position]
            task = entry[1]
            if task.cell.gpu in blocked or places.never(task):
                position += 1
                continue
            del self._ready[position]
            if not wanted(task):
                position = 0  # what waited for it may stand before this place now
                kept.clear()
                continue
            placement = places.take(task, kept.values())
            if placement is not None:
                return task, placement
            self._ready.insert(position, entry)
            if places.waits_for_cores(task, kept.values()):
                blocked.add("")
            elif task.exclusive and task.gpus == 1:
                kept.setdefault(task.cell.gpu, places.emptiest(task))
            else:
                blocked.add(task.cell.gpu)
            position += 1
        return None

    def drain(self) -> list[Task]:
        """Take every task that is left."""
        left = [task for _, task in self._ready]
        self._ready.clear()
        return left
