"""The sentence that a person can quote of a run of several packs."""

from __future__ import annotations

import pytest

from harness.report import run_table
from harness.report.run_table import RunRow


def _row(verdict: str, deviation: str = "") -> RunRow:
    return RunRow("01_toy", "wrong-result", "cpu", "traced", "", "", verdict, {}, deviation)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([_row("CONFIRMED"), _row("CONFIRMED")], "2 of 2 as expected: 2 CONFIRMED."),
        ([_row("CONFIRMED"), _row("UNAVAILABLE")], "1 of 1 as expected: 1 CONFIRMED; 1 not judged: 1 UNAVAILABLE."),
        ([_row("CONFIRMED"), _row("UNSUPPORTED", "CONFIRMED was expected")], "1 of 2 as expected: 1 CONFIRMED, 1 UNS"),
        ([_row("UNSUPPORTED"), _row("UNAVAILABLE")], "2 not judged: 1 UNSUPPORTED, 1 UNAVAILABLE."),
    ],
)
def test_what_was_not_judged_is_not_as_expected(rows: list[RunRow], sentence: str) -> None:
    assert f"\n{sentence}" in f"\n{run_table.as_text(rows)}"
