"""Whether a GPU is healthy before its lanes and after them, however many share it."""

import threading
import time
from dataclasses import dataclass, replace

from harness.host import nvml
from harness.host.host import Device, Reading

#: Xids that a program's own fault raises; the catalogue's remedy is to restart the program. The script of a crash may
#: cause one. (NVIDIA, Xid catalogue: docs.nvidia.com/deploy/xid-errors)
OF_PROGRAMS = frozenset({8, 13, 31, 43, 45, 69})
#: Bytes by which the memory in use may grow: the driver's own share varies a little, and a leaked context takes more.
SLACK = 256 * 2**20
#: Seconds that memory and processes may take to disappear after a lane (the driver tears down a context).
PATIENCE = 5.0
#: Seconds for which a lane that measures waits until other processes, such as those of a killed sweep, leave its GPU.
COURTESY = 1.0
POLL = 0.25


def fault(reading: Reading) -> str:
    """Return why a GPU cannot be used; empty if it can."""
    if reading.lost:
        return f"it cannot be read: {reading.lost}"
    if reading.remap_failed:
        return "a row of its memory could not be remapped"
    fatal = sorted(set(reading.xids) - OF_PROGRAMS)
    return f"Xid {', '.join(str(number) for number in fatal)}" if fatal else ""


def _leftovers(before: Reading, after: Reading) -> str:
    """Say what lanes left on their GPU; memory says nothing if another program used it before."""
    new = after.processes - before.processes
    if new:
        return f"{len(new)} process(es) that were not there before"
    if before.processes or before.memory is None or after.memory is None:
        return ""
    growth = after.memory - before.memory
    return f"{growth / 2**20:.0f} MiB did not come back" if growth > SLACK else ""


def before(device: Device, *, measures: bool) -> Reading:
    """Read a GPU before its first lane; if the lane measures, first wait a while for other programs to end."""
    end = time.monotonic() + COURTESY
    while True:
        reading = nvml.read(device)
        if fault(reading) or not (measures and reading.processes) or time.monotonic() > end:
            return reading
        time.sleep(POLL)


def after(device: Device, idle: Reading, *, last: bool = True, patience: float = PATIENCE) -> str:
    """Read a GPU after a lane, and return its fault; only after the `last` lane may nothing be left on it."""
    end = time.monotonic() + patience
    xids: tuple[int, ...] = ()
    while True:
        reading = nvml.read(device)
        xids += reading.xids
        count = (reading.uncorrected or 0) - (idle.uncorrected or 0)
        uncorrected = f"{count} uncorrected memory error(s)" if count > 0 else ""
        failure = fault(replace(reading, xids=xids)) or uncorrected
        leftovers = "" if failure or not last else _leftovers(idle, reading)
        if failure or not leftovers or time.monotonic() > end:
            return failure or leftovers
        time.sleep(POLL)


@dataclass
class _Use:
    """The lanes on one GPU since it was last idle."""

    lanes: int
    reading: Reading  # of the idle GPU
    fault: str = ""


class GpuWatch:
    """Reads each GPU before its first lane, and after each lane."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._uses: dict[str, _Use] = {}

    def enter(self, device: Device, *, measures: bool) -> tuple[str, bool]:
        """Count a lane that begins, unless its GPU has a fault, or another program uses it and the lane measures.

        Return the fault, and whether the GPU is taken.
        """
        with self._locks.setdefault(device.number, threading.Lock()):
            use = self._uses.get(device.number)
            if use is None:
                reading = before(device, measures=measures)
                use = _Use(0, reading, fault(reading))
            is_taken = measures and bool(use.reading.processes)
            if not use.fault and not is_taken:
                use.lanes += 1
                self._uses[device.number] = use
            return use.fault, is_taken

    def leave(self, device: Device, *, look: bool = True) -> str:
        """Count a lane that ended; return the fault that its GPU has, or had while this lane ran.

        Without `look` (the lane was abandoned) the GPU is not read.
        """
        with self._locks[device.number]:
            use = self._uses[device.number]
            use.lanes -= 1
            last = use.lanes == 0
            if look and not use.fault:
                use.fault = after(device, use.reading, last=last)
            if last:
                del self._uses[device.number]
            return use.fault
