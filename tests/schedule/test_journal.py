"""The journal gives back what it took, whatever a kill or a bad disk did to its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.core import files
from harness.core.words import LaneName, LaneVerdict
from harness.lane.results import LaneEnd, LogRecord
from harness.schedule.session import Journal
from testing import laid_out

TEXT = "what the script said\n"


def _end(key: str) -> LaneEnd:
    end = laid_out.end(key, key, LaneName.PRISTINE, LaneVerdict.BUG_REPRODUCED)
    return replace(end, log=LogRecord(f"logs/{key}.log", files.sha256_bytes(TEXT.encode())))


def _written(path: Path, *keys: str) -> Path:
    """Write the ends of lanes into a journal."""
    with Journal(path) as journal:
        for key in keys:
            journal.append(_end(key))
    return path


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
    assert journal.ends == {"one": _end("one")}


def test_a_journal_gives_back_what_it_took(tmp_path: Path) -> None:
    with Journal(_written(tmp_path / "journal.jsonl", "one", "two")) as journal:
        with pytest.raises(ValueError, match="two has ended already"):
            journal.append(_end("two"))
        assert journal.ends == {key: _end(key) for key in ("one", "two")}


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_half_a_line_at_the_end_of_a_journal_is_a_lane_that_did_not_end(tmp_path: Path, cut: int) -> None:
    path = _written(tmp_path / "journal.jsonl", "one", "two")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with Journal(path) as journal:
        assert list(journal.ends) == ["one"]
        journal.append(_end("two"))
    assert path.read_bytes() == whole


SHAPES = {
    "a bad block": "\0" * 200,
    "no object": "[]",
    "another schema": '{"schema": 1}',
    "a record of a wrong shape": '{"schema": 4, "key": "one", "record": {"verdict": "BUG_REPRODUCED"}, "seconds": 1}',
    "a record that is none": '{"schema": 4, "key": "one", "record": null, "seconds": 1}',
    "a key that is a list": '{"schema": 4, "key": [], "record": null, "seconds": 1}',
    "900 brackets": '{"schema": 4, "key": ' + "[" * 900 + "]" * 900 + "}",
    "an infinity": '{"schema": 4, "key": "one", "record": null, "seconds": 1e999}',
    "half a character": '{"schema": 4, "key": "\\ud800", "record": null, "seconds": 1}',
}


@pytest.mark.parametrize("what", SHAPES)
def test_a_line_of_the_wrong_shape_costs_its_own_lane_alone(tmp_path: Path, what: str) -> None:
    path = _written(tmp_path / "journal.jsonl", "two", "three")
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(f"{first}{SHAPES[what]}\n{second}")
    with Journal(path) as journal:
        assert journal.ends == {key: _end(key) for key in ("two", "three")}
        journal.append(_end("one"))
    with Journal(path) as journal:
        assert journal.ends["one"] == _end("one")


@pytest.mark.parametrize("how", ["gone", "cut", "a folder"])
def test_a_lane_whose_log_is_gone_has_not_ended(tmp_path: Path, how: str) -> None:
    path, log = _written(tmp_path / "journal.jsonl", "one", "two"), tmp_path / "logs/one.log"
    log.unlink()
    if how == "cut":
        log.write_text(TEXT[:5])
    elif how == "a folder":
        log.mkdir()
    with Journal(path) as journal:
        assert list(journal.ends) == ["two"]


def test_a_line_names_no_log_outside_its_run(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "run/journal.jsonl", tmp_path / "secret"
    elsewhere.write_text(TEXT)
    for name in ("../secret", str(elsewhere)):
        with Journal(path) as journal:
            journal.append(replace(_end("one"), log=LogRecord(name, files.sha256_bytes(TEXT.encode()))))
        with Journal(path) as journal:
            assert not journal.ends
        path.unlink()
