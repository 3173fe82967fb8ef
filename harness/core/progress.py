"""Progress on standard error: live lines on a terminal, one line an event elsewhere."""

import contextlib
import time
from typing import Self, TextIO

from rich import progress
from rich.console import Console
from rich.table import Column

from harness.core.terminal import visible


def format_duration(seconds: float) -> str:
    """Write a duration for people: ``45 s``, ``3 min 20 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Progress:
    """Shows the current step and the lanes that run."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Show nothing yet, and never anything without a stream."""
        self._console = Console(file=stream, highlight=False, quiet=stream is None)
        self._live = progress.Progress(
            progress.SpinnerColumn(),
            # On a narrow terminal the text wraps; times are never cut.
            progress.TextColumn("{task.fields[count]}{task.description}", markup=False, table_column=Column()),
            progress.TimeElapsedColumn(table_column=Column(no_wrap=True)),
            progress.TextColumn("{task.fields[estimate]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._summary = self._live.add_task("starting", count="", estimate="")
        self._tasks: dict[str, progress.TaskID] = {}
        self._started = time.monotonic()
        self._total = self._ended = 0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, total: int, seconds: float | None) -> None:
        """Begin to count `total` lanes, which take at least so many seconds; None: that is not known."""
        self._total, self._ended, self._started = total, 0, time.monotonic()
        self._live.reset(self._summary, count=self._count(), estimate=_estimate(seconds))
        if total > 1 and seconds is not None:
            self.tell(f"{total} lanes, about {format_duration(seconds)} by the times of the receipts")

    def _count(self) -> str:
        return f"{self._ended} of {self._total} lanes; " if self._total else ""

    def tell(self, text: str) -> None:
        text = visible(text)
        self._live.update(self._summary, description=text, count=self._count())
        if self._live.disable:
            seconds = time.monotonic() - self._started
            with contextlib.suppress(OSError):  # a closed stream ends no lane
                self._console.print(f"[{seconds:6.1f} s] {text}", markup=False, soft_wrap=True)

    def start(self, key: str, name: str, expected: float | None) -> None:
        """Show that a lane runs; `expected` is its time in seconds."""
        self._tasks[key] = self._live.add_task(f"  {name}", count="", estimate=_estimate(expected))

    def end(self, key: str, line: str) -> None:
        """Show that a lane ended; with an empty `line` it is neither told nor counted."""
        if key in self._tasks:
            self._live.remove_task(self._tasks.pop(key))
        self._ended += bool(line)
        if line:
            self.tell(line)


def _estimate(seconds: float | None) -> str:
    return f"of about {format_duration(seconds)}" if seconds else ""
