"""The target of a contract, and its share of the host."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """What the contract judges."""

    name: str  # "cpu", or the architecture of a GPU, such as "sm_90a"
    executed: bool  # whether a GPU of that architecture is here, so that kernels are launched on it

    @property
    def device(self) -> str:
        """The torch device that tensors live on."""
        return "cuda" if self.executed else "cpu"


def architecture() -> str:
    """Return the architecture of this host's first GPU, such as ``sm_90a``; empty without a GPU."""
    import torch  # noqa: PLC0415 - the marks of a contract are checked without it

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + "a" * (major >= 9)  # noqa: PLR2004 - Hopper, the first with such a suffix


@functools.cache
def current_target() -> Target:
    """Return the target that REPRODUCER_TARGET names; without it, the GPU that is here, or else the CPU."""
    stated = os.environ.get("REPRODUCER_TARGET")
    if stated == "cpu":
        return Target("cpu", executed=False)  # without importing torch, which takes seconds
    here = architecture()
    name = stated or here or "cpu"
    return Target(name, executed=name == here)


def processes() -> int:
    """Return how many processes may compile kernels, or run cases, at once."""
    return int(os.environ.get("REPRODUCER_PROCESSES", "1"))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold other lanes off this GPU, around launches that are timed."""
    gate = Path(os.environ.get("REPRODUCER_GPU_GATE", os.devnull))  # a named pipe, where lanes share a GPU
    try:
        gate.read_text()  # ends when the other lanes have left the GPU
        yield
    finally:
        gate.read_text()  # ends when they may use it again
