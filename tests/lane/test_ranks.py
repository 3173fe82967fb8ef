"""A probe that speaks for several ranks: one that dies, hangs, disagrees or speaks itself is an ERROR that names it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from testing import sweeps
from testing.workbench import Workbench

RIGHT = "47_speaks_for_two_ranks"
#: Seconds that a lane takes at most, with the runner and its start, on a busy machine; its time-out is 60 s.
SOON = 20.0
#: By toy: words of the reason, and of the log where it has more to say.
BAD = {
    "48_a_rank_exits": ("(RuntimeError: rank 1 of 2 ended with status 3)", ["    no memory on this device"]),
    "49_a_rank_hangs": (
        "(RuntimeError: rank 0 of 2 hangs after 2 s; rank 1 of 2 hangs after 2 s)",
        ["last lines of rank 0:", "    waits for total", "last lines of rank 1:", "    sleeps"],
    ),
    "50_a_rank_disagrees": ("(RuntimeError: rank 1 of 2 disagrees: totals [10.0, 11.0])", ["    has 11.0"]),
    "51_a_rank_writes_a_verdict": ("2 verdict lines: FIX_VALIDATED, BUG_REPRODUCED", []),
}
#: By what the second rank does instead of its work: words of the reason.
WAYS = {
    "os.kill(os.getpid(), 9)": "rank 1 of 2 ended with status -9",
    "raise ValueError('a surprise')": "rank 1 of 2 ended with status 1",
    "os._exit(0)": "rank 0 of 2 hangs after 6 s; rank 1 of 2 left no answer",
}
#: What a rank may write where the probe writes, and what is said of it.
WRITTEN = {
    'CHECK {"name": "ones", "role": "control", "ok": true}': "a second CHECK line named 'ones'",
    'OUTPUT {"name": "ones.1", "dtype": "", "shape": [], "sha256": "", "must_match": false}': "a second OUTPUT line",
    'TARGET {"target": "cpu", "evidence": "traced", "device": "CPU"}': "TARGET must stand once",
    "UNSUPPORTED {}": "2 verdict lines: UNSUPPORTED, BUG_REPRODUCED",
}
SWITCHES = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def _changed(workbench: Workbench, behaviour: str, *edits: tuple[str, str]) -> Path:
    """Lay a toy with other texts in its probe."""
    folder = workbench.lay(behaviour)
    text = (folder / "reproduce.py").read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    (folder / "reproduce.py").write_text(text)
    return folder


def _instead(statement: str) -> tuple[str, str]:
    return ("    ones = scale", f"    if rank == 1:\n        {statement}\n    ones = scale")


def _refused(workbench: Workbench, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run the pristine lane of a bad toy; return its row and its log. Nothing of it is left, and it was over soon."""
    started = time.monotonic()
    status, (row,) = workbench.rows("--lane", "pristine", *arguments)
    assert time.monotonic() - started < SOON
    assert (status, row["verdict"]) == (1, "ERROR"), row
    assert not sweeps.living(workbench.folder)
    return row, Path(row["logs"][0]).read_text()


def test_a_probe_speaks_for_its_ranks_and_the_record_says_how_many(workbench: Workbench) -> None:
    workbench.lay(RIGHT)
    workbench.recorded(RIGHT)
    found = json.loads((workbench.packs / RIGHT / "receipts/cpu.traced.json").read_text())
    assert (found["verdict"], found["ranks"], found["claims"]) == ("CONFIRMED", 2, ["BITWISE_IDENTICAL"])
    outputs = [line["name"] for line in found["lanes"]["patched"]["outputs"]]
    assert outputs == ["ones.0", "ones.1"], "all ranks' outputs are compared"
    assert [lane["left_behind"] for lane in found["lanes"].values()] == [0, 0]
    ended = workbench.run("check")
    assert (ended.returncode, ended.stdout) == (0, "1 pack(s) read, 1 sound\n")
    _, (row,) = workbench.rows()
    assert row["ranks"] == 2


@pytest.mark.parametrize("behaviour", BAD)
def test_a_bad_rank_is_an_error_that_names_it(workbench: Workbench, behaviour: str) -> None:
    workbench.lay(behaviour)
    row, log = _refused(workbench)
    reason, lines = BAD[behaviour]
    assert row["reason"].endswith(reason), row["reason"]
    assert [line for line in lines if line not in log.splitlines()] == []


@pytest.mark.parametrize("statement", WAYS)
def test_however_a_rank_ends_too_early_it_is_named(workbench: Workbench, statement: str) -> None:
    _changed(workbench, RIGHT, ("SECONDS = 20.0", "SECONDS = 6.0"), _instead(statement))
    row, _ = _refused(workbench)
    assert WAYS[statement] in row["reason"]


@pytest.mark.parametrize("line", WRITTEN)
def test_a_line_of_a_rank_beside_the_probes_is_noticed(workbench: Workbench, line: str) -> None:
    _changed(workbench, RIGHT, (", stdout=log, stderr=log)", ", stderr=log)"), _instead(f"print({line!r}, flush=True)"))
    row, _ = _refused(workbench)
    assert WRITTEN[line] in row["reason"]


def test_a_rank_that_writes_behind_the_verdict_is_noticed(workbench: Workbench) -> None:
    late = "print('late', flush=True) if os.fork() == 0 and not time.sleep(1) else None"
    waits = (
        "        Probe().run(judge)",
        "        try:\n            Probe().run(judge)\n        finally:\n            time.sleep(2)",
    )
    _changed(workbench, RIGHT, (", stdout=log, stderr=log)", ", stderr=log)"), waits, _instead(late))
    row, _ = _refused(workbench)
    assert row["reason"] == "output after the verdict: 'late'"


def test_a_lane_that_ends_before_the_probes_patience_leaves_no_rank(workbench: Workbench) -> None:
    workbench.lay("49_a_rank_hangs")
    row, _ = _refused(workbench, "--timeout", "1")
    assert row["reason"] == "timed out after 1 s"


def test_a_probe_that_dies_leaves_no_rank(workbench: Workbench) -> None:
    dies = ("        until = time", "        time.sleep(0.5)\n        os._exit(7)\n        until = time")
    _changed(workbench, "49_a_rank_hangs", dies)
    row, _ = _refused(workbench)
    assert row["reason"] == "no verdict line"


def test_the_switches_of_a_shared_host_reach_every_rank(workbench: Workbench) -> None:
    shown = (
        "    ones = scale",
        "    print('SWITCHES', sorted(os.environ.items()), file=sys.__stderr__)\n    ones = scale",
    )
    _changed(workbench, RIGHT, (", stdout=log, stderr=log)", ", stdout=log)"), shown)
    status, (row,) = workbench.rows("--lane", "pristine", **SWITCHES)
    assert (status, row["verdict"]) == (0, "REPRODUCED")
    lines = [line for line in Path(row["logs"][0]).read_text().splitlines() if line.startswith("SWITCHES")]
    assert len(lines) == 2
    assert all(str(switch) in line for line in lines for switch in SWITCHES.items())
