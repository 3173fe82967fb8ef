"""``runner.py run``: judge packs on targets."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness import host, summary
from harness.batch import Batch, default_jobs
from harness.commands import options
from harness.errors import HarnessError
from harness.execute import Runner
from harness.outcome import Request
from harness.progress import Progress
from harness.words import Exit, LaneName, Verdict

LANES = {
    "both": (LaneName.PRISTINE, LaneName.PATCHED),
    "pristine": (LaneName.PRISTINE,),
    "patched": (LaneName.PATCHED,),
}


@click.command("run")
@options.packs_argument
@click.option("--target", default="all", show_default=True, help="cpu, sm_90a, ..., auto (this GPU, else cpu), all.")
@click.option("--upstream", metavar="SPEC", help="Another origin of the tree (see above).")
@click.option("--with", "companions", multiple=True, metavar="SET|PKG==VER", help="Another companion set, or wheel.")
@click.option("--lane", type=click.Choice([*LANES]), default="both", show_default=True, help="Which lanes to run.")
@options.packs_option
@options.cache_option
@options.offline_option
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds per lane.")
@click.option("--repeat", type=click.IntRange(1), default=1, metavar="N", help="Run the lanes N times; all must agree.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="CPU lanes at once (default: cores, at most 4).")
@click.option("--receipts", type=click.Path(path_type=Path), metavar="DIR", help="Write receipts below DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcomes as JSON on standard output.")
def command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    wanted: tuple[str, ...],
    target: str,
    upstream: str | None,
    companions: tuple[str, ...],
    lane: str,
    packs: Path,
    cache_root: Path | None,
    offline: bool,  # noqa: FBT001 - click passes options by name
    timeout: float | None,
    repeat: int,
    jobs: int | None,
    receipts: Path | None,
    as_json: bool,  # noqa: FBT001 - likewise
) -> int:
    """Judge packs: run the probe on the pristine tree and on the patched one.

    PACK is a number, a slug or a glob (9, liger_flce_none, '0*'); with none, every pack runs. Progress goes to
    standard error, the table to standard output.

    \b
    --upstream SPEC judges another tree with the same probe:
      PACKAGE==VERSION   a release on the package index
      latest             its newest release
      head               the commit of upstream's default branch that pack.toml names
      path:DIR           a checkout: its tracked files as they are now
      git+URL@COMMIT     a commit of a repository
      installed          what this Python has installed

    \b
    Receipts go to the pack's own receipts/ folder when the pinned release was judged with both lanes (and to
    receipts/head for `head`), else beside the logs.

    \b
    Examples:
      runner.py run 9
      runner.py run --target sm_90a --cache /data/packs --offline
      runner.py run 9 --lane pristine --upstream path:../Liger-Kernel
    """
    chosen, broken = options.sound_packs(packs, wanted)
    options.complain(broken)
    request = Request(upstream, companions, LANES[lane], timeout, repeat)
    with Progress(sys.stderr) as progress:
        cache = options.the_cache(cache_root, offline=offline)
        with cache.guard():
            logs = options.log_folder(cache)
        runner = Runner(cache, host.detect(), logs, progress.tell)
        run = Batch(runner, request, receipts, _command_line(), jobs or default_jobs())
        interrupted = run.every(chosen, target)
    if run.rows or as_json:
        click.echo(summary.as_json(run.rows) if as_json else summary.as_text(run.rows), nl=False)
    options.complain(run.errors)
    if interrupted:
        raise KeyboardInterrupt
    return int(_status(run, broken))


def _command_line() -> str:
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _status(run: Batch, broken: list[HarnessError]) -> Exit:
    if broken or run.errors:
        return Exit.WRONG_CALL
    judged = [row for row in run.rows if row.verdict != Verdict.UNSUPPORTED]
    if not judged:
        return Exit.NOTHING_JUDGED
    return Exit.DEVIATES if any(row.deviation for row in run.rows) else Exit.AS_EXPECTED
