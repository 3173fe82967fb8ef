"""Pack 09's cases cover its factors in pairs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kit import pairwise
from testing import contract_source

PACK = "packs/09_liger_flce_none"


def _factors() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the factors of the contract, and those of a reduced loss, without importing it."""
    options = contract_source.values("kit/liger.py")["FACTORS"]
    found = contract_source.values(f"{PACK}/contract.py", OPTIONS=options)
    factors, reduced = found["FACTORS"], found["REDUCED"]
    return factors | {"reduction": ("none",)}, factors | reduced


@pytest.mark.parametrize("reduced", [False, True])
def test_every_pair_of_values_is_in_a_case(*, reduced: bool) -> None:
    factors = _factors()[reduced]
    rows = pairwise(factors)
    for one, other in itertools.combinations(factors, 2):
        pairs = {(row[one], row[other]) for row in rows}
        assert pairs == set(itertools.product(factors[one], factors[other])), (one, other)
