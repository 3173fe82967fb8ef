"""The host: its GPUs, its Python, its torch and triton, found without importing torch.

A value of a GPU that NVML cannot read (container, old driver) is None.
"""

import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of it, that a lane could use, as a receipt records it."""

    name: str
    compute_capability: str  # such as ``9.0``

    @property
    def target(self) -> str:
        """Its architecture as a target, with the suffix from sm_90 on."""
        major, _, minor = self.compute_capability.partition(".")
        return f"sm_{major}{minor}" + ("a" if int(major) >= 9 else "")  # noqa: PLR2004 - the rule's own number


@dataclass(frozen=True)
class Device:
    """One GPU of the pool."""

    token: str  # its name in CUDA_VISIBLE_DEVICES: NVML's number, or the UUID in the host's own variable
    number: str  # for people: NVML's number, else its place in the pool, since no output holds a UUID
    gpu: Gpu
    handle: Any  # NVML's
    events: Any  # NVML's set of its critical Xid events; None if NVML has none
    is_instance: bool = False  # whether it is a MIG instance; a process can use only one of these
    memory_gib: float = 0.0  # 0 if NVML does not state it


def place_name(*devices: Device) -> str:
    """Return the name of a lane's place in every output: ``gpu 0``, ``gpus 0,1`` or ``cpu``."""
    numbers = ",".join(device.number for device in devices)
    return f"gpu{'s' if len(devices) > 1 else ''} {numbers}" if numbers else "cpu"


@dataclass(frozen=True)
class GpuPool:
    """The GPUs that lanes may use, the driver, and why other GPUs of this host cannot be used."""

    devices: list[Device]
    driver: str
    lost: list[str]


@dataclass(frozen=True)
class Reading:
    """One look at a GPU: bytes in use, processes, uncorrected ECC errors, failed row remappings, new Xid events."""

    lost: str = ""
    memory: int | None = None
    processes: frozenset[int] = frozenset()
    uncorrected: int | None = None
    remap_failed: bool = False
    xids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Host:
    """The facts of a host that decide what it can judge; a field is empty where the host lacks the thing.

    In a receipt the GPUs are those that the lanes had, and without one there is no driver.
    """

    python: str
    torch: str
    triton: str
    cuda: str = ""
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    system: str = ""
    cudnn: str = ""
    nccl: str = ""
    variables: tuple[str, ...] = ()

    @property
    def gpu(self) -> str:
        """The name of the GPUs, after their number where there are several; empty where there is none."""
        names = [gpu.name for gpu in self.gpus[:1]]
        return f"{len(self.gpus)} x {names[0]}" if len(self.gpus) > 1 else "".join(names)

    @property
    def python_tag(self) -> str:
        """The wheel tag of the runner's interpreter, such as ``cp311``."""
        return python_tag(self.python)

    def count(self, target: str) -> int:
        return sum(gpu.target == target for gpu in self.gpus)

    @property
    def auto_target(self) -> str:
        return self.gpus[0].target if self.gpus else "cpu"


#: The inherited variables that can change a number: a receipt records each that is set.
NUMERIC_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
)


def python_tag(version: str) -> str:
    """Return the wheel tag of a Python version: ``3.11.7`` gives ``cp311``."""
    major, minor = version.split(".")[:2]
    return f"cp{major}{minor}"


def _version(distribution: str) -> str:
    from importlib import metadata  # noqa: PLC0415 - 10 ms that `list` does without

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def torch_folder() -> Path | None:
    """Return the folder of the installed torch, found without importing it; None if there is none."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def _torch_cuda() -> str:
    """Return the CUDA version that the installed torch was built for, read without importing it."""
    folder = torch_folder()
    file = folder / "version.py" if folder else None
    text = file.read_text(encoding="utf-8") if file and file.exists() else ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def _library(name: str, cuda: str) -> str:
    """Return the version of one of the libraries that torch's CUDA build installs beside it: ``cudnn``, ``nccl``."""
    return _version(f"nvidia-{name}-cu{cuda.partition('.')[0]}") if cuda else ""


def _system() -> str:
    """Name the operating system without the kernel's own suffix, which may name a cloud or a site."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    kernel = ".".join(re.findall(r"\d+", platform.release())[:2])
    return f"{name} ({platform.system()} {kernel}, {platform.machine()})"


def cores() -> list[int]:
    """List the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def memory_gib() -> float:
    """Return the memory of this host in GiB: what the kernel shows now, or the limit of its control group if larger.

    Some virtual machines begin small and grow up to that limit as memory is used.
    """
    import psutil  # noqa: PLC0415 - most verbs do without it

    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.exists() else ""
    return max(psutil.virtual_memory().total, int(text) if text.isdecimal() else 0) / 2**30


def detect(pool: GpuPool) -> Host:
    """Describe this host; its GPUs are those of `pool`."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    cuda = _torch_cuda()
    return Host(
        python=python,
        torch=_version("torch"),
        triton=_version("triton"),
        gpus=tuple(device.gpu for device in pool.devices),
        driver=pool.driver,
        cuda=cuda,
        system=_system(),
        cudnn=_library("cudnn", cuda),
        nccl=_library("nccl", cuda),
        variables=tuple(f"{name}={os.environ[name]}" for name in NUMERIC_VARIABLES if name in os.environ),
    )
