"""In pack 11 a rank that dies, hangs or disagrees is an exception that names it, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys

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
