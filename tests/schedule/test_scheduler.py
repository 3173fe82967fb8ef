"""The scheduler with lanes that say what a script tells them: order, waiting, failures."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ALL_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from harness.core.cache import Cache
from harness.core.errors import NoRoomError, UnavailableError, UnsupportedHereError
from harness.core.words import LaneName, LaneVerdict, Verdict
from harness.lane.cell import Cell
from harness.lane.results import LaneEnd
from harness.schedule import lanes, selection
from harness.schedule import task as schedule_task
from harness.schedule.lane_runner import Prepared
from harness.schedule.lanes import DRAIN_SECONDS, Account, Scheduler
from harness.schedule.session import Journal, Session
from harness.schedule.task import Devices, Task
from harness.upstream.source import Source, SourceKind
from harness.verdict.pack_verdict import Judgement
from testing import laid_out
from testing.laid_out import HOST
from testing.workbench import Workbench

BUG, FIXED = LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED


def end_of(task: Task, verdict: LaneVerdict) -> LaneEnd:
    return laid_out.end(task.key, task.name, task.lane, verdict)


@dataclass
class Script:
    """Lanes that end at once."""

    #: what each lane says, by its name's end; where it is not told, what the tree would have it say
    verdicts: dict[str, LaneVerdict] = field(default_factory=dict)
    broken: dict[str, Exception] = field(default_factory=dict)  # what laying out a cell, or running a lane, raises
    ran: list[str] = field(default_factory=list)  # the lanes in their order

    def prepare(self, cell: Cell) -> Prepared:
        """Fail where the script says so."""
        if cell.pack.name in self.broken:
            raise self.broken[cell.pack.name]
        return laid_out.nothing("1.0")

    def run(self, task: Task, prepared: Prepared, devices: Devices, cancel: int) -> LaneEnd:
        """End with what the script says."""
        assert (prepared.patch, devices, cancel > 0) == ("fix.patch", (), True)
        name = f"{task.lane} {task.number}"
        self.ran.append(name)
        if name in self.broken:
            raise self.broken[name]
        default = BUG if task.lane == LaneName.PRISTINE else FIXED
        return end_of(task, self.verdicts.get(name, default))


@dataclass(frozen=True)
class Stage:
    """A cell, and a journal to run its lanes into."""

    cell: Cell
    journal: Path

    def run(self, script: Script, repeat: int = 1, *others: Cell) -> Account:
        """Run all lanes on one core."""
        with Journal(self.journal) as journal:
            folder = self.journal.parent
            session = Session(Cache(folder), HOST, [], folder, journal, lambda _: "", jobs=1, repeat=repeat)
            account = Account(session, receipts=False)
            account.plan([self.cell, *others])
            Scheduler(account, script).run()  # type: ignore[arg-type]
            return account


@pytest.fixture
def stage(toy: Cell, tmp_path: Path) -> Stage:
    """Return a stage with the sound toy pack."""
    return Stage(toy, tmp_path / "journal.jsonl")


def _newest(one: Cell) -> Cell:
    """Return the cell of another release, whose patched lane has to wait."""
    source = Source(SourceKind.RELEASE, "2.0")
    return replace(one, column=selection.LATEST, source=source, version="2.0")


def test_runs_of_one_lane_follow_one_another(stage: Stage) -> None:
    first, second = schedule_task.tasks(stage.cell, HOST, 2)[:2], schedule_task.tasks(stage.cell, HOST, 2)[2:]
    assert [task.after for task in first] == [(), ()]
    assert [task.after for task in second] == [(task.key,) for task in first]
    pristine, patched, pristine_2, patched_2 = schedule_task.tasks(_newest(stage.cell), HOST, 2)
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


def test_an_interruption_between_a_message_and_its_counting_holds_nothing_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_once, script = Scheduler._await, Script()  # noqa: SLF001 - there it may come

    def interrupted(scheduler: Scheduler, seconds: float) -> list[Cell]:
        ended = wait_once(scheduler, seconds)
        if script.ran and seconds:
            raise KeyboardInterrupt
        return ended

    monkeypatch.setattr(Scheduler, "_await", interrupted)
    started = time.monotonic()
    account = stage.run(script)
    assert account.interrupted
    assert time.monotonic() - started < DRAIN_SECONDS / 3


def test_a_layout_that_an_interruption_broke_is_no_error(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_once = Scheduler._await  # noqa: SLF001 - there it may come

    def interrupted(scheduler: Scheduler, seconds: float) -> list[Cell]:
        if seconds:
            wait(scheduler._layouts)  # noqa: SLF001 - it has failed, and was not handled yet
            raise KeyboardInterrupt
        return wait_once(scheduler, seconds)

    monkeypatch.setattr(Scheduler, "_await", interrupted)
    account = stage.run(Script(broken={stage.cell.pack.name: OSError("cp was killed")}))
    assert (account.interrupted, account.results) == (True, {})
    assert set(account.not_run.values()) == {"interrupted"}


@dataclass
class Signalled(Script):
    """A lane whose thread gets the user's interruption in place of the main thread, which waits for messages."""

    seconds: float = 0.0

    def run(self, task: Task, prepared: Prepared, devices: Devices, cancel: int) -> LaneEnd:
        """Interrupt, and go on for a while as if nobody had."""
        started = time.monotonic()
        time.sleep(0.1)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        while not self.seconds and time.monotonic() - started < DRAIN_SECONDS / 3:
            time.sleep(0.01)
        return super().run(task, prepared, devices, cancel)


