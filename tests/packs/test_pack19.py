"""Pack 19's cases cover its factors in pairs; a rank that dies or hangs is an exception, and leaves nothing behind."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/19_megatron_fused_ce_rounding"
RANKS = """
import os, pathlib, sys, tempfile, time, types, reproduce
def speak(work, rank, folder):
    pathlib.Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    pathlib.Path(folder, f"{work.count}.log{rank}").write_text("last words")
    while rank == 1 and not pathlib.Path(folder, "pid0").exists():
        time.sleep(0.01)
    if rank == 1:
        work.end()
    time.sleep(600)
reproduce.speak = speak
ways = {"dies": lambda: os._exit(3), "ends early": lambda: os._exit(0), "is killed": lambda: os.kill(os.getpid(), 9)}
work = types.SimpleNamespace(count=2, seconds=1.0, jobs=[], end=ways.get(sys.argv[1], lambda: None))
with tempfile.TemporaryDirectory() as folder:
    try:
        reproduce.ranks([work], folder)
    except RuntimeError as error:
        print("refused:", error)
    for file in pathlib.Path(folder).glob("pid*"):
        print("alive" if pathlib.Path("/proc", file.read_text()).exists() else "gone")
"""


def _literals() -> dict[str, Any]:
    tree = ast.parse((FOLDER / "reproduce.py").read_text(encoding="utf-8"))
    found = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {name: ast.literal_eval(found[name]) for name in ("FACTORS", "CASES")}


def test_every_pair_of_values_is_in_a_case() -> None:
    given = _literals()
    factors = given["FACTORS"]
    rows = [dict(zip(factors, case, strict=True)) for case in given["CASES"]]
    for one, other in itertools.combinations(factors, 2):
        have = {(row[one], row[other]) for row in rows}
        assert set(itertools.product(factors[one], factors[other])) == have, (one, other)


@pytest.mark.parametrize("how", ["dies", "ends early", "is killed", "hangs"])
def test_a_rank_that_does_not_answer_is_an_exception_and_no_process_is_left(how: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-B", "-c", RANKS, how]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    said, *rest = ended.stdout.splitlines()
    assert said.startswith("refused: rank 0 of 2 hangs" if how == "hangs" else "refused: rank 1 of 2 "), ended.stderr
    assert "    last words" in rest
    assert rest[-2:] == ["gone", "gone"]
