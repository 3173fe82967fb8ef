"""Whether a GPU is healthy before its lanes and after them, however many share it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from harness.host import gpus
from harness.host.gpus import Device, Reading

#: Xids that a program's own fault raises; the catalogue's remedy is to start the program again. A probe of a crash may
#: well cause one. (NVIDIA, Xid catalogue: docs.nvidia.com/deploy/xid-errors)
OF_PROGRAMS = frozenset({8, 13, 31, 43, 45, 69})
#: Bytes that may be in use besides: the driver's own bookkeeping moves a little; a context that was left takes more.
SLACK = 256 * 2**20
#: How long, in seconds, memory and processes may take to disappear after a lane (the driver tears down a context).
PATIENCE = 5.0
#: How long, in seconds, a lane that measures waits for other processes to leave its GPU: those of a sweep that was
#: killed a moment ago do.
COURTESY = 1.0
POLL = 0.25


def fault(reading: Reading) -> str:
    """Say why a GPU cannot be used at all; empty where it can."""
    if reading.lost:
        return f"it cannot be read: {reading.lost}"
    if reading.remap_failed:
        return "a row of its memory could not be remapped"
    grave = sorted(set(reading.xids) - OF_PROGRAMS)
    return f"Xid {', '.join(str(number) for number in grave)}" if grave else ""


def _remains(before: Reading, after: Reading) -> str:
    """Say what lanes left on their GPU; memory cannot be told where another program's process was there."""
    left = after.processes - before.processes
    if left:
        return f"{len(left)} process(es) that were not there before"
    if before.processes or before.memory is None or after.memory is None:
        return ""
    kept = after.memory - before.memory
    return f"{kept / 2**20:.0f} MiB did not come back" if kept > SLACK else ""


def before(device: Device, *, measures: bool) -> tuple[Reading, str, str]:
    """Look at a GPU before its first lane; where that measures, wait a while for other programs' processes to end.

    Returns the reading, its fault, and why it is merely taken; both empty where the lane can begin.
    """
    end = time.monotonic() + COURTESY
    while True:
        reading = gpus.read(device)
        found, taken = fault(reading), _taken(reading) if measures else ""
        if found or not taken or time.monotonic() > end:
            return reading, found, taken
        time.sleep(POLL)


def _taken(reading: Reading) -> str:
    return f"{len(reading.processes)} process(es) of another program" if reading.processes else ""


def after(device: Device, earlier: Reading, *, last: bool = True, patience: float = PATIENCE) -> str:
    """Look at a GPU after a lane, the `last` one on it or not; return its fault, empty where it is healthy."""
    end = time.monotonic() + patience
    xids: tuple[int, ...] = ()
    while True:
        reading = gpus.read(device)
        xids += reading.xids
        count = (reading.uncorrected or 0) - (earlier.uncorrected or 0)
        uncorrected = f"{count} uncorrected memory error(s)" if count > 0 else ""
        found = fault(replace(reading, xids=xids)) or uncorrected
        remains = "" if found or not last else _remains(earlier, reading)
        if found or not remains or time.monotonic() > end:
            return found or remains
        time.sleep(POLL)


@dataclass
class _Use:
    """The lanes on one GPU since it was last idle: how many, what it was like before, and its fault."""

    lanes: int
    earlier: Reading
    fault: str = ""


class GpuWatch:
    """Looks at each GPU when it gets its first lane, at each lane's end, and when its last lane is gone."""

    def __init__(self) -> None:
        """Begin with no lane on any GPU."""
        self._locks: dict[str, threading.Lock] = {}
        self._used: dict[str, _Use] = {}

    def enter(self, device: Device, *, measures: bool) -> tuple[str, str]:
        """Note that a lane begins; return the GPU's fault and why it is taken, and note nothing where there is one."""
        with self._locks.setdefault(device.number, threading.Lock()):
            use = self._used.get(device.number)
            if use is None:
                earlier, found, taken = before(device, measures=measures)
                if found or taken:
                    return found, taken
                use = self._used[device.number] = _Use(0, earlier)
            elif use.fault or (measures and use.earlier.processes):
                return use.fault, "" if use.fault else _taken(use.earlier)
            use.lanes += 1
            return "", ""

    def leave(self, device: Device, *, look: bool = True) -> str:
        """Note that a lane is over; return the fault that its GPU has now, or showed while this lane was on it.

        Where `look` is false (the lane was abandoned) nothing is read.
        """
        with self._locks[device.number]:
            use = self._used[device.number]
            use.lanes -= 1
            last = use.lanes == 0
            if look and not use.fault:
                use.fault = after(device, use.earlier, last=last)
            if last:
                del self._used[device.number]
            return use.fault
