"""Wrong fixes on another fix.patch: git merges each that was made on an earlier one with it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.core import files, git
from harness.mutate import changes, generated, mutants
from harness.mutate.generated import Fix
from harness.mutate.mutants import Mutant
from harness.pack.model import Pack
from harness.upstream import patch
from harness.upstream.tree import Tree

#: What became of a wrong fix that needed no change, and of one that was written anew.
KEPT, REBASED = "kept", "rebased"


def rebase(pack: Pack, pristine: Tree) -> Iterator[tuple[str, str]]:
    """Put the wrong fixes of a pack that stand on its fix.patch on it as it is now.

    It yields the file of each, and what became of it: KEPT, REBASED, or why it was left as it is. ValueError is raised
    where fix.patch does not fit the pinned tree.
    """
    fix = generated.fix_of(pack, pristine)
    own = [one for origin in mutants.FOLDERS for one in mutants.own(pack, origin) if not one.is_whole]
    touched = {path: generated.on_pinned(path, pack, pristine) for one in own for path in changes.parse(one.patch)}
    on_fix = touched | fix.old | fix.new
    with tempfile.TemporaryDirectory(prefix="rebase-") as name:
        folder = Path(name)
        git.run(["init", "--quiet"], folder, plain=True)
        for number, texts in enumerate(_earlier(pack, pristine)):  # git merges with what it knows by its hash
            changes.lay(folder / f".git/{number}", texts)
            known = [str(path) for path in (folder / f".git/{number}").rglob("*") if path.is_file()]
            git.run(["hash-object", "-w", "--no-filters", *known], folder, plain=True)
        changes.lay(folder, on_fix)
        git.run(["add", "--all", "--force"], folder, plain=True)
        base = git.run(["write-tree"], folder, plain=True).stdout.strip()
        for one in own:
            became = KEPT
            try:
                generated.made_by(one, pack, pristine, fix)
            except ValueError as error:
                git.run(["read-tree", "--reset", "-u", base], folder, plain=True)
                became = _merged(folder, one, fix, on_fix) if patch.outcome(one.patch) else str(error)
            yield one.path.relative_to(pack.folder).as_posix(), became


def _earlier(pack: Pack, pristine: Tree) -> Iterator[dict[str, str | None]]:
    """Yield the files that earlier versions of fix.patch make; none outside a repository."""
    above = {"GIT_CEILING_DIRECTORIES": ""}
    for commit in git.run(["log", "--format=%H", "--", "fix.patch"], pack.folder, above).stdout.split():
        with contextlib.suppress(ValueError):
            text = git.run(["show", f"{commit}:./fix.patch"], pack.folder, above).stdout
            yield generated.read(text, pack, pristine).new


def _merged(folder: Path, one: Mutant, fix: Fix, on_fix: dict[str, str | None]) -> str:
    """Merge a wrong fix with the tree in a folder, and write it anew; say REBASED, or why it is left."""
    applied = git.run(["apply", "--3way", str(one.path.absolute())], folder, plain=True)
    if applied.returncode:
        return git.last_line(applied.stderr).removeprefix("error: ")
    new = {path: _text(folder / path) for path in on_fix}
    made = Fix(on_fix | fix.old, new)
    if why := nothing_wrong(made, fix):
        return why
    files.write_atomic(one.path, changes.written(f"{one.why}\n", on_fix, new))
    return REBASED


def _text(path: Path) -> str | None:
    return path.read_bytes().decode() if path.is_file() else None


def nothing_wrong(made: Fix, fix: Fix) -> str:
    """Say why what a patch makes of the release is no wrong fix, byte for byte; nothing where it may be one."""
    if not made.changed:
        return "it makes the release itself"
    return "it makes the fix itself" if made.changed == fix.changed else ""
