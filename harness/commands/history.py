"""``runner.py list --runs``: verdicts and figures of a pack, sweep by sweep."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.core import markdown, terminal
from harness.core.errors import HarnessError, unknown_name
from harness.core.terminal import WIDTH
from harness.pack import load
from harness.receipt.figures import number
from harness.sweep import run_folder
from harness.sweep.results import CellRow, Results

Rows = list[tuple[Results, CellRow]]


def _pass_over(folder: Path, error: Exception) -> None:
    reason = " ".join(str(error).split())[:200]
    terminal.echo(f"{folder.name} is passed over: {reason}. Next: delete that run, or put its results back", err=True)


def _full_name(rows: Rows, pattern: str, runs: Path) -> str:
    """Return the full name of the pack that `pattern` names; the pack itself may have been deleted."""
    names = list(dict.fromkeys(cell.pack for _, cell in rows))
    if not names:
        raise HarnessError(f"{runs} holds no finished sweep that can be read. Next: runner.py sweep --runs {runs}")
    matches = [name for name in names if load.matches(name, pattern)]
    if not matches:
        raise unknown_name("pack", pattern, names, f"runner.py list {names[0]} --runs {runs}")
    if len(matches) > 1:
        listed = ", ".join(matches)
        raise HarnessError(
            f"{pattern!r} names {len(matches)} packs ({listed}). Next: runner.py list {matches[0]} --runs {runs}"
        )
    return matches[0]


def _table(name: str, rows: Rows) -> Table:
    """Build the table of a cell: a line for each figure of each sweep, with the values of both lanes."""
    header = ("sweep", "version", "verdict", "figure", "pristine", "patched")
    table = Table(*header, title=name, title_justify="left", box=None)
    for sweep, cell in rows:
        leading = sweep.run, cell.version, cell.says
        for figure in cell.figures:
            label = f"{figure.name} [{figure.unit}]" if figure.unit not in {"", "1"} else figure.name
            values = ("" if value is None else number(value) for value in (figure.pristine, figure.patched))
            table.add_row(*leading, markdown.plain(label), *values)
        if not cell.figures:
            table.add_row(*leading)
    return table


def show(pattern: str, runs: Path) -> None:
    """Print a line for each figure of each finished sweep, the oldest first.

    HarnessError is raised if `runs` has no finished sweep, or none with such a pack.
    """
    sweeps = reversed([results for _, results in run_folder.finished(runs, pass_over=_pass_over)])
    all_rows = [(sweep, cell) for sweep in sweeps for cell in sweep.cells]
    pack = _full_name(all_rows, pattern, runs)
    rows = [(sweep, cell) for sweep, cell in all_rows if cell.pack == pack]
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False, markup=False)
    for name in dict.fromkeys(cell.name for _, cell in rows):
        console.print(_table(name, [(sweep, cell) for sweep, cell in rows if cell.name == name]))
        console.print()
