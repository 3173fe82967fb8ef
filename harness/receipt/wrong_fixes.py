"""The files of a pack's wrong fixes, and their identity: the content of the tree that they make, not their text.

A wrong fix is a patch on the tree that has fix.patch. Wrong fixes on the release itself lie in ``whole/``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from harness.pack import judges
from harness.pack.model import Pack
from harness.upstream import patch

#: The folders of those that people wrote: after reading the checks, and without having read them.
OWN, UNSEEN = "mutants", "mutants/unseen"
#: The folder in each for wrong fixes on the release itself.
WHOLE = "whole"


@dataclass(frozen=True)
class WrongFix:
    """The file of a wrong fix."""

    path: Path
    is_whole: bool  # whether it applies to the release itself, and not on top of fix.patch

    @property
    def name(self) -> str:
        """The stem of its file."""
        return self.path.stem


def listed(pack: Pack, folder: str = OWN) -> list[WrongFix]:
    """List the wrong fixes in a folder of a pack, by name."""
    places = ((pack.folder / folder, False), (pack.folder / folder / WHOLE, True))
    fixes = [WrongFix(path, is_whole) for place, is_whole in places for path in place.glob("*.patch")]
    return sorted(fixes, key=lambda file: (file.name, file.is_whole))


def fix_text(pack: Pack) -> str:
    """Return the text of fix.patch; empty where the pack has none."""
    return pack.patch.read_text(encoding="utf-8", errors="replace") if pack.patch.exists() else ""


@functools.lru_cache(maxsize=256)  # each target of a pack asks for all of them
def identity(fix: str, text: str, *, is_whole: bool) -> str:
    """Return the sha256 of what a wrong fix makes of the release, or of its text where index lines are abbreviated."""
    return patch.result_hash(*([] if is_whole else [fix]), text) or judges.patch_meaning(text)


def identities(pack: Pack, folder: str = OWN) -> dict[str, str]:
    """Map the names of the wrong fixes in a folder to their identities."""
    fix = fix_text(pack)
    return {
        file.name: identity(fix, file.path.read_text(encoding="utf-8", errors="replace"), is_whole=file.is_whole)
        for file in listed(pack, folder)
    }
