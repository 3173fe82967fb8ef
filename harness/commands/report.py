"""``runner.py report``: the Markdown to paste into an upstream issue or pull request."""

from __future__ import annotations

from pathlib import Path

import click

from harness.commands import options
from harness.core.words import Exit
from harness.pack.model import Pack
from harness.report import links, parts, report


@click.command("report")
@click.argument("wanted", metavar="PACK")
@click.option("--whole", is_flag=True, help="Print how it was checked, too.")
@click.option("--write", is_flag=True, help="Write the whole text into README.md of the pack; print nothing of it.")
@options.from_option
@options.packs_option
@options.cache_option
def command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    wanted: str,
    whole: bool,  # noqa: FBT001 - click passes options by name
    write: bool,  # noqa: FBT001 - likewise
    run: str | None,
    packs: Path,
    cache_root: Path | None,
) -> int:
    """Print the Markdown to paste into an upstream issue, a pull request or a comment.

    It is report.in.md, filled from receipts: the claim, the script with its output, the cause, the diff, the threads.
    Nothing is typed by hand, and what looks private is refused. --from RUN takes the receipts of a run on this machine
    (`last`, or a run folder) in the place of the committed ones.
    """
    if write and (whole or run is not None):
        raise click.UsageError("--write renders the whole text from the committed receipts")
    subject = options.one_pack(packs, wanted, "report")
    if write:
        changed = report.write(subject)
        click.echo(f"{subject.name}/{subject.report.name}: {'written' if changed else 'as it was'}")
        _tell_of_missing(subject, subject.report.read_text(encoding="utf-8"))
        return int(Exit.AS_EXPECTED)
    judged = options.run_receipts(run, cache_root, subject.name) / subject.name if run is not None else None
    text = report.render(subject, report.receipts_of(subject, judged), is_draft=True)
    report.scrubber(subject).require_clean("report", text)
    click.echo(text if whole else report.for_upstream(text), nl=False)
    _tell_of_missing(subject, text)
    return int(Exit.AS_EXPECTED)


def _tell_of_missing(pack: Pack, text: str) -> None:
    """Say what a text lacks before it can be filed."""
    if parts.NOT_YET in text:
        click.echo(f"a draft: no receipt holds the script's output. Next: runner.py run {pack.name} --record", err=True)
    if not links.repository_url():
        click.echo("repository_url in pyproject.toml is empty. Next: set it before you file the text", err=True)
