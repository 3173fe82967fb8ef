"""Threads that lay out cells and run lanes; what a result leads to happens in the main thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.core import files
from harness.core.errors import HarnessError, NoRoomError, UnavailableError, UnreachableError, UnsupportedHereError
from harness.core.words import Exit, Verdict
from harness.host.gpu_health import GpuWatch
from harness.host.gpus import Device
from harness.lane.record import LaneEnd
from harness.schedule.journal import Journal
from harness.schedule.lane_runner import Prepared, Runner, Stopped
from harness.schedule.queue import Placement
from harness.schedule.task import Task
from harness.verdict.cell import Cell

#: How often, in seconds, the main thread looks up from its wait: a signal that comes just before the wait begins, or
#: that the kernel hands to another thread, does not end it (Python runs handlers between bytecodes of the main thread).
LOOK_UP = 0.5
#: What a result leads to, in the main thread.
Then = Callable[[], None]


class Workers:
    """Threads at work. None of them outlives the command: they are daemons, and their processes end with it."""

    def __init__(self) -> None:
        self.running = 0
        self._awaited: list[threading.Thread] = []
        self._results: queue.SimpleQueue[Then] = queue.SimpleQueue()

    def start(self, work: Callable[[], Then | None], *, awaited: bool = True) -> None:
        """Let a thread do some work, which never raises; an interrupted command waits for what is `awaited`."""
        self.running += 1
        thread = threading.Thread(target=lambda: self._results.put(work() or (lambda: None)), daemon=True)
        if awaited:
            self._awaited = [*(other for other in self._awaited if other.is_alive()), thread]
        thread.start()

    def next(self) -> Then:
        """Wait for the next result."""
        while True:
            with contextlib.suppress(queue.Empty):
                then = self._results.get(timeout=LOOK_UP)
                self.running -= 1
                return then

    def drain(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until no lane runs and its receipt is written.

        The threads themselves are asked: an interruption can hit between a result and its being counted.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            alive = any(thread.is_alive() for thread in self._awaited)
            try:
                then = self._results.get(timeout=0.05 if alive else 0.0)
            except queue.Empty:
                if not alive:
                    return
            else:
                then()


@dataclass(frozen=True)
class Failure:
    """Why a cell could not be laid out, or a lane could not begin."""

    verdict: Verdict  # that this is
    reason: str  # in one line
    #: whether the command itself is to blame: it names a folder or a set that is not there
    wrong_call: bool = False


@dataclass(frozen=True)
class Unfit:
    """A lane on GPUs that make what it says worthless."""

    faults: tuple[tuple[str, str], ...] = ()  # of the GPUs, by their numbers
    taken: tuple[str, ...] = ()  # the numbers of GPUs that another program uses, for a lane that measures


@dataclass(frozen=True)
class LaneWork:
    """The work of one command: every failure is a result."""

    work: Runner  # lays out cells and runs lanes
    journal: Journal  # takes each end before anybody else hears of it
    finish: Callable[[Cell], None]  # called after each end, such as to write the receipt of its cell
    watch: GpuWatch | None  # looks at the GPUs before and after lanes; None: nobody does
    locks: Path  # the folder of the files that lanes lock while they share a GPU

    def lay_out(self, cell: Cell) -> Prepared | Failure:
        """Lay out what the lanes of a cell need."""
        try:
            return self.work.prepare(cell)
        except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
            return failure_of(error, cell)

    def run(self, task: Task, prepared: Prepared, placement: Placement) -> LaneEnd | Stopped | Failure | Unfit:
        """Run a lane on GPUs that are healthy before it and after it."""
        try:
            found = self._run(task, prepared, placement)
            if isinstance(found, LaneEnd):
                self.journal.append(found)
        except Exception as error:  # noqa: BLE001 - likewise
            return failure_of(error, task.cell)
        return found

    def _run(self, task: Task, prepared: Prepared, placement: Placement) -> LaneEnd | Stopped | Unfit:
        shared = () if task.exclusive else placement.devices  # a lane that has its GPUs for itself asks nobody
        locks = tuple(self.locks / f"gpu-{files.key_of(device.token)}.lock" for device in shared)
        if locks:
            self.locks.mkdir(parents=True, exist_ok=True)
        watch = self.watch
        if watch is None:
            return self.work.attempt(task, prepared, placement, locks)
        entered: list[Device] = []
        faults, taken = [], []
        for device in placement.devices:
            fault, why = watch.enter(device, measures=task.cell.measures)
            faults += [(device.number, fault)] if fault else []
            taken += [device.number] if why else []
            entered += [] if fault or why else [device]
        found: LaneEnd | Stopped = Stopped.ABANDONED
        try:
            if not faults and not taken:
                found = self.work.attempt(task, prepared, placement, locks)
        finally:
            for device in entered:
                fault = watch.leave(device, look=found != Stopped.ABANDONED)
                faults += [(device.number, fault)] if fault else []
        return Unfit(tuple(faults), tuple(taken)) if faults or taken else found

    def after(self, cell: Cell) -> None:
        """Do what is done after a lane's end; the receipt is written, and its failure told, once more in the end."""
        try:
            self.finish(cell)
        except Exception as error:  # noqa: BLE001 - likewise
            failure_of(error, cell)


def failure_of(error: Exception, cell: Cell) -> Failure:
    """Say what went wrong in one line; what no user could have caused is printed whole on standard error."""
    if isinstance(error, UnsupportedHereError):
        return Failure(Verdict.UNSUPPORTED, str(error))
    is_outside = isinstance(error, UnavailableError) and not isinstance(error, NoRoomError) and cell.may_be_unavailable
    if is_outside or (isinstance(error, UnreachableError) and cell.source.is_pinned):
        return Failure(Verdict.UNAVAILABLE, str(error))
    if isinstance(error, HarnessError):
        return Failure(Verdict.ERROR, str(error), wrong_call=error.status == Exit.WRONG_CALL)
    traceback.print_exception(error)
    return Failure(Verdict.ERROR, f"the harness failed: {type(error).__name__}: {error}")
