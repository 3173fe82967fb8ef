"""Progress on standard error: a live line on a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
from typing import Self, TextIO

from rich.console import Console
from rich.status import Status


class Progress:
    """Tells what is being done now."""

    def __init__(self, stream: TextIO) -> None:
        """Begin silently."""
        self._console = Console(file=stream, highlight=False)
        self._status: Status | None = None
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        """Begin the live line where there is a terminal."""
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the live line."""
        if self._status is not None:
            self._status.stop()

    def tell(self, text: str) -> None:
        """Say what is being done."""
        if self._status is not None:
            self._status.update(text)
        else:
            seconds = time.monotonic() - self._started
            self._console.print(f"[{seconds:6.1f} s] {text}", markup=False, soft_wrap=True)
