"""What there is to judge: the releases of a package index, or the dependency sets of a pack.toml."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.pack.model import Pack
from harness.upstream import download


@dataclass(frozen=True)
class Candidate:
    """One thing to judge."""

    label: str  # what the table calls it
    upstream: str | None = None  # for ``--upstream``; None is the pinned release
    dependencies: tuple[str, ...] = ()  # for ``--with``
    date: str = ""  # when the index took it in, or empty
    reason: str = ""  # why it cannot be judged at all; empty where it can be tried
    is_pinned: bool = False  # whether it is what pack.toml states
    sha256: str = ""  # of a release's archive, where it is known: by it a lane that ended before is found again


def _range(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        raise HarnessError(f"--range {text!r}: no version range. Next: --range '>=0.5,<0.9'") from None


def _same(version: str, pinned: str) -> bool:
    """Whether a release is the pinned one, of which there is none (an empty text) where a commit is pinned."""
    return bool(pinned) and Version(version) == Version(pinned)


def releases(cache: Cache, pack: Pack, wanted: str, dependencies: tuple[str, ...] = ()) -> list[Candidate]:
    """List the releases of a pack's upstream that lie in a range such as ``>=0.5``, the oldest first.

    Pre-releases are listed only where the range names one. An empty range is every final release.
    """
    upstream, specifier = pack.definition.upstream, _range(wanted)
    package, pinned = upstream.package, upstream.version
    listed = download.releases(cache, package, wheels_only=upstream.is_wheel)
    inside = set(specifier.filter(one.version for one in listed))
    if not inside:
        every = ", ".join(one.version for one in listed[-8:])
        raise HarnessError(f"--range {wanted!r}: no release of {package} lies in it. The newest: {every}")
    return [
        Candidate(
            label=one.version,
            upstream=None if _same(one.version, pinned) else f"{package}=={one.version}",
            dependencies=dependencies,
            date=one.date,
            reason="" if one.file else "no file of it that this interpreter could read",
            is_pinned=_same(one.version, pinned),
            sha256=one.sha256,
        )
        for one in listed
        if one.version in inside
    ]


def dependency_sets(pack: Pack, package: str, wanted: str, usual: str, upstream: str | None = None) -> list[Candidate]:
    """List the dependency sets of a pack.toml that hold `package`, by its version, the oldest first.

    `usual` names the target's own set; `upstream` is what each is judged with, None the pinned release.
    """
    specifier = _range(wanted)
    found = []
    suite = pack.definition.upstream_tests
    judged = {target.dependencies for target in pack.definition.targets.values()}
    for name, members in pack.definition.dependencies.items():
        if suite is not None and name == suite.dependencies and name not in judged:
            continue  # it is for upstream's own tests, not for the probe
        for member, dependency in members.items():
            if canonicalize_name(member) == canonicalize_name(package):
                found.append((Version(dependency.version), name))
    if not found:
        names = sorted({member for members in pack.definition.dependencies.values() for member in members})
        raise HarnessError(
            f"--vary {package}: no dependency set of {pack.name} has it. They have: {', '.join(names) or 'nothing'}"
        )
    inside = [(version, name) for version, name in sorted(found) if specifier.contains(version, prereleases=True)]
    return [
        Candidate(f"{package} {version} ({name})", upstream, (name,), is_pinned=name == usual)
        for version, name in inside
    ]
