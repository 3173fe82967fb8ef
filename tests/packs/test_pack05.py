"""Pack 05's cases cover its factors in pairs, and its numbers of groups have what a kept table would get wrong."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/05_mamba3_mimo_gqa"
CASES = "import json, contract; print(json.dumps([contract.FACTORS, contract.ROWS, contract.KINDS]))"


@pytest.fixture(scope="module")
def contract() -> tuple[dict[str, list[Any]], list[dict[str, Any]], dict[str, list[list[int]]]]:
    """Return the contract's factors, rows and numbers of groups and heads; it is imported for an absent GPU."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "REPRODUCER_TARGET": "sm_90a"}
    command = [sys.executable, "-B", "-c", CASES]
    ended = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    factors, rows, kinds = json.loads(ended.stdout)
    return factors, rows, kinds


def _possible(first: str, one: object, second: str, other: object) -> bool:
    given = {first: one, second: other}
    return given.get("MIMO_Out", True) is True or not (given.get("z") is True or given.get("layout") == "varlen")


def test_every_possible_pair_of_values_is_in_a_case(contract: tuple[Any, Any, Any]) -> None:
    factors, rows, _ = contract
    for first, second in itertools.combinations(factors, 2):
        have = {(row[first], row[second]) for row in rows}
        pairs = itertools.product(factors[first], factors[second])
        assert have == {(one, other) for one, other in pairs if _possible(first, one, second, other)}, (first, second)


def test_a_number_of_groups_and_a_ratio_come_with_two_numbers_of_heads(contract: tuple[Any, Any, Any]) -> None:
    grouped = contract[2]["grouped"]
    assert all(1 < groups < heads and heads % groups == 0 for groups, heads in grouped)
    assert max(Counter(groups for groups, _ in grouped).values()) > 1
    ratios = Counter(heads // groups for groups, heads in grouped)
    assert max(ratios.values()) > 1
    assert [ratio for ratio in ratios if ratio & (ratio - 1)]


def test_the_controls_are_one_group_and_a_group_a_head(contract: tuple[Any, Any, Any]) -> None:
    assert {groups in (1, heads) for groups, heads in contract[2]["g1_and_gh"]} == {True}