def test_an_interruption_that_does_not_end_the_wait_is_seen_all_the_same(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, started = Signalled(), time.monotonic()

    def waits(futures: Iterable[Future[object]], seconds: float, until: str = ALL_COMPLETED) -> object:
        if seconds == DRAIN_SECONDS:
            script.seconds = time.monotonic() - started
        return wait(futures, seconds, until)

    monkeypatch.setattr(lanes, "wait", waits)
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)  # SIGINT may be ignored here, as in a nohup
    try:
        assert stage.run(script).interrupted
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert 0 < script.seconds < 2


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
    other = laid_out.cell(workbench.lay("30_control_fails"))
    script = Script(broken={other.pack.name: error})
    account = stage.run(script, 1, other)
    assert sorted(script.ran) == ["patched 1", "pristine 1"]
    judgement = account.results[other.name].judgement
    assert (judgement.verdict, str(error) in judgement.reason) == (Verdict.ERROR, True)
    assert ("Traceback" in capfd.readouterr().err) == isinstance(error, OSError)


def test_a_script_that_cannot_be_read_is_the_error_of_its_own_cell(stage: Stage) -> None:
    stage.cell.pack.script.unlink()
    judgement = stage.run(Script()).results[stage.cell.name].judgement
    assert judgement == Judgement(Verdict.ERROR, "reproduce.py cannot be read (No such file or directory)")


def test_a_lane_that_breaks_the_harness_fails_its_own_cell(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    account = stage.run(Script(broken={"pristine 1": RuntimeError("a fault of ours")}), 2)
    assert list(account.results) == [stage.cell.name]
    assert account.results[stage.cell.name].judgement.reason == "the harness failed: RuntimeError: a fault of ours"
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
        with pytest.raises(NoRoomError, match="no room in the run folder"):
            journal.append(end_of(schedule_task.tasks(stage.cell, HOST, 1)[0], BUG))
    assert stage.journal.read_bytes() == b""
    assert stage.run(Script()).ran == 2
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "source", "verdict"),
    [
        (UnavailableError("no network"), Source(SourceKind.LATEST), Verdict.UNAVAILABLE),
        (UnsupportedHereError("no wheel"), None, Verdict.UNSUPPORTED),
    ],
)
def test_what_cannot_be_had_is_an_error_only_where_it_is_pinned(
    stage: Stage, error: Exception, source: Source | None, verdict: Verdict
) -> None:
    cell = replace(stage.cell, source=source) if source else stage.cell
    account = Stage(cell, stage.journal).run(Script(broken={cell.pack.name: error}))
    assert {name: outcome.judgement.verdict for name, outcome in account.results.items()} == {cell.name: verdict}
