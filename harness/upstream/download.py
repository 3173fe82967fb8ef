"""Files of the package index in the cache, by their sha256, and what is newest upstream.

The newest release and the head of the default branch move, so they are looked up each time. The cache keeps the result
with the day of the look-up: a machine without network judges the result of `fetch --latest`, and says how old it is.
"""

import datetime as dt
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packaging import tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from harness.core import Cache, UnavailableError, UnsupportedHereError, files, git, structure
from harness.upstream import checkout, package_index

#: Tags of the machines that packs run on: glibc up to 2.28 (2018), the newest first.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
)
NOT_HERE = (
    "not in the cache {}, and --offline forbids to download it. "
    "Next: runner.py fetch --cache DIR on a machine with network, then --cache DIR here"
)
COMMIT = re.compile(r"(?P<commit>[0-9a-f]{40})\tHEAD")


@dataclass(frozen=True)
class ReleaseFile:
    """One file of a release; `file` and `sha256` are empty if no file of it can be read here."""

    package: str
    version: str
    file: str
    sha256: str
    date: str = ""  # of its upload; empty if the index states none
    yanked: bool = False


def fetch(cache: Cache, package: str, file: str | None, sha256: str) -> Path:
    """Return the path of the file with a sha256, which is downloaded unless the cache has it.

    `file` is its name, for errors; None if only the sha256 is pinned.
    """

    def build(folder: Path) -> None:
        if cache.offline:
            raise UnavailableError(f"{file or package}: {NOT_HERE.format(cache.root)}")
        cache.tell(f"downloading {file or package}")
        package_index.download(package, file, sha256, folder)

    entry = cache.populate("downloads", sha256, build)
    path = next(entry.iterdir(), None)
    if path is None or files.sha256_file(path) != sha256:
        files.remove_tree(entry)
        raise UnavailableError(
            f"{file or package}: the cached download no longer has its sha256 ({sha256[:12]}...). It has been removed. "
            "Next: run again without --offline, or copy the cache anew"
        )
    return path


def wheel(cache: Cache, package: str, version: str, hashes: tuple[str, ...], python_tag: str) -> Path:
    """Return the wheel that fits a Python best, of a release's files with these hashes; it is downloaded if needed.

    UnavailableError: no file can be obtained. UnsupportedHereError: there is no wheel for that Python.
    """
    if len(hashes) == 1:
        path = fetch(cache, package, None, hashes[0])
        _best_wheel([ReleaseFile(package, version, path.name, hashes[0])], package, version, python_tag)
        return path
    if cache.offline:
        paths = (path for sha256 in hashes for path in cache.entry("downloads", sha256).glob("*"))
        entries = [ReleaseFile(package, version, path.name, path.parent.name) for path in paths]
    else:
        entries = [entry for entry in _listing(cache, package, ask=False) if entry.sha256 in hashes]
        if len(entries) != len(hashes):
            entries = [entry for entry in _listing(cache, package, ask=True) if entry.sha256 in hashes]
    if not entries:
        reason = (
            "wrong sha256: the index has no file of one that is pinned. Next: compare them with the release's own page"
        )
        raise UnavailableError(f"{package} {version}: {NOT_HERE.format(cache.root) if cache.offline else reason}")
    release = _best_wheel(entries, package, version, python_tag)
    return fetch(cache, package, release.file, release.sha256)


def _best_wheel(entries: list[ReleaseFile], package: str, version: str, python_tag: str) -> ReleaseFile:
    platforms, python = (*PLATFORMS, *tags.platform_tags()), (3, int(python_tag.removeprefix("cp3")))
    supported = [*tags.cpython_tags(python, platforms=platforms), *tags.compatible_tags(python, python_tag, platforms)]
    wheels = [entry for entry in entries if entry.file.endswith(".whl")]
    if best := _best_file(wheels, supported):
        return best
    if wheels:
        raise UnsupportedHereError(f"{package} {version}: the requirements file pins no wheel for {python_tag}")
    raise UnavailableError(f"{package} {version}: it has no wheel, and an sdist is never built: that would execute it")


def _best_file(entries: list[ReleaseFile], supported: Iterable[tags.Tag]) -> ReleaseFile | None:
    """Return the file that a Python prefers: an sdist, else the wheel with its first tag."""
    sdists = (entry for entry in entries if entry.file.endswith((".tar.gz", ".zip")))
    select = tags.create_compatible_tags_selector(supported)
    return next(sdists, None) or next(select((entry, _tags(entry.file)) for entry in entries), None)


def _tags(file: str) -> frozenset[tags.Tag]:
    """Return the tags of a wheel; none of an sdist, or of a malformed name."""
    try:
        return parse_wheel_filename(file)[3]
    except InvalidWheelFilename:
        return frozenset()


