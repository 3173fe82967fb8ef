"""``runner.py bundle``: the one file to attach to an issue or a pull request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from harness.commands import options
from harness.core.errors import HarnessError
from harness.core.room import NO_ROOM
from harness.core.words import Exit
from harness.report import bundle, report


def _write(path: Path, data: bytes) -> None:
    if path.is_dir():
        raise HarnessError(f"-o {path} is a folder. Next: -o {path / 'NAME.zip'}")
    try:
        path.write_bytes(data)
    except OSError as error:
        if path.is_file():
            path.unlink()  # half of a bundle is none
        status = Exit.DEVIATES if error.errno in NO_ROOM else Exit.WRONG_CALL
        raise HarnessError(f"{path} cannot be written ({error.strerror}). Next: -o FILE", status=status) from None


@click.command("bundle")
@click.argument("wanted", metavar="PACK")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="The file (default: ./NN_slug.zip).")
@options.from_option
@options.packs_option
@options.cache_option
def command(wanted: str, output: Path | None, run: str | None, packs: Path, cache_root: Path | None) -> int:
    """Write one zip to attach: probe, patch, pack.toml, receipts with logs, the filled report, and how to rerun it.

    The same pack gives the same bytes. Nothing is written where something in it looks private, or a receipt is STALE.
    Whoever gets it checks it with `runner.py check --bundle FILE`.
    """
    subject = options.one_pack(packs, wanted, "bundle")
    if run is not None:
        subject = replace(
            subject, receipts_elsewhere=options.run_receipts(run, cache_root, subject.name) / subject.name
        )
    data = bundle.build(subject, report.scrubber(subject))
    path = output or Path(f"{subject.name}.zip")
    _write(path, data)
    click.echo(f"{path} ({len(data)} bytes)")
    return int(Exit.AS_EXPECTED)
