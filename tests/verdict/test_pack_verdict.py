"""The verdict on a pack, from its two lanes."""

from __future__ import annotations

import pytest

from testing.workbench import Workbench

VERDICTS = {
    "01_confirmed": "CONFIRMED",
    "03_fix_ineffective": "FIX_INEFFECTIVE",
    "04_patch_breaks_a_control": "PATCH_BREAKS",
    "05_patch_changes_an_output": "PATCH_BREAKS",
    "23_prints_bytes": "FIX_INEFFECTIVE",
    "30_control_fails": "CONTROL_FAILED",
}


@pytest.mark.parametrize(("behaviour", "verdict"), VERDICTS.items())
def test_two_lanes_give_the_verdict_of_the_table(workbench: Workbench, behaviour: str, verdict: str) -> None:
    workbench.lay(behaviour)
    status, (row,) = workbench.rows()
    assert row["verdict"] == verdict
    assert status == (0 if verdict == "CONFIRMED" else 1)


def test_a_missing_dependency_is_unsupported(workbench: Workbench) -> None:
    workbench.lay("25_lacks_a_dependency")
    status, (row,) = workbench.rows()
    assert (status, row["verdict"]) == (5, "UNSUPPORTED")
    assert "a_package_that_nobody_has" in row["reason"]


def test_a_refusal_beside_a_verdict_is_noticed(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    workbench.lay("25_lacks_a_dependency")
    status, rows = workbench.rows()
    assert [row["verdict"] for row in rows] == ["CONFIRMED", "UNSUPPORTED"]
    assert status == 1


def test_runs_that_differ_are_no_verdict(workbench: Workbench) -> None:
    workbench.lay("36_flaky")
    status, (row,) = workbench.rows("--lane", "unpatched", "--repeat", "3")
    assert (status, row["verdict"]) == (1, "ERROR")
    assert row["reason"] == "the runs differ: FIXED_UPSTREAM 1/3, REPRODUCED 2/3"


def test_single_lanes(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    assert workbench.rows("--lane", "unpatched")[1][0]["verdict"] == "REPRODUCED"
    assert workbench.rows("--lane", "patched")[1][0]["verdict"] == "VALIDATED"
