"""What makes a host wait for a GPU is told from what does not, by operators on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
import torch

capture = pytest.importorskip("kit.capture")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda x: x.repeat_interleave(2), False),
        (lambda x: x.repeat_interleave(torch.full_like(x, 2).long()), True),
        (lambda x: x.repeat_interleave(torch.full_like(x, 2).long(), output_size=6), False),
        (lambda x: x[x > 0], True),
        (lambda x: x.masked_fill(x > 0, 1), False),
        (lambda x: x.sum().item(), True),
        (lambda _: torch.tensor([1.0]), True),
        (lambda _: torch.full((1,), 1.0), False),
    ],
)
def test_host_waits_for_values_and_for_sizes_that_depend_on_them(
    mode: Callable[[], torch.no_grad], call: Callable[[torch.Tensor], object], *, waits: bool
) -> None:
    x = torch.ones(3)
    with mode(), capture.host_waits("cpu") as seen:
        call(x)
    assert bool(seen) == waits, seen
