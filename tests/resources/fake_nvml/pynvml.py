"""NVML as a host with toy GPUs would answer: their state is a JSON file that tests and toy probes change.

The file is named by NVIDIA_FAKE_STATE: ``{"devices": [{"name", "capability", "memory", "processes", "xids",
"uncorrected", "remap_failed", "lost"}]}``; what is left out is a healthy GPU's. What a probe did to GPU N stands in
the file of that name with the suffix ``.N``.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

NVML_ERROR_UNKNOWN = 999
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_NOT_SUPPORTED = 3
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
nvmlEventTypeXidCriticalError = 8
HEALTHY = {"memory": 0, "processes": [], "xids": [], "uncorrected": 0, "remap_failed": False, "lost": False}


class NVMLError(Exception):
    """An error of the library."""

    def __init__(self, value):
        super().__init__(f"toy NVML error {value}")
        self.value = value


def _read(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _devices():
    return _read(Path(os.environ["NVIDIA_FAKE_STATE"]))["devices"]


def _state(handle):
    found = HEALTHY | _devices()[handle] | _read(Path(f"{os.environ['NVIDIA_FAKE_STATE']}.{handle}"))
    if found["lost"]:
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return found


def nvmlInit():
    if "NVIDIA_FAKE_STATE" not in os.environ:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)


def nvmlShutdown():
    pass


def nvmlSystemGetDriverVersion():
    return "999.1"


def nvmlDeviceGetCount():
    return len(_devices())


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetName(handle):
    return _devices()[handle]["name"]


def nvmlDeviceGetCudaComputeCapability(handle):
    return tuple(_devices()[handle]["capability"])


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(used=_state(handle)["memory"])


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
