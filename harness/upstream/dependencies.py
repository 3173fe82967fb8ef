"""Dependency sets: what a probe imports besides torch, triton and Python, laid out in one folder by uv."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from harness.core import files, seal
from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError, unknown
from harness.core.seal import Layout
from harness.pack import requirements
from harness.pack.model import Definition
from harness.upstream import download, uv


@dataclass(frozen=True)
class Member:
    """One package of a set: its version, and the sha256 of the files of it that may be taken."""

    package: str
    version: str
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class DependencySet:
    """A named set for one Python tag; its hash names the folder in the cache."""

    name: str
    members: tuple[Member, ...]

    @property
    def requirements(self) -> str:
        """The set as a requirements file."""
        hashes = {one: "".join(f" --hash=sha256:{sha256}" for sha256 in sorted(one.hashes)) for one in self.members}
        return "".join(sorted(f"{one.package}=={one.version}{hashes[one]}\n" for one in self.members))

    @property
    def sha256(self) -> str:
        """The hash of that file."""
        return files.sha256_bytes(self.requirements.encode())

    @property
    def versions(self) -> dict[str, str]:
        """Map each package to its version."""
        return {member.package: member.version for member in self.members}


def named(definition: Definition, name: str, tag: str) -> DependencySet:
    """Return the set of that name, for a Python tag such as ``cp311``."""
    if name not in definition.dependencies and name != "default":
        raise unknown("dependency set", name, definition.dependencies, "--with SET, or --with PACKAGE==VERSION")
    members = definition.dependencies.get(name, {})
    python = f"3.{tag.removeprefix('cp3')}"
    here = {
        package: one
        for package, one in members.items()
        if requirements.holds(Marker(one.marker) if one.marker else None, python)
    }
    return DependencySet(name, tuple(Member(package, one.version, one.hashes) for package, one in here.items()))


def chosen(cache: Cache, definition: Definition, wanted: tuple[str, ...], default: str, tag: str) -> DependencySet:
    """Return the set that the values of ``--with`` ask for: a named one, single ``PACKAGE==VERSION``, or both.

    `default` is the set that the target names, `tag` the Python tag of the wheels, such as ``cp311``.
    """
    names = [text for text in wanted if "==" not in text]
    if len(names) > 1:
        raise HarnessError(f"--with names {len(names)} sets ({', '.join(names)}); name one")
    base = named(definition, names[0] if names else default, tag)
    singles = [text for text in wanted if "==" in text]
    if not singles:
        return base
    members = {canonicalize_name(member.package): member for member in base.members}
    for text in singles:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            raise HarnessError(f"--with {text!r}: neither a set nor PACKAGE==VERSION") from None
        version = next(iter(requirement.specifier)).version
        release = download.resolve(cache, requirement.name, version, wheels_only=True)
        members[canonicalize_name(requirement.name)] = Member(requirement.name, release.version, (release.sha256,))
    return DependencySet("+".join([base.name, *singles]), tuple(members[key] for key in sorted(members)))


def with_wheel(dependencies: DependencySet, package: str, version: str, sha256: str) -> DependencySet:
    """Return the set that holds one more wheel: that of an upstream whose libraries look for others beside them."""
    return replace(dependencies, members=(*dependencies.members, Member(package, version, (sha256,))))


def layout(cache: Cache, dependencies: DependencySet, python: Path, tag: str) -> Layout:
    """Return the one folder that holds all wheels of a set with their bytecode, not yet laid out.

    `python` is the interpreter that compiles, and that lanes run with; `tag` is of its version, such as ``cp311``.

    It is laid out from the wheels alone, each time: no folder is shared with another set, nor with a cache of uv's, in
    which what a lane has written could come back. Whoever seals it has one of his own: bytecode cannot be made again
    byte for byte, so that nobody else can check it.
    """

    def build(entry: Path) -> None:
        with cache.scratch("wheels-") as scratch:
            wheels, given, site = scratch / "wheels", scratch / "requirements.txt", entry / "site"
            wheels.mkdir()
            site.mkdir()  # of a set of no wheel
            for one in dependencies.members:
                wheel = download.wheel(cache, one.package, one.version, one.hashes, tag)
                (wheels / wheel.name).symlink_to(wheel)
            _refuse_conflicts(wheels)
            cache.tell(f"laying out the dependency set {dependencies.name}")
            given.write_text(dependencies.requirements, encoding="utf-8")
            if dependencies.members:
                try:
                    uv.lay_out(given, wheels, site, python, scratch / "uv")
                except uv.UvError as error:
                    raise UnavailableError(f"the dependency set {dependencies.name}: {error}") from None

    key = f"{dependencies.sha256[:32]}-{tag}-{seal.owner()}"
    return Layout(cache, "dependencies", key, build, f"the dependency set {dependencies.name}", "site", _of_installer)


def _of_installer(path: str) -> bool:
    """Whether a file need not be the same when a set is laid out again: bytecode, and what holds the time of it."""
    return "__pycache__/" in path or path.endswith((".dist-info/RECORD", ".dist-info/uv_cache.json"))


def _refuse_conflicts(wheels: Path) -> None:
    """Refuse wheels that hold one file with different contents: uv would lay out either."""
    seen: dict[str, tuple[int, str]] = {}
    for wheel in sorted(wheels.iterdir()):
        with zipfile.ZipFile(wheel) as bundle:
            for info in bundle.infolist():
                content, other = seen.setdefault(info.filename, (info.CRC, wheel.name))
                if content != info.CRC:
                    raise UnavailableError(f"{wheel.name}: {info.filename} stands in {other} with other content")
