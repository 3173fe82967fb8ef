"""What is kept of a probe's output: its protocol lines, and the head and tail of everything."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harness.core.words import BITWISE_IDENTICAL, PROBE_STATUS

HEAD = 1 << 17
TAIL = 1 << 17
LONGEST_LINE = 1 << 20
MOST_LINES = 20_000
#: Of all protocol lines together.
MOST_BYTES = 1 << 25
#: What no terminal shows, so that a line behind it looks as if it began there: control characters, a byte order mark.
HIDING = bytes({*range(9), *range(11, 32), 127, *b"\xef\xbb\xbf"})
VERDICTS = frozenset(PROBE_STATUS)
WORDS = frozenset({"TARGET", "UPSTREAM", "CHECK", "FIGURE", "OUTPUT", BITWISE_IDENTICAL}) | VERDICTS


@dataclass(frozen=True)
class KeptLine:
    """One protocol line of standard output.

    Attributes:
        number: of the line, from 1.
        word: of the protocol, with which it begins.
        data: the whole line; empty where `problem` says why it is not taken.
        problem: what cannot be seen in the line alone: it is too long, or hidden behind something.

    """

    number: int
    word: str
    data: bytes
    problem: str = ""


class Lines:
    """Keeps the protocol lines of standard output, each whole or not at all, and what stood after a verdict."""

    def __init__(self, claims: Iterable[str] = ()) -> None:
        """Begin with no output; `claims` are words of the protocol besides the fixed ones."""
        words = rf"(?P<word>{'|'.join(re.escape(word) for word in sorted(WORDS | set(claims)))})".encode()
        self._pattern = re.compile(rb"^" + words + rb"(?![A-Za-z0-9_]).*$", re.MULTILINE)
        hiding = rb"[" + re.escape(HIDING) + rb"]"
        self._hidden = re.compile(rb"(?:^" + hiding + rb"|\r)" + hiding + rb"*" + words + rb"[ \t]*\{", re.MULTILINE)
        self.kept: list[KeptLine] = []
        self.after_verdict = ""
        self.too_many = False
        self._rest = b""
        self._bytes = 0
        self._line = 1  # the number of the line that comes next
        self._overlong: str | None = None  # the word (or nothing) of the line that grew too long, until its end
        self._ended = False

    def feed(self, data: bytes) -> None:
        """Take the next piece of standard output."""
        if self._overlong is not None:
            _, newline, data = data.partition(b"\n")
            if not newline:
                return
            self._end_overlong()
        block, newline, self._rest = (self._rest + data).rpartition(b"\n")
        self._block(block + newline)
        if len(self._rest) > LONGEST_LINE:
            found = self._pattern.match(self._rest)
            self._overlong = found["word"].decode() if found else ""
            self._note(self._rest)
            self._rest = b""

    def finish(self) -> None:
        """Take a last line without a line end."""
        if self._overlong is not None:
            self._end_overlong()
        self._block(self._rest)
        self._rest = b""

    def _end_overlong(self) -> None:
        """Note a protocol line that was too long; any other line may be as long as it likes."""
        if self._overlong:
            self._keep(KeptLine(self._line, self._overlong, b"", f"it has more than {LONGEST_LINE} bytes"))
        self._overlong = None
        self._line += 1

    def _block(self, block: bytes) -> None:
        """Take whole lines."""
        self._note(block)
        first, counted, number = self._line, 0, self._line
        for match in self._pattern.finditer(block):
            number += block.count(b"\n", counted, match.start())
            counted = match.start()
            word, line = match["word"].decode(), match[0].rstrip(b" \t\r")
            overlong = f"it has more than {LONGEST_LINE} bytes" if len(line) > LONGEST_LINE else ""
            if not self._keep(KeptLine(number, word, b"" if overlong else line, overlong)):
                break
            if word in VERDICTS and not self._ended:
                self._ended = True
                self._note(block[match.end() :])
        self._line += block.count(b"\n")
        if len(block.translate(None, HIDING)) != len(block):
            for match in self._hidden.finditer(block):
                number = first + block.count(b"\n", 0, match.start())
                hidden = "it stands behind characters that no terminal shows, not at the beginning of a line"
                self._keep(KeptLine(number, match["word"].decode(), b"", hidden))

    def _keep(self, line: KeptLine) -> bool:
        self._bytes += len(line.data)
        self.too_many = self.too_many or len(self.kept) == MOST_LINES or self._bytes > MOST_BYTES
        if not self.too_many:
            self.kept.append(line)
        return not self.too_many

    def _note(self, block: bytes) -> None:
        """Keep the beginning of what stands after a verdict."""
        text = block.strip() if self._ended and not self.after_verdict else b""
        if text:
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
