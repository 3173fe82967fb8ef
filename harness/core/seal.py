"""Seals: whether an entry of the cache still holds, byte for byte, what was laid out in it.

A seal lies outside the entry that it speaks of: the sha256 of every file, and what the file system says of each (size,
times, inode). While the file system says the same, no byte has changed; where it does not, every file is hashed again.
Seals are authenticated with a key that lies outside the cache, so that an entry is never believed for a file that came
with it: where a seal is missing or is not one's own, the entry is built again, from an archive that is hashed against
pack.toml, and compared.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache as once
from itertools import islice
from pathlib import Path

import platformdirs

from harness.core import files
from harness.core.cache import Cache, used
from harness.core.errors import HarnessError, UnavailableError
from harness.core.words import Exit

#: Of a file: size in bytes, times of modification and of change in ns, inode, type and permissions.
Stat = tuple[int, int, int, int, int]
#: Stands for the stat of a folder that is not looked into: files.walk says which.
TOO_DEEP = (0, 0, 0, 0, 0)
KEY_BYTES = 32
#: Of a message: how many changes, and how many characters at each end of one.
SHOWN, SHOWN_END = 3, 120


class ChangedError(HarnessError):
    """An entry of the cache no longer held what was laid out in it; it has been laid out anew."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=Exit.DEVIATES)


def key_file() -> Path:
    """Return the file of the key that authenticates seals: the user's own, outside every cache."""
    return Path(platformdirs.user_state_dir("reproducer-packs", appauthor=False)) / "seal.key"


@once
def _key(path: Path) -> bytes:
    """Return the key, made at its first use; where it cannot be kept, one that this process alone knows."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(secrets.token_bytes(KEY_BYTES))
        try:
            path.hardlink_to(fresh)  # the first of several processes wins
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
        found = path.read_bytes()
    except OSError:
        found = b""
    return found if len(found) == KEY_BYTES else secrets.token_bytes(KEY_BYTES)


def owner() -> str:
    """Name whoever seals: eight digits that follow from the key."""
    return hashlib.sha256(b"owner" + _key(key_file())).hexdigest()[:8]


def stats(folder: Path) -> dict[str, Stat]:
    """Map the path of whatever is no folder below `folder` to what the file system says of it, links not followed."""
    return {
        path: (one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino, one.st_mode) if one else TOO_DEEP
        for path, one in files.walk(folder)
    }


def hashes(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """Map paths below `folder` to the sha256 of their bytes; of a link, a pipe or a device to what it is."""
    found = {}
    for path in paths:
        is_file = os.path.isfile(folder / path)  # noqa: PTH113 - false of a path that is too long
        found[path] = files.sha256_file(folder / path) if is_file and not (folder / path).is_symlink() else "no file"
    return found


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """List in words what was edited, deleted or added."""
    edited = [f"{path} was edited" for path in sorted(wanted.keys() & found.keys()) if wanted[path] != found[path]]
    deleted = [f"{path} was deleted" for path in sorted(wanted.keys() - found.keys())]
    return edited + deleted + [f"{path} was added" for path in sorted(found.keys() - wanted.keys())]


def in_words(changes: list[str]) -> str:
    """Join the first few changes, each cut in its middle where it is long."""
    more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    shown = (one if len(one) <= 2 * SHOWN_END else f"{one[:SHOWN_END]} ... {one[-SHOWN_END:]}" for one in changes)
    return "; ".join(islice(shown, SHOWN)) + more


@dataclass(frozen=True)
class Seal:
    """What an entry held when it was sealed: sha256 and stat by path relative to the sealed folder."""

    entries: Mapping[str, str]
    stats: Mapping[str, Stat]


def _seal_path(cache: Cache, kind: str, key: str) -> Path:
    return cache.root / "seals" / owner() / f"{kind}-{key}.json"


def _authenticated(name: str, body: str) -> str:
    return hmac.new(_key(key_file()), f"{name}\n{body}".encode(), hashlib.sha256).hexdigest()


def read(cache: Cache, kind: str, key: str) -> Seal | None:
    """Read a seal; None where there is none, or not one's own."""
    path = _seal_path(cache, kind, key)
    try:
        code, _, body = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    if not hmac.compare_digest(code, _authenticated(path.name, body)):
        return None
    data = json.loads(body)
    return Seal(data["entries"], {name: tuple(one) for name, one in data["stats"].items()})


def write(cache: Cache, kind: str, key: str, seal: Seal) -> None:
    """Write a seal; a cache that cannot be written does without, and is hashed in each run."""
    path = _seal_path(cache, kind, key)
    body = json.dumps({"entries": dict(seal.entries), "stats": dict(seal.stats)})
    try:
        with cache.guard():
            files.write_atomic(path, f"{_authenticated(path.name, body)}\n{body}")
    except UnavailableError:
        if os.access(cache.root, os.W_OK):
            raise
        cache.tell(f"the seal of {kind} {key[:12]} cannot be written")


