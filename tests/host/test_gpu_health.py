"""What makes a GPU faulty, before lanes and after them, one at a time or several."""

from __future__ import annotations

import pytest

from harness.host import gpu_health, nvml
from harness.host.gpu_health import GpuWatch
from harness.host.host import Device, Gpu, Reading

DEVICE = Device("0", "0", Gpu("Toy", "9.0"), None, None)


def _readings(monkeypatch: pytest.MonkeyPatch, *readings: Reading) -> None:
    following = iter(readings)
    monkeypatch.setattr(nvml, "read", lambda _: next(following))


@pytest.mark.parametrize(
    ("reading", "fault"),
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
def test_what_is_a_fault(monkeypatch: pytest.MonkeyPatch, reading: Reading, fault: str) -> None:
    monkeypatch.setattr(nvml, "read", lambda _: reading)
    assert gpu_health.after(DEVICE, Reading(memory=0, uncorrected=0), patience=0) == fault


def test_memory_may_take_a_moment_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _readings(monkeypatch, Reading(memory=900 * 2**20), Reading(memory=0))
    assert gpu_health.after(DEVICE, Reading(memory=0)) == ""


def test_memory_says_nothing_where_somebody_else_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    others = frozenset({7})
    monkeypatch.setattr(nvml, "read", lambda _: Reading(memory=900 * 2**20, processes=others))
    assert gpu_health.after(DEVICE, Reading(memory=0, processes=others), patience=0) == ""


def test_memory_is_looked_at_when_the_last_of_several_lanes_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, idle = Reading(memory=9 * 2**30, processes=frozenset({7})), Reading(memory=0)
    _readings(monkeypatch, idle, busy, idle)
    watch = GpuWatch()
    assert watch.enter(DEVICE, measures=False) == ("", False)
    assert watch.enter(DEVICE, measures=True) == ("", False), "the process there is a lane of ours"
    assert watch.leave(DEVICE) == "", "another lane still uses it"
    assert watch.leave(DEVICE) == ""


def test_a_fault_counts_for_every_lane_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _readings(monkeypatch, Reading(), Reading(xids=(79,)))
    watch = GpuWatch()
    for _ in range(3):
        watch.enter(DEVICE, measures=False)
    assert [watch.leave(DEVICE), watch.enter(DEVICE, measures=False)] == ["Xid 79", ("Xid 79", False)]
    assert [watch.leave(DEVICE), watch.leave(DEVICE)] == ["Xid 79", "Xid 79"]


def test_nothing_is_measured_beside_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Reading(processes=frozenset({7}))
    monkeypatch.setattr(nvml, "read", lambda _: other)
    monkeypatch.setattr(gpu_health, "COURTESY", 0.0)
    watch = GpuWatch()
    assert watch.enter(DEVICE, measures=False) == ("", False)
    assert watch.enter(DEVICE, measures=True) == ("", True)
