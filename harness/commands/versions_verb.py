"""``runner.py versions``: over the releases, commits or companion sets of a pack."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from harness import host, plan, privacy, receipt
from harness.commands import options
from harness.errors import HarnessError
from harness.execute import Runner
from harness.outcome import Request
from harness.pack import Pack
from harness.progress import Progress
from harness.versions import candidate, commits, history, showing
from harness.versions.candidate import Candidate
from harness.versions.history import Row
from harness.versions.lanes import Judging
from harness.versions.showing import Shown
from harness.words import Evidence, Exit, LaneVerdict

GIT = "git+"


@click.command("versions")
@click.argument("wanted", metavar="PACK")
@click.option("--range", "within", default="", metavar="SPEC", help="Releases such as '>=0.5,<0.9'; commits: OLD..NEW.")
@click.option("--bisect", is_flag=True, help="Only what decides where the bug came and went, about log2(n) lanes.")
@click.option("--vary", metavar="PACKAGE", help="Over the companion sets of pack.toml that hold this package.")
@click.option("--upstream", metavar="SPEC", help="git+URL: over its commits. With --vary: any origin, as in `run`.")
@click.option("--with", "companions", multiple=True, metavar="SET|PKG==VER", help="Another companion set, or wheel.")
@click.option("--target", default="auto", show_default=True, help="cpu, sm_90a, ..., auto (the first judged here).")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Lanes at once (default: cores; 1 on a GPU).")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds per lane.")
@options.packs_option
@options.cache_option
@options.offline_option
@click.option("--save", is_flag=True, help="Keep the result in the pack's data/, for reports.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    wanted: str,
    within: str,
    bisect: bool,  # noqa: FBT001 - click passes options by name
    vary: str | None,
    upstream: str | None,
    companions: tuple[str, ...],
    target: str,
    jobs: int | None,
    timeout: float | None,
    packs: Path,
    cache_root: Path | None,
    offline: bool,  # noqa: FBT001 - likewise
    save: bool,  # noqa: FBT001 - likewise
    as_json: bool,  # noqa: FBT001 - likewise
) -> int:
    """Say which releases have the bug: `bug from A, fixed in B`.

    Runs the probe over every final release of the pack's upstream, each from an unpacked tree, with no environment
    built, several at once. What cannot be judged (import error, another API) is UNSUPPORTED, with the reason: it is
    neither right nor wrong. --bisect takes it that there is one change on each side of the pinned release.

    \b
    Examples:
      runner.py versions 9
      runner.py versions 9 --range '>=0.5' --bisect
      runner.py versions 9 --upstream git+https://github.com/linkedin/Liger-Kernel --range v0.8.1..main
      runner.py versions 7 --vary tilelang

    Exit status 0: judged; 1: a lane failed or its controls are wrong; 2: the call is wrong; 5: nothing was judged.
    """
    subject = options.one_pack(packs, wanted, "versions")
    cache, here = options.the_cache(cache_root, offline=offline), host.detect()
    chosen, evidence = _target(subject, target, here)
    if upstream and not vary and not upstream.startswith(GIT):
        raise HarnessError(f"--upstream {upstream!r}: git+URL here. Next: runner.py run --upstream, for one release")
    with Progress(sys.stderr) as progress, cache.guard():
        logs = options.log_folder(cache)
        request = Request(upstream=upstream if vary else None, companions=companions, timeout=timeout)
        judging = Judging(Runner(cache, here, logs, progress.tell), subject, chosen, evidence, request)
        at_once = jobs or (1 if evidence == Evidence.EXECUTED else len(host.cores()))
        if upstream and not vary:
            found = commits.bisect(judging, upstream.removeprefix(GIT), within, progress.tell)
            shown = Shown("commit", found.rows, found.line)
        else:
            shown = _listed(judging, _candidates(judging, vary, within), vary, at_once, bisect=bisect)
    return _end(judging, shown, save=save, as_json=as_json)


def _target(subject: Pack, wanted: str, here: host.Host) -> tuple[str, Evidence]:
    """Return the target to judge and how; ``auto`` is this host's GPU, else cpu, else the first that it can show."""
    planned = [*plan.plan(subject, wanted, here), *(plan.plan(subject, "all", here) if wanted == "auto" else [])]
    for one in planned:
        if one.evidence is not None:
            return one.target, one.evidence
    raise HarnessError(f"{subject.name}: {planned[0].reason}", status=Exit.NOTHING_JUDGED)


def _candidates(judging: Judging, vary: str | None, within: str) -> list[Candidate]:
    subject = judging.pack
    if vary:
        usual = subject.definition.targets[judging.target].companions
        return candidate.companion_sets(subject, vary, within, usual, judging.request.upstream)
    return candidate.releases(judging.runner.cache, subject, within, judging.request.companions)


def _listed(judging: Judging, candidates: list[Candidate], vary: str | None, jobs: int, *, bisect: bool) -> Shown:
    """Judge what was listed; an interruption shows what was finished and ends the process, and with it its lanes."""
    rows: dict[int, Row] = {}
    what = "companion set" if vary else "release"

    def seen(index: int, row: Row) -> None:
        rows[index] = row
        judging.runner.tell(f"{row.label}: {row.verdict} after {row.seconds:.1f} s ({len(rows)} judged)")

    try:
        if bisect:
            judging.bisected(candidates, jobs, seen)
        else:
            judging.every(candidates, jobs, seen)
    except KeyboardInterrupt:
        if rows:
            click.echo(showing.as_text(Shown(what, [rows[index] for index in sorted(rows)], "interrupted")), nl=False)
        sys.stdout.flush()
        os._exit(Exit.INTERRUPTED)
    ordered = [rows[index] for index in sorted(rows)]
    return Shown(what, ordered, history.line(ordered))


def _end(judging: Judging, shown: Shown, *, save: bool, as_json: bool) -> int:
    scrub = privacy.of_host({judging.runner.cache.root: "$CACHE", options.REPOSITORY: "$REPOSITORY"})
    shown = Shown(shown.what, [showing.scrubbed(row, scrub) for row in shown.rows], shown.line)
    found = showing.document(shown, judging, " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    click.echo(receipt.to_json(found) if as_json else showing.as_text(shown), nl=False)
    if save:
        click.echo(f"kept in {showing.save(found, judging, scrub)}", err=True)
    if not any(row.is_judged for row in shown.rows):
        return int(Exit.NOTHING_JUDGED)
    failed = {LaneVerdict.ERROR, LaneVerdict.CONTROL_FAILED}
    return int(Exit.DEVIATES if any(row.verdict in failed for row in shown.rows) else Exit.AS_EXPECTED)
