"""Files of the package index in the cache, by their sha256."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags, platform_tags, sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from harness.core import files
from harness.core.cache import Cache
from harness.core.errors import UnavailableError, UnsupportedHereError
from harness.upstream import package_index
from harness.upstream.package_index import Offer

#: Wheels for the machines that packs run on: any glibc up to 2.28 (2018), those for a newer one first.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
)


#: Releases that a message names.
NEWEST_SHOWN = 8


@dataclass(frozen=True)
class ReleaseFile:
    """One file of one release, with the sha256 that pack.toml or the index states, and the day of its upload.

    `file` and `sha256` are empty where nothing of the release can be read here, `date` where the index states none.
    """

    package: str
    version: str
    file: str
    sha256: str
    date: str = ""


def fetch(cache: Cache, package: str, file: str | None, sha256: str) -> Path:
    """Return the path of the file with that sha256, downloaded unless the cache has it.

    Args:
        cache: where the file is, or will be.
        package: its name on the index.
        file: its file name, for errors; None where only the sha256 is pinned.
        sha256: in hexadecimal digits.

    """

    def build(folder: Path) -> None:
        if cache.offline:
            raise UnavailableError(
                f"{file or package}: not in the cache {cache.root} (sha256 {sha256[:12]}...), and --offline forbids "
                "to download it. Next: runner.py fetch --dest DIR on a machine with network, then --cache DIR here"
            )
        cache.tell(f"downloading {file or package}")
        client = package_index.of_user()
        client.download(client.pinned(package, file, sha256), sha256, folder)

    for _ in range(2):
        entry = cache.populate("downloads", sha256, build)
        found = next(entry.iterdir(), None)
        if found is not None and files.sha256_file(found) == sha256:
            return found
        shutil.rmtree(entry, ignore_errors=True)
        cache.tell(f"{file or package}: the cached download is damaged")
        if cache.offline:
            break
    raise UnavailableError(
        f"{file or package}: the cached download no longer has its sha256 ({sha256[:12]}...). It has been removed. "
        "Next: run without --offline, or copy the cache anew"
    )


def wheel(cache: Cache, package: str, version: str, hashes: tuple[str, ...], python_tag: str) -> Path:
    """Return the wheel of a release, among the files of some sha256, that fits a Python best; downloaded where needed.

    Which one that is, is remembered, so that the same call works offline.

    Raises:
        UnavailableError: it cannot be had.
        UnsupportedHereError: there is none for that Python.

    """
    if len(hashes) == 1:
        path = fetch(cache, package, None, hashes[0])
        _fitting([ReleaseFile(package, version, path.name, hashes[0])], package, version, python_tag)
        return path
    chosen = files.key_of(package, version, python_tag, *sorted(hashes))[:16]
    known = cache.entry("releases", f"{package}-{version}-{chosen}.json")
    if known.exists():
        release = ReleaseFile(**json.loads(known.read_text(encoding="utf-8")))
    else:
        there = _cached(cache, package, version, hashes) if cache.offline else _listed(package, version, hashes)
        release = _fitting(there, package, version, python_tag)
        if not cache.offline:
            with cache.guard():
                files.write_atomic(known, json.dumps(asdict(release)))
    return fetch(cache, package, release.file, release.sha256)


def _cached(cache: Cache, package: str, version: str, hashes: tuple[str, ...]) -> list[ReleaseFile]:
    paths = (path for one in hashes for path in cache.entry("downloads", one).glob("*"))
    found = [ReleaseFile(package, version, path.name, path.parent.name) for path in paths]
    if found:
        return found
    raise UnavailableError(
        f"{package} {version}: not in the cache {cache.root}, and --offline forbids to download it. "
        "Next: runner.py fetch --dest DIR on a machine with network, then --cache DIR here"
    )


def _listed(package: str, version: str, hashes: tuple[str, ...]) -> list[ReleaseFile]:
    offers = [one for one in package_index.of_user().offers(package) if one.sha256 in hashes]
    if offers:
        return [ReleaseFile(package, version, one.file.filename, one.sha256) for one in offers]
    raise UnavailableError(
        f"{package} {version}: wrong sha256: the index has no file of one that is pinned. "
        "Next: compare them with the release's own page"
    )


def _fitting(there: list[ReleaseFile], package: str, version: str, python_tag: str) -> ReleaseFile:
    platforms, python = (*PLATFORMS, *platform_tags()), (3, int(python_tag.removeprefix("cp3")))
    tags = [*cpython_tags(python, platforms=platforms), *compatible_tags(python, python_tag, platforms)]
    wheels = [one for one in there if one.file.endswith(".whl")]
    best = _best([one.file for one in wheels], tags)
    if best is not None:
        return wheels[best]
    if wheels:
        raise UnsupportedHereError(f"{package} {version}: the requirements file pins no wheel for {python_tag}")
    raise UnavailableError(f"{package} {version}: it has no wheel, and an sdist is never built: that would execute it")


def _best(names: list[str], tags: Iterable[Tag]) -> int | None:
    """Return the index of the file that a Python takes first: an sdist, then the wheel of its first tag."""
    order = {tag: rank for rank, tag in enumerate(tags)}
    ranks: dict[int, int] = {}
    for index, name in enumerate(names):
        if name.endswith((".tar.gz", ".zip")):
            ranks[index] = -1
        elif name.endswith(".whl"):
            try:
                fitting = [order[tag] for tag in parse_wheel_filename(name)[3] if tag in order]
            except InvalidWheelFilename:
                continue
            ranks |= {index: min(fitting)} if fitting else {}
    return min(ranks, key=lambda index: ranks[index], default=None)


def _listing(cache: Cache, package: str, *, wheels_only: bool) -> list[ReleaseFile]:
    """Read what the index listed when it was last asked; nothing where it never was."""
    try:
        text = cache.entry("releases", _listing_name(package, wheels_only=wheels_only)).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [ReleaseFile(**entry) for entry in json.loads(text)]


def _listing_name(package: str, *, wheels_only: bool) -> str:
    return f"{package}{'-wheels' if wheels_only else ''}.json"


def releases(cache: Cache, package: str, *, wheels_only: bool = False) -> list[ReleaseFile]:
    """List every release of a package, the oldest first, each with the file of it that would be taken here.

    Without network, what the index said last is what counts.

    Raises:
        UnavailableError: the index cannot be asked, or without network: it never was, into this cache.

    """
    if cache.offline:
        kept = _listing(cache, package, wheels_only=wheels_only)
        if kept:
            return kept
        raise UnavailableError(
            f"{package}: its releases were not listed before, and --offline forbids to ask the package index"
        )
    by_version: dict[Version, list[Offer]] = {}
    for offer in package_index.of_user().offers(package):
        if offer.version is not None and not offer.file.is_yanked:
            by_version.setdefault(offer.version, []).append(offer)
    found, tags = [], list(sys_tags())
    for version, offers in sorted(by_version.items()):
        usable = [one for one in offers if one.sha256 and not (wheels_only and not one.file.filename.endswith(".whl"))]
        best = _best([one.file.filename for one in usable], tags)
        file, sha256 = ("", "") if best is None else (usable[best].file.filename, usable[best].sha256)
        times = [one.file.upload_time for one in offers if one.file.upload_time]
        date = min(times).date().isoformat() if times else ""
        found.append(ReleaseFile(package, str(version), file, sha256, date))
    kept_as = cache.entry("releases", _listing_name(package, wheels_only=wheels_only))
    with cache.guard():
        files.write_atomic(kept_as, json.dumps([asdict(one) for one in found], indent=1))
    return found


def resolve(cache: Cache, package: str, version: str | None, *, wheels_only: bool = False) -> ReleaseFile:
    """Return the best file of one release; where `version` is None, of the newest final one.

    A version that the index has listed is not looked up again, so that the same call works offline.

    Raises:
        UnavailableError: there is no such release, or nothing of it can be read here.

    """
    if cache.offline and version is None:
        raise UnavailableError(f"{package} latest: --offline forbids to ask the package index")
    kept = _listing(cache, package, wheels_only=wheels_only) if version else []
    found = _of_version(kept, version)
    if found is None:
        kept = releases(cache, package, wheels_only=wheels_only)
        found = _of_version(kept, version)
    if found is None:
        newest = ", ".join(one.version for one in kept[: -NEWEST_SHOWN - 1 : -1])
        raise UnavailableError(
            f"{package}: no release {version} on the package index. It has {newest or 'no release'}. "
            f"Next: --upstream {package}==VERSION, or --upstream latest"
        )
    if not found.file:
        raise UnavailableError(f"{package} {version or 'latest'}: no file that this interpreter could read")
    return found


def _of_version(listed: list[ReleaseFile], version: str | None) -> ReleaseFile | None:
    """Return a release of a list, or its newest final one."""
    for one in reversed(listed):
        of_list = Version(one.version)
        if of_list == Version(version) if version else not of_list.is_prerelease:
            return one
    return None
