"""``runner.py list --runs``: verdicts and figures of a pack over the sweeps that are there."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.core import markdown, terminal
from harness.core.errors import HarnessError, unknown
from harness.core.terminal import WIDTH
from harness.pack import load
from harness.receipt.figures import number
from harness.sweep import run_folder
from harness.sweep.results import CellRow, Results

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
        raise unknown("pack", wanted, names, f"runner.py list {names[0]} --runs {runs}")
    if len(found) > 1:
        many = ", ".join(found)
        raise HarnessError(
            f"{wanted!r} names {len(found)} packs ({many}). Next: runner.py list {found[0]} --runs {runs}"
        )
    return found[0]


def _table(name: str, rows: Rows) -> Table:
    """Build the table of a cell: a line for each figure of each sweep, without the patch and with it."""
    header = ("sweep", "version", "verdict", "figure", "pristine", "patched")
    table = Table(*header, title=name, title_justify="left", box=None)
    for sweep, cell in rows:
        said = sweep.run, cell.version, cell.says
        for one in cell.figures:
            figure = f"{one.name} [{one.unit}]" if one.unit not in {"", "1"} else one.name
            values = ("" if value is None else number(value) for value in (one.pristine, one.patched))
            table.add_row(*said, markdown.plain(figure), *values)
        if not cell.figures:
            table.add_row(*said)
    return table


def show(wanted: str, runs: Path) -> None:
    """Print a line for each figure of each finished sweep, the oldest first; a pack that is gone is found as well.

    HarnessError is raised where there is no such pack or sweep.
    """
    sweeps = reversed([results for _, results in run_folder.finished(runs, pass_over=_pass_over)])
    every = [(sweep, cell) for sweep in sweeps for cell in sweep.cells]
    pack = _pack(every, wanted, runs)
    rows = [(sweep, cell) for sweep, cell in every if cell.pack == pack]
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False, markup=False)
    for name in dict.fromkeys(cell.name for _, cell in rows):
        console.print(_table(name, [(sweep, cell) for sweep, cell in rows if cell.name == name]))
        console.print()
