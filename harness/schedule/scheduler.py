"""The scheduler: starts lanes where there is a place, the longest first, until nothing is left that can be run.

Every verb that runs lanes runs them here: `run`, `sweep` and `versions` differ in their cells, in whether the journal
is on disk, and in whether GPUs are watched.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from harness.core.words import LaneName, LaneVerdict
from harness.host.host import Host
from harness.lane.record import LaneEnd
from harness.schedule.lane_runner import Prepared, Stopped
from harness.schedule.queue import Placement, Places, Queue
from harness.schedule.task import Task, expected_seconds
from harness.schedule.workers import Failure, LaneWork, Then, Unfit, Workers
from harness.verdict.cell import Cell
from harness.verdict.outcome import Outcome

#: How many cells are laid out at once, beside the lanes.
PREPARING = 4
#: How many times a GPU may show a fault behind one lane before it is not tried again.
MOST_FAULTS = 2
#: How long, in seconds, an interrupted command waits until its lanes are gone.
DRAIN_SECONDS = 30.0


@dataclass(frozen=True)
class GpuFault:
    """A GPU that left the pool: where, its name, why, and after which lane."""

    place: str
    name: str
    reason: str
    task: str


@dataclass
class Account:
    """What came of the tasks besides the ends in the journal."""

    not_run: dict[str, str] = field(default_factory=dict)  # why a task was not run, by its key
    failed: dict[str, Failure] = field(default_factory=dict)  # why a cell could not be laid out, by its name
    faults: list[GpuFault] = field(default_factory=list)  # the GPUs that left the pool
    ran: int = 0  # how many lanes ended now
    resumed: int = 0  # how many had ended before
    interrupted: bool = False  # by the user
    #: the hosts of lanes that ran on another than this one, by the keys of their tasks
    elsewhere: dict[str, Host] = field(default_factory=dict)
    planned: dict[str, list[Task]] = field(default_factory=dict)  # the tasks of each cell, by its name
    #: what came of each cell that was judged, with its receipt, by its name
    results: dict[str, Outcome] = field(default_factory=dict)


def _nothing(*_: object) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Listener:
    """Whom the scheduler tells."""

    #: the lanes are planned; how many there are, and a bound of the seconds that they take, where known
    planned: Callable[[int, float | None], None] = _nothing
    began: Callable[[Task, str], None] = _nothing  # a lane began; its task and its place
    #: a lane is over, however; its task, and a line for people (empty where there is nothing to say)
    ended: Callable[[Task, str], None] = _nothing
    failed: Callable[[str, str], None] = _nothing  # a cell could not be laid out; its name and why
    fault: Callable[[GpuFault], None] = _nothing  # a GPU left the pool


@dataclass
class Scheduler:
    """Drives the lanes of one command."""

    lanes: LaneWork  # lays out cells and runs lanes; its journal knows what has ended
    places: Places  # how many lanes run at once, and the GPUs
    listener: Listener = field(default_factory=Listener)  # whom to tell
    stop_at: float | None = None  # when the budget ends, on the monotonic clock; None without one
    account: Account = field(default_factory=Account)  # what came of it
    _workers: Workers = field(default_factory=Workers)
    _queue: Queue = field(default_factory=Queue)
    _cells: deque[list[Task]] = field(default_factory=deque)
    _waiting: dict[str, list[Task]] = field(default_factory=dict)
    _prepared: dict[str, Prepared] = field(default_factory=dict)
    _over: set[str] = field(default_factory=set)
    _faults_after: Counter[str] = field(default_factory=Counter)
    _total: int = 0

    def run(self, tasks: list[Task], cancel: int) -> Account:
        """Run every task that has not ended before; closing `cancel` ends the lanes when the user interrupts."""
        pending = [task for task in tasks if task.key not in self.lanes.journal]
        self.account.resumed += len(tasks) - len(pending)
        self._total = len(pending)
        of_cell: dict[str, list[Task]] = {}
        for task in pending:
            of_cell.setdefault(task.cell.name, []).append(task)
        cells = sorted(of_cell.values(), key=lambda some: (not some[0].urgent, -max(map(expected_seconds, some))))
        self._cells.extend(cells)
        for _ in range(PREPARING):
            self._lay_out_next()
        try:
            while self._workers.running:
                self._workers.next()()
                while (found := self._queue.take(self.places, self._may_start)) is not None:
                    self.listener.began(found[0], found[1].name)
                    self._workers.start(partial(self._lane, *found))
        except KeyboardInterrupt:
            self.account.interrupted = True
        finally:
            os.close(cancel)
            self._cells.clear()
            self._workers.drain(DRAIN_SECONDS)
        for task in self._queue.drain():
            reason = "interrupted" if self.account.interrupted else self.places.never(task) or "nothing could take it"
            self.account.not_run.setdefault(task.key, reason)
        return self.account

    def _lay_out_next(self) -> None:
        """Lay out the next cell; then put its tasks into the queue, or let them wait for the lanes before them."""
        if not self._cells:
            return
        tasks = self._cells.popleft()
        cell = tasks[0].cell

        def admit(found: Prepared | Failure) -> None:
            self._lay_out_next()
            if isinstance(found, Failure):
                self._fail(cell, found)
                return
            self._prepared[cell.name] = found
            for task in tasks:
                for key in task.after:
                    self._waiting.setdefault(key, []).append(task)
            for task in tasks:
                self._put_if_ready(task)

        self._workers.start(lambda: partial(admit, self.lanes.lay_out(cell)), awaited=False)

    def _fail(self, cell: Cell, failure: Failure) -> None:
        self.account.failed[cell.name] = failure
        self.listener.failed(cell.name, failure.reason)

    def _put_if_ready(self, task: Task) -> None:
        if all(key in self.lanes.journal or key in self._over for key in task.after):
            self._queue.put(task, sum(map(expected_seconds, self._waiting.get(task.key, []))))

    def _release(self, key: str) -> None:
        """Note that a lane is over, however it went: what waited for it may begin, or is given up in its turn."""
        self._over.add(key)
        for waiting in self._waiting.pop(key, []):
            self._put_if_ready(waiting)

    def _give_up(self, task: Task, reason: str) -> None:
        self.account.not_run[task.key] = reason
        self._release(task.key)

    def _settle(self, task: Task, placement: Placement, found: LaneEnd | Stopped | Failure | Unfit) -> None:
        """Take what came of a lane."""
        self.places.give_back(task, placement)
        line = ""
        if isinstance(found, LaneEnd):
            self.account.ran += 1
            said = found.verdict or "the patch does not apply"
            line = f"{self.account.ran}/{self._total} {task.name}: {said}, {found.seconds:.1f} s on {placement.name}"
            self._release(task.key)
            self._workers.start(partial(self.lanes.after, task.cell))
        elif isinstance(found, Failure):
            self._fail(task.cell, found)
            self._release(task.key)
        elif isinstance(found, Unfit):
            self._repeat_elsewhere(task, found)
        elif found == Stopped.CUT:
            self._give_up(task, found.value)
        self.listener.ended(task, line)

    def _repeat_elsewhere(self, task: Task, unfit: Unfit) -> None:
        """Put a lane back that says nothing: its GPU has a fault, or cannot be had for a lane that measures."""
        self.places.taken.update(unfit.taken)
        if not unfit.faults:
            self._queue.put(task)
            return
        pool = {device.number: device for device in self.places.devices}
        for number, reason in unfit.faults:
            if (device := pool.get(number)) is not None:  # it leaves the pool, and is told of once
                self.places.retire(device)
                fault = GpuFault(device.place, device.gpu.name, reason, task.name)
                self.account.faults.append(fault)
                self.listener.fault(fault)
        self._faults_after[task.key] += 1
        count = self._faults_after[task.key]
        if count < MOST_FAULTS:
            self._queue.put(replace(task, isolated=True))
        else:
            self._give_up(task, f"{count} GPUs had a fault after it, the last one: {unfit.faults[-1][1]}")

    def _lane(self, task: Task, placement: Placement) -> Then:
        return partial(self._settle, task, placement, self.lanes.run(task, self._prepared[task.cell.name], placement))

    def _may_start(self, task: Task) -> bool:
        """Whether a task still makes sense and fits into what is left of the budget."""
        second = task.lane == LaneName.PATCHED and task.key != task.pristine and LaneName.PRISTINE in task.cell.lanes
        known = task.pristine in self.lanes.journal or task.pristine in task.after
        if second and known and self.lanes.journal.verdict(task.pristine) != LaneVerdict.BUG_REPRODUCED:
            self._release(task.key)
            return False
        left = None if self.stop_at is None else self.stop_at - time.monotonic()
        if left is not None and (left <= 0 or (task.seconds or 0.0) > left):
            expected = "" if task.seconds is None else f"it takes about {task.seconds:.0f} s, and "
            self._give_up(task, f"{expected}{max(0.0, left):.0f} s were left of the budget")
            return False
        return True
