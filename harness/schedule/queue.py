"""The order of lanes, and their places on the cores and the GPUs of this host. Nothing here runs a lane."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from harness.host.gpus import Device
from harness.schedule.task import Task, expected_seconds

#: The GPUs of one lane; none if it runs on the cores alone.
Devices = tuple[Device, ...]


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
