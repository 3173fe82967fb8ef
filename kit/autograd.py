"""Manners of autograd: what PyTorch lets a caller do with a loss, and what a differentiable function owes him.

Its gradients are right in every way of `backward`. What it saves goes through hooks, once a backward. A change in place
is refused or makes no difference. A freed graph keeps nothing alive.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kit.interpreter import called_from_interpreter

Result = TypeVar("Result")
Gradients = Sequence[torch.Tensor | None]

#: What PyTorch says of a saved tensor that was changed in place before backward.
CHANGED_IN_PLACE = "modified by an inplace operation"
#: What PyTorch says of a second backward through a graph that was not retained.
GRAPH_FREED = "backward through the graph a second time"
#: What PyTorch says of second-order gradients that a function does not have.
NO_SECOND_ORDER = ("does not require grad", "once_differentiable")

#: How `backward` goes backward; each but the first two uses the graph more than once.
WAYS = ("once", "retained once", "twice", "freed by the last", "each alone", "summed", "written into")


def unless_refused(call: Callable[[], Result], *messages: str) -> Result | None:
    """Return what `call` returns, or None where it raises a RuntimeError with one of these texts."""
    try:
        return call()
    except RuntimeError as error:
        if not any(message in str(error) for message in messages):
            raise
        return None


def backward(
    loss: torch.Tensor, leaves: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], way: str
) -> list[tuple[torch.Tensor, Gradients]]:
    """Go backward in one of WAYS, with incoming gradients of the loss's shape.

    "once", "retained once" and "each alone", one leaf at a time, use the first of them. "twice" uses all and retains
    the graph to the end; "freed by the last" does not. "summed" accumulates the first and the last in the leaves'
    `grad`. "written into" sets the first results to 0 before the last backward.

    Returns pairs of an incoming gradient and the leaves' gradients that belong to it, None where a leaf has none.
    """

    def grad(gradient: torch.Tensor, *, retain: bool, of: Sequence[torch.Tensor] = leaves) -> Gradients:
        return torch.autograd.grad(loss, of, gradient, retain_graph=retain, allow_unused=True)

    first, last = incoming[0], incoming[-1]
    if way in ("once", "retained once"):
        return [(first, grad(first, retain=way == "retained once"))]
    if way in ("twice", "freed by the last"):
        retained = [(each, grad(each, retain=True)) for each in incoming[:-1]]
        return [*retained, (last, grad(last, retain=way == "twice"))]
    if way == "each alone":
        return [(first, [grad(first, retain=True, of=[leaf])[0] for leaf in leaves])]
    if way == "summed":
        for each, retain in ((first, True), (last, False)):
            torch.autograd.backward(loss, each, retain_graph=retain)
        return [(first.double() + last.double(), [leaf.grad for leaf in leaves])]
    if way == "written into":
        for gradient in grad(first, retain=True):
            if gradient is not None:
                gradient.zero_()
        return [(last, grad(last, retain=False))]
    raise ValueError(f"{way!r} is none of {', '.join(WAYS)}")


def backward_into_leaves(
    loss: torch.Tensor, leaves: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, Gradients]]:
    """Do what `backward` does "freed by the last", by way of `grad`: a reentrant checkpoint refuses autograd.grad."""
    found: list[tuple[torch.Tensor, Gradients]] = []
    for number, each in enumerate(incoming, 1):
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(loss, each, retain_graph=number < len(incoming))
        found.append((each, [leaf.grad for leaf in leaves]))
    return found


def copies_of_saved(*, at_each_use: bool = False) -> saved_tensors_hooks:
    """Return hooks that copy what is saved, and again whenever backward asks for it, as offloading does."""
    return saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x.clone() if at_each_use else x)


@contextmanager
def offloaded() -> Iterator[list[int]]:
    """Keep what is saved on the CPU; yield how often backward asked for each saved tensor, in the order of saving."""
    asked: list[int] = []
    on_cpu: Any = save_on_cpu()

    def pack(saved: torch.Tensor) -> tuple[int, Any]:
        asked.append(0)
        return len(asked) - 1, on_cpu.pack_hook(saved)

    def unpack(packed: tuple[int, Any]) -> Any:  # noqa: ANN401 - of PyTorch's own hook
        asked[packed[0]] += 1
        return on_cpu.unpack_hook(packed[1])

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
    until = time.monotonic() + seconds  # on a GPU, the thread that ran the backward may lag behind this one
    while not all(storage.expired() for storage in storages) and time.monotonic() < until:
        time.sleep(0.01)
    return sum(not storage.expired() for storage in storages)


class NewTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, counts the bytes of the tensors that operators allocate: `total`, and `largest` of one.

    Views are left out, and so is what Triton's interpreter copies to the host and back, which no GPU does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        del types
        kwargs = kwargs or {}
        old = {x.untyped_storage().data_ptr() for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)}
        found = function(*args, **kwargs)
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in old:
                size = 0 if called_from_interpreter() else x.nbytes
                self.total, self.largest = self.total + size, max(self.largest, size)
        return found
