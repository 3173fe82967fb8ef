"""The queue: which lane goes next to which GPU or core. Pure bookkeeping; nothing here runs anything."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.sweep.cell import Task

#: What a lane is taken to last, in seconds, of which no receipt tells.
UNKNOWN = 120.0


#: Left out last night, measuring on the cores, then the longest first with what waits for it; then as they came.
Rank = tuple[bool, bool, float, int]


def _rank(task: Task, after_it: float, place: int) -> Rank:
    on_quiet_cores = task.cell.alone and not task.cell.gpu
    return (not task.urgent, not on_quiet_cores, -expected_seconds(task) - after_it, place)


def expected_seconds(task: Task) -> float:
    """Return how long a lane is taken to last."""
    return UNKNOWN if task.seconds is None else task.seconds


@dataclass
class Queue:
    """The tasks that are ready, by the architecture that they need (empty: a core), longest first.

    Attributes:
        jobs: how many lanes the cores take at once, besides those of the GPUs.
        on_cores: how many are there now.
        alone: whether one of them measures and must have the cores for itself.

    """

    jobs: int
    on_cores: int = 0
    alone: bool = False
    ready: dict[str, list[tuple[Rank, Task]]] = field(default_factory=dict)
    _places: Iterator[int] = field(default_factory=itertools.count)

    def put(self, task: Task, after_it: float = 0.0) -> None:
        """Add a task that may begin; `after_it`: the seconds of the lane that waits for its end."""
        heapq.heappush(self.ready.setdefault(task.cell.gpu, []), (_rank(task, after_it, next(self._places)), task))

    def take_for_gpu(self, target: str, *, shared: bool) -> Task | None:
        """Take the next task for a free GPU; one that `shared` with other programs' processes measures nothing."""
        heap = self.ready.get(target, [])
        if not heap:
            return None
        if not shared:
            return heapq.heappop(heap)[1]
        fitting = min((entry for entry in heap if not entry[1].cell.alone), default=None)
        if fitting is None:
            return None
        heap.remove(fitting)
        heapq.heapify(heap)
        return fitting[1]

    def take_for_cores(self) -> Task | None:
        """Take the next task for the cores; one that measures waits until they are free, and nothing passes it."""
        heap = self.ready.get("", [])
        if not heap or self.alone or self.on_cores >= self.jobs or (heap[0][1].cell.alone and self.on_cores):
            return None
        task = heapq.heappop(heap)[1]
        self.on_cores += 1
        self.alone = task.cell.alone
        return task

    def leave_cores(self) -> None:
        """Note that a lane on the cores ended."""
        self.on_cores -= 1
        self.alone = False

    def drain(self, target: str) -> list[Task]:
        """Take every task that is ready for an architecture."""
        return [task for _, task in self.ready.pop(target, [])]
