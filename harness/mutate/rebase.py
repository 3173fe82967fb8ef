"""Wrong fixes on another fix.patch: each merged with it, and written anew in the shorter of its two forms."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
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
#: The header of a file that is added or removed, as `git diff --no-index` writes it.
ONE_SIDED = re.compile(r"^diff --git [ab]/(\S+) [ab]/\1$", re.MULTILINE)
#: What lies under a whole patch.
NOTHING = Fix({}, {}, {})


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
    for origin in mutants.FOLDERS:
        for one in mutants.own(pack, origin):
            yield _rebased(pack, pristine, fix, earlier, one)


def _earlier(pack: Pack, pristine: Tree) -> Iterator[Fix]:
    """Yield what earlier versions of fix.patch make of the tree, the latest first; none outside a repository."""
    above = {"GIT_CEILING_DIRECTORIES": ""}
    log = ["log", f"-{EARLIER}", "--follow", "--name-only", "--format=%x01%H", "--", "fix.patch"]
    for entry in git.run(log, pack.folder, above).stdout.split("\x01")[1:]:
        commit, *_, path = entry.split()
        try:
            yield generated.read(git.run(["show", f"{commit}:{path}"], pack.folder, above).stdout, pack, pristine)
        except ValueError:
            continue


def _rebased(pack: Pack, pristine: Tree, fix: Fix, earlier: list[Fix], one: Mutant) -> Rebased:
    path = one.path or pack.folder
    name, lines = path.relative_to(pack.folder).as_posix(), len(one.patch.splitlines())
    try:
        made = _made(pack, pristine, fix, earlier, one)
    except ConflictError as error:
        return Rebased(name, lines, name, lines, str(error))
    if why := nothing_wrong(made, fix):
        return Rebased(name, lines, name, lines, why)
    small, whole = forms(one, made, fix)
    is_whole = len(whole.splitlines()) < len(small.splitlines())
    text = whole if is_whole else small
    fits = patch.outcome(one.patch) and one.sha256 == patch.outcome(whole)
    if fits and is_whole == one.is_whole and len(text.splitlines()) == lines:
        text = one.patch  # it stands there already, perhaps in other words of diff
    place = path.parent.parent if one.is_whole else path.parent
    target = (place / wrong_fixes.WHOLE if is_whole else place) / path.name
    if target != path and target.exists():
        return Rebased(name, lines, name, lines, f"{target.relative_to(pack.folder).as_posix()} is there already")
    if text != one.patch or target != path:
        files.write_atomic(target, text)
    if target != path:
        path.unlink()
    became, is_kept = target.relative_to(pack.folder).as_posix(), (text, target) == (one.patch, path)
    return Rebased(name, lines, became, len(text.splitlines()), is_kept=is_kept)


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
    return head + written(on_fix, new), head + written(old, new)


def _made(pack: Pack, pristine: Tree, fix: Fix, earlier: list[Fix], one: Mutant) -> Fix:
    """Return what a wrong fix makes of the release once it is on the fix."""
    under = NOTHING if one.is_whole else fix
    for base in [under, *([] if one.is_whole else earlier)] if patch.outcome(one.patch) else []:
        try:
            theirs = generated.read(one.patch, pack, pristine, base)
        except ValueError:
            continue
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
    return Fix({path: old[path] for path in new}, new, {})


def _merged_file(path: str, ours: str | None, before: str | None, text: str | None) -> str:
    if ours is None or before is None or text is None:
        raise ConflictError(f"{path}: the old or the new fix.patch adds or removes this file")
    with tempfile.TemporaryDirectory(prefix="rebase-") as name:
        folder = Path(name)
        _write(folder, {"ours": ours, "before": before, "theirs": text})
        merged = git.run(["merge-file", "--quiet", "ours", "before", "theirs"], folder, plain=True)
        if merged.returncode:
            raise ConflictError(f"{path}: it changes lines that the new fix.patch changes")
        return (folder / "ours").read_bytes().decode()


def _applied(pack: Pack, pristine: Tree, under: Fix, one: Mutant) -> Fix:
    """Apply a wrong fix of which only the text is known, at other lines where git finds them."""
    paths = list(changes.parse(one.patch))
    if not paths:
        raise ConflictError("it changes nothing")
    old = dict(under.old)
    for path in paths:
        file = pristine.folder / pristine.path_here(path, pack.definition.upstream.source_root)
        if path not in old:
            old[path] = file.read_bytes().decode() if file.is_file() else None
    new = {**old, **under.new}
    with tempfile.TemporaryDirectory(prefix="rebase-") as name:
        folder = Path(name)
        tree = folder / "tree"
        _write(tree, {path: new[path] for path in paths})
        _write(folder, {"wrong.patch": one.patch})
        applied = git.run(["apply", "--whitespace=nowarn", "../wrong.patch"], tree, plain=True)
        if applied.returncode:
            why = git.last_line(applied.stderr).removeprefix("error: ")
            where = "the pinned release" if one.is_whole else "the release with fix.patch"
            raise ConflictError(f"it does not fit {where}: {why}")
        for path in paths:
            new[path] = (tree / path).read_bytes().decode() if (tree / path).is_file() else None
    return Fix(old, new, {})


def _write(folder: Path, texts: Mapping[str, str | None]) -> None:
    folder.mkdir(exist_ok=True)
    for path, text in texts.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(text.encode())


def written(old: Mapping[str, str | None], new: Mapping[str, str | None]) -> str:
    """Write the difference of two sets of files as git does, with whole blob hashes."""
    with tempfile.TemporaryDirectory(prefix="rebase-") as name:
        folder = Path(name)
        _write(folder / "a", {path: text for path, text in old.items() if text != new[path]})
        _write(folder / "b", {path: text for path, text in new.items() if text != old[path]})
        options = ["--no-index", "--no-prefix", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "-U3"]
        git.run(["diff", *options, "--output=diff", "a", "b"], folder, plain=True)
        text = (folder / "diff").read_bytes().decode()
        # git names a file that one side lacks twice by the other side
        return ONE_SIDED.sub(r"diff --git a/\1 b/\1", text)
