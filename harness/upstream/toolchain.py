"""Pre-releases of torch and triton, as wheels that a lane imports before the interpreter's own.

pip says which is the newest, and what it requires (uv has no report of that); nothing is installed, and nothing is
built. As everything that moves, they are looked up each time, and what was found is kept in the cache with its day.
"""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError
from harness.pack import requirements
from harness.upstream import dependencies, download, newest
from harness.upstream.dependencies import DependencySet, Member
from harness.upstream.package_index import NoPrereleaseError


@dataclass(frozen=True)
class Wheel:
    """One wheel that pip chose, and what it requires."""

    name: str
    version: str
    sha256: str
    requires: tuple[Requirement, ...]


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
        """Say which wheel of a set, which stays as the pack pins it, is not what this requires; empty: none."""
        versions = {canonicalize_name(package): version for package, version in pinned.versions.items()}
        for line in self.requires:
            requirement = Requirement(line)
            version = versions.get(canonicalize_name(requirement.name))
            if version and not requirement.specifier.contains(version, prereleases=True):
                wanted = f"{requirement.name}{requirement.specifier}"
                return f"{self.package} {self.version} requires {wanted}, and the pack pins {version}"
        return ""


def prerelease(cache: Cache, package: str, python: str) -> Toolchain:
    """Look up the newest pre-release of torch or triton for a Python such as ``3.11``.

    Raises:
        UnavailableError: there is none, or without network: it was not looked up into this cache.

    """

    def look() -> Toolchain:
        wheels = _prerelease(package, python)
        members = tuple(Member(one.name, one.version, (one.sha256,)) for one in wheels)
        holding = (line for one in wheels for line in one.requires if requirements.holds(line.marker, python))
        return Toolchain(package, wheels[0].version, members, tuple(map(str, holding)), newest.today())

    return newest.known(cache, f"pre-release of {package} for Python {python}", Toolchain, look)


def fetch(cache: Cache, found: Toolchain, python_tag: str) -> None:
    """Download its wheels, for a Python such as ``cp311``."""
    dependencies.fetch(cache, DependencySet(found.package, found.members), python_tag)


def _prerelease(package: str, python: str) -> list[Wheel]:
    """Resolve the newest pre-release of a package with everything that it requires; its own wheel comes first.

    Only the package itself is chosen as ``--pre`` chooses; what it requires is final where it does not name another.

    Raises:
        NoPrereleaseError: the newest version for that Python is final.
        UnavailableError: there is none, or what it requires cannot be had.

    """
    newest_one = _resolved(package, python, "--pre", "--no-deps")[package]
    if not Version(newest_one.version).is_prerelease:
        raise NoPrereleaseError(package, newest_one.version)
    wheels = _resolved(f"{package}=={newest_one.version}", python)
    return [wheels.pop(package), *(wheels[name] for name in sorted(wheels))]


def _resolved(requirement: str, python: str, *options: str) -> dict[str, Wheel]:
    """Let pip resolve a requirement: of a wheel it reads metadata alone, and an sdist is not taken."""
    with tempfile.TemporaryDirectory(prefix="toolchain-") as folder:
        report = Path(folder) / "report"
        arguments = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:", "--implementation", "cp"]
        arguments += ["--python-version", python, "--target", str(Path(folder) / "target"), "--report", str(report)]
        arguments += [text for platform in download.PLATFORMS for text in ("--platform", platform)]
        command = [sys.executable, "-m", "pip", "install", *options, *arguments, requirement]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if ended.returncode != 0:
            lines = [line.removeprefix("ERROR: ") for line in ended.stderr.splitlines() if line.startswith("ERROR")]
            raise UnavailableError(f"no wheels for Python {python}: {lines[0] if lines else 'pip found no way'}")
        try:
            items = json.loads(report.read_text(encoding="utf-8"))["install"]
            return {canonicalize_name(item["metadata"]["name"]): _wheel(item) for item in items}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HarnessError(
                f"pip's report cannot be read ({error}). Next: python -m pip install --upgrade pip"
            ) from None


def _wheel(item: dict[str, Any]) -> Wheel:
    metadata, sha256 = item["metadata"], item["download_info"]["archive_info"]["hashes"]["sha256"]
    requires = tuple(Requirement(text) for text in metadata.get("requires_dist") or ())
    return Wheel(canonicalize_name(metadata["name"]), metadata["version"], sha256, requires)
