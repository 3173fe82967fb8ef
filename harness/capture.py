"""What is kept of a probe's output: its protocol lines, and the head and tail of everything."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from harness.words import BITWISE_IDENTICAL, PROBE_STATUS

HEAD = 1 << 17
TAIL = 1 << 17
LONGEST_LINE = 1 << 20
MOST_LINES = 20_000
VERDICTS = frozenset(PROBE_STATUS)
WORDS = frozenset({"TARGET", "UPSTREAM", "CHECK", "FIGURE", "OUTPUT", BITWISE_IDENTICAL}) | VERDICTS


class Lines:
    """Keeps the protocol lines of standard output, and what stood after a verdict."""

    def __init__(self, claims: Iterable[str] = ()) -> None:
        """Begin with no output; `claims` are words of the protocol besides the fixed ones."""
        words = "|".join(sorted(WORDS | set(claims)))
        self._pattern = re.compile(rf"^(?:{words})(?![A-Za-z0-9_]).*$".encode(), re.MULTILINE)
        self.kept: list[str] = []
        self.after_verdict = ""
        self.too_many = False
        self._rest = b""
        self._ended = False

    def feed(self, data: bytes) -> None:
        """Take the next piece of standard output."""
        block, _, self._rest = (self._rest + data).rpartition(b"\n")
        self._block(block)
        self._rest = self._rest[:LONGEST_LINE]

    def finish(self) -> None:
        """Take a last line without a line end."""
        self._block(self._rest)
        self._rest = b""

    def _block(self, block: bytes) -> None:
        if self._ended:
            self._note(block)
        for match in self._pattern.finditer(block):
            line = match[0].decode(errors="replace").rstrip()
            if len(self.kept) == MOST_LINES:
                self.too_many = True
                return
            self.kept.append(line)
            if line.split(None, 1)[0].split("{")[0] in VERDICTS and not self._ended:
                self._ended = True
                self._note(block[match.end() :])

    def _note(self, block: bytes) -> None:
        text = block.strip()
        if text and not self.after_verdict:
            self.after_verdict = text[:200].decode(errors="replace")


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
