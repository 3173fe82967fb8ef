"""Dependency sets: what a probe imports besides torch, triton and Python, merged into one folder."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from harness.core import files, seal
from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError, UnsupportedHereError, unknown
from harness.core.seal import ChangedError, Layout
from harness.pack.model import Definition, Dependency
from harness.upstream import archive, download


@dataclass(frozen=True)
class Member:
    """One wheel of a set, for one Python tag."""

    package: str
    version: str
    sha256: str


@dataclass(frozen=True)
class DependencySet:
    """A named set for one Python tag; its hash names the folder in the cache."""

    name: str
    members: tuple[Member, ...]

    @property
    def sha256(self) -> str:
        """One hash for all wheels."""
        return files.sha256_bytes("\n".join(sorted(member.sha256 for member in self.members)).encode())

    @property
    def versions(self) -> dict[str, str]:
        """Map each package to its version."""
        return {member.package: member.version for member in self.members}


def _member(package: str, dependency: Dependency, tag: str, set_name: str) -> Member:
    digest = dependency.hash_for(tag)
    if digest is None:
        raise UnsupportedHereError(
            f"dependency {package} {dependency.version} of the set {set_name}: pack.toml pins no wheel for {tag} "
            f"(it has {', '.join(dependency.sha256)})"
        )
    return Member(package, dependency.version, digest)


def named(definition: Definition, name: str, tag: str) -> DependencySet:
    """Return the set that pack.toml calls `name`, for a Python tag such as ``cp311``."""
    if name not in definition.dependencies and name != "default":
        raise unknown("dependency set", name, definition.dependencies, "--with SET, or --with PACKAGE==VERSION")
    members = definition.dependencies.get(name, {})
    return DependencySet(name, tuple(_member(package, members[package], tag, name) for package in sorted(members)))


def chosen(cache: Cache, definition: Definition, wanted: tuple[str, ...], default: str, tag: str) -> DependencySet:
    """Return the set that ``--with`` asks for: a named one, single wheels of other versions, or both.

    Args:
        cache: where single wheels are looked up.
        definition: of the pack.
        wanted: the values of ``--with``, each a set's name or ``PACKAGE==VERSION``.
        default: the set that the target names.
        tag: the Python tag of the wheels.

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
        members[canonicalize_name(requirement.name)] = Member(requirement.name, release.version, release.sha256)
    return DependencySet("+".join([base.name, *singles]), tuple(members[key] for key in sorted(members)))


def under(dependencies: DependencySet, toolchain: tuple[Member, ...]) -> DependencySet:
    """Return the set with the wheels of another torch or triton, and of what these require, beside its own.

    What a set holds already stays as it is pinned.
    """
    if not toolchain:
        return dependencies
    held = {canonicalize_name(member.package) for member in dependencies.members}
    added = tuple(member for member in toolchain if canonicalize_name(member.package) not in held)
    name = f"{dependencies.name}+{toolchain[0].package}=={toolchain[0].version}"
    return DependencySet(name, (*dependencies.members, *added))


def _unpacked(cache: Cache, member: Member) -> Path:
    """Return the folder of a wheel's files, unpacked once for all sets that hold it."""

    def build(entry: Path) -> None:
        cache.tell(f"unpacking {member.package} {member.version}")
        archive.unpack(download.fetch(cache, member.package, None, member.sha256), entry / "content")

    return _sound(Layout(cache, "unpacked", member.sha256[:32], build, f"{member.package} {member.version}"))


def _sound(layout: Layout) -> Path:
    """Return a folder that sets are made from; one that was changed is laid out anew, and the sets say who noticed."""
    with contextlib.suppress(ChangedError):
        layout.lay_out()
    return layout.folder


def _places(raw: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each file of an unpacked wheel with its place in a folder of packages."""
    roots = [*(path for data in raw.glob("*.data") for path in (data / "purelib", data / "platlib")), raw]
    for root in (path for path in roots if path.is_dir()):
        for source in sorted(path for path in root.rglob("*") if path.is_file()):
            inside = source.relative_to(root)
            if root != raw or not inside.parts[0].endswith(".data"):
                yield source, inside


def _link(source: Path, target: Path) -> None:
    """Put a file of an unpacked wheel into a set, without a copy where the file system allows that."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _compiled(cache: Cache, member: Member, python: Path, tag: str) -> Path:
    """Return the folder of a wheel's compiled Python, laid out as the wheel is; nothing of the wheel is executed.

    Each file states that its source need not be looked at: both are sealed.
    """
    raw = _unpacked(cache, member)

    def build(entry: Path) -> None:
        prefix = entry / "prefix"
        command = [str(python), "-I", "-X", f"pycache_prefix={prefix}", "-m", "compileall", "-qq"]
        options = ["--invalidation-mode", "unchecked-hash", str(raw)]
        subprocess.run([*command, *options], check=False, capture_output=True)
        made = prefix / raw.relative_to(raw.anchor)
        made.mkdir(parents=True, exist_ok=True)  # a wheel may hold no Python at all
        made.rename(entry / "content")
        shutil.rmtree(prefix, ignore_errors=True)

    key = f"{member.sha256[:32]}-{tag}-{seal.owner()}"
    name = f"bytecode of {member.package} {member.version}"
    return _sound(Layout(cache, "compiled", key, build, name, ignored=lambda _: True))


def _merge(raw: Path, site: Path, wheel: str) -> None:
    for source, inside in _places(raw):
        target = site / inside
        if not target.exists():
            _link(source, target)
        elif files.sha256_file(target) != files.sha256_file(source):
            raise UnavailableError(f"{wheel}: {inside} stands in another wheel of the set with other content")


def _merge_bytecode(raw: Path, site: Path) -> None:
    for source, inside in _places(raw):
        target = site / inside.parent / "__pycache__" / inside.name
        if not target.exists():
            _link(source, target)


def with_wheel(dependencies: DependencySet, package: str, version: str, sha256: str) -> DependencySet:
    """Return the set that holds one more wheel: that of an upstream whose libraries look for others beside them."""
    return replace(dependencies, members=(*dependencies.members, Member(package, version, sha256)))


def fetch(cache: Cache, dependencies: DependencySet) -> None:
    """Unpack every wheel of a set, for whatever Python it is; a lane's host merges and compiles them."""
    for member in dependencies.members:
        _unpacked(cache, member)


def materialize(cache: Cache, dependencies: DependencySet, python: Path, tag: str) -> Path:
    """Return the folder of a set, laid out and checked; see `layout`."""
    layout_of_set = layout(cache, dependencies, python, tag)
    layout_of_set.lay_out()
    return layout_of_set.folder


def layout(cache: Cache, dependencies: DependencySet, python: Path, tag: str) -> Layout:
    """Return the one folder that holds all wheels of a set with their bytecode, not yet laid out.

    Whoever seals it has one of his own: bytecode cannot be made again byte for byte, so that nobody else can check it.

    Args:
        cache: where it is, or will be.
        dependencies: the set.
        python: the interpreter that compiles, and that lanes run with.
        tag: of its version, such as ``cp311``.

    """

    def build(entry: Path) -> None:
        site = entry / "site"
        site.mkdir()
        for member in dependencies.members:
            _merge(_unpacked(cache, member), site, f"{member.package} {member.version}")
            _merge_bytecode(_compiled(cache, member, python, tag), site)

    key = f"{dependencies.sha256[:32]}-{tag}-{seal.owner()}"
    name = f"the dependency set {dependencies.name}"
    return Layout(cache, "dependencies", key, build, name, "site", lambda path: "__pycache__/" in path)
