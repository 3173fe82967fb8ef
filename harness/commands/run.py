"""``runner.py run``: judge packs on targets."""

from dataclasses import replace
from pathlib import Path

import click

from harness.commands import options, running
from harness.commands.options import Shared
from harness.core import UNJUDGED, Exit, HarnessError, Verdict, terminal
from harness.lane.cell import BOTH_LANES, Cell, pack_lanes
from harness.receipt import writer
from harness.report import run_table
from harness.report.run_table import RunRow
from harness.schedule import lanes
from harness.schedule.lane_runner import raw_log
from harness.schedule.selection import ASK, Request, cells_of, copied_inputs
from harness.verdict.pack_verdict import Outcome

LANES = {"both": BOTH_LANES} | {lane.label: (lane,) for lane in BOTH_LANES}


@click.command("run")
@options.packs_argument
@click.option("--target", default="all", show_default=True, help="cpu, sm_90a, auto (GPU, else cpu).")
@click.option("--upstream", metavar="SPEC", help="Another tree (see above).")
@click.option("--with", "dependencies", multiple=True, metavar="SET|PKG==VER", help="Another dependency set, or wheel.")
@click.option("--lane", type=click.Choice([*LANES]), default="both", show_default=True, help="Lanes to run.")
@options.takes(*options.PLACES, "jobs", "timeout")
@click.option("--repeat", type=options.REPEATS, default=1, metavar="N", help="Run each lane N times; all must agree.")
@click.option("--record", is_flag=True, help="Put the receipts into the packs too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    shared: Shared,
    names: tuple[str, ...],
    target: str,
    upstream: str | None,
    dependencies: tuple[str, ...],
    lane: str,
    repeat: int,
    record: bool,
    as_json: bool,
) -> int:
    """Judge packs, without the patch and with it.

    Script and contract run on the unpatched tree, and on the same tree with fix.patch. PACK is a
    number, a slug or a glob (9, liger_flce_none, '0*'); with none, every pack runs.

    \b
    --upstream SPEC judges another tree with the same script and contract:
      PACKAGE==VERSION   a release on the package index; latest: the newest
      head               the commit of the default branch that pack.toml names
      ask                the tree that [ask] names, with ask.patch
      path:DIR           a checkout: its tracked files as they are now
      git+URL@COMMIT     a commit of a repository
      installed          what this Python has installed

    Logs and receipts go to a folder in the cache. `report` reads them with --from last.

    \b
    Examples:
      runner.py run 9
      runner.py run --target sm_90a --cache /data/packs --offline
      runner.py run 9 --lane unpatched --upstream path:../Liger-Kernel
    """
    packs, errors = options.load_packs(shared.packs, names)
    options.print_errors(errors)
    with running.session(shared) as base, copied_inputs(base.cache, packs) as copies:
        session = replace(base, repeat=repeat, keep_raw=True)
        request = Request(upstream, dependencies, LANES[lane], shared.timeout)
        cells: list[Cell] = []
        cell_errors: list[HarnessError] = []
        for pack in copies:
            if upstream == "head" and pack.definition.head is None and len(packs) > 1:
                base.progress.tell(f"{pack.name}: left out: pack.toml names no head commit")
                continue
            try:
                cells += cells_of([pack], target, request, session.host, session.cache)
            except HarnessError as error:
                cell_errors.append(HarnessError(f"{pack.name}: {error}"))
        account = lanes.run(session, cells)
        rows: list[RunRow] = []
        outcomes = [account.results[cell.name] for cell in cells if cell.name in account.results]
        for outcome in map(_publish, outcomes) if record else outcomes:
            cell, problem = outcome.cell, outcome.problem
            if outcome.runs or not problem:
                rows.append(run_table.row(outcome, _logs(outcome, session.folder)))
            cell_errors += [HarnessError(f"{cell.pack.name} {cell.target}: {problem}")] if problem else []
    options.print_errors(cell_errors)
    if rows or as_json:
        terminal.echo(f"logs and receipts: {session.folder}", err=True)
        terminal.echo(run_table.as_json(rows) if as_json else run_table.as_text(rows), nl=False)
    if account.interrupted:
        ended = f"{account.ran} of {account.total} lanes ended, and their logs are in {session.folder}"
        raise KeyboardInterrupt(f"{ended}. Next: the same command, from the beginning")
    return _status(rows, is_wrong=bool(errors or cell_errors))


def _publish(outcome: Outcome) -> Outcome:
    """Copy a receipt into its pack; return the outcome with the path there, or with the problem.

    An error, or a cell that was not judged, replaces no receipt.
    """
    is_judged = outcome.judgement.verdict not in UNJUDGED | {Verdict.ERROR}
    if outcome.receipt is None or not is_judged or not outcome.cell.is_listed:
        return outcome
    try:
        return replace(outcome, receipt=writer.publish(outcome.receipt, _home(outcome)))
    except HarnessError as error:
        return replace(outcome, problem=str(error))


def _logs(outcome: Outcome, folder: Path) -> tuple[Path, ...]:
    """List the logs of an outcome in the run folder, the raw ones where they were kept."""
    logs = [end.log.file for end in outcome.last if end.log]
    return tuple(raw if (raw := raw_log(folder, log)).exists() else folder / log for log in logs)


def _home(outcome: Outcome) -> Path:
    """Return the pack's folder for a receipt. HarnessError is raised if pack.toml does not state what was judged."""
    cell = outcome.cell
    if cell.about:
        if cell.lanes == BOTH_LANES and not cell.dependencies:
            return cell.pack.receipts / ASK
    elif outcome.belongs_to_pack:
        return cell.pack.receipts
    elif cell.pack.definition.is_head(cell.source.value) and not cell.dependencies:
        return cell.pack.receipts / "head"
    if cell.lanes != pack_lanes(cell.pack):
        raise HarnessError("--record: one lane of two is half of what pack.toml expects. Next: without --lane")
    raise HarnessError("--record: pack.toml states nothing of this tree or dependency set")


def _status(rows: list[RunRow], *, is_wrong: bool) -> Exit:
    if is_wrong:
        return Exit.WRONG_CALL
    if all(row.verdict in UNJUDGED for row in rows):
        return Exit.NOTHING_JUDGED
    return Exit.DEVIATES if any(row.deviation for row in rows) else Exit.AS_EXPECTED
