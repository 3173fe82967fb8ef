"""A lane that shares its GPUs: alone when it asks to be, and its time-out stands still while it waits for that."""

from __future__ import annotations

import fcntl
import sys
import threading
import time
from pathlib import Path

import pytest

from harness.lane import process
from harness.lane.process import Command, Ended

pytestmark = pytest.mark.slow

#: Notes its spans in the file SPANS: shared work for BEFORE seconds, then alone for ALONE seconds, then for AFTER.
PROBE = """
import os, sys, time
from pathlib import Path
name, before, alone, after = sys.argv[1], *map(float, sys.argv[2:5])
gate, spans = Path(os.environ["REPRODUCER_GPU_GATE"]), Path(os.environ["SPANS"])
def work(kind, seconds):
    begun = time.time()
    time.sleep(seconds)
    with spans.open("a") as stream:
        stream.write(f"{name} {kind} {begun} {time.time()}\\n")
work("shared", before)
if alone:
    gate.read_text()
    work("alone", alone)
    if name == "dies":
        os.abort()
    gate.read_text()
work("shared", after)
"""


def _is_held(lock: Path) -> bool:
    """Whether a lane holds a lock alone."""
    with lock.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _together(
    folder: Path,
    *lanes: tuple[str, tuple[float, float, float], tuple[str, ...]],
    timeout: float = 30.0,
    waiting: str = "",
) -> dict[str, Ended]:
    """Run lanes side by side, each with its times and the names of its locks; each begins a moment after the other.

    Those after the lane `waiting` begin once it waits for the GPU alone, while the first lane runs.
    """
    ended: dict[str, Ended] = {}

    def run_lane(name: str, times: tuple[float, float, float], locks: tuple[str, ...]) -> None:
        command = Command(
            arguments=(sys.executable, "-c", PROBE, name, *map(str, times)),
            environment={"SPANS": str(folder / "spans")},
            folder=folder,
            timeout=timeout,
            locks=tuple(folder / lock for lock in locks),
            gate=folder / f"{name}.gate",
        )
        ended[name] = process.run(command)

    threads = [threading.Thread(target=run_lane, args=lane) for lane in lanes]
    for thread, (name, _, locks) in zip(threads, lanes, strict=True):
        thread.start()
        time.sleep(0.3)
        while name == waiting and threads[0].is_alive() and not _is_held(folder / f"{locks[0]}.door"):
            time.sleep(0.02)
    for thread in threads:
        thread.join()
    return ended


def _spans(folder: Path) -> list[tuple[str, str, float, float]]:
    lines = [line.split() for line in (folder / "spans").read_text().splitlines()]
    return [(name, kind, float(begun), float(ended)) for name, kind, begun, ended in lines]


def _beside(folder: Path) -> list[str]:
    """Name what ran beside something that ran alone."""
    spans = _spans(folder)
    return [
        other[0]
        for span in spans
        for other in spans
        if span[1] == "alone" and other is not span and other[2] < span[3] and other[3] > span[2]
    ]


def test_lanes_share_and_two_that_want_to_be_alone_take_turns(tmp_path: Path) -> None:
    lanes = [(name, (1.0, 0.5, 0.1), ("gpu",)) for name in ("one", "two")]
    ended = _together(tmp_path, ("plain", (1.5, 0.0, 0.0), ("gpu",)), *lanes)
    assert [end.status for end in ended.values()] == [0, 0, 0]
    assert _beside(tmp_path) == []
    first, second, third = sorted(
        span[2:] for span in _spans(tmp_path) if span[1] == "shared" and span[3] - span[2] > 0.9
    )
    assert first[1] > second[0], "they shared before"
    assert third[0] < first[1]
    assert ended["plain"].waited == 0
    assert min(ended[name].waited for name in ("one", "two")) > 0.05


def test_the_time_out_stands_still_while_a_lane_waits(tmp_path: Path) -> None:
    ended = _together(tmp_path, ("plain", (4.0, 0.0, 0.0), ("gpu",)), ("one", (0.1, 0.2, 0.1), ("gpu",)), timeout=2.0)
    assert ended["plain"].reason == "timed out"
    assert (ended["one"].reason, ended["one"].status) == ("exited", 0)
    assert ended["one"].waited > 1.0
    assert ended["one"].seconds < 1.5


def test_nobody_new_begins_while_a_lane_waits_to_be_alone(tmp_path: Path) -> None:
    lanes = [(f"new-{number}", (0.4, 0.0, 0.0), ("gpu",)) for number in range(4)]
    _together(tmp_path, ("plain", (4.0, 0.0, 0.0), ("gpu",)), ("one", (0.1, 0.3, 0.0), ("gpu",)), *lanes, waiting="one")
    ends = sorted((ended, name) for name, kind, _, ended in _spans(tmp_path) if kind == "alone" or "new" in name)
    assert ends[0][1] == "one", ends


def test_a_lane_that_dies_while_it_is_alone_holds_up_nobody(tmp_path: Path) -> None:
    ended = _together(tmp_path, ("dies", (0.1, 0.5, 0.0), ("gpu",)), ("one", (0.1, 0.1, 0.1), ("gpu",)))
    assert ended["dies"].status < 0
    assert (ended["one"].reason, ended["one"].status) == ("exited", 0)


@pytest.mark.parametrize("locks", [(("a", "b"), ("b", "a")), (("a", "b"), ("b",))])
def test_lanes_of_several_gpus_never_wait_for_each_other_for_ever(
    tmp_path: Path, locks: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    ended = _together(tmp_path, ("one", (0.5, 0.2, 0.1), locks[0]), ("two", (0.3, 0.2, 0.1), locks[1]))
    assert [end.status for end in ended.values()] == [0, 0]
    assert _beside(tmp_path) == []
