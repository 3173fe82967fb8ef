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
    found = []
    for one in (one for one in listed if one.version in inside):
        is_pinned = bool(pinned) and Version(one.version) == Version(pinned)  # no release is where a commit is pinned
        named = None if is_pinned else f"{package}=={one.version}"
        reason = "" if one.file else "no file of it that this interpreter could read"
        found.append(Candidate(one.version, named, dependencies, one.date, reason, is_pinned, one.sha256))
    return found


def dependency_sets(pack: Pack, package: str, wanted: str, usual: str, upstream: str | None = None) -> list[Candidate]:
    """List the dependency sets of a pack.toml that hold `package`, by its version, the oldest first.

    `usual` names the target's own set; `upstream` is what each is judged with, None the pinned release.
    """
    specifier = _range(wanted)
    suite = pack.definition.upstream_tests
    judged = {target.dependencies for target in pack.definition.targets.values()}
    found = [
        (Version(dependency.version), name)
        for name, members in pack.definition.dependencies.items()
        if suite is None or name != suite.dependencies or name in judged  # else it is for upstream's own tests
        for member, dependency in members.items()
        if canonicalize_name(member) == canonicalize_name(package)
    ]
    if not found:
        names = sorted({member for members in pack.definition.dependencies.values() for member in members})
        raise HarnessError(
            f"--vary {package}: no dependency set of {pack.name} has it. They have: {', '.join(names) or 'nothing'}"
        )
    return [
        Candidate(f"{package} {version} ({name})", upstream, (name,), is_pinned=name == usual)
        for version, name in sorted(found)
        if specifier.contains(version, prereleases=True)
    ]
