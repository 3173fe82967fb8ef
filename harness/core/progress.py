"""Progress on standard error: live lines on a terminal, one line an event elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from harness.core.terminal import visible


def duration(seconds: float) -> str:
    """Write a duration for people: ``45 s``, ``3 min 20 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Progress:
    """Tells what is being done now, and what is left."""

    def __init__(self, stream: TextIO) -> None:
        """Begin silently."""
        self._console = Console(file=stream, highlight=False)
        self._live: Live | None = None
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._running: dict[str, tuple[float, str, str]] = {}  # when each began, its name, how long it may last
        self._last = "starting"
        self._total = self._ended = 0
        self._seconds: float | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            spinner = Spinner("dots")
            self._live = Live(console=self._console, get_renderable=lambda: self._shown(spinner), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(Text(""), refresh=True)
            self._live.transient = True
            self._live.stop()

    def _shown(self, spinner: Spinner) -> Group:
        now = time.monotonic()
        with self._lock:
            left = "" if self._seconds is None else f", {self._left(now)}"
            count = f"{self._ended} of {self._total} lanes{left}; " if self._total else ""
            said = [f"  {name}: {duration(now - began)}{of}" for began, name, of in self._running.values()]
            first, *lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in (count + self._last, *said)]
            spinner.update(text=first)
        return Group(spinner, *lines)

    def _left(self, now: float) -> str:
        seconds = (self._seconds or 0.0) - (now - self._started)
        return f"about {duration(seconds)} left" if seconds > 0 else "longer than expected"

    def begin(self, total: int, seconds: float | None) -> None:
        """Say how many lanes there are, and how long they take at least, where that is known."""
        with self._lock:
            self._total, self._seconds, self._started = total, seconds, time.monotonic()
        if total > 1 and seconds is not None:
            self.tell(f"{total} lanes, about {duration(seconds)} by the times of the receipts")

    def tell(self, text: str) -> None:
        """Say what is being done."""
        text = visible(text)
        with self._lock:
            self._last = text
        if self._live is None:
            seconds = time.monotonic() - self._started
            with contextlib.suppress(OSError):  # nobody can read it: that ends no lane
                self._console.print(f"[{seconds:6.1f} s] {text}", markup=False, soft_wrap=True)

    def start(self, key: str, name: str, expected: float | None) -> None:
        """Note that something runs from now on; `expected` is in seconds."""
        with self._lock:
            self._running[key] = time.monotonic(), name, f" of about {duration(expected)}" if expected else ""

    def end(self, key: str, line: str) -> None:
        """Note that it is over, and say so where there is something to say."""
        with self._lock:
            self._running.pop(key, None)
            self._ended += bool(line)
        if line:
            self.tell(line)
