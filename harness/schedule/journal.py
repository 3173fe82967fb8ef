"""The journal: the end of each lane, in memory or on disk, stored before any other code uses it.

A power cut can leave half a line at the end of the file. The next open removes it: its lane has not ended.
"""

import contextlib
import json
import os
import threading
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Self

from harness.core import files, room, strict_json, structure
from harness.core.errors import HarnessError
from harness.lane.record import LaneEnd

SCHEMA = 4


class Journal:
    """The ends of lanes, by key. With a path they are on disk as well, and the same command resumes from them."""

    def __init__(self, path: Path | None = None) -> None:
        """Open the journal at `path`, which need not exist; a ``with`` statement closes it.

        A lane has ended if its line is complete and its log has the sha256 of the line. Other lanes run again.
        """
        self._path = path
        self.ends: dict[str, LaneEnd] = {}  # by the keys of their lanes
        self._lock = threading.Lock()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._read_all(path)
            folder = os.open(path.parent, os.O_RDONLY)  # the name of a new file has to reach the disk, too
            os.fsync(folder)
            os.close(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            os.close(self._descriptor)

    def append(self, end: LaneEnd) -> None:
        """Store the end of a lane, on disk before this returns. ValueError is raised if the lane has ended before."""
        with self._lock:
            if end.key in self.ends:
                raise ValueError(f"{end.task} has ended already")
            if self._path is not None:
                self._write(self._path.parent, end)
            self.ends[end.key] = end

    def _write(self, folder: Path, end: LaneEnd) -> None:
        data = (json.dumps({"schema": SCHEMA, **asdict(end)}, ensure_ascii=False, allow_nan=False) + "\n").encode()
        size = os.fstat(self._descriptor).st_size
        try:
            with room.guard(folder, "the run folder", "--runs DIR"):
                while data:
                    data = data[os.write(self._descriptor, data) :]
                os.fdatasync(self._descriptor)
        except (HarnessError, OSError):
            os.ftruncate(self._descriptor, size)  # a full disk must not leave half a line before the next
            raise

    def _read_all(self, path: Path) -> None:
        """Read the ends. A damaged line (a bad disk block), or a line whose log is lost, is skipped."""
        lines, newline, _ = path.read_bytes().rpartition(b"\n")
        os.ftruncate(self._descriptor, len(lines + newline))
        for line in lines.split(b"\n") if newline else ():
            end = _parse(path.parent, line)
            if end is not None:
                self.ends.setdefault(end.key, end)


def _parse(folder: Path, data: bytes) -> LaneEnd | None:
    """Parse a line. None if it is damaged, or the run folder has no log with its name and sha256."""
    with contextlib.suppress(OSError, ValueError):
        document = strict_json.loads(data)
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            return None
        end = structure.structure(document, LaneEnd)
        path = PurePosixPath(end.log.file if end.log else "")
        inside = not path.is_absolute() and ".." not in path.parts
        if end.log is None or (inside and files.sha256_file(folder / path) == end.log.sha256):
            return end
    return None
