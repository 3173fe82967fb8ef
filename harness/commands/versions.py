"""``runner.py versions``: which releases of a pack's upstream have the bug."""

from dataclasses import asdict, replace

import click
from rich.table import Table

from harness.commands import options, running
from harness.commands.options import Shared
from harness.core import Exit, LaneVerdict, files, terminal
from harness.host import eligibility
from harness.pack import judges
from harness.receipt import receipt, redaction
from harness.schedule.selection import copied_inputs
from harness.versions import judging, timeline
from harness.versions.judging import Judging
from harness.versions.timeline import Entry, History


@click.command("versions")
@click.argument("name", metavar="PACK")
@click.option("--range", "within", default="", metavar="SPEC", help="Releases such as '>=0.5,<0.9'.")
@click.option("--bisect", is_flag=True, help="Only what decides where the bug came and went, about log2(n) lanes.")
@click.option("--target", default="auto", show_default=True, help="cpu, sm_90a, ..., auto (the first judged here).")
@options.takes(*options.PLACES, "jobs", "timeout")
@click.option("--record", "save", is_flag=True, help="Put the result into the pack's data/, for reports.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(shared: Shared, name: str, within: str, bisect: bool, target: str, save: bool, as_json: bool) -> int:
    """Say which releases have the bug.

    The answer is a line such as `bug from A, fixed in B`. Every final release of the pack's upstream is judged, from
    an unpacked tree, several at once. What cannot be judged (an import error, another API) is UNSUPPORTED: neither
    right nor wrong. --bisect takes it that there is one change on each side of the pinned release.

    \b
    Examples:
      runner.py versions 9
      runner.py versions 9 --range '>=0.5' --bisect

    Exit status 1: a lane failed, or its controls are wrong; 5: nothing was judged; 0: all others.
    """
    pack = options.one_pack(shared.packs, name, "versions")
    with running.session(shared) as session:
        target, evidence = eligibility.first_target(pack, target, session.host)
        with copied_inputs(session.cache, [pack]) as (pack,):
            judge = Judging(session, pack, target, evidence, shared.timeout)
            releases = judging.releases(session.cache, pack, within)
            entries, interrupted = judging.bisect(judge, releases) if bisect else judge.every(releases)
            scrub = redaction.host_scrubber({**session.cache.places, files.REPOSITORY: "$REPOSITORY"})
            rows = tuple(replace(entry, reason=scrub.shown(entry.reason)) for entry in entries)
            history = _history(judge, rows, "interrupted" if interrupted else timeline.line(rows))
            file = f"history.{target}.json"
            if save and not interrupted:
                document = scrub.document(asdict(history), file)
                files.write_atomic(pack.folder / "data" / file, receipt.to_json(document))
    terminal.echo(receipt.to_json(asdict(history)) if as_json else _as_text(history), nl=False)
    if interrupted:
        raise KeyboardInterrupt
    if save:
        terminal.echo(f"kept in {pack.name}/data/{file}", err=True)
    if not any(row.is_judged for row in rows):
        return Exit.NOTHING_JUDGED
    failed = {LaneVerdict.ERROR, LaneVerdict.CONTROL_FAILED}
    return Exit.DEVIATES if any(row.verdict in failed for row in rows) else Exit.AS_EXPECTED


def _history(judge: Judging, rows: tuple[Entry, ...], line: str) -> History:
    host, pack = judge.session.host, judge.pack
    return History(
        schema=timeline.SCHEMA,
        pack=pack.name,
        target=judge.target,
        evidence=judge.evidence,
        over="release",
        line=line,
        probe=judges.sha256(pack),
        python=host.python,
        torch=host.torch,
        triton=host.triton,
        command=running.command_line(),
        rows=rows,
        checks=pack.definition.versions.checks,
        meaning=judges.meaning_of(pack),
    )


def _as_text(history: History) -> str:
    table = Table("release", "date", "verdict", "figure", "reason", box=None)
    for row in history.rows:
        table.add_row(row.label, row.date or "-", row.verdict, row.figure or "-", row.reason)
    return terminal.render([table, history.line])
