"""NVML as a host with toy GPUs would answer: their state is a JSON file that tests and toy scripts change.

The file is named by NCCL_FAKE_STATE (that of a toy node has its name behind it, where there is one): ``{"devices": [{"name", "capability", "uuid", "instances", "total", "memory",
"processes", "xids", "uncorrected", "remap_failed", "lost"}]}``; what is left out is a healthy GPU's. `instances` are the
UUIDs of its MIG instances. What a script did to GPU N stands in the file of that name with the suffix ``.N``. The handle
of a GPU is its number, that of a MIG instance its UUID.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_NOT_SUPPORTED = 3
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
nvmlEventTypeXidCriticalError = 8
NVML_DEVICE_MIG_ENABLE = 1
HEALTHY = {"uuid": "", "instances": [], "total": 0, "memory": 0, "processes": [], "xids": [], "uncorrected": 0, "remap_failed": False, "lost": False}


class NVMLError(Exception):
    """An error of the library."""

    def __init__(self, value):
        super().__init__(f"toy NVML error {value}")
        self.value = value


def _read(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _devices():
    state = os.environ["NCCL_FAKE_STATE"]
    own = Path(f"{state}.{os.environ.get('SLURMD_NODENAME', '')}")
    return _read(own if own.is_file() else Path(state))["devices"]


def _whole(handle):
    """Return the number of the GPU of a handle."""
    if isinstance(handle, int):
        return handle
    return next(number for number, one in enumerate(_devices()) if handle in one.get("instances", []))


def _state(handle):
    handle = _whole(handle)
    found = HEALTHY | _devices()[handle] | _read(Path(f"{os.environ['NCCL_FAKE_STATE']}.{handle}"))
    if found["lost"]:
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return found


def nvmlInit():
    if "NCCL_FAKE_STATE" not in os.environ:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)


def nvmlShutdown():
    pass


def nvmlSystemGetDriverVersion():
    return "999.1"


def nvmlDeviceGetCount():
    return len(_devices())


def nvmlDeviceGetHandleByIndex(index):
    _state(index)
    return index


def nvmlDeviceGetName(handle):
    return _devices()[_whole(handle)]["name"]


def nvmlDeviceGetUUID(handle):
    return handle if isinstance(handle, str) else _state(handle)["uuid"]


def nvmlDeviceGetHandleByUUID(uuid):
    for number, one in enumerate(_devices()):
        if uuid.decode() == one.get("uuid"):
            return number
        if uuid.decode() in one.get("instances", []):
            return uuid.decode()
    raise NVMLError(NVML_ERROR_NOT_SUPPORTED)


def nvmlDeviceGetMigMode(handle):
    return (int(bool(_state(handle)["instances"])), 0)


def nvmlDeviceGetMaxMigDeviceCount(_handle):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    instances = _state(handle)["instances"]
    if index >= len(instances):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return instances[index]


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    return _whole(handle)


def nvmlDeviceGetCudaComputeCapability(handle):
    if isinstance(handle, str):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return tuple(_devices()[handle]["capability"])


def nvmlDeviceGetMemoryInfo(handle):
    state = _state(handle)
    return SimpleNamespace(used=state["memory"], total=state["total"])


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=pid) for pid in _state(handle)["processes"]]


def nvmlDeviceGetTotalEccErrors(handle, _kind, _since):
    return _state(handle)["uncorrected"]


def nvmlDeviceGetRemappedRows(handle):
    return 0, 0, 0, int(_state(handle)["remap_failed"])


def nvmlEventSetCreate():
    return {"handle": None, "seen": 0}


def nvmlDeviceRegisterEvents(handle, _kinds, events):
    events["handle"] = handle


def nvmlEventSetWait_v2(events, _timeout):
    xids = _state(events["handle"])["xids"]
    if events["seen"] == len(xids):
        raise NVMLError(NVML_ERROR_TIMEOUT)
    events["seen"] += 1
    return SimpleNamespace(eventData=xids[events["seen"] - 1])
