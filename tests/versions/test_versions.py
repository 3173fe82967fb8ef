"""Over releases and commits: where the bug came in, and where it was fixed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from harness.core.words import LaneVerdict
from harness.versions import judging, timeline
from harness.versions.timeline import Entry
from testing import histories
from testing.package_index import served, settings
from testing.workbench import Workbench

LETTERS = {
    "B": LaneVerdict.BUG_REPRODUCED,
    "r": LaneVerdict.FIX_VALIDATED,
    "?": LaneVerdict.UNSUPPORTED,
    "E": LaneVerdict.ERROR,
    "C": LaneVerdict.CONTROL_FAILED,
}
MIXED = {"0.1": "unimportable", "0.2": "other API", "0.3": "right", "0.9": "unimportable"}
MIXED |= {"1.0": "wrong", "1.1": "wrong", "2.0": "right"}


def _rows(text: str) -> list[Entry]:
    return [Entry(str(number), "", LETTERS[letter]) for number, letter in enumerate(text)]


def _bisected(rows: list[Entry], end: int, anchor: int) -> list[Entry]:
    """Return the entries that a bisection from `anchor` to `end` had to judge."""
    tried = {anchor: rows[anchor]}

    def judge(index: int) -> Entry:
        tried[index] = rows[index]
        return rows[index]

    judging.search(judge, end, anchor)
    return [tried[index] for index in sorted(tried)]


def _versions(workbench: Workbench, states: dict[str, str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run the verb over an index that serves these releases; return the exit status, the JSON and standard error."""
    with served(histories.shelf(workbench.folder / "index", states)) as url:
        ended = workbench.run("versions", "1", "--online", "--json", *arguments, **settings(url))
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, json.loads(ended.stdout) if ended.stdout else {}, ended.stderr


@pytest.mark.parametrize(
    ("verdicts", "line"),
    [
        ("rrBBr", "bug from 2, fixed in 4"),
        ("BBr", "bug from 0 or earlier, fixed in 2"),
        ("??BBr", "bug from 2 or earlier, fixed in 4"),
        ("rBB", "bug from 1, not fixed in 2"),
        ("rBB??", "bug from 1, not fixed in 2"),
        ("r??BEr", "bug from 3 or earlier, fixed in 5 or earlier"),
        ("rBrrBBr", "bug from 1, fixed in 2; again bug from 4, fixed in 6"),
        ("B?B??Br", "bug from 0 or earlier, fixed in 6"),
        ("rr?C", "no bug in the 2 that were judged; 2 were not"),
        ("?EC", "nothing can be said: none of the 3 could be judged"),
    ],
)
def test_the_line_says_what_the_verdicts_allow_and_no_more(verdicts: str, line: str) -> None:
    assert timeline.line(_rows(verdicts)) == line


