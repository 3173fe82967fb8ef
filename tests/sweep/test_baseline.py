"""What a sweep is compared with, and what counts as a change."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.errors import HarnessError
from harness.core.words import Evidence, LaneName, LaneVerdict, Verdict
from harness.host.host import Gpu
from harness.lane.cell import Cell
from harness.lane.results import FigureLine, LaneEnd, LaneRecord
from harness.receipt import receipt
from harness.receipt.receipt import Receipt
from harness.schedule import selection
from harness.sweep import collector, run_folder
from harness.sweep.collector import Baseline
from harness.sweep.outputs import write
from harness.sweep.run_folder import NOT_HERE
from harness.verdict.pack_verdict import Judgement, Outcome
from testing import nights
from testing.laid_out import HOST
from testing.workbench import REPOSITORY

RECEIPT = REPOSITORY / "packs/09_liger_flce_none/receipts/cpu.interpreted.json"


def _measuring(toy: Cell) -> Cell:
    target = replace(toy.pack.definition.targets["cpu"], measures=True)
    return replace(toy, pack=replace(toy.pack, definition=replace(toy.pack.definition, targets={"cpu": target})))


def _receipt(figure: FigureLine, gpu: str) -> Receipt:
    found = receipt.load(RECEIPT)
    lanes = {"pristine": replace(found.lanes["pristine"], figures=(figure,))}
    return replace(found, lanes=lanes, host=replace(found.host, gpus=(Gpu(gpu, "9.0"),)))


def _outcome(cell: Cell, figure: FigureLine) -> Outcome:
    record = LaneRecord(LaneVerdict.BUG_REPRODUCED, "", 10, 1.0, 0, 0, "", "", figures=(figure,))
    gpus = (Gpu("Toy", "9.0"),)
    end = LaneEnd("key", "task", LaneName.PRISTINE, "", 1.0, "gpu 0", HOST, gpus, "1.0", "", "", record)
    return Outcome(replace(cell, evidence=Evidence.EXECUTED), Judgement(Verdict.REPRODUCED), ((end,),))


@pytest.mark.parametrize(
    ("unit", "before", "after", "kinds"),
    [
        ("ms", (10.0, 0.5), (10.9, 0.5), []),
        ("ms", (10.0, 0.5), (11.1, 0.5), ["slower"]),
        ("ms", (10.0, 0.01), (10.4, 0.01), []),  # below the floor
        ("ms", (10.0, 0.01), (9.0, 0.01), ["faster"]),
        ("ms", (10.0, None), (99.0, None), []),  # of unknown noise
        ("GB/s", (100.0, 1.0), (80.0, 1.0), ["slower"]),
        ("GB/s", (100.0, 1.0), (120.0, 1.0), ["faster"]),
        ("MiB", (100.0, None), (120.0, None), ["more memory"]),
        ("MiB", (100.0, None), (100.0, None), []),
        ("1", (100.0, 0.0), (500.0, 0.0), ["figure changed"]),
        ("1", (0.5, 0.1), (0.6, 0.1), []),
        ("1", (0.5, None), (0.6, None), []),  # of unknown noise
        ("ms", ("nan", 0.1), (5.0, 0.1), []),
    ],
)
def test_a_figure_changed_only_by_more_than_its_noise(
    toy: Cell, unit: str, before: tuple[Any, Any], after: tuple[Any, Any], kinds: list[str]
) -> None:
    was, is_now = (FigureLine("time", value, unit, spread) for value, spread in (before, after))
    now, then = _outcome(_measuring(toy), is_now), _receipt(was, "Toy")
    assert [change.kind for change in collector.figure_changes(now, then)] == kinds
    disturbed = [] if unit in collector.DISTURBED else kinds
    shared = _outcome(toy, is_now)
    assert [change.kind for change in collector.figure_changes(shared, then)] == disturbed, "its lanes shared the host"
    assert collector.figure_changes(now, _receipt(was, "Another")) == [], "another GPU is another measurement"


@pytest.mark.parametrize(
    ("before", "verdict", "kinds"),
    [
        ("CONFIRMED", "CONFIRMED", []),
        ("CONFIRMED", "FIXED_UPSTREAM", [("fixed upstream", True)]),
        ("FIXED_UPSTREAM", "CONFIRMED", [("has the bug", True)]),
        ("ERROR", "CONFIRMED", [("recovered", False)]),
        ("CONFIRMED", "FIX_INCOMPLETE", [("fix incomplete", True)]),
    ],
)
def test_a_bug_that_comes_back_is_no_recovery(before: str, verdict: str, kinds: list[tuple[str, bool]]) -> None:
    assert [(change.kind, change.worse) for change in collector.verdict_changes(verdict, before, "toy 1.1")] == kinds


def test_a_newer_release_is_expected_to_be_fixed_where_pack_toml_says_so(toy: Cell) -> None:
    newest = replace(toy, column=selection.LATEST, version="2.1")
    assert collector.expected(newest, None) == Verdict.FIXED_UPSTREAM
    assert collector.expected(replace(newest, version="1.9"), None) == Verdict.CONFIRMED
    assert collector.expected(toy, None) == Verdict.CONFIRMED


def _judged(run: Path, pack: str, name: str = "cpu.traced") -> None:
    """Lay a receipt, which each run has that judged something."""
    (run / "receipts" / pack).mkdir(parents=True)
    (run / "receipts" / pack / f"{name}.json").write_bytes(RECEIPT.read_bytes())


def test_the_newest_run_that_judged_something_is_the_baseline(tmp_path: Path) -> None:
    judged, empty = (nights.lay(tmp_path, nights.results(night, [nights.cell()])) for night in (0, 1))
    _judged(judged, "01_toy")
    with pytest.raises(HarnessError, match="that run judged nothing"):
        collector.find_baseline(empty)
    for folder in (tmp_path, judged):
        assert collector.find_baseline(folder).sweeps == (judged,)


def test_each_cell_is_compared_with_the_newest_run_that_judged_it(toy: Cell, tmp_path: Path) -> None:
    older, newer = (nights.lay(tmp_path, nights.results(number, [nights.cell()])) for number in (0, 1))
    _judged(older, toy.pack.name, f"{toy.target}.{toy.evidence}")
    _judged(newer, "02_other")
    found = collector.find_baseline(tmp_path)
    assert found.sweeps == (newer, older)
    for cell in (toy, replace(toy, evidence=None)):
        assert found.receipt_of(cell), "the newest run judged another pack alone"
    assert found.receipt_of(replace(toy, evidence=Evidence.COMPILED)) is None


@pytest.mark.parametrize(
    "damaged", [b"\xff\x00", b'{"cells": [{"name": [], "verdict": 1e999}]}', b"[" * 900, b'{"cells": 5}']
)
def test_what_an_earlier_run_left_damaged_is_passed_over(toy: Cell, tmp_path: Path, damaged: bytes) -> None:
    run = nights.lay(tmp_path / "runs", nights.results(0, [nights.cell()]))
    path = run / "receipts/01_confirmed/cpu.traced.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    assert collector.find_baseline(run).receipt_of(toy) is None
    (run / "results.json").write_bytes(damaged)
    assert collector.find_baseline(run.parent).receipt_of(toy) is None
    assert run_folder.cells_not_run(run.parent) == []


def test_a_night_that_judged_nothing_does_not_say_that_nothing_changed(tmp_path: Path) -> None:
    for verdict, said in ((NOT_HERE, "Nothing was judged."), (Verdict.CONFIRMED, "Nothing changed.")):
        write(nights.results(0, [nights.cell(verdict=verdict)]), tmp_path)
        for name in ("summary.md", "index.html"):
            text = (tmp_path / name).read_text()
            assert (said in text, text.count("Nothing ")) == (True, 1), name


def test_the_baseline_is_the_committed_receipts_a_run_or_the_newest_of_many(tmp_path: Path) -> None:
    assert not collector.find_baseline(None).sweeps
    with pytest.raises(HarnessError, match="no such folder"):
        collector.find_baseline(tmp_path / "missing")
    runs = tmp_path / "runs"
    runs.mkdir()
    assert not collector.find_baseline(runs).sweeps, "the first sweep compares with the receipts"
    moment = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
    with run_folder.open_run(runs, (), moment):
        assert collector.find_baseline(runs) == Baseline((), "the committed receipts: no earlier run judged anything")
