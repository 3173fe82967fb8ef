"""A pack's dependency sets: requirements.txt and requirements.NAME.txt, as `uv pip compile` makes them.

Each line pins a version and the sha256 of its files. A URL is refused: the source of the files is the user's choice.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.core.errors import HarnessError
from harness.pack.model import Dependency

DEFAULT = "default"
#: The lane's interpreter brings these packages and their dependencies.
INTERPRETERS = {"torch", "triton"}
FILE = re.compile(r"requirements(?:\.(?P<name>[A-Za-z0-9][A-Za-z0-9.-]*))?\.txt")
COMMENT = re.compile(r"(?:^|\s)#.*")
HASH = re.compile(r"\s--hash=(?P<kind>\w+):(?P<digest>\S+)")
SHA256 = re.compile(r"[0-9a-f]{64}")


def read_sets(folder: Path) -> dict[str, dict[str, Dependency]]:
    """Read the dependency sets of a pack's folder, by name; HarnessError holds every mistake in them."""
    sets: dict[str, dict[str, Dependency]] = {}
    errors: list[str] = []
    for path in sorted(folder.glob("requirements*.txt")):
        match = FILE.fullmatch(path.name)
        if match is None:
            errors.append(f"{path.name}: no requirements.txt, and no requirements.NAME.txt")
            continue
        try:
            sets[match["name"] or DEFAULT], mistakes = read(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            mistakes = ["not UTF-8"]
        errors += [f"{path.name}: {error}" for error in mistakes]
    if errors:
        raise HarnessError(f"{folder.name}/{'; '.join(errors)}")
    return sets


def marker_holds(marker: str, python: str) -> bool:
    """Whether a marker is true on Linux, for a Python such as ``3.12``, without extras; an empty one is."""
    host = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "os_name": "posix"}
    host |= {"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython", "extra": ""}
    return not marker or Marker(marker).evaluate(host)


def _lines(text: str) -> Iterator[str]:
    """Yield the lines without comments and blank lines; continued lines are joined."""
    uncommented = "\n".join(COMMENT.sub("", line) for line in text.splitlines())
    yield from (line.strip() for line in re.sub(r"\\\s*\n", " ", uncommented).splitlines() if line.strip())


_requirement = functools.cache(Requirement)  # packs pin the same packages


def read(text: str) -> tuple[dict[str, Dependency], list[str]]:
    """Return the pins of a requirements file by package, and its errors, which quote no URL."""
    dependencies: dict[str, Dependency] = {}
    errors = []
    for line in _lines(text):
        hashes = [match["digest"] for match in HASH.finditer(line) if match["kind"] == "sha256"]
        package = re.split(r"[^\w.-]", line)[0][:80]
        try:
            requirement = _requirement(HASH.sub("", line).strip())
            (clause,) = requirement.specifier
            pinned = clause.operator == "==" and "*" not in clause.version and requirement.url is None
        except ValueError:  # not a requirement, or not one clause
            pinned = False
        if not pinned or not hashes or len(HASH.findall(line)) != len(hashes) or not all(map(SHA256.fullmatch, hashes)):
            errors.append(f"{package or 'a line'}: no PACKAGE==VERSION with its sha256. Next: uv's --generate-hashes")
        elif canonicalize_name(package) in INTERPRETERS:
            errors.append(f"{package}: the lane's interpreter brings it. Next: make the file with packs/uv.toml")
        elif canonicalize_name(package) in map(canonicalize_name, dependencies):
            errors.append(f"{package}: it stands there twice; every Python takes one version")
        else:
            dependencies[package] = Dependency(clause.version, tuple(hashes), str(requirement.marker or ""))
    return dependencies, errors
