"""The worker pool: threads that lay out cells and run lanes, and tell the scheduler what came of it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.core import files
from harness.core.errors import HarnessError, NoRoomError, UnavailableError, UnsupportedHereError
from harness.core.words import Exit, Verdict
from harness.host.gpu_health import GpuWatch
from harness.host.gpus import Device
from harness.schedule.journal import Journal
from harness.schedule.lane_runner import Attempt, Prepared
from harness.schedule.places import Placement
from harness.schedule.task import Task
from harness.verdict.cell import Cell

#: Threads that fetch, unpack and patch beside the lanes.
PREPARING = 4
#: How often, in seconds, the main thread looks up from its wait: a signal that comes just before the wait begins, or
#: that the kernel hands to another thread, does not end it (Python runs handlers between bytecodes of the main thread).
LOOK_UP = 0.5


class Work(Protocol):
    """What the pool does; `runner.Runner` is the real one."""

    def prepare(self, cell: Cell) -> Prepared:
        """Lay out what the lanes of a cell need."""

    def attempt(self, task: Task, prepared: Prepared, placement: Placement, locks: tuple[Path, ...]) -> Attempt:
        """Run a lane to its end."""


class Finish(Protocol):
    """What is done behind a lane's end, such as writing the receipt of its cell."""

    def __call__(self, cell: Cell) -> None:
        """Do it."""


@dataclass(frozen=True)
class Failure:
    """Why a cell could not be laid out, or a lane could not begin.

    Attributes:
        verdict: that this is.
        reason: in one line.
        wrong_call: whether the command itself is to blame: it names a folder or a set that is not there.

    """

    verdict: Verdict
    reason: str
    wrong_call: bool = False


@dataclass(frozen=True)
class LaidOut:
    """A cell is laid out, or cannot be."""

    cell: Cell
    prepared: Prepared | None
    failure: Failure | None = None


@dataclass(frozen=True)
class Over:
    """A lane is over.

    Attributes:
        task: the lane.
        placement: where it ran.
        attempt: what came of it; None where one of the others says why nothing did.
        failure: of the harness itself.
        faults: of the GPUs that it was on, by their numbers: whatever it said does not count.
        taken: the numbers of GPUs that another program uses, for a lane that measures, and why.

    """

    task: Task
    placement: Placement
    attempt: Attempt | None = None
    failure: Failure | None = None
    faults: tuple[tuple[str, str], ...] = ()
    taken: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Finished:
    """What had to be done behind a lane's end is done."""


Message = LaidOut | Over | Finished


