"""A pack's dependency sets: requirements.txt and requirements.NAME.txt, as `uv pip compile` makes them.

Each line pins a version and the sha256 of its files. A URL is refused: the source of the files is the user's choice.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.core import HarnessError, files, unknown_name
from harness.pack.model import Definition, Dependency

DEFAULT = "default"
#: The lane's interpreter brings these packages and their dependencies.
INTERPRETERS = {"torch", "triton"}
FILE = re.compile(r"requirements(?:\.(?P<name>[A-Za-z0-9][A-Za-z0-9.-]*))?\.txt")
COMMENT = re.compile(r"#(?<!\S#).*")
SHA256 = re.compile(r"sha256:([0-9a-f]{64})")


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


@dataclass(frozen=True)
class DependencySet:
    """A named set for one Python tag; its hash names the folder in the cache."""

    name: str
    members: Mapping[str, Dependency]  # by package

    @property
    def requirements(self) -> str:
        """The set as a requirements file."""
        lines = []
        for package, member in self.members.items():
            hashes = "".join(f" --hash=sha256:{sha256}" for sha256 in sorted(member.hashes))
            lines.append(f"{package}=={member.version}{hashes}\n")
        return "".join(sorted(lines))

    @property
    def sha256(self) -> str:
        return files.sha256_bytes(self.requirements.encode())

    @property
    def versions(self) -> dict[str, str]:
        return {package: member.version for package, member in self.members.items()}


def named_set(definition: Definition, name: str, tag: str) -> DependencySet:
    """Return the set of that name, for a Python tag such as ``cp311``."""
    if name not in definition.dependencies and name != "default":
        raise unknown_name("dependency set", name, definition.dependencies, "--with SET, or --with PACKAGE==VERSION")
    python = f"3.{tag.removeprefix('cp3')}"
    members = {
        package: dependency
        for package, dependency in definition.dependencies.get(name, {}).items()
        if marker_holds(dependency.marker, python)
    }
    return DependencySet(name, members)


_requirement = functools.cache(Requirement)  # packs pin the same packages


def exact_pin(text: str) -> tuple[Requirement, str]:
    """Parse ``PACKAGE==VERSION``, with or without a marker; ValueError: the text is no such pin."""
    requirement = _requirement(text)
    (clause,) = requirement.specifier
    if clause.operator != "==" or "*" in clause.version or requirement.url is not None:
        raise ValueError(f"{text!r} pins no version")
    return requirement, clause.version


def read(text: str) -> tuple[dict[str, Dependency], list[str]]:
    """Return the pins of a requirements file by package, and its errors, which quote no URL."""
    dependencies: dict[str, Dependency] = {}
    errors, names = list[str](), set[str]()
    joined = re.sub(r"\\\s*\n", " ", COMMENT.sub("", text))
    for line in filter(None, map(str.strip, joined.splitlines())):
        specification, *hashes = map(str.strip, line.split(" --hash="))
        digests = [match[1] for match in map(SHA256.fullmatch, hashes) if match]
        package = re.sub(r"[^\w.-].*", "", line)[:80]
        name = canonicalize_name(package)
        try:
            requirement, version = exact_pin(specification)
        except ValueError:
            version = ""
        if not version or not hashes or len(digests) != len(hashes):
            errors.append(f"{package or 'a line'}: no PACKAGE==VERSION with its sha256. Next: uv's --generate-hashes")
        elif name in INTERPRETERS:
            errors.append(f"{package}: the lane's interpreter brings it. Next: make the file with packs/uv.toml")
        elif name in names:
            errors.append(f"{package}: it stands there twice; every Python takes one version")
        else:
            names.add(name)
            dependencies[package] = Dependency(version, tuple(digests), str(requirement.marker or ""))
    return dependencies, errors
