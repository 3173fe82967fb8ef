"""CPU tensors that say they are on a GPU, so that code takes its CUDA branches; where a GPU's host would wait is noted.

with pretended_gpu("megatron") as gpu:
    x = tensor.to("cuda:0", copy=True)      # gpu.events: the lines of that package at which the host would wait
    with gpu.capture() as replay:           # a captured graph is a kit.capture.RecordedGraph
        y = step(x)
    x.copy_(other)
    replay()
"""
# ruff: noqa: ANN401, SLF001 - an operator takes anything; the name of a tensor's memory is not public

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kit.capture import RecordedGraph, Watch, line_of, unseen, waits


class PretendedGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One GPU, cuda:0, on which all tensors lie that are not known to lie on the host.

    Attributes:
        device: what these tensors say of themselves.
        events: the lines at which the host would wait, as "file.py:12 function".
        graph: the graph that is captured, if one is.

    """

    _should_skip_dynamo = Watch._should_skip_dynamo

    def __init__(self, package: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.events = torch.device("cuda:0"), list[str]()
        self.graph: RecordedGraph | None = None
        self._package = package
        self._host: dict[int, Any] = {}  # what holds the values of host tensors: kept, so that no address is used again
        self._pinned: set[int] = set()  # those of them in pinned memory
        self._kind = _tensor_class(self)

    def note(self) -> None:
        """Note that the host waits, in the innermost line of the package that is running."""
        line = line_of(self._package)
        self.events += [line] if line else []

    def on_host(self, x: torch.Tensor) -> torch.Tensor:
        """Put a tensor on the host; return it."""
        self._host[_memory(x)] = x.untyped_storage()
        return x

    def on_gpu(self, x: torch.Tensor) -> torch.Tensor:
        """Put a tensor on the GPU; return it."""
        self._host.pop(_memory(x), None)
        return x.as_subclass(self._kind)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on the CPU, and say of its results where they lie."""
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        hosts = [x for x in tensors if _memory(x) in self._host]
        # The backward of PyTorch's own operators knows these tensors for what they are, and names the CPU.
        on_gpu = len(hosts) < len(tensors) or "cuda" in str(kwargs.get("device"))
        kwargs |= {"device": "cpu"} if kwargs.get("device") is not None else {}
        with self.graph if self.graph and on_gpu else contextlib.nullcontext():
            result = func(*args, **kwargs)
        is_late = kwargs.get("non_blocking") and all(_memory(x) in self._pinned for x in hosts)
        is_copied = hosts and func.name().startswith(("aten::copy_", "aten::_to_copy", "aten::index")) and not is_late
        if on_gpu and (is_copied or waits(func, args, kwargs)):
            self.note()
        return tree_map_only(torch.Tensor, self.on_gpu if on_gpu else self.on_host, result)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Callable[[], None]]:
        """Capture a graph; give the function that replays it."""
        self.graph = RecordedGraph()
        try:
            yield self.graph.replay
        finally:
            self.graph = None

    def literals(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return what replaces a function that makes tensors of literals: on the host first."""

        def made(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            x = make(data, *args, **kwargs)
            if not isinstance(data, torch.Tensor):
                x = self.on_host(x.as_subclass(torch.Tensor))
                self._pinned |= {_memory(x)} if pin_memory else set()
            return x.to(device) if "cuda" in str(device) else x

        return made


@contextlib.contextmanager
def pretended_gpu(package: str) -> Iterator[PretendedGpu]:
    """Pretend a GPU; the lines that are noted are those of a package, such as "megatron"."""
    gpu, wait = PretendedGpu(package), torch.distributed.Work.wait

    def wait_unseen(work: torch.distributed.Work, *args: Any) -> bool:
        with unseen():  # gloo copies its results here: a replay waits itself
            return wait(work, *args)

    def to_gpu(x: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        return x.to(gpu.device, non_blocking=non_blocking)

    cuda: dict[str, Any] = {
        "is_current_stream_capturing": lambda: gpu.graph is not None,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "current_device": lambda: gpu.device,
        "get_device_capability": lambda _=0: (9, 0),
    }
    makers: dict[str, Any] = {name: gpu.literals(getattr(torch, name)) for name in ("tensor", "as_tensor", "asarray")}
    with (
        mock.patch.multiple("torch.cuda", **cuda),
        mock.patch.object(torch.Tensor, "cuda", to_gpu),
        mock.patch.object(torch.distributed.Work, "wait", wait_unseen),
        gpu,
        mock.patch.multiple("torch", **makers),  # last: a mode makes tensors itself
    ):
        yield gpu


def _memory(x: torch.Tensor) -> int:
    """Name what holds a tensor's values; views share it."""
    return int(x.untyped_storage()._cdata)


def _tensor_class(gpu: PretendedGpu) -> type[torch.Tensor]:
    """Make the class of the tensors on a GPU."""

    class OnGpu(torch.Tensor):
        device, is_cuda = gpu.device, True
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # operators make it

        def tolist(self) -> Any:
            gpu.note()
            return super().tolist()

        def new_tensor(self, *args: Any, device: Any = None, **kwargs: Any) -> Any:  # noqa: ARG002 - there is one device
            gpu.note()
            return super().new_tensor(*args, **kwargs)

        def cpu(self, *_: Any) -> Any:
            gpu.note()
            return gpu.on_host(self.clone().as_subclass(torch.Tensor))

        def to(self, *args: Any, **kwargs: Any) -> Any:
            x = super().to(*args, **kwargs)
            return x.cpu() if "cpu" in map(str, (*args, *kwargs.values())) else x

    return OnGpu
