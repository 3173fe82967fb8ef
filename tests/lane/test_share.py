"""A lane's share of the host's GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.core.words import Evidence
from harness.lane import lane
from harness.lane.environment import Share
from harness.lane.lane import Lane
from harness.pack.model import Pack
from harness.upstream.dependencies import DependencySet
from testing import laid_out


def test_a_wrong_fix_waits_for_no_gpu_to_be_its_own() -> None:
    gate, nothing = Path("/gate"), laid_out.nothing("1.0")
    right = Lane(
        pack=Pack(Path(), None),  # type: ignore[arg-type] - nobody asks for what it states
        tree=nothing.pristine,
        dependency_set=DependencySet("default", ()),
        dependencies=nothing.dependencies,
        target="sm_90a",
        evidence=Evidence.EXECUTED,
        must_load=(),
        recorded=(),
        timeout=1.0,
        locks=(Path("/lock"),),
        share=Share(visible="0"),
    )
    wrong = replace(right, is_wrong_fix=True)
    assert lane.share_of(right, gate) == Share(visible="0", gate=gate)
    assert lane.share_of(wrong, gate) == Share(visible="0")
    assert lane.share_of(replace(right, locks=()), gate).gate is None, "nobody else uses its GPU"
    assert lane.share_of(replace(wrong, evidence=Evidence.TRACED), gate) == Share(visible="")
