"""What there is to judge: the releases of a package index."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
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


def releases(cache: Cache, pack: Pack, wanted: str, dependencies: tuple[str, ...] = ()) -> list[Candidate]:
    """List the releases of a pack's upstream that lie in a range such as ``>=0.5``, the oldest first.

    Pre-releases are listed only where the range names one. An empty range is every final release.
    """
    upstream = pack.definition.upstream
    package, pinned = upstream.package, upstream.version
    try:
        specifier = SpecifierSet(wanted)
    except InvalidSpecifier:
        raise HarnessError(f"--range {wanted!r}: no version range. Next: --range '>=0.5,<0.9'") from None
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
