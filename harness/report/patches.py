"""Which patch a report is about, and how it is shown."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from harness.core import markdown
from harness.pack.model import Pack
from harness.report import links, reports

#: Bytes of a patch that still stands in the report itself.
MOST_INLINE = 2048
NAME = re.compile(r"[A-Za-z0-9][\w.-]*\.patch")
INDEX = re.compile(r"(?m)^index [0-9a-f]{40}\.\.[0-9a-f]{40}.*\n")
FILE = re.compile(r"(?m)^diff --git a/(?P<path>\S+) b/\S+$")


@dataclass(frozen=True)
class Change:
    """How many lines a patch adds to a file and removes from it."""

    path: str
    added: int
    removed: int


def for_project(pack: Pack, name: str) -> Path | None:
    """Return the patch for the project of that name; None where the pack has none for it.

    ask.patch, or whatever [ask] calls it, is for the project whose tree is judged, and so is fix.patch; any other
    project's is fix.NAME.patch.
    """
    if name == reports.judged(pack) and not pack.definition.has_patch:
        return None
    if name == reports.judged(pack):
        return pack.ask_patch or pack.patch
    other = pack.folder / f"fix.{name}.patch"
    return other if name and other.exists() else None


def of_pack(pack: Pack) -> Path | None:
    """Return the patch that upstream is asked to merge; None where the pack has none."""
    return (pack.ask_patch or pack.patch) if pack.definition.has_patch else None


def test_for_project(pack: Pack, name: str) -> Path | None:
    """Return the test for that project's own suite; None where the pack has none."""
    path = pack.upstream_test_patch if name == reports.judged(pack) else pack.folder / f"upstream_test.{name}.patch"
    return path if path.exists() else None


def none_for(name: str) -> str:
    """Say that a pack has no patch for a project."""
    return f"There is no patch for {name or 'this project'} in this report."


def changes(text: str) -> list[Change]:
    """Count the lines that a patch adds and removes, file by file."""
    starts = [*FILE.finditer(text)]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    found = []
    for match, end in zip(starts, ends, strict=True):
        # What stands before the first hunk has lines that begin with --- and +++, too.
        hunks = text[match.end() : end].partition("\n@@")[2]
        found.append(Change(match["path"], _count(hunks, "+"), _count(hunks, "-")))
    return found


def _count(hunks: str, sign: str) -> int:
    return sum(line.startswith(sign) for line in hunks.split("\n")[1:])


def diff_of(text: str) -> str:
    """Return the diff of a patch without its message and its index lines."""
    found = FILE.search(text)
    return INDEX.sub("", text[found.start() :] if found else text)


def place(pack: Pack, path: Path) -> str:
    """Return the path of a pack's file in this repository."""
    return f"packs/{pack.name}/{path.name}"


def shown(pack: Pack, path: Path) -> str:
    """Show a patch: its diff where it is small, else what it changes and where it is; the report is its message."""
    text = path.read_text(encoding="utf-8")
    if len(text.encode()) <= MOST_INLINE:
        return f"{path.name}, {_for(pack, path)}:\n{markdown.fenced(diff_of(text), 'diff')}"
    lines = [f"{one.path} | +{one.added} -{one.removed}" for one in changes(text)]
    return f"{links.to(place(pack, path))}, {_for(pack, path)}:\n{markdown.fenced(chr(10).join(lines), 'text')}"


def _for(pack: Pack, path: Path) -> str:
    """Say which tree a patch is for, as far as pack.toml says it."""
    definition = pack.definition
    asked, head, upstream = definition.ask, definition.head, definition.upstream
    if asked is not None and path == pack.ask_patch and asked.origin:
        return f"for commit {asked.origin.rpartition('@')[2][:12]} of {asked.date}"
    if head is not None and path == pack.own_head_patch:
        return f"for commit {head.commit[:12]} of {head.date}"
    if path == pack.patch:
        return f"for {upstream.package} {upstream.version or f'commit {upstream.commit[:12]} of {upstream.date}'}"
    return "in full there" if len(path.read_bytes()) > MOST_INLINE else "in full"
