"""Companion sets: what a probe imports besides torch, triton and Python, merged into one folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from harness import archive, download, files
from harness.cache import Cache
from harness.definition import Companion, Definition
from harness.errors import HarnessError, UnavailableError, UnsupportedHereError, unknown


@dataclass(frozen=True)
class Member:
    """One wheel of a set, for one Python tag."""

    package: str
    version: str
    sha256: str


@dataclass(frozen=True)
class CompanionSet:
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


def _member(package: str, companion: Companion, tag: str, set_name: str) -> Member:
    digest = companion.hash_for(tag)
    if digest is None:
        raise UnsupportedHereError(
            f"companion {package} {companion.version} of the set {set_name}: pack.toml pins no wheel for {tag} "
            f"(it has {', '.join(companion.sha256)})"
        )
    return Member(package, companion.version, digest)


def named(definition: Definition, name: str, tag: str) -> CompanionSet:
    """Return the set that pack.toml calls `name`, for a Python tag such as ``cp311``."""
    if name not in definition.companions and name != "default":
        raise unknown("companion set", name, definition.companions, "--with SET, or --with PACKAGE==VERSION")
    members = definition.companions.get(name, {})
    return CompanionSet(name, tuple(_member(package, members[package], tag, name) for package in sorted(members)))


def chosen(cache: Cache, definition: Definition, wanted: tuple[str, ...], default: str, tag: str) -> CompanionSet:
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
    return CompanionSet("+".join([base.name, *singles]), tuple(members[key] for key in sorted(members)))


def _merge_wheel(wheel: Path, scratch: Path, site: Path) -> None:
    raw = scratch / wheel.stem
    archive.unpack(wheel, raw)
    roots = [raw, *(path for data in raw.glob("*.data") for path in (data / "purelib", data / "platlib"))]
    for root in (path for path in roots if path.is_dir()):
        for source in [path for path in root.rglob("*") if path.is_file()]:
            inside = source.relative_to(root)
            target = site / inside
            if root == raw and inside.parts[0].endswith(".data"):
                continue
            if target.exists() and files.sha256_file(target) != files.sha256_file(source):
                raise UnavailableError(f"{wheel.name}: {inside} stands in another wheel of the set with other content")
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)


def materialize(cache: Cache, companions: CompanionSet) -> Path:
    """Return the one folder that holds all wheels of the set, unpacked unless the cache has it."""

    def build(entry: Path) -> None:
        site = entry / "site"
        site.mkdir()
        scratch = entry / "raw"
        for member in companions.members:
            _merge_wheel(download.fetch(cache, member.package, None, member.sha256), scratch, site)
        shutil.rmtree(scratch, ignore_errors=True)

    return cache.populate("companions", companions.sha256[:32], build) / "site"
