"""Whether a figure changed against its own history: a rank test over the last runs.

The two-sided test of Mann and Whitney (1947) compares the newest runs with those before them. It asks only how the
values are ordered, so it needs no assumption on how a figure scatters, and one outlier is no change. The p-value is
the normal approximation with the corrections for ties and continuity (Hollander, Wolfe and Chicken, "Nonparametric
Statistical Methods", 3rd edition, section 4.1). Nights that resemble their neighbours (a warm room, a busy week) tell
less than as many independent ones: the variance is multiplied by (1 + r) / (1 - r), r the correlation of neighbours
(the effective number of observations of Bayley and Hammersley, 1946). Every night is a test of its own, and shares
most of its runs with the night before: the limit is set by what a simulated year without any change gives
(`benchmarks/false_alarms.py`), and not read off as a probability of error.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.receipt.figures import number
from harness.sweep import database, series
from harness.sweep.baseline import MEMORY, RATES, TIMES
from harness.sweep.database import CellRun
from harness.sweep.results import CellRow, ChangeRow, Results
from harness.sweep.series import Series

#: Runs: the newest, those before them that they are compared with, and the fewest of these.
NEWEST, BEFORE, FEWEST = 14, 90, 28
#: The p-value below which a change is called.
LIMIT = 1e-4
#: The largest correlation of neighbouring runs that is corrected for: the correction has no bound.
MOST_ALIKE = 0.9
#: The share of the value before: whoever reads figures of kernels acts on no smaller difference.
SMALLEST = 0.01
METHOD = (
    f"Mann-Whitney rank test of the last {NEWEST} runs against up to {BEFORE} before them, p < {LIMIT:g}, "
    f"medians more than {SMALLEST:.0%} apart"
)


@dataclass(frozen=True)
class Change:
    """One figure that changed.

    Attributes:
        series: of it.
        before: median of the runs that the newest are compared with, in the figure's unit.
        now: median of the newest runs.
        p: of the rank test.

    """

    series: Series
    before: float
    now: float
    p: float

    @property
    def worse(self) -> bool | None:
        """Whether more time or memory is used, or less is done in a time; None where the unit does not tell."""
        if self.series.unit in RATES:
            return self.now < self.before
        return self.now > self.before if self.series.unit in TIMES | MEMORY else None

    @property
    def text(self) -> str:
        """The change in words."""
        one = self.series
        share = f"{(self.now - self.before) / abs(self.before):+.1%}, " if self.before else ""
        unit = f" {one.unit}" if one.unit not in {"", "1"} else ""
        return (
            f"{one.lane} {one.figure}: median {number(self.now)}{unit} over the last {NEWEST} runs, "
            f"{number(self.before)} before ({share}rank test p = {self.p:.0e})"
        )


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of the two-sided test of Mann and Whitney; 1 where all values are one.

    Both samples are in the order in which they were measured.
    """
    ranks, ties = _ranks([*first, *second])
    of_first, of_second = ranks[: len(first)], ranks[len(first) :]
    count, pairs = len(ranks), len(first) * len(second)
    variance = pairs / 12 * (count + 1 - ties / (count * (count - 1)))
    if variance <= 0:
        return 1.0
    variance *= _inflation(of_second, of_first)
    above = sum(of_first) - len(first) * (len(first) + 1) / 2 - pairs / 2
    return math.erfc(max(abs(above) - 0.5, 0.0) / math.sqrt(2 * variance))


def _ranks(values: Sequence[float]) -> tuple[list[float], int]:
    """Return the rank of each value, of ties the middle one, and what ties take from the variance."""
    ranks, ties, place = [0.0] * len(values), 0, 0
    order = sorted(range(len(values)), key=lambda index: values[index])
    for _, group in itertools.groupby(order, key=lambda index: values[index]):
        members = list(group)
        for index in members:
            ranks[index] = place + (len(members) + 1) / 2
        ties += len(members) ** 3 - len(members)
        place += len(members)
    return ranks, ties


def _inflation(*samples: Sequence[float]) -> float:
    """Return by how much the variance is larger because each value resembles the one before it.

    The correlation is that of neighbours around the straight line through each sample: neither a step between the
    samples nor a creep within one is taken for resemblance. It is corrected for being too small in short samples.
    """
    products, squares = 0.0, 0.0
    for sample in samples:
        apart = _around_line(sample)
        products += sum(one * after for one, after in itertools.pairwise(apart))
        squares += sum(one * one for one in apart)
    if squares <= 0:
        return 1.0
    count = sum(len(sample) for sample in samples)
    correlation = (products / squares * count + 2 * len(samples)) / (count - 4 * len(samples))
    correlation = min(max(correlation, 0.0), MOST_ALIKE)
    return (1 + correlation) / (1 - correlation)


def _around_line(values: Sequence[float]) -> list[float]:
    """Return how far values lie from the straight line through them."""
    slope, start = statistics.linear_regression(range(len(values)), values)
    return [value - start - slope * index for index, value in enumerate(values)]


def change(one: Series) -> Change | None:
    """Say whether the newest runs of a figure differ from those before them; None where they do not, or are too few."""
    values = one.values[-NEWEST - BEFORE :]
    now, before = values[-NEWEST:], values[:-NEWEST]
    if len(before) < FEWEST:
        return None
    middle, newest = statistics.median(before), statistics.median(now)
    # few different values, as counts have: the approximation calls a change too early, the median does not follow
    if abs(newest - middle) <= SMALLEST * abs(middle):
        return None
    p = p_value(now, before)
    return Change(one, middle, newest, p) if p < LIMIT else None


def changes(cells: Iterable[CellRun], newest: str = "") -> Iterator[Change]:
    """Yield what changed, of the figures that the run of this name measured; of all where none is named."""
    for one in series.of(cells):
        found = change(one) if not newest or one.points[-1].run == newest else None
        if found is not None:
            yield found


def rows(results: Results, past: Sequence[CellRun], measuring: Collection[str]) -> Iterator[CellRow]:
    """Yield the rows of a sweep with what changed over the runs.

    It needs attention where it is worse, and the cell one of those that nothing disturbs.

    Args:
        results: of the sweep.
        past: the cells of the runs before, the oldest run first.
        measuring: the names of the cells whose figures of time and memory mean something.

    """
    found: dict[str, list[ChangeRow]] = {}
    for one in changes([*past, *database.cells_of(results.run, results)], results.run):
        worse = bool(one.worse) and one.series.cell in measuring
        line = ChangeRow("changed over the runs", worse, one.text, f"{one.series.lane} {one.series.figure}")
        found.setdefault(one.series.cell, []).append(line)
    for row in results.cells:
        yield replace(row, changes=(*row.changes, *found.get(row.name, ())))
