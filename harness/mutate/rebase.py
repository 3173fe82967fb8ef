"""Wrong fixes on another fix.patch: each merged with it, and written anew in the shorter of its two forms."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.core import files, git
from harness.mutate import changes, generated, mutants
from harness.mutate.generated import Fix
from harness.mutate.mutants import Mutant
from harness.pack.model import Pack
from harness.receipt import wrong_fixes
from harness.upstream import patch
from harness.upstream.tree import Tree

#: How many earlier versions of fix.patch are looked at.
EARLIER = 50


class ConflictError(Exception):
    """A wrong fix cannot be told on the new fix.patch; the text says why."""


@dataclass(frozen=True)
class Rebased:
    """What became of one wrong fix."""

    name: str  # of its file, from the pack's folder on
    lines: int  # of that file before
    became: str  # the name of its file now
    lines_now: int
    why: str = ""  # it could not be put on the fix, and was left as it is; empty where it was put there
    is_kept: bool = False  # nothing had to be done


def rebase(pack: Pack, pristine: Tree) -> Iterator[Rebased]:
    """Put the wrong fixes of a pack on its fix.patch as it is now.

    Args:
        pack: whose they are.
        pristine: its pinned tree.

    Raises:
        ValueError: fix.patch does not fit the tree.

    """
    fix = generated.fix_of(pack, pristine)
    earlier = list(_earlier(pack, pristine))
    for one in (one for origin in mutants.FOLDERS for one in mutants.own(pack, origin)):
        name, lines = one.path.relative_to(pack.folder).as_posix(), len(one.patch.splitlines())
        try:
            path, text = _rebased(pack, pristine, fix, earlier, one)
        except ConflictError as error:
            yield Rebased(name, lines, name, lines, str(error))
            continue
        became, is_kept = path.relative_to(pack.folder).as_posix(), (path, text) == (one.path, one.patch)
        yield Rebased(name, lines, became, len(text.splitlines()), is_kept=is_kept)


def _earlier(pack: Pack, pristine: Tree) -> Iterator[Fix]:
    """Yield what earlier versions of fix.patch make of the tree, the latest first; none outside a repository."""
    above = {"GIT_CEILING_DIRECTORIES": ""}
    log = ["log", f"-{EARLIER}", "--follow", "--name-only", "--format=%x01%H", "--", "fix.patch"]
    for entry in git.run(log, pack.folder, above).stdout.split("\x01")[1:]:
        commit, *_, path = entry.split()
        with contextlib.suppress(ValueError):
            yield generated.read(git.run(["show", f"{commit}:{path}"], pack.folder, above).stdout, pack, pristine)


def _rebased(pack: Pack, pristine: Tree, fix: Fix, earlier: list[Fix], one: Mutant) -> tuple[Path, str]:
    """Write a wrong fix anew where that is needed; return its file and text now."""
    made = _made(pack, pristine, fix, earlier, one)
    if why := nothing_wrong(made, fix):
        raise ConflictError(why)
    small, whole = forms(one, made, fix)
    is_whole = len(whole.splitlines()) < len(small.splitlines())
    text = whole if is_whole else small
    fits = patch.outcome(one.patch) and one.sha256 == patch.outcome(whole)
    if fits and is_whole == one.is_whole and len(text.splitlines()) == len(one.patch.splitlines()):
        return one.path, one.patch  # it stands there already, perhaps in other words of diff
    place = one.path.parent.parent if one.is_whole else one.path.parent
    path = (place / wrong_fixes.WHOLE if is_whole else place) / one.path.name
    if path != one.path and path.exists():
        raise ConflictError(f"{path.relative_to(pack.folder).as_posix()} is there already")
    files.write_atomic(path, text)
    if path != one.path:
        one.path.unlink()
    return path, text


def nothing_wrong(made: Fix, fix: Fix) -> str:
    """Say why what a patch makes of the release is no wrong fix, byte for byte; nothing where it may be one."""
    if not made.changed:
        return "it makes the release itself"
    return "it makes the fix itself" if made.changed == fix.changed else ""


def forms(one: Mutant, made: Fix, fix: Fix) -> tuple[str, str]:
    """Write a wrong fix in both its forms: on the tree that has the fix, and whole, on the release."""
    old = {**fix.old, **made.old}
    on_fix, new = {**old, **fix.new}, {**old, **made.new}
    head = one.patch.partition("diff --git ")[0]
    return changes.written(head, on_fix, new), changes.written(head, old, new)


def _made(pack: Pack, pristine: Tree, fix: Fix, earlier: list[Fix], one: Mutant) -> Fix:
    """Return what a wrong fix makes of the release once it is on the fix."""
    under = generated.under(one, fix)
    for base in [under, *([] if one.is_whole else earlier)] if patch.outcome(one.patch) else []:
        with contextlib.suppress(ValueError):
            theirs = generated.read(one.patch, pack, pristine, base)
            return theirs if base is under else _merged(base, theirs, fix)
    return _applied(pack, pristine, under, one)


def _merged(base: Fix, theirs: Fix, fix: Fix) -> Fix:
    """Merge what a wrong fix changes on an earlier version of the fix with this one."""
    old = {**base.old, **theirs.old, **fix.old}
    new = {**old, **fix.new}
    for path, text in theirs.new.items():
        before, ours = base.new.get(path, old[path]), new[path]
        if text != before:
            new[path] = text if ours == before else _merged_file(path, ours, before, text)
    return Fix({path: old[path] for path in new}, new)


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


def _applied(pack: Pack, pristine: Tree, under: Fix, one: Mutant) -> Fix:
    """Apply a wrong fix of which only the text is known, at other lines where git finds them."""
    paths = list(changes.parse(one.patch))
    if not paths:
        raise ConflictError("it changes nothing")
    old = {path: generated.on_pinned(path, pack, pristine) for path in paths} | under.old
    new = old | under.new
    with tempfile.TemporaryDirectory(prefix="rebase-") as name:
        folder = Path(name)
        tree = folder / "tree"
        changes.lay(tree, {path: new[path] for path in paths})
        changes.lay(folder, {"wrong.patch": one.patch})
        applied = git.run(["apply", "--whitespace=nowarn", "../wrong.patch"], tree, plain=True)
        if applied.returncode:
            why = git.last_line(applied.stderr).removeprefix("error: ")
            where = "the pinned release" if one.is_whole else "the release with fix.patch"
            raise ConflictError(f"it does not fit {where}: {why}")
        for path in paths:
            new[path] = (tree / path).read_bytes().decode() if (tree / path).is_file() else None
    return Fix(old, new)
