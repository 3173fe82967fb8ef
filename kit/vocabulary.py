# ruff: noqa: S101 - contracts assert through these
"""What contracts of vocabulary-parallel cross entropies share: tests that run on ranks, and what is watched there."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from kit import current_target
from kit.autograd import weak_storages
from kit.ranks import Rank, RankGroup


def on_ranks(job: Callable[..., None]) -> Callable[..., None]:
    """Make a test of a function that asserts on every rank.

    The fixture `up` is a group of ranks. There, the argument `up` is what the setup of the group returned.
    """

    @functools.wraps(job)
    def test(up: RankGroup, **parameters: object) -> None:
        up.run(perform, test, parameters)

    return test


def perform(context: Any, test: Callable[..., Any], parameters: dict[str, Any]) -> object:  # noqa: ANN401
    """Run a test of `on_ranks`, or another function of the contract, on this rank.

    A case with more ranks than there are is not judged. First, context.enter(case) is called; there may be no case.
    """
    case = parameters.get("case")
    if case and case.world > context.count:
        pytest.skip(f"needs {case.world} GPUs")
    context.enter(case)
    return inspect.unwrap(test)(context, **parameters)


@contextlib.contextmanager
def counted_ranks(setup: Callable[[Rank], Any], figure: Callable[..., None]) -> Iterator[RankGroup]:
    """Give one rank for each GPU, 1, 2 or 4, or four on the CPU; record in how many of its jobs upstream raises."""
    target = current_target()
    count = max(size for size in (1, 2, 4) if size <= torch.cuda.device_count()) if target.executed else 4
    with RankGroup(count, setup, device=target.device) as group:
        yield group
    figure("defect_checks_that_raise", group.raised)


def gathered(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:  # noqa: ANN401 - a ProcessGroup
    """Return what each rank of a group has."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.detach().contiguous(), group=group)
    return parts


def exact_losses(
    inputs: Sequence[torch.Tensor], reduction: str, ignore_index: int, *, gradients: bool = True
) -> SimpleNamespace:
    """Return loss, logits, and unless there are none towards_hidden and towards_weight, in float64.

    `inputs` are whole hidden states and weight, labels and the gradient from above.
    """
    hidden, weight, labels, above = inputs
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = leaves[0].flatten(0, -2) @ leaves[1].t()
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction=reduction, ignore_index=ignore_index)
    exact = SimpleNamespace(loss=loss.detach(), logits=logits.detach())
    if gradients:
        exact.towards_hidden, exact.towards_weight = torch.autograd.grad(loss, leaves, above.double())
    return exact


def tensors_in(values: object) -> list[torch.Tensor]:
    """Return the tensors anywhere in what an operator is given or returns."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Storages:
    """The memory that operators made, which may be freed since."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, int, torch.Size]] = {}

    def note(self, _operator: object, arguments: object, result: object) -> None:
        """Take down what an operator made, and neither views of its arguments nor what it wrote into."""
        old = {storage.cdata for storage in weak_storages(tensors_in(arguments))}
        tensors = tensors_in(result)
        for tensor, storage in zip(tensors, weak_storages(tensors), strict=True):
            if storage.cdata not in old:
                self.made[storage.cdata] = (storage, tensor.untyped_storage().nbytes(), tensor.shape)

    def living(self, *expected: torch.Tensor, seconds: float = 0.0) -> list[tuple[int, list[int]]]:
        """Return bytes and shape of each that lives on after `seconds` and is none of these tensors'.

        A thread of a process group may let go of what it has sent a moment later.
        """
        own = {storage.cdata for storage in weak_storages(expected)}
        others = [memory for key, memory in self.made.items() if key not in own]
        until = time.monotonic() + seconds
        while not all(reference.expired() for reference, _, _ in others) and time.monotonic() < until:
            time.sleep(0.01)
        return [(size, list(shape)) for reference, size, shape in others if not reference.expired()]


class Handed:
    """What the code under test was handed, and has to leave as it was: shape, strides, values and version."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, torch.Tensor, torch.Tensor, tuple[Any, ...]]] = []

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a tensor in mind, as it is now."""
        self._kept.append((name, tensor, tensor.detach().clone(), _layout_and_version(tensor)))

    def assert_unaltered(self) -> None:
        """Assert that all that is watched is as it was; autograd refuses a saved tensor of another version."""
        for name, tensor, values, before in self._kept:
            assert _layout_and_version(tensor) == before, f"it altered the layout or the version of {name}"
            assert tensor.equal(values), f"it altered {name}"


def _layout_and_version(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version  # noqa: SLF001 - PyTorch's documented name


def assert_close(
    tensor: torch.Tensor, reference: torch.Tensor, tolerance: float, what: str, least: float = 0.0
) -> None:
    """Assert that the norm of the difference is at most `tolerance` times the reference's, which counts as `least`.

    nan is right where the reference is nan, and nowhere else. Where the reference is zero, the norm itself is compared.
    """
    assert tensor.shape == reference.shape, f"{what}: shape {tuple(tensor.shape)}, not {tuple(reference.shape)}"
    assert torch.equal(tensor.isnan(), reference.isnan()), f"{what}: nan where a number is right, or the reverse"
    numbers, exact = (x.detach().double().where(~x.isnan(), 0.0) for x in (tensor, reference))
    error = float((numbers - exact).norm()) / (max(float(exact.norm()), least) or 1.0)
    assert error <= tolerance, f"{what}: relative error {error:.2e}, tolerance {tolerance:.2e}"


def assert_same(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], what: str) -> None:
    """Assert that tensors have the same bits, one by one; nan is nan."""
    exactly: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
    torch.testing.assert_close(tensors, others, **exactly, msg=lambda text: f"other bits: {what}: {text}")
