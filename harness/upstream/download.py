"""Files of the package index in the cache, by their sha256."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags, platform_tags, sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from harness.core import files
from harness.core.cache import Cache
from harness.core.errors import UnavailableError, UnsupportedHereError
from harness.upstream import package_index

#: Wheels for the machines that packs run on: any glibc up to 2.28 (2018), those for a newer one first.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
)
NOT_HERE = (
    "not in the cache {}, and --offline forbids to download it. "
    "Next: runner.py fetch --cache DIR on a machine with network, then --cache DIR here"
)


@dataclass(frozen=True)
class ReleaseFile:
    """One file of one release: its sha256, the day of its upload where the index states one, and whether it is yanked.

    `file` and `sha256` are empty where nothing of the release can be read here.
    """

    package: str
    version: str
    file: str
    sha256: str
    date: str = ""
    yanked: bool = False


def fetch(cache: Cache, package: str, file: str | None, sha256: str) -> Path:
    """Return the path of the file with that sha256 in hexadecimal digits, downloaded unless the cache has it.

    `file` is its name, for errors; None where only the sha256 is pinned.
    """

    def build(folder: Path) -> None:
        if cache.offline:
            raise UnavailableError(f"{file or package}: {NOT_HERE.format(cache.root)}")
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

    UnavailableError: it cannot be had. UnsupportedHereError: there is none for that Python.
    """
    if len(hashes) == 1:
        path = fetch(cache, package, None, hashes[0])
        _fitting([ReleaseFile(package, version, path.name, hashes[0])], package, version, python_tag)
        return path
    if cache.offline:
        paths = (path for one in hashes for path in cache.entry("downloads", one).glob("*"))
        there = [ReleaseFile(package, version, path.name, path.parent.name) for path in paths]
    else:
        there = [one for one in _kept(cache, package) if one.sha256 in hashes]
        if len(there) != len(hashes):
            there = [one for one in _listed(cache, package) if one.sha256 in hashes]
    if not there:
        why = (
            "wrong sha256: the index has no file of one that is pinned. Next: compare them with the release's own page"
        )
        raise UnavailableError(f"{package} {version}: {NOT_HERE.format(cache.root) if cache.offline else why}")
    release = _fitting(there, package, version, python_tag)
    return fetch(cache, package, release.file, release.sha256)


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


def _kept(cache: Cache, package: str) -> list[ReleaseFile]:
    """Read the files that the index listed when it was last asked; none where it never was.

    A list that another version of this harness wrote in another form counts as none.
    """
    try:
        text = cache.entry("releases", f"{package}.json").read_text(encoding="utf-8")
        return [ReleaseFile(**entry) for entry in json.loads(text)]
    except (FileNotFoundError, TypeError, ValueError):
        return []


def _listed(cache: Cache, package: str) -> list[ReleaseFile]:
    """Ask the index for every file of a package, and keep the answer; without network, what was kept counts."""
    if cache.offline:
        if kept := _kept(cache, package):
            return kept
        raise UnavailableError(
            f"{package}: its releases were not listed before, and --offline forbids to ask the package index"
        )
    found = []
    for offer in package_index.of_user().offers(package):
        if offer.version is not None:
            date = offer.file.upload_time.date().isoformat() if offer.file.upload_time else ""
            yanked = bool(offer.file.is_yanked)
            found.append(ReleaseFile(package, str(offer.version), offer.file.filename, offer.sha256, date, yanked))
    with cache.guard():
        text = json.dumps([asdict(one) for one in found], indent=1)
        files.write_atomic(cache.entry("releases", f"{package}.json"), text)
    return found


def releases(cache: Cache, package: str, *, wheels_only: bool = False, only_kept: bool = False) -> list[ReleaseFile]:
    """List every release of a package, the oldest first, each with the file of it that would be taken here.

    A yanked one is left out. With `only_kept` the index is not asked, and what it listed before counts. Else
    UnavailableError is raised where it cannot be asked, or without network: it never was, into this cache.
    """
    listed = _kept(cache, package) if only_kept else _listed(cache, package)
    by_version: dict[Version, list[ReleaseFile]] = {}
    for one in listed:
        if not one.yanked:
            by_version.setdefault(Version(one.version), []).append(one)
    found, tags = [], list(sys_tags())
    for version, there in sorted(by_version.items()):
        usable = [one for one in there if one.sha256 and (one.file.endswith(".whl") or not wheels_only)]
        best = _best([one.file for one in usable], tags)
        first = min((one.date for one in there if one.date), default="")
        nothing = ReleaseFile(there[0].package, str(version), "", "")
        found.append(replace(nothing if best is None else usable[best], date=first))
    return found


def resolve(cache: Cache, package: str, version: str | None, *, wheels_only: bool = False) -> ReleaseFile:
    """Return the best file of one release; where `version` is None, of the newest final one.

    A version that the index has listed is not looked up again, so that the same call works offline. UnavailableError is
    raised where there is no such release, or nothing of it can be read here.
    """
    if cache.offline and version is None:
        raise UnavailableError(f"{package} latest: --offline forbids to ask the package index")
    listed = releases(cache, package, wheels_only=wheels_only, only_kept=True) if version else []
    found = _of_version(listed, version)
    if found is None:
        listed = releases(cache, package, wheels_only=wheels_only)
        found = _of_version(listed, version)
    if found is None:
        newest = ", ".join(one.version for one in listed[: -package_index.NEWEST_SHOWN - 1 : -1])
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
