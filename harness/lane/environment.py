"""The environment of a lane: what it inherits, and the folders that are its own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.core.cache import used

#: What a lane inherits, name by name: a prefix such as ``NVIDIA_`` would hand an API key to upstream's code.
INHERITED = {
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_TF32_OVERRIDE",
    "NVIDIA_VISIBLE_DEVICES",
    "PATH",
    "TZ",
}
#: The switches of NCCL, NVSHMEM and symmetric memory keep a shared host's GPUs in service: a lane never drops them.
INHERITED_FAMILIES = re.compile(r"(NCCL|NVSHMEM|TORCH_SYMM_MEM)_(?!.*(KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL))[A-Z0-9_]+")


@dataclass(frozen=True)
class Share:
    """A lane's share of the host's cores and GPUs: lanes run beside each other."""

    threads: int = 1  # that libraries such as torch use for one computation
    #: in how many its probe may compile kernels, or run cases, at once: that changes no result
    processes: int = 1
    #: what CUDA_VISIBLE_DEVICES says; None leaves it as the host has it. Numbers are NVML's
    visible: str | None = None
    #: the named pipe on which the probe asks for its GPUs alone; None where nobody else uses them
    gate: Path | None = None


ONE_CORE = Share()


def make_folders(work: Path, kept: Path) -> Path:
    """Make the folders of a lane, and return its working directory.

    What lies in `work` is new for every run: working directory, HOME and TMPDIR. What lies in `kept` makes a second run
    of the same lane fast: JIT caches.
    """
    for folder in (work / "cwd", work / "home", work / "tmp", kept):
        folder.mkdir(parents=True, exist_ok=True)
    used(kept)
    return work / "cwd"


def build(host: Mapping[str, str], work: Path, kept: Path, paths: list[Path], share: Share) -> dict[str, str]:
    """Return a lane's environment: of the runner's own, `host`, only an allow-list goes on; `paths` is PYTHONPATH."""
    inherited = {name: value for name, value in host.items() if name in INHERITED or INHERITED_FAMILIES.fullmatch(name)}
    caches = {
        "TRITON_CACHE_DIR": "triton",
        "TILELANG_CACHE_DIR": "tilelang",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TORCH_EXTENSIONS_DIR": "extensions",
        "CUDA_CACHE_PATH": "cuda",
        "XDG_CACHE_HOME": "other",
    }
    gpus = {} if share.visible is None else {"CUDA_VISIBLE_DEVICES": share.visible}
    gpus |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if share.visible else {}
    return {
        **inherited,
        **gpus,
        **({} if share.gate is None else {"REPRODUCER_GPU_GATE": str(share.gate)}),
        "OMP_NUM_THREADS": str(share.threads),
        "REPRODUCER_PROCESSES": str(share.processes),
        **{name: str(kept / folder) for name, folder in caches.items()},
        # A dependency set and torch bring their bytecode; a tree's is compiled in each lane, and kept in none.
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(work / "home"),
        "TMPDIR": str(work / "tmp"),
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONFAULTHANDLER": "1",
    }
