"""Pack 05's numbers of groups have what a kept table would get wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/05_mamba3_mimo_gqa"
CASES = "import json, contract; print(json.dumps(contract.KINDS))"


@pytest.fixture(scope="module")
def kinds() -> dict[str, list[list[int]]]:
    """Return the contract's numbers of groups and heads; it is imported for an absent GPU."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "REPRODUCER_TARGET": "sm_90a"}
    command = [sys.executable, "-B", "-c", CASES]
    ended = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[list[int]]] = json.loads(ended.stdout)
    return found


def test_a_number_of_groups_and_a_ratio_come_with_two_numbers_of_heads(kinds: dict[str, list[list[int]]]) -> None:
    grouped = kinds["grouped"]
    assert all(1 < groups < heads and heads % groups == 0 for groups, heads in grouped)
    assert max(Counter(groups for groups, _ in grouped).values()) > 1
    ratios = Counter(heads // groups for groups, heads in grouped)
    assert max(ratios.values()) > 1
    assert [ratio for ratio in ratios if ratio & (ratio - 1)]


def test_the_controls_are_one_group_and_a_group_a_head(kinds: dict[str, list[list[int]]]) -> None:
    assert {groups in (1, heads) for groups, heads in kinds["g1_and_gh"]} == {True}
