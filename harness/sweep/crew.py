"""The crew: threads that lay out cells and run lanes, and tell the engine what came of it."""

from __future__ import annotations

import queue
import threading
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


@dataclass(frozen=True)
class LaidOut:
    """A cell is laid out, or cannot be."""

    cell: Cell
    error: HarnessError | None = None


@dataclass(frozen=True)
class Over:
    """A lane is over: its attempt, or why it could not begin."""

    task: Task
    device: Device | None
    attempt: Attempt | None = None
    error: HarnessError | None = None


class Crew:
    """Threads at work. None of them outlives the command: they are daemons, and their processes end with it."""

    def __init__(self, work: Work, journal: Journal) -> None:
        """Begin with nobody at work."""
        self.running = 0
        self._warming = 0
        self._work, self._journal = work, journal
        self._messages: queue.SimpleQueue[LaidOut | Over | BaseException] = queue.SimpleQueue()

    @property
    def busy(self) -> bool:
        """Whether a message is still to come."""
        return bool(self.running or self._warming)

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

    def next(self, timeout: float | None = None) -> LaidOut | Over:
        """Wait for the next message.

        Raises:
            queue.Empty: none came within `timeout` seconds.
            BaseException: whatever went wrong in a thread besides the errors that a user can mend.

        """
        message = self._messages.get(timeout=timeout)
        if isinstance(message, BaseException):
            raise message
        if isinstance(message, LaidOut):
            self._warming -= 1
        else:
            self.running -= 1
        return message

    def _warm(self, cells: queue.SimpleQueue[Cell | None]) -> None:
        while (cell := cells.get()) is not None:
            try:
                self._work.warm(cell)
                self._messages.put(LaidOut(cell))
            except HarnessError as error:
                self._messages.put(LaidOut(cell, error))
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                self._messages.put(error)

    def _attempt(self, task: Task, device: Device | None) -> None:
        try:
            attempt = self._work.attempt(task, device)
            if attempt.end is not None:
                self._journal.append(attempt.end)
            self._messages.put(Over(task, device, attempt))
        except HarnessError as error:
            self._messages.put(Over(task, device, error=error))
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._messages.put(error)
