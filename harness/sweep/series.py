"""Figures over the runs: one series for each cell, figure, lane, unit and GPU, and what changed around it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.sweep.database import CellRun
from harness.sweep.results import FLAKY, NOT_HERE, NOT_RUN

#: One character for each verdict, so that it is told apart without colour.
LETTERS = {
    "CONFIRMED": "C",
    "REPRODUCED": "R",
    "VALIDATED": "V",
    "FIXED_UPSTREAM": "F",
    "FIX_INEFFECTIVE": "I",
    "PATCH_BREAKS": "B",
    "PATCH_STALE": "S",
    "CONTROL_FAILED": "X",
    "UNSUPPORTED": "U",
    "UNAVAILABLE": "N",
    "ERROR": "E",
    FLAKY: "~",
    NOT_RUN: "-",
    NOT_HERE: ".",
}
BARS = "▁▂▃▄▅▆▇█"
#: What is marked where it differs from the run before; a driver or a torch changes figures without any change upstream.
MARKED = ("driver", "torch", "triton")


@dataclass(frozen=True)
class Point:
    """One run's value, in the series' unit; spread is None where the probe stated none."""

    run: str
    started: str
    value: float
    spread: float | None


@dataclass(frozen=True)
class Series:
    """One figure of one lane over the runs, the oldest first; only what ran on the same GPU can be compared."""

    cell: str
    evidence: str
    gpu: str
    figure: str
    lane: str
    unit: str
    points: tuple[Point, ...] = ()

    @property
    def values(self) -> list[float]:
        """The values, the oldest first."""
        return [point.value for point in self.points]

    @property
    def median(self) -> float:
        """The middle of the values."""
        return statistics.median(self.values)


def of(cells: Iterable[CellRun]) -> list[Series]:
    """Gather the figures that are numbers, in the order in which they were first printed."""
    found: dict[tuple[str, str, str, str, str, str], list[Point]] = {}
    for cell in cells:
        for one in cell.figures:
            if one.value is not None:
                key = (cell.name, cell.evidence, cell.gpu, one.name, one.lane, one.unit)
                found.setdefault(key, []).append(Point(cell.run, cell.started, one.value, one.spread))
    return [Series(*key, tuple(points)) for key, points in found.items()]


def letters(verdicts: Iterable[str]) -> str:
    """Write verdicts as one character each."""
    return "".join(LETTERS.get(verdict, "?") for verdict in verdicts)


def legend(verdicts: Iterable[str]) -> str:
    """Say what the characters stand for, of those that occur."""
    seen = set(verdicts)
    return ", ".join(f"{letter} {verdict}" for verdict, letter in LETTERS.items() if verdict in seen)


def sparkline(values: list[float]) -> str:
    """Draw values as bars from the lowest to the highest of them; what never changes is drawn at half height."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join(BARS[round(height(value, low, high) * (len(BARS) - 1))] for value in values)


def height(value: float, low: float, high: float) -> float:
    """Return where a value lies between the lowest (0) and the highest (1); in the middle where these are one."""
    span = high / 2 - low / 2  # halves: the difference of two large numbers may be no number
    return (value / 2 - low / 2) / span if span else 0.5


def marks(cells: Iterable[CellRun]) -> Iterator[tuple[str, str]]:
    """Yield each run of one cell in which the driver, torch, triton or the release differs, and what it is now."""
    before: dict[str, str] = {}
    for cell in cells:
        every = {name: cell.versions[name] for name in MARKED} | {cell.upstream: cell.version}
        now = {name: text for name, text in every.items() if text}
        changed = [f"{name} {before[name]} -> {text}" for name, text in now.items() if before.get(name, text) != text]
        if changed:
            yield cell.run, ", ".join(changed)
        before |= now