@dataclass(frozen=True)
class Layout:
    """An entry of the cache that can be checked, and laid out anew."""

    cache: Cache
    kind: str
    key: str
    #: lays it out in a folder; called again where the entry cannot be believed
    build: Callable[[Path], None] = field(compare=False, repr=False)
    name: str  # for people, such as ``liger-kernel 0.8.1``
    content: str = "content"  # what is sealed in the entry's folder
    #: paths that building again need not give byte for byte (bytecode)
    ignored: Callable[[str], bool] = field(default=lambda _: False, compare=False, repr=False)
    #: sha256 by path of what `build` copies from another entry, whose seal it checks: these files are not hashed again
    known: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def folder(self) -> Path:
        """The folder whose files are sealed."""
        return self.cache.entry(self.kind, self.key) / self.content

    def lay_out(self) -> Seal:
        """Return the seal of the entry, which is built, checked, or compared with one that is built again.

        ChangedError is raised where it held something else; it has been laid out anew.
        """
        seal = read(self.cache, self.kind, self.key)
        if seal and self.folder.is_dir() and stats(self.folder) == seal.stats:
            used(self.folder.parent)
            return seal
        with self.cache.guard(), self.cache.lock(f"seal-{self.kind}-{self.key}"):
            if not self.folder.is_dir():
                self.cache.populate(self.kind, self.key, self.build)
                return self._sealed(self._built(self.folder))
            seal = read(self.cache, self.kind, self.key)
            return self.check(seal) if seal else self._compared()

    def check(self, seal: Seal, *, while_it_ran: bool = False) -> Seal:
        """Compare the entry with its seal; return the seal as the file system has it now.

        ChangedError is raised where a byte changed; the entry has been laid out anew. With `while_it_ran` a file that
        was written again with the same bytes is a change as well.
        """
        now = stats(self.folder) if self.folder.is_dir() else {}
        if now == seal.stats:
            return seal
        suspects = [path for path in now if now[path] != seal.stats.get(path)]
        entries = {path: seal.entries[path] for path in now if path in seal.entries}
        entries |= hashes(self.folder, suspects)
        changes = differences(seal.entries, entries)
        if while_it_ran and not changes:
            changes = [f"{path} was written anew" for path in suspects if _touched(now[path], seal.stats[path])]
        if changes:
            with self.cache.guard(), self.cache.scratch(f"{self.kind}-") as fresh:
                try:
                    self.build(fresh)
                except ChangedError:  # what this is made from had changed as well, and has been laid out anew
                    files.remove_tree(fresh / self.content)
                    self.build(fresh)
                return self._replaced(fresh, changes)
        return self._sealed(Seal(seal.entries, now))

    def _built(self, folder: Path) -> Seal:
        """Hash what `build` has just laid out in a folder."""
        found = stats(folder)
        known = {path: self.known[path] for path in found if path in self.known}
        return Seal(known | hashes(folder, found.keys() - known.keys()), found)

    def _sealed(self, seal: Seal) -> Seal:
        write(self.cache, self.kind, self.key, seal)
        return seal

    def _compared(self) -> Seal:
        """Build the entry again and compare; one that was right stays, one that was not is replaced."""
        self.cache.tell(f"checking {self.name}")
        with self.cache.guard(), self.cache.scratch(f"{self.kind}-") as fresh:
            self.build(fresh)
            wanted, now = self._built(fresh / self.content).entries, stats(self.folder)
            found = hashes(self.folder, now)
            if found == wanted:
                return self._sealed(Seal(found, now))
            before, after = (
                {path: sha256 for path, sha256 in entries.items() if not self.ignored(path)}
                for entries in (wanted, found)
            )
            return self._replaced(fresh, differences(before, after))

    def _replaced(self, fresh: Path, changes: list[str]) -> Seal:
        """Put a fresh entry in the place of this one; its files may be shared. ChangedError: something had changed."""
        entry = self.cache.entry(self.kind, self.key)
        with self.cache.lock(f"{self.kind}-{self.key}"), self.cache.scratch("changed-") as aside:
            if entry.exists():
                entry.rename(aside / "old")
            fresh.rename(entry)
        seal = self._sealed(self._built(self.folder))
        if changes:
            said = in_words(changes)
            raise ChangedError(f"{self.name} in the cache is not what was laid out: {said}. It has been laid out anew")
        return seal


def _touched(now: Stat, before: Stat) -> bool:
    """Whether a file was written or replaced; a further link to it changes its time of change alone."""
    return now[:2] + now[3:] != before[:2] + before[3:]


def keep(cache: Cache, kind: str, key: str, folder: Path) -> None:
    """Seal a folder that grows, as it is now: JIT results, or an environment that a script built.

    One that nests too deep to be looked into is removed instead.
    """
    found = stats(folder)
    if TOO_DEEP in found.values():
        forget(cache, kind, key, folder)
    else:
        write(cache, kind, key, Seal({}, found))


def kept(cache: Cache, kind: str, key: str, folder: Path) -> bool | None:
    """Whether nothing changed in a folder since `keep`; None where it was never sealed by this user."""
    found = read(cache, kind, key)
    return None if found is None else folder.is_dir() and stats(folder) == found.stats


def forget(cache: Cache, kind: str, key: str, folder: Path) -> None:
    """Remove a folder that cannot be believed, with its seal."""
    _seal_path(cache, kind, key).unlink(missing_ok=True)
    with cache.guard(), cache.scratch("changed-") as aside:
        if folder.exists():
            folder.rename(aside / "old")
