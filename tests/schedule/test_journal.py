"""The journal gives back what it took, whatever a kill or a bad disk did to its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.core import files
from harness.core.words import LaneName, LaneVerdict
from harness.lane.record import LaneEnd, LaneRecord, LogRecord
from harness.schedule.journal import Journal

TEXT = "what the probe said\n"


def _end(key: str) -> LaneEnd:
    record = LaneRecord(LaneVerdict.BUG_REPRODUCED, "", 10, 1.0, 1, 0, "ab", "CPU")
    log = LogRecord(f"logs/{key}.log", files.sha256_bytes(TEXT.encode()))
    return LaneEnd(
        key, key, LaneName.PRISTINE, "2026-01-01T00:00:00+00:00", 1.5, "cpu", (), "1.0",
        "tree", "", record, "", log,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _logs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for key in ("one", "two", "three"):
        (tmp_path / f"logs/{key}.log").write_text(TEXT)


def test_a_journal_in_memory_keeps_the_same_rules() -> None:
    journal = Journal()
    journal.append(_end("one"))
    with pytest.raises(ValueError, match="one has ended already"):
        journal.append(_end("one"))
    assert (journal.read("one"), "one" in journal, journal.read("two")) == (_end("one"), True, None)
    assert journal.verdict("one") == LaneVerdict.BUG_REPRODUCED


def test_a_journal_gives_back_what_it_took(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        for name in ("one", "two"):
            journal.append(_end(name))
        with pytest.raises(ValueError, match="two has ended already"):
            journal.append(_end("two"))
    with Journal(tmp_path / "journal.jsonl") as journal:
        assert (len(journal), "one" in journal, "three" in journal) == (2, True, False)
        assert journal.read("two") == _end("two")
        assert journal.read("three") is None


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_half_a_line_at_the_end_of_a_journal_is_a_lane_that_did_not_end(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(_end("one"))
        journal.append(_end("two"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with Journal(path) as journal:
        assert ("one" in journal, "two" in journal) == (True, False)
        journal.append(_end("two"))
    assert path.read_bytes() == whole


def test_a_damaged_line_costs_its_own_lane_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for name in ("one", "two", "three"):
            journal.append(_end(name))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * (len(lines[1]) - 1) + b"\n" + lines[2])
    with Journal(path) as journal:
        assert ["one" in journal, "two" in journal, "three" in journal] == [True, False, True]
        journal.append(_end("two"))
        assert journal.read("three") == _end("three")
        assert journal.read("two") == _end("two")


SHAPES = {
    "no object": "[]",
    "another schema": '{"schema": 1}',
    "a record of a wrong shape": '{"schema": 3, "key": "one", "record": {"verdict": "BUG_REPRODUCED"}, "seconds": 1}',
    "a record that is none": '{"schema": 3, "key": "one", "record": null, "seconds": 1}',
    "a key that is a list": '{"schema": 3, "key": [], "record": null, "seconds": 1}',
    "900 brackets": '{"schema": 3, "key": ' + "[" * 900 + "]" * 900 + "}",
    "an infinity": '{"schema": 3, "key": "one", "record": null, "seconds": 1e999}',
    "half a character": '{"schema": 3, "key": "\\ud800", "record": null, "seconds": 1}',
}


@pytest.mark.parametrize("what", SHAPES)
def test_a_line_of_the_wrong_shape_costs_its_own_lane_alone(tmp_path: Path, what: str) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(_end("two"))
    path.write_text(SHAPES[what] + "\n" + path.read_text())
    with Journal(path) as journal:
        assert (len(journal), journal.passed_over, journal.read("one"), journal.read("two")) == (
            1,
            1,
            None,
            _end("two"),
        )
        journal.append(_end("one"))
    with Journal(path) as journal:
        assert journal.read("one") == _end("one")


@pytest.mark.parametrize("how", ["gone", "cut", "a folder"])
def test_a_lane_whose_log_is_gone_has_not_ended(tmp_path: Path, how: str) -> None:
    path, log = tmp_path / "journal.jsonl", tmp_path / "logs/one.log"
    with Journal(path) as journal:
        for name in ("one", "two"):
            journal.append(_end(name))
    log.unlink()
    if how == "cut":
        log.write_text(TEXT[:5])
    elif how == "a folder":
        log.mkdir()
    with Journal(path) as journal:
        assert ("one" in journal, "two" in journal, journal.passed_over) == (False, True, 1)


def test_a_line_names_no_log_outside_its_run(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "run/journal.jsonl", tmp_path / "secret"
    elsewhere.write_text(TEXT)
    for name in ("../secret", str(elsewhere)):
        with Journal(path) as journal:
            journal.append(replace(_end("one"), log=LogRecord(name, files.sha256_bytes(TEXT.encode()))))
        with Journal(path) as journal:
            assert "one" not in journal
        path.unlink()
