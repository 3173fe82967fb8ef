"""A cell is judged, and its receipt written, once: however the ends of its lanes fall together."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.cache import Cache
from harness.core.words import LaneName, LaneVerdict
from harness.lane.cell import Cell
from harness.lane.results import LaneEnd
from harness.receipt import receipt, writer
from harness.schedule import lanes
from harness.schedule.lane_runner import Runner
from harness.schedule.session import Journal, Session
from harness.schedule.task import Task
from harness.verdict.pack_verdict import Outcome
from testing import laid_out
from testing.laid_out import HOST

SAYS = {LaneName.PRISTINE: LaneVerdict.BUG_REPRODUCED, LaneName.PATCHED: LaneVerdict.FIX_VALIDATED}
NODE = replace(HOST, python="3.11.9")


class Together(Journal):
    """A journal that has the ends of two lanes before either is heard of."""

    both = threading.Barrier(2)

    def append(self, end: LaneEnd) -> None:
        super().append(end)
        self.both.wait(10)


def _attempt(_runner: Runner, task: Task, *_: object) -> LaneEnd:
    """End a lane as it should, on another host than the session's."""
    return laid_out.end(task.key, task.name, task.lane, SAYS[task.lane], NODE)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return where two lanes at once end at once."""
    monkeypatch.setattr(Runner, "prepare", lambda *_: laid_out.nothing("1.0"))
    monkeypatch.setattr(Runner, "attempt", _attempt)
    return Session(Cache(tmp_path), HOST, [], tmp_path, Together(), lambda _: "runner.py run", jobs=2)


def test_two_lanes_that_end_together_settle_their_cell_once(
    toy: Cell, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Counter[str]()

    def write(outcome: Outcome, _cache: object, _command: object, folder: Path, _logs: object) -> Path:
        time.sleep(0.2)
        written[outcome.cell.name] += 1
        return folder / "cpu.traced.json"

    monkeypatch.setattr(writer, "write", write)
    assert toy.is_stated
    account = lanes.run(session, [toy])
    assert (written, account.ran) == (Counter([toy.name]), 2)
    assert account.results[toy.name].judgement.verdict == "CONFIRMED"


def test_a_receipt_names_the_host_of_its_lanes(toy: Cell, session: Session) -> None:
    path = lanes.run(session, [toy]).results[toy.name].receipt
    assert path
    assert receipt.load(path).host.python == NODE.python
