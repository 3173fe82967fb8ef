"""Mutants: wrong fixes, each a small patch on the tree that has fix.patch, or a whole one on the pinned release."""

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
    """Who made it: a person, into mutants/, or into mutants/unseen/ without sight of the probe; operators."""

    OWN = "own"
    UNSEEN = "unseen"
    GENERATED = "generated"


#: Where those lie that persons wrote.
FOLDERS = {Origin.OWN: wrong_fixes.OWN, Origin.UNSEEN: wrong_fixes.UNSEEN}


@dataclass(frozen=True)
class Mutant:
    """One wrong fix."""

    name: str  # stable from run to run: the file's stem, or where, by which operator and what was changed
    origin: Origin
    operator: str  # of a generated one; empty of others
    patch: str  # the text, from the line that says why it is wrong
    sha256: str = ""  # of what it makes of the release
    same: str = ""  # why it is trivially the fix itself; empty where it is not
    path: Path = Path()  # of its file; of a generated one that is not written yet, none
    is_whole: bool = False  # whether it is a patch on the release, and not on fix.patch
    on_release: str = ""  # the patch that takes fix.patch's place in a lane; empty until it is known
    misfit: str = ""  # why it cannot: it does not apply

    @property
    def why(self) -> str:
        """The line before its diff."""
        return self.patch.partition("diff --git ")[0].strip()

    @property
    def unjudged(self) -> MutantRecord:
        """Its record before a lane judged it; UNJUDGED with the reason where none can, EQUIVALENT where none need."""
        fate, reason = Fate.UNJUDGED, f"its patch does not apply: {self.misfit}" if self.misfit else ""
        if self.same:
            fate, reason = Fate.EQUIVALENT, self.same
        return MutantRecord(self.name, self.origin, self.operator, self.why, self.sha256, fate, reason=reason)

    @property
    def slug(self) -> str:
        """A short name for files."""
        if self.origin in FOLDERS:
            return f"{self.origin}-{SLUG.sub('_', self.name)}"
        where = SLUG.sub("_", self.name.partition(": ")[0].rpartition("/")[2])
        return f"{where}-{files.key_of(self.name)[:8]}"


@dataclass(frozen=True)
class Listed:
    """A mutant that need not be killed: it is no wrong fix."""

    fate: ClassVar[Fate] = Fate.EQUIVALENT
    name: str
    reason: str
    targets: tuple[str, ...] = ()  # where that is so; empty: everywhere

    def covers(self, target: str) -> bool:
        """Whether it speaks of a target."""
        return not self.targets or target in self.targets


@dataclass(frozen=True)
class ListedElsewhere(Listed):
    """A mutant in code that its targets do not run, and others do."""

    fate: ClassVar[Fate] = Fate.ELSEWHERE


@dataclass(frozen=True)
class _File:
    equivalent: tuple[Listed, ...] = ()
    elsewhere: tuple[ListedElsewhere, ...] = ()


def own(pack: Pack, origin: Origin = Origin.OWN) -> list[Mutant]:
    """Read the mutants that persons wrote for a pack, in the order of their names."""
    found, fix = [], wrong_fixes.fix_text(pack)
    for one in wrong_fixes.listed(pack, FOLDERS[origin]):
        try:
            text = one.path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            where = one.path.relative_to(pack.folder).as_posix()
            raise HarnessError(f"{pack.name}/{where}: not UTF-8: {error.reason}") from None
        sha256 = wrong_fixes.identity(fix, text, is_whole=one.is_whole)
        found.append(Mutant(one.name, origin, "", text, sha256, path=one.path, is_whole=one.is_whole))
    return found


def listed(pack: Pack) -> list[Listed]:
    """Read mutants/equivalent.toml; nothing where there is none.

    HarnessError is raised where it does not parse, says no reason, names a target that pack.toml has not, or a mutant
    twice; or where no target is left that judges what is said to be judged elsewhere.
    """
    path = pack.folder / "mutants/equivalent.toml"
    if not path.exists():
        return []
    where = f"{pack.name}/mutants/{path.name}"
    try:
        found = structure.structure(tomli.loads(path.read_text(encoding="utf-8")), _File)
    except (tomli.TOMLDecodeError, UnicodeDecodeError, structure.StructureError) as error:
        raise HarnessError(f"{where}: {error}. Next: see CONTRIBUTING.md, Wrong fixes") from None
    every = [*found.equivalent, *found.elsewhere]
    errors = [f"{one.name}: no reason" for one in every if not one.reason.strip()]
    targets = pack.definition.targets
    errors += [f"{one.name}: no target {name}" for one in every for name in one.targets if name not in targets]
    for one in found.elsewhere:
        if not one.targets or not set(targets) - set(one.targets):
            errors.append(f"{one.name}: elsewhere: name the targets that do not run its code, and leave one that does")
    names = [one.name for one in every]
    errors += [f"{name}: named twice" for name in sorted({name for name in names if names.count(name) > 1})]
    if errors:
        raise HarnessError(f"{where}: {'; '.join(errors)}")
    return every
