"""``runner.py report``: the Markdown to attach upstream."""

from __future__ import annotations

from pathlib import Path

import click

from harness import report
from harness.commands import options
from harness.words import Exit


@click.command("report")
@click.argument("wanted", metavar="PACK")
@click.option("--to", "form", type=click.Choice(["issue", "pr-comment"]), default="issue", show_default=True)
@click.option("--for", "name", metavar="UPSTREAM", help="Who reads it, where a pack reports to several.")
@options.packs_option
def command(wanted: str, form: str, name: str | None, packs: Path) -> int:
    """Print the Markdown to attach to an upstream issue or pull request.

    It holds the report filled from the committed receipts, every field that the upstream's own template asks for,
    verdicts, figures, checks, environment, patch and the tail of each log; at most 60 KiB. Nothing is typed by hand,
    and what looks private is refused. What only a human can state or tick is left open, and listed on standard error.

    REPORT.md is for the pack's own upstream, REPORT.NAME.md for another: --for tilelang. docs/upstream-fields.md says
    where each field comes from.
    """
    subject = options.one_pack(packs, wanted, "report")
    text = report.build(subject, form, name)
    report.scrubber(subject).require_clean("report", text)
    click.echo(text, nl=False)
    for duty in report.left_open(form, report.reader(subject, name)[0]):
        click.echo(f"left to you: {duty}", err=True)
    return int(Exit.AS_EXPECTED)
