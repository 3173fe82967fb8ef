"""``runner.py history``: verdicts and figures of a pack over the sweeps."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from harness.commands import options
from harness.core.errors import HarnessError, unknown
from harness.core.words import Exit
from harness.pack import load
from harness.receipt.figures import WIDTH
from harness.sweep import database, history_output, series
from harness.sweep.database import Past

#: A number of days; more than four digits reach back before any computer.
DAYS = re.compile(r"(\d{1,4})d")


def _moment(_: click.Context, __: click.Parameter, value: str | None) -> str:
    """Return a date such as 2026-11-21, or a number of days such as 30d, as ISO 8601 in UTC."""
    if value is None:
        return ""
    days = DAYS.fullmatch(value)
    try:
        if days:
            moment = dt.datetime.now(dt.UTC) - dt.timedelta(days=int(days[1]))
        else:
            moment = dt.datetime.combine(dt.date.fromisoformat(value), dt.time(tzinfo=dt.UTC))
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{value[:40]!r} is no date such as 2026-11-21 and no time such as 30d") from None
    return moment.isoformat(timespec="seconds")


@click.command("history")
@click.argument("wanted", metavar="PACK")
@click.option("--figure", metavar="F", help="Only this figure, a line for each run.")
@click.option("--since", callback=_moment, metavar="D", help="Only runs since then: 2026-11-21 (UTC), or 30d.")
@click.option("--target", default="", metavar="T", help="Only this target.")
@options.runs_option
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV: a line for each run, cell, figure and lane.")
def command(wanted: str, figure: str | None, since: str, target: str, runs: Path, form: str | None) -> int:  # noqa: PLR0913, PLR0917 - one parameter for each option
    """Show verdicts and figures of PACK over the finished sweeps.

    PACK is a number, a slug or a name, also of a pack that is gone. The answer comes from DIR/history.sqlite, which is
    first brought up to date with the results.json of every finished run in DIR; deleting it loses nothing. A run whose
    results cannot be read is named on standard error and passed over.

    \b
    Examples:
      runner.py history 9
      runner.py history 9 --figure max_error --since 30d
      runner.py history 9 --csv > 09.csv

    Exit status 0: shown; 2: the call is wrong, or there is no such pack, figure or run.
    """
    pack = _name(database.read(runs, "", since) if runs.is_dir() else Past((), (), ()), wanted, runs)
    past = database.read(runs, pack, since)
    for one in past.passed_over:
        click.echo(f"{one.run} is passed over: {one.reason}. Next: delete that run, or put its results back", err=True)
    past = _chosen(past, pack, figure, target)
    if form == "json":
        click.echo(history_output.as_json(past, pack), nl=False)
    elif form == "csv":
        click.echo(history_output.as_csv(past), nl=False)
    else:
        _show(past, pack, figure)
    return int(Exit.AS_EXPECTED)


def _name(past: Past, wanted: str, runs: Path) -> str:
    """Return the full name of the pack that was asked for."""
    if not past.packs:
        unread = "".join(f" that can be read ({one.run}: {one.reason})" for one in past.passed_over[:1])
        raise HarnessError(f"{runs} holds no finished sweep{unread}. Next: runner.py sweep --runs {runs}")
    found = [name for name in past.packs if load.matches(name, wanted)]
    if not found:
        raise unknown("pack", wanted, past.packs, f"runner.py history {past.packs[0]} --runs {runs}")
    if len(found) > 1:
        names = ", ".join(found)
        raise HarnessError(f"{wanted!r} names {len(found)} packs ({names}). Next: runner.py history {found[0]}")
    return found[0]


def _chosen(past: Past, pack: str, figure: str | None, target: str) -> Past:
    """Keep what the options ask for."""
    if not past.cells:
        raise HarnessError(f"no run since then judged {pack}. Next: an earlier --since")
    targets = dict.fromkeys(cell.target for cell in past.cells)
    if target and target not in targets:
        raise unknown("target", target, targets, f"runner.py history {pack}")
    cells = [cell for cell in past.cells if target in {"", cell.target}]
    names = dict.fromkeys(one.name for cell in cells for one in cell.figures)
    if figure is not None and figure not in names:
        raise unknown("figure", figure, names, f"runner.py history {pack}")
    if figure is not None:
        cells = [replace(cell, figures=tuple(one for one in cell.figures if one.name == figure)) for cell in cells]
    return replace(past, cells=tuple(cells))


def _show(past: Past, pack: str, figure: str | None) -> None:
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False, markup=False)
    console.print(history_output.headline(past, pack))
    tables: list[Table] = [history_output.verdicts(past)]
    found = series.of(past.cells)
    if found:
        tables.append(history_output.figures(found))
    if figure is not None:
        tables.append(history_output.one_figure(past, figure))
    for table in tables:
        console.print()
        console.print(table)
    if found:
        console.print(f"\n{history_output.changes(past)}", soft_wrap=True)
    console.print(f"\n{history_output.legend(past)}", soft_wrap=True)
