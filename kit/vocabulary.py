# ruff: noqa: S101 - contracts assert through these
"""What contracts of vocabulary-parallel cross entropies share: tests that run on ranks, and what is watched there."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kit import current_target
from kit.capture import host_waits as seen_by_pytorch
from kit.capture import waits
from kit.ranks import Rank, ranks

_weak: Any = StorageWeakRef  # without types
CPU_RANKS = 4
JOBS: dict[tuple[str, str], Callable[..., Any]] = {}


def on_ranks(job: Callable[..., None]) -> Callable[..., None]:
    """Make a test of a function that asserts on every rank.

    Its first argument is what the setup of the fixture `world`, a kit.ranks.RankGroup, returned there; the others are
    parameters of the test, or `case`. Where that object has a method `perform`, this calls the function.
    """

    def test(world: Any, **given: object) -> None:  # noqa: ANN401 - a RankGroup
        world.run(perform, job.__module__, job.__name__, given)

    JOBS[job.__module__, job.__name__] = job
    test.__name__, test.__qualname__, test.__module__, test.__doc__ = (
        job.__name__,
        job.__name__,
        job.__module__,
        job.__doc__,
    )
    own = list(inspect.signature(job).parameters.values())[1:]
    world = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = inspect.Signature([*own, world])  # type: ignore[attr-defined]
    return test


@contextlib.contextmanager
def counted_ranks(setup: Callable[[Rank], Any], figure: Callable[..., None]) -> Iterator[SimpleNamespace]:
    """Give `run` of one rank for each GPU, 1, 2 or 4, or of four on the CPU; record how many of its jobs raise."""
    target = current_target()
    raised: list[bool] = []
    count = max(size for size in (1, 2, 4) if size <= torch.cuda.device_count()) if target.executed else CPU_RANKS

    def run(*given: Any) -> list[Any]:  # noqa: ANN401
        try:
            return group.run(*given)
        except AssertionError as error:
            raised.append("it raised" in str(error))
            raise

    with ranks(count, setup, device=target.device) as group:
        yield SimpleNamespace(run=run)
    figure("defect_checks_that_raise", sum(raised))


def perform(context: Any, module: str, name: str, given: dict[str, Any]) -> object:  # noqa: ANN401
    """Run a job of `on_ranks`, or another function of the contract, on this rank."""
    job = JOBS.get((module, name)) or getattr(sys.modules[module], name)
    return context.perform(job, **given) if hasattr(context, "perform") else job(context, **given)


def tensors_in(given: object) -> list[torch.Tensor]:
    """Return the tensors anywhere in what an operator is given or returns."""
    return [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]


@contextlib.contextmanager
def watching(note: Callable[[Any, tuple[Any, ...], object], None]) -> Iterator[None]:
    """Call note(operator, arguments, result) after each operator, those of backward among them."""

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, operator: Any, _types: object, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            kwargs = kwargs or {}
            found = operator(*args, **kwargs)
            note(operator, (*args, *kwargs.values()), found)
            return found

    with Mode():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def host_waits(device: str) -> Iterator[list[str]]:
    """Collect what makes the host wait for the GPU, as kit.capture does; a mask that takes one number is filled."""
    if device == "cuda":
        with seen_by_pytorch(device) as seen:
            yield seen
        return
    seen = []

    def note(operator: Any, given: tuple[Any, ...], _found: object) -> None:  # noqa: ANN401 - of PyTorch
        name = operator.overloadpacket.__name__
        fills = name.startswith("index_put") and given[2].numel() == 1
        if not fills and waits(name, given, {}):
            seen.append(str(operator))

    with watching(note):
        yield seen


class Storages:
    """The memory that operators made, which may be freed since."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, int, torch.Size]] = {}

    def note(self, _operator: object, _arguments: object, found: object) -> None:
        """Take down the result of an operator; see `watching`."""
        for each in tensors_in(found):
            storage = each.untyped_storage()
            reference = _weak(storage)
            self.made[reference.cdata] = (reference, storage.nbytes(), each.shape)

    def note_new(self, operator: object, arguments: object, found: object) -> None:
        """Take down what an operator made, and neither views of its arguments nor what it wrote into."""
        given = {_weak(each.untyped_storage()).cdata for each in tensors_in(arguments)}
        new = [each for each in tensors_in(found) if _weak(each.untyped_storage()).cdata not in given]
        self.note(operator, arguments, new)

    def living(self, *expected: torch.Tensor, seconds: float = 0.0) -> list[tuple[int, list[int]]]:
        """Return bytes and shape of each that lives on after `seconds` and is none of these tensors'.

        A thread of a process group may let go of what it has sent a moment later.
        """
        own = {_weak(each.untyped_storage()).cdata for each in expected}
        others = [each for key, each in self.made.items() if key not in own]
        until = time.monotonic() + seconds
        while not all(each[0].expired() for each in others) and time.monotonic() < until:
            time.sleep(0.01)
        return [(size, list(shape)) for reference, size, shape in others if not reference.expired()]


class Handed:
    """What the code under test was handed, and has to leave as it was: shape, strides, values and version."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, torch.Tensor, tuple[Any, ...], torch.Tensor | None, int | None]] = []

    def watch(self, name: str, tensor: torch.Tensor, *, values: bool = False, version: bool = True) -> None:
        """Keep the layout of a tensor in mind, and on request its values and its version."""
        before = tensor.detach().clone() if values else None
        self._kept.append((name, tensor, _layout(tensor), before, _version(tensor) if version else None))

    def assert_unaltered(self) -> None:
        """Assert that all that is watched is as it was."""
        for name, tensor, layout, values, version in self._kept:
            assert _layout(tensor) == layout, f"it altered the layout of {name}"
            assert version in (None, _version(tensor)), f"it altered the version of {name}"
            assert values is None or tensor.equal(values), f"it altered {name}"


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was changed in place; autograd refuses a saved one whose number has changed."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - PyTorch's documented name


def function_node(loss: torch.Tensor) -> Any:  # noqa: ANN401 - a node of autograd
    """Return the node of the autograd function written in Python: the losses may be made from what it returns."""
    nodes: list[Any] = [loss.grad_fn]
    while not isinstance(nodes[-1], torch.autograd.function.BackwardCFunction):
        nodes += [each for each, _ in nodes.pop().next_functions if each is not None]
    return nodes[-1]


def assert_close(found: torch.Tensor, reference: torch.Tensor, tolerance: float, what: str, least: float = 0.0) -> None:
    """Assert that the norm of the difference is at most `tolerance` times the reference's, which counts as `least`.

    nan is right where the reference is nan, and nowhere else. Where the reference is zero, the norm itself is compared.
    """
    assert found.shape == reference.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(reference.shape)}"
    assert torch.equal(found.isnan(), reference.isnan()), f"{what}: nan where a number is right, or the reverse"
    exact = reference.double().nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    off = float((found.double().nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf) - exact).norm())
    error = off / (max(float(exact.norm()), least) or 1.0)
    assert error <= tolerance, f"{what}: relative error {error:.2e}, tolerance {tolerance:.2e}"


def assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
    """Assert that tensors have the same bits, one by one; nan is nan."""
    for one, other in zip(found, expected, strict=True):
        same = one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
        assert same, f"other bits: {what}"
