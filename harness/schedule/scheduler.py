"""The scheduler: starts lanes where there is a place, the longest first, until nothing is left that can be run.

Every verb that runs lanes runs them here: `run`, `sweep` and `versions` differ in their cells, in whether the journal
is on disk, and in whether GPUs are watched.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from harness.core.words import LaneName, LaneVerdict
from harness.lane.cell import Cell
from harness.lane.record import LaneEnd
from harness.schedule.lane_runner import Prepared, Runner, Stopped, Unfit
from harness.schedule.queue import Placement, Places, Queue
from harness.schedule.session import GpuFault, Session
from harness.schedule.task import Task, at_least, expected_seconds
from harness.verdict.outcome import Outcome, unjudged

Result = TypeVar("Result")
#: How often, in seconds, the main thread looks up from its wait: a signal that comes just before the wait begins, or
#: that the kernel hands to another thread, does not end it (Python runs handlers between bytecodes of the main thread).
LOOK_UP = 0.5
#: How many cells are laid out at once, beside the lanes.
PREPARING = 4
#: How many times a GPU may show a fault behind one lane before it is not tried again.
MOST_FAULTS = 2
#: How long, in seconds, an interrupted command waits until its lanes are gone.
DRAIN_SECONDS = 30.0


@dataclass
class Account:
    """What came of the tasks besides the ends in the journal."""

    not_run: dict[str, str] = field(default_factory=dict)  # why a task was not run, by its key
    faults: list[GpuFault] = field(default_factory=list)  # the GPUs that left the pool
    total: int = 0  # how many lanes had not ended before
    ran: int = 0  # how many of them ended now
    resumed: int = 0  # how many had ended before
    interrupted: bool = False  # by the user
    planned: dict[str, list[Task]] = field(default_factory=dict)  # the tasks of each cell, by its name
    #: what came of each cell, by its name: of those that were judged, and of those that could not be
    results: dict[str, Outcome] = field(default_factory=dict)

    def ended(self, end: LaneEnd) -> str:
        """Count a lane that ended, and say so in a line."""
        self.ran += 1
        said = end.verdict or "the patch does not apply"
        return f"{self.ran}/{self.total} {end.task}: {said}, {end.seconds:.1f} s on {end.place}"

    def why_not(self, cell: Cell) -> str:
        """Say why not every lane of a cell was run."""
        known = (self.not_run[task.key] for task in self.planned[cell.name] if task.key in self.not_run)
        return next(known, "interrupted" if self.interrupted else "a lane before it did not end")


def _begun(work: Callable[[], Result]) -> Future[Result]:
    """Let a thread do some work. It is a daemon: what an interruption does not wait for ends with the command."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits for it hears of it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@dataclass
