"""Pack 17's cases cover its factors in pairs, and its report names the losses that share the fault."""

from __future__ import annotations

import itertools
import json
from typing import Any

from kit import pairwise
from testing import contract_source
from testing.workbench import REPOSITORY

PACK = "packs/17_liger_flce_saved_gradients"
FOLDER = REPOSITORY / PACK


def _factors() -> dict[str, tuple[Any, ...]]:
    """Return the factors of the contract, without importing it."""
    options = contract_source.values("kit/liger.py")["FACTORS"]
    found: dict[str, tuple[Any, ...]] = contract_source.values(f"{PACK}/contract.py", OPTIONS=options)["FACTORS"]
    return found


def test_every_pair_of_values_is_in_a_case() -> None:
    factors = _factors()
    rows = pairwise(factors)
    for one, other in itertools.combinations(factors, 2):
        pairs = {(row[one], row[other]) for row in rows}
        assert pairs == set(itertools.product(factors[one], factors[other])), (one, other)


def test_the_report_names_every_loss_that_shares_the_fault() -> None:
    rows = json.loads((FOLDER / "data/other_losses.json").read_text(encoding="utf-8"))
    table = (FOLDER / "data/other_losses.md").read_text(encoding="utf-8")
    assert {name for name, row in rows.items() if row["second_over_first"] > 1.5} == {
        "cross entropy",
        "fused linear JSD",
        "fused linear KL divergence",
    }
    assert all(f"| {name} |" in table for name in rows)
