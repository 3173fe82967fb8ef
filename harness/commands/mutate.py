"""``runner.py mutate``: how many wrong fixes a probe refuses."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import click

from harness.commands import options, running
from harness.commands.options import Shared
from harness.core import terminal
from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.host.host import Host
from harness.mutate import campaign, output, rebase, state
from harness.mutate.campaign import Campaign, Order, Result
from harness.pack.model import Pack
from harness.receipt import writer
from harness.receipt.strength import Fate
from harness.schedule.journal import Journal
from harness.schedule.selection import Request, cells_of, taken
from harness.upstream import tree
from harness.upstream.source import parse_source


@click.command("mutate")
@options.packs_argument
@options.takes(*options.PLACES, "jobs", "timeout")
@click.option("--target", default="auto", show_default=True, help="cpu, sm_90a, ..., all, or auto (GPU, else cpu).")
@click.option(
    "--generated", type=click.IntRange(0), metavar="N", help="Make N mutants of the patch (default: pack.toml's)."
)
@click.option("--unseen", is_flag=True, help="Those in mutants/unseen/ alone.")
@click.option("--matrix", is_flag=True, help="Say which check refuses which wrong fix.")
@click.option("--rebase", "is_rebase", is_flag=True, help="Put the packs' own on fix.patch as it is now.")
@click.option("--record", is_flag=True, help="Put the strength into the packs' receipts/.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    shared: Shared,
    wanted: tuple[str, ...],
    target: str,
    generated: int | None,
    unseen: bool,
    matrix: bool,
    is_rebase: bool,
    record: bool,
    as_json: bool,
) -> int:
    """Say which wrong fixes a pack refuses.

    Each stands in the place of fix.patch once. Those in mutants/ are the pack's own: a small diff on top of fix.patch,
    or in mutants/whole/ a whole patch. Others are made of fix.patch: a part of it left out, or one operator changed in
    what it adds or touches. The fix itself is judged first. What was interrupted goes on with the same command.

    \b
    KILLED        a check failed; the lane ends there
    SURVIVED      no check failed
    UNJUDGED      a crash, a time-out or no memory, also when run alone
    EQUIVALENT    listed in mutants/equivalent.toml, or the same code
    ELSEWHERE     listed there: only another target runs its code

    With --matrix each lane goes on to its end, and a table says which check refuses which wrong fix. After a change
    of fix.patch, --rebase merges the pack's own with it; git has to know the one before.

    \b
    Examples:
      runner.py mutate 9 --target cpu
      runner.py mutate 5 9 14 --generated 0    # the packs' own alone
      runner.py mutate 9 --unseen --record

    Exit status 1: one survived or is unjudged; 0: all others.
    """
    chosen, broken = options.sound_packs(shared.packs, wanted)
    if broken:
        raise broken[0]
    order = Order(generated, unseen, matrix)
    _refuse(order, is_rebase=is_rebase, is_recorded=record, is_json=as_json)
    if is_rebase:
        return _rebased(chosen, shared.cache(functools.partial(terminal.echo, err=True)))
    with running.session(shared, has_folder=False) as (usual, progress):
        cache, here = usual.cache, usual.host
        words = (shared.packs.resolve(), target, *(one.name for one in chosen), order)
        with (
            taken(cache, chosen) as packs,
            state.opened(cache, *words) as kept,
            Journal(kept.journal) as journal,
        ):
            cells = cells_of(packs, target, Request(timeout=shared.timeout), here, cache)
            if record and unseen:
                campaign.refuse_second_sight(cells)
            if len(journal):
                progress.tell(f"going on: {len(journal)} lanes ended before")
            session = replace(usual, folder=kept.path, journal=journal, keep_raw=True)
            results = Campaign(session, kept.patches, order).run(cells)
            if not _is_waiting(results):
                kept.settle()
    terminal.echo(output.as_json(results) if as_json else output.as_text(results), nl=False)
    if matrix and not as_json:
        terminal.echo(output.matrix(results), nl=False)
    if record:
        _record(results, cache, here)
    return _status(results)


def _record(results: list[Result], cache: Cache, host: Host) -> None:
    """Put the strengths into the packs' receipts."""
    for one in results:
        if one.strength is not None:
            scrub = writer.scrubber(one.cell.pack, cache, host, None, {})
            path = output.record(one.strength, one.cell.pack.folder / "receipts", scrub)
            terminal.echo(f"recorded {one.cell.pack.name}/receipts/{path.name}", err=True)


def _refuse(order: Order, *, is_rebase: bool, is_recorded: bool, is_json: bool) -> None:
    """Raise HarnessError where options contradict each other."""
    if order.unseen and order.generated is not None:
        raise HarnessError("--unseen takes no other wrong fixes. Next: leave out --generated")
    if is_recorded and order.generated is not None:
        raise HarnessError("--record: pack.toml states how many are generated. Next: leave out --generated")
    if is_rebase and (is_recorded or is_json or order != Order()):
        raise HarnessError("--rebase judges nothing. Next: leave out what chooses wrong fixes, --record and --json")


def _rebased(packs: list[Pack], cache: Cache) -> Exit:
    """Put the wrong fixes of packs on their fix.patch, and name what was moved and what was left."""
    left = 0
    for pack in packs:
        if not pack.patch.exists():
            terminal.echo(f"{pack.name}: no fix.patch")
            continue
        with cache.guard():
            pristine = tree.materialize(cache, pack.definition.upstream, parse_source(None, pack.definition))
        try:
            found = dict(rebase.rebase(pack, pristine))
        except ValueError as error:
            raise HarnessError(f"{pack.name}/fix.patch does not fit the pinned release: {error}") from None
        conflicts = {name: became for name, became in found.items() if became not in {rebase.KEPT, rebase.REBASED}}
        for name, why in conflicts.items():
            terminal.echo(f"{pack.name}/{name}: left: {why}")
        count = Counter(found.values())
        kept, rebased = count[rebase.KEPT], count[rebase.REBASED]
        terminal.echo(f"{pack.name}: {kept} kept, {rebased} rebased, {len(conflicts)} left")
        left += len(conflicts)
    return Exit.DEVIATES if left else Exit.AS_EXPECTED


def _is_waiting(results: list[Result]) -> bool:
    """Say whether all is judged and survivors wait for a check or a reason; what is unjudged has to be run again.

    Then the same command goes on from here: a survivor that is listed now, with a reason, costs no lane.
    """
    fates = {one.fate for result in results for one in result.open}
    return fates == {Fate.SURVIVED} and not any(result.problem for result in results)


def _status(results: list[Result]) -> Exit:
    if any(one.open for one in results) or any(one.problem and one.verdict not in campaign.NEUTRAL for one in results):
        return Exit.DEVIATES
    return Exit.AS_EXPECTED if any(one.strength for one in results) else Exit.NOTHING_JUDGED
