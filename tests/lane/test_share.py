"""Which lanes may ask for the host's GPUs alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.lane.cell import Cell
from harness.lane.environment import Share
from harness.lane.lane import Lane
from testing import laid_out


def test_a_wrong_fix_waits_for_no_gpu_to_be_its_own(toy: Cell) -> None:
    nothing = laid_out.nothing("1.0")
    sets = nothing.dependency_set, nothing.dependencies
    right = Lane(toy, nothing.pristine, *sets, (), (), 1.0, Share(1, 1, "0"), (Path("/lock"),))
    assert right.has_gate
    assert not replace(right, cell=replace(toy, is_wrong_fix=True)).has_gate
    assert not replace(right, locks=()).has_gate, "nobody else uses its GPU"
