"""A patch as runs of changed lines, and back: so that some of them can be left out."""

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
    hunk: int  # the number of its hunk in the file, from 1
    start: int  # the number of lines of the old file before it
    removed: tuple[str, ...] = ()  # lines with their line ends
    added: tuple[str, ...] = ()


def _lines(text: str) -> list[str]:
    """Split a text as git does: a form feed ends no line."""
    return [*io.StringIO(text, newline="\n")]


def _patch_lines(text: str) -> Iterator[str]:
    """Yield the lines of a patch; the last line of a file has no line end where the patch says so."""
    for line, following in itertools.pairwise([*_lines(text), ""]):
        if not line.startswith("\\"):
            yield line.rstrip("\n") if following.startswith("\\") else line


def _hunk(lines: Iterator[str], old: int, new: int) -> Iterator[str]:
    """Yield the lines of a hunk that holds `old` lines of the old file and `new` lines of the new one."""
    for line in lines if old or new else ():
        yield line
        old, new = old - (line[:1] != "+"), new - (line[:1] != "-")
        if old <= 0 and new <= 0:
            return


def parse(text: str) -> dict[str, list[Change]]:
    """Read a patch: the runs of changed lines of each file."""
    files: dict[str, list[Change]] = {}
    path, hunk = "", 0
    lines = _patch_lines(text)
    for line in lines:
        if header := FILE_HEADER.match(line):
            path, hunk = header["path"], 0
            files[path] = []
        elif path and (at := HUNK_HEADER.match(line)):
            old, hunk = int(at["old"] or 1), hunk + 1
            start = int(at["start"]) - bool(old)  # a hunk without old lines follows the line that it names
            hunk_lines = _hunk(lines, old, int(at["new"] or 1))
            for is_change, group in itertools.groupby(hunk_lines, lambda text: text[:1] in {"-", "+"}):
                run = list(group)
                removed = tuple(text[1:] for text in run if text[:1] != "+")
                if is_change:
                    added = tuple(text[1:] for text in run if text[:1] == "+")
                    files[path].append(Change(path, hunk, start, removed, added))
                start += len(removed)
    return files


def apply(old: str, changes: Iterable[Change]) -> str:
    """Return the text of a file with changes. ValueError: it does not hold the lines that they remove."""
    lines, new_lines, place = _lines(old), [], 0
    for change in sorted(changes, key=lambda change: change.start):
        end = change.start + len(change.removed)
        if tuple(lines[change.start : end]) != change.removed:
            raise ValueError(f"{change.path}: line {change.start + 1} is not what the patch takes away")
        new_lines += [*lines[place : change.start], *change.added]
        place = end
    return "".join([*new_lines, *lines[place:]])


def lines_in_new(changes: Iterable[Change]) -> set[int]:
    """Return the numbers of the added lines in the new file, from 1; of a removal, that of the line after it."""
    numbers: set[int] = set()
    moved = 0
    for change in changes:
        number = change.start + moved + 1
        numbers |= set(range(number, number + max(1, len(change.added))))
        moved += len(change.added) - len(change.removed)
    return numbers


def write_files(folder: Path, texts: Mapping[str, str | None]) -> None:
    """Write files into a folder by their paths in it; a file whose text is None is left out."""
    folder.mkdir(exist_ok=True)
    for path, text in texts.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(text.encode())


def format_patch(head: str, old: Mapping[str, str | None], new: Mapping[str, str | None]) -> str:
    """Return a patch as git writes it, with whole blob hashes: `head`, and the diff of the files that differ."""
    with tempfile.TemporaryDirectory(prefix="changes-") as name:
        folder = Path(name)
        write_files(folder / "a", {path: text for path, text in old.items() if text != new[path]})
        write_files(folder / "b", {path: text for path, text in new.items() if text != old[path]})
        options = ["--no-index", "--no-prefix", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "-U3"]
        git.run(["diff", *options, "--output=diff", "a", "b"], folder, plain=True)
        text = (folder / "diff").read_bytes().decode()
        # where a side lacks the file, git writes the name of the other side twice
        return head + ONE_SIDED.sub(r"diff --git a/\1 b/\1", text)
