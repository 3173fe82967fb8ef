"""`history`: verdicts and figures over the runs, from a database that the run folders can always make anew."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.errors import HarnessError
from harness.core.words import Verdict
from harness.sweep import database, series
from harness.sweep.results import FLAKY, NOT_HERE, NOT_RUN, CellRow
from testing import nights
from testing.workbench import REPOSITORY, Workbench


def _command(runs: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", str(REPOSITORY / "runner.py"), "history", *arguments, "--runs", str(runs)]


def _history(runs: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(_command(runs, *arguments), capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == status, ended.stderr + ended.stdout
    return ended


def _cells(runs: Path, *arguments: str) -> list[dict[str, Any]]:
    document = json.loads(_history(runs, *arguments, "--json").stdout)
    assert document["schema"] == 1
    found: list[dict[str, Any]] = document["cells"]
    return found


def _timed(night: int, *, verdict: str = "CONFIRMED") -> list[CellRow]:
    figures = [nights.figure("time", 10.0 + night, patched=5.0, spread=0.5), nights.figure("waits", ["a.py:3"], "")]
    return [nights.cell(verdict=verdict, figures=figures), nights.cell("02_other")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lay twelve nights of two packs; in the last the driver is another and the verdict an error."""
    for night in range(11):
        nights.lay(tmp_path, nights.results(night, _timed(night)))
    nights.lay(tmp_path, nights.results(11, _timed(11, verdict="ERROR"), driver="590.2"))
    return tmp_path


def test_a_sweep_keeps_its_results_and_history_shows_them(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    runs = workbench.folder / "sweeps"
    assert workbench.run("sweep", "--runs", str(runs)).returncode == 0
    with sqlite3.connect(runs / database.NAME) as connection:
        assert connection.execute("SELECT cell, verdict FROM cells").fetchall() == [("01_confirmed/cpu", "CONFIRMED")]
    connection.close()
    said = _history(runs, "confirmed").stdout
    assert said.startswith("01_confirmed: 1 run, 20")
    assert "C CONFIRMED" in said
    (runs / database.NAME).unlink()
    assert _history(runs, "1").stdout == said


def test_the_table_has_a_strip_of_verdicts_and_a_sparkline_for_each_figure(folder: Path) -> None:
    lines = _history(folder, "1").stdout.splitlines()
    assert lines[0] == "01_toy: 12 runs, 2026-01-01 to 2026-01-12"
    assert "CCCCCCCCCCCE" in lines[3]
    assert "ERROR" in lines[3]
    (pristine,) = (line for line in lines if "time" in line and "pristine" in line)
    assert pristine.split()[3:] == ["12", "10", "15.5", "21", "21", "±", "0.5", "ms", "▁▂▂▃▄▄▅▅▆▇▇█"]
    assert any("time" in line and "never changed" in line for line in lines)
    assert lines[-1] == "C CONFIRMED, E ERROR"


def test_one_figure_has_a_line_for_each_run_and_names_what_changed_around_it(folder: Path) -> None:
    lines = _history(folder, "1", "--figure", "time", "--since", "2026-01-10").stdout.splitlines()
    rows = [line for line in lines if line.startswith("20260")]
    assert [row.split()[0] for row in rows] == ["20260110T020000Z", "20260111T020000Z", "20260112T020000Z"]
    assert "21 ± 0.5  5 ± 0.5" in rows[-1]
    assert rows[-1].rstrip().endswith("driver 580.1 -> 590.2")
    assert not any("->" in row for row in rows[:-1])
    assert "a.py:3" in _history(folder, "1", "--figure", "waits").stdout


def test_json_and_csv_hold_every_value(folder: Path) -> None:
    cells = _cells(folder, "1", "--figure", "time")
    assert [one["figures"][0]["value"] for one in cells] == [10.0 + night for night in range(12)]
    assert cells[-1]["versions"]["driver"] == "590.2"
    assert _cells(folder, "1")[0]["figures"][2]["text"] == '["a.py:3"]'
    rows = list(csv.DictReader(io.StringIO(_history(folder, "1", "--csv", "--since", "2026-01-12").stdout)))
    said = [(row["figure"], row["lane"], row["value"], row["spread"]) for row in rows]
    assert said == [
        ("time", "pristine", "21.0", "0.5"),
        ("time", "patched", "5.0", "0.5"),
        ("waits", "pristine", '["a.py:3"]', ""),
    ]
    other = list(csv.DictReader(io.StringIO(_history(folder, "other", "--csv").stdout)))
    assert [(row["verdict"], row["figure"]) for row in other] == [("CONFIRMED", "")] * 12


def test_runs_of_older_runners_are_read(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "baselines/h200", tmp_path / "h200")
    documents = [json.loads(path.read_text()) for path in sorted((tmp_path / "h200").glob("*/results.json"))]
    assert [one["schema"] for one in documents] == [1, 2, 2]
    cells = _cells(tmp_path / "h200", "9", "--target", "sm_90a")
    expected = [cell for one in documents for cell in one["cells"] if cell["name"] == "09_liger_flce_none/sm_90a"]
    assert [cell["verdict"] for cell in cells] == [cell["verdict"] for cell in expected]
    assert [cell["gpu"] for cell in cells] == ["NVIDIA H200"] * 3
    assert [len(cell["figures"]) for cell in cells] == [
        sum(one[lane] is not None for one in cell["figures"] for lane in ("pristine", "patched")) for cell in expected
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"schema": 99}', "schema 99: this runner reads 1 to"),
        ('{"schema": true}', "schema True"),
        ('{"schema": 3, "cells": []}', "is missing"),
        ("\udcff", "not UTF-8"),
        (None, "No such file"),
        ("interrupted", "the sweep was interrupted"),
        ("twice", "a cell stands there twice"),
        ("timeless", "names no time zone"),
        ("before time", "is no date in UTC"),
        ("status", "is none of the runner's"),
    ],
)
def test_a_run_that_cannot_be_read_is_named_and_passed_over(tmp_path: Path, text: str | None, reason: str) -> None:
    nights.lay(tmp_path, nights.results(0, _timed(0)))
    bad = nights.results(1, _timed(1))
    bad = {
        "twice": replace(bad, cells=bad.cells[:1] * 2),
        "timeless": replace(bad, started="2026-01-02T02:00:00"),
        "before time": replace(bad, started="0001-01-01T00:00:00+12:00"),
        "status": replace(bad, status=2**63),
    }.get(text or "", bad)
    path = nights.lay(tmp_path, bad) / "results.json"
    if text == "interrupted":
        path.write_text(path.read_text().replace('"finished": true', '"finished": false'))
    elif text is None:
        path.unlink()
    elif text not in {"twice", "timeless", "before time", "status"}:
        path.write_bytes(text.encode(errors="surrogateescape"))
    past = database.read(tmp_path, "01_toy")
    assert [cell.run for cell in past.cells] == ["20260101T020000Z"]
    assert [one.run for one in past.passed_over] == ["20260102T020000Z"]
    assert reason in past.passed_over[0].reason
    nights.lay(tmp_path, nights.results(1, _timed(1)))
    past = database.read(tmp_path, "01_toy")
    assert (len(past.cells), past.passed_over) == (2, ())