def _listing(cache: Cache, package: str, *, ask: bool) -> list[ReleaseFile]:
    """Return every file of a package, as the index lists them now, or as the cache holds that list.

    With `ask`, and with network, the index is asked, and its list stored. Without, a list that is not stored, or has
    another form, is empty.
    """
    path = cache.entry("releases", f"{package}.json")
    if not ask or cache.offline:
        try:
            return [ReleaseFile(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
        except (FileNotFoundError, TypeError, ValueError):
            return []
    listing = []
    for offer in package_index.offers(package):
        if offer.version is not None:
            date = offer.file.upload_time.date().isoformat() if offer.file.upload_time else ""
            yanked = bool(offer.file.is_yanked)
            listing.append(ReleaseFile(package, str(offer.version), offer.file.filename, offer.sha256, date, yanked))
    with cache.guard():
        files.write_atomic(path, json.dumps([asdict(entry) for entry in listing], indent=1))
    return listing


def releases(cache: Cache, package: str, *, wheels_only: bool = False, ask: bool = True) -> list[ReleaseFile]:
    """List every release of a package, the oldest first, each with its file that fits best here.

    Yanked releases are left out. Without `ask` the stored list counts, and the index is not asked.
    UnavailableError: the index cannot be asked, or without network, there is no stored list.
    """
    listing = _listing(cache, package, ask=ask)
    if ask and cache.offline and not listing:
        raise UnavailableError(
            f"{package}: its releases were not listed before, and --offline forbids to ask the package index"
        )
    by_version: dict[Version, list[ReleaseFile]] = {}
    for entry in listing:
        if not entry.yanked:
            by_version.setdefault(Version(entry.version), []).append(entry)
    best_files, supported = [], list(tags.sys_tags())
    for version, entries in sorted(by_version.items()):
        usable = [entry for entry in entries if entry.sha256 and (entry.file.endswith(".whl") or not wheels_only)]
        best = _best_file(usable, supported) or ReleaseFile(package, str(version), "", "")
        best_files.append(replace(best, date=min((entry.date for entry in entries if entry.date), default="")))
    return best_files


def resolve(cache: Cache, package: str, version: str | None, *, wheels_only: bool = False) -> ReleaseFile:
    """Return the best file of one release; if `version` is None, of the newest final release.

    A version in the stored list is not looked up again, so that the same call works offline. UnavailableError: there is
    no such release, or no file of it can be read here.
    """
    if cache.offline and version is None:
        raise UnavailableError(f"{package} latest: --offline forbids to ask the package index")
    listing = releases(cache, package, wheels_only=wheels_only, ask=False) if version else []
    release = _find(listing, version)
    if release is None:
        listing = releases(cache, package, wheels_only=wheels_only)
        release = _find(listing, version)
    if release is None:
        newest = ", ".join(entry.version for entry in listing[: -package_index.NEWEST_SHOWN - 1 : -1])
        raise UnavailableError(
            f"{package}: no release {version} on the package index. It has {newest or 'no release'}. "
            f"Next: --upstream {package}==VERSION, or --upstream latest"
        )
    if not release.file:
        raise UnavailableError(f"{package} {version or 'latest'}: no file that this interpreter could read")
    return release


def _find(listing: list[ReleaseFile], version: str | None) -> ReleaseFile | None:
    """Return the release with a version; if that is None, the newest final release."""
    for entry in reversed(listing):
        listed_version = Version(entry.version)
        if listed_version == Version(version) if version else not listed_version.is_prerelease:
            return entry
    return None


@dataclass(frozen=True)
class Newest:
    """The newest release of a package, or the commit at the head of a repository's default branch."""

    version: str  # of the release, or the commit
    date: str  # of the upload, or of the commit
    seen: str  # the day, in UTC, of the look-up
    file: str = ""  # of the release on the package index
    sha256: str = ""  # of that file


def newest_release(cache: Cache, package: str, *, wheels_only: bool) -> Newest:
    """Look up the newest release.

    UnavailableError: the look-up failed, or without network, the cache holds no result of an earlier one.
    """

    def ask(today: str) -> Newest:
        file = resolve(cache, package, None, wheels_only=wheels_only)
        return Newest(file.version, file.date, today, file.file, file.sha256)

    return _look_up(cache, f"release of {package}{' (wheel)' if wheels_only else ''}", ask)


def newest_head(cache: Cache, url: str) -> Newest:
    """Look up the commit at the head of the default branch of the repository at `url`, and fetch it, likewise."""

    def ask(today: str) -> Newest:
        listed = git.run(["ls-remote", "--", url, "HEAD"], cache.root)
        match = COMMIT.fullmatch(listed.stdout.strip())
        if listed.returncode != 0 or match is None:
            raise UnavailableError(f"the head of {url}: {git.last_line(listed.stderr)}")
        return Newest(match["commit"], checkout.commit_date(cache, url, match["commit"]).isoformat(), today)

    return _look_up(cache, f"head of {url}", ask)


def _look_up(cache: Cache, subject: str, ask: Callable[[str], Newest]) -> Newest:
    """Ask, and store the result; without network, return the stored result."""
    path = cache.entry("newest", f"{files.key_of(subject)}.json")
    if not cache.offline:
        result = ask(dt.datetime.now(dt.UTC).date().isoformat())
        with cache.guard():
            files.write_atomic(path, json.dumps({"of": subject, "found": asdict(result)}, indent=1) + "\n")
        return result
    try:
        return structure.structure(structure.loads(path.read_bytes())["found"], Newest)
    except (OSError, ValueError, KeyError, TypeError):
        raise UnavailableError(
            f"the newest {subject} was not looked up into this cache, and --offline forbids to look now. "
            "Next: runner.py fetch --latest --cache DIR where there is network"
        ) from None
