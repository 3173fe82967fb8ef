"""The session: where the lanes of one command run, and where their results go."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from harness.core import files
from harness.core.cache import Cache
from harness.core.progress import Progress
from harness.host import host as this_host
from harness.host.gpu_health import GpuWatch
from harness.host.gpus import Device
from harness.host.host import Host
from harness.lane.cell import Cell
from harness.pack.requirements import DependencySet
from harness.schedule.journal import Journal
from harness.upstream import dependencies

#: The host memory of a lane, in GiB: torch and a compiler, imported.
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
