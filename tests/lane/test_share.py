"""A lane's share of the host's GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.core.words import Evidence
from harness.lane import lane
from harness.lane.cell import Cell
from harness.lane.environment import Share
from harness.lane.lane import Lane
from testing import laid_out


def test_a_wrong_fix_waits_for_no_gpu_to_be_its_own(toy: Cell) -> None:
    gate, nothing = Path("/gate"), laid_out.nothing("1.0")
    cell = replace(toy, evidence=Evidence.EXECUTED)
    right = Lane(
        cell=cell,
        tree=nothing.pristine,
        is_patched=True,
        dependency_set=nothing.dependency_set,
        dependencies=nothing.dependencies,
        must_load=(),
        recorded=(),
        timeout=1.0,
        locks=(Path("/lock"),),
        share=Share(visible="0"),
    )
    wrong = replace(right, cell=replace(cell, is_wrong_fix=True))
    assert lane.share_of(right, gate) == Share(visible="0", gate=gate)
    assert lane.share_of(wrong, gate) == Share(visible="0")
    assert lane.share_of(replace(right, locks=()), gate).gate is None, "nobody else uses its GPU"
    assert lane.share_of(replace(right, cell=replace(cell, evidence=Evidence.TRACED)), gate) == Share(visible="")
