"""The crew: threads that lay out cells and run lanes, and tell the engine what came of it."""

from __future__ import annotations

import queue
import threading
import traceback
from dataclasses import dataclass
from typing import Protocol

from harness.errors import HarnessError
from harness.sweep.cell import Cell, Task
from harness.sweep.journal import Journal
from harness.sweep.nvml import Device
from harness.sweep.workshop import Attempt

#: Threads that fetch, unpack and patch ahead of the lanes.
WARMERS = 4


class Work(Protocol):
    """What a crew does; `workshop.Workshop` is the real one."""

    def warm(self, cell: Cell) -> None:
        """Lay out what the lanes of a cell need."""

    def attempt(self, task: Task, device: Device | None) -> Attempt:
        """Run a lane to its end."""

    def settle(self, cell: Cell) -> None:
        """Write the receipt of a cell if that was its last lane."""


@dataclass(frozen=True)
class LaidOut:
    """A cell is laid out, or cannot be."""

    cell: Cell
    error: str = ""


@dataclass(frozen=True)
class Over:
    """A lane is over: its attempt, or why it could not begin."""

    task: Task
    device: Device | None
    attempt: Attempt | None = None
    error: str = ""


@dataclass(frozen=True)
class Settled:
    """What had to be done behind a lane's end is done."""


class Crew:
    """Threads at work. None of them outlives the command: they are daemons, and their processes end with it."""

    def __init__(self, work: Work, journal: Journal) -> None:
        """Begin with nobody at work."""
        self.running = 0
        self._warming = self._settling = 0
        self._work, self._journal = work, journal
        self._messages: queue.SimpleQueue[LaidOut | Over | Settled] = queue.SimpleQueue()

    @property
    def busy(self) -> bool:
        """Whether a message is still to come."""
        return bool(self.running or self._warming or self._settling)

    @property
    def busy_with_lanes(self) -> bool:
        """Whether a lane runs, or its receipt is being written."""
        return bool(self.running or self._settling)

    def lay_out(self, cells: list[Cell]) -> None:
        """Lay out cells in this order, a few at once."""
        waiting: queue.SimpleQueue[Cell | None] = queue.SimpleQueue()
        for cell in cells:
            waiting.put(cell)
        self._warming = len(cells)
        for _ in range(min(WARMERS, len(cells))):
            waiting.put(None)
            threading.Thread(target=self._warm, args=(waiting,), daemon=True).start()

    def launch(self, task: Task, device: Device | None) -> None:
        """Run a lane."""
        self.running += 1
        threading.Thread(target=self._attempt, args=(task, device), daemon=True).start()

    def next(self, timeout: float | None = None) -> LaidOut | Over | Settled:
        """Wait for the next message; raise queue.Empty where none came within `timeout` seconds."""
        message = self._messages.get(timeout=timeout)
        if isinstance(message, LaidOut):
            self._warming -= 1
        elif isinstance(message, Settled):
            self._settling -= 1
        else:
            self.running -= 1
            self._settling += message.attempt is not None
        return message

    def _warm(self, cells: queue.SimpleQueue[Cell | None]) -> None:
        while (cell := cells.get()) is not None:
            try:
                self._work.warm(cell)
                self._messages.put(LaidOut(cell))
            except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
                self._messages.put(LaidOut(cell, _reason(error)))

    def _attempt(self, task: Task, device: Device | None) -> None:
        try:
            attempt = self._work.attempt(task, device)
            if attempt.end is not None:
                self._journal.append(attempt.end)
            self._messages.put(Over(task, device, attempt))
        except Exception as error:  # noqa: BLE001 - likewise
            self._messages.put(Over(task, device, error=_reason(error)))
            return
        try:
            if attempt.end is not None:
                self._work.settle(task.cell)
        except Exception as error:  # noqa: BLE001 - the receipt is written, and its failure told, in the end
            _reason(error)
        finally:
            self._messages.put(Settled())


def _reason(error: Exception) -> str:
    """Say what went wrong in one line; what no user could have caused is printed whole on standard error."""
    if isinstance(error, HarnessError):
        return str(error)
    traceback.print_exception(error)
    return f"the harness failed: {type(error).__name__}: {error}"
