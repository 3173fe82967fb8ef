"""Packs on disk: the folders ``packs/NN_slug``, selected by number, slug, glob or upstream file, and loaded.

pack.toml is read strictly, with all its errors at once; `forms` has the type of each key.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import tomli

from harness.core import HarnessError, structure, unknown_name
from harness.core.words import Evidence, Fix, Verdict
from harness.pack import patch_text, requirements
from harness.pack.model import CPU, TESTS, Definition, Dependency, Pack, Upstream

FOLDER_PATTERN = re.compile(r"(?P<number>\d{2,})_(?P<slug>[a-z0-9_]+)")


def _upstream_errors(upstream: Upstream) -> Iterator[str]:
    release = bool(upstream.version and upstream.file and upstream.sha256) and upstream.date is None
    release_fields = (upstream.version, upstream.file, upstream.sha256)
    commit = bool(upstream.commit and upstream.date and upstream.repository.startswith("https://"))
    if not release and (any(release_fields) or not commit):
        yield "upstream: a release has version, file and sha256; a commit has commit, date and an https:// repository"


def _patch_errors(definition: Definition) -> Iterator[str]:
    """Refuse keys that need a patch in a pack without one, and keys that a compiled upstream cannot have."""
    head = definition.head
    if definition.upstream.is_compiled and (head or definition.has_patch):
        yield 'fix, head: a compiled wheel is judged as it is, without a patch (fix = "none") and without a commit'
    if head and head.verdict == Verdict.FIXED_UPSTREAM and not head.fixed_by:
        yield "head.fixed_by: name the commit that fixed it"
    if not definition.has_patch:
        if head and head.verdict not in (Verdict.REPRODUCED, Verdict.FIXED_UPSTREAM):
            yield "head: without a patch the verdict is REPRODUCED, or FIXED_UPSTREAM"
        if any(target.loads for target in definition.targets.values()):
            yield "targets: without a patch no file is changed"
        if definition.ask or definition.upstream_tests:
            yield "ask, upstream_tests: without a patch there is neither"


def _target_errors(definition: Definition, document: dict[str, Any]) -> Iterator[str]:
    for name, target in definition.targets.items():
        path, executes = f"targets.{name}", Evidence.EXECUTED in target.evidence
        if not target.evidence:
            yield f"{path}.evidence: name at least one of {', '.join(Evidence)}"
        if name == CPU and executes:
            yield f"{path}.evidence: executed means on a GPU of that architecture"
        if name != CPU and Evidence.INTERPRETED in target.evidence:
            yield f"{path}.evidence: interpreted is evidence for the target cpu"
        if target.environment not in ("", *definition.environments):
            yield f"{path}.environment: there is no environment {target.environment!r}"
        if target.gpus > 1 and not executes:
            yield f"{path}.gpus: more than 1 only where executed is admitted"
        # NCCL wants a GPU for each rank; several ranks share one only if pack.toml says so.
        shares = target.gpus == 1 and "gpus" in document["targets"][name]
        if executes and target.ranks not in (1, target.gpus) and not shares:
            yield (
                f"{path}.ranks: {target.ranks} on {target.gpus} GPU{'s' * (target.gpus > 1)}; "
                f"NCCL wants one GPU a rank (gpus = {target.ranks}); write gpus = 1 where all ranks share one"
            )


def _set_errors(definition: Definition) -> Iterator[str]:
    used = {f"targets.{name}": target.dependencies for name, target in definition.targets.items()}
    used |= {"upstream_tests": TESTS} if definition.upstream_tests else {}
    for path, name in used.items():
        if name not in ("default", *definition.dependencies):
            available = ", ".join(definition.dependencies) or "none"
            yield f"{path}.dependencies: no set {name!r}; there is {available}"


def _complete(document: dict[str, Any], patched: tuple[str, ...]) -> None:
    """Give each target the pack's defaults for the keys that it does not state."""
    base = {"loads": () if document.get("fix") == Fix.NONE else patched, "claims": document.pop("claims", ())}
    targets = document.get("targets")
    if isinstance(targets, dict):
        document["targets"] = {name: base | keys if isinstance(keys, dict) else keys for name, keys in targets.items()}


def parse(text: str, sets: Mapping[str, dict[str, Dependency]] = {}, patched: tuple[str, ...] = ()) -> Definition:
    """Parse a pack.toml with the dependency sets beside it; StructureError holds all its errors.

    `patched` are the files of its fix.patch.
    """
    try:
        document = tomli.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 900 brackets
        raise structure.StructureError([f"not TOML: {error}"]) from None
    if "dependencies" in document:
        raise structure.StructureError(["dependencies: they stand in requirements.txt, which uv makes"])
    _complete(document, patched)
    definition = replace(structure.structure(document, Definition), dependencies=dict(sets))
    errors = [*_upstream_errors(definition.upstream), *_patch_errors(definition), *_set_errors(definition)]
    errors += _target_errors(definition, document)
    if errors:
        raise structure.StructureError(errors)
    return definition


def load_pack(folder: Path) -> Pack:
    """Load one pack; HarnessError holds all errors of its pack.toml."""
    if not FOLDER_PATTERN.fullmatch(folder.name):
        raise HarnessError(f"{folder.name}: a pack's folder is named NN_slug, such as 09_liger_flce_none")
    patch = folder / "fix.patch"
    try:
        text = (folder / "pack.toml").read_text(encoding="utf-8")
        changes = patch.read_text(encoding="utf-8", errors="replace") if patch.is_file() else ""
        changed = tuple(file.path for file in patch_text.parse(changes))
        return Pack(folder, parse(text, requirements.read_sets(folder), changed))
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
