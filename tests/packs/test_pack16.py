"""Pack 16's cases hold every pair of values of the factors that its contract names."""

from __future__ import annotations

import ast
import itertools

from kit import pairwise
from testing.workbench import REPOSITORY

CONTRACT = REPOSITORY / "packs/16_megatron_float16_module/contract.py"


def _factors() -> dict[str, list[object]]:
    for node in ast.parse(CONTRACT.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "FACTORS":
            return dict(ast.literal_eval(node.value))
    raise AssertionError(f"{CONTRACT} has no FACTORS")


def test_every_pair_of_values_is_in_a_case() -> None:
    factors = _factors()
    rows = pairwise(factors)
    for one, other in itertools.combinations(factors, 2):
        every = itertools.product(factors[one], factors[other])
        assert {(row[one], row[other]) for row in rows} == set(every), (one, other)


def test_no_case_is_there_twice() -> None:
    rows = [tuple(row.values()) for row in pairwise(_factors())]
    assert len(rows) == len(set(rows))
