"""The files of a pack's wrong fixes, and what tells one from another: what its tree holds, not how it is written.

A wrong fix is a patch on the tree that has fix.patch. One that is shorter on the release itself lies in ``whole/``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from harness.pack import judges
from harness.pack.model import Pack
from harness.upstream import patch

#: Where those lie that persons wrote: with the probe before them, or without.
OWN, UNSEEN = "mutants", "mutants/unseen"
#: In either: those on the release itself.
WHOLE = "whole"


@dataclass(frozen=True)
class WrongFix:
    """The file of one."""

    path: Path
    is_whole: bool  # whether it is on the release, and not on fix.patch

    @property
    def name(self) -> str:
        """The stem of its file."""
        return self.path.stem


def listed(pack: Pack, folder: str = OWN) -> list[WrongFix]:
    """List those of one folder of a pack, in the order of their names."""
    places = ((pack.folder / folder, False), (pack.folder / folder / WHOLE, True))
    found = [WrongFix(path, is_whole) for place, is_whole in places for path in place.glob("*.patch")]
    return sorted(found, key=lambda one: (one.name, one.is_whole))


def fix_text(pack: Pack) -> str:
    """Return the text of fix.patch; nothing where there is none."""
    return pack.patch.read_text(encoding="utf-8", errors="replace") if pack.patch.exists() else ""


@functools.lru_cache(maxsize=256)  # each target of a pack asks for all of them
def identity(fix: str, text: str, *, is_whole: bool) -> str:
    """Return the sha256 of what a wrong fix makes of the release; of its text where index lines are abbreviated."""
    return patch.outcome(*([] if is_whole else [fix]), text) or judges.patch_meaning(text)


def identities(pack: Pack, folder: str = OWN) -> dict[str, str]:
    """Map the names of those of one folder to what each makes of the release."""
    fix = fix_text(pack)
    return {
        one.name: identity(fix, one.path.read_text(encoding="utf-8", errors="replace"), is_whole=one.is_whole)
        for one in listed(pack, folder)
    }
