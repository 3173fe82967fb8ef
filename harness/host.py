"""What this host is: its GPUs, its Python, its torch and triton, without importing torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pynvml


@dataclass(frozen=True)
class Gpu:
    """One GPU that a lane could use."""

    name: str
    compute_capability: tuple[int, int]

    @property
    def target(self) -> str:
        """Its architecture as a target, with the suffix from sm_90 on."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")  # noqa: PLR2004 - the rule's own number


@dataclass(frozen=True)
class Host:
    """The facts that decide what a host can show and that a receipt records."""

    python: str
    torch: str | None
    triton: str | None
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: str = ""
    system: str = ""
    cudnn: str = ""
    nccl: str = ""

    @property
    def python_tag(self) -> str:
        """The wheel tag of the runner's interpreter, such as ``cp311``."""
        return python_tag(self.python)

    @property
    def gpu_targets(self) -> frozenset[str]:
        """The architectures that are here to be executed on."""
        return frozenset(gpu.target for gpu in self.gpus)

    @property
    def auto_target(self) -> str:
        """The architecture of the first GPU, else cpu."""
        return self.gpus[0].target if self.gpus else "cpu"


def python_tag(version: str) -> str:
    """Return the wheel tag of a Python version: ``3.11.7`` gives ``cp311``."""
    major, minor = version.split(".")[:2]
    return f"cp{major}{minor}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return (), ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), ""
    try:
        numbers = [int(text) for text in (visible or "").split(",") if text.strip().isdecimal()]
        indices = numbers or range(pynvml.nvmlDeviceGetCount())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
        gpus = tuple(
            Gpu(pynvml.nvmlDeviceGetName(handle), tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)))
            for handle in handles
        )
        return gpus, pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return (), ""
    finally:
        pynvml.nvmlShutdown()


def _torch_cuda() -> str:
    """Return the CUDA version that the installed torch was built for, read without importing it."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = file.read_text(encoding="utf-8") if file and file.exists() else ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def _library(name: str, cuda: str) -> str:
    """Return the version of one of the libraries that torch's CUDA build installs beside it: ``cudnn``, ``nccl``."""
    return _version(f"nvidia-{name}-cu{cuda.partition('.')[0]}") or "" if cuda else ""


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


def detect() -> Host:
    """Look at this host."""
    gpus, driver = _gpus()
    python = ".".join(str(part) for part in sys.version_info[:3])
    cuda = _torch_cuda()
    libraries = _library("cudnn", cuda), _library("nccl", cuda)
    return Host(python, _version("torch"), _version("triton"), gpus, driver, cuda, _system(), *libraries)
