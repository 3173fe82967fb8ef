"""Seals tell whether an entry of the cache is still, byte for byte, what was laid out.

A seal lies outside its entry. It holds the sha256 of every file, and its stat: size, times, inode. While the stat of a
file is the same, so are its bytes; otherwise the file is hashed again. Seals are authenticated with a key outside the
cache, so that no seal that came with an entry is trusted. An entry without a seal of this user is built again from an
archive, which is hashed against pack.toml, and compared.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache as once
from pathlib import Path

import platformdirs

from harness.core import files
from harness.core.cache import Cache, mark_used
from harness.core.errors import HarnessError, UnavailableError
from harness.core.words import Exit

#: Of a file: size in bytes, times of modification and of change in ns, inode, type and permissions.
Stat = tuple[int, int, int, int, int]
#: Stands for the stat of a folder that `files.walk` does not enter.
TOO_DEEP = (0, 0, 0, 0, 0)
KEY_BYTES = 32
#: Of a message: the number of changes, and the characters at each end of a long one.
SHOWN, SHOWN_END = 3, 120


class ChangedError(HarnessError):
    """An entry of the cache had changed since it was laid out; it has been laid out anew, or removed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=Exit.DEVIATES)


def key_file() -> Path:
    """Return the file of the user's key for seals, outside every cache."""
    return Path(platformdirs.user_state_dir("reproducer-packs", appauthor=False)) / "seal.key"


@once
def _key(path: Path) -> bytes:
    """Return the user's key, made at its first use; if it cannot be stored, a key of this process alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as fresh:  # readable to its owner alone
            fresh.write(secrets.token_bytes(KEY_BYTES))
            fresh.flush()
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(fresh.name)  # the first of several processes wins
        key = path.read_bytes()
    except OSError:
        key = b""
    return key if len(key) == KEY_BYTES else secrets.token_bytes(KEY_BYTES)


def owner_id() -> str:
    """Name the user who seals, by eight digits that follow from the key."""
    return hashlib.sha256(b"owner" + _key(key_file())).hexdigest()[:8]


def stats(folder: Path) -> dict[str, Stat]:
    """Map the path of everything below `folder` that is not a folder to its stat; links are not followed."""
    return {
        path: (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_mode) if stat else TOO_DEEP
        for path, stat in files.walk(folder)
    }


def hashes(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """Map paths below `folder` to the sha256 of their bytes, or to ``no file`` for a link, a pipe or a device."""
    return {path: _content_hash(folder / path) for path in paths}


def _content_hash(path: Path) -> str:
    is_file = os.path.isfile(path) and not path.is_symlink()  # noqa: PTH113 - false for a path that is too long
    return files.sha256_file(path) if is_file else "no file"


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List the files that were edited, deleted or added, in words."""
    edited = [f"{path} was edited" for path in sorted(before.keys() & after.keys()) if before[path] != after[path]]
    deleted = [f"{path} was deleted" for path in sorted(before.keys() - after.keys())]
    return edited + deleted + [f"{path} was added" for path in sorted(after.keys() - before.keys())]


def _summary(changes: list[str]) -> str:
    more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    limit = 2 * SHOWN_END
    shown = (text if len(text) <= limit else f"{text[:SHOWN_END]} ... {text[-SHOWN_END:]}" for text in changes[:SHOWN])
    return "; ".join(shown) + more


@dataclass(frozen=True)
class Seal:
    """The content of an entry when it was sealed: sha256 and stat by path relative to the sealed folder."""

    entries: Mapping[str, str]
    stats: Mapping[str, Stat]


def _seal_path(cache: Cache, kind: str, key: str) -> Path:
    return cache.root / "seals" / owner_id() / f"{kind}-{key}.json"


def _authentication_code(name: str, body: str) -> str:
    return hmac.new(_key(key_file()), f"{name}\n{body}".encode(), hashlib.sha256).hexdigest()


def read(cache: Cache, kind: str, key: str) -> Seal | None:
    """Read a seal; None if there is none, or none of this user."""
    path = _seal_path(cache, kind, key)
    try:
        code, _, body = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    if not hmac.compare_digest(code, _authentication_code(path.name, body)):
        return None
    data = json.loads(body)
    return Seal(data["entries"], {name: tuple(stat) for name, stat in data["stats"].items()})


def write(cache: Cache, kind: str, key: str, seal: Seal) -> None:
    """Write a seal; a read-only cache has none, and is hashed in each run."""
    path = _seal_path(cache, kind, key)
    body = json.dumps({"entries": dict(seal.entries), "stats": dict(seal.stats)})
    try:
        with cache.guard():
            files.write_atomic(path, f"{_authentication_code(path.name, body)}\n{body}")
    except UnavailableError:
        if os.access(cache.root, os.W_OK):
            raise
        cache.tell(f"the seal of {kind} {key[:12]} cannot be written")


