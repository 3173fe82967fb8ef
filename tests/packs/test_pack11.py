"""In pack 11 a rank that dies, hangs or disagrees is an exception that names it, and leaves nothing behind.

Where the module under test raised on some ranks alone, that is a check's matter, also when the others wait for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/11_megatron_hybrid_linear_ce"
RANKS = """
import os, pathlib, sys, tempfile, time, types, reproduce, torch
def speak(work, rank, count, folder):
    pathlib.Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    pathlib.Path(folder, f"log{rank}").write_text("last words")
    while rank == 1 and not pathlib.Path(folder, "pid0").exists():
        time.sleep(0.01)
    if work.end is None:
        torch.save({"plain": {"error": "it raised"} if rank == 1 else {}}, f"{folder}/{rank}")
        return
    if rank == 1:
        work.end()
    time.sleep(600)
reproduce.speak = speak
ways = {"dies": lambda: os._exit(3), "ends early": lambda: os._exit(0), "is killed": lambda: os.kill(os.getpid(), 9)}
ways |= {"hangs": lambda: None, "disagrees": None}
given = {"target": "cpu", "seconds": 5.0 if sys.argv[1] == "disagrees" else 1.0, "end": ways[sys.argv[1]]}
work = types.SimpleNamespace(checks=[("plain", None, None)], **given)
with tempfile.TemporaryDirectory() as folder:
    try:
        reproduce.ranks(work, 3, folder)
    except RuntimeError as error:
        print("refused:", error)
    for file in pathlib.Path(folder).glob("pid*"):
        print("alive" if pathlib.Path("/proc", file.read_text()).exists() else "gone")
"""
SAYS = {
    "dies": "rank 1 of 3 died: exit status 3",
    "ends early": "rank 1 of 3 ended without results",
    "is killed": "rank 1 of 3 died: exit status -9",
    "hangs": "rank 0 of 3 hangs after 1.0 s; rank 1 of 3 hangs after 1.0 s; rank 2 of 3 hangs after 1.0 s",
    "disagrees": "rank 1 of 3 disagrees: plain raised on ranks [False, True, False]",
}


@pytest.mark.parametrize("how", SAYS)
def test_a_rank_that_does_not_answer_is_named_and_no_process_is_left(how: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-B", "-c", RANKS, how]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    said, *rest = ended.stdout.splitlines()
    assert said == f"refused: {SAYS[how]}", ended.stderr
    assert "    last words" in rest
    assert "alive" not in rest


ALONE = """
import pathlib, sys, tempfile, time, types, reproduce, torch
raised = {"plain": {"error": "it raised", "upstream": True}}
def speak(work, rank, count, folder):
    if rank != 1 and work.waits:
        time.sleep(600)
    torch.save(raised if rank == 1 else {"plain": {}}, f"{folder}/{rank}")
    if work.waits:
        pathlib.Path(folder, "alone").write_text("plain")
reproduce.speak = speak
given = {"target": "cpu", "seconds": 30.0, "waits": sys.argv[1] == "wait"}
work = types.SimpleNamespace(checks=[("plain", None, None)], **given)
with tempfile.TemporaryDirectory() as folder:
    print(reproduce.ranks(work, 3, folder))
"""


@pytest.mark.parametrize("others", ["end", "wait"])
def test_where_the_module_under_test_raised_on_one_rank_alone_a_check_is_left_to_say_so(others: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-B", "-c", ALONE, others]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    raised = {"plain": {"error": "it raised", "upstream": True}}
    assert ended.stdout == f"{[raised] if others == 'wait' else [{'plain': {}}, raised, {'plain': {}}]}\n"


def test_a_rank_that_raised_knows_whether_the_others_end_the_same_check(tmp_path: Path) -> None:
    code = "import pathlib, sys, reproduce; reproduce.PATIENCE = 0.1; folder = pathlib.Path(sys.argv[1]);"
    code += "(folder / 'ended0').write_bytes(b'..'); (folder / 'ended1').write_bytes(b'.');"
    code += "print([reproduce.together(folder, number, count) for number, count in ((1, 2), (2, 2), (1, 3))])"
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-B", "-c", code, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "[True, False, False]\n"
