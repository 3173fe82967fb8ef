"""The findings of `check` on a pack's wrong fixes: the handwritten ones, equivalent.toml, and the records."""

from __future__ import annotations

import re
from collections import Counter
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
    """List the errors, and the warnings. Without the pinned tree no patch is applied, and no name is looked up."""
    try:
        exemptions = mutants.exemptions(pack)
        handwritten = {folder: mutants.handwritten(pack, origin) for origin, folder in mutants.FOLDERS.items()}
    except HarnessError as error:
        return [str(error)], []
    fix, misfit = None, ""
    if pristine is not None and pack.patch.exists():
        try:
            fix = generated.fix_of(pack, pristine)
        except ValueError as error:  # `check` says so of fix.patch itself
            misfit = str(error)
    faults = [
        f"{mutant.path.relative_to(pack.folder).as_posix()}: {text}"
        for group in handwritten.values()
        for mutant in group
        for text in _mutant_errors(pack, mutant, pristine, fix)
    ]
    for folder, group in handwritten.items():
        counts = Counter(mutant.name for mutant in group)
        twice = [name for name, count in counts.items() if count > 1]
        faults += [f"{folder}/{name}.patch: another of this name is in {folder}/{wrong_fixes.WHOLE}" for name in twice]
    if exemptions and misfit:
        faults.append(f"mutants/equivalent.toml was not read: {misfit}")
    elif exemptions and fix:
        names = campaign.mutant_names(pack, fix)
        unknown = [entry.name for entry in exemptions if entry.name not in names]
        faults += [f"mutants/equivalent.toml: no mutant {name!r}" for name in unknown]
    strengths = _strength_findings(pack, exemptions)
    first_sights = _first_sight_findings(pack, exemptions, handwritten[wrong_fixes.UNSEEN])
    return faults + strengths[0] + first_sights[0], strengths[1] + first_sights[1]


def _strength_findings(pack: Pack, exemptions: list[Listed]) -> tuple[list[str], list[str]]:
    faults, warnings = list[str](), list[str]()
    for file, recorded in _records(pack, STRENGTH, faults):
        covered = {entry.name for entry in exemptions if entry.covers(recorded.target)}
        faults += [
            f"{file}: {mutant.name}: {mutant.fate}, and mutants/equivalent.toml does not say why"
            for mutant in recorded.mutants
            if mutant.fate in fates.OPEN and mutant.name not in covered
        ]
        exempt = {mutant.name for mutant in recorded.mutants if mutant.fate in NOT_JUDGED_HERE and mutant.listed}
        faults += [f"{file}: {name}: mutants/equivalent.toml lists it no more" for name in sorted(exempt - covered)]
        if reasons := strength.stale(pack, recorded):
            warnings.append(f"{file}: STALE: {'; '.join(reasons)}. Next: runner.py mutate {pack.name} --record")
    return faults, warnings


def _first_sight_findings(pack: Pack, exemptions: list[Listed], unseen: list[Mutant]) -> tuple[list[str], list[str]]:
    faults, warnings = list[str](), list[str]()
    judged: set[str] = set()
    for file, recorded in _records(pack, FIRST_SIGHT, faults):
        pairs = strength.match_names(pack, recorded, wrong_fixes.UNSEEN)
        present, judged = {name for name, _ in pairs}, judged | {name for _, name in pairs}
        covered = (entry.name for entry in exemptions if entry.covers(recorded.target))
        names = [mutant.name for mutant in strength.open_mutants(pack, recorded, covered)]
        faults += [
            f"{file}: {name} passed, and its patch is neither in {wrong_fixes.UNSEEN}/ nor in mutants/"
            for name in names
            if name not in present
        ]
        if names:
            step = "Next: a check that refuses them, and then mutants/"
            warnings.append(f"{file}: still open: {', '.join(names)}. {step}")
    waiting = [mutant.name for mutant in unseen if mutant.name not in judged]
    if waiting:
        step = f"Next: runner.py mutate {pack.name} --unseen --record"
        warnings.append(f"{wrong_fixes.UNSEEN}/: not judged yet: {', '.join(waiting)}. {step}")
    return faults, warnings


def _records(pack: Pack, kind: str, faults: list[str]) -> Iterator[tuple[str, Strength]]:
    """Yield the records of a pack with the names of their files; the errors of a record go into `faults`."""
    for path in strength.files_of(pack, kind):
        try:
            recorded = strength.load(path)
        except HarnessError as error:
            faults.append(str(error))
            continue
        if (pack.name, recorded.name) != (recorded.pack, path.name):
            faults.append(f"{path.name} speaks of {recorded.pack} {recorded.target} ({recorded.evidence})")
        own = strength.count(mutant for mutant in recorded.mutants if mutant.origin != "generated")
        made = strength.count(mutant for mutant in recorded.mutants if mutant.origin == "generated")
        if (own, made) != (recorded.own, recorded.made):
            faults.append(f"{path.name}: its numbers are not those of its mutants")
        yield path.name, recorded


def _mutant_errors(pack: Pack, mutant: Mutant, pristine: Tree | None, fix: Fix | None) -> list[str]:
    """List the errors of a mutant: in its form, or that it does not fit, or is no wrong fix."""
    faults = []
    if "\n" in mutant.why or not re.search(r"\w", mutant.why):
        faults.append("before its first 'diff --git' stands one line: why it is wrong")
    if not changes.parse(mutant.patch):
        return [*faults, "it changes nothing"]
    if pristine is None or fix is None:
        return faults
    try:
        effect = generated.effect(mutant, pack, pristine, fix)
    except ValueError as error:
        if mutant.is_whole:
            return [*faults, f"it does not fit the pinned release: {error}"]
        hint = f"runner.py mutate --rebase, or {wrong_fixes.WHOLE}/ if it was written on the release"
        return [*faults, f"it does not fit the release with fix.patch: {error}. Next: {hint}"]
    return [*faults, *filter(None, [rebase.triviality(effect, fix)])]
