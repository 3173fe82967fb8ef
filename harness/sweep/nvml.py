"""What NVML says of a GPU now; what cannot be read here (a container, an old driver) is None."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

from harness.errors import HarnessError, unknown
from harness.host import Gpu

Value = TypeVar("Value")


@dataclass(frozen=True)
class Device:
    """One GPU of the pool.

    Attributes:
        token: what CUDA_VISIBLE_DEVICES calls it: NVML's number, or the UUID that the host's own variable holds.
        number: its number in the pool's order, for people: a UUID never gets into an output.
        gpu: name and compute capability.
        handle: NVML's.
        events: NVML's set of its critical Xid events; None where it cannot be had.

    """

    token: str
    number: str
    gpu: Gpu
    handle: Any
    events: Any

    @property
    def place(self) -> str:
        """Its name in every output."""
        return f"gpu {self.number}"


@dataclass(frozen=True)
class Reading:
    """One look at a GPU: bytes in use, processes, uncorrected ECC errors, failed row remappings, new Xid events."""

    lost: str = ""
    memory: int | None = None
    processes: frozenset[int] = frozenset()
    uncorrected: int | None = None
    remap_failed: bool = False
    xids: tuple[int, ...] = ()


def _optional(call: Callable[[], Value]) -> Value | None:
    """Return what a call gives; None where this host does not offer it. A GPU that is gone still raises."""
    try:
        return call()
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN):
            raise
        return None


def _events(handle: Any) -> Any:  # noqa: ANN401 - NVML's own types
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    return events


def _new_xids(events: Any) -> Iterator[int]:  # noqa: ANN401 - NVML's own type
    """Yield the Xids since the last look, without waiting for more."""
    while events is not None:
        try:
            yield int(pynvml.nvmlEventSetWait_v2(events, 0).eventData)
        except pynvml.NVMLError:
            return


def read(device: Device) -> Reading:
    """Look at a GPU."""
    handle = device.handle
    try:
        memory = _optional(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))
        running = _optional(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
        kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        uncorrected = _optional(lambda: int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, since)))
        remapped = _optional(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    except pynvml.NVMLError as error:
        return Reading(lost=str(error))
    processes = frozenset(int(process.pid) for process in running)
    return Reading("", memory, processes, uncorrected, bool(remapped and remapped[3]), tuple(_new_xids(device.events)))


def _tokens() -> list[str]:
    """List what this host shows: what CUDA_VISIBLE_DEVICES names, else every GPU by NVML's number."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [text.strip() for text in visible.split(",") if text.strip()]


def _device(token: str, position: int) -> Device:
    by_number = token.isdecimal()
    handle = (
        pynvml.nvmlDeviceGetHandleByIndex(int(token)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(token.encode())
    )
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    gpu = Gpu(pynvml.nvmlDeviceGetName(handle), (int(major), int(minor)))
    return Device(token, token if by_number else str(position), gpu, handle, _optional(lambda: _events(handle)))


def _chosen(devices: list[Device], wanted: str | None) -> list[Device]:
    if wanted is None:
        return devices
    by_number = {device.number: device for device in devices}
    numbers = [text.strip() for text in wanted.split(",") if text.strip()]
    for number in numbers:
        if number not in by_number:
            raise unknown("GPU", number, by_number, "--gpus 0,2, or nvidia-smi --list-gpus")
    return [by_number[number] for number in dict.fromkeys(numbers)]


@contextmanager
def pool(wanted: str | None) -> Iterator[list[Device]]:
    """Yield the GPUs that ``--gpus`` names, or all that this host shows; NVML stays open meanwhile.

    Raises:
        HarnessError: `wanted` names a GPU that is not here.

    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if wanted:
            raise HarnessError(f"--gpus {wanted}: NVML finds no GPU here ({error})") from None
        yield []
        return
    try:
        devices = _optional(lambda: [_device(token, position) for position, token in enumerate(_tokens())])
        yield _chosen(devices or [], wanted)
    finally:
        pynvml.nvmlShutdown()
