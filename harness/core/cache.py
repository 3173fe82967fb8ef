"""The cache: one folder of entries, each named by its content, shared by any number of runners."""

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

from harness.core import files

if TYPE_CHECKING:
    import filelock


def default_root() -> Path:
    """Return the user's cache folder."""
    return Path(platformdirs.user_cache_dir("reproducer-packs", appauthor=False))


@dataclass(frozen=True)
class Cache:
    """The cache, and the sources of entries that it lacks."""

    root: Path  # its folder
    offline: bool = False  # forbids access to the network
    tell: Callable[[str], None] = field(default=lambda _: None, compare=False, repr=False)  # shows the current step
    mirrors: Path | None = None  # a folder whose NAME.git stands for the upstream repository of that name

    @property
    def places(self) -> dict[Path, str]:
        """The cache's folders on this machine, and the name that a receipt has for each."""
        return {self.root: "$CACHE"} | ({self.mirrors: "$MIRRORS"} if self.mirrors else {})

    def entry(self, kind: str, key: str) -> Path:
        """Return the folder of an entry, which need not exist."""
        return self.root / kind / key

    def populate(self, kind: str, key: str, build: Callable[[Path], None]) -> Path:
        """Return an entry; `build` fills another folder, which is renamed to the entry once it is complete.

        Of two runners that need the same entry, the second waits for the first.
        """
        entry = self.entry(kind, key)
        if entry.is_dir():
            mark_used(entry)
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
        """Hold the lock `name`; the kernel releases it when the process dies.

        TimeoutError: another holder kept it for `timeout` seconds (negative: wait for ever).
        """
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with _file_lock(folder / f"{name}.lock", timeout):
            yield

    @contextmanager
    def scratch(self, prefix: str) -> Iterator[Path]:
        """Yield an empty folder on the cache's file system; if it still exists at the end, it is removed."""
        with self.guard():
            self.sweep()
            work = self.root / "work"
            work.mkdir(parents=True, exist_ok=True)
            folder, lock = self._claim(prefix, work)
        try:
            with lock:
                content = folder / "content"
                content.mkdir()
                yield content
        finally:
            lock.release(force=True)
            files.remove_tree(folder)

    @staticmethod
    def _claim(prefix: str, work: Path) -> tuple[Path, filelock.FileLock]:
        """Make a folder and lock it; if another runner's `sweep` removes the folder first, make another."""
        while True:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=work))
            lock = _file_lock(folder / "in-use")
            # The folder was removed; FileExistsError: while filelock made the folder of its file.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                lock.acquire()
                if (folder / "in-use").exists():
                    return folder, lock
                lock.release()
            files.remove_tree(folder)

    def sweep(self) -> None:
        """Remove the folders of killed runners from ``work``: those whose lock nobody holds.

        A folder without a lock file is locked and removed, too: its runner was killed before making or after removing
        the file.
        """
        for folder in (self.root / "work").glob("*"):
            with contextlib.suppress(OSError), _file_lock(folder / "in-use", timeout=0):  # Timeout is an OSError
                files.remove_tree(folder)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn the error of a full or read-only file system into one line that names the cache."""
        with files.guard(self.root, "the cache", "--cache DIR"):
            yield


def _file_lock(path: Path, timeout: float = -1) -> filelock.FileLock:
    import filelock  # noqa: PLC0415 - 30 ms that `list` does without

    return filelock.FileLock(path, timeout=timeout)


def mark_used(entry: Path) -> None:
    """Set the time of an entry's last use, by which entries are pruned."""
    with contextlib.suppress(OSError):  # a read-only cache is not pruned
        os.utime(entry)