@dataclass(frozen=True)
class Layout:
    """An entry of the cache that can be checked and laid out anew."""

    cache: Cache
    kind: str
    key: str
    #: lays it out in a folder; called again if the entry is not trusted
    build: Callable[[Path], None] = field(compare=False, repr=False)
    name: str  # for people, such as ``liger-kernel 0.8.1``
    content: str = "content"  # the folder of the entry that is sealed
    #: whether a path may differ when the entry is built again (bytecode)
    ignored: Callable[[str], bool] = field(default=lambda _: False, compare=False, repr=False)
    #: sha256 by path of the files that `build` copies from another entry, and checks by its seal: not hashed again
    known: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def folder(self) -> Path:
        return self.cache.entry(self.kind, self.key) / self.content

    def lay_out(self) -> Seal:
        """Build the entry, check it by its seal, or compare it with a second build; return its seal.

        ChangedError: the entry had changed; it has been laid out anew.
        """
        seal = read(self.cache, self.kind, self.key)
        if seal and self.folder.is_dir() and stats(self.folder) == seal.stats:
            mark_used(self.folder.parent)
            return seal
        with self.cache.guard(), self.cache.lock(f"seal-{self.kind}-{self.key}"):
            if not self.folder.is_dir():
                self.cache.populate(self.kind, self.key, self.build)
                return self._store(self._seal_of(self.folder))
            seal = read(self.cache, self.kind, self.key)
            return self.check(seal) if seal else self._compare()

    def check(self, seal: Seal, *, while_it_ran: bool = False) -> Seal:
        """Compare the entry with its seal; return a seal with the current stats.

        ChangedError: a byte had changed; the entry has been laid out anew. With `while_it_ran`, a file that was written
        again with the same bytes counts as changed.
        """
        current = stats(self.folder) if self.folder.is_dir() else {}
        if current == seal.stats:
            return seal
        suspects = [path for path in current if current[path] != seal.stats.get(path)]
        entries = {path: seal.entries[path] for path in current if path in seal.entries}
        entries |= hashes(self.folder, suspects)
        changes = differences(seal.entries, entries)
        if while_it_ran and not changes:
            changes = [f"{path} was written anew" for path in suspects if _touched(current[path], seal.stats[path])]
        if changes:
            with self.cache.guard(), self.cache.scratch(f"{self.kind}-") as fresh:
                try:
                    self.build(fresh)
                except ChangedError:  # the entry that `build` copies had changed, too, and has been laid out anew
                    files.remove_tree(fresh / self.content)
                    self.build(fresh)
                return self._replace(fresh, changes)
        return self._store(Seal(seal.entries, current))

    def _seal_of(self, folder: Path) -> Seal:
        """Return the seal of a folder that `build` has just laid out."""
        current = stats(folder)
        known = {path: self.known[path] for path in current if path in self.known}
        return Seal(known | hashes(folder, current.keys() - known.keys()), current)

    def _store(self, seal: Seal) -> Seal:
        write(self.cache, self.kind, self.key, seal)
        return seal

    def _compare(self) -> Seal:
        """Build the entry again and compare; an equal entry stays, another one is replaced."""
        self.cache.tell(f"checking {self.name}")
        with self.cache.guard(), self.cache.scratch(f"{self.kind}-") as fresh:
            self.build(fresh)
            expected, current = self._seal_of(fresh / self.content).entries, stats(self.folder)
            actual = hashes(self.folder, current)
            if actual == expected:
                return self._store(Seal(actual, current))
            before, after = (
                {path: sha256 for path, sha256 in entries.items() if not self.ignored(path)}
                for entries in (expected, actual)
            )
            return self._replace(fresh, differences(before, after))

    def _replace(self, fresh: Path, changes: list[str]) -> Seal:
        """Put a fresh entry in the place of this one; ChangedError: there are `changes`."""
        entry = self.cache.entry(self.kind, self.key)
        with self.cache.lock(f"{self.kind}-{self.key}"), self.cache.scratch("changed-") as aside:
            if entry.exists():
                entry.rename(aside / "old")
            fresh.rename(entry)
        seal = self._store(self._seal_of(self.folder))
        if changes:
            edits = _summary(changes)
            raise ChangedError(f"{self.name} in the cache is not what was laid out: {edits}. It has been laid out anew")
        return seal


def _touched(now: Stat, before: Stat) -> bool:
    """Whether a file was written or replaced; another hard link to it changes its time of change alone."""
    return now[:2] + now[3:] != before[:2] + before[3:]


def keep(cache: Cache, kind: str, key: str, folder: Path) -> None:
    """Seal the current state of a folder that grows: JIT results, or an environment that a script built.

    A folder that nests too deep is removed instead.
    """
    current = stats(folder)
    if TOO_DEEP in current.values():
        forget(cache, kind, key, folder)
    else:
        write(cache, kind, key, Seal({}, current))


def is_unchanged(cache: Cache, kind: str, key: str, folder: Path) -> bool | None:
    """Whether a folder is unchanged since `keep`; None if this user never sealed it."""
    seal = read(cache, kind, key)
    return None if seal is None else folder.is_dir() and stats(folder) == seal.stats


def forget(cache: Cache, kind: str, key: str, folder: Path) -> None:
    """Remove an untrusted folder and its seal."""
    _seal_path(cache, kind, key).unlink(missing_ok=True)
    with cache.guard(), cache.scratch("changed-") as aside:
        if folder.exists():
            folder.rename(aside / "old")
