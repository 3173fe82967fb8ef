"""Rows that cover every pair of values: what contracts build their cases of."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kit import pairwise

FACTORS = {"dtype": ("bf16", "fp32"), "rows": (1, 7, 64), "bias": (True, False), "reduction": ("mean", "sum", "none")}


def _pairs(rows: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {(one, row[one], other, row[other]) for row in rows for one, other in itertools.combinations(sorted(row), 2)}


def test_every_pair_of_values_is_in_a_row_of_far_fewer_than_all() -> None:
    every = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    rows = pairwise(FACTORS)
    assert _pairs(rows) == _pairs(every)
    assert len(rows) < len(every) / 2
    assert rows == pairwise(FACTORS)


def test_rows_that_cannot_be_are_left_out_and_others_stand_first() -> None:
    wanted = {"dtype": "fp32", "rows": 5, "bias": False, "reduction": "none"}
    rows = pairwise(FACTORS, lambda row: row.get("bias") is True and row.get("reduction") == "none", [wanted])
    assert rows[0] == wanted
    assert not [row for row in rows if row["bias"] and row["reduction"] == "none"]
    with pytest.raises(ValueError, match="a row has rows; the factors are"):
        pairwise(FACTORS, also=[{"rows": 5}])
