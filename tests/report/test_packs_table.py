"""The table of packs in README.md: written by the code, and never by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.core.errors import HarnessError
from harness.report import advisories, packs_table
from harness.report.strong import Strength
from testing.workbench import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_the_tables_the_figure_and_the_first_run_that_receipts_give() -> None:
    assert packs_table.written(README) == README, "python -m harness.report.packs_table"


def test_every_pack_stands_in_one_of_the_tables_and_the_silent_bugs_come_first() -> None:
    bugs, _, others = packs_table.text(packs_table.every_pack()).partition("Packs that show no bug")
    rows = [line.split(" | ") for line in bugs.splitlines()[2:] if line]
    assert sorted(path.name for path in (REPOSITORY / "packs").glob("*_*")) == sorted(
        line.partition("](")[0].partition("[")[2] for line in (bugs + others).splitlines() if line.startswith("| [")
    )
    silent = [row[2].rpartition("(")[2].rstrip(")") in advisories.SILENT for row in rows]
    assert silent == sorted(silent, reverse=True)
    assert ("(cleanup)" in others, "(cleanup)" in bugs) == (True, False)


def test_a_readme_without_the_marks_is_refused() -> None:
    with pytest.raises(HarnessError, match="no marks of packs"):
        packs_table.within("# Packs\n", "packs", "a table")


def test_a_strength_of_an_older_probe_stands_only_where_there_is_no_other() -> None:
    many, few = Strength(61, 61, 0, "2026-11-01", stale=True), Strength(52, 52, 0, "2026-11-02", stale=False)
    assert packs_table.of_targets({"sm_90a": many, "cpu": few}) == "52/52 on cpu"
    assert packs_table.of_targets({"sm_90a": many}) == "61/61 on sm_90a STALE"
    assert packs_table.of_targets({"sm_90a": replace(many, stale=False), "cpu": few}) == "61/61 on sm_90a"
