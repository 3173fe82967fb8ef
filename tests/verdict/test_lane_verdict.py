"""What bad scripts and bad contracts give: the right verdict, a reason, and nothing left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.workbench import Workbench

NO_SENTINEL = "the last line of the script is no sentinel"
BROKEN = {
    "13_contract_misses_the_bug": "the contract misses the bug",
    "14_prints_no_verdict": NO_SENTINEL,
    "15_contradicts_its_status": "the script says BUG_REPRODUCED, its exit status is 0, not 10",
    "16_writes_after_its_verdict": NO_SENTINEL,
    "17_segfaults": "killed by SIGSEGV",
    "24_imports_from_elsewhere": "loaded from outside the lane's tree",
    "26_raises": f"{NO_SENTINEL} (RuntimeError: a surprise)",
    "29_states_another_hash": "has another hash",
    "31_claims_what_the_runner_states": "the contract claims BITWISE_IDENTICAL, which is the runner's to state",
    "34_results_are_cut_short": "of the contract's results: not JSON",
    "35_judges_another_target": "it judged sm_90a (traced), requested was cpu (traced)",
    "52_has_an_unmarked_test": "pytest said 4 and ended with exit status 4",
    "53_has_a_doubled_name": "the contract has two tests named test_ones",
}


@pytest.mark.hostile("scripts and contracts")
@pytest.mark.parametrize(("behaviour", "reason"), BROKEN.items())
def test_a_broken_script_or_contract_is_an_error_and_never_the_bug(
    workbench: Workbench, behaviour: str, reason: str
) -> None:
    workbench.lay(behaviour)
    status, (row,) = workbench.rows()
    assert (status, row["verdict"]) == (1, "ERROR")
    assert reason in row["reason"]


def test_an_exception_is_named_after_the_rank_that_torch_puts_before_it(workbench: Workbench) -> None:
    script = workbench.lay("26_raises") / "reproduce.py"
    hook = "import sys\nsys.excepthook = lambda *_: print('[rank0]: TypeError: two', file=sys.stderr)\n"
    script.write_text(hook + script.read_text())
    _, (row,) = workbench.rows()
    assert f"{NO_SENTINEL} (TypeError: two)" in row["reason"]


def test_a_script_that_misses_the_bug_is_no_fix(workbench: Workbench) -> None:
    workbench.lay("27_script_misses_the_bug")
    status, (row,) = workbench.rows()
    assert (status, row["pristine"], row["verdict"]) == (1, "FIX_INCOMPLETE", "FIX_INCOMPLETE")
    assert row["reason"] == "test_weights"


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
