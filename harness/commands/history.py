"""``runner.py list --runs``: verdicts and figures of packs, sweep by sweep."""

from pathlib import Path

from rich.table import Table

from harness.core import HarnessError, markdown, terminal, unknown_name
from harness.pack import load
from harness.receipt.figures import number
from harness.sweep import run_folder
from harness.sweep.run_folder import CellRow, Results


def _read(runs: Path) -> list[Results]:
    """Read the finished sweeps, the oldest first, and name those that cannot be read."""
    sweeps = []
    for folder in reversed(run_folder.finished(runs)):
        try:
            sweeps.append(run_folder.read(folder))
        except (OSError, ValueError) as error:
            problem = f"{folder.name} is passed over: {str(error)[:200]}"
            terminal.echo(f"{problem}. Next: delete that run, or put its results back", err=True)
    return sweeps


def _table(name: str, rows: list[tuple[Results, CellRow]]) -> Table:
    """Build the table of a cell: a line for each figure of each sweep, with the values of both lanes."""
    header = ("sweep", "version", "verdict", "figure", "unpatched", "patched")
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


def show(patterns: tuple[str, ...], runs: Path) -> None:
    """Print a line for each figure of each finished sweep, the oldest first; a pack itself may have been deleted.

    HarnessError is raised if `runs` has no finished sweep, or none with such a pack.
    """
    rows = [(sweep, cell) for sweep in _read(runs) for cell in sweep.cells]
    packs = list(dict.fromkeys(cell.pack for _, cell in rows))
    if not packs:
        raise HarnessError(f"{runs} holds no finished sweep that can be read. Next: runner.py sweep --runs {runs}")
    for pattern in patterns:
        if not any(load.matches(pack, pattern) for pack in packs):
            raise unknown_name("pack", pattern, packs, f"runner.py list {packs[0]} --runs {runs}")
    chosen = {pack for pack in packs if not patterns or any(load.matches(pack, pattern) for pattern in patterns)}
    for name in dict.fromkeys(cell.name for _, cell in rows if cell.pack in chosen):
        terminal.echo(terminal.render([_table(name, [(sweep, cell) for sweep, cell in rows if cell.name == name])]))
