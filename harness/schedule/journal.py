"""The journal: the end of each lane, in memory or on disk before anything else hears of it.

A line that was being written when the power went is cut off when the file is opened again: its lane had not ended.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol, Self

from harness.core import files, room, strict_json, structure
from harness.core.errors import HarnessError
from harness.core.words import Evidence, LaneName, LaneVerdict
from harness.host.gpus import Gpu
from harness.lane.record import LaneRecord
from harness.receipt.receipt import LogRecord

SCHEMA = 2


@dataclass(frozen=True)
class LaneEnd:
    """One lane that ended: enough to judge and to write the receipt without running it again.

    Attributes:
        key: of its task.
        task: its name, for people.
        target: what it was about.
        evidence: how it was seen.
        lane: which tree it ran on.
        number: which repetition it is.
        started: when, in UTC.
        seconds: while its cores and GPUs were taken, from its start until its log was written.
        place: where it ran: ``gpu 0``, ``gpus 0,1`` or ``cpu``.
        gpus: that it had.
        version: of the tree.
        tree: the sha256 of the pristine tree.
        patch: the name of the patch's file; empty in the pristine lane.
        record: what it showed, scrubbed; None where it could not begin, since the patch does not apply.
        stale: why the patch does not apply.
        log: the scrubbed log in the run folder; None where there is none.

    """

    key: str
    task: str
    target: str
    evidence: Evidence
    lane: LaneName
    number: int
    started: str
    seconds: float
    place: str
    gpus: tuple[Gpu, ...]
    version: str
    tree: str
    patch: str
    record: LaneRecord | None
    stale: str = ""
    log: LogRecord | None = None

    @property
    def verdict(self) -> LaneVerdict | None:
        """The lane's verdict; None where it could not begin."""
        return self.record.verdict if self.record else None


@dataclass(frozen=True)
class Line:
    """Where a lane's end stands in the file, and the little of it that the scheduler needs."""

    offset: int
    verdict: LaneVerdict | None
    seconds: float


class Journal(Protocol):
    """Takes the ends of lanes and gives them back."""

    def __contains__(self, key: str) -> bool:
        """Whether the lane of that key has ended."""

    def verdict(self, key: str) -> LaneVerdict | None:
        """Return the verdict of a lane; None where it has not ended, or could not begin."""

    def append(self, end: LaneEnd) -> None:
        """Take the end of a lane; one that has ended cannot end again (ValueError)."""

    def read(self, key: str) -> LaneEnd | None:
        """Return the end of a lane; None where it has not ended."""


class MemoryJournal:
    """A journal for a command that nobody continues."""

    def __init__(self) -> None:
        """Begin with no lane ended."""
        self._ends: dict[str, LaneEnd] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._ends

    def verdict(self, key: str) -> LaneVerdict | None:
        """Return the verdict of a lane; None where it has not ended, or could not begin."""
        end = self._ends.get(key)
        return end.verdict if end else None

    def append(self, end: LaneEnd) -> None:
        """Take the end of a lane."""
        if self._ends.setdefault(end.key, end) is not end:
            raise ValueError(f"{end.task} has ended already")

    def read(self, key: str) -> LaneEnd | None:
        """Return the end of a lane; None where it has not ended."""
        return self._ends.get(key)


class FileJournal:
    """A journal on disk; memory holds a line number for each lane, not its content."""

    def __init__(self, path: Path) -> None:
        """Open the journal at `path`, which need not exist; call `close` in the end.

        A lane counts as ended where its line is whole and its log lies there as the line says; else it is run again.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._lines: dict[str, Line] = {}
        self.passed_over = 0
        self._end = 0
        self._read_all()
        _sync_folder(path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def __len__(self) -> int:
        """How many lanes have ended."""
        return len(self._lines)

    def verdict(self, key: str) -> LaneVerdict | None:
        """Return the verdict of a lane; None where it has not ended, or could not begin."""
        line = self._lines.get(key)
        return line.verdict if line else None

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
                with room.guard(self.path.parent, "the run folder", "--runs DIR"):
                    self._write(data)
            except (HarnessError, OSError):
                os.ftruncate(self._descriptor, self._end)  # a full disk must not leave half a line before the next
                raise
            self._lines[end.key] = Line(self._end, end.verdict, end.seconds)
            self._end += len(data)

    def _write(self, data: bytes) -> None:
        written = 0
        while written < len(data):
            written += os.write(self._descriptor, data[written:])
        os.fdatasync(self._descriptor)

    def read(self, key: str) -> LaneEnd | None:
        """Read the end of a lane; None where it has not ended."""
        line = self._lines.get(key)
        if line is None:
            return None
        with self.path.open("rb") as stream:
            stream.seek(line.offset)
            return _end_of(stream.readline())

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
        end = _end_of(data)
        if end is None or not self._has_log(end):
            self.passed_over += 1
            return
        self._lines.setdefault(end.key, Line(self._end, end.verdict, end.seconds))

    def _has_log(self, end: LaneEnd) -> bool:
        """Whether the log of a lane lies in the run folder, as it was when the lane ended."""
        if end.log is None:
            return True
        path = PurePosixPath(end.log.file)
        try:
            inside = not path.is_absolute() and ".." not in path.parts
            return inside and files.sha256_file(self.path.parent / path) == end.log.sha256
        except (OSError, ValueError):
            return False


def _end_of(data: bytes) -> LaneEnd | None:
    """Read one line; None where it is none of ours."""
    try:
        document = strict_json.loads(data)
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            return None
        end = structure.structure(document, LaneEnd)
        return end if dt.datetime.fromisoformat(end.started).tzinfo is not None else None
    except ValueError:
        return None


def _sync_folder(folder: Path) -> None:
    """Make the disk keep the name of a new file, not only its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
