"""Pack 17's report names the losses that share the fault."""

from __future__ import annotations

import json

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/17_liger_flce_saved_gradients"


def test_the_report_names_every_loss_that_shares_the_fault() -> None:
    rows = json.loads((FOLDER / "data/other_losses.json").read_text(encoding="utf-8"))
    table = (FOLDER / "data/other_losses.md").read_text(encoding="utf-8")
    assert {name for name, row in rows.items() if row["second_over_first"] > 1.5} == {
        "cross entropy",
        "fused linear JSD",
        "fused linear KL divergence",
    }
    assert all(f"| {name} |" in table for name in rows)
