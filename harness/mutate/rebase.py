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
from harness.upstream.tree import Tree

#: The outcomes of a wrong fix that still fits, and of a merged one.
KEPT, REBASED = "kept", "rebased"


def rebase(pack: Pack, pristine: Tree) -> Iterator[tuple[str, str]]:
    """Put the handwritten mutants of a pack on top of the present fix.patch.

    It yields the file of each, and the outcome: KEPT, REBASED, or the reason why it was left. ValueError is raised
    where fix.patch does not fit the pinned tree.
    """
    fix, earlier_fixes = generated.fix_of(pack, pristine), list(_earlier_fixes(pack, pristine))
    for mutant in (mutant for origin in wrong_fixes.FOLDERS for mutant in wrong_fixes.handwritten(pack, origin)):
        if mutant.is_whole:
            continue
        outcome = KEPT
        try:
            generated.effect(mutant, pack, pristine, fix)
        except ValueError as error:
            outcome = str(error)
            for base in earlier_fixes:
                with contextlib.suppress(ValueError):
                    outcome = _merged(mutant, fix, base, generated.effect(mutant, pack, pristine, base))
                    break
        yield mutant.path.relative_to(pack.folder).as_posix(), outcome


def _earlier_fixes(pack: Pack, pristine: Tree) -> Iterator[Fix]:
    """Yield what each committed fix.patch makes of the pinned tree, the newest first; none outside a repository."""
    above = {"GIT_CEILING_DIRECTORIES": ""}
    for commit in git.run(["log", "--format=%H", "--", "fix.patch"], pack.folder, above).stdout.split():
        with contextlib.suppress(ValueError):
            text = git.run(["show", f"{commit}:./fix.patch"], pack.folder, above).stdout
            yield generated.read(text, pack, pristine)


def _merged(mutant: Mutant, fix: Fix, base: Fix, on_base: Fix) -> str:
    """Merge a mutant on top of `base` with the present fix, and write it anew; return REBASED, or why it is left."""
    old = on_base.old | fix.old
    on_fix, before, after = old | fix.new, old | base.new, old | on_base.new
    new = dict(on_fix)
    for path in (path for path in old if after[path] != before[path]):
        new[path] = after[path]
        if on_fix[path] != before[path]:
            with tempfile.TemporaryDirectory(prefix="rebase-") as name:
                folder = Path(name)
                changes.write_files(folder, {"fix": on_fix[path], "base": before[path], "mutant": after[path]})
                if git.run(["merge-file", "fix", "base", "mutant"], folder, plain=True).returncode:
                    return f"{path}: it conflicts with fix.patch"  # also where one side lacks the file
                new[path] = (folder / "fix").read_bytes().decode()
    if reason := triviality(Fix(old, new), fix):
        return reason
    files.write_atomic(mutant.path, changes.format_patch(f"{mutant.why}\n", on_fix, new))
    return REBASED


def triviality(wrong_fix: Fix, fix: Fix) -> str:
    """Say why a patch is no wrong fix, byte for byte, if so."""
    if not wrong_fix.changed:
        return "it makes the release itself"
    return "it makes the fix itself" if wrong_fix.changed == fix.changed else ""
