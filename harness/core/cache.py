"""The cache: one folder of entries named by what they hold, shared by any number of runners."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from harness.core import files, room

if TYPE_CHECKING:
    import filelock


def default_root() -> Path:
    """Return the folder that a user's cache belongs in."""
    return Path(platformdirs.user_cache_dir("reproducer-packs", appauthor=False))


@dataclass(frozen=True)
class Cache:
    """The cache, and where what it lacks comes from."""

    root: Path  # its folder
    offline: bool = False  # forbids whatever would reach the network
    tell: Callable[[str], None] = field(default=lambda _: None, compare=False, repr=False)  # takes what is fetched
    mirrors: Path | None = None  # a folder of repositories NAME.git that stand for the upstreams' own of that name

    @property
    def places(self) -> dict[Path, str]:
        """The folders of this machine that it knows, and what a receipt calls them."""
        return {self.root: "$CACHE"} | ({self.mirrors: "$MIRRORS"} if self.mirrors else {})

    def entry(self, kind: str, key: str) -> Path:
        """Return the folder of one entry, whether or not it is there."""
        return self.root / kind / key

    def populate(self, kind: str, key: str, build: Callable[[Path], None]) -> Path:
        """Return an entry, built by `build` in a folder that appears under its name only when it is whole.

        Two runners that want the same entry build it once: the second waits for the first.
        """
        entry = self.entry(kind, key)
        if entry.is_dir():
            used(entry)
            return entry
        with self.guard(), self.lock(f"{kind}-{key}"):
            if not entry.is_dir():
                entry.parent.mkdir(parents=True, exist_ok=True)
                with self.scratch(f"{kind}-") as folder:
                    build(folder)
                    folder.rename(entry)
        return entry

    @contextmanager
    def lock(self, name: str, timeout: float = -1) -> Iterator[None]:
        """Hold the lock `name`; the kernel releases it when the process dies, however it dies.

        TimeoutError is raised where somebody else has held it for `timeout` seconds (negative: wait for ever).
        """
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with _file_lock(folder / f"{name}.lock", timeout):
            yield

    @contextmanager
    def scratch(self, prefix: str) -> Iterator[Path]:
        """Yield a folder on the cache's own file system, removed at the end if it is still there."""
        with self.guard():
            self.sweep()
            work = self.root / "work"
            work.mkdir(parents=True, exist_ok=True)
            outer, lock = self._claimed(prefix, work)
        try:
            with lock:
                inner = outer / "content"
                inner.mkdir()
                yield inner
        finally:
            lock.release(force=True)
            files.remove_tree(outer)

    @staticmethod
    def _claimed(prefix: str, work: Path) -> tuple[Path, filelock.FileLock]:
        """Make a folder and lock it; where another runner's `sweep` took it for an abandoned one, make another."""
        while True:
            outer = Path(tempfile.mkdtemp(prefix=prefix, dir=work))
            lock = _file_lock(outer / "in-use")
            # Gone, or (as mkdir says it) there and gone the moment after: filelock makes the folder of its file.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                lock.acquire()
                if (outer / "in-use").exists():
                    return outer, lock
                lock.release()
            files.remove_tree(outer)

    def sweep(self) -> None:
        """Remove what a killed runner left in ``work``: folders whose lock nobody holds.

        One without a lock's file is locked as well: its owner was killed before it made that, or while removing it.
        """
        for outer in (self.root / "work").glob("*"):
            with contextlib.suppress(OSError), _file_lock(outer / "in-use", timeout=0):  # filelock.Timeout is one
                files.remove_tree(outer)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn a full or read-only file system into one line that names the cache."""
        with room.guard(self.root, "the cache", "--cache DIR"):
            yield


def _file_lock(path: Path, timeout: float = -1) -> filelock.FileLock:
    """Return the lock of a file, not yet held; its library is loaded only where something is locked."""
    import filelock  # noqa: PLC0415 - 30 ms that `list` does without

    return filelock.FileLock(path, timeout=timeout)


def used(entry: Path) -> None:
    """Note on an entry that it was used now: what nobody uses is pruned some day."""
    with contextlib.suppress(OSError):  # of a read-only cache nothing is pruned
        os.utime(entry)
