"""The folder of a sweep: continued by the same command, never shared."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path

from harness.sweep import run_folder
from harness.sweep.run_folder import SweepRequest

REQUEST = SweepRequest("packs", (), latest=False, repeat=1)


def test_a_sweep_is_continued_by_the_same_command_while_it_is_young(tmp_path: Path) -> None:
    start = dt.datetime(2026, 11, 20, 23, 50, tzinfo=dt.UTC)

    def opened(request: SweepRequest, hours: float, *, finish: bool = False) -> tuple[str, bool]:
        with run_folder.opened(tmp_path, request, start + dt.timedelta(hours=hours)) as one:
            if finish:
                one.finish(request)
            return one.name, one.resumed

    first, resumed = opened(REQUEST, 0)
    assert (first, resumed) == ("20261120T235000Z", False)
    assert opened(REQUEST, 1) == (first, True), "past midnight it is the same sweep"
    other, resumed = opened(replace(REQUEST, latest=True), 2)
    assert (other != first, resumed) == (True, False)
    assert opened(replace(REQUEST, latest=True), 21)[1], "it began two hours later"
    assert not opened(replace(REQUEST, latest=True), 22.5)[1], "today is another sweep"
    last, _ = opened(replace(REQUEST, latest=True), 23, finish=True)
    assert opened(replace(REQUEST, latest=True), 23) == (f"{_stamp(start, 23)}", False)
    assert [folder.name for folder in run_folder.earlier(tmp_path)] == [last]


def _stamp(start: dt.datetime, hours: float) -> str:
    return (start + dt.timedelta(hours=hours)).strftime(run_folder.STAMP)


def test_two_sweeps_of_one_second_have_two_folders(tmp_path: Path) -> None:
    moment = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
    names = []
    for _ in range(3):
        with run_folder.opened(tmp_path, REQUEST, moment) as one:
            names.append(one.name)
            one.finish(REQUEST)
    assert names == ["20261120T000000Z", "20261120T000000Z_2", "20261120T000000Z_3"]
    assert [folder.name for folder in run_folder.earlier(tmp_path, names[2])] == names[1::-1]


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    moment = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
    with run_folder.opened(tmp_path, REQUEST, moment) as one:
        (one.path / ".results.json.abc").write_text("{")
    with run_folder.opened(tmp_path, REQUEST, moment) as one:
        assert one.resumed
        assert not list(one.path.glob(".*"))
