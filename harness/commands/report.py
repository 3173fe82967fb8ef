"""``runner.py report``: the Markdown to attach upstream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from harness.commands import options
from harness.core.words import Exit
from harness.pack.model import Pack
from harness.report import blocks, issue, links, of_run, reports, written


@click.command("report")
@click.argument("wanted", metavar="PACK")
@click.option("--to", "form", type=click.Choice(issue.FORMS), default="issue", show_default=True)
@click.option("--for", "name", metavar="UPSTREAM", help="Who reads it, where a pack reports to several.")
@click.option("--full", is_flag=True, help="Append all figures, checks, environments, the patch and the logs' ends.")
@click.option("--write", is_flag=True, help="Write REPORT.md of the pack from its committed receipts; print nothing.")
@options.from_option
@options.packs_option
@options.cache_option
def command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    wanted: str,
    form: str,
    name: str | None,
    full: bool,  # noqa: FBT001 - click passes options by name
    write: bool,  # noqa: FBT001 - likewise
    run: str | None,
    packs: Path,
    cache_root: Path | None,
) -> int:
    """Print the Markdown to attach to an upstream issue or pull request.

    It is report.in.md, filled from the committed receipts, and for an issue every field that the upstream's own
    template asks for: at most 6 KiB; with --full at most 60. Nothing is typed by hand, and what looks private is
    refused. What only a human can state or tick is left open, and listed on standard error.

    report.in.md is for the pack's own upstream, report.NAME.in.md for another: --for tilelang. docs/upstream-fields.md
    says where each field comes from. --from RUN fills it from what this machine judged (`last`, or a run folder): it
    speaks of the targets of that run, and says of the others that they were not judged.

    A report.in.md with {{script}} is in the form that upstream reads: what is printed stands above its line, and
    --write renders it into the pack's README.md. --write renders others into REPORT.md and REPORT.NAME.md beside them.
    """
    if write and (full or name is not None or run is not None):
        raise click.UsageError("--write renders every report of the pack from its committed receipts")
    subject = options.one_pack(packs, wanted, "report")
    if write:
        return _write(subject)
    if run is not None:
        subject = replace(
            subject, receipts_elsewhere=options.run_receipts(run, cache_root, subject.name) / subject.name
        )
    text = (issue.build_in_full if full else issue.build)(subject, form, name)
    issue.scrubber(subject).require_clean("report", text)
    click.echo(text, nl=False)
    complaint = "" if full or run is None else issue.too_long(subject, text, name)
    if complaint:
        click.echo(f"the report is {complaint}", err=True)
    report = issue.reader(subject, name)
    if report.in_form:
        if run is not None:
            template = report.template.read_text(encoding="utf-8")
            click.echo(of_run.scope(subject, of_run.receipts(subject), template), err=True)
        _tell_of_draft(text)
    for duty in () if report.in_form else issue.left_open(form, report.upstream):
        click.echo(f"left to you: {duty}", err=True)
    return int(Exit.AS_EXPECTED)


def _tell_of_draft(text: str) -> None:
    """Say what a report lacks before it can be filed."""
    if blocks.NOT_YET in text:
        click.echo("a draft: no receipt holds what the script printed. Next: runner.py run PACK --record", err=True)
    if not links.repository_url():
        click.echo("pyproject.toml has no repository_url: set it before you file a report", err=True)


def _write(pack: Pack) -> int:
    found = reports.of_pack(pack).values()
    for report in found:
        text = written.render(pack, report, is_draft=True)
        issue.scrubber(pack).require_clean(report.written.name, text)
        if report.in_form:
            _tell_of_draft(text)
    changed = written.write(pack)
    for report in found:
        said = "written" if report.written in changed else "as it was"
        click.echo(f"{pack.name}/{report.written.name}: {said}")
    return int(Exit.AS_EXPECTED)
