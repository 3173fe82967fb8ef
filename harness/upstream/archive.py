"""Unpacking sdists and wheels safely: nothing is executed, and nothing lands outside the folder."""

import gzip
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from harness.core import UnavailableError, files

#: Bytes beyond which an archive is refused while it is unpacked (a decompression bomb).
LARGEST_TREE = 8 * 2**30
#: Raised by archives that are damaged, encrypted, packed in an unknown way, or have one name for two members.
DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, gzip.BadGzipFile, EOFError, RuntimeError),
    *(ValueError, IndexError, FileExistsError, IsADirectoryError, NotADirectoryError),
)
LEFT_OUT = {".pyc", ".pyo"}
#: A repository inside an archive would bring git its own configuration and commands.
REPOSITORY = ".git"
CHUNK = 1 << 20


def _refusal(archive: Path, member: str, reason: str) -> UnavailableError:
    return UnavailableError(f"{archive.name}: the member {member!r} {reason}; the archive is refused whole")


def _safe_path(archive: Path, member: str) -> PurePosixPath:
    path = PurePosixPath(member)
    leads_out = path.is_absolute() or "\\" in member or (path.parts and ":" in path.parts[0]) or ".." in path.parts
    too_long = any(len(os.fsencode(part)) > files.LONGEST_NAME for part in path.parts)
    too_long = too_long or len(os.fsencode(member)) > files.LONGEST_PATH or len(path.parts) > files.DEEPEST
    if leads_out or too_long or "\0" in member:
        raise _refusal(archive, member[:40], "has a name that leads out of the folder, or that no file system takes")
    return path


class _Gzip(gzip.GzipFile):
    """A stream that is read in pieces: tarfile would hold a header of any size in memory."""

    def read(self, size: int | None = -1) -> bytes:
        """Refuse to read more than CHUNK bytes at once."""
        if size is None or not 0 <= size <= CHUNK:
            raise tarfile.ReadError(f"a header of more than {CHUNK} bytes")
        return super().read(size)


def _tar_members(archive: Path) -> Iterator[tuple[PurePosixPath, IO[bytes]]]:
    with _Gzip(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
        for member in tar:
            path = _safe_path(archive, member.name)
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise _refusal(archive, member.name, "is a link or a device")
            yield path, content


def _zip_members(archive: Path) -> Iterator[tuple[PurePosixPath, IO[bytes]]]:
    with zipfile.ZipFile(archive) as bundle:
        for info in bundle.infolist():
            path = _safe_path(archive, info.filename)
            mode = info.external_attr >> 16
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refusal(archive, info.filename, "is a link or a device")
            if not info.is_dir():
                try:
                    member = bundle.open(info)
                except OSError as error:  # the directory of the file places its header before the file's beginning
                    raise zipfile.BadZipFile(f"the member {info.filename!r}: {error.strerror}") from None
                with member as content:
                    yield path, content


def _write(members: Iterator[tuple[PurePosixPath, IO[bytes]]], archive: Path, folder: Path) -> None:
    size = 0
    for path, content in members:
        if path.suffix in LEFT_OUT or REPOSITORY in (part.lower() for part in path.parts):
            continue
        target = folder / path
        if target.exists():
            raise _refusal(archive, str(path), "stands there twice")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as stream:
            while data := content.read(CHUNK):
                size += len(data)
                if size > LARGEST_TREE:
                    raise UnavailableError(f"{archive.name}: unpacks to more than {LARGEST_TREE} bytes; it is refused")
                stream.write(data)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the regular files of a .tar.gz, .zip or .whl into `folder`, without compiled Python files.

    UnavailableError: a member is a link, leads out of the folder or has an absolute name, or the archive is damaged.
    The caller then removes the files that were written.
    """
    try:
        members = _zip_members(archive) if archive.suffix in {".zip", ".whl"} else _tar_members(archive)
        _write(members, archive, folder)
    except DAMAGED as error:
        raise UnavailableError(f"{archive.name}: damaged archive: {error}") from None
