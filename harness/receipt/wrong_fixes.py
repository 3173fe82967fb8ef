"""The wrong fixes of a pack (mutants): what people wrote into mutants/, and what is generated from fix.patch.

The identity of a wrong fix is the content of the tree that it makes, not its text.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness.core import files
from harness.pack import judges, patch_text
from harness.pack.model import Pack

SLUG = re.compile(r"[^\w.-]+")
#: The folder, in each folder of wrong fixes, for patches on the release itself. The others apply on top of fix.patch.
WHOLE = "whole"


class Origin(StrEnum):
    """Who made a mutant: a person who knew the checks, a person who had not read them, or the operators."""

    OWN = "own"
    UNSEEN = "unseen"
    GENERATED = "generated"


#: The folders of the handwritten mutants.
FOLDERS = {Origin.OWN: "mutants", Origin.UNSEEN: "mutants/unseen"}


@dataclass(frozen=True)
class Mutant:
    """One wrong fix."""

    name: str  # the same in every run: the stem of the file, or the place, the operator and the edit
    origin: Origin
    operator: str  # of a generated mutant, else empty
    patch: str  # the text, with the line before the diff
    sha256: str = ""  # of what it makes of the release, or of its text where index lines are abbreviated
    equivalence: str = ""  # why it is trivially the fix itself, or empty
    path: Path = Path()  # of a handwritten mutant
    is_whole: bool = False  # whether it is a patch on the release, and not on fix.patch
    release_patch: str = ""  # of a generated mutant: the patch on the release

    @property
    def why(self) -> str:
        """The line before its diff: why it is wrong."""
        return self.patch.partition("diff --git ")[0].strip()

    @property
    def slug(self) -> str:
        """A short name for files."""
        if self.origin in FOLDERS:
            return f"{self.origin}-{SLUG.sub('_', self.name)}"
        place = SLUG.sub("_", self.name.partition(": ")[0].rpartition("/")[2])
        return f"{place}-{files.key_of(self.name)[:8]}"


@functools.lru_cache(maxsize=256)  # each target of a pack asks for all of them
def _identity(fix: str, text: str, *, is_whole: bool) -> str:
    return patch_text.result_hash(*([] if is_whole else [fix]), text) or judges.patch_meaning(text)


def handwritten(pack: Pack, origin: Origin) -> list[Mutant]:
    """Read the handwritten mutants of one origin, in the order of their names. Bytes that are no UTF-8 are replaced."""
    fix = pack.patch.read_text(encoding="utf-8", errors="replace") if pack.patch.exists() else ""
    folder, mutants = pack.folder / FOLDERS[origin], []
    for path in sorted([*folder.glob("*.patch"), *folder.glob(f"{WHOLE}/*.patch")], key=lambda path: path.stem):
        text, is_whole = path.read_text(encoding="utf-8", errors="replace"), path.parent != folder
        sha256 = _identity(fix, text, is_whole=is_whole)
        mutants.append(Mutant(path.stem, origin, "", text, sha256, path=path, is_whole=is_whole))
    return mutants


def identities(pack: Pack, origin: Origin = Origin.OWN) -> dict[str, str]:
    """Map the names of the handwritten mutants of one origin to the sha256 of what they make."""
    return {mutant.name: mutant.sha256 for mutant in handwritten(pack, origin)}
