"""Pack 09's cases cover its factors in pairs, and its figures come from one counter for every tree."""

from __future__ import annotations

import ast
import itertools
import json
from typing import Any

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/09_liger_flce_none"


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


def test_the_patch_makes_no_product_more_than_the_release_that_fixed_it() -> None:
    work = json.loads((FOLDER / "data/work.json").read_text(encoding="utf-8"))
    assert set(work) == {"pristine", "patched", "release_0_8_5"}
    for trained, found in work["patched"].items():
        assert found["step"] <= work["release_0_8_5"][trained]["step"]
    assert work["patched"]["weight frozen"] == work["pristine"]["weight frozen"]
