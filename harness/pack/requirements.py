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

from harness.core.errors import HarnessError
from harness.pack.model import Dependency

DEFAULT = "default"
#: The lane's interpreter brings them, and what they require.
INTERPRETERS = {"torch", "triton"}
FILE = re.compile(r"requirements(?:\.(?P<name>[A-Za-z0-9][A-Za-z0-9.-]*))?\.txt")
COMMENT = re.compile(r"(?:^|\s)#.*")
HASH = re.compile(r"\s--hash=(?P<kind>\w+):(?P<digest>\S+)")
SHA256 = re.compile(r"[0-9a-f]{64}")


def of_folder(folder: Path) -> dict[str, dict[str, Dependency]]:
    """Read the dependency sets of a pack's folder, by name, or raise HarnessError with every mistake in them."""
    sets: dict[str, dict[str, Dependency]] = {}
    errors: list[str] = []
    for path in sorted(folder.glob("requirements*.txt")):
        match = FILE.fullmatch(path.name)
        if match is None:
            errors.append(f"{path.name}: no requirements.txt, and no requirements.NAME.txt")
            continue
        try:
            sets[match["name"] or DEFAULT], wrong = read(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            wrong = ["not UTF-8"]
        errors += [f"{path.name}: {error}" for error in wrong]
    if errors:
        raise HarnessError(f"{folder.name}/{'; '.join(errors)}")
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
    """Return what one requirements file pins, by package, and its errors, without a URL that stands there."""
    found: dict[str, Dependency] = {}
    errors = []
    for line in _lines(text):
        hashes = [match["digest"] for match in HASH.finditer(line) if match["kind"] == "sha256"]
        package = re.split(r"[^\w.-]", line)[0][:80]
        try:
            requirement = Requirement(HASH.sub("", line).strip())
            exact = [one.version for one in requirement.specifier if one.operator == "==" and "*" not in one.version]
            pinned = exact and len(requirement.specifier) == 1 and requirement.url is None
        except InvalidRequirement:
            pinned = False
        if not pinned or not hashes or len(HASH.findall(line)) != len(hashes) or not all(map(SHA256.fullmatch, hashes)):
            errors.append(f"{package or 'a line'}: no PACKAGE==VERSION with its sha256. Next: uv's --generate-hashes")
        elif canonicalize_name(package) in INTERPRETERS:
            errors.append(f"{package}: the lane's interpreter brings it. Next: make the file with packs/uv.toml")
        elif canonicalize_name(package) in map(canonicalize_name, found):
            errors.append(f"{package}: it stands there twice; every Python takes one version")
        else:
            found[package] = Dependency(exact[0], tuple(hashes), str(requirement.marker or ""))
    return found, errors
