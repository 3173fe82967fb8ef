"""``runner.py bundle``: the one file to attach to an issue or a pull request."""

from __future__ import annotations

from pathlib import Path

import click

from harness import bundle, receipt, report, staleness
from harness.commands import options
from harness.words import Exit


@click.command("bundle")
@click.argument("wanted", metavar="PACK")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="The file (default: ./NN_slug.zip).")
@options.packs_option
def command(wanted: str, output: Path | None, packs: Path) -> int:
    """Write one zip to attach: probe, patch, pack.toml, receipts with logs, the filled report, and how to rerun it.

    The same pack gives the same bytes. Nothing is written where something in it looks private. Whoever gets it checks
    it with `runner.py verify FILE`, or with verify.py alone.
    """
    subject = options.one_pack(packs, wanted, "bundle")
    data = bundle.build(subject, report.scrubber(subject))
    path = output or Path(f"{subject.name}.zip")
    path.write_bytes(data)
    for one in receipt.load_all(subject.receipts):
        for reason in staleness.reasons(subject, one):
            click.echo(f"warning: {one.name} is STALE: {reason}", err=True)
    click.echo(f"{path} ({len(data)} bytes)")
    return int(Exit.AS_EXPECTED)
