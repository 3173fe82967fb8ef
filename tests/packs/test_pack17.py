"""Pack 17's cases cover its factors in pairs, and its figures say what the patch costs."""

from __future__ import annotations

import ast
import itertools
import json
from typing import Any

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/17_liger_flce_saved_gradients"


def _literals() -> dict[str, Any]:
    tree = ast.parse((FOLDER / "reproduce.py").read_text(encoding="utf-8"))
    found = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {name: ast.literal_eval(found[name]) for name in ("FACTORS", "CASES", "EXCLUDED")}


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


def test_an_excluded_pair_names_values_that_there_are() -> None:
    given = _literals()
    for one, x, other, y in given["EXCLUDED"]:
        assert x in given["FACTORS"][one]
        assert y in given["FACTORS"][other]


def test_an_ordinary_step_and_an_evaluation_make_no_product_more() -> None:
    work = json.loads((FOLDER / "data/work.json").read_text(encoding="utf-8"))
    for name in ("all", "weight frozen", "evaluation"):
        assert work["patched"][name] == work["pristine"][name]


def test_the_report_names_every_loss_that_shares_the_fault() -> None:
    rows = json.loads((FOLDER / "data/other_losses.json").read_text(encoding="utf-8"))
    table = (FOLDER / "data/other_losses.md").read_text(encoding="utf-8")
    assert {name for name, row in rows.items() if row["second_over_first"] > 1.5} == {
        "cross entropy",
        "fused linear JSD",
        "fused linear KL divergence",
    }
    assert all(f"| {name} |" in table for name in rows)
