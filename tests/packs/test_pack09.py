"""Pack 09's cases cover its factors in pairs, and its figures come from one counter for every tree."""

from __future__ import annotations

import ast
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from kit import pairwise
from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/09_liger_flce_none"


def _factors() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the factors of the contract, and those of a reduced loss, without importing it."""
    tree = ast.parse((FOLDER / "contract.py").read_text(encoding="utf-8"))
    found = {ast.unparse(x.targets[0]): x.value for x in tree.body if isinstance(x, ast.Assign)}
    names = {"torch": SimpleNamespace(float32="float32")}
    factors, reduced = (eval(ast.unparse(found[x]), names) for x in ("FACTORS", "REDUCED"))  # noqa: S307 - our own file
    return factors | {"reduction": ("none",)}, factors | reduced


@pytest.mark.parametrize("reduced", [False, True])
def test_every_pair_of_values_is_in_a_case(*, reduced: bool) -> None:
    factors = _factors()[reduced]
    rows = pairwise(factors)
    for one, other in itertools.combinations(factors, 2):
        pairs = {(row[one], row[other]) for row in rows}
        assert pairs == set(itertools.product(factors[one], factors[other])), (one, other)


def test_the_patch_makes_no_product_more_than_the_release_that_fixed_it() -> None:
    work = json.loads((FOLDER / "data/work.json").read_text(encoding="utf-8"))
    assert set(work) == {"pristine", "patched", "release_0_8_5"}
    for trained, found in work["patched"].items():
        assert found["step"] <= work["release_0_8_5"][trained]["step"]
    assert work["patched"]["weight frozen"] == work["pristine"]["weight frozen"]
