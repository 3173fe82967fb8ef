"""What tasks publish: whole, each attempt under a name of its own, and the newest counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cluster import attempts
from harness.cluster.attempts import Attempt, Published
from harness.host.host import Host
from testing import sweeps
from testing.workbench import REPOSITORY, Workbench

KEYS = ("a", "b")
OLD, NEW = Attempt(1, 0, 0, 17, 0), Attempt(1, 0, 0, 17, 1)


def said(word: str) -> Published:
    """Return what an attempt showed: why its lanes were not run."""
    return Published(attempts.SCHEMA, KEYS, Host("3.11.7", "2.9.0", None), not_run={"a": word})


def test_an_old_copy_neither_overwrites_a_newer_attempt_nor_is_taken_for_it(tmp_path: Path) -> None:
    attempts.publish(tmp_path, NEW, said("new"))
    attempts.publish(tmp_path, OLD, said("old"))
    assert attempts.newest(tmp_path) == {NEW.at: NEW}
    assert attempts.read(tmp_path, NEW, KEYS) == said("new")
    later = Attempt(1, 0, 0, 101, 0)
    attempts.publish(tmp_path, later, said("of another job"))
    assert attempts.newest(tmp_path)[NEW.at] == later, "numbers, not texts, are compared"


def test_what_nobody_waits_for_is_not_published(tmp_path: Path) -> None:
    attempts.publish(tmp_path / "gone", OLD, said("old"))
    assert not (tmp_path / "gone").exists()


def test_a_file_that_was_being_written_is_no_attempt(tmp_path: Path) -> None:
    (tmp_path / f".{OLD.file}.x7").write_text("{")
    (tmp_path / f"{OLD.file}.damaged").write_text("{")
    assert attempts.newest(tmp_path) == {}


def test_what_is_damaged_or_about_something_else_is_refused(tmp_path: Path) -> None:
    attempts.publish(tmp_path, OLD, said("old"))
    with pytest.raises(ValueError, match="about other lanes"):
        attempts.read(tmp_path, OLD, ("a", "c"))
    document = json.loads((tmp_path / OLD.file).read_text())
    for wrong in ("{", "[]", json.dumps(document | {"schema": 2}), json.dumps(document | {"host": 1})):
        (tmp_path / OLD.file).write_text(wrong)
        with pytest.raises(ValueError, match=r"."):
            attempts.read(tmp_path, OLD, KEYS)


def test_a_log_that_is_not_its_lanes_is_refused_and_a_second_attempt_leaves_what_is_there(workbench: Workbench) -> None:
    pack = workbench.lay(sweeps.TOY, "002_toy")
    (workbench.folder / "slurm").mkdir()
    fake = {
        "FAKE_SLURM": str(workbench.folder / "slurm"),
        "PATH": f"{REPOSITORY / 'tests/resources/fake_slurm'}{os.pathsep}{os.environ['PATH']}",
    }
    (workbench.folder / "slurm/away").write_text("100")  # it goes on to ask, and never hears that the task is over
    with subprocess.Popen(
        workbench.command("sweep", "--slurm", "--runs", str(workbench.folder / "sweeps"), "--poll", "5"),
        env=os.environ | fake,
        stderr=subprocess.PIPE,
        text=True,
    ) as one:
        assert one.stderr
        assert any("Slurm's job 100" in line for line in one.stderr)
        one.kill()
    (beside,) = workbench.folder.glob("sweeps/*.slurm")
    (published,) = (beside / "results").iterdir()
    task = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "100000", "SLURM_RESTART_COUNT": "1"}
    again = [sys.executable, "-m", "harness.cluster.array_task", str(beside / "arrays/0001.json")]
    subprocess.run(again, cwd=REPOSITORY, env=os.environ | task, check=True)
    assert list((beside / "results").iterdir()) == [published]
    assert sweeps.starts(pack).total() == 2
    document = json.loads(published.read_text())
    keys, attempt = tuple(document["keys"]), attempts.attempt_of(published.name)
    assert attempt is not None
    assert len(attempts.read(beside / "results", attempt, keys).ends) == 2
    name = next(iter(document["logs"]))
    document["logs"][name] += "x"
    published.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="is not that which its lane wrote"):
        attempts.read(beside / "results", attempt, keys)
    ended = subprocess.run(again, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (ended.returncode, "Next: let Slurm run this" in ended.stderr) == (2, True)
