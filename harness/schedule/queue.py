"""The queue: which lane starts next, and on which GPUs of this host. Nothing here runs a lane."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from harness.host.gpus import Device
from harness.schedule.task import Task, expected_seconds

#: The order of tasks: urgent ones first, then those that measure or run alone, since they wait for other lanes. Then
#: the most GPUs, the most cores, and the most seconds, with those of the lanes that wait for the task.
Rank = tuple[bool, bool, int, int, float]


@dataclass(frozen=True)
class Placement:
    """Where one lane runs: on GPUs, or on the cores alone."""

    devices: tuple[Device, ...] = ()

    @property
    def name(self) -> str:
        """Its name in every output."""
        numbers = ",".join(device.number for device in self.devices)
        return f"gpu{'s' if len(self.devices) > 1 else ''} {numbers}" if numbers else "cpu"


@dataclass
class Places:
    """The jobs and the GPUs of this host, and the lanes that use them.

    A lane takes as many jobs as its `cores`, at most all. Lanes are not bound to cores: one that compiles in several
    processes may use idle cores.
    """

    jobs: int
    devices: list[Device]  # the healthy GPUs
    #: the numbers of the GPUs that another program uses: no lane is measured there
    busy: set[str] = field(default_factory=set)
    _running: list[tuple[Task, Placement]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether no lane can start, whatever it needs."""
        return self._free < 1 or any(task.exclusive and not task.gpus for task, _ in self._running)

    @property
    def _free(self) -> int:
        return self.jobs - sum(min(task.cores, self.jobs) for task, _ in self._running)

    def _has_cores(self, task: Task) -> bool:
        return not self.full and min(task.cores, self.jobs) <= self._free

    def waits_for_cores(self, task: Task, reserved: Collection[str]) -> bool:
        """Whether a lane lacks only cores: it has GPUs besides those `reserved`, by number."""
        return not self._has_cores(task) and self._devices_for(task, reserved) is not None

    def never(self, task: Task) -> str:
        """Return why the GPUs of the pool can never take a lane; empty if they can, or the lane needs none."""
        if not task.gpus:
            return ""
        pool = [device for device in self.devices if device.gpu.target == task.cell.gpu]
        if len(pool) < task.gpus:
            return f"{len(pool)} of {task.gpus} GPUs are left" if pool else f"no healthy {task.cell.gpu} GPU is left"
        usable = [device for device in pool if self._suits(device, task)]
        return "" if len(usable) >= task.gpus else f"every {task.cell.gpu} GPU is taken by another program"

    def emptiest(self, task: Task) -> str:
        """Return the number of the GPU with the fewest lanes, among those that suit a lane."""
        return min((device for device in self.devices if self._suits(device, task)), key=self._lane_count).number

    def take(self, task: Task, reserved: Collection[str]) -> Placement | None:
        """Give a lane its cores and all its GPUs, none of those `reserved`; None if it has to wait."""
        devices = self._devices_for(task, reserved)
        if devices is None or not self._has_cores(task) or (task.exclusive and not task.gpus and self._running):
            return None
        placement = Placement(devices)
        self._running.append((task, placement))
        return placement

    def _devices_for(self, task: Task, reserved: Collection[str]) -> tuple[Device, ...] | None:
        """Choose the GPUs of a lane, those with the fewest lanes first; None if there are too few."""
        free = [device for device in self.devices if device.number not in reserved and self._has_room(device, task)]
        free.sort(key=self._lane_count)
        return tuple(free[: task.gpus]) if len(free) >= task.gpus else None

    def _tasks_on(self, device: Device) -> list[Task]:
        return [task for task, placement in self._running if device in placement.devices]

    def _lane_count(self, device: Device) -> int:
        return len(self._tasks_on(device))

    def _suits(self, device: Device, task: Task) -> bool:
        """Whether a GPU can take a lane once its other lanes have ended."""
        is_quiet = not task.cell.measures or device.number not in self.busy
        return device.gpu.target == task.cell.gpu and is_quiet

    def _has_room(self, device: Device, task: Task) -> bool:
        if not self._suits(device, task) or (task.gpus > 1 and device.is_instance):  # no process uses two instances
            return False
        lanes = [*self._tasks_on(device), task]
        memory_gib = sum(lane.cell.stated.gpu_memory_gib for lane in lanes)
        fits = memory_gib <= (device.gpu.memory_gib or math.inf) and not any(lane.exclusive for lane in lanes)
        return fits or len(lanes) == 1

    def give_back(self, task: Task, placement: Placement) -> None:
        """Take back the cores and the GPUs of a lane that ended."""
        self._running.remove((task, placement))

    def retire(self, retired: Device) -> None:
        """Take a GPU out of the pool. Its lanes run to their end."""
        self.devices = [device for device in self.devices if device.number != retired.number]


@dataclass
class Queue:
    """The tasks that may start, in the order in which they start."""

    _ready: list[tuple[Rank, Task]] = field(default_factory=list)

    def put(self, task: Task, dependent_seconds: float = 0.0) -> None:
        """Add a task that may start; the lanes that wait for its end take `dependent_seconds`."""
        quiet = task.cell.measures or task.exclusive
        rank = (not task.urgent, not quiet, -task.gpus, -task.cores, -expected_seconds(task) - dependent_seconds)
        bisect.insort(self._ready, (rank, task), key=lambda entry: entry[0])

    def take(self, places: Places, may_start: Callable[[Task], bool]) -> tuple[Task, Placement] | None:
        """Take the first task for which there is a place; None if there is none. Drop tasks that may not start.

        No task passes one that waits for cores, or for GPUs of the same architecture: a lane of several GPUs or cores
        gets them in time. An exclusive lane of one GPU reserves the emptiest GPU of its architecture: no lane is added
        there, and lanes on other GPUs start. One GPU of an architecture is reserved at a time: such lanes take turns.
        """
        blocked: set[str] = set()  # the architectures that a task waits for; "" for the cores
        reserved: dict[str, str] = {}  # the number of a GPU by its architecture
        position = 0
        while position < len(self._ready) and not places.full and "" not in blocked:
            entry = self._ready[position]
            task = entry[1]
            if task.cell.gpu in blocked or places.never(task):
                position += 1
                continue
            del self._ready[position]
            if not may_start(task):
                position = 0  # a task that waited for it may be in front now
                reserved.clear()
                continue
            placement = places.take(task, reserved.values())
            if placement is not None:
                return task, placement
            self._ready.insert(position, entry)
            if places.waits_for_cores(task, reserved.values()):
                blocked.add("")
            elif task.exclusive and task.gpus == 1:
                reserved.setdefault(task.cell.gpu, places.emptiest(task))
            else:
                blocked.add(task.cell.gpu)
            position += 1
        return None

    def drain(self) -> list[Task]:
        """Take every task that is left."""
        tasks = [task for _, task in self._ready]
        self._ready.clear()
        return tasks
