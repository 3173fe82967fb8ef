"""What `history` prints: a table with sparklines, JSON, CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from rich.table import Table

from harness.core import markdown
from harness.core.words import LaneName
from harness.receipt import receipt
from harness.receipt.figures import number
from harness.sweep import drift, series
from harness.sweep.database import CellRun, Measured, Past
from harness.sweep.drift import Change
from harness.sweep.series import Series

#: Of the JSON document.
SCHEMA = 1
#: Runs that a sparkline and a strip of verdicts show.
SHOWN = 40
#: The characters of a date.
DAY = 10
CSV_HEADER = (
    "run", "started", "cell", "target", "release", "upstream", "version", "evidence", "gpu", "verdict", "attention",
    "cell_seconds", "python", "torch", "triton", "cuda", "driver", "figure", "lane", "value", "spread", "unit",
)  # fmt: skip


def as_json(past: Past, pack: str) -> str:
    """Write every cell of every run, with its figures, as one document."""
    cells = [asdict(cell) for cell in past.cells]
    problems = [asdict(one) for one in past.passed_over]
    changes = [_change(one) for one in drift.changes(past.cells)]
    document = {"schema": SCHEMA, "pack": pack, "method": drift.METHOD, "changes": changes, "cells": cells}
    return receipt.to_json({**document, "passed_over": problems})


def _change(one: Change) -> dict[str, object]:
    place = {"cell": one.series.cell, "gpu": one.series.gpu, "figure": one.series.figure, "lane": one.series.lane}
    return {**place, "unit": one.series.unit, "before": one.before, "now": one.now, "p": one.p, "worse": one.worse}


def changes(past: Past) -> str:
    """Say which figures changed over the runs, a line each, and how that was found."""
    found = [f"{_short(one.series.cell)}: {one.text}" for one in drift.changes(past.cells)]
    longest = max((len(one.points) for one in series.of(past.cells)), default=0)
    need = drift.NEWEST + drift.FEWEST
    if longest < need:
        return f"Whether a figure changed over the runs is said from {need} runs on; there are {longest}."
    head = "Changed over the runs" if found else "No figure changed over the runs"
    return markdown.plain("\n".join([f"{head} ({drift.METHOD}){':' if found else '.'}", *found]))


def as_csv(past: Past) -> str:
    """Write a line for each figure of each lane, and one for each cell of a run that has none."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    for cell in past.cells:
        figures = [_figure(one) for one in cell.figures] or [("",) * 5]
        writer.writerows((*_place(cell), *figure) for figure in figures)
    return stream.getvalue()


def _place(cell: CellRun) -> tuple[object, ...]:
    release = (cell.release, cell.upstream, cell.version, cell.evidence, cell.gpu)
    said = (cell.verdict, int(cell.attention), cell.seconds)
    return (cell.run, cell.started, cell.name, cell.target, *release, *said, *cell.versions.values())


def _figure(one: Measured) -> tuple[object, ...]:
    value = one.text if one.value is None else repr(one.value)
    return one.name, one.lane, value, "" if one.spread is None else repr(one.spread), one.unit


def headline(past: Past, pack: str) -> str:
    """Say how many runs there are, and since when."""
    runs = dict.fromkeys((cell.run, cell.started[:DAY]) for cell in past.cells)
    days = [day for _, day in runs]
    return f"{pack}: {len(runs)} run{'s' * (len(runs) != 1)}, {days[0]} to {days[-1]}"


def verdicts(past: Past) -> Table:
    """Build the table of cells: their verdicts over the runs, and how long they took."""
    table = _table("cell", "evidence", "GPU", f"verdicts, the last {SHOWN}", "now", "of all runs", "seconds", "")
    for name, cells in _by_cell(past.cells).items():
        newest, said = cells[-1], [cell.verdict for cell in cells]
        counts = ", ".join(f"{verdict} {count}" for verdict, count in Counter(said).most_common())
        seconds = [cell.seconds for cell in cells if cell.seconds]
        last = f"{seconds[-1]:.1f}" if seconds else ""
        strip, line = series.letters(said[-SHOWN:]), series.sparkline(seconds[-SHOWN:])
        _add(table, _short(name), newest.evidence, newest.gpu, strip, newest.verdict, counts, last, line)
    return table


def legend(past: Past) -> str:
    """Say what the letters of the verdicts stand for."""
    return series.legend(cell.verdict for cell in past.cells)


def figures(found: list[Series]) -> Table:
    """Build the table of figures: a line for each cell and lane."""
    several = {one.cell for one in found if one.gpu != next(other.gpu for other in found if other.cell == one.cell)}
    table = _table("cell", "figure", "lane", "runs", "lowest", "median", "highest", "now", "unit", f"the last {SHOWN}")
    for one in found:
        where = f"{_short(one.cell)} on {one.gpu or 'no GPU'}" if one.cell in several else _short(one.cell)
        low, high, now = min(one.values), max(one.values), one.points[-1]
        values = [number(value) for value in (low, one.median, high)]
        line = series.sparkline(one.values[-SHOWN:]) if low != high else "never changed" * (len(one.points) > 1)
        last = f"{number(now.value)} {_spread(now.spread)}".rstrip()
        _add(table, where, one.figure, one.lane, str(len(one.points)), *values, last, one.unit, line)
    return table


def one_figure(past: Past, figure: str) -> Table:
    """Build the table of one figure: a line for each run of each cell."""
    table = _table("run", "cell", "evidence", "GPU", "verdict", *LaneName, "unit", "changed since the run before")
    for name, cells in _by_cell(past.cells).items():
        changed = dict(series.marks(cells))
        for cell in cells:
            lines = {one.lane: one for one in cell.figures if one.name == figure}
            unit = next((one.unit for one in lines.values()), "")
            values = [_value(lines.get(lane)) for lane in LaneName]
            remark = changed.get(cell.run, "")
            _add(table, cell.run, _short(name), cell.evidence, cell.gpu, cell.verdict, *values, unit, remark)
    return table


def _by_cell(cells: Iterable[CellRun]) -> dict[str, list[CellRun]]:
    found: dict[str, list[CellRun]] = {}
    for cell in cells:
        found.setdefault(cell.name, []).append(cell)
    return found


def _short(cell: str) -> str:
    """Name a cell without its pack, of which every line speaks."""
    return cell.partition("/")[2] or cell


def _value(one: Measured | None) -> str:
    if one is None:
        return "-"
    if one.value is None:
        return one.text
    return f"{number(one.value)} {_spread(one.spread)}".rstrip()


def _spread(spread: float | None) -> str:
    return "" if spread is None else f"± {number(spread)}"


def _table(*header: str) -> Table:
    return Table(*header, box=None, pad_edge=False)


def _add(table: Table, *texts: str) -> None:
    table.add_row(*(markdown.plain(text) for text in texts))
