"""Progress on standard error: live lines on a terminal, one line an event elsewhere."""

from __future__ import annotations

import contextlib
import time
from typing import Self, TextIO

from rich import progress
from rich.console import Console

from harness.core.terminal import visible


def duration(seconds: float) -> str:
    """Write a duration for people: ``45 s``, ``3 min 20 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Progress:
    """Tells what is being done now, and what is left."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Begin silently; without a stream nothing is ever shown."""
        self._console = Console(file=stream, highlight=False, quiet=stream is None)
        self._live = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.fields[count]}{task.description}", markup=False),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[of]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._whole = self._live.add_task("starting", count="", of="")
        self._lanes: dict[str, progress.TaskID] = {}
        self._started = time.monotonic()
        self._total = self._ended = 0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, total: int, seconds: float | None) -> None:
        """Say how many lanes there are, and how long they take at least, where that is known."""
        self._total, self._ended, self._started = total, 0, time.monotonic()
        self._live.reset(self._whole, count=self._count(), of=_of(seconds))
        if total > 1 and seconds is not None:
            self.tell(f"{total} lanes, about {duration(seconds)} by the times of the receipts")

    def _count(self) -> str:
        return f"{self._ended} of {self._total} lanes; " if self._total else ""

    def tell(self, text: str) -> None:
        """Say what is being done."""
        text = visible(text)
        self._live.update(self._whole, description=text, count=self._count())
        if self._live.disable:
            seconds = time.monotonic() - self._started
            with contextlib.suppress(OSError):  # nobody can read it: that ends no lane
                self._console.print(f"[{seconds:6.1f} s] {text}", markup=False, soft_wrap=True)

    def start(self, key: str, name: str, expected: float | None) -> None:
        """Note that something runs from now on; `expected` is in seconds."""
        self._lanes[key] = self._live.add_task(f"  {name}", count="", of=_of(expected))

    def end(self, key: str, line: str) -> None:
        """Note that it is over, and say so where there is something to say."""
        if key in self._lanes:
            self._live.remove_task(self._lanes.pop(key))
        self._ended += bool(line)
        if line:
            self.tell(line)


def _of(seconds: float | None) -> str:
    return f"of about {duration(seconds)}" if seconds else ""
