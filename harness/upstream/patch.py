"""Patches: applied to a copy of a tree, without fuzz or offset, and verified by content hash."""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
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


def _apply(source: Tree, upstream: Upstream, patch: Path, content: Path, *, exact: bool) -> None:
    listed = parse(patch.read_text(encoding="utf-8", errors="replace"))
    if not listed:
        raise StalePatchError("the patch is empty: it names no file")
    strip = len(upstream.source_root.split("/")) if upstream.source_root and not source.source_root else 0
    arguments = [f"-p{1 + strip}", "--whitespace=nowarn"]
    applied = git.run(["apply", "--verbose", *arguments, str(patch)], content, plain=True)
    if applied.returncode != 0:
        raise StalePatchError(_why(content, patch, arguments, applied.stderr))
    moved = [line for line in applied.stderr.splitlines() if "offset" in line or "fuzz" in line]
    if exact and moved:
        raise StalePatchError(f"it fits only with an offset: {moved[0].strip()}")
    _verify(source, upstream, listed, content, exact=exact)


def _verify(source: Tree, upstream: Upstream, listed: tuple[PatchedFile, ...], content: Path, *, exact: bool) -> None:
    """Compare what git did with what the patch says: exactly its files, and on the pinned tree exactly its blobs."""
    entries = files.manifest(content)
    changed = {path for path in {*entries, *source.entries} if entries.get(path) != source.entries.get(path)}
    expected = {source.path_here(file.path, upstream.source_root): file for file in listed}
    if changed != set(expected):
        unchanged, others = sorted(set(expected) - changed), sorted(changed - set(expected))
        raise StalePatchError(f"it left {unchanged or 'nothing'} unchanged and changed {others or 'nothing'} besides")
    for path, file in expected.items():
        made = _blob((content / path).read_bytes()) if (content / path).is_file() else NO_BLOB
        if exact and file.after and made != file.after:
            raise StalePatchError(f"{path} is not what the patch's index line says after applying it")


def apply(cache: Cache, source: Tree, upstream: Upstream, patch: Path, *, exact: bool) -> Tree:
    """Return the patched copy of a tree, which is not touched itself.

    The patch is forward, with the paths of the upstream repository (``-p1`` at its root); where the tree has a wheel's
    layout, `upstream` says what to strip. With `exact`, for the pinned tree, no offset is taken, and the blob hashes of
    the patch's index lines must match. StalePatchError is raised where it does not apply cleanly, or git did something
    else than the patch says.
    """
    key = files.key_of("patched", source.key, files.sha256_file(patch), exact)

    def build(entry: Path) -> None:
        content = entry / "content"
        for path in source.entries:  # not copytree: it hides why it fails, such as a full disk
            (content / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.folder / path, content / path)
        _apply(source, upstream, patch, content, exact=exact)

    layout = Layout(cache, tree.KIND, key, build, f"{upstream.package} {source.version} with {patch.name}")
    patched = tree.opened(layout, upstream, "", source.version)
    return replace(patched, source_root=source.source_root)


def changed_files(pristine: Tree, patched: Tree) -> list[str]:
    """List the files in which two trees differ, by their paths in the trees."""
    every = {*pristine.entries, *patched.entries}
    return sorted(path for path in every if pristine.entries.get(path) != patched.entries.get(path))
