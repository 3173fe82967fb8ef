"""``runner.py table``: packs against targets."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from harness.commands import options
from harness.core.words import Exit
from harness.receipt.figures import WIDTH
from harness.report import grid
from harness.report.grid import Entry


def _text(entries: list[Entry]) -> None:
    header, rows = grid.arranged(entries)
    table = Table(*header, box=None)
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False, markup=False)
    console.print(table)
    for one in entries:
        if one.why_stale:
            console.print(f"{one.pack} {one.target}: STALE: {'; '.join(one.why_stale)}", soft_wrap=True)


@click.command("table")
@click.argument("folders", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@options.from_option
@options.packs_option
@options.cache_option
@click.option("--format", "form", type=click.Choice(["text", "markdown", "json"]), default="text", show_default=True)
def command(folders: tuple[Path, ...], run: str | None, packs: Path, cache_root: Path | None, form: str) -> int:
    """Show packs against targets, from receipts.

    DIR is a folder of receipts that `run --receipts DIR` wrote, on this machine or another; with none, the receipts
    of the packs themselves. Each cell shows the strongest evidence there is, and names it; of equal evidence, the
    newest.
    """
    chosen_run = [options.run_receipts(run, cache_root)] if run else []
    found, errors = grid.gather([*folders, *chosen_run] or [packs.absolute()])
    chosen, broken = options.sound_packs(packs, ())
    entries = [one for pack in chosen for one in grid.of_pack(pack, found.get(pack.name, []))]
    if form == "json":
        click.echo(grid.as_json(entries), nl=False)
    elif form == "markdown":
        click.echo(grid.markdown(entries), nl=False)
    else:
        _text(entries)
    options.complain([*broken, *errors])
    return int(Exit.WRONG_CALL if broken or errors else Exit.AS_EXPECTED)
