"""The rank test: it finds a step and a slow creep, and no noise."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from dataclasses import replace
from typing import Any

import pytest

from harness.sweep import database, drift
from harness.sweep.results import CellRow
from harness.sweep.series import Point, Series
from testing import nights
from testing.workbench import Workbench

LENGTH = drift.NEWEST + drift.BEFORE


def _series(values: list[float], unit: str = "ms") -> Series:
    points = tuple(Point(f"{night:03d}", "2026-01-01", value, None) for night, value in enumerate(values))
    return Series("01_toy/sm_90a", "executed", nights.GPU, "time", "patched", unit, points)


def _noise(seed: int, share: float = 0.02, count: int = LENGTH) -> list[float]:
    chance = random.Random(seed)  # noqa: S311 - no secret
    return [10 * (1 + chance.gauss(0, share)) for _ in range(count)]


def _exact(first: list[float], second: list[float]) -> float:
    """Return the exact two-sided p-value of two samples without ties, from every way to part the ranks."""
    values = sorted([*first, *second])
    middle = len(first) * (len(values) + 1) / 2
    apart = abs(sum(values.index(one) + 1 for one in first) - middle)
    every = list(itertools.combinations(range(1, len(values) + 1), len(first)))
    return sum(abs(sum(one) - middle) >= apart for one in every) / len(every)


@pytest.mark.parametrize("seed", range(8))
def test_the_p_value_is_near_the_exact_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "_inflation", lambda *_: 1.0)
    first, second = _noise(seed, 0.02, 7), [one + 0.05 * seed for one in _noise(seed + 100, 0.02, 9)]
    assert drift.p_value(first, second) == pytest.approx(_exact(first, second), abs=0.02)


def test_ties_are_corrected_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The textbook's formula, by hand: ranks 2, 2, 2, 5 and 5, 5, 7, so U = 0.5 + 0.5 + 1 = 1 of 12, ties 24 + 24."""
    monkeypatch.setattr(drift, "_inflation", lambda *_: 1.0)
    variance = 12 / 12 * (8 - (24 + 24) / 42)
    expected = math.erfc((5 - 0.5) / math.sqrt(2 * variance))
    assert drift.p_value([1.0, 1.0, 1.0, 2.0], [2.0, 2.0, 3.0]) == pytest.approx(expected)
    assert drift.p_value([1.0] * 5, [1.0] * 5) == 1.0


def test_nights_that_resemble_each_other_count_for_less() -> None:
    waves = [math.sin(night / 3) for night in range(LENGTH)]
    assert drift._inflation(waves) > 5  # noqa: SLF001
    assert drift._inflation(_noise(3)) < 1.6  # noqa: SLF001
    assert drift._inflation([10.0 + night for night in range(LENGTH)]) == 1.0, "a straight creep is no resemblance"  # noqa: SLF001


def test_a_step_and_a_creep_are_called_and_their_direction_is_told() -> None:
    step = _noise(1)
    step[-drift.NEWEST :] = [one * 1.05 for one in step[-drift.NEWEST :]]
    found = drift.change(_series(step))
    assert found
    assert (found.worse, found.p < drift.LIMIT) == (True, True)
    assert "patched time: median 10." in found.text
    assert " ms over the last 14 runs, " in found.text
    creep = [one * (1 + 0.001 * night) for night, one in enumerate(_noise(2))]
    assert drift.change(_series(creep))
    faster = drift.change(_series([one / 1.05 for one in creep[::-1]]))
    assert faster
    assert faster.worse is False
    rate = drift.change(_series(creep, "GB/s"))
    assert rate
    assert rate.worse is False
    unknown = drift.change(_series(creep, "relative error"))
    assert unknown
    assert unknown.worse is None


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_outliers_are_no_change(seed: int) -> None:
    values = _noise(seed)
    assert drift.change(_series(values)) is None
    values[-3:] = [30.0, 30.0, 30.0]
    assert drift.change(_series(values)) is None


