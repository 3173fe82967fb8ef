"""Tasks: the lanes of a cell, which lanes each waits for, how long it takes, their order and their places here."""

import functools
import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.core import LaneName, files, structure
from harness.host.host import Device, Host
from harness.lane.cell import BOTH_LANES, Cell
from harness.pack import judges, requirements
from harness.receipt import receipt

#: The expected seconds of a lane without a receipt.
UNKNOWN_SECONDS = 120.0
#: In how many processes the contract of a wrong fix may compile, or run cases, at once. Its lane ends with the first
#: check that fails, and the work of the other processes is lost.
WRONG_FIX_PROCESSES = 2
#: The GPUs of one lane; none if it runs on the cores alone.
Devices = tuple[Device, ...]


@dataclass(frozen=True)
class Task:
    """One lane of one cell."""

    cell: Cell
    lane: LaneName  # which tree it runs on
    number: int  # of the repetition, from 1
    key: str  # the hash of all that could change the result; two tasks of one key are one lane
    pristine: str  # the key of the pristine lane of the same repetition, which may be this task
    #: the keys of the lanes that have to end first: the pristine lane if it has to reproduce the bug first, and the
    #: previous repetition, since both use the same JIT caches
    after: tuple[str, ...] = ()
    gpus: int = 0  # how many it takes; 0 if it runs on the cores alone
    seconds: float | None = None  # how long it took before; None without a receipt
    urgent: bool = False  # the last sweep did not run it
    faults: int = 0  # how many of its runs a GPU with a fault ended; after one it shares no GPU

    @property
    def name(self) -> str:
        suffix = f".{self.number}" if self.number > 1 else ""
        return f"{self.cell.name} {self.lane.label}{suffix}"

    @property
    def exclusive(self) -> bool:
        """Whether it shares neither a GPU nor (without one) the cores."""
        return self.faults > 0 or self.cell.alone

    @property
    def processes(self) -> int:
        """In how many processes its contract may compile, or run cases, at once.

        pack.toml states the number. A wrong fix that runs beside other lanes has fewer.
        """
        stated = self.cell.stated.processes
        return min(stated, WRONG_FIX_PROCESSES) if self.cell.is_wrong_fix and not self.cell.alone else stated

    @property
    def cores(self) -> int:
        """How many jobs it takes: one. It starts ranks and processes while its neighbours import.

        A lane of a wrong fix takes one for each rank or process: many such lanes run at once, all in the same phase.
        """
        return max(self.cell.stated.ranks, self.processes) if self.cell.is_wrong_fix else 1

    @property
    def log(self) -> str:
        """The path of its log in the run folder."""
        cell, suffix = self.cell, f".{self.number}" if self.number > 1 else ""
        column = f".{cell.column}" if cell.column else ""
        return f"logs/{cell.pack.name}/{cell.target}.{cell.evidence}{column}.{self.lane}{suffix}.log"


def _gpus_of(cell: Cell, host: Host) -> int:
    """Return how many GPUs a lane takes: as many as pack.toml states, or as there are. A Slurm node has them all."""
    stated = cell.stated.gpus if cell.gpu else 0
    return min(stated, host.count(cell.gpu) or stated)


def _key_base(cell: Cell, host: Host) -> tuple[object, ...]:
    """Return the parts of a key that all lanes of a cell share."""
    definition, stated = cell.pack.definition, cell.stated
    members = None if cell.dependencies else requirements.named_set(definition, stated.dependencies, host.python_tag)
    gpus = tuple(gpu for gpu in host.gpus if gpu.target == cell.gpu)[:1]
    return (
        cell.pack.name,
        judges.sha256(cell.pack),
        cell.source,
        definition.upstream.sha256,
        members.sha256 if members else cell.dependencies,
        cell.target,
        cell.evidence,
        stated.loads,
        _gpus_of(cell, host),
        definition.claims,
        definition.upstream.modules,
        cell.environment or sys.prefix,
        (cell.alone, cell.judges_all),
        replace(host, gpus=gpus, driver=host.driver if cell.gpu else ""),
    )


def _patches_key(cell: Cell) -> str:
    """Hash the cell's own patch, or every patch of the pack that could be applied to the tree."""
    pack = cell.pack
    patches = [cell.patch] if cell.patch else [pack.patch, *([] if cell.source.is_pinned else [pack.own_head_patch])]
    return files.key_of(*(files.sha256_file(path) for path in patches if path.is_file()))


def tasks(cell: Cell, host: Host, repeat: int, *, urgent: bool = False) -> list[Task]:
    """List the lanes of a cell, for `repeat` runs of each; none if this host cannot judge the cell.

    The key of a patched lane names its patches, since the patched tree follows from them and the pristine tree. The
    durations may come from another release: that is the best estimate.
    """
    if cell.evidence is None:
        return []
    base, patches = _key_base(cell, host), _patches_key(cell)
    durations, gpus = _durations(cell.pack.receipts), _gpus_of(cell, host)
    waits = cell.lanes == BOTH_LANES and not cell.is_stated
    planned: list[Task] = []
    previous: dict[LaneName, str] = {}
    for number in range(1, repeat + 1):
        pristine = files.key_of(*base, LaneName.PRISTINE, number)
        keys = {
            LaneName.PRISTINE: pristine,
            LaneName.PATCHED: files.key_of(*base, LaneName.PATCHED, patches, cell.source.kind, number),
        }
        for lane in cell.lanes:
            after = [previous[lane]] if previous else []
            after += [pristine] if waits and lane == LaneName.PATCHED else []
            seconds = durations.get((f"{cell.target}.{cell.evidence}", lane))
            planned.append(Task(cell, lane, number, keys[lane], pristine, tuple(after), gpus, seconds, urgent))
        previous = keys
    return planned


