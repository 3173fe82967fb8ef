"""The environment of a lane: what it inherits, and the folders that are its own."""

from __future__ import annotations

import contextlib
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import files

INHERITED = {"PATH", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "TZ"}
#: NCCL's, NVSHMEM's and symmetric memory's switches keep a shared host's GPUs in service: a lane never drops them.
INHERITED_PREFIXES = ("CUDA_", "NCCL_", "NVSHMEM_", "NVIDIA_", "TORCH_SYMM_MEM_", "LC_")


@dataclass(frozen=True)
class Folders:
    """The folders of one lane.

    Attributes:
        work: new for every run: working directory, HOME, TMPDIR.
        kept: what makes a second run of the same lane fast: JIT caches and bytecode.
        interpreter: the bytecode of torch and Python itself, which no tree can change; shared by all lanes of one
            interpreter, since compiling it anew for each would cost 26 MB and 2 s.

    """

    work: Path
    kept: Path
    interpreter: Path

    @property
    def current(self) -> Path:
        """The lane's working directory."""
        return self.work / "cwd"

    @property
    def home(self) -> Path:
        """The lane's HOME."""
        return self.work / "home"

    @property
    def temporary(self) -> Path:
        """The lane's TMPDIR."""
        return self.work / "tmp"

    @property
    def bytecode(self) -> Path:
        """The lane's bytecode prefix."""
        return self.kept / "bytecode"

    def create(self) -> None:
        """Make them all; inside the bytecode prefix, the interpreter's own folders lead to the shared ones."""
        for folder in (self.current, self.home, self.temporary, self.bytecode, self.interpreter):
            folder.mkdir(parents=True, exist_ok=True)
        own = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        for folder in (path for path in own if not own.intersection(path.parents)):
            shared, link = self.interpreter / files.key_of(folder), self.bytecode / folder.relative_to(folder.anchor)
            shared.mkdir(exist_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                link.symlink_to(shared)


def with_device(host: Mapping[str, str], device: str) -> Mapping[str, str]:
    """Return the host's environment with one GPU left to see, numbered as NVML numbers them; with all where empty."""
    return {**host, "CUDA_VISIBLE_DEVICES": device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if device else host


def build(host: Mapping[str, str], folders: Folders, paths: list[Path], *, hide_gpu: bool) -> dict[str, str]:
    """Return a lane's environment.

    Args:
        host: the runner's own environment; only an allow-list of it goes on.
        folders: the lane's.
        paths: tree and companion set, in the order of PYTHONPATH.
        hide_gpu: for every kind of evidence but `executed`.

    """
    inherited = {
        name: value for name, value in host.items() if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    kept = {
        "TRITON_CACHE_DIR": "triton",
        "TILELANG_CACHE_DIR": "tilelang",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TORCH_EXTENSIONS_DIR": "extensions",
        "CUDA_CACHE_PATH": "cuda",
        "XDG_CACHE_HOME": "other",
    }
    return {
        **inherited,
        **({"CUDA_VISIBLE_DEVICES": ""} if hide_gpu else {}),
        **{name: str(folders.kept / folder) for name, folder in kept.items()},
        "PYTHONPYCACHEPREFIX": str(folders.bytecode),
        "HOME": str(folders.home),
        "TMPDIR": str(folders.temporary),
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONFAULTHANDLER": "1",
    }