@pytest.mark.parametrize("unjudged", ["", "?", "??", "E?C"])
@pytest.mark.parametrize("size", [2, 3, 16, 17, 1000])
def test_a_bisection_finds_every_boundary_in_log2_lanes_and_skips(size: int, unjudged: str) -> None:
    for boundary in {min(place, size - 1) for place in (1, 2, size // 3 or 1, size // 2, size)}:
        middle = unjudged if boundary + len(unjudged) < size else ""
        rows = _rows("B" * boundary + middle + "r" * (size - boundary - len(middle)))
        tried = _bisected(rows, size - 1, 0)
        assert len(tried) <= math.ceil(math.log2(size)) + 2 + 2 * len(middle)
        expected = f"fixed in {boundary + len(middle)}" + (" or earlier" if middle else "")
        assert timeline.line(tried).endswith(expected)


def test_a_bisection_without_a_judged_end_never_takes_it_for_an_answer() -> None:
    tried = _bisected(_rows("?" * 20 + "B" * 12), 0, 31)
    assert timeline.line(tried).startswith("bug from 20 or earlier, ")
    assert len(tried) <= math.log2(32) + 2


def test_releases_are_judged_and_what_cannot_be_is_neither(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    status, found, _ = _versions(workbench, MIXED)
    rows = {row["label"]: row for row in found["rows"]}
    assert list(rows) == list(MIXED)
    said = {"1.0": "BUG_REPRODUCED", "2.0": "FIX_VALIDATED", "0.9": "UNSUPPORTED", "0.2": "UNSUPPORTED"}
    assert {label: rows[label]["verdict"] for label in said} == said
    assert "a_package_that_nobody_has" in rows["0.1"]["reason"]
    assert "AttributeError" in rows["0.2"]["reason"]
    assert rows["1.0"]["figure"] == "max_error 3"
    assert found["line"] == "bug from 1.0 or earlier, fixed in 2.0"
    assert status == 0
    again = workbench.run("versions", "1", "--range", ">=1,<2")
    assert again.returncode == 0, "what the index said is remembered for a machine without network"
    assert again.stdout.splitlines()[-1] == "bug from 1.0 or earlier, not fixed in 1.1"


def test_no_live_line_erases_the_table_on_a_terminal(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    with served(histories.shelf(workbench.folder / "index", {"1.0": "wrong"})) as url:
        shown = workbench.run_on_terminal("versions", "1", "--online", **settings(url))
    assert b"\x1b" not in shown.rpartition(b"bug from 1.0")[2]


def test_a_release_without_what_the_contract_imports_is_unsupported(workbench: Workbench) -> None:
    contract = workbench.lay("01_confirmed") / "contract.py"
    contract.write_text(contract.read_text() + "\n\nfrom toykernel.scale import only_in_newer_releases\n")
    status, found, _ = _versions(workbench, {"1.0": "wrong"})
    assert (status, found["rows"][0]["verdict"]) == (5, "UNSUPPORTED")
    assert "ImportError: cannot import name 'only_in_newer_releases'" in found["rows"][0]["reason"]


def test_sixteen_releases_by_bisection(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    states = {f"0.{minor}": "right" for minor in range(5)} | {f"1.{minor}": "wrong" for minor in range(7)}
    states |= {"2.0": "unimportable"} | {f"2.{minor}": "right" for minor in range(1, 4)}
    _, found, _ = _versions(workbench, states, "--bisect")
    assert found["line"] == "bug from 1.0, fixed in 2.1 or earlier"
    assert len(found["rows"]) <= 2 * math.log2(16) + 2, found["rows"]


def test_a_crash_and_wrong_controls_are_told_by_the_exit_status(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    status, found, _ = _versions(workbench, {"1.0": "wrong", "1.1": "crashing", "1.2": "control", "2.0": "right"})
    assert [row["verdict"] for row in found["rows"]] == ["BUG_REPRODUCED", "ERROR", "CONTROL_FAILED", "FIX_VALIDATED"]
    assert "SIGABRT" in found["rows"][1]["reason"]
    assert (status, found["line"]) == (1, "bug from 1.0 or earlier, fixed in 2.0 or earlier")


def test_a_pack_names_the_checks_that_other_releases_are_judged_by(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed") / "pack.toml"
    text = pack.read_text()
    states = {"0.9": "unimportable", "1.0": "wrong", "1.2": "control", "2.0": "right"}
    pack.write_text(text + '\n[versions]\nchecks = ["test_ones", "test_weights"]\n')
    status, found, _ = _versions(workbench, states)
    said = [(row["verdict"], row["reason"]) for row in found["rows"][1:]]
    beside = "by 2 of 3 checks; controls of other options are wrong: test_total"
    assert said == [("BUG_REPRODUCED", "by 2 of 3 checks"), ("BUG_REPRODUCED", beside), ("FIX_VALIDATED", said[2][1])]
    assert (status, found["line"], found["checks"]) == (
        0,
        "bug from 1.0 or earlier, fixed in 2.0",
        ["test_ones", "test_weights"],
    )
    pack.write_text(text + '\n[versions]\nchecks = ["test_total", "test_weights"]\n')
    found = json.loads(workbench.run("versions", "1", "--json", "--range", "==1.2").stdout)
    assert [row["verdict"] for row in found["rows"]] == ["CONTROL_FAILED"], "a control that is named counts"
    for alone, reason in (
        ("test_weights", "no control check among test_weights"),
        ("test_ones", "no defect check among test_ones"),
    ):
        pack.write_text(text + f'\n[versions]\nchecks = ["{alone}"]\n')
        (row,) = json.loads(workbench.run("versions", "1", "--json", "--range", "==1.0").stdout)["rows"]
        assert (row["verdict"], reason in row["reason"]) == ("UNSUPPORTED", True), row
    pack.write_text(text + '\n[versions]\nchecks = [" "]\n')
    assert "versions.checks[0]: ' ' is not" in workbench.run("versions", "1").stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--range", "nonsense"], 2, "no version range. Next:"),
        (["--range", ">=9"], 2, "no release of toykernel lies in it. The newest: 0.5, 1.0"),
        (["--range", "<1", "--bisect"], 1, "--bisect starts from 0.5, which gives FIX_VALIDATED"),
        (["--target", "sm_90a"], 5, "no sm_90a GPU here, and this pack lists cpu"),
    ],
)
def test_a_wrong_call_names_the_next_step(workbench: Workbench, arguments: list[str], status: int, said: str) -> None:
    workbench.lay("01_confirmed")
    found, _, errors = _versions(workbench, {"0.5": "right", "1.0": "wrong"}, *arguments)
    assert (found, said in errors) == (status, True), errors


def test_what_is_kept_holds_no_path(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    _versions(workbench, {"1.0": "wrong", "2.0": "unimportable"}, "--record")
    text = (pack / "data/history.cpu.json").read_text()
    assert str(workbench.folder) not in text
    assert json.loads(text)["rows"][0]["verdict"] == "BUG_REPRODUCED"


def test_an_interruption_ends_in_130_and_leaves_no_process(workbench: Workbench) -> None:
    workbench.lay("37_needs_long")
    states = {"0.9": "unimportable", "1.0": "wrong", "1.1": "wrong"}
    with served(histories.shelf(workbench.folder / "index", states)) as url:
        assert "interrupted" in workbench.interrupted("versions", "37", "--online", "--jobs", "2", **settings(url))
