"""Pack 01: its tracer tells what a GPU's host waits for from what it does not, and its cases cover every pair."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from testing.workbench import REPOSITORY

PROBE = REPOSITORY / "packs/01_dsa_cuda_graph/reproduce.py"
WAITS = (
    "torch.tensor(2.0, device=gpu)",
    "torch.as_tensor([1, 2], device=gpu)",
    "torch.tensor(2.0).to(gpu)",
    "torch.ones(3).to(gpu, non_blocking=True)",
    "torch.tensor([1.0], pin_memory=True).to(gpu)",
    "torch.ones(3).pin_memory().cuda()",
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
    "torch.ones(3).pin_memory().to(gpu, non_blocking=True)",
    "x.copy_(torch.ones(3).pin_memory(), non_blocking=True)",
    "torch.tensor([1, 2]).tolist()",
    "torch.ones(3).sum().item()",
    "torch.where(x > 0, x, 0).index_select(0, torch.zeros(2, dtype=torch.int64, device=gpu))",
    "x.repeat_interleave(torch.ones_like(x).long(), output_size=3)",
)


@pytest.fixture(scope="module")
def probe() -> Iterator[ModuleType]:
    """Import the probe as a module; it loads nothing of upstream by that."""
    spec = importlib.util.spec_from_file_location("pack01_probe", PROBE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def lines_that_wait(probe: ModuleType, folder: Path, expression: str) -> list[str]:
    """Evaluate an expression in a file of upstream's name, on the counterfeit GPU; return where that waits."""
    torch = pytest.importorskip("torch")
    file = folder / "megatron/upstream.py"
    file.parent.mkdir()
    file.write_text(f"def call(torch, x, gpu):\n    return {expression}\n", encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(encoding="utf-8"), file, "exec"), names)  # noqa: S102 - it has to have that file's name
    with probe.counterfeit(torch) as cheat:
        x = torch.ones(3).to("cuda:0", copy=True)
        assert x.is_cuda
        cheat.events.clear()
        names["call"](torch, x, torch.device("cuda:0"))
        return list(cheat.events)


@pytest.mark.parametrize("expression", WAITS)
def test_what_a_host_waits_for_is_noted(probe: ModuleType, tmp_path: Path, expression: str) -> None:
    assert "upstream.py:2 call" in lines_that_wait(probe, tmp_path, expression)


@pytest.mark.parametrize("expression", GOES_ON)
def test_what_no_host_waits_for_is_not_noted(probe: ModuleType, tmp_path: Path, expression: str) -> None:
    assert lines_that_wait(probe, tmp_path, expression) == []


def test_every_pair_of_values_is_covered(probe: ModuleType) -> None:
    values = list(probe.FACTORS.values())
    for one, two in itertools.combinations(range(len(values)), 2):
        found = {(case[one], case[two]) for case in probe.CASES}
        assert found == set(itertools.product(values[one], values[two]))
