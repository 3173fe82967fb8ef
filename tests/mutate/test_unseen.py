"""`runner.py mutate --unseen`: wrong fixes that the script had not met; their figure is had once, and stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.pack import load
from harness.report import report
from testing import workbench as benches
from testing.workbench import Workbench

NAME = "43_lets_wrong_fixes_pass"
RECORD = "receipts/first_sight.cpu.traced.json"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Judge a pack whose unseen wrong fixes are two that its script lets pass and one that it refuses."""
    made = benches.empty(tmp_path_factory.mktemp("seen"))
    folder = made.lay(NAME)
    (folder / "mutants").rename(folder / "unseen")
    (folder / "mutants").mkdir()
    (folder / "unseen").rename(folder / "mutants/unseen")
    made.recorded()
    status, shown = _mutate(made, "--record")
    assert status == 1, "two pass"
    assert "unseen wrong fixes: killed 1 of 3; 2 survived" in shown
    return made


@pytest.fixture
def workbench(seen: Workbench, tmp_path: Path) -> Workbench:
    """Copy that pack, so that a test may change it."""
    return benches.copied(seen, tmp_path)


@pytest.fixture
def pack(workbench: Workbench) -> Path:
    return workbench.packs / NAME


def _mutate(workbench: Workbench, *arguments: str) -> tuple[int, str]:
    ended = workbench.run("mutate", "--target", "cpu", "--unseen", *arguments)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout + ended.stderr


def test_the_figure_of_a_first_sight_stands_beside_the_strength(workbench: Workbench, pack: Path) -> None:
    found = json.loads((pack / RECORD).read_text())
    assert {one["name"]: (one["origin"], one["fate"]) for one in found["mutants"]} == {
        "adds_the_weight": ("unseen", "killed"),
        "loses_an_empty_total": ("unseen", "survived"),
        "rounds_the_total": ("unseen", "survived"),
    }
    assert not list((pack / "receipts").glob("strength.*")), "the strength is of the pack's own and generated ones"
    assert "CONFIRMED (traced), fresh; mutants: not measured; 1 of 3 at first sight" in workbench.run("list").stdout
    assert "not measured; 1 of 3 at first sight |" in report.render(load.load_pack(pack), is_draft=True)
    (pack / RECORD).unlink()
    said = "mutants/unseen/: not judged yet: adds_the_weight, loses_an_empty_total, rounds_the_total"
    assert said in workbench.findings()


def test_what_passed_is_open_until_a_check_refuses_it(workbench: Workbench, pack: Path) -> None:
    said = workbench.findings()
    assert "first_sight.cpu.traced.json: still open: loses_an_empty_total, rounds_the_total." in said
    assert "not judged yet" not in said
    (pack / "mutants/unseen/rounds_the_total.patch").rename(pack / "mutants/rounds.patch")
    assert "still open: loses_an_empty_total." in workbench.findings()
    reason = '[[equivalent]]\nname = "loses_an_empty_total"\nreason = "Nobody asks for the total of nothing."\n'
    (pack / "mutants/equivalent.toml").write_text(reason)
    assert "still open" not in workbench.findings()
    (pack / "mutants/equivalent.toml").unlink()
    (pack / "mutants/unseen/loses_an_empty_total.patch").unlink()
    assert (
        "loses_an_empty_total passed, and its patch is neither in mutants/unseen/ nor in mutants/"
        in workbench.findings()
    )


def test_a_first_sight_is_had_once(workbench: Workbench, pack: Path) -> None:
    before = (pack / RECORD).read_bytes()
    status, said = _mutate(workbench, "--record")
    assert (status, (pack / RECORD).read_bytes()) == (2, before)
    assert "mutants/unseen: the pack was shown adds_the_weight (recorded on 20" in said
    (pack / RECORD).unlink()
    shutil.copy(pack / "mutants/unseen/adds_the_weight.patch", pack / "mutants/another_name.patch")
    status, said = _mutate(workbench, "--record")
    assert status == 2
    assert "adds_the_weight (mutants/another_name.patch)" in said


def test_a_script_of_another_day_keeps_the_figure(workbench: Workbench, pack: Path) -> None:
    with (pack / "reproduce.py").open("a") as stream:
        stream.write("\nANOTHER = 1\n")
    assert "1 of 3 at first sight" in workbench.run("list").stdout
    assert "first_sight.cpu.traced.json: STALE" not in workbench.findings()


def test_what_was_seen_in_a_weaker_way_is_said_beside_the_stronger_one(workbench: Workbench, pack: Path) -> None:
    found = json.loads((pack / RECORD).read_text())
    weaker = pack / "receipts/first_sight.cpu.compiled.json"
    weaker.write_text(json.dumps(found | {"evidence": "compiled"}))
    assert "1 of 3 at first sight\n" in workbench.run("list").stdout, "the same way goes before another one"
    (pack / RECORD).unlink()
    assert "1 of 3 at first sight (compiled)" in workbench.run("list").stdout
    assert "1 of 3 at first sight (compiled) |" in report.render(load.load_pack(pack), is_draft=True)


def test_no_other_wrong_fixes_are_mixed_in(workbench: Workbench, pack: Path) -> None:
    before = (pack / RECORD).read_bytes()
    status, said = _mutate(workbench, "--generated", "2")
    assert (status, (pack / RECORD).read_bytes()) == (2, before)
    assert "--unseen takes no other wrong fixes" in said


def test_a_pack_without_unseen_ones_is_refused(workbench: Workbench, pack: Path) -> None:
    shutil.rmtree(pack / "mutants/unseen")
    status, said = _mutate(workbench, "--record")
    assert status == 2
    assert "no mutants/unseen/*.patch. Next: let somebody who has not read the contract write some" in said


def test_a_record_that_was_edited_is_unsound(workbench: Workbench, pack: Path) -> None:
    text = (pack / RECORD).read_text()
    for old, new, reason in (
        ('"killed": 1', '"killed": 3', "its numbers are not those of its mutants"),
        ('"target": "cpu"', '"target": "sm_90a"', "speaks of 43_lets_wrong_fixes_pass sm_90a"),
        ('"fate": "killed"', '"fate": "refused"', "first_sight.cpu.traced.json"),
    ):
        assert old in text
        (pack / RECORD).write_text(text.replace(old, new, 1))
        assert reason in workbench.findings()
