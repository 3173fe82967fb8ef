"""The engine with lanes that say what a script tells them: order, waiting, failures."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from conftest import Workbench

from harness import host, pack
from harness.errors import UnavailableError
from harness.receipt import LaneRecord, LogRecord
from harness.sweep import cell, planning
from harness.sweep.account import Account, Reporter
from harness.sweep.cell import Cell, Release, Task
from harness.sweep.crew import Crew
from harness.sweep.engine import Engine
from harness.sweep.journal import Journal
from harness.sweep.lane_end import LaneEnd
from harness.sweep.nvml import Device
from harness.sweep.queue import Queue
from harness.sweep.workshop import Attempt
from harness.words import Evidence, LaneName, LaneVerdict

HOST = host.Host("3.11.7", "2.13.0+cpu", "3.6.0")
BUG, FIXED = LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED


def end_of(task: Task, verdict: LaneVerdict) -> LaneEnd:
    """Build the end of a lane."""
    record = LaneRecord(verdict, "", 10, 1.0, 1, 0, "ab", "CPU")
    started = "2026-01-01T00:00:00+00:00"
    log = LogRecord("logs/x.log", "cd")
    return LaneEnd(
        task.key, task.name, "cpu", Evidence.TRACED, task.lane, task.number, started, 1.5, "cpu", ("", ""), "1.0",
        "tree", record, "", log,
    )  # fmt: skip


@dataclass
class Script:
    """Lanes that end at once.

    Attributes:
        verdicts: what each lane says, by its name's end; the bug where it is not told.
        broken: what laying out a cell, or running a lane, raises.
        ran: the lanes in their order.

    """

    verdicts: dict[str, LaneVerdict] = field(default_factory=dict)
    broken: dict[str, Exception] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)

    def warm(self, one: Cell) -> None:
        """Fail where the script says so."""
        if one.pack.name in self.broken:
            raise self.broken[one.pack.name]

    def attempt(self, task: Task, _: Device | None) -> Attempt:
        """End with what the script says."""
        name = f"{task.lane} {task.number}"
        self.ran.append(name)
        if name in self.broken:
            raise self.broken[name]
        default = BUG if task.lane == LaneName.PRISTINE else FIXED
        return Attempt(end=end_of(task, self.verdicts.get(name, default)))

    def settle(self, _: Cell) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Stage:
    """A cell, and a journal to run its lanes into."""

    cell: Cell
    journal: Path

    def run(self, script: Script, repeat: int = 1, *others: Cell) -> Account:
        """Run all lanes on one core."""
        cancel, cancel_end = os.pipe()
        reporter = Reporter(lambda _: None, lambda _: None)
        try:
            with Journal(self.journal) as journal:
                engine = Engine(Crew(script, journal), journal, [], Queue(1), reporter)
                return engine.run(planning.unique_tasks([self.cell, *others], HOST, repeat), cancel_end)
        finally:
            os.close(cancel)


@pytest.fixture
def stage(workbench: Workbench, tmp_path: Path) -> Stage:
    """Return a stage with the sound toy pack."""
    return Stage(_cell(workbench.lay("01_confirmed")), tmp_path / "journal.jsonl")


def _cell(folder: Path) -> Cell:
    loaded = pack.load(folder)
    (one,) = planning.cells([(loaded, "cpu")], HOST, None, latest=False)  # type: ignore[arg-type]
    return one


def _newest(one: Cell) -> Cell:
    """Return the cell of another release, whose patched lane has to wait."""
    kind = planning.Origin(planning.Kind.RELEASE, "2.0")
    return replace(one, release=Release.LATEST, origin=kind, version="2.0", tree="2" * 64)


def test_runs_of_one_lane_follow_one_another(stage: Stage) -> None:
    first, second = cell.tasks(stage.cell, HOST, 2)[:2], cell.tasks(stage.cell, HOST, 2)[2:]
    assert [task.after for task in first] == [(), ()]
    assert [task.after for task in second] == [(task.key,) for task in first]
    pristine, patched, pristine_2, patched_2 = cell.tasks(_newest(stage.cell), HOST, 2)
    assert patched.after == (pristine.key,)
    assert patched_2.after == (patched.key, pristine_2.key)


def test_a_patched_lane_runs_only_where_the_bug_is_there(stage: Stage) -> None:
    script = Script({"pristine 1": FIXED})
    Stage(_newest(stage.cell), stage.journal).run(script)
    assert script.ran == ["pristine 1"]


def test_a_run_without_the_bug_does_not_hold_up_the_next_one(stage: Stage) -> None:
    script = Script({"pristine 1": FIXED})
    account = Stage(_newest(stage.cell), stage.journal).run(script, 3)
    assert sorted(script.ran) == ["patched 2", "patched 3", "pristine 1", "pristine 2", "pristine 3"]
    assert (account.ran, account.not_run) == (5, {})


def test_what_ended_before_is_not_run_again(stage: Stage) -> None:
    first, second = Script(), Script()
    stage.run(first)
    account = stage.run(second, 2)
    assert sorted(first.ran) == ["patched 1", "pristine 1"]
    assert sorted(second.ran) == ["patched 2", "pristine 2"]
    assert (account.ran, account.resumed) == (2, 2)


@pytest.mark.parametrize("error", [UnavailableError("no network"), OSError(28, "No space left on device")])
def test_what_cannot_be_laid_out_does_not_stop_the_others(
    stage: Stage, workbench: Workbench, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    other = _cell(workbench.lay("30_control_fails"))
    script = Script(broken={other.pack.name: error})
    account = stage.run(script, 1, other)
    assert sorted(script.ran) == ["patched 1", "pristine 1"]
    ((name, reason),) = account.failed.items()
    assert (name, str(error) in reason) == (other.name, True)
    assert ("Traceback" in capfd.readouterr().err) == isinstance(error, OSError)


def test_a_lane_that_breaks_the_harness_fails_its_own_cell(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    account = stage.run(Script(broken={"pristine 1": RuntimeError("a fault of ours")}), 2)
    assert list(account.failed) == [stage.cell.name]
    assert account.failed[stage.cell.name] == "the harness failed: RuntimeError: a fault of ours"
    assert "a fault of ours" in capfd.readouterr().err


def test_a_full_disk_leaves_no_half_line_in_the_journal(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write, calls = os.write, []

    def full(descriptor: int, data: bytes) -> int:
        calls.append(descriptor)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:40])

    with Journal(stage.journal) as journal, monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            journal.append(end_of(cell.tasks(stage.cell, HOST, 1)[0], BUG))
    assert stage.journal.read_bytes() == b""
    assert stage.run(Script()).ran == 2
    assert not capfd.readouterr().err
