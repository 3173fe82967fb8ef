"""A contract that speaks for several ranks: one that dies, hangs or disagrees is an ERROR that names it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from testing import sweeps, toys
from testing.workbench import Workbench

RIGHT = "47_speaks_for_two_ranks"
#: Seconds that a lane takes at most, with the runner and its start, on a busy machine; its time-out is 60 s.
SOON = 20.0
#: By toy: words of the reason, and of the log where it has more to say.
BAD = {
    "48_a_rank_exits": ("RuntimeError: rank 1 of 2 ended with status 3", ["    no memory on this device"]),
    "49_a_rank_hangs": (
        "RuntimeError: rank 0 of 2 hangs after 2 s; rank 1 of 2 hangs after 2 s",
        ["last lines of rank 0:", "    waits for total", "last lines of rank 1:", "    sleeps"],
    ),
    "50_a_rank_disagrees": ("RuntimeError: rank 1 of 2 disagrees: totals [10.0, 11.0]", ["    has 11.0"]),
}
#: By what the second rank does instead of its work: words of the reason.
WAYS = {
    "os.kill(os.getpid(), 9)": "rank 1 of 2 ended with status -9",
    "raise ValueError('a surprise')": "rank 1 of 2 ended with status 1",
    "os._exit(0)": "rank 0 of 2 hangs after 6 s; rank 1 of 2 left no answer",
}
SWITCHES = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def _changed(workbench: Workbench, behaviour: str, *edits: tuple[str, str]) -> Path:
    """Lay a toy with other texts in its contract."""
    folder = workbench.lay(behaviour)
    for old, new in edits:
        toys.replace(folder / "contract.py", old, new)
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


def test_a_contract_speaks_for_its_ranks_and_the_record_says_how_many(workbench: Workbench) -> None:
    workbench.lay(RIGHT)
    workbench.recorded(RIGHT)
    receipt = json.loads((workbench.packs / RIGHT / "receipts/cpu.traced.json").read_text())
    assert (receipt["verdict"], receipt["ranks"]) == ("CONFIRMED", 2)
    assert [lane["left_behind"] for lane in receipt["lanes"].values()] == [0, 0]
    process = workbench.run("check")
    assert (process.returncode, process.stdout) == (0, "1 pack(s) read, 1 sound\n")
    _, (row,) = workbench.rows()
    assert row["ranks"] == 2


@pytest.mark.parametrize("behaviour", BAD)
def test_a_bad_rank_is_an_error_that_names_it(workbench: Workbench, behaviour: str) -> None:
    workbench.lay(behaviour)
    row, log = _refused(workbench)
    reason, lines = BAD[behaviour]
    assert row["reason"].startswith(f"contract: test_ones: {reason}"), row["reason"]
    assert [line for line in lines if not any(told.endswith(line) for told in log.splitlines())] == []


@pytest.mark.parametrize("statement", WAYS)
def test_however_a_rank_ends_too_early_it_is_named(workbench: Workbench, statement: str) -> None:
    _changed(workbench, RIGHT, ("SECONDS = 20.0", "SECONDS = 6.0"), _instead(statement))
    row, _ = _refused(workbench)
    assert WAYS[statement] in row["reason"]


def test_what_a_rank_prints_where_the_contract_prints_decides_nothing(workbench: Workbench) -> None:
    says = "print('FIX_VALIDATED', flush=True)"
    _changed(workbench, RIGHT, (", stdout=log, stderr=log)", ", stderr=log)"), _instead(says))
    status, (row,) = workbench.rows("--lane", "pristine")
    assert (status, row["verdict"], row["reason"]) == (0, "REPRODUCED", "test_weights")


def test_a_lane_that_ends_before_the_contracts_patience_leaves_no_rank(workbench: Workbench) -> None:
    _changed(workbench, "49_a_rank_hangs", ("SECONDS = 2.0", "SECONDS = 60.0"))
    row, _ = _refused(workbench, "--timeout", "5")
    assert row["reason"] == "timed out after 5 s in test_ones"


def test_a_contract_that_dies_leaves_no_rank(workbench: Workbench) -> None:
    dies = ("        until = time", "        time.sleep(0.5)\n        os._exit(7)\n        until = time")
    _changed(workbench, "49_a_rank_hangs", dies)
    row, _ = _refused(workbench)
    assert row["reason"] == "the contract's results end in test_ones without an end: exit status 7"


def test_the_switches_of_a_shared_host_reach_every_rank(workbench: Workbench) -> None:
    folder = workbench.packs / RIGHT
    shown = f"Path({str(folder)!r}, f'switches.{{rank}}').write_text(str(sorted(os.environ.items())))"
    _changed(workbench, RIGHT, ("    ones = scale", f"    {shown}\n    ones = scale"))
    status, (row,) = workbench.rows("--lane", "pristine", **SWITCHES)
    assert (status, row["verdict"]) == (0, "REPRODUCED")
    texts = [file.read_text() for file in folder.glob("switches.*")]
    assert len(texts) == 2
    assert all(str(switch) in text for text in texts for switch in SWITCHES.items())