def test_too_few_runs_and_too_small_a_difference_are_no_change() -> None:
    step = [10.0] * (drift.FEWEST - 1) + [20.0] * drift.NEWEST
    assert drift.change(_series(step)) is None
    assert drift.change(_series([10.0, *step])) is not None
    assert drift.change(_series([10.0] * drift.FEWEST + [10.0 * (1 + drift.SMALLEST / 2)] * drift.NEWEST)) is None
    from_nothing = drift.change(_series([0.0] * drift.FEWEST + [3.0] * drift.NEWEST, "sites"))
    assert from_nothing
    assert "%" not in from_nothing.text


def test_a_count_that_flickers_is_no_change() -> None:
    flickers = [18.0] * drift.BEFORE + [18.0, 17.0] * (drift.NEWEST // 2 - 1) + [18.0, 18.0]
    assert drift.change(_series(flickers)) is None


def _night(value: float) -> list[CellRow]:
    return [nights.cell(target="sm_90a", figures=[nights.figure("time", value)])]


def test_what_is_worse_needs_attention_where_nothing_disturbs_the_cell() -> None:
    values = [*_noise(1, 0.01, 2 * drift.FEWEST), *(11.0 + 0.01 * one for one in range(drift.NEWEST))]
    every = [nights.results(night, _night(value)) for night, value in enumerate(values)]
    past = [cell for one in every[:-1] for cell in database.cells_of(one.run, one)]
    for measuring, worse in (({"01_toy/sm_90a"}, True), (set[str](), False)):
        (row,) = drift.rows(every[-1], past, measuring)
        (change,) = row.changes
        assert (change.kind, change.worse, change.about) == ("changed over the runs", worse, "pristine time")
        assert row.needs_attention is worse
    other = nights.results(len(values), [replace(_night(1.0)[0], figures=())])
    (row,) = drift.rows(other, past, set())
    assert row.changes == (), "what this run did not measure is not called anew"


def test_a_sweep_calls_it_and_history_names_the_method(workbench: Workbench) -> None:
    """The nights before a real sweep had a figure of the toy pack ten times as large."""
    workbench.lay("01_confirmed")
    runs = workbench.folder / "sweeps"

    def sweep() -> dict[str, Any]:
        ended = workbench.run("sweep", "--runs", str(runs))
        assert "Traceback" not in ended.stderr, ended.stderr
        newest = max(runs.glob("*/results.json"))
        found: dict[str, Any] = json.loads(newest.read_text())
        return found

    first = sweep()
    (cell,) = first["cells"]
    names = [one["name"] for one in cell["figures"] if isinstance(one["pristine"], int | float)]
    assert names, "the toy pack prints a figure"
    template = runs / first["run"]
    for night in range(drift.FEWEST + drift.NEWEST - 1):
        folder = runs / f"20260101T{night:06d}Z"
        shutil.copytree(template, folder, ignore=shutil.ignore_patterns("logs", "receipts"))
        document = json.loads((folder / "results.json").read_text())
        document |= {"run": folder.name, "started": f"2026-01-01T00:{night:02d}:00+00:00"}
        if night < drift.FEWEST:
            for one in document["cells"][0]["figures"]:
                one["pristine"] = 10 * one["pristine"] if isinstance(one["pristine"], int | float) else one["pristine"]
        (folder / "results.json").write_text(json.dumps(document))
    shutil.rmtree(template)
    last = sweep()
    kinds = {change["kind"] for change in last["cells"][0]["changes"]}
    assert kinds == {"changed over the runs"}
    said = workbench.run("history", "1", "--runs", str(runs)).stdout
    assert f"Changed over the runs ({drift.METHOD}):" in said
    assert f"cpu: pristine {names[0]}: median " in said
    page = (runs / last["run"] / "index.html").read_text()
    assert f"CHANGED OVER THE RUNS: pristine {names[0]}" in page
    assert f'aria-label="{names[0]}, pristine, ' in page
    assert drift.METHOD.replace("<", "&lt;") in page
    (found,) = json.loads(workbench.run("history", "1", "--json", "--runs", str(runs)).stdout)["changes"]
    assert found["before"] == pytest.approx(10 * found["now"])
