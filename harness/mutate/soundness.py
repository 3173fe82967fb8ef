"""What `check` says of a pack's wrong fixes: its own, those that are listed as equivalent, and the survivors."""

from __future__ import annotations

import re

from harness.core.errors import HarnessError
from harness.core.words import Evidence
from harness.mutate import campaign, changes, generated, mutants
from harness.mutate.mutants import Listed, Mutant
from harness.pack.model import Pack
from harness.receipt import strength
from harness.receipt.strength import NOT_JUDGED_HERE, Fate, Strength
from harness.upstream.tree import Tree


def errors(pack: Pack, pristine: Tree | None) -> tuple[list[str], list[str]]:
    """List what is wrong, and what is only worth a warning.

    Args:
        pack: the pack.
        pristine: the pinned tree; None where it cannot be had, and then names are not looked up.

    """
    try:
        listed, own = mutants.listed(pack), mutants.own(pack)
    except HarnessError as error:
        return [str(error)], []
    wrong = [f"mutants/{one.name}.patch: {said}" for one in own for said in _own_errors(pack, one, pristine)]
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
    return wrong, warnings


def _own_errors(pack: Pack, one: Mutant, pristine: Tree | None) -> list[str]:
    found = []
    if "\n" in one.why or not one.why or not re.search(r"\w", one.why):
        found.append("before its first 'diff --git' stands one line: why it is wrong")
    if not changes.parse(one.patch):
        found.append("it changes nothing")
    elif pristine is not None:
        try:
            generated.read(one.patch, pack, pristine)
        except ValueError as error:
            found.append(f"it does not fit the pinned release: {error}")
    return found


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
    if (pack.name, strength.file_name(found.target, Evidence(found.evidence))) != (found.pack, name):
        wrong.append(f"{name} speaks of {found.pack} {found.target} ({found.evidence})")
    counts = (
        strength.count(one for one in found.mutants if one.origin == "own"),
        strength.count(one for one in found.mutants if one.origin != "own"),
    )
    if counts != (found.own, found.made):
        wrong.append(f"{name}: its numbers are not those of its mutants")
    return wrong
