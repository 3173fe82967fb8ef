"""Packs on disk: the folders ``packs/NN_slug``, selected by number, slug, glob or upstream file, and loaded."""

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from harness.core import structure
from harness.core.errors import HarnessError, unknown_name
from harness.pack import patch_text, requirements, rules
from harness.pack.model import Definition, Pack

FOLDER_PATTERN = re.compile(r"(?P<number>\d{2,})_(?P<slug>[a-z0-9_]+)")


def load_pack(folder: Path) -> Pack:
    """Load one pack; HarnessError holds all errors of its pack.toml."""
    if not FOLDER_PATTERN.fullmatch(folder.name):
        raise HarnessError(f"{folder.name}: a pack's folder is named NN_slug, such as 09_liger_flce_none")
    patch = folder / "fix.patch"
    try:
        text = (folder / "pack.toml").read_text(encoding="utf-8")
        changes = patch.read_text(encoding="utf-8", errors="replace") if patch.is_file() else ""
        changed = tuple(file.path for file in patch_text.parse(changes))
        return Pack(folder, rules.parse(text, requirements.read_sets(folder), changed))
    except FileNotFoundError:
        raise HarnessError(f"{folder.name}: pack.toml is missing. Next: runner.py new, or CONTRIBUTING.md") from None
    except OSError as error:
        raise HarnessError(f"{folder.name}/pack.toml: it cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise HarnessError(f"{folder.name}/pack.toml: not UTF-8: {error.reason} at byte {error.start}") from None
    except structure.StructureError as error:
        raise HarnessError(f"{folder.name}/pack.toml: {error}. Next: CONTRIBUTING.md, pack.toml") from None


def folders(packs: Path) -> list[Path]:
    """List the folders of all packs under `packs`, in the order of their numbers."""
    if not packs.is_dir():
        raise HarnessError(f"no folder of packs at {packs}. Next: name it with --packs DIR")
    paths = [path for path in packs.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))]
    if not paths:
        raise HarnessError(f"no pack in {packs}. Next: name another folder with --packs DIR")
    return sorted(paths, key=lambda path: (_number(path.name), path.name))


def _number(name: str) -> int:
    match = FOLDER_PATTERN.fullmatch(name)
    return int(match["number"]) if match else -1


def matches(name: str, pattern: str) -> bool:
    """Whether a number, a slug or a glob names a folder."""
    match = FOLDER_PATTERN.fullmatch(name)
    if pattern.isdecimal():
        return match is not None and match["number"].lstrip("0") == pattern.lstrip("0")
    slug = match["slug"] if match else ""
    return pattern in (name, slug) or fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(slug, pattern)


def select_packs(packs: Path, patterns: tuple[str, ...]) -> list[Path]:
    """List the folders of the packs that `patterns` name by number, slug or glob; without patterns, of all packs."""
    all_folders = folders(packs)
    for name in patterns:
        if not any(matches(folder.name, name) for folder in all_folders):
            raise unknown_name("pack", name, (folder.name for folder in all_folders), "runner.py list")
    return [folder for folder in all_folders if not patterns or any(matches(folder.name, name) for name in patterns)]


def paths(definition: Definition) -> tuple[str, ...]:
    """List the files of the upstream repository that a pack is about; a folder ends with a slash.

    They are the files that its targets load. A pack without a patch names none: they are its modules under test.
    """
    loads = dict.fromkeys(path for target in definition.targets.values() for path in target.loads)
    if loads:
        return tuple(loads)
    root = f"{definition.upstream.source_root}/".lstrip("/")
    modules = [f"{root}{name.replace('.', '/')}" for name in definition.upstream.modules]
    return tuple(path for module in modules for path in (f"{module}.py", f"{module}/"))


def packs_about(packs: Iterable[Pack], changed: Iterable[str]) -> list[Pack]:
    """Return the packs that are about one of these files, by their paths from the repository's root.

    A pack of compiled code is left out: a checkout is not built, so that its code cannot be imported.
    """
    files = {str(PurePosixPath(line)) for line in changed if line}
    concerned_packs = []
    for pack in packs:
        subjects = paths(pack.definition)
        folders = tuple(path for path in subjects if path.endswith("/"))
        touched = not files.isdisjoint(subjects) or any(file.startswith(folders) for file in files)
        if touched and not pack.definition.upstream.is_compiled:
            concerned_packs.append(pack)
    return concerned_packs
