"""After a change of fix.patch: git merges each wrong fix on an earlier fix.patch with the present one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.core import files, git
from harness.mutate import changes, generated
from harness.mutate.generated import Fix
from harness.pack.model import Pack
from harness.receipt import wrong_fixes
from harness.receipt.wrong_fixes import Mutant
from harness.upstream import patch
from harness.upstream.tree import Tree

#: The outcomes of a wrong fix that still fits, and of a merged one.
KEPT, REBASED = "kept", "rebased"


def rebase(pack: Pack, pristine: Tree) -> Iterator[tuple[str, str]]:
    """Put the handwritten mutants of a pack on top of the present fix.patch.

    It yields the file of each, and the outcome: KEPT, REBASED, or the reason why it was left. ValueError is raised
    where fix.patch does not fit the pinned tree.
    """
    fix = generated.fix_of(pack, pristine)
    handwritten = [mutant for origin in wrong_fixes.FOLDERS for mutant in wrong_fixes.handwritten(pack, origin)]
    on_top = [mutant for mutant in handwritten if not mutant.is_whole]
    paths = {path for mutant in on_top for path in changes.parse(mutant.patch)}
    on_fix = {path: generated.pinned_text(path, pack, pristine) for path in paths} | fix.new
    with tempfile.TemporaryDirectory(prefix="rebase-") as name:
        folder = Path(name)
        git.run(["init", "--quiet"], folder, plain=True)
        for number, texts in enumerate(_earlier_texts(pack, pristine)):  # a merge needs the blobs of its base
            changes.write_files(folder / f".git/{number}", texts)
            blobs = [str(path) for path in (folder / f".git/{number}").rglob("*") if path.is_file()]
            git.run(["hash-object", "-w", "--no-filters", *blobs], folder, plain=True)
        changes.write_files(folder, on_fix)
        git.run(["add", "--all", "--force"], folder, plain=True)
        base = git.run(["write-tree"], folder, plain=True).stdout.strip()
        for mutant in on_top:
            outcome = KEPT
            try:
                generated.effect(mutant, pack, pristine, fix)
            except ValueError as error:
                git.run(["read-tree", "--reset", "-u", base], folder, plain=True)
                outcome = _merged(folder, mutant, fix, on_fix) if patch.result_hash(mutant.patch) else str(error)
            yield mutant.path.relative_to(pack.folder).as_posix(), outcome


def _earlier_texts(pack: Pack, pristine: Tree) -> Iterator[dict[str, str | None]]:
    """Yield the files that each committed fix.patch makes; none outside a repository."""
    above = {"GIT_CEILING_DIRECTORIES": ""}
    for commit in git.run(["log", "--format=%H", "--", "fix.patch"], pack.folder, above).stdout.split():
        with contextlib.suppress(ValueError):
            text = git.run(["show", f"{commit}:./fix.patch"], pack.folder, above).stdout
            yield generated.read(text, pack, pristine).new


def _merged(folder: Path, mutant: Mutant, fix: Fix, on_fix: dict[str, str | None]) -> str:
    """Merge a mutant with the tree in a folder, and write it anew; return REBASED, or the reason why it is left."""
    applied = git.run(["apply", "--3way", str(mutant.path.absolute())], folder, plain=True)
    if applied.returncode:
        return git.last_line(applied.stderr).removeprefix("error: ")
    new = {path: _text(folder / path) for path in on_fix}
    wrong_fix = Fix(on_fix | fix.old, new)
    if reason := triviality(wrong_fix, fix):
        return reason
    files.write_atomic(mutant.path, changes.format_patch(f"{mutant.why}\n", on_fix, new))
    return REBASED


def _text(path: Path) -> str | None:
    return path.read_bytes().decode() if path.is_file() else None


def triviality(wrong_fix: Fix, fix: Fix) -> str:
    """Say why a patch is no wrong fix, byte for byte, if so."""
    if not wrong_fix.changed:
        return "it makes the release itself"
    return "it makes the fix itself" if wrong_fix.changed == fix.changed else ""
