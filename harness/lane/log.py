"""The log of a lane: the head and tail of everything that its processes print."""

from __future__ import annotations

from pathlib import Path
from typing import Self

#: Bytes of a log's beginning and of its end that are kept.
HEAD = 1 << 17
TAIL = 1 << 17
#: Bytes after which an unfinished line is written.
LONGEST_LINE = 1 << 20


class Log:
    """Writes both streams to one file in whole lines: the head at once, the tail at the end."""

    def __init__(self, path: Path) -> None:
        """Open the log file at `path`."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("wb")
        self._rest: dict[int, bytes] = {}
        self._written = 0
        self._tail = bytearray()
        self._dropped = 0

    def feed(self, source: int, data: bytes) -> None:
        """Take a piece of the stream `source`; its last, unfinished line waits for its end."""
        whole, newline, rest = (self._rest.get(source, b"") + data).rpartition(b"\n")
        if len(rest) > LONGEST_LINE:
            whole, newline, rest = whole + newline + rest, b"", b""
        self._rest[source] = rest
        self._write(whole + newline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Write what waits, a note on what was dropped, and the tail."""
        for rest in self._rest.values():
            self._write(rest + b"\n" if rest else b"")
        if self._dropped:
            self._stream.write(f"\n[... {self._dropped} bytes are left out here ...]\n".encode())
        self._stream.write(self._tail)
        self._stream.close()

    def _write(self, data: bytes) -> None:
        head = data[: max(0, HEAD - self._written)]
        if head:
            self._stream.write(head)
            self._stream.flush()
            self._written += len(head)
        self._tail += data[len(head) :]
        surplus = len(self._tail) - TAIL
        if surplus > 0:
            del self._tail[:surplus]
            self._dropped += surplus