def test_what_is_passed_over_is_said_in_one_line(folder: Path) -> None:
    (folder / "20260102T020000Z/results.json").write_text("{")
    ended = _history(folder, "1", "--json")
    assert re.fullmatch(
        r"20260102T020000Z is passed over: results.json: not JSON: .* Next: delete that run, .*\n", ended.stderr
    )
    assert [one["run"] for one in json.loads(ended.stdout)["passed_over"]] == ["20260102T020000Z"]


def test_a_run_that_goes_on_counts_when_it_ends_and_one_that_is_gone_no_longer(folder: Path) -> None:
    tomorrow = nights.results(12, _timed(12))
    path = nights.lay(folder, tomorrow, finished=False)
    assert len(database.read(folder, "01_toy").cells) == 12
    (path / "results.json").unlink()
    assert len(database.read(folder, "01_toy").cells) == 12
    nights.lay(folder, tomorrow)
    assert len(database.read(folder, "01_toy").cells) == 13
    shutil.rmtree(path)
    assert len(database.read(folder, "01_toy").cells) == 12
    nights.lay(folder, nights.results(11, _timed(11)))
    assert database.read(folder, "01_toy").cells[-1].verdict == "CONFIRMED", (
        "results that were written again count as they are now"
    )
    (folder / "nothing").mkdir()
    (folder / "20269999T020000Z").write_text("a file, no run")
    assert len(database.read(folder, "01_toy").cells) == 12


@pytest.mark.parametrize("damage", ["no database", "half", "other version", "other tables"])
def test_a_damaged_database_is_made_anew(folder: Path, damage: str) -> None:
    said = database.read(folder, "01_toy")
    path = folder / database.NAME
    data = path.read_bytes()
    if damage == "no database":
        path.write_text("not a database " * 500)
    elif damage == "half":
        path.write_bytes(data[: len(data) // 2])
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 99" if damage == "other version" else "DROP TABLE figures")
        connection.close()
    assert database.read(folder, "01_toy") == said
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def test_what_breaks_off_in_the_middle_leaves_the_old_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database.update(folder)
    before = (folder / database.NAME).read_bytes()
    nights.lay(folder, nights.results(12, _timed(12)))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(database, "_add_results", interrupted)
        with pytest.raises(KeyboardInterrupt):
            database.update(folder)
    assert (folder / database.NAME).read_bytes() == before
    assert len(database.read(folder, "01_toy").cells) == 13


def test_several_at_once_all_get_the_whole_answer(folder: Path) -> None:
    command = _command(folder, "1", "--json")
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=60) for process in started]
    assert {process.returncode for process in started} == {0}, said
    assert len({text for text, _ in said}) == 1
    assert len(json.loads(said[0][0])["cells"]) == 12


