"""How often a figure is said to have changed when it has not, and how soon when it has, over simulated years.

    python benchmarks/false_alarms.py [--years N]

Nothing is run: each night's value of a figure is drawn from a noise, with a change or without. A false alarm is a
stretch of nights on which a change is called, however long. The independent noises are what the test is made for;
the others are what machines do: nights that resemble their neighbours (temperature, a busy host), a slow outlier
now and then, and a timer that rounds. Noise is 2 % of the value.

Measured with 500 years of each: at most 0.016 false alarms a figure and year (8 in 500, rounded values; 2 in 500 with
independent nights, 2 in 500 where each night keeps 0.6 of the last). A step of 4 % was called in 98 of 100 cases, after
12 nights in the middle; one of 2 %, which is the noise, in 32; a creep of 0.05 % a night in 99, after 73 nights.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.sweep import drift
from harness.sweep.series import Point, Series

YEAR = 365
WARM_UP = drift.NEWEST + drift.BEFORE
#: The share of its value by which a figure scatters from night to night.
NOISE = 0.02
#: Nights, of the search for how soon a change is called.
SEARCHED = 180


def independent(chance: random.Random) -> Iterator[float]:
    """Yield a deviation for each night, which knows nothing of the night before."""
    while True:
        yield chance.gauss(0, NOISE)


def resembling(share: float) -> Callable[[random.Random], Iterator[float]]:
    """Return a noise whose nights keep this share of the night before, with the same scatter altogether."""

    def noise(chance: random.Random) -> Iterator[float]:
        value = chance.gauss(0, NOISE)
        while True:
            yield value
            value = share * value + chance.gauss(0, NOISE * (1 - share**2) ** 0.5)

    return noise


def outliers(chance: random.Random) -> Iterator[float]:
    """Yield independent deviations, every twentieth night a fifth slower."""
    for one in independent(chance):
        yield one + (0.2 if chance.random() < 1 / 20 else 0)


def rounded(chance: random.Random) -> Iterator[float]:
    """Yield independent deviations in steps of a fiftieth: most values are ties."""
    for one in independent(chance):
        yield round(one * 50) / 50


NOISES: dict[str, Callable[[random.Random], Iterator[float]]] = {
    "independent": independent,
    "independent, 5 % outliers of +20 %": outliers,
    "independent, rounded to 2 %": rounded,
    "each night keeps 0.3 of the last": resembling(0.3),
    "each night keeps 0.6 of the last": resembling(0.6),
}
#: The factor of a figure on a night after the change began.
CHANGES: dict[str, Callable[[int], float]] = {
    "step of +1 %": lambda _: 1.01,
    "step of +2 %": lambda _: 1.02,
    "step of +4 %": lambda _: 1.04,
    "creep of +0.05 % a night": lambda night: 1 + 0.0005 * night,
    "creep of +0.1 % a night": lambda night: 1 + 0.001 * night,
}


def called(values: list[float]) -> bool:
    """Say whether a change is called after the last of these nights."""
    points = tuple(Point(str(night), "", value, None) for night, value in enumerate(values[-WARM_UP:]))
    return drift.change(Series("toy/cpu", "executed", "GPU", "time", "patched", "ms", points)) is not None


def false_alarms(noise: Iterator[float]) -> int:
    """Count the stretches of a year on which a change is called though there is none."""
    values = [10 * (1 + next(noise)) for _ in range(WARM_UP)]
    count, before = 0, False
    for _ in range(YEAR):
        values.append(10 * (1 + next(noise)))
        now = called(values)
        count += now and not before
        before = now
    return count


def nights_until_called(noise: Iterator[float], factor: Callable[[int], float]) -> int | None:
    """Return after how many nights a change is called; None where it is not within the nights that are searched."""
    values = [10 * (1 + next(noise)) for _ in range(WARM_UP)]
    for night in range(1, SEARCHED + 1):
        values.append(10 * factor(night) * (1 + next(noise)))
        if called(values):
            return night
    return None


def main() -> None:
    """Simulate, and print two tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--years", type=int, default=500, help="of each noise")
    years = parser.parse_args().years
    print(f"{drift.METHOD}; noise {NOISE:.0%}\n")
    print(f"| noise, {years} years of {YEAR} nights each | false alarms a figure and year |\n| --- | --- |")
    for name, noise in NOISES.items():
        found = sum(false_alarms(noise(random.Random(year))) for year in range(years))  # noqa: S311 - a simulation
        print(f"| {name} | {found / years:.3f} ({found}) |", flush=True)
    tries = max(years // 5, 20)
    print(f"\n| change, {tries} times | called within {SEARCHED} nights | median of nights until then |")
    print("| --- | --- | --- |")
    for name, factor in CHANGES.items():
        ends = [nights_until_called(independent(random.Random(seed)), factor) for seed in range(tries)]  # noqa: S311
        seen = [night for night in ends if night is not None]
        print(f"| {name} | {len(seen) / tries:.0%} | {statistics.median(seen) if seen else '-'} |", flush=True)


if __name__ == "__main__":
    main()
