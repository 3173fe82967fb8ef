"""``runner.py run``: judge packs on targets."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from harness.commands import options, places, running
from harness.commands.options import Places
from harness.core import terminal
from harness.core.errors import HarnessError
from harness.core.progress import Progress
from harness.core.words import Exit, LaneName, Verdict
from harness.host import host
from harness.host.gpus import gpu_pool
from harness.pack.model import Pack
from harness.report import run_table
from harness.report.run_table import RunRow
from harness.schedule.lane_runner import RAW_LOGS
from harness.schedule.scheduler import Account
from harness.schedule.selection import ASK, Request, cells_of, taken
from harness.schedule.session import Session
from harness.schedule.workers import failure_of
from harness.verdict.cell import BOTH_LANES, Cell, lanes_of
from harness.verdict.outcome import Outcome
from harness.verdict.pack_verdict import Judgement

LANES = {
    "both": (LaneName.PRISTINE, LaneName.PATCHED),
    "pristine": (LaneName.PRISTINE,),
    "patched": (LaneName.PATCHED,),
}
#: These verdicts say nothing of the bug: such a receipt never replaces one that does.
UNJUDGED = {Verdict.ERROR, Verdict.UNSUPPORTED, Verdict.UNAVAILABLE}


@click.command("run")
@options.packs_argument
@click.option("--target", default="all", show_default=True, help="cpu, sm_90a, auto (GPU, else cpu).")
@click.option("--upstream", metavar="SPEC", help="Another tree (see above).")
@click.option("--with", "dependencies", multiple=True, metavar="SET|PKG==VER", help="Another dependency set, or wheel.")
@click.option("--lane", type=click.Choice([*LANES]), default="both", show_default=True, help="Lanes to run.")
@options.with_places
@options.timeout_option
@click.option(
    "--repeat",
    type=places.REPEATS,
    default=1,
    metavar="N",
    help="Run each lane N times; all must agree.",
)
@options.jobs_option
@click.option("--record", is_flag=True, help="Put the receipts into the packs too.")
@click.option("--receipts", type=click.Path(path_type=Path), metavar="DIR", help="Write the receipts below DIR too.")
@click.option("--verbose", "-v", is_flag=True, help="Name claims, log and receipt of every row.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    where: Places,
    wanted: tuple[str, ...],
    target: str,
    upstream: str | None,
    dependencies: tuple[str, ...],
    lane: str,
    timeout: float | None,
    repeat: int,
    jobs: int | None,
    record: bool,  # noqa: FBT001 - click passes options by name
    receipts: Path | None,
    verbose: bool,  # noqa: FBT001 - likewise
    as_json: bool,  # noqa: FBT001 - likewise
) -> int:
    """Judge packs, without the patch and with it.

    Script and contract run on the unpatched tree (the lane `pristine`), and on the same tree with fix.patch. PACK is a
    number, a slug or a glob (9, liger_flce_none, '0*'); with none, every pack runs.

    \b
    --upstream SPEC judges another tree with the same script and contract:
      PACKAGE==VERSION   a release on the package index; latest: the newest
      head               the commit of the default branch that pack.toml names
      ask                the tree that [ask] names, with ask.patch
      path:DIR           a checkout: its tracked files as they are now
      git+URL@COMMIT     a commit of a repository
      installed          what this Python has installed

    Logs and receipts go to a folder in the cache. `list` and `report` read them with --from last.

    \b
    Examples:
      runner.py run 9
      runner.py run --target sm_90a --cache /data/packs --offline
      runner.py run 9 --lane pristine --upstream path:../Liger-Kernel
    """
    ask = upstream == ASK
    chosen, broken = options.sound_packs(where.packs, wanted)
    options.complain(broken)
    with Progress(sys.stderr) as progress, gpu_pool() as pool:
        if upstream == "head" and len(chosen) > 1:
            for pack in (one for one in chosen if one.definition.head is None):
                progress.tell(f"{pack.name}: left out: pack.toml names no head commit")
            chosen = [one for one in chosen if one.definition.head is not None]
        cache = where.cache(progress.tell)
        with cache.guard(), taken(cache, chosen) as copies:
            session = running.session(cache, host.detect(pool), pool, progress, jobs)
            session = replace(session, repeat=repeat, keep_raw=True)
            run = Run(
                session,
                Request(None if ask else upstream, dependencies, LANES[lane], timeout, ask),
                receipts,
                record=record,
            )
            account = run.every(copies, target, progress)
    options.complain(run.errors)
    if run.rows or as_json:
        terminal.echo(f"logs and receipts: {session.folder}", err=True)
        terminal.echo(
            run_table.as_json(run.rows) if as_json else run_table.as_text(run.rows, verbose=verbose), nl=False
        )
    if account.interrupted:
        raise KeyboardInterrupt
    return int(_status(run, broken))


@dataclass
class Run:
    """One call: collects a row for each pack and target."""

    session: Session  # runs the lanes
    request: Request  # what was requested of each pack
    receipts: Path | None  # where receipts go besides; None: nowhere
    record: bool = field(kw_only=True)  # whether those that pack.toml speaks of go into the packs
    rows: list[RunRow] = field(default_factory=list)  # in the order of packs and targets
    errors: list[HarnessError] = field(default_factory=list)  # what went wrong beside a verdict

    def every(self, packs: list[Pack], target: str, progress: Progress) -> Account:
        """Judge all packs."""
        session = self.session
        cells: list[Cell] = []
        for pack in packs:
            try:
                cells += cells_of([pack], target, self.request, session.host, session.cache)
            except HarnessError as error:
                if len(packs) == 1:
                    raise
                self.errors.append(HarnessError(f"{pack.name}: {error}"))
        account = replace(session, listener=replace(session.listener, planned=progress.begin)).run(cells)
        for cell in cells:
            self._row(cell, account)
        return account

    def _row(self, cell: Cell, account: Account) -> None:
        """Add the row of a cell; what goes wrong with one never takes the others' rows along."""
        try:
            self._row_of(cell, account)
        except Exception as error:  # noqa: BLE001 - likewise
            failure = failure_of(error, cell)
            self.rows.append(run_table.row(Outcome(cell, Judgement(failure.verdict, failure.reason)), None))

    def _row_of(self, cell: Cell, account: Account) -> None:
        failure = account.failed.get(cell.name)
        if cell.evidence is None:
            self.rows.append(run_table.row(Outcome(cell, Judgement(cell.verdict, cell.reason)), None))
        elif failure is not None and failure.wrong_call:
            self.errors.append(HarnessError(f"{cell.pack.name} {cell.target}: {failure.reason}"))
        elif failure is not None:
            self.rows.append(run_table.row(Outcome(cell, Judgement(failure.verdict, failure.reason)), None))
        elif cell.name in account.results:  # else it was interrupted
            self._judged(account.results[cell.name])

    def _judged(self, outcome: Outcome) -> None:
        judge, cell, receipt = self.session.judge, outcome.cell, outcome.receipt
        try:
            if outcome.problem is not None:
                raise outcome.problem
            if outcome.lanes:
                for folder in self._folders(outcome):
                    receipt = judge.write(outcome, folder)
        except HarnessError as error:
            self.errors.append(HarnessError(f"{cell.pack.name} {cell.target}: {error}"))
        logs = tuple(self._raw(path) for path in judge.logs(outcome).values())
        self.rows.append(run_table.row(outcome, receipt, logs))

    def _raw(self, log: Path) -> Path:
        """Return the raw log where it was kept, else the scrubbed one."""
        folder = self.session.folder
        raw = folder / RAW_LOGS / log.relative_to(folder / "logs")
        return raw if raw.exists() else log

    def _folders(self, outcome: Outcome) -> list[Path]:
        """List where a receipt goes besides the run folder."""
        cell, found = outcome.cell, []
        if self.receipts is not None:
            found.append(self.receipts / cell.pack.name)
        if self.record and cell.is_listed and outcome.judgement.verdict not in UNJUDGED:
            home = self._home(outcome)
            if home is None:
                raise HarnessError(_why_not_recorded(cell))
            found.append(home)
        return found

    @staticmethod
    def _home(outcome: Outcome) -> Path | None:
        """Return the folder of a pack's own receipts; None where pack.toml does not speak of what was judged."""
        cell = outcome.cell
        if cell.about:
            whole = cell.lanes == BOTH_LANES and not cell.dependencies
            return cell.pack.receipts / ASK if whole else None
        if outcome.belongs_to_pack:
            return cell.pack.receipts
        at_head = cell.pack.definition.is_head(cell.source.value) and not cell.dependencies
        return cell.pack.receipts / "head" if at_head else None


def _why_not_recorded(cell: Cell) -> str:
    """Say why no receipt of the pack's own can hold what was judged."""
    if cell.lanes != lanes_of(cell.pack):
        return "--record: one lane of two is half of what pack.toml expects. Next: without --lane"
    return "--record: pack.toml states nothing of this tree or dependency set"


def _status(run: Run, broken: list[HarnessError]) -> Exit:
    if broken or run.errors:
        return Exit.WRONG_CALL
    if all(row.verdict in (Verdict.UNSUPPORTED, Verdict.UNAVAILABLE) for row in run.rows):
        return Exit.NOTHING_JUDGED
    return Exit.DEVIATES if any(row.deviation for row in run.rows) else Exit.AS_EXPECTED