def test_whoever_waits_too_long_for_another_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "PATIENCE", 0.05)
    with database._locked(folder), pytest.raises(HarnessError, match=r"another process writes .* Next: wait"):  # noqa: SLF001
        database.update(folder)


def test_a_folder_that_cannot_be_written_is_read_into_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert len(database.read(folder, "01_toy").cells) == 12
    assert not (folder / database.NAME).exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("3",), "no pack '3' Choices: 01_toy, 02_other. Next: runner.py history"),
        (("0*",), "'0*' names 2 packs (01_toy, 02_other). Next: runner.py history 01_toy"),
        (("1", "--figure", "tmie"), "no figure 'tmie'; did you mean time? Choices: time, waits."),
        (("1", "--target", "sm_90a"), "no target 'sm_90a' Choices: cpu."),
        (("1", "--since", "2026-02-01"), "no run since then judged 01_toy. Next: an earlier --since"),
        (("1", "--since", "yesterday"), "'yesterday' is no date such as 2026-11-21"),
        (("1", "--since", "2026-02-31"), "is no date"),
        (("1", "--since", "9999999d"), "is no date"),
    ],
)
def test_a_wrong_call_is_one_line(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    ended = _history(folder, *arguments, status=2)
    assert said in ended.stderr
    assert ended.stdout == ""


def test_where_there_is_no_run_the_next_step_is_a_sweep(tmp_path: Path) -> None:
    for runs in (tmp_path, tmp_path / "none"):
        assert "holds no finished sweep. Next: runner.py sweep" in _history(runs, "1", status=2).stderr
    nights.lay(tmp_path, nights.results(0, [])).joinpath("results.json").write_text("{")
    assert "holds no finished sweep that can be read (20260101T020000Z" in _history(tmp_path, "1", status=2).stderr


def test_escapes_of_a_probe_reach_no_terminal(tmp_path: Path) -> None:
    row = nights.cell(figures=[nights.figure("time\x1b[31m", 1.0, "ms\x07"), nights.figure("[bold]x", "a\x1b[2J")])
    nights.lay(tmp_path, nights.results(0, [row]))
    said = _history(tmp_path, "1").stdout + _history(tmp_path, "1", "--figure", "[bold]x").stdout
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "[bold]x" not in _history(tmp_path, "1").stdout, "it is no number"


@pytest.mark.parametrize("values", [[], [0.0], [1e308, -1e308], [5e-324, 0.0], [1.0, 1.0 + 1e-16], [2.0, math.pi]])
def test_a_sparkline_takes_every_value(values: list[float]) -> None:
    assert len(series.sparkline(values)) == len(values)


def test_a_figure_on_another_gpu_is_another_series(tmp_path: Path) -> None:
    for night in range(4):
        found = nights.results(night, [nights.cell(target="sm_90a", figures=[nights.figure("time", float(night))])])
        other = replace(found.gpus[0], name="NVIDIA H100")
        nights.lay(tmp_path, found if night % 2 else replace(found, gpus=(other,)))
    found = series.of(database.read(tmp_path, "01_toy").cells)
    assert [(one.gpu, one.values) for one in found] == [("NVIDIA H100", [0.0, 2.0]), (nights.GPU, [1.0, 3.0])]
    assert "sm_90a on NVIDIA H100" in _history(tmp_path, "1").stdout


def test_the_release_that_changes_is_marked(tmp_path: Path) -> None:
    for night, version in enumerate(("1.0", "", "1.0", "1.1")):
        nights.lay(tmp_path, nights.results(night, [replace(nights.cell(), version=version)]))
    marks = list(series.marks(database.read(tmp_path, "01_toy").cells))
    assert marks == [("20260104T020000Z", "toykernel 1.0 -> 1.1")]


def test_the_largest_numbers_of_json_are_kept(tmp_path: Path) -> None:
    row = replace(nights.cell(figures=[nights.figure("count", 2**64 - 1, "", spread=2**64 - 1)]), seconds=2**64 - 1)
    nights.lay(tmp_path, replace(nights.results(0, [row]), seconds=2**64 - 1))
    (cell,) = database.read(tmp_path, "01_toy").cells
    assert (cell.seconds, cell.figures[0].value, cell.figures[0].spread) == (2.0**64, 2.0**64, 2.0**64)


def test_every_verdict_has_a_letter_of_its_own() -> None:
    assert set(series.LETTERS) == {*Verdict, FLAKY, NOT_HERE, NOT_RUN}
    assert len(set(series.LETTERS.values())) == len(series.LETTERS)
