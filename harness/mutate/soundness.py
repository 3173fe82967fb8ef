"""What `check` says of a pack's wrong fixes: its own, those that are listed as equivalent, and the survivors."""

from __future__ import annotations

import re

from harness.core.errors import HarnessError
from harness.mutate import campaign, changes, generated, mutants, rebase
from harness.mutate.generated import Fix
from harness.mutate.mutants import Listed, Mutant, Origin
from harness.pack.model import Pack
from harness.receipt import strength, wrong_fixes
from harness.receipt.receipt import FIRST_SIGHT
from harness.receipt.strength import NOT_JUDGED_HERE, Fate, Strength
from harness.upstream import patch
from harness.upstream.tree import Tree

#: What mends the form of wrong fixes.
REBASE = "runner.py mutate --rebase"


def errors(pack: Pack, pristine: Tree | None) -> tuple[list[str], list[str]]:
    """List what is wrong, and what is only worth a warning.

    Args:
        pack: the pack.
        pristine: the pinned tree; None where it cannot be had, and then names are not looked up.

    """
    try:
        listed = mutants.listed(pack)
        written = {folder: mutants.own(pack, origin) for origin, folder in mutants.FOLDERS.items()}
    except HarnessError as error:
        return [str(error)], []
    fix = _fix(pack, pristine)
    wrong = [
        f"{_place(pack, one)}: {said}"
        for own in written.values()
        for one in own
        for said in [*_own_errors(one), *(_misfits(pack, one, pristine, fix) if pristine and fix else ())]
    ]
    for folder, own in written.items():
        names = [one.name for one in own]
        twice = sorted({name for name in names if names.count(name) > 1})
        wrong += [f"{folder}/{name}.patch: another of this name is in {folder}/{wrong_fixes.WHOLE}" for name in twice]
    wrong += _unknown(pack, pristine, listed)
    warnings: list[str] = []
    for path in strength.files_of(pack):
        try:
            found = strength.load(path)
        except HarnessError as error:
            wrong.append(str(error))
            continue
        wrong += _of_record(pack, path.name, found, listed)
        why = strength.stale(pack, found)
        warnings += (
            [f"{path.name}: STALE: {'; '.join(why)}. Next: runner.py mutate {pack.name} --record"] if why else []
        )
    of_unseen = _unseen(pack, written[mutants.FOLDERS[Origin.UNSEEN]], listed)
    return wrong + of_unseen[0], warnings + of_unseen[1]


def _unseen(pack: Pack, unseen: list[Mutant], listed: list[Listed]) -> tuple[list[str], list[str]]:
    """List what is wrong with the records of a first sight, and which wrong fixes still pass or wait to be judged."""
    wrong, warnings = [], []
    judged: set[str] = set()
    for path in strength.files_of(pack, FIRST_SIGHT):
        try:
            found = strength.load(path)
        except HarnessError as error:
            wrong.append(str(error))
            continue
        wrong += _of_its_place(pack, path.name, found)
        pairs = strength.found_again(pack, found, wrong_fixes.UNSEEN)
        there, judged = {name for name, _ in pairs}, judged | {name for _, name in pairs}
        left = strength.still_open(pack, found, (one.name for one in listed if one.covers(found.target)))
        wrong += [
            f"{path.name}: {one.name} passed, and its patch is neither in {wrong_fixes.UNSEEN}/ nor in mutants/"
            for one in left
            if one.name not in there
        ]
        if left:
            names = ", ".join(one.name for one in left)
            warnings.append(f"{path.name}: still open: {names}. Next: a check that refuses them, and then mutants/")
    waiting = [one.name for one in unseen if one.name not in judged]
    if waiting:
        names = f"{wrong_fixes.UNSEEN}/: not judged yet: {', '.join(waiting)}"
        warnings.append(f"{names}. Next: runner.py mutate {pack.name} --unseen --record")
    return wrong, warnings


def _fix(pack: Pack, pristine: Tree | None) -> Fix | None:
    """Read fix.patch; None where it cannot be: `check` says so of itself."""
    if pristine is None or not pack.patch.exists():
        return None
    try:
        return generated.fix_of(pack, pristine)
    except ValueError:
        return None


def _place(pack: Pack, one: Mutant) -> str:
    return one.path.relative_to(pack.folder).as_posix() if one.path else one.name


def _own_errors(one: Mutant) -> list[str]:
    found = []
    if "\n" in one.why or not one.why or not re.search(r"\w", one.why):
        found.append("before its first 'diff --git' stands one line: why it is wrong")
    if not changes.parse(one.patch):
        found.append("it changes nothing")
    elif not patch.outcome(one.patch):
        found.append(f"its index line is abbreviated; use git diff --full-index, or {REBASE}")
    return found


def _misfits(pack: Pack, one: Mutant, pristine: Tree, fix: Fix) -> list[str]:
    """List what is wrong with a mutant on its tree: it does not fit, is no wrong fix, or has a shorter form."""
    if not changes.parse(one.patch):
        return []
    try:
        made = generated.read(one.patch, pack, pristine, None if one.is_whole else fix)
    except ValueError as error:
        if one.is_whole:
            return [f"it does not fit the pinned release: {error}"]
        hint = f"{REBASE}, or {wrong_fixes.WHOLE}/ if it was written on the release"
        return [f"it does not fit the release with fix.patch: {error}. Next: {hint}"]
    if why := rebase.nothing_wrong(made, fix):
        return [why]
    if one.is_whole:
        small, whole = (len(text.splitlines()) for text in rebase.forms(one, made, fix))
        if small <= whole:
            return [f"it has {whole} lines, and {small} on top of fix.patch. Next: {REBASE}"]
    return []


def _unknown(pack: Pack, pristine: Tree | None, listed: list[Listed]) -> list[str]:
    """Name what is listed and is no mutant of this pack."""
    if pristine is None or not listed or not pack.patch.exists():
        return []
    try:
        known = campaign.names(pack, generated.fix_of(pack, pristine))
    except ValueError as error:
        return [f"mutants/equivalent.toml was not read: {error}"]
    return [f"mutants/equivalent.toml: no mutant {one.name!r}" for one in listed if one.name not in known]


def _of_record(pack: Pack, name: str, found: Strength, listed: list[Listed]) -> list[str]:
    covered = {one.name for one in listed if one.covers(found.target)}
    wrong = [
        f"{name}: {one.name}: {one.fate}, and mutants/equivalent.toml does not say why"
        for one in found.mutants
        if one.fate in (Fate.SURVIVED, Fate.UNJUDGED) and one.name not in covered
    ]
    kept = {one.name for one in found.mutants if one.fate in NOT_JUDGED_HERE and one.listed} - covered
    wrong += [f"{name}: {one}: mutants/equivalent.toml lists it no more" for one in sorted(kept)]
    return wrong + _of_its_place(pack, name, found)


def _of_its_place(pack: Pack, name: str, found: Strength) -> list[str]:
    """List what a record says otherwise than its name, its folder and its own mutants do."""
    wrong = []
    if (pack.name, found.name) != (found.pack, name):
        wrong.append(f"{name} speaks of {found.pack} {found.target} ({found.evidence})")
    counts = (
        strength.count(one for one in found.mutants if one.origin != "generated"),
        strength.count(one for one in found.mutants if one.origin == "generated"),
    )
    if counts != (found.own, found.made):
        wrong.append(f"{name}: its numbers are not those of its mutants")
    return wrong
