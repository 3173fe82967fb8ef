"""Mutants: wrong fixes, each a small patch on top of fix.patch, or a whole patch on the pinned release."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import tomli

from harness.core import files, structure
from harness.core.errors import HarnessError
from harness.pack.model import Pack
from harness.receipt import wrong_fixes
from harness.receipt.strength import Fate, MutantRecord

SLUG = re.compile(r"[^\w.-]+")


class Origin(StrEnum):
    """Who made a mutant: a person who knew the checks, a person who had not read them, or the operators."""

    OWN = "own"
    UNSEEN = "unseen"
    GENERATED = "generated"


#: The folders of the handwritten mutants.
FOLDERS = {Origin.OWN: wrong_fixes.OWN, Origin.UNSEEN: wrong_fixes.UNSEEN}


@dataclass(frozen=True)
class Mutant:
    """One wrong fix."""

    name: str  # the same in every run: the stem of the file, or the place, the operator and the edit
    origin: Origin
    operator: str  # of a generated mutant, else empty
    patch: str  # the text, with the line before the diff
    sha256: str = ""  # of what it makes of the release
    equivalence: str = ""  # why it is trivially the fix itself, or empty
    path: Path = Path()  # of a handwritten mutant
    is_whole: bool = False  # whether it is a patch on the release, and not on fix.patch
    release_patch: str = ""  # takes the place of fix.patch in a lane; empty until it is known
    misfit: str = ""  # why its patch does not apply, or empty

    @property
    def why(self) -> str:
        """The line before its diff: why it is wrong."""
        return self.patch.partition("diff --git ")[0].strip()

    @property
    def initial_record(self) -> MutantRecord:
        """Its record before a lane: EQUIVALENT where no lane is needed, else UNJUDGED."""
        fate, reason = Fate.UNJUDGED, f"its patch does not apply: {self.misfit}" if self.misfit else ""
        if self.equivalence:
            fate, reason = Fate.EQUIVALENT, self.equivalence
        return MutantRecord(self.name, self.origin, self.operator, self.why, self.sha256, fate, reason=reason)

    @property
    def slug(self) -> str:
        """A short name for files."""
        if self.origin in FOLDERS:
            return f"{self.origin}-{SLUG.sub('_', self.name)}"
        place = SLUG.sub("_", self.name.partition(": ")[0].rpartition("/")[2])
        return f"{place}-{files.key_of(self.name)[:8]}"


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


def handwritten(pack: Pack, origin: Origin) -> list[Mutant]:
    """Read the handwritten mutants of one origin, in the order of their names."""
    mutants, fix = [], wrong_fixes.fix_text(pack)
    for file in wrong_fixes.listed(pack, FOLDERS[origin]):
        try:
            text = file.path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            place = file.path.relative_to(pack.folder).as_posix()
            raise HarnessError(f"{pack.name}/{place}: not UTF-8: {error.reason}") from None
        sha256 = wrong_fixes.identity(fix, text, is_whole=file.is_whole)
        mutants.append(Mutant(file.name, origin, "", text, sha256, path=file.path, is_whole=file.is_whole))
    return mutants


def exemptions(pack: Pack) -> list[Listed]:
    """Read mutants/equivalent.toml, if it is there.

    HarnessError is raised where it does not parse, an entry has no reason or names a target that pack.toml does not
    list, a mutant has two entries, or a mutant that is judged elsewhere has no target left.
    """
    path = pack.folder / "mutants/equivalent.toml"
    if not path.exists():
        return []
    place = f"{pack.name}/mutants/{path.name}"
    try:
        file = structure.structure(tomli.loads(path.read_text(encoding="utf-8")), _File)
    except (tomli.TOMLDecodeError, UnicodeDecodeError, structure.StructureError) as error:
        raise HarnessError(f"{place}: {error}. Next: see CONTRIBUTING.md, Wrong fixes") from None
    entries, targets = [*file.equivalent, *file.elsewhere], pack.definition.targets
    errors = [f"{entry.name}: no reason" for entry in entries if not entry.reason.strip()]
    errors += [f"{entry.name}: no target {name}" for entry in entries for name in entry.targets if name not in targets]
    for entry in file.elsewhere:
        if not entry.targets or not set(targets) - set(entry.targets):
            errors.append(
                f"{entry.name}: elsewhere: name the targets that do not run its code, and leave one that does"
            )
    names = [entry.name for entry in entries]
    errors += [f"{name}: named twice" for name in sorted({name for name in names if names.count(name) > 1})]
    if errors:
        raise HarnessError(f"{place}: {'; '.join(errors)}")
    return entries
