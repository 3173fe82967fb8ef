"""``runner.py upstream-tests``: upstream's own tests, without and with a pack's patch."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

import click
from rich.table import Table

from harness.commands import options, running
from harness.commands.options import Shared
from harness.core import files, room, terminal
from harness.core.errors import HarnessError, UnsupportedHereError
from harness.core.words import Exit, SuiteVerdict
from harness.lane import supervisor
from harness.pack.model import Pack
from harness.receipt import receipt as receipts
from harness.schedule.session import Session
from harness.suites import receipt, suite
from harness.suites.comparison import Change, Comparison

#: After these, something was judged; their receipts may be recorded.
JUDGED = {SuiteVerdict.UNBROKEN, SuiteVerdict.BREAKS_TESTS, SuiteVerdict.NEW_TEST_WRONG}


@click.command("upstream-tests")
@options.packs_argument
@options.takes(*options.PLACES, "timeout")
@click.option("--gpu", is_flag=True, help="Show the tests this host's GPU, also where they do not need one.")
@click.option("--record", is_flag=True, help="Put the receipt into the pack: receipts/upstream_tests.json.")
def command(shared: Shared, wanted: tuple[str, ...], gpu: bool, record: bool) -> int:
    """Run upstream's own tests, with and without the patch.

    pack.toml names the files in [upstream_tests]; with no PACK, every pack that names some. They run as lanes do, and
    are compared test by test. Where the pack has an upstream_test.patch, both trees have it: what it adds must be red
    before and green after.

    \b
    UNBROKEN        what was green is green with the patch
    BREAKS_TESTS    a test that was green is not
    NEW_TEST_WRONG  what upstream_test.patch adds is not red, then green
    PATCH_STALE     a patch does not apply to the tree
    UNSUPPORTED     tests need a GPU and none is here, or all are skipped
    ERROR           nothing collected, a crash, a time-out: never a pass

    Exit status 0: all UNBROKEN; 1: something is not; 2: a pack names no tests; 5: nothing was judged.
    """
    chosen, errors = options.sound_packs(shared.packs, wanted)
    for pack in chosen if wanted else ():
        suite.suite_of(pack)
    chosen = [pack for pack in chosen if pack.definition.upstream_tests]
    supervisor.adopt_orphans()
    with running.session(shared) as (session, _):
        rows = [_row(pack, session, shared.timeout, gpu=gpu) for pack in chosen]
    for row in rows:
        if record and row.found.verdict in JUDGED:
            with room.guard(row.pack.receipts, "the pack", "--packs DIR"):
                files.write_atomic(row.pack.receipts / receipts.SUITE, receipts.to_json(row.document))
    options.complain(errors)
    if rows:
        terminal.echo(f"logs: {session.folder}", err=True)
        terminal.echo(as_text(rows), nl=False)
    verdicts = {row.found.verdict for row in rows}
    if errors:
        return Exit.WRONG_CALL
    if verdicts <= {SuiteVerdict.UNSUPPORTED}:
        return Exit.NOTHING_JUDGED
    return Exit.DEVIATES if verdicts - {SuiteVerdict.UNBROKEN, SuiteVerdict.UNSUPPORTED} else Exit.AS_EXPECTED


@dataclass(frozen=True)
class Row:
    """What came of one pack's suite, and its receipt; where no tree could be laid out, the verdict alone."""

    pack: Pack
    found: Comparison
    document: dict[str, object]


def _row(pack: Pack, session: Session, timeout: float | None, *, gpu: bool) -> Row:
    """Run the suite of one pack; whatever goes wrong with it is said in its own row."""
    started = dt.datetime.now(dt.UTC)
    try:
        laid_out = suite.laid_out(pack, session, timeout, gpu=gpu)
        found = laid_out.compared()
        return Row(pack, found, receipt.document(laid_out, found, started, running.command_line()))
    except UnsupportedHereError as error:
        found = Comparison(SuiteVerdict.UNSUPPORTED, str(error))
    except HarnessError as error:
        found = Comparison(SuiteVerdict.ERROR, str(error))
    return Row(pack, found, {"pack": pack.name, "verdict": found.verdict, "reason": found.reason})


def as_text(rows: list[Row]) -> str:
    """Write first what has to be said of single tests, then the table."""
    lines: list[Table | str] = []
    table = Table("pack", "patch", "before", "after", "verdict", box=None)
    for row in rows:
        if row.found.reason:
            lines.append(f"{row.pack.name}: {row.found.reason}")
        for test in (test for test in row.found.rows if test.change != Change.SAME):
            said = f"{test.change}: {test.test} ({test.before} -> {test.after}) {test.reason}"
            lines.append(f"{row.pack.name}: {said}")
        counts = [
            ", ".join(f"{count} {result}" for result, count in row.found.counts(lane).items()) or "-"
            for lane in ("before", "after")
        ]
        table.add_row(row.pack.name, row.pack.suite_patch(suite.suite_of(row.pack)).name, *counts, row.found.verdict)
    return terminal.rendered([*lines, table])
