"""Files: hashes, manifests, and writes that are whole or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

#: This repository; where the runner is installed, the folder that it is installed in.
REPOSITORY = Path(__file__).resolve().parents[2]
#: Bytes: what file systems take of one name, and half of what Linux takes of a path.
LONGEST_NAME, LONGEST_PATH = 255, 2048
#: Folders inside each other, beyond all that a release or a compiler lays out.
DEEPEST = 100
#: Of one command: as many paths as Linux takes, however long they are.
MOST_ARGUMENTS = 500


def sha256_bytes(data: bytes) -> str:
    """Return the sha256 of `data` in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def walk(folder: Path) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield the path of whatever is no folder below `folder`, and its stat, links not followed, however deep it nests.

    A folder below DEEPEST others, or whose path is longer than the system takes, is yielded without a stat, and what
    lies in it is not.
    """
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        if prefix.count("/") > DEEPEST:
            yield prefix, None
            continue
        try:
            with os.scandir(folder / prefix) as inside:
                for entry in inside:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{prefix}{entry.name}/")
                    else:
                        yield prefix + entry.name, entry.stat(follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            yield prefix, None


def manifest(folder: Path) -> dict[str, str]:
    """Map the path of every file under `folder`, relative and with slashes, to its sha256."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}


def manifest_hash(entries: Mapping[str, str]) -> str:
    """Return one sha256 for a whole manifest."""
    return sha256_bytes(json.dumps(sorted(entries.items())).encode())


def key_of(*parts: object) -> str:
    """Return a short name for a cache entry that depends on all of `parts`."""
    return sha256_bytes(json.dumps([str(part) for part in parts]).encode())[:32]


def is_bare_name(text: str) -> bool:
    """Whether `text` is the name of a file in a folder, and leads nowhere else."""
    return (
        text.isprintable()
        and len(text.encode(errors="replace")) <= LONGEST_NAME
        and not (text in {"", ".", ".."} or "/" in text or "\\" in text)
    )


def copy(source: Path, paths: Iterable[str], target: Path) -> None:
    """Copy files of one folder into another, which is made; OSError says why one cannot be copied.

    A program of the system does it, so that the threads of this one go on meanwhile.
    """
    target.mkdir(parents=True)
    names = list(paths)
    for first in range(0, len(names), MOST_ARGUMENTS):
        some = names[first : first + MOST_ARGUMENTS]
        command = ["cp", "--parents", "--reflink=auto", "--target-directory", str(target.absolute()), "--", *some]
        ended = subprocess.run(command, cwd=source, env={**os.environ, "LC_ALL": "C"}, capture_output=True, check=False)
        if ended.returncode != 0:
            said = ended.stderr.decode(errors="replace")
            raise OSError(next((code for code in errno.errorcode if os.strerror(code) in said), errno.EIO), said)


def remove_tree(folder: Path) -> None:
    """Remove a folder and all that is in it, as far as that can be done, however deep it nests."""
    subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def write_atomic(path: Path, text: str | Iterable[str]) -> None:
    """Write a file so that a reader, or a kill at any moment, finds the old one or the new one.

    A large text may come in pieces, which are not held in memory together.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as stream:
            stream.writelines([text] if isinstance(text, str) else text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
