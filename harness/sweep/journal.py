"""The journal: one line for each lane that ended, on disk before anything else hears of it.

A line that was being written when the power went is cut off when the journal is opened again: its lane had not ended.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from harness import strict
from harness.sweep.lane_end import LaneEnd
from harness.words import LaneVerdict

SCHEMA = 1


@dataclass(frozen=True)
class Line:
    """Where a lane's end stands in the file, and the little of it that the queue needs."""

    offset: int
    verdict: LaneVerdict | None
    seconds: float


class Journal:
    """Appends the ends of lanes and reads them back; memory holds a line number for each, not its content."""

    def __init__(self, path: Path) -> None:
        """Open the journal at `path`, which need not exist; call `close` in the end."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._lines: dict[str, Line] = {}
        self._end = 0
        self._read_all()
        _sync_folder(path.parent)

    def __enter__(self) -> Self:
        """Keep it open for a while."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __contains__(self, key: str) -> bool:
        """Whether the lane of that key has ended."""
        return key in self._lines

    def __len__(self) -> int:
        """How many lanes have ended."""
        return len(self._lines)

    def line(self, key: str) -> Line | None:
        """Return where a lane's end stands; None where it has not ended."""
        return self._lines.get(key)

    def append(self, end: LaneEnd) -> None:
        """Write the end of a lane and wait until the disk has it; a lane that has ended cannot end again.

        Raises:
            ValueError: it has ended already.

        """
        data = (json.dumps({"schema": SCHEMA, **asdict(end)}, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with self._lock:
            if end.key in self._lines:
                raise ValueError(f"{end.task} has ended already")
            try:
                written = 0
                while written < len(data):
                    written += os.write(self._descriptor, data[written:])
                os.fdatasync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, self._end)  # a full disk must not leave half a line before the next
                raise
            self._lines[end.key] = Line(self._end, end.record.verdict if end.record else None, end.seconds)
            self._end += len(data)

    def read(self, key: str) -> LaneEnd | None:
        """Read the end of a lane; None where it has not ended."""
        line = self._lines.get(key)
        if line is None:
            return None
        with self.path.open("rb") as stream:
            stream.seek(line.offset)
            document = json.loads(stream.readline())
        document.pop("schema")
        return strict.structure(document, LaneEnd)

    def _read_all(self) -> None:
        with self.path.open("rb") as stream:
            for data in stream:
                if not data.endswith(b"\n"):
                    break
                self._note(data)
                self._end += len(data)
        os.ftruncate(self._descriptor, self._end)

    def _note(self, data: bytes) -> None:
        """Keep the place of a line; one that is no whole line of ours (a bad disk block) has no lane."""
        try:
            document = json.loads(data)
            if document["schema"] == SCHEMA:
                record = document["record"]
                verdict = LaneVerdict(record["verdict"]) if record else None
                self._lines.setdefault(document["key"], Line(self._end, verdict, document["seconds"]))
        except (ValueError, KeyError, TypeError):
            return


def _sync_folder(folder: Path) -> None:
    """Make the disk keep the name of a new file, not only its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
