"""A pack: the folder ``packs/NN_slug``, found by number, slug or glob."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

from harness import definition_rules, strict
from harness.definition import Definition
from harness.errors import HarnessError, unknown

FOLDER_PATTERN = re.compile(r"(?P<number>\d{2,})_(?P<slug>[a-z0-9_]+)")


@dataclass(frozen=True)
class Pack:
    """One pack on disk."""

    folder: Path
    definition: Definition

    @property
    def name(self) -> str:
        """The folder's name, such as ``09_liger_flce_none``."""
        return self.folder.name

    @property
    def probe(self) -> Path:
        """The probe."""
        return self.folder / "reproduce.py"

    @property
    def patch(self) -> Path:
        """The patch for the pinned release."""
        return self.folder / "fix.patch"

    @property
    def head_patch(self) -> Path:
        """The patch for upstream's default branch: its own where the pinned release's does not apply."""
        own = self.folder / "fix.head.patch"
        return own if own.exists() else self.patch

    @property
    def report(self) -> Path:
        """The report that upstream reads."""
        return self.folder / "REPORT.md"

    @property
    def receipts(self) -> Path:
        """The folder of the committed receipts."""
        return self.folder / "receipts"


def load(folder: Path) -> Pack:
    """Load one pack, or raise HarnessError with all errors of its pack.toml."""
    if not FOLDER_PATTERN.fullmatch(folder.name):
        raise HarnessError(f"{folder.name}: a pack's folder is named NN_slug, such as 09_liger_flce_none")
    try:
        return Pack(folder, definition_rules.parse((folder / "pack.toml").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise HarnessError(f"{folder.name}: pack.toml is missing. Next: see CONTRIBUTING.md") from None
    except UnicodeDecodeError as error:
        raise HarnessError(f"{folder.name}/pack.toml: not UTF-8: {error.reason} at byte {error.start}") from None
    except strict.StructureError as error:
        raise HarnessError(f"{folder.name}/pack.toml: {error}. Next: runner.py check {folder.name}") from None


def folders(packs: Path) -> list[Path]:
    """List the folders of all packs under `packs`, in the order of their numbers."""
    if not packs.is_dir():
        raise HarnessError(f"no folder of packs at {packs}. Next: name it with --packs DIR")
    found = [path for path in packs.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))]
    if not found:
        raise HarnessError(f"no pack in {packs}. Next: name another folder with --packs DIR")
    return sorted(found, key=lambda path: (_number(path.name), path.name))


def _number(name: str) -> int:
    match = FOLDER_PATTERN.fullmatch(name)
    return int(match["number"]) if match else -1


def matches(name: str, wanted: str) -> bool:
    """Say whether a folder's name is what a number, a slug or a glob names."""
    match = FOLDER_PATTERN.fullmatch(name)
    if wanted.isdecimal():
        return match is not None and int(match["number"]) == int(wanted)
    slug = match["slug"] if match else ""
    return wanted in (name, slug) or fnmatch.fnmatchcase(name, wanted) or fnmatch.fnmatchcase(slug, wanted)


def select(packs: Path, wanted: tuple[str, ...]) -> list[Path]:
    """List the folders of the packs that `wanted` names by number, slug or glob; of all packs when it is empty."""
    every = folders(packs)
    for name in wanted:
        if not any(matches(folder.name, name) for folder in every):
            raise unknown("pack", name, (folder.name for folder in every), "runner.py list")
    return [folder for folder in every if not wanted or any(matches(folder.name, name) for name in wanted)]
