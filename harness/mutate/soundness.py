"""The findings of `check` on a pack's wrong fixes: the handwritten ones, equivalent.toml, and the records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from harness.core.errors import Finding, HarnessError
from harness.mutate import changes, fates, generated, rebase
from harness.mutate.fates import Listed
from harness.mutate.generated import Fix
from harness.pack.model import Pack
from harness.receipt import strength, wrong_fixes
from harness.receipt.strength import NOT_JUDGED_HERE, Strength
from harness.receipt.wrong_fixes import FOLDERS, WHOLE, Mutant, Origin
from harness.upstream.tree import Tree


def findings(pack: Pack, pristine: Tree | None) -> Iterator[Finding]:
    """Yield the findings. Without the pinned tree neither patches nor names are tried."""
    try:
        exemptions = fates.exemptions(pack)
    except HarnessError as error:
        yield Finding(str(error))
        return
    yield from map(Finding, _file_errors(pack, pristine, exemptions))
    yield from _record_findings(pack, exemptions)


def _file_errors(pack: Pack, pristine: Tree | None, exemptions: list[Listed]) -> Iterator[str]:
    mutants = [mutant for origin in FOLDERS for mutant in wrong_fixes.handwritten(pack, origin)]
    fix, misfit = None, ""
    if pristine is not None and pack.patch.exists():
        try:
            fix = generated.fix_of(pack, pristine)
        except ValueError as error:  # `check` says so of fix.patch itself
            misfit = str(error)
    for mutant in mutants:
        place = mutant.path.relative_to(pack.folder).as_posix()
        yield from (f"{place}: {text}" for text in _mutant_errors(pack, mutant, pristine, fix))
    for (folder, name), count in Counter((FOLDERS[mutant.origin], mutant.name) for mutant in mutants).items():
        if count > 1:
            yield f"{folder}/{name}.patch: another of this name is in {folder}/{WHOLE}"
    if exemptions and misfit:
        yield f"mutants/equivalent.toml was not read: {misfit}"
    elif exemptions and fix:
        loads = [target.loads for target in pack.definition.targets.values()]
        candidates = {candidate.name for paths in loads for candidate in generated.candidates(fix, paths)}
        names = candidates | {mutant.name for mutant in mutants}
        unknown = [entry.name for entry in exemptions if entry.name not in names]
        yield from (f"mutants/equivalent.toml: no mutant {name!r}" for name in unknown)


def _record_findings(pack: Pack, exemptions: list[Listed]) -> Iterator[Finding]:
    waiting, folder = wrong_fixes.identities(pack, Origin.UNSEEN), FOLDERS[Origin.UNSEEN]
    for path in strength.files_of(pack):
        try:
            recorded = strength.load(path)
        except HarnessError as error:
            yield Finding(str(error))
            continue
        covered = {entry.name for entry in exemptions if entry.covers(recorded.target)}
        if not recorded.is_first_sight:
            yield from _strength_findings(pack, recorded, covered)
            continue
        present = dict(strength.match_names(pack, recorded, Origin.UNSEEN))
        waiting = {name: sha256 for name, sha256 in waiting.items() if name not in present.values()}
        names = [mutant.name for mutant in strength.open_mutants(pack, recorded, covered)]
        text = f"passed, and its patch is neither in {folder}/ nor in mutants/"
        yield from (Finding(f"{path.name}: {name} {text}") for name in names if name not in present)
        if names:
            step = "Next: a check that refuses them, and then mutants/"
            yield Finding(f"{path.name}: still open: {', '.join(names)}. {step}", is_warning=True)
    if waiting:
        step = f"Next: runner.py mutate {pack.name} --unseen --record"
        yield Finding(f"{folder}/: not judged yet: {', '.join(waiting)}. {step}", is_warning=True)


def _strength_findings(pack: Pack, recorded: Strength, covered: set[str]) -> Iterator[Finding]:
    for mutant in recorded.mutants:
        name = f"{recorded.name}: {mutant.name}"
        if mutant.fate in fates.OPEN and mutant.name not in covered:
            yield Finding(f"{name}: {mutant.fate}, and mutants/equivalent.toml does not say why")
        if mutant.fate in NOT_JUDGED_HERE and mutant.listed and mutant.name not in covered:
            yield Finding(f"{name}: mutants/equivalent.toml lists it no more")
    if reasons := strength.stale(pack, recorded):
        step = f"Next: runner.py mutate {pack.name} --record"
        yield Finding(f"{recorded.name}: STALE: {'; '.join(reasons)}. {step}", is_warning=True)


def _mutant_errors(pack: Pack, mutant: Mutant, pristine: Tree | None, fix: Fix | None) -> Iterator[str]:
    """Yield the errors of a mutant: in its form, or that it does not fit, or is no wrong fix."""
    if "\N{REPLACEMENT CHARACTER}" in mutant.patch:
        yield "it is not UTF-8"
    if "\n" in mutant.why or not re.search(r"\w", mutant.why):
        yield "before its first 'diff --git' stands one line: why it is wrong"
    if not changes.parse(mutant.patch):
        yield "it changes nothing"
    elif pristine is not None and fix is not None:
        try:
            yield from filter(None, [rebase.triviality(generated.effect(mutant, pack, pristine, fix), fix)])
        except ValueError as error:
            if mutant.is_whole:
                yield f"it does not fit the pinned release: {error}"
            else:
                hint = f"runner.py mutate --rebase, or {WHOLE}/ if it was written on the release"
                yield f"it does not fit the release with fix.patch: {error}. Next: {hint}"
