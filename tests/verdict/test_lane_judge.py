"""What bad probes and bad patches give: the right verdict, a reason, and nothing left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.workbench import Workbench

PROBES = {
    "13_prints_both_verdicts": "2 verdict lines: BUG_REPRODUCED, FIX_VALIDATED",
    "14_prints_no_verdict": "no verdict line",
    "15_contradicts_its_status": "the exit status is 0, not 10",
    "16_writes_after_its_verdict": "output after the verdict: 'one more thing'",
    "17_segfaults": "killed by SIGSEGV",
    "18_killed_for_memory": "killed by SIGKILL (as the out-of-memory killer does)",
    "19_exits_at_once": "no verdict line",
    "24_imports_from_elsewhere": "loaded from outside the lane's tree",
    "26_raises": "no verdict line",
    "27_claims_without_checks": "its checks imply UNSUPPORTED",
    "29_states_another_hash": "has another hash",
    "31_states_bitwise_itself": "(BITWISE_IDENTICAL): it is the runner's to state",
    "34_malformed_line": "line 3 (CHECK): not JSON",
    "35_judges_another_target": "it judged sm_90a (traced), requested was cpu (traced)",
}


@pytest.mark.parametrize(("behaviour", "reason"), PROBES.items())
def test_a_broken_probe_is_an_error_and_never_the_bug(workbench: Workbench, behaviour: str, reason: str) -> None:
    workbench.lay(behaviour)
    status, (row,) = workbench.rows()
    assert (status, row["verdict"]) == (1, "ERROR")
    assert reason in row["reason"]


def test_a_patched_file_that_was_never_loaded_is_an_error(workbench: Workbench) -> None:
    workbench.lay("28_never_loads_the_patched_file")
    _, (row,) = workbench.rows()
    assert (row["pristine"], row["patched"], row["verdict"]) == ("BUG_REPRODUCED", "ERROR", "ERROR")
    assert "src/toykernel/scale.py was never loaded" in row["reason"]


def test_nan_is_wrong_and_its_receipt_is_json(workbench: Workbench) -> None:
    workbench.lay("33_measures_nan")
    _, (row,) = workbench.rows()
    assert row["verdict"] == "CONFIRMED"
    assert '"NaN"' in Path(row["receipt"]).read_text()
