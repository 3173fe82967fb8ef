"""The parts of a sweep by themselves: queue, journal, health, comparison, night."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Workbench

from harness import host, pack, receipt
from harness.errors import HarnessError
from harness.host import Gpu
from harness.receipt import LaneRecord, LogRecord, Receipt
from harness.sweep import cell, changes, health, night, nvml, planning
from harness.sweep.cell import Cell, Release, Task
from harness.sweep.changes import Baseline
from harness.sweep.journal import Journal
from harness.sweep.lane_end import LaneEnd
from harness.sweep.night import Wish
from harness.sweep.nvml import Device, Reading
from harness.sweep.queue import Queue
from harness.transcript import FigureLine
from harness.words import Evidence, LaneName, LaneVerdict, Verdict

HOST = host.Host("3.11.7", "2.13.0+cpu", "3.6.0")


@pytest.fixture
def toy(workbench: Workbench) -> Cell:
    """Return the cell of the sound toy pack."""
    (one,) = planning.cells(_packs(workbench.lay("01_confirmed")), HOST, None, latest=False)  # type: ignore[arg-type]
    return one


def _packs(folder: Path) -> list[tuple[pack.Pack, str]]:
    loaded = pack.load(folder)
    return [(loaded, target) for target in loaded.definition.targets]


def _task(toy: Cell, name: str, seconds: float | None, *, gpu: bool = False, alone: bool = False) -> Task:
    target = replace(toy.pack.definition.targets["cpu"], exclusive=alone)
    targets = {"cpu": target, "sm_90a": target}
    one = replace(toy.pack, definition=replace(toy.pack.definition, targets=targets))
    where = {"target": "sm_90a", "evidence": Evidence.EXECUTED} if gpu else {}
    return Task(replace(toy, pack=one, **where), LaneName.PRISTINE, 1, name, name, seconds=seconds)  # type: ignore[arg-type]


def _keys(take: Callable[[], Task | None]) -> list[str]:
    return [task.key for task in iter(take, None)]


def test_the_longest_goes_first_and_the_unknown_is_taken_for_long(toy: Cell) -> None:
    queue = Queue(jobs=9)
    for name, seconds in (("short", 1.0), ("unknown", None), ("long", 500.0), ("middle", 50.0)):
        queue.put(_task(toy, name, seconds))
    queue.put(_task(toy, "short with a long one after it", 2.0), after_it=300.0)
    assert _keys(queue.take_for_cores) == ["long", "short with a long one after it", "unknown", "middle", "short"]


def test_what_was_left_out_last_night_goes_before_everything(toy: Cell) -> None:
    queue = Queue(jobs=9)
    queue.put(_task(toy, "long", 500.0))
    queue.put(replace(_task(toy, "left out", 1.0), urgent=True))
    assert _keys(queue.take_for_cores) == ["left out", "long"]


def test_what_measures_on_the_cores_has_them_for_itself_and_is_not_passed(toy: Cell) -> None:
    queue = Queue(jobs=2)
    queue.put(_task(toy, "first", 9.0))
    assert _keys(queue.take_for_cores) == ["first"]
    queue.put(_task(toy, "other", 500.0))
    queue.put(_task(toy, "measures", 1.0, alone=True))
    assert queue.take_for_cores() is None, "the cores are not free, and nothing may pass"
    queue.leave_cores()
    assert _keys(queue.take_for_cores) == ["measures"]
    queue.leave_cores()
    assert _keys(queue.take_for_cores) == ["other"]


def test_a_gpu_takes_its_own_architecture_and_one_that_others_use_measures_nothing(toy: Cell) -> None:
    queue = Queue(jobs=1)
    queue.put(_task(toy, "on the cores", 900.0))
    queue.put(_task(toy, "measures", 500.0, gpu=True, alone=True))
    queue.put(_task(toy, "plain", 1.0, gpu=True))
    assert queue.take_for_gpu("sm_80", shared=False) is None
    shared = queue.take_for_gpu("sm_90a", shared=True)
    assert shared is not None
    assert shared.key == "plain"
    assert queue.take_for_gpu("sm_90a", shared=True) is None
    assert _keys(lambda: queue.take_for_gpu("sm_90a", shared=False)) == ["measures"]


def test_a_key_changes_with_everything_that_could_change_what_a_lane_shows(toy: Cell) -> None:
    def keys(one: Cell, where: host.Host = HOST) -> tuple[str, ...]:
        return tuple(task.key for task in cell.tasks(one, where, 1))

    definition = toy.pack.definition
    wanted = definition.targets["cpu"]
    other = replace(toy.pack, definition=replace(definition, targets={"cpu": replace(wanted, loads=())}))
    base = keys(toy)
    assert keys(toy) == base
    variants = [
        keys(replace(toy, tree="0" * 64)),
        keys(replace(toy, pack=other)),
        keys(toy, replace(HOST, torch="2.14.0")),
        keys(toy, replace(HOST, triton="3.7.0")),
        keys(toy, replace(HOST, python="3.12.0")),
        keys(toy, replace(HOST, cuda="13.1")),
    ]
    toy.pack.probe.write_text(toy.pack.probe.read_text() + "# changed\n")
    variants.append(keys(toy))
    every = list(itertools.chain(base, *variants))
    assert len(set(every)) == len(every)
    before = keys(toy)
    toy.pack.patch.write_text("another patch")
    after = keys(toy)
    assert (after[0], after[1] != before[1]) == (before[0], True), "a patch changes its own lane alone"
    gpu = replace(toy, target="cpu", evidence=Evidence.EXECUTED)
    drivers = {keys(gpu, replace(HOST, driver=driver)) for driver in ("1", "2")}
    assert len(drivers) == 2


def _end(key: str) -> LaneEnd:
    record = LaneRecord(LaneVerdict.BUG_REPRODUCED, "", 10, 1.0, 1, 0, "ab", "CPU")
    log = LogRecord("logs/x.log", "cd")
    return LaneEnd(
        key, key, "cpu", Evidence.TRACED, LaneName.PRISTINE, 1, "2026-01-01T00:00:00+00:00", 1.5, "cpu", ("", ""),
        "1.0", "tree", record, "", log,
    )  # fmt: skip


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


DEVICE = Device("0", "0", Gpu("Toy", (9, 0)), None, None)


@pytest.mark.parametrize(
    ("reading", "sick"),
    [
        (Reading(), ""),
        (Reading(memory=10 * 2**20), ""),
        (Reading(memory=900 * 2**20), "900 MiB did not come back"),
        (Reading(processes=frozenset({7})), "1 process(es) that were not there before"),
        (Reading(uncorrected=1), "1 uncorrected memory error(s)"),
        (Reading(remap_failed=True), "a row of its memory could not be remapped"),
        (Reading(xids=(13, 31, 45)), ""),
        (Reading(xids=(31, 79)), "Xid 79"),
        (Reading(lost="gone"), "it cannot be read: gone"),
    ],
)
def test_what_makes_a_gpu_sick(monkeypatch: pytest.MonkeyPatch, reading: Reading, sick: str) -> None:
    monkeypatch.setattr(nvml, "read", lambda _: reading)
    assert health.after(DEVICE, Reading(memory=0, uncorrected=0), patience=0) == sick


def test_memory_may_take_a_moment_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([Reading(memory=900 * 2**20), Reading(memory=0)])
    monkeypatch.setattr(nvml, "read", lambda _: next(readings))
    assert health.after(DEVICE, Reading(memory=0)) == ""


def test_memory_says_nothing_where_somebody_else_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    others = frozenset({7})
    monkeypatch.setattr(nvml, "read", lambda _: Reading(memory=900 * 2**20, processes=others))
    assert health.after(DEVICE, Reading(memory=0, processes=others), patience=0) == ""


def _receipt(toy: Cell, *figures: FigureLine, gpu: str = "Toy") -> Receipt:
    lane = LaneRecord(LaneVerdict.BUG_REPRODUCED, "", 10, 1.0, 1, 0, "ab", "CPU", figures=figures)
    return Receipt(
        schema=receipt.SCHEMA,
        pack=toy.pack.name,
        title="",
        kind=toy.pack.definition.kind,
        target="cpu",
        evidence=Evidence.TRACED,
        verdict=Verdict.CONFIRMED,
        reason="",
        claims=(),
        upstream=receipt.Source("toykernel", "1.0", "pinned", ""),
        probe=receipt.Hashed("", ""),
        patch=None,
        companions=receipt.CompanionRecord("default", "", {}),
        lanes={"pristine": lane},
        host=replace(receipt.HostRecord("3.11.7", "2.13.0", ""), gpu=gpu),
        log=LogRecord("", ""),
        command="",
        started="2026-01-01T00:00:00+00:00",
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("unit", "before", "after", "kinds"),
    [
        ("ms", (10.0, 0.5), (10.9, 0.5), []),
        ("ms", (10.0, 0.5), (11.1, 0.5), ["slower"]),
        ("ms", (10.0, 0.01), (10.4, 0.01), []),  # below the floor
        ("ms", (10.0, 0.01), (9.0, 0.01), ["faster"]),
        ("ms", (10.0, None), (99.0, None), []),  # of unknown noise
        ("GB/s", (100.0, 1.0), (80.0, 1.0), ["slower"]),
        ("GB/s", (100.0, 1.0), (120.0, 1.0), ["faster"]),
        ("MiB", (100.0, None), (120.0, None), ["more memory"]),
        ("MiB", (100.0, None), (100.0, None), []),
        ("1", (100.0, 0.0), (500.0, 0.0), []),  # no time and no memory
        ("ms", ("nan", 0.1), (5.0, 0.1), []),
    ],
)
def test_a_figure_changed_only_by_more_than_its_noise(
    toy: Cell, unit: str, before: tuple[Any, Any], after: tuple[Any, Any], kinds: list[str]
) -> None:
    measuring = _task(toy, "x", 1.0, alone=True).cell
    then, now = (_receipt(toy, FigureLine("time", value, unit, spread)) for value, spread in (before, after))
    assert [change.kind for change in changes.of_figures(measuring, now, then)] == kinds
    assert changes.of_figures(toy, now, then) == [], "a lane that did not run alone measured nothing"
    other = replace(then, host=replace(then.host, gpu="Another"))
    assert changes.of_figures(measuring, now, other) == [], "another GPU is another measurement"


def test_a_newer_release_is_expected_to_be_mended_where_pack_toml_says_so(toy: Cell) -> None:
    newest = replace(toy, release=Release.LATEST, version="2.1")
    assert changes.expected(newest, None) == Verdict.FIXED_UPSTREAM
    assert changes.expected(replace(newest, version="1.9"), None) == Verdict.CONFIRMED
    assert changes.expected(toy, None) == Verdict.CONFIRMED


WISH = Wish("packs", (), latest=False, repeat=1)


def test_a_night_is_continued_by_the_same_command_while_it_is_young(tmp_path: Path) -> None:
    start = dt.datetime(2026, 11, 20, 23, 50, tzinfo=dt.UTC)

    def opened(wish: Wish, hours: float, *, finish: bool = False) -> tuple[str, bool]:
        with night.opened(tmp_path, wish, start + dt.timedelta(hours=hours)) as one:
            if finish:
                one.finish(wish)
            return one.name, one.resumed

    first, resumed = opened(WISH, 0)
    assert (first, resumed) == ("20261120T235000Z", False)
    assert opened(WISH, 1) == (first, True), "past midnight it is the same night"
    other, resumed = opened(replace(WISH, latest=True), 2)
    assert (other != first, resumed) == (True, False)
    assert opened(replace(WISH, latest=True), 21)[1], "it began two hours later"
    assert not opened(replace(WISH, latest=True), 22.5)[1], "tonight is another night"
    last, _ = opened(replace(WISH, latest=True), 23, finish=True)
    assert opened(replace(WISH, latest=True), 23) == (f"{_stamp(start, 23)}", False)
    assert [folder.name for folder in night.earlier(tmp_path)] == [last]


def _stamp(start: dt.datetime, hours: float) -> str:
    return (start + dt.timedelta(hours=hours)).strftime(night.STAMP)


def test_two_nights_of_one_second_have_two_folders(tmp_path: Path) -> None:
    moment = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
    names = []
    for _ in range(3):
        with night.opened(tmp_path, WISH, moment) as one:
            names.append(one.name)
            one.finish(WISH)
    assert names == ["20261120T000000Z", "20261120T000000Z-2", "20261120T000000Z-3"]
    assert [folder.name for folder in night.earlier(tmp_path, names[2])] == names[1::-1]


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    moment = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
    with night.opened(tmp_path, WISH, moment) as one:
        (one.folder / ".results.json.abc").write_text("{")
    with night.opened(tmp_path, WISH, moment) as one:
        assert one.resumed
        assert not list(one.folder.glob(".*"))


def test_the_baseline_is_the_committed_receipts_a_night_or_the_newest_of_many(tmp_path: Path) -> None:
    assert changes.baseline(None, tmp_path, "x").folder is None
    with pytest.raises(HarnessError, match="no such folder"):
        changes.baseline(tmp_path / "missing", tmp_path / "nights", "x")
    nights = tmp_path / "nights"
    assert changes.baseline(nights, nights, "x").folder is None, "the first night compares with the receipts"
    moment = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
    with night.opened(nights, WISH, moment) as one:
        assert changes.baseline(nights, nights, one.name) == Baseline(
            None, "the committed receipts: there is no earlier night yet"
        )
        one.finish(WISH)
    assert changes.baseline(nights, nights, "9").folder == one.folder
    assert changes.baseline(one.folder, nights, "9").folder == one.folder
    receipts = tmp_path / "receipts/01_confirmed"
    receipts.mkdir(parents=True)
    (receipts / "cpu.traced.json").write_text(json.dumps({}))
    assert changes.baseline(receipts.parent, nights, "9").folder == receipts.parent
