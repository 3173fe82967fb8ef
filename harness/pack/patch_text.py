"""The text of a patch: the files that it changes, and the content that it gives them."""

import functools
import hashlib
import re
from dataclasses import dataclass

from harness.core import files

FILE_PATTERN = re.compile(
    r"^diff --git a/(?P<path>\S+) b/(?P=path)\n(?:(?:new|deleted) file mode \d+\n|old mode \d+\nnew mode \d+\n)?"
    r"(?:index (?P<before>[0-9a-f]{40})\.\.(?P<after>[0-9a-f]{40})(?: \d+)?\n)?",
    re.MULTILINE,
)
NO_BLOB = "0" * 40


@dataclass(frozen=True)
class PatchedFile:
    """One file that a patch changes, with git's blob hashes of before and after; empty if abbreviated."""

    path: str
    before: str
    after: str


@functools.lru_cache(maxsize=8)  # the fix of a pack is read once for all its mutants
def parse(text: str) -> tuple[PatchedFile, ...]:
    """List the files of a patch in the order in which it names them; its paths are the repository's."""
    matches = FILE_PATTERN.finditer(text)
    return tuple(PatchedFile(match["path"], match["before"] or "", match["after"] or "") for match in matches)


def blob(content: str | bytes | None) -> str:
    """Return git's blob hash of a file's content, or `NO_BLOB` for a missing file (None)."""
    if content is None:
        return NO_BLOB
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def result_hash(*texts: str) -> str:
    """Return one sha256 for the result of patches that are applied in turn; empty if a blob hash is abbreviated.

    It covers each changed file with its last blob hash: equal results have equal hashes, however the patches divide
    them. The blob hashes are those of the index lines, without the tree; `check` compares them with the tree.
    """
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for file in (file for text in texts for file in parse(text)):
        if not file.after:
            return ""
        before.setdefault(file.path, file.before)
        after[file.path] = file.after
    differ = (f"{path} {after[path]}\n" for path in sorted(after) if after[path] != before[path])
    return files.sha256_bytes("".join(differ).encode())
