"""``runner.py report``: the text to paste upstream, the zip to attach, the commit to push."""

from dataclasses import replace
from pathlib import Path

import click

from harness.commands import options
from harness.commands.options import Shared
from harness.core import Exit, HarnessError, terminal
from harness.core.files import NO_ROOM
from harness.pack.model import Pack
from harness.report import bundle, links, parts, pull_request, report


@click.command("report")
@click.argument("name", metavar="PACK")
@click.option("--write", is_flag=True, help="Write the whole text into README.md of the pack; print nothing of it.")
@click.option("--bundle", "zipped", type=click.Path(path_type=Path), metavar="FILE", help="Write one zip to attach.")
@click.option(
    "--pr", "checkout", type=options.EXISTING, metavar="DIR", help="Commit the patch in your clone of the upstream."
)
@click.option(
    "--from", "run", metavar="RUN", help="Read the receipts of a run: `last`, or its folder (default: the packs' own)."
)
@options.takes("packs", "cache_root")
def command(
    shared: Shared,
    name: str,
    write: bool,
    zipped: Path | None,
    checkout: Path | None,
    run: str | None,
) -> int:
    """Print, bundle or commit what goes upstream.

    Printed is the Markdown of the issue, the pull request or the comment.

    It is report.in.md, filled from receipts: the claim, the script with its output, the cause, the diff, the threads.
    Nothing is typed by hand, and what looks private is refused. --from RUN takes the receipts of a run on this machine
    (`last`, or a run folder) in the place of the committed ones.

    --bundle FILE writes script, contract, patch, pack.toml, receipts with logs, the text, and how to rerun it. The same
    pack gives the same bytes; a receipt that is STALE is refused.

    --pr DIR makes a branch with one commit: ask.patch or fix.patch, and upstream_test.patch. Author and hooks are your
    own; there is no sign-off, and nothing is pushed. A checkout with changes, or one that the patch does not fit
    exactly, is left as it was. A pack whose text to file has another patch, or none, is refused.
    """
    if sum([write, zipped is not None, checkout is not None]) > 1:
        raise click.UsageError("--write, --bundle and --pr each say what is wanted: give one of them")
    if run is not None and (write or checkout is not None):
        raise click.UsageError("--write and --pr take what is committed, not --from")
    pack = options.one_pack(shared.packs, name, "report")
    folder = options.run_receipts(run, shared, pack.name) / pack.name if run is not None else None
    if checkout is not None:
        terminal.echo("\n".join(pull_request.make(pack, checkout)))
    elif zipped is not None:
        pack = replace(pack, receipts_elsewhere=folder) if folder else pack
        data = bundle.build(pack, report.scrubber(pack))
        _write(zipped, data)
        terminal.echo(f"{zipped} ({len(data)} bytes)")
    elif write:
        changed = report.write(pack)
        terminal.echo(f"{pack.name}/{pack.report.name}: {'written' if changed else 'as it was'}")
        _tell_of_missing(pack, pack.report.read_text(encoding="utf-8"))
    else:
        receipts = report.receipts_of(pack, folder)
        text = report.render(pack, receipts, is_draft=True)
        report.scrubber(pack).require_clean("report", text)
        terminal.echo(report.for_upstream(text), nl=False)
        _tell_of_missing(pack, text)
    return Exit.AS_EXPECTED


def _tell_of_missing(pack: Pack, text: str) -> None:
    if parts.NOT_YET in text:
        terminal.echo(
            f"a draft: no receipt holds the script's output. Next: runner.py run {pack.name} --record", err=True
        )
    if not links.repository_url():
        terminal.echo("repository_url in pyproject.toml is empty. Next: set it before you file the text", err=True)


def _write(path: Path, data: bytes) -> None:
    if path.is_dir():
        raise HarnessError(f"--bundle {path} is a folder. Next: --bundle {path / 'NAME.zip'}")
    try:
        path.write_bytes(data)
    except OSError as error:
        if path.is_file():
            path.unlink()  # half a bundle is useless
        status = Exit.DEVIATES if error.errno in NO_ROOM else Exit.WRONG_CALL
        next_step = "free room" if status == Exit.DEVIATES else "--bundle FILE, in a folder that you can write"
        raise HarnessError(f"{path} cannot be written ({error.strerror}). Next: {next_step}", status=status) from None
