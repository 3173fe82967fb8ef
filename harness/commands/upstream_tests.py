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

#: The verdicts of suites that were judged: only their receipts are recorded.
JUDGED = {SuiteVerdict.UNBROKEN, SuiteVerdict.BREAKS_TESTS, SuiteVerdict.NEW_TEST_WRONG}


@click.command("upstream-tests")
@options.packs_argument
@options.takes(*options.PLACES, "timeout")
@click.option("--gpu", is_flag=True, help="Show the tests this host's GPU, also where they do not need one.")
@click.option("--record", is_flag=True, help="Put the receipt into the pack: receipts/upstream_tests.json.")
def command(shared: Shared, names: tuple[str, ...], gpu: bool, record: bool) -> int:
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
    packs, errors = options.load_packs(shared.packs, names)
    for pack in packs if names else ():
        suite.suite_of(pack)
    packs = [pack for pack in packs if pack.definition.upstream_tests]
    supervisor.adopt_orphans()
    with running.session(shared) as session:
        rows = [_row(pack, session, shared.timeout, gpu=gpu) for pack in packs]
    for row in rows:
        if record and row.comparison.verdict in JUDGED:
            with room.guard(row.pack.receipts, "the pack", "--packs DIR"):
                files.write_atomic(row.pack.receipts / receipts.SUITE, receipts.to_json(row.document))
    options.print_errors(errors)
    if rows:
        terminal.echo(f"logs: {session.folder}", err=True)
        terminal.echo(as_text(rows), nl=False)
    verdicts = {row.comparison.verdict for row in rows}
    if errors:
        return Exit.WRONG_CALL
    if verdicts <= {SuiteVerdict.UNSUPPORTED}:
        return Exit.NOTHING_JUDGED
    return Exit.DEVIATES if verdicts - {SuiteVerdict.UNBROKEN, SuiteVerdict.UNSUPPORTED} else Exit.AS_EXPECTED


@dataclass(frozen=True)
class Row:
    """The result of one pack's suite, and its receipt. Without a tree there is only a verdict with its reason."""

    pack: Pack
    comparison: Comparison
    document: dict[str, object]


def _row(pack: Pack, session: Session, timeout: float | None, *, gpu: bool) -> Row:
    """Run the suite of one pack; an error becomes the verdict of its row."""
    started = dt.datetime.now(dt.UTC)
    try:
        laid_out = suite.lay_out(pack, session, timeout, gpu=gpu)
        comparison = laid_out.compared()
        return Row(pack, comparison, receipt.document(laid_out, comparison, started, running.command_line()))
    except UnsupportedHereError as error:
        comparison = Comparison(SuiteVerdict.UNSUPPORTED, str(error))
    except HarnessError as error:
        comparison = Comparison(SuiteVerdict.ERROR, str(error))
    return Row(pack, comparison, {"pack": pack.name, "verdict": comparison.verdict, "reason": comparison.reason})


def as_text(rows: list[Row]) -> str:
    """Write a line for each test that changed, then the table."""
    lines: list[Table | str] = []
    table = Table("pack", "patch", "before", "after", "verdict", box=None)
    for row in rows:
        if row.comparison.reason:
            lines.append(f"{row.pack.name}: {row.comparison.reason}")
        for test in (test for test in row.comparison.rows if test.change != Change.SAME):
            change = f"{test.change}: {test.test} ({test.before} -> {test.after}) {test.reason}"
            lines.append(f"{row.pack.name}: {change}")
        counts = [
            ", ".join(f"{count} {result}" for result, count in row.comparison.counts(lane).items()) or "-"
            for lane in ("before", "after")
        ]
        table.add_row(
            row.pack.name, row.pack.suite_patch(suite.suite_of(row.pack)).name, *counts, row.comparison.verdict
        )
    return terminal.render([*lines, table])
