"""``runner.py ack``: put down as known what a sweep found, so that it fails for it no longer."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import click

from harness.commands import options
from harness.core.errors import HarnessError, unknown
from harness.core.words import Exit
from harness.sweep import acknowledged, past_runs, run_folder
from harness.sweep.acknowledged import Entry
from harness.sweep.results import SCHEMA, CellRow, Results


@click.command("ack")
@click.argument("cell")
@click.option("--reason", required=True, metavar="TEXT", help="Why it may stay, such as the thread of upstream's.")
@options.runs_option
@options.packs_option
@options.acknowledged_option
def command(cell: str, reason: str, runs: Path, packs: Path, acknowledged_file: Path | None) -> int:
    """Acknowledge what the newest finished sweep says of CELL.

    CELL is a name as the sweep prints it: PACK/TARGET, or PACK/TARGET@latest. What it said (its verdict, what got
    worse, the reason) is appended to acknowledged.toml with the date and your reason; commit that file, it is to be
    reviewed. From then on a sweep calls the cell KNOWN and does not fail for it, until it says something else.

    \b
    Example:
      runner.py ack 09_liger_flce_none/cpu@latest --reason "fixed by liger #1298; the pack stays for who cannot upgrade"
    """
    if not reason.strip():
        raise HarnessError("--reason is empty. Next: say why it may stay")
    row = _row(runs, cell)
    file = acknowledged_file or acknowledged.beside(packs)
    says = acknowledged.state_of(row)
    acknowledged.add(file, Entry(row.name, says, " ".join(reason.split()), dt.datetime.now(dt.UTC).date()))
    click.echo(f"{file}: {row.name} is known: {says.verdict}{': ' + ', '.join(says.changes) if says.changes else ''}")
    return int(Exit.AS_EXPECTED)


def _row(runs: Path, cell: str) -> CellRow:
    """Return the row of a cell in the newest finished run."""
    newest = next(iter(run_folder.earlier(runs)), None)
    if newest is None:
        raise HarnessError(f"{runs} holds no finished sweep. Next: runner.py sweep --runs {runs}")
    rows = {row.name: row for row in _results(newest).cells}
    if cell not in rows:
        raise unknown("cell", cell, rows, f"runner.py ack CELL, as {newest}/summary.md names it")
    if not rows[cell].deviates:
        raise HarnessError(f"{cell} needs no attention in {newest.name}: {rows[cell].says}. Next: nothing")
    return rows[cell]


def _results(folder: Path) -> Results:
    """Read the newest run; what an older runner wrote does not tell what a change is about."""
    path = folder / run_folder.RESULTS
    try:
        return past_runs.read(folder, oldest=SCHEMA)
    except past_runs.OtherSchemaError:
        raise HarnessError(f"{path} was written by another version of the runner. Next: runner.py sweep") from None
    except OSError as error:
        raise HarnessError(f"{path} cannot be read ({error.strerror}). Next: runner.py sweep") from None
    except ValueError as error:
        raise HarnessError(f"{path} is damaged ({error}). Next: runner.py sweep") from None
