"""A patch as runs of changed lines, and back: what is left when some of them are left out."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from harness.upstream.patch import blob

FILE_HEADER = re.compile(r"diff --git a/(?P<path>\S+) b/(?P=path)")
HUNK_HEADER = re.compile(r"@@ -(?P<start>\d+)(?:,(?P<count>\d+))? \+\d+(?:,\d+)? @@")
CONTEXT = 3


@dataclass(frozen=True)
class Change:
    """One run of changed lines."""

    path: str  # of the file, in the upstream repository
    hunk: int  # which one of the file it stands in, from 1
    start: int  # how many lines of the old file come before it
    removed: tuple[str, ...] = ()  # the lines that go, each with its line end
    added: tuple[str, ...] = ()


class _Reader:
    """Reads one patch line by line."""

    def __init__(self) -> None:
        self.found: dict[str, list[Change]] = {}
        self.path, self.hunk, self.old, self.left = "", 0, 0, (0, 0)
        self.run: Change | None = None
        self.sign = ""

    def read(self, line: str) -> None:
        header, at = FILE_HEADER.match(line), HUNK_HEADER.match(line)
        if header and not any(self.left):
            self.path, self.hunk = header["path"], 0
            self.found[self.path] = []
        elif at and self.path and not any(self.left):
            count = int(at["count"] or 1)
            # a hunk without old lines stands behind the line that it names, any other begins with it
            self.old, self.hunk, self.left = int(at["start"]) - bool(count), self.hunk + 1, (count, _new_count(line))
        elif self.hunk and line.startswith("\\"):
            self._cut_line_end()
        elif any(self.left):
            self._body(line[:1], line[1:])

    def _body(self, sign: str, text: str) -> None:
        old, new = self.left
        self.sign = sign
        if sign not in {"-", "+"}:
            self.run, self.old, self.left = None, self.old + 1, (old - 1, new - 1)
            return
        if self.run is None:
            self.run = Change(self.path, self.hunk, self.old)
            self.found[self.path].append(self.run)
        if sign == "-":
            self.run, self.old, self.left = (
                replace(self.run, removed=(*self.run.removed, text)),
                self.old + 1,
                (old - 1, new),
            )
        else:
            self.run, self.left = replace(self.run, added=(*self.run.added, text)), (old, new - 1)
        self.found[self.path][-1] = self.run
        if not any(self.left):
            self.run = None

    def _cut_line_end(self) -> None:
        """Take the line end off the line before: the file ends without one."""
        if self.sign not in {"-", "+"}:
            return
        last = self.found[self.path][-1]
        if self.sign == "+":
            last = replace(last, added=(*last.added[:-1], last.added[-1].rstrip("\n")))
        else:
            last = replace(last, removed=(*last.removed[:-1], last.removed[-1].rstrip("\n")))
        self.found[self.path][-1] = last
        self.run = last if any(self.left) else None


def _new_count(line: str) -> int:
    counted = re.search(r"\+\d+(?:,(\d+))? @@", line)
    return int(counted[1] or 1) if counted else 0


def _lines(text: str) -> list[str]:
    """Split a text as git does: a form feed ends no line."""
    return [*io.StringIO(text, newline="\n")]


def parse(text: str) -> dict[str, list[Change]]:
    """Read a patch: the runs of changed lines of each file, in their order."""
    reader = _Reader()
    for line in _lines(text):
        reader.read(line)
    return reader.found


def applied(old: str, changes: Iterable[Change]) -> str:
    """Return a file with some runs of its lines changed.

    Raises:
        ValueError: it does not hold the lines that go.

    """
    lines, made, place = _lines(old), [], 0
    for one in sorted(changes, key=lambda change: change.start):
        end = one.start + len(one.removed)
        if tuple(lines[one.start : end]) != one.removed:
            raise ValueError(f"{one.path}: line {one.start + 1} is not what the patch takes away")
        made += [*lines[place : one.start], *one.added]
        place = end
    return "".join([*made, *lines[place:]])


def lines_in_new(changes: Iterable[Change]) -> set[int]:
    """Return which lines of the new file, from 1, are added; where lines only go, the one that follows them."""
    found: set[int] = set()
    moved = 0
    for one in changes:
        first = one.start + moved + 1
        found |= set(range(first, first + max(1, len(one.added))))
        moved += len(one.added) - len(one.removed)
    return found


def _diff(path: str, old: str | None, new: str | None) -> str:
    """Write the change of one file as git does; None is a file that is not there."""
    mode = "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    index = f"index {blob(old)}..{blob(new)}" + ("\n" if mode else " 100644\n")
    names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
    before, after = (_lines(text or "") for text in (old, new))
    body = "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(before, after, *names, n=CONTEXT)
    )
    return f"diff --git a/{path} b/{path}\n{mode}{index}{body}"


def written(why: str, old: Mapping[str, str | None], new: Mapping[str, str | None]) -> str:
    """Write a patch: one line that says why it is wrong, and the files that differ; only that line where none does."""
    return f"{why}\n" + "".join(_diff(path, old[path], new[path]) for path in old if old[path] != new[path])
