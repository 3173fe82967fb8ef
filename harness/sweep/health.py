"""Whether a GPU is well before a lane and after it."""

from __future__ import annotations

import time

from harness.sweep import nvml
from harness.sweep.nvml import Device, Reading

#: Xids that a program's own fault raises; the catalogue's remedy is to start the program again. A probe of a crash may
#: well cause one. (NVIDIA, Xid catalogue: docs.nvidia.com/deploy/xid-errors)
OF_PROGRAMS = frozenset({8, 13, 31, 43, 45, 69})
#: Bytes that may be in use besides: the driver's own bookkeeping moves by a few MiB.
SLACK = 64 * 2**20
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
    """Say what a lane left on its GPU; memory cannot be told where somebody else's process was there."""
    left = after.processes - before.processes
    if left:
        return f"{len(left)} process(es) that were not there before"
    if before.processes or before.memory is None or after.memory is None:
        return ""
    kept = after.memory - before.memory
    return f"{kept / 2**20:.0f} MiB did not come back" if kept > SLACK else ""


def before(device: Device, *, alone: bool, patience: float = COURTESY) -> tuple[Reading, str, str]:
    """Look at a GPU before a lane.

    Args:
        device: the GPU.
        alone: the lane measures, so that no other process may be there.
        patience: how long to wait for those to end, in seconds.

    Returns: the reading, why the GPU is sick, and why it is merely taken; both empty where the lane can begin.

    """
    end = time.monotonic() + patience
    while True:
        reading = nvml.read(device)
        sick = fault(reading)
        taken = f"{len(reading.processes)} process(es) of somebody else" if alone and reading.processes else ""
        if sick or not taken or time.monotonic() > end:
            return reading, sick, taken
        time.sleep(POLL)


def after(device: Device, earlier: Reading, *, patience: float = PATIENCE) -> str:
    """Look at a GPU after a lane; say why it is sick, empty where it is well."""
    end = time.monotonic() + patience
    xids: tuple[int, ...] = ()
    while True:
        reading = nvml.read(device)
        xids += reading.xids
        sick = fault(reading) or fault(Reading(xids=xids)) or _uncorrected(earlier, reading)
        remains = "" if sick else _remains(earlier, reading)
        if sick or not remains or time.monotonic() > end:
            return sick or remains
        time.sleep(POLL)


def _uncorrected(earlier: Reading, later: Reading) -> str:
    count = (later.uncorrected or 0) - (earlier.uncorrected or 0)
    return f"{count} uncorrected memory error(s)" if count > 0 else ""
