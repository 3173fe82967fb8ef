"""What bad probes and bad patches give: the right verdict, a reason, and nothing left over."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from conftest import Workbench

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
    "31_states_bitwise_itself": "BITWISE_IDENTICAL is the runner's to state",
    "34_malformed_line": "malformed line",
    "35_judges_another_target": "it judged sm_90a (traced), asked was cpu (traced)",
}
STALE = {
    "06_patch_needs_an_offset": "only with an offset",
    "07_patch_empty": "the patch is empty",
    "08_patch_reversed": "holds its changes already, or the patch is reversed",
    "09_patch_already_applied": "holds its changes already, or the patch is reversed",
    "10_patch_fuzzy": "patch failed: src/toykernel/scale.py",
    "11_patch_names_no_file_of_the_tree": "src/toykernel/scaling.py: No such file or directory",
    "12_patch_states_another_blob": "is not what the patch's index line says",
}
VERDICTS = {
    "01_confirmed": "CONFIRMED",
    "03_fix_ineffective": "FIX_INEFFECTIVE",
    "04_patch_breaks_a_control": "PATCH_BREAKS",
    "05_patch_changes_an_output": "PATCH_BREAKS",
    "23_prints_bytes": "FIX_INEFFECTIVE",
    "30_control_fails": "CONTROL_FAILED",
}


@pytest.mark.parametrize(("behaviour", "reason"), PROBES.items())
def test_a_broken_probe_is_an_error_and_never_the_bug(workbench: Workbench, behaviour: str, reason: str) -> None:
    workbench.lay(behaviour)
    status, (row,) = workbench.rows()
    assert (status, row["verdict"]) == (1, "ERROR")
    assert reason in row["reason"]


@pytest.mark.parametrize(("behaviour", "reason"), STALE.items())
def test_a_patch_that_does_not_fit_exactly_is_stale(workbench: Workbench, behaviour: str, reason: str) -> None:
    workbench.lay(behaviour)
    status, (row,) = workbench.rows()
    assert (status, row["pristine"], row["verdict"]) == (1, "BUG_REPRODUCED", "PATCH_STALE")
    assert reason in row["reason"]


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


def test_a_patched_file_that_was_never_loaded_is_an_error(workbench: Workbench) -> None:
    workbench.lay("28_never_loads_the_patched_file")
    _, (row,) = workbench.rows()
    assert (row["pristine"], row["patched"], row["verdict"]) == ("BUG_REPRODUCED", "ERROR", "ERROR")
    assert "src/toykernel/scale.py was never loaded" in row["reason"]


def test_a_silent_hang_is_timed_out(workbench: Workbench) -> None:
    workbench.lay("21_hangs_silently")
    status, (row,) = workbench.rows("--timeout", "1")
    assert (status, row["verdict"], row["reason"]) == (1, "ERROR", "timed out after 1 s")


def _living_probes(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in text for text in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_stubborn_grandchildren_neither_outlive_nor_hold_up_a_lane(workbench: Workbench) -> None:
    workbench.lay("20_leaves_stubborn_children")
    status, (row,) = workbench.rows("--lane", "pristine")
    assert (status, row["verdict"]) == (0, "REPRODUCED")
    assert not _living_probes(workbench.packs)


def test_500_megabytes_of_output_cost_neither_memory_nor_the_verdict(workbench: Workbench) -> None:
    workbench.lay("22_prints_500_megabytes")
    command = workbench.command("run", "--json", "--lane", "pristine")
    with psutil.Popen(command, stdout=-3, stderr=-3) as runner:
        peak = 0
        while runner.poll() is None:
            try:
                peak = max(peak, runner.memory_info().rss)
                runner.wait(0.02)
            except psutil.Error:
                continue
    assert runner.returncode == 0
    assert peak < 100e6
    (log,) = workbench.cache.glob("runs/*/*.log")
    text = log.read_text()
    assert len(text) < 400_000
    assert "bytes are left out here" in text
    assert text.rstrip().endswith("BUG_REPRODUCED {}")


def test_nan_is_wrong_and_its_receipt_is_json(workbench: Workbench) -> None:
    workbench.lay("33_measures_nan")
    _, (row,) = workbench.rows()
    assert row["verdict"] == "CONFIRMED"
    assert '"NaN"' in Path(row["receipt"]).read_text()


def test_runs_that_differ_are_no_verdict(workbench: Workbench) -> None:
    workbench.lay("36_flaky")
    status, (row,) = workbench.rows("--lane", "pristine", "--repeat", "3")
    assert (status, row["verdict"]) == (1, "ERROR")
    assert row["reason"] == "the runs differ: FIXED_UPSTREAM 1/3, REPRODUCED 2/3"
