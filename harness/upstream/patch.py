"""Patches: applied to a copy of a tree, without fuzz or offset, and verified by content hash."""

from dataclasses import replace
from pathlib import Path

from harness.core import Cache, files, git
from harness.core.seal import Layout
from harness.pack import Upstream, patch_text
from harness.pack.patch_text import PatchedFile
from harness.upstream import tree
from harness.upstream.tree import Tree


class StalePatchError(Exception):
    """The patch does not apply cleanly to this tree; the text says where."""


def refusal(folder: Path, patch: Path, arguments: list[str], message: str) -> str:
    """Say why git refused a patch, by its message; `arguments` are those of ``git apply``."""
    reverse = git.run(["apply", "--check", "--reverse", *arguments, str(patch)], folder, plain=True)
    if reverse.returncode == 0:
        return "the tree holds its changes already, or the patch is reversed"
    complaints = [line.removeprefix("error:").strip() for line in message.splitlines() if line.startswith("error:")]
    return next((line for line in complaints if not line.startswith("while searching")), git.last_line(message))


def _apply(patch: Path, content: Path, strip: int, *, exact: bool) -> set[str]:
    """Apply a patch to a copy of a tree; return the paths of the files that git changed."""
    arguments = [f"-p{1 + strip}", "--whitespace=nowarn"]
    applied = git.run(["apply", "--apply", "--numstat", "-z", "--verbose", *arguments, str(patch)], content, plain=True)
    if applied.returncode != 0:
        raise StalePatchError(refusal(content, patch, arguments, applied.stderr))
    moved = [line for line in applied.stderr.splitlines() if "offset" in line or "fuzz" in line]
    if exact and moved:
        raise StalePatchError(f"it fits only with an offset: {moved[0].strip()}")
    return {line.rpartition("\t")[2] for line in applied.stdout.split("\0") if line}


def _verify(source: Tree, path: str, file: PatchedFile, content: Path, *, exact: bool) -> None:
    """Compare a file that git changed with the tree, and on the pinned tree with the patch's index line."""
    data = (content / path).read_bytes() if (content / path).is_file() else None
    if source.entries.get(path) == (None if data is None else files.sha256_bytes(data)):
        raise StalePatchError(f"it left {path} unchanged")
    if exact and file.after and file.after != patch_text.blob(data):
        raise StalePatchError(f"{path} is not what the patch's index line says after applying it")


def apply(cache: Cache, source: Tree, upstream: Upstream, patch: Path, *, exact: bool) -> Tree:
    """Return a patched copy of a tree.

    The patch is forward, with the paths of the upstream repository (``-p1`` at its root). If the tree has a wheel's
    layout, the source root of `upstream` is stripped. With `exact`, for the pinned tree, no offset is taken, and the
    blob hashes of the index lines must match. StalePatchError: the patch does not apply cleanly, or git's changes are
    not those of the patch.
    """
    key = files.key_of("patched", source.key, files.sha256_file(patch), exact)
    strip = len(upstream.source_root.split("/")) if upstream.source_root and not source.source_root else 0
    patched_files = patch_text.parse(patch.read_text(encoding="utf-8", errors="replace"))
    changed = {source.path_here(file.path, upstream.source_root): file for file in patched_files}

    def build(entry: Path) -> None:
        files.copy(source.folder, source.entries, entry / "content")
        source.layout.lay_out()  # checks that the copied tree is the sealed one
        if not changed:
            raise StalePatchError("the patch is empty: it names no file")
        changed_by_git = _apply(patch, entry / "content", strip, exact=exact)
        if changed_by_git != changed.keys():
            raise StalePatchError(f"git changed {sorted(changed_by_git)}, and the patch names {sorted(changed)}")
        for path, file in changed.items():
            _verify(source, path, file, entry / "content", exact=exact)

    name = f"{upstream.package} {source.version} with {patch.name}"
    copied = {path: sha256 for path, sha256 in source.entries.items() if path not in changed}
    layout = Layout(cache, tree.KIND, key, build, name, known=copied)
    patched = tree.open_tree(layout, upstream, "", source.version)
    return replace(patched, source_root=source.source_root)


def changed_files(pristine: Tree, patched: Tree) -> list[str]:
    """List the files in which two trees differ, by their paths in the trees."""
    paths = {*pristine.entries, *patched.entries}
    return sorted(path for path in paths if pristine.entries.get(path) != patched.entries.get(path))
