"""``runner.py table``: packs against targets."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from harness import overview
from harness.commands import options
from harness.overview import Cell
from harness.summary import WIDTH
from harness.words import Exit


def _text(cells: list[Cell]) -> None:
    header, rows = overview.grid(cells)
    table = Table(*header, box=None)
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False, markup=False)
    console.print(table)
    for one in cells:
        if one.why_stale:
            console.print(f"{one.pack} {one.target}: STALE: {'; '.join(one.why_stale)}", soft_wrap=True)


@click.command("table")
@click.argument("folders", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@options.packs_option
@click.option("--format", "form", type=click.Choice(["text", "markdown", "json"]), default="text", show_default=True)
def command(folders: tuple[Path, ...], packs: Path, form: str) -> int:
    """Show packs against targets, from receipts.

    DIR is a folder of receipts that `run --receipts DIR` wrote, on this machine or another; with none, the receipts
    of the packs themselves. Each cell shows the strongest evidence there is, and names it; of equal evidence, the
    newest.
    """
    found, errors = overview.gather(list(folders) or [packs.absolute()])
    chosen, broken = options.sound_packs(packs, ())
    cells = [one for pack in chosen for one in overview.of_pack(pack, found.get(pack.name, []))]
    if form == "json":
        click.echo(overview.as_json(cells), nl=False)
    elif form == "markdown":
        click.echo(overview.markdown(cells), nl=False)
    else:
        _text(cells)
    options.complain([*broken, *errors])
    return int(Exit.WRONG_CALL if broken or errors else Exit.AS_EXPECTED)
