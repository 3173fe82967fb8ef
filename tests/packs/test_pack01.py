"""Pack 01: the pretended GPU tells what a host waits for from what it does not."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

WAITS = (
    "torch.tensor(2.0, device=gpu)",
    "torch.as_tensor([1, 2], device=gpu)",
    "torch.tensor(2.0).to(gpu)",
    "torch.ones(3).to(gpu, non_blocking=True)",
    "torch.tensor([1.0], pin_memory=True).to(gpu)",
    "x.copy_(torch.ones(3))",
    "x.new_tensor([1.0])",
    "x.cpu()",
    "x.to('cpu')",
    "x.tolist()",
    "x[0].item()",
    "bool(torch.any(x > 0))",
    "x[x > 0]",
    "x.nonzero()",
    "x[torch.tensor([0, 1])]",
    "x.repeat_interleave(torch.ones_like(x).long())",
)
GOES_ON = (
    "torch.full((), 2.0, device=gpu)",
    "torch.arange(3, device=gpu) * 2",
    "torch.tensor([1.0], pin_memory=True).cuda(non_blocking=True)",
    "torch.tensor([1, 2]).tolist()",
    "torch.ones(3).sum().item()",
    "torch.where(x > 0, x, 0).index_select(0, torch.zeros(2, dtype=torch.int64, device=gpu))",
    "x.repeat_interleave(torch.ones_like(x).long(), output_size=3)",
)


def lines_that_wait(folder: Path, expression: str) -> list[str]:
    """Evaluate an expression in a file of upstream's name, on the pretended GPU; return where that waits."""
    torch = pytest.importorskip("torch")
    pretended_gpu = importlib.import_module("kit.pretended_gpu").pretended_gpu
    file = folder / "megatron/upstream.py"
    file.parent.mkdir()
    file.write_text(f"def call(torch, x, gpu):\n    return {expression}\n", encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(encoding="utf-8"), file, "exec"), names)  # noqa: S102 - it has to have that file's name
    with pretended_gpu("megatron") as gpu:
        x = torch.ones(3).to("cuda:0", copy=True)
        assert x.is_cuda
        gpu.events.clear()
        names["call"](torch, x, torch.device("cuda:0"))
        return list(gpu.events)


@pytest.mark.parametrize("expression", WAITS)
def test_what_a_host_waits_for_is_noted(tmp_path: Path, expression: str) -> None:
    assert "upstream.py:2 call" in lines_that_wait(tmp_path, expression)


@pytest.mark.parametrize("expression", GOES_ON)
def test_what_no_host_waits_for_is_not_noted(tmp_path: Path, expression: str) -> None:
    assert lines_that_wait(tmp_path, expression) == []
