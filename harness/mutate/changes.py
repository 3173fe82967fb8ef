"""A patch as runs of changed lines, and back: what is left when some of them are left out."""

from __future__ import annotations

import io
import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.core import git

FILE_HEADER = re.compile(r"diff --git a/(?P<path>\S+) b/(?P=path)")
HUNK_HEADER = re.compile(r"@@ -(?P<start>\d+)(?:,(?P<old>\d+))? \+\d+(?:,(?P<new>\d+))? @@")
#: The header of a file that is added or removed, as `git diff --no-index` writes it.
ONE_SIDED = re.compile(r"^diff --git [ab]/(\S+) [ab]/\1$", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """One run of changed lines."""

    path: str  # of the file, in the upstream repository
    hunk: int  # which one of the file it stands in, from 1
    start: int  # how many lines of the old file come before it
    removed: tuple[str, ...] = ()  # the lines that go, each with its line end
    added: tuple[str, ...] = ()


def _lines(text: str) -> list[str]:
    """Split a text as git does: a form feed ends no line."""
    return [*io.StringIO(text, newline="\n")]


def _patch_lines(text: str) -> Iterator[str]:
    """Yield the lines of a patch; the last of a file has no line end where the patch says so."""
    for line, following in itertools.pairwise([*_lines(text), ""]):
        if not line.startswith("\\"):
            yield line.rstrip("\n") if following.startswith("\\") else line


def _hunk(lines: Iterator[str], old: int, new: int) -> Iterator[str]:
    """Yield the lines of a hunk that holds so many of the old and of the new file."""
    for line in lines if old or new else ():
        yield line
        old, new = old - (line[:1] != "+"), new - (line[:1] != "-")
        if old <= 0 and new <= 0:
            return


def parse(text: str) -> dict[str, list[Change]]:
    """Read a patch: the runs of changed lines of each file, in their order."""
    found: dict[str, list[Change]] = {}
    path, hunk = "", 0
    lines = _patch_lines(text)
    for line in lines:
        if header := FILE_HEADER.match(line):
            path, hunk = header["path"], 0
            found[path] = []
        elif path and (at := HUNK_HEADER.match(line)):
            old, hunk = int(at["old"] or 1), hunk + 1
            start = int(at["start"]) - bool(old)  # a hunk without old lines stands behind the line that it names
            for is_change, run in itertools.groupby(
                _hunk(lines, old, int(at["new"] or 1)), lambda one: one[:1] in {"-", "+"}
            ):
                some = list(run)
                removed = tuple(one[1:] for one in some if one[:1] != "+")
                if is_change:
                    added = tuple(one[1:] for one in some if one[:1] == "+")
                    found[path].append(Change(path, hunk, start, removed, added))
                start += len(removed)
    return found


def applied(old: str, changes: Iterable[Change]) -> str:
    """Return a file with some runs of its lines changed; ValueError: it does not hold the lines that go."""
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


def lay(folder: Path, texts: Mapping[str, str | None]) -> None:
    """Write files into a folder by their paths in it; one whose text is None is not there."""
    folder.mkdir(exist_ok=True)
    for path, text in texts.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(text.encode())


def written(head: str, old: Mapping[str, str | None], new: Mapping[str, str | None]) -> str:
    """Write a patch as git does, with whole blob hashes: what stands before it, and the files that differ."""
    with tempfile.TemporaryDirectory(prefix="changes-") as name:
        folder = Path(name)
        lay(folder / "a", {path: text for path, text in old.items() if text != new[path]})
        lay(folder / "b", {path: text for path, text in new.items() if text != old[path]})
        options = ["--no-index", "--no-prefix", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "-U3"]
        git.run(["diff", *options, "--output=diff", "a", "b"], folder, plain=True)
        text = (folder / "diff").read_bytes().decode()
        # git names a file that one side lacks twice by the other side
        return head + ONE_SIDED.sub(r"diff --git a/\1 b/\1", text)
