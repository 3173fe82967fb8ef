"""The folder of a sweep: continued by the same command, never shared."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from harness.sweep import run_folder

REQUEST, OTHER = ("packs", "latest=False"), ("packs", "latest=True")


def test_a_sweep_is_continued_by_the_same_command_while_it_is_young(tmp_path: Path) -> None:
    start = dt.datetime(2026, 11, 20, 23, 50, tzinfo=dt.UTC)

    def opened(request: tuple[str, ...], hours: float, *, finish: bool = False) -> str:
        with run_folder.open_run(tmp_path, request, start + dt.timedelta(hours=hours)) as one:
            if finish:
                one.finish()
            return one.path.name

    first = opened(REQUEST, 0)
    assert first == "20261120T235000Z"
    assert opened(REQUEST, 1) == first, "past midnight it is the same sweep"
    other = opened(OTHER, 2)
    assert other == _stamp(start, 2)
    assert opened(OTHER, 21) == other, "it began two hours later"
    assert opened(OTHER, 22.5) == _stamp(start, 22.5), "today is another sweep"
    last = opened(OTHER, 23, finish=True)
    assert last == _stamp(start, 22.5)
    assert opened(OTHER, 23) == _stamp(start, 23)
    assert [folder.name for folder in run_folder.finished(tmp_path)] == [last]


def _stamp(start: dt.datetime, hours: float) -> str:
    return (start + dt.timedelta(hours=hours)).strftime(run_folder.STAMP)


def test_two_sweeps_of_one_second_have_two_folders(tmp_path: Path) -> None:
    moment = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
    names = []
    for _ in range(3):
        with run_folder.open_run(tmp_path, REQUEST, moment) as one:
            names.append(one.path.name)
            one.finish()
    assert names == ["20261120T000000Z", "20261120T000000Z_2", "20261120T000000Z_3"]
    assert [folder.name for folder in run_folder.finished(tmp_path)] == names[::-1]


def test_a_run_that_a_wrong_clock_dated_in_the_future_is_not_gone_on_with(tmp_path: Path) -> None:
    moment = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
    with run_folder.open_run(tmp_path, REQUEST, moment + dt.timedelta(days=9999)):
        pass
    names = []
    for _ in range(2):
        with run_folder.open_run(tmp_path, REQUEST, moment) as one:
            names.append(one.path.name)
    assert names == ["20261120T000000Z"] * 2


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    moment = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
    with run_folder.open_run(tmp_path, REQUEST, moment) as one:
        (one.path / ".results.json.abc").write_text("{")
    with run_folder.open_run(tmp_path, REQUEST, moment) as one:
        assert one.started == moment
        assert not list(one.path.glob(".*"))
