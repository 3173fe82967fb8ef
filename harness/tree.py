"""Trees: the source of an upstream release, unpacked, checked and never built."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from harness import archive, checkout, download, files, installed
from harness.cache import Cache
from harness.definition import Upstream
from harness.errors import UnavailableError
from harness.origin import Kind, Origin

MANIFEST = "manifest.json"
CONTENT = "content"


@dataclass(frozen=True)
class Tree:
    """A tree in the cache.

    Attributes:
        folder: its root, laid out like the upstream repository or like a wheel.
        source_root: what stands between `folder` and the import names; empty for a wheel's layout.
        entries: sha256 by relative path.
        sha256: of the archive it was unpacked from, or of its manifest.
        version: what the runner knows of its origin, never the probe's word.
        key: its name in the cache.

    """

    folder: Path
    source_root: str
    entries: dict[str, str]
    sha256: str
    version: str
    key: str

    @property
    def import_root(self) -> Path:
        """The folder that goes on PYTHONPATH."""
        return self.folder / self.source_root

    def path_here(self, repository_path: str, source_root: str) -> str:
        """Translate a path of the upstream repository into one of this tree."""
        if source_root and not self.source_root:
            return repository_path.removeprefix(f"{source_root}/")
        return repository_path


def opened(entry: Path, upstream: Upstream, sha256: str, version: str) -> Tree:
    """Read a tree that lies in the cache; an empty `sha256` means its manifest's."""
    folder = entry / CONTENT
    entries = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
    source_root = upstream.source_root if (folder / upstream.source_root).is_dir() else ""
    return Tree(folder, source_root, entries, sha256 or files.manifest_hash(entries), version, entry.name)


def seal(entry: Path) -> None:
    """Write the manifest of a tree that was just laid into `entry`."""
    entries = files.manifest(entry / CONTENT)
    (entry / MANIFEST).write_text(json.dumps(entries), encoding="utf-8")


def _from_archive(cache: Cache, upstream: Upstream, version: str, file: str, sha256: str) -> Tree:
    def build(entry: Path) -> None:
        raw = entry / "raw"
        raw.mkdir()
        path = download.fetch(cache, upstream.package, file, sha256)
        archive.unpack(path, raw)
        top = archive.only_folder(raw) if not file.endswith(".whl") else raw
        top.rename(entry / CONTENT)
        if raw.exists():
            raw.rmdir()
        seal(entry)

    return opened(cache.populate("trees", sha256[:32], build), upstream, sha256, version)


def _from_folder(cache: Cache, upstream: Upstream, origin: Origin) -> Tree:
    """Copy an origin that can change, and name the copy by what it holds."""
    with cache.guard(), cache.scratch("origin-") as scratch:
        content = scratch / CONTENT
        content.mkdir()
        if origin.kind == Kind.PATH:
            version = checkout.copy_path(Path(origin.value).expanduser(), content)
        elif origin.kind == Kind.GIT:
            version = checkout.copy_commit(cache, origin.url, origin.value, content)
        else:
            version = installed.copy(upstream.package, content)
        seal(scratch)
        entries = json.loads((scratch / MANIFEST).read_text(encoding="utf-8"))
        if not entries:
            raise UnavailableError(f"{origin.kind} {origin.value}: holds no file")

        def build(entry: Path) -> None:
            content.rename(entry / CONTENT)
            (scratch / MANIFEST).rename(entry / MANIFEST)

        key = files.key_of(files.manifest_hash(entries))
        return opened(cache.populate("trees", key, build), upstream, "", version)


def materialize(cache: Cache, upstream: Upstream, origin: Origin) -> Tree:
    """Return the tree of an origin, fetched and unpacked unless the cache has it."""
    if origin.kind == Kind.PINNED:
        return _from_archive(cache, upstream, upstream.version, upstream.file, upstream.sha256)
    if origin.kind in (Kind.RELEASE, Kind.LATEST):
        version = origin.value if origin.kind == Kind.RELEASE else None
        release = download.resolve(cache, upstream.package, version)
        return _from_archive(cache, upstream, release.version, release.file, release.sha256)
    return _from_folder(cache, upstream, origin)
