"""Files of the package index in the cache, by their sha256."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags, platform_tags, sys_tags
from packaging.utils import parse_wheel_filename

from harness.core import files
from harness.core.cache import Cache
from harness.core.errors import UnavailableError, UnsupportedHereError
from harness.upstream import package_index

#: Wheels for the machines that packs run on: any glibc up to 2.28 (2018), those for a newer one first.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
)


@dataclass(frozen=True)
class ReleaseFile:
    """One file of one release, with the sha256 that pack.toml or the index states."""

    package: str
    version: str
    file: str
    sha256: str


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

    entry = cache.populate("downloads", sha256, build)
    found = next(entry.iterdir(), None)
    if found is not None and files.sha256_file(found) == sha256:
        return found
    forget(entry)
    if not cache.offline:
        cache.tell(f"{file or package}: the cached download is damaged; fetching it again")
        return next(cache.populate("downloads", sha256, build).iterdir())
    raise UnavailableError(
        f"{file or package}: the cached download no longer has its sha256 ({sha256[:12]}...), and --offline forbids to "
        "fetch it again. It has been removed. Next: run without --offline, or copy the cache anew"
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
    ranked = [(rank, one) for one in wheels if (rank := preference(one.file, tags)) is not None]
    if ranked:
        return min(ranked, key=lambda pair: pair[0])[1]
    if wheels:
        raise UnsupportedHereError(f"{package} {version}: the requirements file pins no wheel for {python_tag}")
    raise UnavailableError(f"{package} {version}: it has no wheel, and an sdist is never built: that would execute it")


def forget(entry: Path) -> None:
    """Remove an entry of the cache that is not what its name says."""
    shutil.rmtree(entry, ignore_errors=True)


def preference(file: str, tags: list[Tag]) -> int | None:
    """Return how far down a file stands: sdists first, then wheels by the tags of this interpreter."""
    if not file.endswith(".whl"):
        return -1 if file.endswith((".tar.gz", ".zip")) else None
    ranks = [tags.index(tag) for tag in parse_wheel_filename(file)[3] if tag in tags]
    return min(ranks) if ranks else None


def remembered(cache: Cache, package: str, version: str | None, *, wheels_only: bool) -> Path:
    """Return where it is kept which file of a release was chosen."""
    return cache.entry("releases", f"{package}-{version}-{'wheel' if wheels_only else 'any'}.json")


def resolve(cache: Cache, package: str, version: str | None, *, wheels_only: bool = False) -> ReleaseFile:
    """Look up the best file of one release; where `version` is None, of the newest final one.

    What was looked up for a named version is remembered, so that the same call works offline.
    """
    known = remembered(cache, package, version, wheels_only=wheels_only)
    if version and known.exists():
        return ReleaseFile(**json.loads(known.read_text(encoding="utf-8")))
    if cache.offline:
        raise UnavailableError(
            f"{package} {version or 'latest'}: not looked up before, and --offline forbids to ask the package index"
        )
    tags = list(sys_tags())
    index = package_index.of_user()
    offers = index.release(package, version)
    ranked = [(preference(offer.file.filename, tags), offer) for offer in offers]
    usable = [
        (rank, offer) for rank, offer in ranked if rank is not None and offer.sha256 and not (wheels_only and rank < 0)
    ]
    if not usable:
        raise UnavailableError(f"{package} {version or 'latest'}: no file that this interpreter could read")
    best = min(usable, key=lambda pair: pair[0])[1]
    release = ReleaseFile(package, str(best.version), best.file.filename, best.sha256)
    with cache.guard():
        files.write_atomic(known.with_name(known.name.replace("None", release.version)), json.dumps(asdict(release)))
    return release
