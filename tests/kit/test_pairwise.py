"""Rows that cover every pair of values: what contracts build their cases of."""

from __future__ import annotations

import itertools
from typing import Any

from kit import pairwise

FACTORS = {"dtype": ("bf16", "fp32"), "rows": (1, 7, 64), "bias": (True, False), "reduction": ("mean", "sum", "none")}


def _pairs(rows: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {(x, row[x], y, row[y]) for row in rows for x, y in itertools.combinations(sorted(row), 2)}


def test_every_pair_of_values_is_in_a_row_of_far_fewer_than_all() -> None:
    every = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    rows = pairwise(FACTORS)
    assert _pairs(rows) == _pairs(every)
    assert len(rows) < len(every) / 2
    assert rows == pairwise(FACTORS)
