"""``runner.py mutate``: how many wrong fixes a pack refuses."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import click

from harness.commands import options, running
from harness.commands.options import Shared
from harness.core import Exit, HarnessError, files, terminal
from harness.core.cache import Cache, mark_used
from harness.host.host import Host
from harness.mutate import campaign, handwritten, output
from harness.mutate.campaign import Campaign, Order, Result
from harness.mutate.handwritten import KEPT, REBASED
from harness.pack.model import Pack
from harness.receipt import receipt, writer
from harness.receipt.strength import Fate
from harness.schedule.selection import Request, cells_of, copied_inputs
from harness.schedule.session import Journal, Session
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
    names: tuple[str, ...],
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
    packs, errors = options.load_packs(shared.packs, names)
    if errors:
        raise errors[0]
    order = Order(generated, unseen, matrix)
    _refuse(order, is_rebase=is_rebase, is_recorded=record, is_json=as_json)
    if is_rebase:
        return _rebased(packs, shared.cache(functools.partial(terminal.echo, err=True)))
    results: list[Result] = []
    with running.session(shared, has_folder=False) as base, copied_inputs(base.cache, packs) as copies:
        cells = cells_of(copies, target, Request(timeout=shared.timeout), base.host, base.cache)
        campaign.refuse_unreadable(copies)
        if record and unseen:
            campaign.refuse_second_sight(cells)
        keys = {pack.name: files.key_of(shared.packs.resolve(), target, pack.name, order) for pack in copies}
        with _sessions(base, keys) as sessions:
            for name, session in sessions.items():  # in turn, so that each pack is recorded once it is judged
                own_cells = [cell for cell in cells if cell.pack.name == name]
                judged = Campaign(session, session.folder / "patches", order).run(own_cells)
                if record:
                    _record(judged, base.cache, base.host)
                results += judged
            _settle(sessions, results)
    text = output.as_text(results) + (output.matrix(results) if matrix else "")
    terminal.echo(output.as_json(results) if as_json else text, nl=False)
    return _status(results)


@contextmanager
def _sessions(base: Session, keys: dict[str, str]) -> Iterator[dict[str, Session]]:
    """Yield a session for each pack, with a folder and a journal of its own, all locked before a lane runs."""
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for name, key in keys.items():
            folder = stack.enter_context(_open_folder(base.cache, key))
            journal = stack.enter_context(Journal(folder / "journal.jsonl"))
            if journal.ends:
                base.progress.tell(f"{name}: going on: {len(journal.ends)} lanes ended before")
            sessions[name] = replace(base, folder=folder, journal=journal, keep_raw=True)
        yield sessions


def _settle(sessions: dict[str, Session], results: list[Result]) -> None:
    """Put the journals away once all packs are judged, so that the same command begins anew."""
    for name, session in sessions.items():
        if not _is_waiting([result for result in results if result.cell.pack.name == name]):
            (session.folder / "journal.jsonl").replace(session.folder / "settled.jsonl")


@contextmanager
def _open_folder(cache: Cache, key: str) -> Iterator[Path]:
    """Yield the folder of a pack's mutants in the cache, locked; journal, logs and patches outlast a killed command.

    Its journal may be old: lanes of other checks, patches or toolchains have other keys.
    """
    folder = cache.entry("mutate", key)
    folder.mkdir(parents=True, exist_ok=True)
    mark_used(folder)
    with ExitStack() as stack:
        try:
            stack.enter_context(cache.lock(f"judging-{key}", timeout=0))
        except TimeoutError:
            raise HarnessError("the same mutants are being judged by another runner. Next: wait for it") from None
        yield folder


def _record(results: list[Result], cache: Cache, host: Host) -> None:
    for result in results:
        if result.strength is not None:
            pack, name = result.cell.pack, result.strength.name
            document = writer.scrubber(pack, cache, host, None, {}).document(asdict(result.strength), "strength")
            files.write_atomic(pack.folder / "receipts" / name, receipt.to_json(document))
            terminal.echo(f"recorded {pack.name}/receipts/{name}", err=True)


def _refuse(order: Order, *, is_rebase: bool, is_recorded: bool, is_json: bool) -> None:
    if order.unseen and order.generated is not None:
        raise HarnessError("--unseen takes no other wrong fixes. Next: leave out --generated")
    if is_recorded and order.generated is not None:
        raise HarnessError("--record: pack.toml states how many are generated. Next: leave out --generated")
    if is_rebase and (is_recorded or is_json or order != Order()):
        raise HarnessError("--rebase judges nothing. Next: leave out what chooses wrong fixes, --record and --json")


def _rebased(packs: list[Pack], cache: Cache) -> Exit:
    """Merge the packs' own mutants with fix.patch, and print what became of them."""
    has_conflict = False
    for pack in packs:
        if not pack.patch.exists():
            terminal.echo(f"{pack.name}: no fix.patch")
            continue
        with cache.guard():
            pristine = tree.materialize(cache, pack.definition.upstream, parse_source(None, pack.definition))
        try:
            results = dict(handwritten.rebase(pack, pristine))
        except ValueError as error:
            raise HarnessError(f"{pack.name}/fix.patch does not fit the pinned release: {error}") from None
        conflicts = {name: result for name, result in results.items() if result not in {KEPT, REBASED}}
        for name, result in conflicts.items():
            terminal.echo(f"{pack.name}/{name}: left: {result}")
        counts = Counter(results.values())
        terminal.echo(f"{pack.name}: {counts[KEPT]} kept, {counts[REBASED]} rebased, {len(conflicts)} left")
        has_conflict |= bool(conflicts)
    return Exit.DEVIATES if has_conflict else Exit.AS_EXPECTED


def _is_waiting(results: list[Result]) -> bool:
    """Whether every mutant is judged, and survivors need a check or a reason in equivalent.toml.

    The same command then resumes: a survivor that has been listed since needs no lane. Unjudged mutants run again.
    """
    fates = {mutant.fate for result in results for mutant in result.open}
    return fates == {Fate.SURVIVED} and not any(result.problem for result in results)


def _status(results: list[Result]) -> Exit:
    problems = [result for result in results if result.problem and result.verdict not in campaign.NEUTRAL]
    if problems or any(result.open for result in results):
        return Exit.DEVIATES
    return Exit.AS_EXPECTED if any(result.strength for result in results) else Exit.NOTHING_JUDGED
