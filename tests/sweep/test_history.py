"""`list --runs`: verdicts and figures over the sweeps, read from the results that lie there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testing import nights
from testing.workbench import REPOSITORY


def _history(runs: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(REPOSITORY / "runner.py"), "list", *arguments, "--runs", str(runs)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == status, ended.stderr + ended.stdout
    return ended


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lay three sweeps of two packs; in the last one the verdict is an error."""
    for night, verdict in enumerate(("CONFIRMED", "CONFIRMED", "ERROR")):
        figures = [nights.figure("time", 10.0 + night, patched=5.0, spread=0.5), nights.figure("waits", ["a.py"], "")]
        cells = [nights.cell(verdict=verdict, figures=figures), nights.cell("02_other")]
        nights.lay(tmp_path, nights.results(night, cells))
    return tmp_path


def test_each_sweep_has_a_line_with_the_figures_of_both_lanes(folder: Path) -> None:
    shown = _history(folder, "1").stdout
    assert "time [ms]" in shown
    lines = [line for line in shown.splitlines() if line.strip().startswith("2026")]
    assert [line.split()[2] for line in lines] == ["CONFIRMED", "CONFIRMED", "CONFIRMED", "CONFIRMED", "ERROR", "ERROR"]
    assert lines[-2].split()[3:] == ["time", "[ms]", "12", "5"]
    assert "['a.py']" in lines[-1]
    assert "02_other" not in shown
    assert "02_other/cpu" in _history(folder, "1", "2").stdout


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"schema": 99}'])
def test_a_sweep_that_cannot_be_read_is_named_and_passed_over(folder: Path, text: str | None) -> None:
    last = max(folder.iterdir())
    (last / "results.json").unlink()
    if text is not None:
        (last / "results.json").write_text(text)
    ended = _history(folder, "1")
    assert ended.stdout.count("2026") == 2 * 2, "two figures of two sweeps"
    assert ended.stderr.startswith(f"{last.name} is passed over: ")


@pytest.mark.parametrize(("wanted", "said"), [("7", "no pack '7'"), ("99", "no pack '99'")])
def test_a_wrong_call_is_one_line(folder: Path, wanted: str, said: str) -> None:
    error = _history(folder, wanted, status=2).stderr
    assert said in error
    assert error.count("\n") == 1


def test_where_there_is_no_sweep_the_next_step_is_one(tmp_path: Path) -> None:
    assert "Next: runner.py sweep --runs" in _history(tmp_path, "1", status=2).stderr


def test_escapes_reach_no_terminal(tmp_path: Path) -> None:
    nights.lay(tmp_path, nights.results(0, [nights.cell(figures=[nights.figure("a\x1b[2Jb", 1.0)])]))
    assert "\x1b" not in _history(tmp_path, "1").stdout
