"""Where the lanes of one command run, and what is done with what they show."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.cache import Cache
from harness.core.progress import Progress
from harness.host import host as this_host
from harness.host.gpu_health import GpuWatch
from harness.host.gpus import Device
from harness.host.host import Host
from harness.lane.cell import Cell
from harness.schedule.journal import Journal

#: What a lane takes of the host's memory, in GiB: torch and a compiler, imported.
LANE_MEMORY_GIB = 2.0


@dataclass(frozen=True)
class GpuFault:
    """A GPU that left the pool: where, its name, why, and after which lane."""

    place: str
    name: str
    reason: str
    task: str


@dataclass(frozen=True)
class Session:
    """Where a command's lanes run."""

    cache: Cache  # of trees, dependency sets and JIT results
    host: Host  # what it is; its GPUs are `devices`
    devices: list[Device]  # the GPUs that lanes may use
    folder: Path  # of the run: logs and receipts
    journal: Journal  # takes the ends of lanes
    command: Callable[[Cell], str]  # that makes a cell's receipt anew
    progress: Progress = field(default_factory=Progress)  # whom to tell
    note: Callable[[GpuFault], None] = lambda _: None  # keeps that a GPU left the pool
    jobs: int | None = None  # how many lanes run at once; None: as many as the cores and the memory allow
    repeat: int = 1  # how often each lane runs
    urgent: Collection[str] = ()  # the names of the cells that the run before left out: they go first
    stop_at: float | None = None  # when the budget ends, on the monotonic clock; None without one
    watch: GpuWatch | None = None  # looks at GPUs before and after lanes; None: nobody does
    faults: tuple[GpuFault, ...] = ()  # the GPUs that had one before this command
    lost: tuple[str, ...] = ()  # why GPUs of this host cannot be used
    keep_raw: bool = False  # whether the raw log of a lane that ended in an error stays in the run folder
    threads: int | None = None  # that a lane's libraries use; None: the cores, shared among the lanes at once
    #: the folder of the files that lanes lock while they share a GPU; None: the cache's, for every runner here
    locks: Path | None = None

    @property
    def threads_of_lane(self) -> int:
        """How many threads the libraries of a lane use."""
        return self.threads or max(1, len(this_host.cores()) // self.most_jobs)

    @property
    def most_jobs(self) -> int:
        """How many lanes run at once; where nobody says it, one a core, as far as memory goes."""
        return self.jobs or max(1, min(len(this_host.cores()), int(this_host.memory_gib() // LANE_MEMORY_GIB)))
