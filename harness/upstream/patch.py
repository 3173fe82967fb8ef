"""Patches: applied to a copy of a tree, without fuzz or offset, and verified by content hash."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

from harness.core import files, git
from harness.core.cache import Cache
from harness.core.seal import Layout
from harness.pack.model import Upstream
from harness.upstream import tree
from harness.upstream.tree import Tree

FILE_PATTERN = re.compile(
    r"^diff --git a/(?P<path>\S+) b/(?P=path)\n(?:(?:new|deleted) file mode \d+\n|old mode \d+\nnew mode \d+\n)?"
    r"(?:index (?P<before>[0-9a-f]+)\.\.(?P<after>[0-9a-f]+)(?: \d+)?\n)?",
    re.MULTILINE,
)
FULL_BLOB = re.compile(r"[0-9a-f]{40}")
NO_BLOB = "0" * 40


class StalePatchError(Exception):
    """The patch does not apply cleanly to this tree; the text says where."""


@dataclass(frozen=True)
class PatchedFile:
    """One file that a patch changes, with git's blob hashes of before and after (empty where abbreviated)."""

    path: str
    before: str
    after: str


@functools.lru_cache(maxsize=8)  # the fix of a pack is read once for all its mutants
def parse(text: str) -> tuple[PatchedFile, ...]:
    """List the files of a patch in the order in which it names them; its paths are the repository's."""
    found = []
    for match in FILE_PATTERN.finditer(text):
        before, after = match["before"] or "", match["after"] or ""
        whole = FULL_BLOB.fullmatch(before) and FULL_BLOB.fullmatch(after)
        found.append(PatchedFile(match["path"], before if whole else "", after if whole else ""))
    return tuple(found)


def blob(text: str | None) -> str:
    """Return git's blob hash of a file's text; of None, a file that is not there, `NO_BLOB`."""
    return NO_BLOB if text is None else _blob(text.encode())


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def outcome(*texts: str) -> str:
    """Return the sha256 of what patches make of a tree, one applied after the other; empty where they do not say it.

    It hashes the files that differ from the tree, each with its blob hash, so that it is the same however the patches
    are written and divided. It is read from their index lines, without the tree; `check` compares those with the tree.
    """
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for file in (one for text in texts for one in parse(text)):
        if not file.after:
            return ""
        before.setdefault(file.path, file.before)
        after[file.path] = file.after
    differ = (f"{path} {after[path]}\n" for path in sorted(after) if after[path] != before[path])
    return files.sha256_bytes("".join(differ).encode())


def _why(folder: Path, patch: Path, arguments: list[str], message: str) -> str:
    backwards = git.run(["apply", "--check", "--reverse", *arguments, str(patch)], folder, plain=True)
    if backwards.returncode == 0:
        return "the tree holds its changes already, or the patch is reversed"
    complaints = [line.removeprefix("error:").strip() for line in message.splitlines() if line.startswith("error:")]
    return next((line for line in complaints if not line.startswith("while searching")), git.last_line(message))


def _apply(patch: Path, content: Path, strip: int, *, exact: bool) -> set[str]:
    """Apply a patch to a copy of a tree; return the paths of the files that git changed."""
    arguments = [f"-p{1 + strip}", "--whitespace=nowarn"]
    applied = git.run(["apply", "--apply", "--numstat", "-z", "--verbose", *arguments, str(patch)], content, plain=True)
    if applied.returncode != 0:
        raise StalePatchError(_why(content, patch, arguments, applied.stderr))
    moved = [line for line in applied.stderr.splitlines() if "offset" in line or "fuzz" in line]
    if exact and moved:
        raise StalePatchError(f"it fits only with an offset: {moved[0].strip()}")
    return {line.rpartition("\t")[2] for line in applied.stdout.split("\0") if line}


def _verify(source: Tree, path: str, file: PatchedFile, content: Path, *, exact: bool) -> None:
    """Compare a file that git changed with the tree, and on the pinned tree with what the patch says of it."""
    data = (content / path).read_bytes() if (content / path).is_file() else None
    if source.entries.get(path) == (None if data is None else files.sha256_bytes(data)):
        raise StalePatchError(f"it left {path} unchanged")
    if exact and file.after and file.after != (NO_BLOB if data is None else _blob(data)):
        raise StalePatchError(f"{path} is not what the patch's index line says after applying it")


def apply(cache: Cache, source: Tree, upstream: Upstream, patch: Path, *, exact: bool) -> Tree:
    """Return the patched copy of a tree, which is not touched itself.

    The patch is forward, with the paths of the upstream repository (``-p1`` at its root); where the tree has a wheel's
    layout, `upstream` says what to strip. With `exact`, for the pinned tree, no offset is taken, and the blob hashes of
    the patch's index lines must match. StalePatchError is raised where it does not apply cleanly, or git did something
    else than the patch says.
    """
    key = files.key_of("patched", source.key, files.sha256_file(patch), exact)
    strip = len(upstream.source_root.split("/")) if upstream.source_root and not source.source_root else 0
    listed = parse(patch.read_text(encoding="utf-8", errors="replace"))
    changed = {source.path_here(file.path, upstream.source_root): file for file in listed}

    def build(entry: Path) -> None:
        files.copy(source.folder, source.entries, entry / "content")
        source.layout.lay_out()  # what was copied is what was sealed
        if not changed:
            raise StalePatchError("the patch is empty: it names no file")
        said = _apply(patch, entry / "content", strip, exact=exact)
        if said != changed.keys():
            raise StalePatchError(f"git changed {sorted(said)}, and the patch names {sorted(changed)}")
        for path, file in changed.items():
            _verify(source, path, file, entry / "content", exact=exact)

    name = f"{upstream.package} {source.version} with {patch.name}"
    copied = {path: sha256 for path, sha256 in source.entries.items() if path not in changed}
    layout = Layout(cache, tree.KIND, key, build, name, known=copied)
    patched = tree.opened(layout, upstream, "", source.version)
    return replace(patched, source_root=source.source_root)


def changed_files(pristine: Tree, patched: Tree) -> list[str]:
    """List the files in which two trees differ, by their paths in the trees."""
    every = {*pristine.entries, *patched.entries}
    return sorted(path for path in every if pristine.entries.get(path) != patched.entries.get(path))
