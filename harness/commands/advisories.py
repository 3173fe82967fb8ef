"""``runner.py advisories``: the OSV records that `audit` reads, made from packs."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import click

from harness.audit import records
from harness.commands import options
from harness.core import room
from harness.core.words import Exit
from harness.report import advisories


@click.command("advisories")
@options.packs_option
@click.option("--advisories", "folder", type=click.Path(path_type=Path), default=records.FOLDER, help="Their folder.")
@click.option("--write", is_flag=True, help="Write them.")
def command(packs: Path, folder: Path, write: bool) -> int:  # noqa: FBT001 - click passes it by name
    """Say which records in advisories/ differ from their packs, or (--write) write them anew.

    One OSV file for each pack that proves a bug of a release. Affected are the versions that a committed receipt or
    `runner.py versions --save` judged wrong, and no others. Without --write nothing is changed.

    Exit status 0: all are as their packs say; 1: one is not; 2: a pack cannot be read.
    """
    chosen, broken = options.sound_packs(packs, ())
    if broken:
        options.complain(broken)
        return int(Exit.WRONG_CALL)
    found = advisories.plans(chosen, folder, dt.datetime.now(dt.UTC))
    if write:
        with room.guard(folder, "the folder of advisories", "--advisories DIR"):
            advisories.carry_out(found)
    for one in found:
        done = ("deleted" if one.text is None else "written") if write else "Next: runner.py advisories --write"
        click.echo(f"{one.path.name}: {one.why}; {done}" if write else f"{one.path.name}: {one.why}. {done}")
    if not found:
        click.echo("all records are as their packs say")
    return int(Exit.DEVIATES if found and not write else Exit.AS_EXPECTED)
