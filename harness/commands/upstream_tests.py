"""``runner.py upstream-tests``: upstream's own tests, without and with a pack's patch."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from harness.commands import options, running
from harness.core.errors import HarnessError
from harness.core.progress import Progress
from harness.core.words import Exit, SuiteVerdict, Verdict
from harness.host import host
from harness.host.gpus import gpu_pool
from harness.pack.model import Pack
from harness.receipt import receipt as receipts
from harness.receipt.figures import WIDTH
from harness.receipt.writer import MadeBy
from harness.schedule.journal import LaneEnd
from harness.schedule.scheduler import Account
from harness.schedule.session import Session
from harness.schedule.task import tasks
from harness.suites import receipt
from harness.suites.comparison import Change, Comparison
from harness.suites.runner import SuiteRunner, cells_of, suite_of
from harness.upstream import dependencies
from harness.verdict.cell import Cell

#: Behind these, something was judged; their receipts may be recorded.
JUDGED = {SuiteVerdict.UNBROKEN, SuiteVerdict.BREAKS_TESTS, SuiteVerdict.NEW_TEST_WRONG}
#: What is said of each such test, above the table.
TOLD = (Change.BROKEN, Change.NEW_WRONG, Change.MENDED, Change.NEW, Change.RED, Change.SKIPPED)


@click.command("upstream-tests")
@options.packs_argument
@options.packs_option
@options.cache_option
@options.offline_option
@options.mirrors_option
@click.option("--gpu", is_flag=True, help="Show the tests this host's GPU, also where they do not need one.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds per lane.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Lanes at once (default: cores, as memory allows).")
@click.option("--record", is_flag=True, help="Put the receipt into the pack: receipts/upstream_tests.json.")
@click.option("--json", "as_json", is_flag=True, help="Print the receipts as JSON on standard output.")
def command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    wanted: tuple[str, ...],
    packs: Path,
    cache_root: Path | None,
    offline: bool,  # noqa: FBT001 - click passes options by name
    mirrors: Path | None,
    gpu: bool,  # noqa: FBT001 - likewise
    timeout: float | None,
    jobs: int | None,
    record: bool,  # noqa: FBT001 - likewise
    as_json: bool,  # noqa: FBT001 - likewise
) -> int:
    """Run upstream's own tests of the touched files, without and with the patch.

    pack.toml names the files in [upstream_tests]; with no PACK, every pack that names some. They run as lanes do, and
    are compared test by test. Where the pack has an upstream_test.patch, both trees have it: what it adds must be red
    before and green after.

    \b
    UNBROKEN        what was green is green with the patch; what is red in both is shown
    BREAKS_TESTS    a test that was green is not
    NEW_TEST_WRONG  a test of upstream_test.patch is green without the patch, or not green with it
    PATCH_STALE     a patch does not apply to the tree
    UNSUPPORTED     no GPU here for tests that need one, or every test is skipped
    ERROR           nothing collected, a file that cannot be, a crash, a time-out: never a pass

    Exit status 0: all UNBROKEN; 1: something is not; 2: a pack names no tests; 5: nothing was judged.
    """
    chosen, errors = options.sound_packs(packs, wanted)
    chosen = [pack for pack in chosen if wanted or pack.definition.upstream_tests]
    with Progress(sys.stderr) as progress, gpu_pool() as pool:
        cache = options.the_cache(cache_root, offline=offline, tell=progress.tell, mirrors=mirrors)
        with cache.guard():
            session = running.session(cache, host.detect(pool), pool, progress, jobs)
            over = replace(session.listener, ended=lambda task, _: progress.end(task.key, f"{task.cell.name}: over"))
            session = replace(session, listener=over, keep_raw=True, runner=SuiteRunner)
            suites = Suites(session, errors, record=record, gpu=gpu)
            interrupted = suites.every(chosen, timeout, progress)
    options.complain(suites.errors)
    if suites.rows or as_json:
        click.echo(f"logs: {session.folder}", err=True)
        documents = [row.document or row.bare for row in suites.rows]
        click.echo(receipts.to_json(documents) if as_json else as_text(suites.rows), nl=False)
    if interrupted:
        raise KeyboardInterrupt
    return int(suites.status)


@dataclass(frozen=True)
class Row:
    """What came of one pack's suite; `document` is None where no lane ran."""

    pack: Pack
    found: Comparison
    document: dict[str, object] | None = None

    @property
    def bare(self) -> dict[str, object]:
        """What there is to say where no lane ran."""
        return {"pack": self.pack.name, "verdict": self.found.verdict, "reason": self.found.reason}