def expected_seconds(task: Task) -> float:
    """Return how long a lane is expected to last."""
    return UNKNOWN_SECONDS if task.seconds is None else task.seconds


def lower_bound_seconds(tasks: Iterable[Task], jobs: int) -> float | None:
    """Return a lower bound of the seconds of every schedule of these tasks; None if no duration is known."""
    durations = [(task.seconds, min(task.cores, jobs)) for task in tasks if task.seconds is not None]
    total = sum(seconds * cores for seconds, cores in durations) / jobs
    return max(total, *(seconds for seconds, _ in durations)) if durations else None


@functools.cache  # many cells have one pack
def _durations(receipts: Path) -> dict[tuple[str, str], float]:
    """Read how long the lanes of a pack took, by target with evidence, and lane; `check` reports damaged receipts."""
    seconds: dict[tuple[str, str], float] = {}
    for path in receipt.paths(receipts):
        try:
            lanes = structure.loads(path.read_bytes())["lanes"]
            seconds |= {(path.stem, name): float(lane["seconds"]) for name, lane in lanes.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return seconds


def rank(task: Task, dependent_seconds: float = 0.0) -> tuple[bool, bool, int, int, float]:
    """Return the place of a task in the order; the longest chain of lanes after it takes `dependent_seconds`.

    Urgent tasks go first, then those that measure or run alone, since they wait for other lanes. Then the most GPUs,
    the most cores and the most seconds count.
    """
    quiet = task.cell.measures or task.exclusive
    return (not task.urgent, not quiet, -task.gpus, -task.cores, -expected_seconds(task) - dependent_seconds)


@dataclass
class Places:
    """The jobs and the GPUs of this host, and the lanes that use them.

    A lane takes as many jobs as its `cores`, at most all. Lanes are not bound to cores: one that compiles in several
    processes may use idle cores.
    """

    jobs: int
    devices: list[Device]  # the healthy GPUs
    busy: list[Device] = field(default_factory=list)  # GPUs that another program uses: no lane is measured there
    running: dict[str, tuple[Task, Devices]] = field(default_factory=dict)  # each lane with its GPUs, by its key

    def take(self, ready: Iterable[Task]) -> tuple[Task, Devices] | None:
        """Give the first of `ready` for which there is a place its cores and GPUs; None if each has to wait.

        No task passes one that waits for cores, or for GPUs of the same architecture: a lane of several GPUs or cores
        gets them in time. An exclusive lane of one GPU reserves the emptiest GPU of its architecture: no lane is added
        there, and lanes on other GPUs start. One GPU of an architecture is reserved at a time: such lanes take turns.
        """
        blocked: set[str] = set()  # the architectures that a task waits for
        reserved: dict[str, Device] = {}  # a GPU by its architecture
        for task in ready:
            architecture = task.cell.gpu
            if architecture in blocked or self.never(task):
                continue
            devices = self._devices_for(task, reserved.values())
            if devices is not None:
                if self._jobs_of(task) > self.jobs - sum(self._jobs_of(other) for other, _ in self.running.values()):
                    return None
                self.running[task.key] = task, devices
                return task, devices
            if task.exclusive and task.gpus == 1:
                reserved.setdefault(architecture, self._by_lanes(task)[0])
            else:
                blocked.add(architecture)
        return None

    def never(self, task: Task) -> str:
        """Return why the GPUs of the pool can never take a lane; empty if they can, or the lane needs none."""
        architecture = task.cell.gpu
        if len(self._by_lanes(task)) >= task.gpus:
            return ""
        count = sum(device.gpu.target == architecture for device in self.devices)
        if count >= task.gpus:
            return f"every {architecture} GPU is taken by another program"
        return f"{count} of {task.gpus} GPUs are left" if count else f"no healthy {architecture} GPU is left"

    def _jobs_of(self, task: Task) -> int:
        """Return how many jobs a lane takes: all of them, if nothing may run beside it on the cores."""
        return self.jobs if task.exclusive and not task.gpus else min(task.cores, self.jobs)

    def _devices_for(self, task: Task, reserved: Collection[Device]) -> Devices | None:
        """Choose the GPUs of a lane, those with the fewest lanes first; None if there are too few."""
        free = [one for one in self._by_lanes(task) if one not in reserved and self._has_room(one, task)]
        return tuple(free[: task.gpus]) if len(free) >= task.gpus else None

    def _by_lanes(self, task: Task) -> list[Device]:
        """List the GPUs that can take a lane once their other lanes have ended, those with the fewest lanes first."""
        refused = self.busy if task.cell.measures else ()
        suitable = (d for d in self.devices if d.gpu.target == task.cell.gpu and d not in refused)
        return sorted(suitable, key=lambda device: len(self._tasks_on(device)))

    def _tasks_on(self, device: Device) -> list[Task]:
        return [task for task, devices in self.running.values() if device in devices]

    def _has_room(self, device: Device, task: Task) -> bool:
        if task.gpus > 1 and device.is_instance:  # no process uses two instances
            return False
        lanes = [*self._tasks_on(device), task]
        memory_gib = sum(lane.cell.stated.gpu_memory_gib for lane in lanes)
        fits = memory_gib <= (device.memory_gib or math.inf) and not any(lane.exclusive for lane in lanes)
        return fits or len(lanes) == 1
