"""What `check` says of a pack's wrong fixes: its own, those that are listed as equivalent, and the survivors."""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.core.errors import HarnessError
from harness.mutate import campaign, changes, fates, generated, mutants, rebase
from harness.mutate.generated import Fix
from harness.mutate.mutants import Listed, Mutant
from harness.pack.model import Pack
from harness.receipt import strength, wrong_fixes
from harness.receipt.receipt import FIRST_SIGHT, STRENGTH
from harness.receipt.strength import NOT_JUDGED_HERE, Strength
from harness.upstream.tree import Tree


def errors(pack: Pack, pristine: Tree | None) -> tuple[list[str], list[str]]:
    """List what is wrong, and what is only worth a warning; without the pinned tree names are not looked up."""
    try:
        listed = mutants.listed(pack)
        written = {folder: mutants.own(pack, origin) for origin, folder in mutants.FOLDERS.items()}
    except HarnessError as error:
        return [str(error)], []
    fix, unread = None, ""
    if pristine is not None and pack.patch.exists():
        try:
            fix = generated.fix_of(pack, pristine)
        except ValueError as error:  # `check` says so of fix.patch itself
            unread = str(error)
    wrong = [
        f"{one.path.relative_to(pack.folder).as_posix()}: {said}"
        for own in written.values()
        for one in own
        for said in _errors_of(pack, one, pristine, fix)
    ]
    for folder, own in written.items():
        names = [one.name for one in own]
        twice = sorted({name for name in names if names.count(name) > 1})
        wrong += [f"{folder}/{name}.patch: another of this name is in {folder}/{wrong_fixes.WHOLE}" for name in twice]
    if listed and unread:
        wrong.append(f"mutants/equivalent.toml was not read: {unread}")
    elif listed and fix:
        known = campaign.names(pack, fix)
        wrong += [f"mutants/equivalent.toml: no mutant {one.name!r}" for one in listed if one.name not in known]
    strengths, first_sights = _of_strengths(pack, listed), _of_first_sights(pack, listed, written[wrong_fixes.UNSEEN])
    return wrong + strengths[0] + first_sights[0], strengths[1] + first_sights[1]


def _of_strengths(pack: Pack, listed: list[Listed]) -> tuple[list[str], list[str]]:
    wrong, warnings = list[str](), list[str]()
    for file, found in _records(pack, STRENGTH, wrong):
        covered = {one.name for one in listed if one.covers(found.target)}
        wrong += [
            f"{file}: {one.name}: {one.fate}, and mutants/equivalent.toml does not say why"
            for one in found.mutants
            if one.fate in fates.OPEN and one.name not in covered
        ]
        kept = {one.name for one in found.mutants if one.fate in NOT_JUDGED_HERE and one.listed} - covered
        wrong += [f"{file}: {name}: mutants/equivalent.toml lists it no more" for name in sorted(kept)]
        if why := strength.stale(pack, found):
            warnings.append(f"{file}: STALE: {'; '.join(why)}. Next: runner.py mutate {pack.name} --record")
    return wrong, warnings


def _of_first_sights(pack: Pack, listed: list[Listed], unseen: list[Mutant]) -> tuple[list[str], list[str]]:
    wrong, warnings = list[str](), list[str]()
    judged: set[str] = set()
    for file, found in _records(pack, FIRST_SIGHT, wrong):
        pairs = strength.found_again(pack, found, wrong_fixes.UNSEEN)
        there, judged = {name for name, _ in pairs}, judged | {name for _, name in pairs}
        left = strength.still_open(pack, found, (one.name for one in listed if one.covers(found.target)))
        wrong += [
            f"{file}: {one.name} passed, and its patch is neither in {wrong_fixes.UNSEEN}/ nor in mutants/"
            for one in left
            if one.name not in there
        ]
        if left:
            still = ", ".join(one.name for one in left)
            warnings.append(f"{file}: still open: {still}. Next: a check that refuses them, and then mutants/")
    waiting = [one.name for one in unseen if one.name not in judged]
    if waiting:
        again = f"Next: runner.py mutate {pack.name} --unseen --record"
        warnings.append(f"{wrong_fixes.UNSEEN}/: not judged yet: {', '.join(waiting)}. {again}")
    return wrong, warnings


def _records(pack: Pack, kind: str, wrong: list[str]) -> Iterator[tuple[str, Strength]]:
    """Yield the records of a pack by their files; what is wrong with a record by itself goes into `wrong`."""
    for path in strength.files_of(pack, kind):
        try:
            found = strength.load(path)
        except HarnessError as error:
            wrong.append(str(error))
            continue
        if (pack.name, found.name) != (found.pack, path.name):
            wrong.append(f"{path.name} speaks of {found.pack} {found.target} ({found.evidence})")
        own = strength.count(one for one in found.mutants if one.origin != "generated")
        made = strength.count(one for one in found.mutants if one.origin == "generated")
        if (own, made) != (found.own, found.made):
            wrong.append(f"{path.name}: its numbers are not those of its mutants")
        yield path.name, found


def _errors_of(pack: Pack, one: Mutant, pristine: Tree | None, fix: Fix | None) -> list[str]:
    """List what is wrong with a mutant: its form, or it does not fit, or is no wrong fix."""
    found = []
    if "\n" in one.why or not re.search(r"\w", one.why):
        found.append("before its first 'diff --git' stands one line: why it is wrong")
    if not changes.parse(one.patch):
        return [*found, "it changes nothing"]
    if pristine is None or fix is None:
        return found
    try:
        made = generated.made_by(one, pack, pristine, fix)
    except ValueError as error:
        if one.is_whole:
            return [*found, f"it does not fit the pinned release: {error}"]
        hint = f"runner.py mutate --rebase, or {wrong_fixes.WHOLE}/ if it was written on the release"
        return [*found, f"it does not fit the release with fix.patch: {error}. Next: {hint}"]
    return [*found, *filter(None, [rebase.nothing_wrong(made, fix)])]
