"""Errors of full and read-only file systems, in one line."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.core.errors import HarnessError, NoRoomError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EROFS, errno.EPERM}
#: A file lies in the place of a folder, or no folder can be made there.
NO_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.ENOENT}


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
