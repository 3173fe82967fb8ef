"""A pack's dependency sets: requirements.txt and requirements.NAME.txt, as `uv pip compile` makes them.

Each line pins a version and the sha256 of its files. Where they come from is no pack's business: a URL is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from harness.core.structure import StructureError
from harness.pack.model import Dependency

DEFAULT = "default"
#: The lane's interpreter brings them, and what they require.
INTERPRETERS = {"torch", "triton"}
FILE = re.compile(r"requirements(?:\.(?P<name>[A-Za-z0-9][A-Za-z0-9.-]*))?\.(?:txt|in)")
COMMENT = re.compile(r"(?:^|\s)#.*")
HASH = re.compile(r"\s--hash=(?P<kind>\w+):(?P<digest>\S+)")
SHA256 = re.compile(r"[0-9a-f]{64}")


def of_folder(folder: Path) -> dict[str, dict[str, Dependency]]:
    """Read the dependency sets of a pack's folder, by name, or raise StructureError with every mistake in them."""
    sets: dict[str, dict[str, Dependency]] = {}
    errors: list[str] = []
    paths = sorted((*folder.glob("requirements*.txt"), *folder.glob("requirements*.in")), key=lambda path: path.suffix)
    for path in reversed(paths):  # the outputs first
        match = FILE.fullmatch(path.name)
        name = (match["name"] or DEFAULT) if match else ""
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            errors.append(f"{path.name}: not UTF-8")
            continue
        if not name:
            errors.append(f"{path.name}: no requirements.txt, and no requirements.NAME.txt")
        elif path.suffix == ".txt":
            sets[name], wrong = read(text)
            errors += [f"{path.name}: {error}" for error in wrong]
        else:
            errors += [f"{path.name}: {error}" for error in _unmet(text, path.with_suffix(".txt").name, sets.get(name))]
    if errors:
        raise StructureError(errors)
    return sets


def holds(marker: Marker | None, python: str, extras: frozenset[str] = frozenset()) -> bool:
    """Whether a marker is true on Linux, for a Python such as ``3.12`` and with one of the extras or none."""
    if marker is None:
        return True
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "os_name": "posix"}
    here |= {"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython"}
    return any(marker.evaluate({**here, "extra": extra}) for extra in ("", *extras))


def _lines(text: str) -> Iterator[str]:
    """Yield the lines that say something, continued ones joined, without comments."""
    whole = "\n".join(COMMENT.sub("", line) for line in text.splitlines())
    yield from (line.strip() for line in re.sub(r"\\\s*\n", " ", whole).splitlines() if line.strip())


def read(text: str) -> tuple[dict[str, Dependency], list[str]]:
    """Return what one requirements file pins, by package, and its errors."""
    found: dict[str, Dependency] = {}
    errors = []
    for line in _lines(text):
        hashes = [(match["kind"], match["digest"]) for match in HASH.finditer(line)]
        error, requirement = _requirement(HASH.sub("", line).strip())
        if requirement is None:
            errors.append(error)
            continue
        package, versions = requirement.name, list(requirement.specifier)
        if canonicalize_name(package) in INTERPRETERS:
            errors.append(f"{package}: the lane's interpreter brings it. Next: make the file with packs/uv.toml")
        elif canonicalize_name(package) in map(canonicalize_name, found):
            errors.append(f"{package}: it stands there twice; every Python takes one version")
        elif len(versions) != 1 or versions[0].operator != "==" or "*" in versions[0].version:
            errors.append(f"{package}: no single version with ==")
        elif not hashes or any(kind != "sha256" or not SHA256.fullmatch(digest) for kind, digest in hashes):
            what = "a hash that is no sha256" if hashes else "no sha256"
            errors.append(f"{package}: {what}. Next: uv's --generate-hashes")
        else:
            marker = str(requirement.marker or "")
            found[package] = Dependency(versions[0].version, tuple(digest for _, digest in hashes), marker)
    return found, errors


def _requirement(text: str) -> tuple[str, Requirement | None]:
    """Read NAME==VERSION with a marker or none; or say, without a URL that stands there, why it is none."""
    if text.startswith("-"):
        return f"{re.split('[ =]', text)[0]}: an option, which no set takes", None
    name = re.split(r"[^\w.-]", text)[0][:80]
    if "://" in text or " @ " in text:
        return f"{name or 'a line'}: a URL or a path; a set names versions alone", None
    try:
        return "", Requirement(text)
    except InvalidRequirement:
        return f"{name or 'a line'}: no NAME==VERSION", None


def _unmet(text: str, file: str, pinned: dict[str, Dependency] | None) -> Iterator[str]:
    """Yield what an input asks for and the file that was made of it does not have."""
    again = "Next: uv pip compile, as CONTRIBUTING.md says"
    if pinned is None:
        yield f"there is no {file}. {again}"
        return
    versions = {canonicalize_name(name): one.version for name, one in pinned.items()}
    for line in _lines(text):
        error, requirement = _requirement(line)
        if requirement is None:
            yield error
            continue
        version = versions.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield f"it asks for {requirement}, and {file} has {version or 'none'}. {again}"
