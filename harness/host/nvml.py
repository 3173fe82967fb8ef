"""Reading GPUs by NVML; `list` and other verbs do without its import."""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pynvml

from harness.host import host
from harness.host.host import Device, Gpu, GpuPool, Host, Reading

Value = TypeVar("Value")
GIB = 2**30


def _optional(call: Callable[[], Value]) -> Value | None:
    """Return the result of an NVML call, or None if this host does not support it; a lost GPU raises."""
    try:
        return call()
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED):
            raise
        return None


def _events(handle: Any) -> Any:  # noqa: ANN401 - NVML's own types
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    return events


def _new_xids(events: Any) -> Iterator[int]:  # noqa: ANN401 - NVML's own type
    """Yield the Xids since the last look, without waiting for more."""
    with contextlib.suppress(pynvml.NVMLError):
        while events is not None:
            yield int(pynvml.nvmlEventSetWait_v2(events, 0).eventData)


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


def _instances(handle: Any) -> list[str]:  # noqa: ANN401 - NVML's own type
    """List the UUIDs of a GPU's MIG instances; none if MIG is off or unknown."""
    uuids: list[str] = []
    if _optional(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]) != pynvml.NVML_DEVICE_MIG_ENABLE:
        return uuids
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        instance = _optional(lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))  # noqa: B023 - called here
        if instance is not None:
            uuids.append(pynvml.nvmlDeviceGetUUID(instance))
    return uuids


def _tokens() -> list[str]:
    """List the GPUs that CUDA_VISIBLE_DEVICES names, as CUDA reads it, else every GPU.

    CUDA takes numbers, UUIDs and prefixes of UUIDs, and stops at the first that names no GPU. A GPU that is split into
    MIG instances is listed by their UUIDs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    tokens: list[str] = []
    if visible is not None:
        for token in (text.strip() for text in visible.split(",")):
            if not token or token.startswith("-") or token in tokens:
                break
            tokens.append(token)
        return tokens
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            instances = _instances(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError:
            instances = []  # the GPU is lost, which opening it reports
        tokens += instances or [str(index)]
    return tokens


def _handle(token: str) -> Any:  # noqa: ANN401 - NVML's own type
    if token.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(token))
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        if pynvml.nvmlDeviceGetUUID(handle).startswith(token):
            return handle
    return pynvml.nvmlDeviceGetHandleByUUID(token.encode())


def _device(token: str, position: int) -> Device:
    handle = _handle(token)
    is_instance = token.startswith("MIG-")
    physical = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_instance else handle
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(physical)
    total = _optional(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)) or 0
    gpu = Gpu(pynvml.nvmlDeviceGetName(handle), f"{major}.{minor}")
    number = token if token.isdecimal() else str(position)
    return Device(token, number, gpu, handle, _optional(lambda: _events(physical)), is_instance, round(total / GIB, 1))


@contextmanager
def gpu_pool() -> Iterator[GpuPool]:
    """Yield the GPUs that this host shows; NVML stays open meanwhile."""
    devices: list[Device] = []
    lost: list[str] = []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield GpuPool(devices, "", lost)
        return
    try:
        for position, token in enumerate(_tokens()):
            try:
                devices.append(_device(token, position))
            except pynvml.NVMLError as error:
                lost.append(f"gpu {token if token.isdecimal() else position} cannot be used: {error}")
        yield GpuPool(devices, pynvml.nvmlSystemGetDriverVersion() if devices else "", lost)
    finally:
        pynvml.nvmlShutdown()


def detect() -> Host:
    """Describe this host, with all GPUs that it shows."""
    with gpu_pool() as pool:
        return host.detect(pool)
