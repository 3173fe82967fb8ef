"""The session: where the lanes of one command run, and the journal of their ends.

The end of each lane is stored before any other code uses it. A power cut can leave half a line at the end of the file.
The next open removes it: its lane has not ended.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self

from harness.core import Cache, HarnessError, files, structure
from harness.core.progress import Progress
from harness.host import host as this_host
from harness.host.gpu_health import GpuWatch
from harness.host.host import Device, Host
from harness.lane import Cell, LaneEnd
from harness.pack.requirements import DependencySet
from harness.upstream import dependencies

#: The host memory of a lane, in GiB: torch and a compiler, imported.
LANE_MEMORY_GIB = 2.0
#: Of a line of the journal.
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
            with files.guard(folder, "the run folder", "--runs DIR"):
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
        document = structure.loads(data)
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            return None
        end = structure.structure(document, LaneEnd)
        path = PurePosixPath(end.log.file if end.log else "")
        inside = not path.is_absolute() and ".." not in path.parts
        if end.log is None or (inside and files.sha256_file(folder / path) == end.log.sha256):
            return end
    return None


@dataclass(frozen=True)
class GpuFault:
    """A GPU that left the pool: where, its name, why, and after which lane."""

    place: str
    name: str
    reason: str
    task: str


@dataclass(frozen=True)
class Session:
    """Where the lanes of a command run."""

    cache: Cache  # trees, dependency sets and JIT results
    host: Host  # the machine; the usable ones of its GPUs are `devices`
    devices: list[Device]  # the GPUs that lanes may use
    folder: Path  # logs and receipts of the run
    journal: Journal  # stores the ends of lanes
    command: Callable[[Cell], str]  # returns the command that makes a cell's receipt anew
    progress: Progress = field(default_factory=Progress)  # shows lanes to the user
    note: Callable[[GpuFault], None] = lambda _: None  # records that a GPU left the pool
    jobs: int | None = None  # how many lanes run at once; None: as many as the cores and the memory allow
    repeat: int = 1  # how often each lane runs
    urgent: Collection[str] = ()  # the names of the cells that the run before did not judge: they go first
    stop_at: float | None = None  # when the budget ends, on the monotonic clock; None without a budget
    watch: GpuWatch | None = None  # checks GPUs before and after lanes; None: no GPU is checked
    lost: tuple[str, ...] = ()  # why GPUs of this host cannot be used
    keep_raw: bool = False  # whether the raw log of a lane that ended in an error stays in the run folder
    threads: int | None = None  # of a lane's libraries; None: the cores divided by the lanes at once
    #: the folder of the files that lanes lock while they share a GPU; None: the cache's, for all runners of this host
    locks: Path | None = None

    def dependency_set(self, cell: Cell) -> DependencySet:
        """Return the dependency set of a cell on this host."""
        definition, default, tag = cell.pack.definition, cell.stated.dependencies, self.host.python_tag
        return dependencies.requested_set(self.cache, definition, cell.dependencies, default, tag)

    def lock_files(self, devices: Iterable[Device]) -> tuple[Path, ...]:
        """Return the file of each GPU that a lane locks while it shares the GPU."""
        folder = self.locks or self.cache.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        return tuple(folder / f"gpu-{files.key_of(device.token)}.lock" for device in devices)

    @property
    def threads_of_lane(self) -> int:
        return self.threads or max(1, len(this_host.cores()) // self.most_jobs)

    @property
    def most_jobs(self) -> int:
        """How many lanes run at once: `jobs`, else one a core, as far as memory goes."""
        return self.jobs or max(1, min(len(this_host.cores()), int(this_host.memory_gib() // LANE_MEMORY_GIB)))
