"""A few wrong fixes a night: those that were not run for longest come first, and survivors need attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testing.workbench import Workbench


def _sweep(workbench: Workbench, *arguments: str) -> tuple[int, dict[str, Any], str, Path]:
    runs = workbench.folder / "sweeps"
    ended = workbench.run("sweep", "--runs", str(runs), "--only", ":cpu", *arguments)
    assert "Traceback" not in ended.stderr, ended.stderr
    folder = max(runs.glob("*/results.json")).parent
    return ended.returncode, json.loads((folder / "results.json").read_text(encoding="utf-8")), ended.stdout, folder


def test_every_night_runs_other_mutants_until_all_were(workbench: Workbench) -> None:
    workbench.lay("42_refuses_wrong_fixes")
    known: set[str] = set()
    for _ in range(2):
        _, results, _, folder = _sweep(workbench, "--mutants", "2")
        state = json.loads((workbench.folder / "sweeps/mutants.json").read_text(encoding="utf-8"))
        tonight = {name for name, run in state["42_refuses_wrong_fixes/cpu"].items() if run == folder.name}
        assert len(tonight) == 2
        assert not tonight & known
        known |= tonight
    assert results["cells"][0]["verdict"] == "CONFIRMED"
    assert known == {
        "adds_the_weight",
        "multiplies_the_other_way_round",
        "refuses_the_mode",
        "weights_the_first_two_alike",
    }


def test_a_survivor_needs_attention_and_the_page_shows_the_strength(workbench: Workbench) -> None:
    workbench.lay("43_lets_wrong_fixes_pass")
    status, results, said, folder = _sweep(workbench, "--mutants", "3")
    assert status == 1
    note = "43_lets_wrong_fixes_pass/cpu: a wrong fix survived: loses_an_empty_total"
    assert note in results["notes"]
    assert note in said
    assert results["cells"][0]["strength"] == "this run killed 1 of 3"
    assert "this run killed 1 of 3" in (folder / "index.html").read_text(encoding="utf-8")
    assert results["lanes_run"] == 2
