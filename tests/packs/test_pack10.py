"""In pack 10 the check in which the code under test raised on some ranks alone is the one that failed.

The ranks are no longer at the same check from there on: one may wait for ever for another, and nobody else is to blame.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/10_megatron_flce_hopper"
PARTED = """
import json, sys, types, reproduce
work = types.SimpleNamespace(checks=[("first", None, None), ("second", None, None)])
parted = reproduce.raised_by_some(work, 2, sys.argv[1])
print(json.dumps(parted))
said = []
probe = types.SimpleNamespace(check=lambda name, role, ok, **values: said.append([name, role, ok]))
every = [("first", "defect", None, None, None), ("second", "control", None, None, None)]
if parted:
    reproduce.judge_parted(probe, every, *parted)
print(json.dumps(said))
"""
#: What each rank noted that it raised, by the check: what is found, and what the checks come to.
WAYS = {
    "nothing": ([{}, {}], None, []),
    "on every rank": ([{"first": "it raised"}, {"first": "it raised"}], None, []),
    "on one rank": (
        [{}, {"second": "it raised"}],
        ["second", "it raised (on 1 of 2 ranks)"],
        [["first", "defect", None], ["second", "control", False]],
    ),
    "before others": (
        [{"second": "late"}, {"first": "it raised", "second": "late"}],
        ["first", "it raised (on 1 of 2 ranks)"],
        [["first", "defect", False], ["second", "control", None]],
    ),
}


@pytest.mark.parametrize("how", WAYS)
def test_the_first_check_that_raised_on_some_ranks_has_failed(how: str, tmp_path: Path) -> None:
    raised, parted, said = WAYS[how]
    for rank, notes in enumerate(raised):
        lines = [json.dumps(note) for note in notes.items()]
        (tmp_path / f"raised{rank}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-B", "-c", PARTED, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [parted, said]
