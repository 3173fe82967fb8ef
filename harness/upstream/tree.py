"""Trees: the source of an upstream release, unpacked, checked and never built."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.core import Cache, UnavailableError, files, seal
from harness.core.seal import Layout
from harness.pack.model import Upstream
from harness.upstream import archive, checkout, download
from harness.upstream.source import Source, SourceKind, commit_of

#: The cache's folder of trees; no name in it tells whether a tree is patched.
KIND = "trees"


@dataclass(frozen=True)
class Tree:
    """A tree in the cache."""

    folder: Path  # its root, laid out like the upstream repository or like a wheel
    source_root: str  # the path from `folder` to the import names; empty for a wheel's layout
    entries: Mapping[str, str]  # sha256 by relative path
    sha256: str  # of its archive, or of its manifest
    version: str  # by its origin, never by the script
    key: str  # its name in the cache
    layout: Layout = field(compare=False, repr=False)  # checks that it is unchanged

    @property
    def commit(self) -> str:
        """The commit that it holds unchanged; empty for a release, or if files were modified."""
        return commit_of(self.version)

    @property
    def import_root(self) -> Path:
        """The folder that goes on PYTHONPATH."""
        return self.folder / self.source_root

    def path_here(self, repository_path: str, source_root: str) -> str:
        """Translate a path of the upstream repository into one of this tree."""
        if source_root and not self.source_root:
            return repository_path.removeprefix(f"{source_root}/")
        return repository_path


def open_tree(layout: Layout, upstream: Upstream, sha256: str, version: str) -> Tree:
    """Return a tree of the cache, which is laid out if needed; an empty `sha256` means its manifest's.

    ChangedError: the tree had changed since it was laid out.
    """
    entries, folder = layout.lay_out().entries, layout.folder
    source_root = upstream.source_root if (folder / upstream.source_root).is_dir() else ""
    sha256 = sha256 or files.manifest_hash(entries)
    return Tree(folder, source_root, entries, sha256, version, layout.key, layout)


def _from_archive(cache: Cache, upstream: Upstream, version: str, file: str, sha256: str) -> Tree:
    def build(entry: Path) -> None:
        raw = entry / "raw"
        raw.mkdir()
        path = download.fetch(cache, upstream.package, file, sha256)
        cache.tell(f"unpacking {upstream.package} {version}")
        archive.unpack(path, raw)
        members = list(raw.iterdir())
        root = members[0] if len(members) == 1 and members[0].is_dir() and not file.endswith(".whl") else raw
        root.rename(entry / "content")
        if raw.exists():
            raw.rmdir()

    layout = Layout(cache, KIND, files.key_of("archive", sha256), build, f"{upstream.package} {version}")
    return open_tree(layout, upstream, sha256, version)


def _from_commit(cache: Cache, upstream: Upstream, origin: Source) -> Tree:
    """Lay out a commit once: its 40 digits name what it holds."""
    url, commit = origin.url, origin.value
    if not checkout.COMMIT.fullmatch(commit):
        commit = checkout.full_commit(cache, url, commit)

    def build(entry: Path) -> None:
        if checkout.full_commit(cache, url, commit) != commit:
            raise UnavailableError(f"{commit} is the name of a tag. Next: name its commit")
        checkout.copy_commit(cache, url, commit, entry / "content")

    version = f"commit {commit}"
    layout = Layout(cache, KIND, files.key_of("commit", url, commit), build, f"{upstream.package} {version}")
    return open_tree(layout, upstream, "", version)


def _from_folder(cache: Cache, upstream: Upstream, origin: Source) -> Tree:
    """Copy an origin that can change, and name the copy by what it holds."""

    def copy(content: Path) -> tuple[str, str]:
        if origin.kind == SourceKind.PATH:
            version = checkout.copy_path(Path(origin.value).expanduser(), content)
        else:
            version = checkout.copy_installed(upstream.package, content)
        return version, files.manifest_hash(seal.hashes(content, seal.stats(content)))

    with cache.guard(), cache.scratch("origin-") as scratch:
        version, sha256 = copy(scratch / "content")

        def build(entry: Path) -> None:
            if (scratch / "content").exists():
                (scratch / "content").rename(entry / "content")
            elif copy(entry / "content")[1] != sha256:
                raise UnavailableError(f"{origin.kind} {origin.value}: changed while it was judged")

        layout = Layout(cache, KIND, files.key_of("content", sha256), build, f"{upstream.package} {version}")
        return open_tree(layout, upstream, "", version)


def tree_in_set(tree: Tree, layout: Layout) -> Tree:
    """Return the tree of a wheel that lies in one folder with the wheels of a dependency set, as pip installs them.

    Its entries stay those of its own wheel: nothing else in that folder is under test.
    """
    return replace(tree, folder=layout.folder, source_root="", layout=layout)


def materialize(cache: Cache, upstream: Upstream, origin: Source) -> Tree:
    """Return the tree of an origin, which is fetched and unpacked unless the cache has it."""
    if origin.kind == SourceKind.PINNED and not upstream.is_commit:
        return _from_archive(cache, upstream, upstream.version, upstream.file, upstream.sha256)
    if origin.kind in (SourceKind.RELEASE, SourceKind.LATEST):
        version = origin.value if origin.kind == SourceKind.RELEASE else None
        release = download.resolve(cache, upstream.package, version, wheels_only=upstream.is_wheel)
        return _from_archive(cache, upstream, release.version, release.file, release.sha256)
    tree = _from_commit(cache, upstream, origin) if origin.url else _from_folder(cache, upstream, origin)
    if not tree.entries:
        raise UnavailableError(f"{origin.kind} {origin.value}: holds no file")
    return tree
