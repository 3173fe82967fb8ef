"""A contract that speaks for several ranks: the record says how many, and none outlives its lane."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testing import sweeps, toys
from testing.workbench import Workbench

TOY = "47_speaks_for_two_ranks"
#: Before this line of a rank a test lays what it does instead; before that one of the contract, likewise.
OF_A_RANK, OF_THE_CONTRACT = "    ones = scale.scale(", "    return [json.loads("
SLEEPS = f"    import time\n    time.sleep(600)\n{OF_A_RANK}"
DIES = f"    import os, time\n    time.sleep(0.5)\n    os._exit(7)\n{OF_THE_CONTRACT}"
SWITCHES = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def _lay(workbench: Workbench, *edits: tuple[str, str]) -> Path:
    """Lay the toy with other texts in its contract."""
    folder = workbench.lay(TOY)
    for old, new in edits:
        toys.replace(folder / "contract.py", old, new)
    return folder


def test_a_contract_speaks_for_its_ranks_and_the_record_says_how_many(workbench: Workbench) -> None:
    folder = _lay(workbench)
    workbench.recorded()
    found = json.loads((folder / "receipts/cpu.traced.json").read_text())
    assert (found["verdict"], found["ranks"]) == ("CONFIRMED", 2)
    assert [lane["left_behind"] for lane in found["lanes"].values()] == [0, 0]
    assert workbench.findings() == ""


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        (((OF_A_RANK, SLEEPS),), "timed out after 6 s in test_ones"),
        (
            ((OF_A_RANK, SLEEPS), (OF_THE_CONTRACT, DIES)),
            "the contract's results end in test_ones without an end: exit status 7",
        ),
    ],
    ids=["the lane is timed out", "the contract dies"],
)
def test_no_rank_outlives_its_lane(workbench: Workbench, edits: tuple[tuple[str, str], ...], reason: str) -> None:
    _lay(workbench, *edits)
    row = workbench.gives(1, "ERROR", "--lane", "unpatched", "--timeout", "6")
    assert row["reason"] == reason
    assert not sweeps.living(workbench.folder)


def test_the_switches_of_a_shared_host_reach_every_rank(workbench: Workbench) -> None:
    place = str(workbench.folder / "switches")
    shown = f"    import os\n    open({place!r} + str(rank), 'w').write(str(sorted(os.environ.items())))\n{OF_A_RANK}"
    _lay(workbench, (OF_A_RANK, shown))
    workbench.gives(0, "REPRODUCED", "--lane", "unpatched", **SWITCHES)
    texts = [file.read_text() for file in workbench.folder.glob("switches*")]
    assert len(texts) == 2
    assert all(str(switch) in text for text in texts for switch in SWITCHES.items())
