"""CPU tensors that say they are on a GPU, so that code takes its CUDA branches; where a GPU's host would wait is noted.

with pretended_gpu("megatron") as gpu:
    x = tensor.to("cuda:0", copy=True)      # gpu.events: the lines of that package at which the host would wait
    with gpu.capture() as replay:           # a captured graph is the list of its operators ...
        y = step(x)
    x.copy_(other)
    replay()                                # ... and a replay runs these again in the same memory
"""
# ruff: noqa: ANN401, SLF001 - an operator takes anything; the name of a tensor's memory is not public

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from kit.capture import line_of, waits


class PretendedGpu:
    """One GPU, cuda:0, on which all tensors lie that are not known to lie on the host.

    Attributes:
        device: what these tensors say of themselves.
        events: the lines at which the host would wait, as "file.py:12 function".

    """

    def __init__(self, package: str) -> None:
        self.device, self.events = torch.device("cuda:0"), list[str]()
        self._package = package
        self._host: dict[int, Any] = {}  # what holds the values of host tensors: kept, so that no address is used again
        self._pinned: set[int] = set()  # those of them in pinned memory
        self._tape: list[tuple[Any, ...]] | None = None  # while a graph is captured, its operators
        self._kind = _tensor_class(self)

    def note(self, found: Any) -> Any:
        """Note that the host waits for this, in the innermost line of the package that is running."""
        line = line_of(self._package)
        self.events += [line] if line else []
        return found

    def on_host(self, x: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
        """Put a tensor on the host; return it."""
        self._host[_memory(x)] = x.untyped_storage()
        self._pinned |= {_memory(x)} if pinned else set()
        return x

    def on_gpu(self, x: torch.Tensor) -> Any:
        """Put a tensor on the GPU; return it."""
        self._host.pop(_memory(x), None)
        return x.as_subclass(self._kind)

    def send(self, x: torch.Tensor, _device: object = None, non_blocking: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002 - as Tensor.cuda
        """Copy a tensor from the host to the GPU; only from pinned memory nobody has to wait for that."""
        if _memory(x) not in self._host:
            return x
        found: torch.Tensor = self.on_gpu(x.clone())
        _ = None if non_blocking and _memory(x) in self._pinned else self.note(found)
        return found

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on the CPU, and say of its results where they lie."""
        name, given = func.overloadpacket.__name__, _tensors((args, tuple(kwargs.values())))
        hosts = [x for x in given if _memory(x) in self._host]
        # The backward of PyTorch's own operators knows these tensors for what they are, and names the CPU.
        on_gpu = len(hosts) < len(given) or "cuda" in str(kwargs.get("device"))
        kwargs |= {"device": "cpu"} if kwargs.get("device") is not None else {}
        pinned = kwargs.pop("pin_memory", False)
        found = func(*args, **kwargs)
        if on_gpu and self._tape is not None and not _ends_a_wait(func):
            self._tape.append((func, args, kwargs, found))
        if on_gpu and self._is_waited_for(name, args, kwargs, hosts):
            self.note(found)
        return _mapped(self.on_gpu if on_gpu else functools.partial(self.on_host, pinned=pinned), found)

    def _is_waited_for(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], hosts: list[Any]) -> bool:
        if name in {"copy_", "_to_copy"} and hosts:
            late = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])  # noqa: PLR2004
            return not (late and _memory(hosts[0]) in self._pinned)
        picked = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
        return waits(name, args, kwargs) or any(x is not None and _memory(x) in self._host for x in picked)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Callable[[], None]]:
        """Capture a graph; give the function that runs its operators again, in the memory that they used."""
        tape = self._tape = []
        try:
            yield functools.partial(self._replay, tape)
        finally:
            self._tape = None

    def _replay(self, tape: list[tuple[Any, ...]]) -> None:
        with torch.no_grad(), plainly():
            for func, args, kwargs, before in tape:
                try:
                    found = func(*args, **kwargs)
                except (IndexError, RuntimeError) as error:  # on a GPU, a device-side assertion
                    raise RuntimeError(f"captured {func} fails in a replay: {type(error).__name__}: {error}") from error
                for work in found if isinstance(found, tuple) else ():
                    _ = work.wait() if hasattr(work, "wait") else None  # for other ranks
                for old, new in zip(_tensors([before]), _tensors([found]), strict=True):
                    _ = None if old.data_ptr() == new.data_ptr() else old.copy_(new)

    def maker(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return what replaces a function that makes tensors of literals: on the host first."""

        def made(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            if isinstance(data, torch.Tensor):
                found = data.to(*args, **kwargs) if args or kwargs else data
            else:
                found = self.on_host(make(data, *args, **kwargs).as_subclass(torch.Tensor), pinned=pin_memory)
            return self.send(found) if "cuda" in str(device) else found

        return made

    def patches(self) -> dict[Any, dict[str, Any]]:
        """Return what torch.cuda, torch.Tensor and torch have instead."""
        cuda: dict[str, Any] = {
            "is_current_stream_capturing": lambda: self._tape is not None,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "current_device": lambda: self.device,
            "get_device_capability": lambda _=0: (9, 0),
        }
        methods: dict[str, Any] = {
            "cuda": lambda x, *args, **kwargs: self.send(x, *args, **kwargs),  # noqa: PLW0108 - a method gets no tensor
            "pin_memory": lambda x: self.on_host(x.clone(), pinned=True),
            "is_pinned": lambda x: _memory(x) in self._pinned,
        }
        makers = {name: self.maker(getattr(torch, name)) for name in ("tensor", "as_tensor", "asarray")}
        return {"torch.cuda": cuda, torch.Tensor: methods, "torch": makers}


@contextlib.contextmanager
def pretended_gpu(package: str) -> Iterator[PretendedGpu]:
    """Pretend a GPU; the lines that are noted are those of a package, such as "megatron"."""
    gpu = PretendedGpu(package)

    class Operators(importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            return gpu.operate(func, args, dict(kwargs or {}))

        @classmethod
        def _should_skip_dynamo(cls) -> bool:  # nothing is compiled here, and asking for every operator takes long
            return False

    (cuda, functions), (kind, methods), (module, makers) = gpu.patches().items()
    with mock.patch.multiple(cuda, **functions), mock.patch.multiple(kind, **methods), Operators():  # noqa: SIM117
        with mock.patch.multiple(module, **makers):  # last: a mode makes tensors itself
            yield gpu


def plainly() -> contextlib.AbstractContextManager[Any]:
    """Let what runs in this context pass unseen."""
    found: contextlib.AbstractContextManager[Any] = importlib.import_module(
        "torch.utils._python_dispatch"
    )._disable_current_modes()
    return found


def _memory(x: torch.Tensor) -> int:
    """Name what holds a tensor's values; views share it."""
    return int(x.untyped_storage()._cdata)


def _tensors(values: Any) -> list[Any]:
    found: list[Any] = []
    for x in values:
        found += [x] if isinstance(x, torch.Tensor) else _tensors(x) if isinstance(x, (list, tuple)) else []
    return found


def _mapped(put: Callable[[Any], Any], found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return put(found)
    return type(found)([_mapped(put, x) for x in found]) if isinstance(found, (list, tuple)) else found


def _ends_a_wait(func: Any) -> bool:
    """Say whether an operator ends the wait for other ranks; a replay waits itself."""
    frame: Any = inspect.currentframe()
    caller = frame.f_back.f_back.f_back  # of the mode through which the operator passed
    return bool(func.namespace != "c10d") and str(caller.f_code.co_filename).endswith("distributed_c10d.py")


def _tensor_class(gpu: PretendedGpu) -> Any:
    """Make the class of the tensors on a GPU."""

    class OnGpu(torch.Tensor):
        device, is_cuda = gpu.device, True
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # operate() makes it

        def tolist(self) -> Any:
            return gpu.note(super().tolist())

        def new_tensor(self, *args: Any, device: Any = None, **kwargs: Any) -> Any:  # noqa: ARG002 - there is one device
            return gpu.note(super().new_tensor(*args, **kwargs))

        def cpu(self, *_: Any) -> Any:
            return gpu.note(gpu.on_host(self.clone().as_subclass(torch.Tensor)))

        def cuda(self, *_: Any, **__: Any) -> Any:
            return self

        def to(self, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            wanted = [str(device), *map(str, args)]
            args = tuple(x for x in args if not isinstance(x, (str, torch.device)))
            found = super().to(*args, **kwargs) if args or kwargs else self
            return found.cpu() if "cpu" in wanted else found

    return OnGpu
