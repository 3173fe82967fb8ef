"""The cache: one folder of entries named by what they hold, shared by any number of runners."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs

from harness.errors import UnavailableError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def default_root() -> Path:
    """Return the folder that a user's cache belongs in."""
    return Path(platformdirs.user_cache_dir("reproducer-packs", appauthor=False))


@dataclass(frozen=True)
class Cache:
    """The cache at `root`; `offline` forbids whatever would reach the network."""

    root: Path
    offline: bool = False

    def entry(self, kind: str, key: str) -> Path:
        """Return the folder of one entry, whether or not it is there."""
        return self.root / kind / key

    def populate(self, kind: str, key: str, build: Callable[[Path], None]) -> Path:
        """Return an entry, built by `build` in a folder that appears under its name only when it is whole.

        Two runners that want the same entry build it once: the second waits for the first.
        """
        entry = self.entry(kind, key)
        if entry.is_dir():
            return entry
        with self.guard(), self.lock(f"{kind}-{key}"):
            if not entry.is_dir():
                entry.parent.mkdir(parents=True, exist_ok=True)
                with self.scratch(f"{kind}-") as folder:
                    build(folder)
                    folder.rename(entry)
        return entry

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock `name`; the kernel releases it when the process dies, however it dies."""
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / f"{name}.lock"):
            yield

    @contextmanager
    def scratch(self, prefix: str) -> Iterator[Path]:
        """Yield a folder on the cache's own file system, removed at the end if it is still there."""
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
            shutil.rmtree(outer, ignore_errors=True)

    @staticmethod
    def _claimed(prefix: str, work: Path) -> tuple[Path, filelock.BaseFileLock]:
        """Make a folder and lock it; where another runner's `sweep` took it for an abandoned one, make another."""
        while True:
            outer = Path(tempfile.mkdtemp(prefix=prefix, dir=work))
            lock = filelock.FileLock(outer / "in-use")
            with contextlib.suppress(FileNotFoundError):
                lock.acquire()
                if (outer / "in-use").exists():
                    return outer, lock
                lock.release()
            shutil.rmtree(outer, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a killed runner left in ``work``: folders whose lock nobody holds."""
        for outer in (self.root / "work").glob("*"):
            lock = filelock.FileLock(outer / "in-use", timeout=0)
            if not (outer / "in-use").exists():
                continue
            try:
                with lock:
                    shutil.rmtree(outer, ignore_errors=True)
            except (filelock.Timeout, OSError):
                continue

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn a full or read-only file system into one line that names the cache."""
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                free = shutil.disk_usage(_existing(self.root)).free // 2**20
                raise UnavailableError(
                    f"no room in the cache {self.root} ({free} MiB free); nothing half-written was kept. "
                    "Next: free room, or name another folder with --cache DIR"
                ) from None
            if error.errno in {errno.EACCES, errno.EROFS, errno.EPERM}:
                raise UnavailableError(
                    f"the cache {self.root} cannot be written ({os.strerror(error.errno)}). "
                    "Next: name another folder with --cache DIR"
                ) from None
            raise


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