class WorkerPool:
    """Threads at work. None of them outlives the command: they are daemons, and their processes end with it."""

    def __init__(self, work: Work, journal: Journal, finish: Finish, watch: GpuWatch | None, locks: Path) -> None:
        """Begin with nobody at work.

        Args:
            work: lays out cells and runs lanes.
            journal: takes each end before anybody else hears of it.
            finish: called behind each end.
            watch: looks at the GPUs before and after lanes; None: nobody does.
            locks: the folder of the files that lanes lock while they share a GPU.

        """
        self.running = 0
        self._preparing = self._finishing = 0
        self._work, self._journal, self._finish, self._watch = work, journal, finish, watch
        self._locks = locks
        self._lanes: list[threading.Thread] = []
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    @property
    def busy(self) -> bool:
        """Whether a message is still to come."""
        return bool(self.running or self._preparing or self._finishing)

    def prepare(self, cells: list[Cell]) -> None:
        """Lay out cells in this order, a few at once."""
        waiting: queue.SimpleQueue[Cell | None] = queue.SimpleQueue()
        for cell in cells:
            waiting.put(cell)
        self._preparing += len(cells)
        for _ in range(min(PREPARING, len(cells))):
            waiting.put(None)
            threading.Thread(target=self._lay_out, args=(waiting,), daemon=True).start()

    def launch(self, task: Task, prepared: Prepared, placement: Placement) -> None:
        """Run a lane."""
        self.running += 1
        thread = threading.Thread(target=self._run, args=(task, prepared, placement), daemon=True)
        self._lanes = [*(one for one in self._lanes if one.is_alive()), thread]
        thread.start()

    def next(self) -> Message:
        """Wait for the next message."""
        message = self._wait()
        if isinstance(message, LaidOut):
            self._preparing -= 1
        elif isinstance(message, Finished):
            self._finishing -= 1
        else:
            self.running -= 1
            self._finishing += message.attempt is not None
        return message

    def _wait(self) -> Message:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._messages.get(timeout=LOOK_UP)

    def drain(self, timeout: float) -> Iterator[Message]:
        """Wait at most `timeout` seconds until no lane runs and its receipt is written; yield what is left to read.

        The threads themselves are asked: an interruption can hit between a message and its being counted.
        """
        end = time.monotonic() + timeout
        for thread in self._lanes:
            if thread.is_alive():
                thread.join(max(0.0, end - time.monotonic()))
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._messages.get_nowait()

    def _lay_out(self, cells: queue.SimpleQueue[Cell | None]) -> None:
        while (cell := cells.get()) is not None:
            try:
                self._messages.put(LaidOut(cell, self._work.prepare(cell)))
            except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
                self._messages.put(LaidOut(cell, None, failure_of(error, cell)))

    def _run(self, task: Task, prepared: Prepared, placement: Placement) -> None:
        try:
            over = self._watched(task, prepared, placement)
        except Exception as error:  # noqa: BLE001 - likewise
            over = Over(task, placement, failure=failure_of(error, task.cell))
        self._messages.put(over)
        if over.attempt is None:
            return
        try:
            if over.attempt.end is not None:
                self._finish(task.cell)
        except Exception as error:  # noqa: BLE001 - the receipt is written, and its failure told, in the end
            failure_of(error, task.cell)
        finally:
            self._messages.put(Finished())

    def _watched(self, task: Task, prepared: Prepared, placement: Placement) -> Over:
        """Run a lane on GPUs that are healthy before it and after it."""
        entered: list[Device] = []
        faults, taken = [], []
        for device in placement.devices if self._watch else ():
            assert self._watch is not None  # noqa: S101 - for the type checker
            fault, why = self._watch.enter(device, measures=task.cell.measures)
            faults += [(device.number, fault)] if fault else []
            taken += [(device.number, why)] if why else []
            entered += [] if fault or why else [device]
        attempt = None
        try:
            if not faults and not taken:
                attempt = self._work.attempt(task, prepared, placement, self._locks_of(task, placement))
        finally:
            for device in entered:
                assert self._watch is not None  # noqa: S101 - likewise
                fault = self._watch.leave(device, look=attempt is not None and not attempt.abandoned)
                faults += [(device.number, fault)] if fault else []
        if faults or taken:
            return Over(task, placement, faults=tuple(faults), taken=tuple(taken))
        if attempt is not None and attempt.end is not None:
            self._journal.append(attempt.end)
        return Over(task, placement, attempt)

    def _locks_of(self, task: Task, placement: Placement) -> tuple[Path, ...]:
        """Name the locks of the GPUs that a lane may share; one that has them for itself asks nobody."""
        if task.exclusive or not placement.devices:
            return ()
        self._locks.mkdir(parents=True, exist_ok=True)
        return tuple(self._locks / f"gpu-{files.key_of(device.token)}.lock" for device in placement.devices)


def failure_of(error: Exception, cell: Cell) -> Failure:
    """Say what went wrong in one line; what no user could have caused is printed whole on standard error."""
    if isinstance(error, UnsupportedHereError):
        return Failure(Verdict.UNSUPPORTED, str(error))
    if isinstance(error, UnavailableError) and not isinstance(error, NoRoomError) and cell.may_be_unavailable:
        return Failure(Verdict.UNAVAILABLE, str(error))
    if isinstance(error, HarnessError):
        return Failure(Verdict.ERROR, str(error), wrong_call=error.status == Exit.WRONG_CALL)
    traceback.print_exception(error)
    return Failure(Verdict.ERROR, f"the harness failed: {type(error).__name__}: {error}")
