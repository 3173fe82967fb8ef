"""The engine: starts lanes where there is room, the longest first, until nothing is left that can be run."""

from __future__ import annotations

import os
import queue as queues
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.sweep.account import Account, Reporter, Sickness
from harness.sweep.cell import Cell, Task
from harness.sweep.crew import Crew, LaidOut, Over, Settled
from harness.sweep.journal import Journal
from harness.sweep.nvml import Device
from harness.sweep.queue import Queue, expected_seconds
from harness.sweep.workshop import Attempt
from harness.words import LaneVerdict

#: How many sick GPUs one lane may leave behind before it is not tried again.
MOST_SICK = 2
#: How long, in seconds, an interrupted sweep waits until its lanes are gone.
FAREWELL = 30.0


@dataclass
class Engine:
    """Drives one sweep.

    Attributes:
        crew: lays out cells and runs lanes.
        journal: of the night.
        free: the GPUs that no lane is on.
        queue: the tasks that may begin.
        reporter: whom to tell.
        stop_at: when the budget ends, on the monotonic clock; None without one.
        account: what came of it.

    """

    crew: Crew
    journal: Journal
    free: list[Device]
    queue: Queue
    reporter: Reporter
    stop_at: float | None = None
    account: Account = field(default_factory=Account)
    _shared: set[str] = field(default_factory=set)
    _waiting: dict[str, list[Task]] = field(default_factory=dict)
    _of_cell: dict[str, list[Task]] = field(default_factory=dict)
    _over: set[str] = field(default_factory=set)
    _sick_after: dict[str, int] = field(default_factory=dict)
    _total: int = 0

    def run(self, tasks: Iterable[Task], cancel: int) -> Account:
        """Run every task that has not ended before; closing `cancel` ends the lanes when the user interrupts."""
        pending = [task for task in tasks if not self._ended_before(task)]
        self._total = len(pending)
        for task in pending:
            self._of_cell.setdefault(task.cell.name, []).append(task)
        groups = sorted(
            self._of_cell.values(), key=lambda some: (not some[0].urgent, -max(map(expected_seconds, some)))
        )
        self.crew.lay_out([group[0].cell for group in groups])
        try:
            while self.crew.busy:
                self._take(self.crew.next())
                self._start()
        except KeyboardInterrupt:
            self.account.interrupted = True
        finally:
            os.close(cancel)
            self._say_farewell()
        self._give_up_the_rest()
        return self.account

    def _ended_before(self, task: Task) -> bool:
        ended = task.key in self.journal
        self.account.resumed += ended
        return ended

    def _take(self, message: LaidOut | Over | Settled) -> None:
        if isinstance(message, Settled):
            return
        if isinstance(message, LaidOut):
            if not message.error:
                self._admit(self._of_cell.pop(message.cell.name))
            else:
                self._fail(message.cell, message.error)
            return
        if message.device is None:
            self.queue.leave_cores()
        if message.attempt is not None:
            self._settle(message.task, message.device, message.attempt)
        else:
            self._fail(message.task.cell, message.error)
            self._release(message.task.key)
            self.free += [message.device] if message.device else []

    def _fail(self, cell: Cell, reason: str) -> None:
        self.account.failed[cell.name] = reason
        self.reporter.tell(f"{cell.name}: {reason}")

    def _admit(self, tasks: list[Task]) -> None:
        """Put the tasks of a cell that is laid out into the queue, or let them wait for the lanes before them."""
        for task in tasks:
            for key in task.after:
                self._waiting.setdefault(key, []).append(task)
        for task in tasks:
            self._put_if_ready(task)

    def _put_if_ready(self, task: Task) -> None:
        if all(key in self.journal or key in self._over for key in task.after):
            self.queue.put(task, sum(map(expected_seconds, self._waiting.get(task.key, []))))

    def _release(self, key: str) -> None:
        """Note that a lane is over, however it went: what waited for it may begin, or is given up in its turn."""
        self._over.add(key)
        for waiting in self._waiting.pop(key, []):
            self._put_if_ready(waiting)

    def _give_up(self, task: Task, reason: str) -> None:
        self.account.not_run[task.key] = reason
        self._release(task.key)

    def _settle(self, task: Task, device: Device | None, attempt: Attempt) -> None:
        if device is not None and not attempt.sick:
            self.free.append(device)
        if attempt.end is not None:
            self.account.ran += 1
            record, end = attempt.end.record, attempt.end
            said = record.verdict if record else "the patch does not apply"
            count = f"{self.account.ran}/{self._total}"
            self.reporter.tell(f"{count} {task.name}: {said}, {end.seconds:.1f} s on {end.place}")
            self._release(task.key)
        elif attempt.cut:
            self._give_up(task, "the budget ended while it ran")
        elif attempt.taken and device is not None:
            self._shared.add(device.number)
            self.queue.put(task)
        elif attempt.sick and device is not None:
            self._retire(task, device, attempt.sick)

    def _retire(self, task: Task, device: Device, reason: str) -> None:
        """Take a sick GPU out of the pool and repeat its lane elsewhere, unless that made another GPU sick before."""
        sickness = Sickness(device.place, device.gpu.name, reason, task.name)
        self.account.sick.append(sickness)
        self.reporter.sick(sickness)
        count = self._sick_after.get(task.key, 0) + 1
        self._sick_after[task.key] = count
        if count < MOST_SICK:
            self.queue.put(task)
        else:
            self._give_up(task, f"{count} GPUs were sick after it, the last one: {reason}")

    def _start(self) -> None:
        """Start what there is room for: first the GPUs, since they are what a sweep waits for."""
        for device in list(self.free):
            shared = device.number in self._shared
            while (task := self.queue.take_for_gpu(device.gpu.target, shared=shared)) is not None:
                if self._may_start(task):
                    self.free.remove(device)
                    self.crew.launch(task, device)
                    break
        while (task := self.queue.take_for_cores()) is not None:
            if self._may_start(task):
                self.crew.launch(task, None)
            else:
                self.queue.leave_cores()

    def _may_start(self, task: Task) -> bool:
        """Whether a task still makes sense and fits into what is left of the budget."""
        pristine = self.journal.line(task.pristine)
        verdict = pristine.verdict if pristine else None
        if task.key != task.pristine and (pristine or task.waits) and verdict != LaneVerdict.BUG_REPRODUCED:
            self._release(task.key)
            return False
        left = None if self.stop_at is None else self.stop_at - time.monotonic()
        if left is not None and (left <= 0 or (task.seconds or 0.0) > left):
            expected = "" if task.seconds is None else f"it takes about {task.seconds:.0f} s, and "
            self._give_up(task, f"{expected}{max(0.0, left):.0f} s were left of the budget")
            return False
        return True

    def _say_farewell(self) -> None:
        """Wait until the lanes are gone; only a sweep that was interrupted, or broke, still has some."""
        end = time.monotonic() + FAREWELL
        while self.crew.busy_with_lanes and time.monotonic() < end:
            try:
                message = self.crew.next(max(0.0, end - time.monotonic()))
            except queues.Empty:
                return
            self.account.ran += isinstance(message, Over) and bool(message.attempt and message.attempt.end)

    def _give_up_the_rest(self) -> None:
        """Say why each task that is still in the queue was not run."""
        for target in list(self.queue.ready):
            shared = any(device.gpu.target == target for device in self.free)
            reason = f"every {target} GPU is taken by somebody else" if shared else f"no well {target} GPU is left"
            for task in self.queue.drain(target):
                self.account.not_run.setdefault(task.key, "interrupted" if self.account.interrupted else reason)
