"""The environment of a lane: the variables that it inherits, its own folders, and the interpreter with its bytecode.

A lane stores no bytecode, since its trees and dependency sets are sealed. pip stores the bytecode of what it installs;
uv and many images do not. Each process of a lane would then compile 2,300 files: 11 seconds on a node with H200s.

A pack's own script can build an environment in the cache, for packages without wheels: a virtual one over the runner's
interpreter, which sees all of its packages. Its own packages are compiled against that interpreter's torch, and only
its lanes see them.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.core import files, seal
from harness.core.cache import Cache, mark_used
from harness.core.seal import ChangedError
from harness.host import host
from harness.host.host import Host

#: The variables that a lane inherits, by name: a prefix such as ``NVIDIA_`` would hand an API key to upstream's code.
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
#: A module that imports nearly all of torch before its own bytecode would be missed.
LATE = Path("_inductor/compile_fx.py")
#: Where torch cannot be imported, the bytecode of LATE alone is stored, so that the next command does not try again.
TORCH_IMPORTS = """
import py_compile, sys
try:
    import pytest, torch, torch._inductor.compile_fx, triton
except Exception:
    py_compile.compile(sys.argv[1])
"""
#: Variables that would let Python store bytecode elsewhere, or not at all.
REDIRECTING = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
BUILT = "environments"


@dataclass(frozen=True)
class Share:
    """A lane's share of the host's cores and GPUs."""

    threads: int  # that libraries such as torch use for one computation
    processes: int  # in which the contract may compile kernels, or run cases, at once; no result depends on it
    visible: str  # the value of CUDA_VISIBLE_DEVICES; empty: no GPU


def make_folders(work: Path, caches: Path) -> Path:
    """Make the folders of a lane, and return its working directory.

    Those in `work` are new for every run: working directory, HOME and TMPDIR. `caches` holds the JIT caches, which make
    a second run of the same lane fast.
    """
    for folder in (work / "cwd", work / "home", work / "tmp", caches):
        folder.mkdir(parents=True, exist_ok=True)
    mark_used(caches)
    return work / "cwd"


def build(host: Mapping[str, str], work: Path, caches: Path, paths: list[Path], share: Share) -> dict[str, str]:
    """Return a lane's environment: an allow-list of `host`, the runner's own, and PYTHONPATH from `paths`."""
    inherited = {name: value for name, value in host.items() if name in INHERITED or INHERITED_FAMILIES.fullmatch(name)}
    cache_variables = {
        "TRITON_CACHE_DIR": "triton",
        "TILELANG_CACHE_DIR": "tilelang",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TORCH_EXTENSIONS_DIR": "extensions",
        "CUDA_CACHE_PATH": "cuda",
        "XDG_CACHE_HOME": "other",
    }
    return {
        **inherited,
        "CUDA_VISIBLE_DEVICES": share.visible,
        **({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if share.visible else {}),  # NVML's order
        "OMP_NUM_THREADS": str(share.threads),
        "REPRODUCER_PROCESSES": str(share.processes),
        **{name: str(caches / folder) for name, folder in cache_variables.items()},
        # A dependency set and torch bring their bytecode; that of a tree is compiled in each lane, and not stored.
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(work / "home"),
        "TMPDIR": str(work / "tmp"),
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def store_bytecode(tell: Callable[[str], None]) -> None:
    """Store the bytecode of the runner's torch beside its source, unless it is there, or its folder is read-only."""
    folder = host.torch_folder()
    if folder is None:
        return
    source = folder / LATE
    bytecode = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
    if bytecode.exists() or not source.exists() or not os.access(source.parent, os.W_OK):
        return
    tell("storing the bytecode of torch, which its installer left out")
    variables = {name: value for name, value in os.environ.items() if name not in REDIRECTING}
    command = [sys.executable, "-c", TORCH_IMPORTS, str(source)]
    subprocess.run(command, env=variables, capture_output=True, check=False)


def environment_key(host: Host, name: str) -> str:
    """Return the key of a built environment in the cache: another interpreter or torch has another ABI."""
    return f"{name}-{files.key_of(sys.prefix, host.python, host.torch)}"


def find_environment(cache: Cache, host: Host, name: str) -> Path | None:
    """Return the folder of a target's environment; None if the target names none, or it is not built here."""
    folder = cache.entry(BUILT, environment_key(host, name)) if name else None
    return folder if folder is not None and interpreter(folder).exists() else None


def check_built(cache: Cache, folder: Path | None) -> None:
    """Check that an environment is unchanged since a lane first used it: no index can restore it.

    ChangedError: it had changed, and has been removed.
    """
    if folder is None:
        return
    unchanged = seal.is_unchanged(cache, BUILT, folder.name, folder)
    if unchanged is None:
        seal.keep(cache, BUILT, folder.name, folder)
    elif not unchanged:
        seal.forget(cache, BUILT, folder.name, folder)
        raise ChangedError(
            f"the environment {folder.name} is not what it was when it was first used; it has been removed. "
            "Next: run the script that builds it"
        )


def interpreter(folder: Path | None) -> Path:
    """Return the interpreter of an environment; for None, the runner's own."""
    return folder / "bin" / "python" if folder is not None else Path(sys.executable)
