"""Files: hashes, manifests, and writes that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

#: Bytes: what file systems take.
LONGEST_NAME = 255


def sha256_bytes(data: bytes) -> str:
    """Return the sha256 of `data` in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
