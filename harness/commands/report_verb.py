"""``runner.py report``: the Markdown to attach upstream."""

from __future__ import annotations

from pathlib import Path

import click

from harness import report
from harness.commands import options
from harness.errors import HarnessError
from harness.privacy import of_host
from harness.words import Exit


@click.command("report")
@click.argument("wanted", metavar="PACK")
@click.option("--to", "form", type=click.Choice(["issue", "pr-comment"]), default="issue", show_default=True)
@options.packs_option
def command(wanted: str, form: str, packs: Path) -> int:
    """Print the Markdown to attach to an upstream issue or pull request.

    It holds the report filled from the committed receipts, verdicts, figures, checks, environment, patch and the tail
    of each log; at most 60 KiB. Nothing is typed by hand, and what looks private is refused.
    """
    chosen, broken = options.sound_packs(packs, (wanted,))
    if broken:
        raise broken[0]
    if len(chosen) != 1:
        names = ", ".join(pack.name for pack in chosen)
        raise HarnessError(f"{wanted!r} names {len(chosen)} packs ({names}). Next: runner.py report {chosen[0].name}")
    text = report.build(chosen[0], form)
    sets = chosen[0].definition.companions.values()
    stated = [companion.version for members in sets for companion in members.values()]
    of_host({}, stated).require_clean("report", text)
    click.echo(text, nl=False)
    return int(Exit.AS_EXPECTED)
