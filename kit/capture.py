"""What makes the host wait for the device, what stands in for a CUDA graph, and the peak memory of a call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

#: Operators whose result the host reads, or whose shape depends on values, so that it waits for the device.
WAITING = frozenset(
    "_local_scalar_dense allclose bincount equal is_nonzero item masked_select nonzero unique_dim _unique2".split()  # noqa: SIM905 - a list
)


def waits(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ANN401
    """Say whether the host waits for an operator, given its arguments by position and by name, if they lie on a GPU."""
    name = operator.overloadpacket.__name__
    indices = args[1] if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    masked = any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in indices)
    # A mask that takes one number of the host is filled, which needs no count of its elements.
    filled = name.startswith("index_put") and args[2].numel() == 1 and args[2].device.type == "cpu"
    counted = name == "repeat_interleave" and kwargs.get("output_size") is None and not str(operator).endswith("_int")
    return name in WAITING or (masked and not filled) or counted


def line_of(package: str) -> str:
    """Return the innermost line of a package that is running, as "file.py:12 function"; empty if none is."""
    part = f"{os.sep}{package}{os.sep}"
    frame = inspect.currentframe()
    while frame and part not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}" if frame else ""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, calls note(operator, args, kwargs, result) after each operator, those of backward too."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...], dict[str, Any], object], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note = note

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled here, and the default imports torch._dynamo
        return False

    def __torch_dispatch__(self, operator: Any, _types: object, args: Any = (), kwargs: Any = None) -> object:  # noqa: ANN401
        result = operator(*args, **(kwargs or {}))
        self.note(operator, args, kwargs or {}, result)
        return result


def watching(note: Callable[[Any, tuple[Any, ...], object], None]) -> Watch:
    """Return what calls note(operator, arguments, result) while it is entered, whether arguments have names or not."""
    return Watch(lambda operator, args, kwargs, result: note(operator, (*args, *kwargs.values()), result))


@contextlib.contextmanager
def host_waits(device: str, package: str = "") -> Iterator[list[str]]:
    """Collect what makes the host wait for the device.

    On "cuda" these are the messages of PyTorch's sync debug mode, or the innermost lines of a package, as `line_of`. On
    "cpu" these are operators, as if all tensors were those of a GPU; what passes in `unseen()` is not looked at.
    """
    seen: list[str] = []

    def show(message: object, *_: object, **__: object) -> None:
        if "called a synchronizing" in str(message) and (line := line_of(package) if package else str(message)):
            seen.append(line)

    def note(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> None:  # noqa: ANN401
        # A tensor made from a number of the host is copied from pageable memory.
        if operator is torch.ops.aten.lift_fresh.default or waits(operator, args, kwargs):
            seen.append(str(operator))

    if device == "cpu":
        with Watch(note):
            yield seen
        return
    with warnings.catch_warnings(), mock.patch("warnings.showwarning", show):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Let what stands in for a kernel run without gradients, and unseen by dispatch modes."""
    with torch.no_grad(), _disable_current_modes():
        yield


class RecordedGraph(Watch):  # type: ignore[no-untyped-call]
    """A CUDA graph where there is no GPU.

    Attributes:
        steps: the operators that are called while it is entered; a replay calls each again, in the memory that it used.

    """

    def __init__(self) -> None:
        super().__init__(lambda *call: self.steps.append(functools.partial(_call_again, *call)))
        self.steps: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Call the operators again."""
        for step in self.steps:
            step()


def _call_again(operator: Any, args: Any, kwargs: Any, before: object) -> None:  # noqa: ANN401
    with unseen():
        after = operator(*args, **kwargs)
        for work in tree_leaves(after):
            if hasattr(work, "wait"):  # for other ranks
                work.wait()
        for old, new in zip(buffers(before), buffers(after), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


def buffers(values: object) -> list[torch.Tensor]:
    """Return the tensors that hold values: those inside of a quantized tensor, and a plain one itself."""
    tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    return [y for x in tensors for y in [z for z in vars(x).values() if isinstance(z, torch.Tensor)] or [x]]


def peak_memory(call: Callable[[], Any]) -> int:
    """Return the bytes of GPU memory that a call needs at most, beyond what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
