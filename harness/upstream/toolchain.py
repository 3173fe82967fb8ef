"""Pre-releases of torch and triton, as wheels that a lane imports before the interpreter's own.

pip says which is the newest, and what it requires; nothing is installed, and nothing is built. As everything that
moves, they are looked up each time, and what was found is kept in the cache with its day.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.core.cache import Cache
from harness.upstream import closure, dependencies, newest
from harness.upstream.dependencies import DependencySet, Member


@dataclass(frozen=True)
class Toolchain:
    """A pre-release of torch or triton for one Python.

    Attributes:
        package: torch or triton.
        version: of it.
        members: its wheel, and those of what it requires; a torch brings the triton that it was built with.
        requires: what these state, one requirement a line.
        seen: the day of the look-up.

    """

    package: str
    version: str
    members: tuple[Member, ...]
    requires: tuple[str, ...]
    seen: dt.date

    def unmet(self, pinned: DependencySet) -> str:
        """Say which wheel of a set, which stays as pack.toml pins it, is not what this requires; empty: none."""
        versions = {canonicalize_name(package): version for package, version in pinned.versions.items()}
        for line in self.requires:
            requirement = Requirement(line)
            version = versions.get(canonicalize_name(requirement.name))
            if version and not requirement.specifier.contains(version, prereleases=True):
                wanted = f"{requirement.name}{requirement.specifier}"
                return f"{self.package} {self.version} requires {wanted}, and pack.toml pins {version}"
        return ""


def prerelease(cache: Cache, package: str, python: str) -> Toolchain:
    """Look up the newest pre-release of torch or triton for a Python such as ``3.11``.

    Raises:
        UnavailableError: there is none, or without network: it was not looked up into this cache.

    """

    def look() -> Toolchain:
        wheels = closure.prerelease(package, python)
        members = tuple(Member(one.name, one.version, one.sha256) for one in wheels)
        holding = (line for one in wheels for line in one.requires if closure.holds(line, python, frozenset()))
        return Toolchain(package, wheels[0].version, members, tuple(map(str, holding)), newest.today())

    return newest.known(cache, f"pre-release of {package} for Python {python}", Toolchain, look)


def fetch(cache: Cache, found: Toolchain) -> None:
    """Download and unpack its wheels."""
    dependencies.fetch(cache, DependencySet(found.package, found.members))
