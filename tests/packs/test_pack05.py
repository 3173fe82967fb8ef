"""Pack 05's cases cover its factors in pairs, and its numbers of groups have what a kept table would get wrong."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from typing import Any

from testing.workbench import REPOSITORY

PROBE = REPOSITORY / "packs/05_mamba3_mimo_gqa/reproduce.py"


def _literals() -> dict[str, Any]:
    tree = ast.parse(PROBE.read_text(encoding="utf-8"))
    found = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {name: ast.literal_eval(found[name]) for name in ("FACTORS", "CASES", "EXCLUDED", "GROUPED", "EVEN")}


def test_every_possible_pair_of_values_is_in_a_case() -> None:
    given = _literals()
    factors, excluded = given["FACTORS"], given["EXCLUDED"]
    rows = [dict(zip(factors, case, strict=True)) for case in given["CASES"]]
    for row in rows:
        assert not [rule for rule in excluded if row[rule[0]] == rule[1] and row[rule[2]] == rule[3]], row
    for one, other in itertools.combinations(factors, 2):
        have = {(row[one], row[other]) for row in rows}
        never = {(x, y) for a, x, b, y in excluded if (a, b) == (one, other)}
        never |= {(y, x) for a, x, b, y in excluded if (b, a) == (one, other)}
        assert set(itertools.product(factors[one], factors[other])) - never == have, (one, other)


def test_a_number_of_groups_and_a_ratio_come_with_two_numbers_of_heads() -> None:
    grouped = _literals()["GROUPED"]
    assert all(1 < groups < heads and heads % groups == 0 for groups, heads in grouped)
    assert max(Counter(groups for groups, _ in grouped).values()) > 1
    ratios = Counter(heads // groups for groups, heads in grouped)
    assert max(ratios.values()) > 1
    assert [ratio for ratio in ratios if ratio & (ratio - 1)]


def test_the_controls_are_one_group_and_a_group_a_head() -> None:
    assert {groups in (1, heads) for groups, heads in _literals()["EVEN"]} == {True}
