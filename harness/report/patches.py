"""How a patch is shown: its diff, folded away where it is long."""

from __future__ import annotations

import re
from pathlib import Path

from harness.core import markdown

#: Lines of a diff, added and removed, that stand in a report unfolded.
MOST_INLINE = 25
NAME = re.compile(r"[A-Za-z0-9][\w.-]*\.patch")
INDEX = re.compile(r"(?m)^index [0-9a-f]{40}\.\.[0-9a-f]{40}.*\n")
FILE = re.compile(r"(?m)^diff --git a/(?P<path>\S+) b/\S+$")
CHANGED = re.compile(r"(?m)^(?:\+(?!\+\+ )|-(?!-- ))")


def shown(path: Path) -> str:
    """Show the diff of a patch."""
    text = path.read_text(encoding="utf-8")
    start = FILE.search(text)
    diff = INDEX.sub("", text[start.start() :] if start else text)
    changed = len(CHANGED.findall(diff))
    fence = markdown.fenced(diff, "diff")
    return fence if changed <= MOST_INLINE else markdown.details(f"The patch, {changed} lines", fence).strip()