class Scheduler:
    """Drives the lanes of one command: threads run them, and what a lane leads to happens in the main thread."""

    session: Session  # where they run, and whose journal takes each end before anybody else hears of it
    runner: Runner  # lays out cells and runs lanes
    settle: Callable[[Cell], None] = lambda _: None  # called after each end: judges the cell if that was its last lane
    account: Account = field(default_factory=Account)  # what came of it
    _layouts: dict[Future[Prepared], list[Task]] = field(default_factory=dict)
    _lanes: dict[Future[LaneEnd | Stopped | Unfit], tuple[Task, Placement]] = field(default_factory=dict)
    _ended: list[Cell] = field(default_factory=list)  # those of lanes that ended and are not settled yet
    _places: Places = field(init=False)
    _queue: Queue = field(default_factory=Queue)
    _cells: deque[list[Task]] = field(default_factory=deque)
    _waiting: dict[str, list[Task]] = field(default_factory=dict)
    _prepared: dict[str, Prepared] = field(default_factory=dict)
    _over: set[str] = field(default_factory=set)
    _faults_after: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Begin with the GPUs that had no fault before."""
        faulty = {fault.place for fault in self.session.faults}
        healthy = [device for device in self.session.devices if device.place not in faulty]
        self._places = Places(self.session.most_jobs, healthy)

    def run(self, tasks: list[Task], cancel: int) -> Account:
        """Run every task that has not ended before; closing `cancel` ends the lanes when the user interrupts."""
        pending = [task for task in tasks if task.key not in self.session.journal]
        self.account.resumed += len(tasks) - len(pending)
        self.account.total = len(pending)
        self.session.progress.begin(len(pending), at_least(pending, self._places.jobs))
        of_cell: dict[str, list[Task]] = {}
        for task in pending:
            of_cell.setdefault(task.cell.name, []).append(task)
        cells = sorted(of_cell.values(), key=lambda some: (not some[0].urgent, -max(map(expected_seconds, some))))
        self._cells.extend(cells)
        for _ in range(PREPARING):
            self._lay_out_next()
        try:
            while self._layouts or self._lanes:
                self._hear(LOOK_UP)
                while (found := self._queue.take(self._places, self._may_start)) is not None:
                    task, placement = found
                    self.session.progress.start(task.key, f"{task.name} on {placement.name}", task.seconds)
                    self._lanes[_begun(partial(self._lane, *found))] = found
                while self._ended:
                    self.settle(self._ended.pop())
        except KeyboardInterrupt:
            self.account.interrupted = True
        finally:
            os.close(cancel)
            self._cells.clear()
            wait(self._lanes, DRAIN_SECONDS)
            self._hear(0.0)
        for task in self._queue.drain():
            reason = "interrupted" if self.account.interrupted else self._places.never(task) or "nothing could take it"
            self.account.not_run.setdefault(task.key, reason)
        return self.account

    def _hear(self, seconds: float) -> None:
        """Wait so long for a lane or a layout to be over, and take what came of those that are."""
        running: list[Future[Any]] = [*self._layouts, *self._lanes]
        done = wait(running, seconds, FIRST_COMPLETED).done
        for layout in [layout for layout in self._layouts if layout in done]:
            self._admit(self._layouts.pop(layout), layout)
        for lane in [lane for lane in self._lanes if lane in done]:
            self._take(*self._lanes.pop(lane), lane)

    def _lay_out_next(self) -> None:
        if self._cells:
            tasks = self._cells.popleft()
            self._layouts[_begun(partial(self.runner.prepare, tasks[0].cell))] = tasks

    def _admit(self, tasks: list[Task], layout: Future[Prepared]) -> None:
        """Put the tasks of a cell into the queue, or let them wait for the lanes before them."""
        self._lay_out_next()
        cell, error = tasks[0].cell, layout.exception()
        if error is not None:
            self._fail(cell, error)
            return
        self._prepared[cell.name] = layout.result()
        for task in tasks:
            for key in task.after:
                self._waiting.setdefault(key, []).append(task)
        for task in tasks:
            self._put_if_ready(task)

    def _fail(self, cell: Cell, error: BaseException) -> None:
        outcome = self.account.results[cell.name] = unjudged(error, cell)
        self.session.progress.tell(f"{cell.name}: {outcome.judgement.reason}")

    def _put_if_ready(self, task: Task) -> None:
        if all(key in self.session.journal or key in self._over for key in task.after):
            self._queue.put(task, sum(map(expected_seconds, self._waiting.get(task.key, []))))

    def _release(self, key: str) -> None:
        """Note that a lane is over, however it went: what waited for it may begin, or is given up in its turn."""
        self._over.add(key)
        for waiting in self._waiting.pop(key, []):
            self._put_if_ready(waiting)

    def _give_up(self, task: Task, reason: str) -> None:
        self.account.not_run[task.key] = reason
        self._release(task.key)

    def _take(self, task: Task, placement: Placement, lane: Future[LaneEnd | Stopped | Unfit]) -> None:
        """Take what came of a lane."""
        self._places.give_back(task, placement)
        line, error = "", lane.exception()
        found = None if error else lane.result()
        if error is not None:
            self._fail(task.cell, error)
            self._release(task.key)
        elif isinstance(found, LaneEnd):
            line = self.account.ended(found)
            self._release(task.key)
            self._ended.append(task.cell)
        elif isinstance(found, Unfit):
            self._repeat_elsewhere(task, found)
        elif found == Stopped.CUT:
            self._give_up(task, found.value)
        self.session.progress.end(task.key, line)

    def _repeat_elsewhere(self, task: Task, unfit: Unfit) -> None:
        """Put a lane back that says nothing: its GPU has a fault, or cannot be had for a lane that measures."""
        self._places.taken.update(unfit.taken)
        if not unfit.faults:
            self._queue.put(task)
            return
        pool = {device.number: device for device in self._places.devices}
        for number, reason in unfit.faults:
            if (device := pool.get(number)) is not None:  # it leaves the pool, and is told of once
                self._places.retire(device)
                fault = GpuFault(device.place, device.gpu.name, reason, task.name)
                self.account.faults.append(fault)
                self.session.progress.tell(f"{fault.place} leaves the pool after {fault.task}: {fault.reason}")
                self.session.note(fault)
        self._faults_after[task.key] += 1
        count = self._faults_after[task.key]
        if count < MOST_FAULTS:
            self._queue.put(replace(task, isolated=True))
        else:
            self._give_up(task, f"{count} GPUs had a fault after it, the last one: {unfit.faults[-1][1]}")

    def _lane(self, task: Task, placement: Placement) -> LaneEnd | Stopped | Unfit:
        found = self.runner.run(task, self._prepared[task.cell.name], placement)
        if isinstance(found, LaneEnd):
            self.session.journal.append(found)
        return found

    def _may_start(self, task: Task) -> bool:
        """Whether a task still makes sense and fits into what is left of the budget."""
        second = task.lane == LaneName.PATCHED and task.key != task.pristine and LaneName.PRISTINE in task.cell.lanes
        known = task.pristine in self.session.journal or task.pristine in task.after
        if second and known and self.session.journal.verdict(task.pristine) != LaneVerdict.BUG_REPRODUCED:
            self._release(task.key)
            return False
        left = None if self.session.stop_at is None else self.session.stop_at - time.monotonic()
        if left is not None and (left <= 0 or (task.seconds or 0.0) > left):
            expected = "" if task.seconds is None else f"it takes about {task.seconds:.0f} s, and "
            self._give_up(task, f"{expected}{max(0.0, left):.0f} s were left of the budget")
            return False
        return True
