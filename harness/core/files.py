"""Files: hashes, walks, copies and atomic writes, and the errors of full and read-only file systems."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from harness.core.errors import HarnessError, NoRoomError

#: This repository, or the folder in which the runner is installed.
REPOSITORY = Path(__file__).resolve().parents[2]
#: Bytes: the longest file name of common file systems, and half of Linux's longest path.
LONGEST_NAME, LONGEST_PATH = 255, 2048
#: Nested folders, more than any release or compiler makes.
DEEPEST = 100
#: Paths in one command; Linux takes so many even of the longest.
MOST_ARGUMENTS = 500
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EROFS, errno.EPERM}
#: A file lies in the place of a folder, or no folder can be made there.
NO_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.ENOENT}


def sha256_bytes(data: bytes) -> str:
    """Return the sha256 of `data` in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def walk(folder: Path) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield path and stat of everything below `folder` that is not a folder; links are not followed.

    A folder that is nested deeper than DEEPEST, or whose path is too long for the system, is not entered: it is yielded
    without a stat.
    """
    prefixes = [""]
    while prefixes:
        prefix = prefixes.pop()
        if prefix.count("/") > DEEPEST:
            yield prefix, None
            continue
        try:
            with os.scandir(folder / prefix) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        prefixes.append(f"{prefix}{entry.name}/")
                    else:
                        yield prefix + entry.name, entry.stat(follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            yield prefix, None


def manifest_hash(entries: Mapping[str, str]) -> str:
    """Return one sha256 for the sha256 of files by path."""
    return sha256_bytes(json.dumps(sorted(entries.items())).encode())


def key_of(*parts: object) -> str:
    """Return a short name for a cache entry that depends on all of `parts`."""
    return sha256_bytes(json.dumps([str(part) for part in parts]).encode())[:32]


def is_bare_name(text: str) -> bool:
    """Whether `text` names a file in a folder and cannot lead out of it."""
    return (
        text.isprintable()
        and len(text.encode(errors="replace")) <= LONGEST_NAME
        and not (text in {"", ".", ".."} or "/" in text or "\\" in text)
    )


def copy(source: Path, paths: Iterable[str], target: Path) -> None:
    """Copy files of one folder into a new one; OSError says why a file cannot be copied.

    ``cp`` copies them, so that the threads of this process go on meanwhile.
    """
    target.mkdir(parents=True)
    names = list(paths)
    for start in range(0, len(names), MOST_ARGUMENTS):
        batch = names[start : start + MOST_ARGUMENTS]
        command = ["cp", "--parents", "--reflink=auto", "--target-directory", str(target.absolute()), "--", *batch]
        cp = subprocess.run(command, cwd=source, env={**os.environ, "LC_ALL": "C"}, capture_output=True, check=False)
        if cp.returncode != 0:
            message = cp.stderr.decode(errors="replace")
            raise OSError(next((code for code in errno.errorcode if os.strerror(code) in message), errno.EIO), message)


def remove_tree(folder: Path) -> None:
    """Remove a folder and its content as far as possible, at any depth."""
    subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def write_atomic(path: Path, text: str) -> None:
    """Write a file atomically: a reader finds the old one or the new one, even after a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


@contextmanager
def guard(folder: Path, noun: str, option: str) -> Iterator[None]:
    """Turn the error of a full or read-only file system into one line that names the folder.

    `noun` says what the folder is, such as ``the cache``; `option` selects another one, such as ``--cache DIR``.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            free = shutil.disk_usage(_existing(folder)).free // 2**20
            raise NoRoomError(
                f"no room in {noun} {folder} ({free} MiB free); nothing half-written was kept. "
                f"Next: free room, or name another folder with {option}"
            ) from None
        if error.errno in FORBIDDEN:
            raise NoRoomError(
                f"{noun} {folder} cannot be written ({os.strerror(error.errno)}). "
                f"Next: name another folder with {option}"
            ) from None
        if error.errno in NO_FOLDER and not folder.is_dir():
            raise HarnessError(f"{noun} {folder} is no folder. Next: name another one with {option}") from None
        raise
