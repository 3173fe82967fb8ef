"""``runner.py history``: verdicts and figures of a pack over the sweeps that are there."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from harness.commands import options
from harness.core import markdown, terminal
from harness.core.errors import HarnessError, unknown
from harness.core.words import Exit
from harness.pack import load
from harness.receipt import receipt
from harness.receipt.figures import WIDTH, number
from harness.sweep import history
from harness.sweep.results import CellRow, Results

SCHEMA = 2
Rows = list[tuple[Results, CellRow]]


def _pass_over(folder: Path, error: Exception) -> None:
    why = " ".join(str(error).split())[:200]
    terminal.echo(f"{folder.name} is passed over: {why}. Next: delete that run, or put its results back", err=True)


def _pack(rows: Rows, wanted: str, runs: Path) -> str:
    """Return the full name of the pack that was asked for, also of one that is gone."""
    names = list(dict.fromkeys(cell.pack for _, cell in rows))
    if not names:
        raise HarnessError(f"{runs} holds no finished sweep that can be read. Next: runner.py sweep --runs {runs}")
    found = [name for name in names if load.matches(name, wanted)]
    if not found:
        raise unknown("pack", wanted, names, f"runner.py history {names[0]} --runs {runs}")
    if len(found) > 1:
        many = ", ".join(found)
        raise HarnessError(f"{wanted!r} names {len(found)} packs ({many}). Next: runner.py history {found[0]}")
    return found[0]


def _cell_document(sweep: Results, cell: CellRow) -> dict[str, object]:
    figures = [
        {"name": one.name, "unit": one.unit, "pristine": one.pristine, "patched": one.patched} for one in cell.figures
    ]
    return {
        "run": sweep.run,
        "started": sweep.started,
        "cell": cell.name,
        "version": cell.version,
        "evidence": cell.evidence,
        "verdict": cell.verdict,
        "torch": sweep.host.torch,
        "driver": sweep.host.driver,
        "figures": figures,
    }


def _value(value: object) -> str:
    return "-" if value is None else number(value)


def _table(name: str, rows: Rows) -> Table:
    """Build the table of a cell: a line for each sweep, a column for each figure, without the patch and with it."""
    figures = list(dict.fromkeys((one.name, one.unit) for _, cell in rows for one in cell.figures))
    units = [markdown.plain(f"{figure} [{unit}]" if unit not in {"", "1"} else figure) for figure, unit in figures]
    table = Table("sweep", "version", "verdict", *units, title=name, title_justify="left", box=None)
    for sweep, cell in rows:
        there = {(one.name, one.unit): f"{_value(one.pristine)} -> {_value(one.patched)}" for one in cell.figures}
        table.add_row(sweep.run, cell.version, cell.says, *(there.get(one, "") for one in figures))
    return table


@click.command("history")
@click.argument("wanted", metavar="PACK")
@options.runs_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(wanted: str, runs: Path, as_json: bool) -> int:  # noqa: FBT001 - click passes it by name
    """Show what the sweeps found of one pack.

    A line for each finished sweep of a folder, with verdicts and figures.

    PACK is a number, a slug or a name, also of a pack that is gone. A figure stands there without the patch and with
    it. A sweep whose results cannot be read is named on standard error and passed over.

    \b
    Examples:
      runner.py history 9
      runner.py history 9 --json

    Exit status 0: shown; 2: the call is wrong, or there is no such pack or sweep.
    """
    sweeps = reversed([results for _, results in history.finished(runs, pass_over=_pass_over)])
    every = [(sweep, cell) for sweep in sweeps for cell in sweep.cells]
    pack = _pack(every, wanted, runs)
    rows = [(sweep, cell) for sweep, cell in every if cell.pack == pack]
    if as_json:
        cells = [_cell_document(sweep, cell) for sweep, cell in rows]
        terminal.echo(receipt.to_json({"schema": SCHEMA, "pack": pack, "cells": cells}), nl=False)
        return int(Exit.AS_EXPECTED)
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False, markup=False)
    for name in dict.fromkeys(cell.name for _, cell in rows):
        console.print(_table(name, [(sweep, cell) for sweep, cell in rows if cell.name == name]))
        console.print()
    return int(Exit.AS_EXPECTED)
