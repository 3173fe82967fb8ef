"""What stands in mutants/ of a pack: equivalent.toml, what `check` finds in the wrong fixes, and `mutate --rebase`.

After a change of fix.patch, git merges each wrong fix on an earlier fix.patch with the present one.
"""

import contextlib
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import tomli

from harness.core import files, git, structure
from harness.core.errors import Finding, HarnessError
from harness.mutate import changes, generated
from harness.mutate.generated import Fix
from harness.pack.model import Pack
from harness.receipt import strength
from harness.receipt.receipt import FIRST_SIGHT, STRENGTH
from harness.receipt.strength import FOLDERS, NOT_JUDGED_HERE, OPEN, WHOLE, Fate, Mutant, Origin, Strength
from harness.upstream.tree import Tree

#: The outcomes of a wrong fix that still fits, and of a merged one.
KEPT, REBASED = "kept", "rebased"


@dataclass(frozen=True)
class Listed:
    """A mutant that need not be killed, since it is no wrong fix."""

    fate: ClassVar[Fate] = Fate.EQUIVALENT
    name: str
    reason: str
    targets: tuple[str, ...] = ()  # on which it is none; empty: all

    def covers(self, target: str) -> bool:
        return not self.targets or target in self.targets


@dataclass(frozen=True)
class ListedElsewhere(Listed):
    """A mutant in code that only other targets than these run."""

    fate: ClassVar[Fate] = Fate.ELSEWHERE


@dataclass(frozen=True)
class _File:
    equivalent: tuple[Listed, ...] = ()
    elsewhere: tuple[ListedElsewhere, ...] = ()


def exemptions(pack: Pack) -> list[Listed]:
    """Read mutants/equivalent.toml, if it is there. HarnessError has every error in it."""
    path = pack.folder / "mutants/equivalent.toml"
    if not path.exists():
        return []
    place = f"{pack.name}/mutants/{path.name}"
    try:
        file = structure.structure(tomli.loads(path.read_text(encoding="utf-8")), _File)
    except ValueError as error:
        raise HarnessError(f"{place}: {error}. Next: see CONTRIBUTING.md, Wrong fixes") from None
    entries, targets = [*file.equivalent, *file.elsewhere], pack.definition.targets
    errors = [f"{entry.name}: no reason" for entry in entries if not entry.reason.strip()]
    errors += [f"{entry.name}: no target {name}" for entry in entries for name in entry.targets if name not in targets]
    errors += [
        f"{entry.name}: elsewhere: name the targets that do not run its code, and leave one that does"
        for entry in file.elsewhere
        if not entry.targets or not set(targets) - set(entry.targets)
    ]
    names = [entry.name for entry in entries]
    errors += [f"{name}: named twice" for name in sorted({name for name in names if names.count(name) > 1})]
    if errors:
        raise HarnessError(f"{place}: {'; '.join(errors)}")
    return entries


def findings(pack: Pack, pristine: Tree | None) -> Iterator[Finding]:
    """Yield the findings. Without the pinned tree neither patches nor names are tried."""
    try:
        listed = exemptions(pack)
    except HarnessError as error:
        yield Finding(str(error))
        return
    yield from map(Finding, _file_errors(pack, pristine, listed))
    yield from _record_findings(pack, listed)


def _file_errors(pack: Pack, pristine: Tree | None, listed: list[Listed]) -> Iterator[str]:
    mutants = [mutant for origin in FOLDERS for mutant in strength.handwritten(pack, origin)]
    fix = None
    if pristine is not None and pack.patch.exists():
        with contextlib.suppress(ValueError):  # `check` says so of fix.patch itself
            fix = generated.fix_of(pack, pristine)
    for mutant in mutants:
        place = mutant.path.relative_to(pack.folder).as_posix()
        yield from (f"{place}: {text}" for text in _mutant_errors(pack, mutant, pristine, fix))
    for (folder, name), count in Counter((FOLDERS[mutant.origin], mutant.name) for mutant in mutants).items():
        if count > 1:
            yield f"{folder}/{name}.patch: another of this name is in {folder}/{WHOLE}"
    if listed and fix:
        loads = [target.loads for target in pack.definition.targets.values()]
        candidates = {candidate.name for paths in loads for candidate in generated.candidates(fix, paths)}
        names = candidates | {mutant.name for mutant in mutants}
        unknown = [entry.name for entry in listed if entry.name not in names]
        yield from (f"mutants/equivalent.toml: no mutant {name!r}" for name in unknown)


def _record_findings(pack: Pack, listed: list[Listed]) -> Iterator[Finding]:
    waiting, folder = strength.identities(pack, Origin.UNSEEN), FOLDERS[Origin.UNSEEN]
    records = (sorted(pack.folder.glob(f"receipts/{kind}*.json")) for kind in (STRENGTH, FIRST_SIGHT))
    for path in itertools.chain.from_iterable(records):
        try:
            recorded = strength.load(path)
        except HarnessError as error:
            yield Finding(str(error))
            continue
        covered = {entry.name for entry in listed if entry.covers(recorded.target)}
        if not recorded.is_first_sight:
            yield from _strength_findings(pack, recorded, covered)
            continue
        present = dict(strength.match_names(pack, recorded, Origin.UNSEEN))
        waiting = {name: sha256 for name, sha256 in waiting.items() if name not in present.values()}
        closed = {*covered, *(name for name, _ in strength.match_names(pack, recorded, Origin.OWN))}
        names = [mutant.name for mutant in recorded.mutants if mutant.fate in OPEN and mutant.name not in closed]
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
        if mutant.fate in OPEN and mutant.name not in covered:
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
            yield from filter(None, [triviality(generated.effect(mutant, pack, pristine, fix), fix)])
        except ValueError as error:
            if mutant.is_whole:
                yield f"it does not fit the pinned release: {error}"
            else:
                hint = f"runner.py mutate --rebase, or {WHOLE}/ if it was written on the release"
                yield f"it does not fit the release with fix.patch: {error}. Next: {hint}"


def rebase(pack: Pack, pristine: Tree) -> Iterator[tuple[str, str]]:
    """Put the handwritten mutants of a pack on top of the present fix.patch.

    Yield the file of each, and KEPT, REBASED, or why it was left. ValueError: fix.patch does not fit the pinned tree.
    """
    fix, earlier_fixes = generated.fix_of(pack, pristine), list(_earlier_fixes(pack, pristine))
    for mutant in (mutant for origin in FOLDERS for mutant in strength.handwritten(pack, origin)):
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
