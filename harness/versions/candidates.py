"""What there is to judge: the releases of a package index, or the dependency sets of a pack.toml."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.core import files
from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError
from harness.pack.model import Pack
from harness.upstream import download, package_index
from harness.upstream.download import ReleaseFile
from harness.upstream.package_index import Offer


@dataclass(frozen=True)
class Candidate:
    """One thing to judge.

    Attributes:
        label: what the table calls it.
        upstream: for ``--upstream``; None is the pinned release.
        dependencies: for ``--with``.
        date: when the index took it in, or empty.
        reason: why it cannot be judged at all; empty where it can be tried.
        is_pinned: whether it is what pack.toml states.
        sha256: of a release's archive, where it is known: by it a lane that ended before is found again.

    """

    label: str
    upstream: str | None = None
    dependencies: tuple[str, ...] = ()
    date: str = ""
    reason: str = ""
    is_pinned: bool = False
    sha256: str = ""


@dataclass(frozen=True)
class Listed:
    """One release as the index lists it; `file` and `sha256` are empty where nothing of it can be read here."""

    version: str
    file: str
    sha256: str
    date: str


def _of_index(package: str, *, wheels_only: bool) -> list[Listed]:
    """Read the project's page once, and choose the file of each release as a run would."""
    tags = list(sys_tags())
    by_version: dict[Version, list[Offer]] = {}
    for one in package_index.of_user().offers(package):
        if one.version is not None and not one.file.is_yanked:
            by_version.setdefault(one.version, []).append(one)
    found = []
    for version, of_release in sorted(by_version.items()):
        ranked = [(download.preference(one.file.filename, tags), one) for one in of_release if one.sha256]
        usable = [(rank, one) for rank, one in ranked if rank is not None and not (wheels_only and rank < 0)]
        best = min(usable, key=lambda pair: pair[0])[1] if usable else None
        times = [one.file.upload_time for one in of_release if one.file.upload_time]
        date = min(times).date().isoformat() if times else ""
        found.append(Listed(str(version), best.file.filename if best else "", best.sha256 if best else "", date))
    return found


def listing(cache: Cache, package: str, *, wheels_only: bool = False) -> list[Listed]:
    """List every release of a package, the oldest first; what the index said last is what counts offline.

    Each file that was chosen is remembered as a run would remember it, so that no lane asks the index again.
    """
    known = cache.entry("releases", f"{package}{'-wheels' if wheels_only else ''}.json")
    if cache.offline:
        if not known.exists():
            raise UnavailableError(
                f"{package}: its releases were not listed before, and --offline forbids to ask the package index"
            )
        return [Listed(**entry) for entry in json.loads(known.read_text(encoding="utf-8"))]
    found = _of_index(package, wheels_only=wheels_only)
    with cache.guard():
        files.write_atomic(known, json.dumps([asdict(one) for one in found], indent=1))
        for one in (each for each in found if each.file):
            release = ReleaseFile(package, one.version, one.file, one.sha256)
            chosen = download.remembered(cache, package, one.version, wheels_only=wheels_only)
            files.write_atomic(chosen, json.dumps(asdict(release)))
    return found


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
    listed = listing(cache, package, wheels_only=upstream.is_wheel)
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