@dataclass
class Suites:
    """One call: a row for each pack.

    Attributes:
        session: runs the lanes.
        errors: what is wrong with the call, or with a pack's definition.
        record: whether receipts go into the packs.
        gpu: whether tests see this host's GPU that do not need one.
        rows: in the order of the packs.

    """

    session: Session
    errors: list[HarnessError]
    record: bool = field(kw_only=True)
    gpu: bool = field(kw_only=True)
    rows: list[Row] = field(default_factory=list)

    def every(self, packs: list[Pack], timeout: float | None, progress: Progress) -> bool:
        """Run the suites of all packs; say whether the user interrupted."""
        session, suites = self.session, list[tuple[Pack, list[Cell]]]()
        for pack in packs:
            try:
                suites.append((pack, cells_of(pack, session.host, session.cache, timeout, gpu=self.gpu)))
            except HarnessError as error:
                self.errors.append(error)
        cells = [cell for _, some in suites for cell in some if cell.evidence is not None]
        progress.begin(len(cells), None)
        account = session.run(cells, receipts=False)
        for pack, some in suites:
            self._row(pack, some, account)
        return account.interrupted

    def _row(self, pack: Pack, cells: list[Cell], account: Account) -> None:
        failure = next((account.failed[cell.name] for cell in cells if cell.name in account.failed), None)
        if cells[0].evidence is None:
            self.rows.append(Row(pack, Comparison(SuiteVerdict.UNSUPPORTED, cells[0].reason, ())))
        elif failure is not None:
            refused = failure.verdict == Verdict.UNSUPPORTED
            word = SuiteVerdict.UNSUPPORTED if refused else SuiteVerdict.ERROR
            self.rows.append(Row(pack, Comparison(word, failure.reason, ())))
        else:
            self._compared(pack, cells)

    def _compared(self, pack: Pack, cells: list[Cell]) -> None:
        ends: dict[str, LaneEnd] = {}
        for cell in cells:
            (task,) = tasks(cell, self.session.host, 1)
            end = self.session.journal.read(task.key)
            if end is None:
                return  # it was interrupted
            ends[cell.column] = end
        found = receipt.compared(ends)
        members = dependencies.named(pack.definition, suite_of(pack).dependencies, self.session.host.python_tag)
        made = MadeBy(self.session.cache, self.session.host, running.command_line())
        document = None
        try:
            document = receipt.document_of(receipt.build(cells[-1], ends, found, members, made), pack, members, made)
            if self.record and found.verdict in JUDGED:
                receipt.write(document, pack.receipts)
        except (HarnessError, OSError) as error:
            self.errors.append(HarnessError(f"{pack.name}: no receipt written: {error}"))
        self.rows.append(Row(pack, found, document))

    @property
    def status(self) -> Exit:
        """The exit status of the call."""
        verdicts = {row.found.verdict for row in self.rows}
        if self.errors:
            return Exit.WRONG_CALL
        if verdicts <= {SuiteVerdict.UNSUPPORTED}:
            return Exit.NOTHING_JUDGED
        return Exit.AS_EXPECTED if verdicts <= {SuiteVerdict.UNBROKEN, SuiteVerdict.UNSUPPORTED} else Exit.DEVIATES


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {result}" for result, count in counts.items()) or "-"


def as_text(rows: list[Row]) -> str:
    """Write first what has to be said of single tests, then the table."""
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, highlight=False, markup=False)
    for row in rows:
        if row.found.reason:
            console.print(f"{row.pack.name}: {row.found.reason}", soft_wrap=True)
        for change in TOLD:
            for one in row.found.of(change):
                why = f": {one.reason}" if one.reason else ""
                said = f"{change}: {one.test} ({one.before} -> {one.after}){why}"
                console.print(f"{row.pack.name}: {said}", soft_wrap=True)
    table = Table("pack", "patch", "before", "after", "broken", "new", "red in both", "verdict", box=None)
    for row in rows:
        found = row.found
        numbers = [len(found.of(*kinds)) for kinds in ((Change.BROKEN,), (Change.NEW, Change.NEW_WRONG), (Change.RED,))]
        patch = row.pack.suite_patch(suite_of(row.pack)).name
        counts = (_counts(found.counts("before")), _counts(found.counts("after")))
        table.add_row(row.pack.name, patch, *counts, *map(str, numbers), found.verdict)
    console.print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
