"""``runner.py report``: the Markdown to attach upstream."""

from __future__ import annotations

from pathlib import Path

import click

from harness import report
from harness.commands import options
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
    subject = options.one_pack(packs, wanted, "report")
    text = report.build(subject, form)
    sets = subject.definition.companions.values()
    stated = [companion.version for members in sets for companion in members.values()]
    of_host({}, stated).require_clean("report", text)
    click.echo(text, nl=False)
    return int(Exit.AS_EXPECTED)
