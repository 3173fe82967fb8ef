"""Files of the package index in the cache, by their sha256."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.tags import Tag, sys_tags
from packaging.utils import parse_wheel_filename

from harness import files, index
from harness.cache import Cache
from harness.errors import UnavailableError


@dataclass(frozen=True)
class Release:
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
        client = index.of_user()
        client.download(client.pinned(package, file, sha256), sha256, folder)

    return next(cache.populate("downloads", sha256, build).iterdir())


def preference(file: str, tags: list[Tag]) -> int | None:
    """Return how far down a file stands: sdists first, then wheels by the tags of this interpreter."""
    if not file.endswith(".whl"):
        return -1 if file.endswith((".tar.gz", ".zip")) else None
    ranks = [tags.index(tag) for tag in parse_wheel_filename(file)[3] if tag in tags]
    return min(ranks) if ranks else None


def resolve(cache: Cache, package: str, version: str | None, *, wheels_only: bool = False) -> Release:
    """Look up the best file of one release, or of the newest one where `version` is None.

    What was looked up for a named version is remembered, so that the same call works offline.
    """
    known = cache.entry("releases", f"{package}-{version}-{'wheel' if wheels_only else 'any'}.json")
    if version and known.exists():
        return Release(**json.loads(known.read_text(encoding="utf-8")))
    if cache.offline:
        raise UnavailableError(
            f"{package} {version or 'latest'}: not looked up before, and --offline forbids to ask the package index"
        )
    tags = list(sys_tags())
    ranked = [(preference(offer.file.filename, tags), offer) for offer in index.of_user().release(package, version)]
    usable = [
        (rank, offer) for rank, offer in ranked if rank is not None and offer.sha256 and not (wheels_only and rank < 0)
    ]
    if not usable:
        raise UnavailableError(f"{package} {version or 'latest'}: no file that this interpreter could read")
    best = min(usable, key=lambda pair: pair[0])[1]
    release = Release(package, str(best.version), best.file.filename, best.sha256)
    with cache.guard():
        files.write_atomic(known.with_name(known.name.replace("None", release.version)), json.dumps(asdict(release)))
    return release
