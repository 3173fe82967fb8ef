"""What PyTorch lets a caller do with a loss: hooks on what it saves, changes in place, graphs that are freed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kit.interpreter import called_from_interpreter

Result = TypeVar("Result")

#: What PyTorch says of a saved tensor that was changed in place before backward.
CHANGED_IN_PLACE = "modified by an inplace operation"


def unless_refused(call: Callable[[], Result], *messages: str) -> Result | None:
    """Return what `call` returns, or None where it raises a RuntimeError with one of these texts."""
    try:
        return call()
    except RuntimeError as error:
        if not any(message in str(error) for message in messages):
            raise
        return None


def copies_of_saved(*, at_each_use: bool = False) -> saved_tensors_hooks:
    """Return hooks that copy what is saved, and again whenever backward asks for it, as offloading does."""
    return saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x.clone() if at_each_use else x)


@contextmanager
def offloaded() -> Iterator[list[int]]:
    """Keep what is saved on the CPU; yield how often backward asked for each saved tensor, in the order of saving."""
    asked: list[int] = []

    def pack(saved: torch.Tensor) -> tuple[int, torch.device, torch.Tensor]:
        asked.append(0)
        return len(asked) - 1, saved.device, saved.cpu()

    def unpack(packed: tuple[int, torch.device, torch.Tensor]) -> torch.Tensor:
        number, device, copy = packed
        asked[number] += 1
        return copy.to(device)

    with saved_tensors_hooks(pack, unpack):
        yield asked


@contextmanager
def saved_sizes() -> Iterator[list[int]]:
    """Yield the bytes of each tensor that is saved for backward."""
    sizes: list[int] = []
    with saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):  # type: ignore[func-returns-value]
        yield sizes


def weak_storages(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return what `kept_alive` needs of tensors whose other references are then deleted."""
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]


def kept_alive(storages: Sequence[Any], seconds: float = 10.0) -> int:
    """Return how many of these storages somebody still holds, after at most this time."""
    gc.collect()  # Triton's interpreter keeps the arguments of a launch in a cycle of references
    end = time.monotonic() + seconds  # on a GPU, the thread that ran the backward may lag behind this one
    while not all(storage.expired() for storage in storages) and time.monotonic() < end:
        time.sleep(0.01)
    return sum(not storage.expired() for storage in storages)


class NewTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, counts the bytes of the tensors that operators allocate: `total`, and `largest` of one.

    Views are left out, and so is what Triton's interpreter copies to the host and back, which no GPU does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.largest = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in inputs:
                size = 0 if called_from_interpreter() else x.nbytes
                self.total, self.largest = self.total + size, max(self.largest, size)
        return results
