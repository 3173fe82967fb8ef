"""Wrong fixes on another fix.patch: each that was made on an earlier one is merged with it."""

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

#: How many earlier versions of fix.patch are looked at.
EARLIER = 50
#: What became of a wrong fix that needed no change, and of one that was written anew.
KEPT, REBASED = "kept", "rebased"


class ConflictError(Exception):
    """A wrong fix cannot be put on the new fix.patch; the text says why."""


def rebase(pack: Pack, pristine: Tree) -> Iterator[tuple[str, str]]:
    """Put the wrong fixes of a pack that stand on its fix.patch on it as it is now.

    It yields the file of each, and what became of it: KEPT, REBASED, or why it was left as it is. ValueError is raised
    where fix.patch does not fit the pinned tree.
    """
    fix = generated.fix_of(pack, pristine)
    earlier = list(_earlier(pack, pristine))
    for one in (one for origin in mutants.FOLDERS for one in mutants.own(pack, origin) if not one.is_whole):
        name = one.path.relative_to(pack.folder).as_posix()
        try:
            text = _rebased(pack, pristine, [fix, *earlier], one)
        except ConflictError as error:
            yield name, str(error)
            continue
        if text != one.patch:
            files.write_atomic(one.path, text)
        yield name, KEPT if text == one.patch else REBASED


def _earlier(pack: Pack, pristine: Tree) -> Iterator[Fix]:
    """Yield what earlier versions of fix.patch make of the tree, the latest first; none outside a repository."""
    above = {"GIT_CEILING_DIRECTORIES": ""}
    log = ["log", f"-{EARLIER}", "--follow", "--name-only", "--format=%x01%H", "--", "fix.patch"]
    for entry in git.run(log, pack.folder, above).stdout.split("\x01")[1:]:
        commit, *_, path = entry.split()
        with contextlib.suppress(ValueError):
            yield generated.read(git.run(["show", f"{commit}:{path}"], pack.folder, above).stdout, pack, pristine)


def _rebased(pack: Pack, pristine: Tree, fixes: list[Fix], one: Mutant) -> str:
    """Return the text of a wrong fix on the first of some fixes; the others are earlier versions of it."""
    if not patch.outcome(one.patch):
        raise ConflictError("its index line is abbreviated; use git diff --full-index")
    for base in fixes:
        with contextlib.suppress(ValueError):
            theirs = generated.read(one.patch, pack, pristine, base)
            return one.patch if base is fixes[0] else _merged(base, theirs, fixes[0], one)
    raise ConflictError("it fits neither fix.patch nor an earlier version of it in git's history")


def nothing_wrong(made: Fix, fix: Fix) -> str:
    """Say why what a patch makes of the release is no wrong fix, byte for byte; nothing where it may be one."""
    if not made.changed:
        return "it makes the release itself"
    return "it makes the fix itself" if made.changed == fix.changed else ""


def _merged(base: Fix, theirs: Fix, fix: Fix, one: Mutant) -> str:
    """Merge what a wrong fix changes on an earlier version of the fix with this one."""
    old = {**base.old, **theirs.old, **fix.old}
    on_fix = {**old, **fix.new}
    new = dict(on_fix)
    for path, text in theirs.new.items():
        before, ours = base.new.get(path, old[path]), on_fix[path]
        if text != before:
            new[path] = text if ours == before else _merged_file(path, ours, before, text)
    if why := nothing_wrong(Fix(old, new), fix):
        raise ConflictError(why)
    return changes.written(f"{one.why}\n", on_fix, new)


def _merged_file(path: str, ours: str | None, before: str | None, text: str | None) -> str:
    if ours is None or before is None or text is None:
        raise ConflictError(f"{path}: the old or the new fix.patch adds or removes this file")
    with tempfile.TemporaryDirectory(prefix="rebase-") as name:
        folder = Path(name)
        changes.lay(folder, {"ours": ours, "before": before, "theirs": text})
        merged = git.run(["merge-file", "--quiet", "ours", "before", "theirs"], folder, plain=True)
        if merged.returncode:
            raise ConflictError(f"{path}: it changes lines that the new fix.patch changes")
        return (folder / "ours").read_bytes().decode()
