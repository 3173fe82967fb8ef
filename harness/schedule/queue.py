"""The queue: which lane goes next, and where: so many at once, on the GPUs of this host. Nothing here runs anything."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from harness.host.gpus import Device
from harness.schedule.task import Task, expected_seconds

#: Left out last time, then what needs quiet (it waits for others, so the sooner it is through the better), then those
#: of several GPUs, then those of several cores, then the longest first with what waits for it; then as they came.
Rank = tuple[bool, bool, int, int, float]


@dataclass(frozen=True)
class Placement:
    """Where one lane runs: on these GPUs, or on the cores alone."""

    devices: tuple[Device, ...] = ()

    @property
    def name(self) -> str:
        """Its name in every output."""
        numbers = ",".join(device.number for device in self.devices)
        return f"gpu{'s' if len(self.devices) > 1 else ''} {numbers}" if numbers else "cpu"


@dataclass
class Places:
    """How many lanes run at once, on which GPUs, and what of them is taken.

    A lane counts as its `cores`, or as all that there are. Lanes are not bound to cores: some compile in several
    processes, and whoever is bound cannot use what is idle.
    """

    jobs: int  # how many lanes run at once, whatever they use
    devices: list[Device]  # the GPUs of the pool that are healthy
    #: the numbers of the GPUs that another program uses: nothing can be measured there
    taken: set[str] = field(default_factory=set)
    _running: list[tuple[Task, Placement]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether no lane can begin, whatever it needs."""
        return self._free < 1 or any(task.exclusive and not task.gpus for task, _ in self._running)

    @property
    def _free(self) -> int:
        return self.jobs - sum(min(task.cores, self.jobs) for task, _ in self._running)

    def _has_cores(self, task: Task) -> bool:
        return not self.full and min(task.cores, self.jobs) <= self._free

    def waits_for_cores(self, task: Task, kept: Collection[str]) -> bool:
        """Whether the cores are all that keeps a lane from beginning, on other GPUs than those `kept`, by number."""
        return not self._has_cores(task) and self._devices_for(task, kept) is not None

    def never(self, task: Task) -> str:
        """Say why no GPU that is left can ever take a lane; empty where one can, or it needs none."""
        if not task.gpus:
            return ""
        ours = [device for device in self.devices if device.gpu.target == task.cell.gpu]
        if len(ours) < task.gpus:
            return f"{len(ours)} of {task.gpus} GPUs are left" if ours else f"no healthy {task.cell.gpu} GPU is left"
        usable = [device for device in ours if self._suits(device, task)]
        return "" if len(usable) >= task.gpus else f"every {task.cell.gpu} GPU is taken by another program"

    def emptiest(self, task: Task) -> str:
        """Return the number of the GPU with the fewest lanes among those that can ever take a lane."""
        return min((device for device in self.devices if self._suits(device, task)), key=self._lanes).number

    def take(self, task: Task, kept: Collection[str]) -> Placement | None:
        """Give a lane its place and its GPUs, none of those `kept`, all together; None where it has to wait."""
        devices = self._devices_for(task, kept)
        if devices is None or not self._has_cores(task) or (task.exclusive and not task.gpus and self._running):
            return None
        placement = Placement(devices)
        self._running.append((task, placement))
        return placement

    def _devices_for(self, task: Task, kept: Collection[str]) -> tuple[Device, ...] | None:
        """Choose the GPUs of a lane, those with the fewest lanes first; None where there are not enough."""
        room = [device for device in self.devices if device.number not in kept and self._has_room(device, task)]
        room.sort(key=self._lanes)
        return tuple(room[: task.gpus]) if len(room) >= task.gpus else None

    def _on(self, device: Device) -> list[Task]:
        return [task for task, placement in self._running if device in placement.devices]

    def _lanes(self, device: Device) -> int:
        return len(self._on(device))

    def _suits(self, device: Device, task: Task) -> bool:
        """Whether a GPU can take a lane, whatever else is on it now."""
        is_quiet = not task.cell.measures or device.number not in self.taken
        return device.gpu.target == task.cell.gpu and is_quiet

    def _has_room(self, device: Device, task: Task) -> bool:
        if not self._suits(device, task) or (task.gpus > 1 and device.is_instance):  # no process uses two instances
            return False
        others = self._on(device)
        wanted = sum(one.cell.stated.gpu_memory_gib for one in (*others, task))
        fits = wanted <= (device.gpu.memory_gib or math.inf) and not any(one.exclusive for one in (*others, task))
        return not others or fits

    def give_back(self, task: Task, placement: Placement) -> None:
        """Note that a lane is over."""
        self._running.remove((task, placement))

    def retire(self, gone: Device) -> None:
        """Take a GPU out of the pool; lanes that are on it go on until they end."""
        self.devices = [device for device in self.devices if device.number != gone.number]


@dataclass
class Queue:
    """The tasks that may begin, in the order in which they do."""

    _ready: list[tuple[Rank, Task]] = field(default_factory=list)

    def put(self, task: Task, after_it: float = 0.0) -> None:
        """Add a task that may begin; `after_it`: the seconds of the lanes that wait for its end."""
        quiet = task.cell.measures or task.exclusive
        rank = (not task.urgent, not quiet, -task.gpus, -task.cores, -expected_seconds(task) - after_it)
        bisect.insort(self._ready, (rank, task), key=lambda entry: entry[0])

    def take(self, places: Places, wanted: Callable[[Task], bool]) -> tuple[Task, Placement] | None:
        """Take the first task for which there is a place; None where there is none.

        Nothing passes a task that waits for GPUs of the same architecture, or for the cores: so a lane that needs
        several GPUs or several cores (`Task.cores`) gets them. For one that needs a GPU for itself, the emptiest of its
        architecture is kept free, and the others go on: no lane is added there, so that the fewest lanes of any GPU
        become fewer. One is kept at a time, and lanes that need one for themselves take turns. `wanted` says whether a
        task still makes sense: one that does not is dropped.
        """
        blocked: set[str] = set()
        kept: dict[str, str] = {}  # of an architecture: the number of a GPU
        position = 0
        while position < len(self._ready) and not places.full and "" not in blocked:
            entry = self._ready[position]
            task = entry[1]
            if task.cell.gpu in blocked or places.never(task):
                position += 1
                continue
            del self._ready[position]
            if not wanted(task):
                position = 0  # what waited for it may stand before this place now
                kept.clear()
                continue
            placement = places.take(task, kept.values())
            if placement is not None:
                return task, placement
            self._ready.insert(position, entry)
            if places.waits_for_cores(task, kept.values()):
                blocked.add("")
            elif task.exclusive and task.gpus == 1:
                kept.setdefault(task.cell.gpu, places.emptiest(task))
            else:
                blocked.add(task.cell.gpu)
            position += 1
        return None

    def drain(self) -> list[Task]:
        """Take every task that is left."""
        left = [task for _, task in self._ready]
        self._ready.clear()
        return left
