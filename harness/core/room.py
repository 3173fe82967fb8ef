"""Full and read-only file systems, named in one line."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.core.errors import HarnessError, NoRoomError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EROFS, errno.EPERM}
#: What stands where a folder was to be.
NO_FOLDER = {errno.ENOTDIR, errno.EEXIST}


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


@contextmanager
def guard(folder: Path, what: str, option: str) -> Iterator[None]:
    """Turn what a file system refuses into one line that names the folder.

    `what` is the noun for it, such as ``the cache``, and `option` names another one, such as ``--cache DIR``.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            free = shutil.disk_usage(_existing(folder)).free // 2**20
            raise NoRoomError(
                f"no room in {what} {folder} ({free} MiB free); nothing half-written was kept. "
                f"Next: free room, or name another folder with {option}"
            ) from None
        if error.errno in NO_FOLDER and not _existing(folder).is_dir():
            raise HarnessError(f"{what} {folder} is no folder. Next: name another one with {option}") from None
        if error.errno in FORBIDDEN:
            raise NoRoomError(
                f"{what} {folder} cannot be written ({os.strerror(error.errno)}). "
                f"Next: name another folder with {option}"
            ) from None
        raise
