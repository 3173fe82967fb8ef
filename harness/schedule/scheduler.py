"""The scheduler: starts lanes as places become free, the longest first, until no lane can be run.

Every verb that runs lanes uses it. `run`, `sweep` and `versions` differ in their cells, in whether the journal is on
disk, and in whether GPUs are watched.
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
from harness.schedule.task import Task, expected_seconds, lower_bound_seconds
from harness.verdict.outcome import Outcome, outcome_of_error

Result = TypeVar("Result")
#: The longest wait of the main thread, in seconds. Python runs signal handlers there between bytecodes: a signal that
#: comes just before the wait, or in another thread, does not end the wait.
POLL_SECONDS = 0.5
#: How many cells are laid out at once, beside the lanes.
PREPARING = 4
#: After so many faults of its GPUs a lane is given up.
MAX_FAULTS = 2
#: How many seconds an interrupted command waits for its lanes to end.
DRAIN_SECONDS = 30.0


@dataclass
class Account:
    """The plan of a command, and its results besides the ends in the journal."""

    not_run: dict[str, str] = field(default_factory=dict)  # why a task was not run, by its key
    faults: list[GpuFault] = field(default_factory=list)  # the GPUs that left the pool
    total: int = 0  # how many lanes had not ended before
    ran: int = 0  # how many of them ended in this command
    resumed: int = 0  # how many lanes had ended before
    interrupted: bool = False  # by the user
    planned: dict[str, list[Task]] = field(default_factory=dict)  # the tasks of each cell, by its name
    #: the outcome of each cell, by its name; a cell that could not be judged has one, too
    results: dict[str, Outcome] = field(default_factory=dict)

    def count(self, end: LaneEnd) -> str:
        """Count a lane that ended, and return a line about it."""
        self.ran += 1
        verdict = end.verdict or "the patch does not apply"
        return f"{self.ran}/{self.total} {end.task}: {verdict}, {end.seconds:.1f} s on {end.place}"

    def reason_not_run(self, cell: Cell) -> str:
        """Return why not every lane of a cell was run."""
        reasons = (self.not_run[task.key] for task in self.planned[cell.name] if task.key in self.not_run)
        return next(reasons, "interrupted" if self.interrupted else "a lane before it did not end")


def _in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Run `work` in a daemon thread, which ends with the command."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the future raises it again
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@dataclass
class Scheduler:
    """Runs the lanes of one command: each lane in a thread of its own, every decision in the main thread."""

    session: Session  # its journal stores each end first
    runner: Runner
    settle: Callable[[Cell], None] = lambda _: None  # called after each end: judges the cell if that was its last lane
    account: Account = field(default_factory=Account)
    _layouts: dict[Future[Prepared], list[Task]] = field(default_factory=dict)
    _lanes: dict[Future[LaneEnd | Stopped | Unfit], tuple[Task, Placement]] = field(default_factory=dict)
    _ended: list[Cell] = field(default_factory=list)  # the cells of lanes that ended, to be settled
    _places: Places = field(init=False)
    _queue: Queue = field(default_factory=Queue)
    _to_lay_out: deque[list[Task]] = field(default_factory=deque)
    _waiting: dict[str, list[Task]] = field(default_factory=dict)
    _prepared: dict[str, Prepared] = field(default_factory=dict)
    _finished: set[str] = field(default_factory=set)
    _faults_after: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Begin with the GPUs that had no earlier fault."""
        faulty = {fault.place for fault in self.session.faults}
        healthy = [device for device in self.session.devices if device.place not in faulty]
        self._places = Places(self.session.most_jobs, healthy)

    def run(self, tasks: list[Task], cancel: int) -> Account:
        """Run every task that has not ended before. If the user interrupts, closing `cancel` ends the lanes."""
        pending = [task for task in tasks if task.key not in self.session.journal]
        self.account.resumed += len(tasks) - len(pending)
        self.account.total = len(pending)
        self.session.progress.begin(len(pending), lower_bound_seconds(pending, self._places.jobs))
        groups: dict[str, list[Task]] = {}
        for task in pending:
            groups.setdefault(task.cell.name, []).append(task)
        cells = sorted(groups.values(), key=lambda group: (not group[0].urgent, -max(map(expected_seconds, group))))
        self._to_lay_out.extend(cells)
        for _ in range(PREPARING):
            self._lay_out_next()
        try:
            while self._layouts or self._lanes:
                self._await(POLL_SECONDS)
                while (start := self._queue.take(self._places, self._may_start)) is not None:
                    task, placement = start
                    self.session.progress.start(task.key, f"{task.name} on {placement.name}", task.seconds)
                    self._lanes[_in_thread(partial(self._run_lane, *start))] = start
                while self._ended:
                    self.settle(self._ended.pop())
        except KeyboardInterrupt:
            self.account.interrupted = True
        finally:
            os.close(cancel)
            self._to_lay_out.clear()
            wait(self._lanes, DRAIN_SECONDS)
            self._await(0.0)
        for task in self._queue.drain():
            reason = "interrupted" if self.account.interrupted else self._places.never(task) or "nothing could take it"
            self.account.not_run.setdefault(task.key, reason)
        return self.account

    def _await(self, seconds: float) -> None:
        """Wait up to `seconds` for a lane or a layout to end, and handle those that have ended."""
        running: list[Future[Any]] = [*self._layouts, *self._lanes]
        done = wait(running, seconds, FIRST_COMPLETED).done
        for layout in [layout for layout in self._layouts if layout in done]:
            self._admit(self._layouts.pop(layout), layout)
        for lane in [lane for lane in self._lanes if lane in done]:
            self._handle(*self._lanes.pop(lane), lane)

    def _lay_out_next(self) -> None:
        if self._to_lay_out:
            tasks = self._to_lay_out.popleft()
            self._layouts[_in_thread(partial(self.runner.prepare, tasks[0].cell))] = tasks

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
        outcome = self.account.results[cell.name] = outcome_of_error(error, cell)
        if not outcome.problem:  # a wrong call, which the command itself reports
            self.session.progress.tell(f"{cell.name}: {outcome.judgement.reason}")

    def _put_if_ready(self, task: Task) -> None:
        if all(key in self.session.journal or key in self._finished for key in task.after):
            self._queue.put(task, sum(map(expected_seconds, self._waiting.get(task.key, []))))

    def _release(self, key: str) -> None:
        """Queue the tasks that waited for a lane: it has ended, has failed, or is never run."""
        self._finished.add(key)
        for waiting in self._waiting.pop(key, []):
            self._put_if_ready(waiting)

    def _give_up(self, task: Task, reason: str) -> None:
        self.account.not_run[task.key] = reason
        self._release(task.key)

    def _handle(self, task: Task, placement: Placement, lane: Future[LaneEnd | Stopped | Unfit]) -> None:
        """Handle the result of a lane."""
        self._places.give_back(task, placement)
        line, error = "", lane.exception()
        result = None if error else lane.result()
        if error is not None:
            self._fail(task.cell, error)
            self._release(task.key)
        elif isinstance(result, LaneEnd):
            line = self.account.count(result)
            self._release(task.key)
            self._ended.append(task.cell)
        elif isinstance(result, Unfit):
            self._repeat_elsewhere(task, result)
        elif result == Stopped.CUT:
            self._give_up(task, result.value)
        self.session.progress.end(task.key, line)

    def _repeat_elsewhere(self, task: Task, unfit: Unfit) -> None:
        """Queue a lane again: a GPU has a fault, or another program uses the GPU of a lane that measures."""
        self._places.busy.update(unfit.busy)
        if not unfit.faults:
            self._queue.put(task)
            return
        pool = {device.number: device for device in self._places.devices}
        for number, reason in unfit.faults:
            if (device := pool.get(number)) is not None:  # a GPU leaves the pool once
                self._places.retire(device)
                fault = GpuFault(device.place, device.gpu.name, reason, task.name)
                self.account.faults.append(fault)
                self.session.progress.tell(f"{fault.place} leaves the pool after {fault.task}: {fault.reason}")
                self.session.note(fault)
        self._faults_after[task.key] += 1
        count = self._faults_after[task.key]
        if count < MAX_FAULTS:
            self._queue.put(replace(task, isolated=True))
        else:
            self._give_up(task, f"{count} GPUs had a fault after it, the last one: {unfit.faults[-1][1]}")

    def _run_lane(self, task: Task, placement: Placement) -> LaneEnd | Stopped | Unfit:
        result = self.runner.run(task, self._prepared[task.cell.name], placement)
        if isinstance(result, LaneEnd):
            self.session.journal.append(result)
        return result

    def _may_start(self, task: Task) -> bool:
        """Whether a task is still needed and fits into the rest of the budget; a task that does not is given up."""
        is_second = task.lane == LaneName.PATCHED and LaneName.PRISTINE in task.cell.lanes
        is_decided = task.pristine in self.session.journal or task.pristine in task.after
        if is_second and is_decided and self.session.journal.verdict(task.pristine) != LaneVerdict.BUG_REPRODUCED:
            self._release(task.key)
            return False
        remaining = None if self.session.stop_at is None else self.session.stop_at - time.monotonic()
        if remaining is not None and (remaining <= 0 or (task.seconds or 0.0) > remaining):
            expected = "" if task.seconds is None else f"it takes about {task.seconds:.0f} s, and "
            self._give_up(task, f"{expected}{max(0.0, remaining):.0f} s were left of the budget")
            return False
        return True
