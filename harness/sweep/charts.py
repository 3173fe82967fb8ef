"""Figures over the runs as small SVG paths, so many nights of so many packs fit into one page.

Every chart has the same horizontal axis, one step for each run of the page, and a vertical one of its own, from the
lowest value to the highest with their spreads. Coordinates are whole numbers, and relative: four characters a value.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.receipt.figures import number
from harness.sweep import series
from harness.sweep.database import CellRun
from harness.sweep.series import Point, Series

#: Units of the view box; one step for each of three hundred nights.
WIDTH, HEIGHT = 300, 40
#: Runs on a page, the newest.
RUNS = 300
#: Charts of one pack; what is left out is named.
MOST = 12
MOST_FLOAT = sys.float_info.max
#: The characters of a date.
DAY = 10


@dataclass(frozen=True)
class Chart:
    """One figure of one lane over the runs.

    Attributes:
        series: what is drawn.
        line: the path of the values; a run without one leaves a gap.
        band: the path of values plus and minus their spreads; empty where no spread was stated.

    """

    series: Series
    line: str
    band: str

    @property
    def now(self) -> Point:
        """The newest value."""
        return self.series.points[-1]

    @property
    def label(self) -> str:
        """The chart in words."""
        one, values = self.series, self.series.values
        return (
            f"{one.figure}, {one.lane}, {len(values)} runs from {one.points[0].started[:DAY]} to "
            f"{self.now.started[:DAY]}: lowest {number(min(values))}, median {number(one.median)}, "
            f"highest {number(max(values))}, now {number(values[-1])} {one.unit}".rstrip()
        )


@dataclass(frozen=True)
class CellCharts:
    """The charts of one cell.

    Attributes:
        cell: its name.
        gpu: that most of its runs used; a chart of another one names it.
        charts: of the figures that changed.
        constant: those that were measured more than once and never changed.
        marks: the path of a vertical line at each run before which something changed around the figures.
        changed: date and words of each of these lines.

    """

    cell: str
    gpu: str
    charts: tuple[Chart, ...]
    constant: tuple[Series, ...]
    marks: str
    changed: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PackCharts:
    """The charts of one pack; `left_out` counts the series that changed and are not drawn."""

    cells: tuple[CellCharts, ...]
    left_out: int


def of_packs(cells: Sequence[CellRun], leading: dict[str, str]) -> dict[str, PackCharts]:
    """Draw the figures of every pack.

    Args:
        cells: of all runs, the oldest first.
        leading: the figure of each pack that is drawn whatever else is left out.

    """
    places = _places(cells)
    packs: dict[str, list[CellRun]] = {}
    for cell in cells:
        if cell.run in places:
            packs.setdefault(cell.pack, []).append(cell)
    return {pack: _of_pack(found, places, leading.get(pack, "")) for pack, found in packs.items()}


def _places(cells: Iterable[CellRun]) -> dict[str, int]:
    """Map each run that is shown to its place on the horizontal axis."""
    runs = list(dict.fromkeys(cell.run for cell in cells))[-RUNS:]
    step = WIDTH / max(len(runs) - 1, 1)
    return {run: round(index * step) for index, run in enumerate(runs)}


def _of_pack(cells: list[CellRun], places: dict[str, int], leading: str) -> PackCharts:
    every = [one for one in series.of(cells) if len(one.points) > 1]
    changing = [one for one in every if len(set(one.values)) > 1]
    # sorted() is stable: behind the leading figure, timings and memory, all stand as they were printed
    drawn = sorted(changing, key=lambda one: (one.figure != leading, one.unit in {"", "1"}))[:MOST]
    by_cell: dict[str, list[CellRun]] = {}
    for cell in cells:
        by_cell.setdefault(cell.name, []).append(cell)
    found = (_of_cell(name, runs, drawn, every, places) for name, runs in by_cell.items())
    return PackCharts(tuple(one for one in found if one.charts or one.constant), len(changing) - len(drawn))


def _of_cell(
    name: str, cells: list[CellRun], drawn: list[Series], every: list[Series], places: dict[str, int]
) -> CellCharts:
    charts = tuple(_chart(one, places) for one in drawn if one.cell == name)
    constant = tuple(one for one in every if one.cell == name and len(set(one.values)) == 1)
    days = {cell.run: cell.started[:DAY] for cell in cells}
    marks = list(series.marks(cells))
    lines = "".join(f"M{places[run]} 0v{HEIGHT}" for run, _ in marks)
    gpu = statistics.mode(cell.gpu for cell in cells)
    return CellCharts(name, gpu, charts, constant, lines, tuple((days[run], text) for run, text in marks))


def _chart(one: Series, places: dict[str, int]) -> Chart:
    stated = [point for point in one.points if point.spread is not None]
    ends = [end for point in one.points for end in _ends(point)]
    low, high = min(ends), max(ends)

    def height(value: float) -> int:
        return round((1 - series.height(value, low, high)) * HEIGHT)

    lines = ([(places[point.run], height(point.value)) for point in part] for part in _unbroken(one.points, places))
    bands = (_band(part, places, height) for part in _unbroken(stated, places))
    return Chart(one, "".join(_path(line) for line in lines), "".join(bands))


def _ends(point: Point) -> tuple[float, float]:
    """Return a value minus and plus its spread, within what a float holds."""
    spread = abs(point.spread or 0.0)
    return max(point.value - spread, -MOST_FLOAT), min(point.value + spread, MOST_FLOAT)


def _unbroken(points: Sequence[Point], places: dict[str, int]) -> Iterator[list[Point]]:
    """Yield the stretches of runs that all have a value."""
    order = {run: index for index, run in enumerate(places)}
    part: list[Point] = []
    for point in points:
        if part and order[point.run] != order[part[-1].run] + 1:
            yield part
            part = []
        part.append(point)
    if part:
        yield part


def _band(points: list[Point], places: dict[str, int], height: Callable[[float], int]) -> str:
    """Draw what the spreads cover: along the upper ends, and back along the lower ones."""
    if len(points) == 1:  # one alone covers nothing
        return ""
    upper = [(places[point.run], height(_ends(point)[1])) for point in points]
    lower = [(places[point.run], height(_ends(point)[0])) for point in reversed(points)]
    return _path([*upper, *lower]) + "z"


def _path(corners: list[tuple[int, int]]) -> str:
    """Write a path; a corner on a level line is left out, and one alone is a dot."""
    if len(corners) == 1:
        return "M{} {}h0".format(*corners[0])
    kept = [corners[0]]
    for corner, after in itertools.pairwise(corners[1:]):
        goes_on = (corner[0] - kept[-1][0]) * (after[0] - corner[0]) > 0
        if not goes_on or not kept[-1][1] == corner[1] == after[1]:
            kept.append(corner)
    kept.append(corners[-1])
    steps = [(x - before_x, y - before_y) for (before_x, before_y), (x, y) in itertools.pairwise(kept)]
    return "M{} {}l".format(*kept[0]) + "".join(_step(index, *step) for index, step in enumerate(steps))


def _step(index: int, right: int, down: int) -> str:
    """Write one step; a minus sign parts two numbers as well as a space does."""
    return f"{' ' if index and right >= 0 else ''}{right}{'' if down < 0 else ' '}{down}"
