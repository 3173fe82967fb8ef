"""The lanes of one command's cells: planned once, run, and each cell judged once and its receipt written once."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

from harness.core.errors import HarnessError
from harness.core.words import LaneName, LaneVerdict
from harness.lane import supervisor
from harness.lane.cell import Cell
from harness.lane.record import LaneEnd
from harness.receipt import writer
from harness.schedule.lane_runner import Runner
from harness.schedule.scheduler import Account, Scheduler
from harness.schedule.session import Session
from harness.schedule.task import Task, seconds_of, tasks, unique
from harness.upstream import dependencies
from harness.verdict import pack_verdict
from harness.verdict.outcome import Outcome, unjudged
from harness.verdict.pack_verdict import Judgement

#: The lanes of each cell by its name.
Plan = dict[str, list[Task]]


def planned(session: Session, cells: list[Cell]) -> Plan:
    """List the lanes of each cell, with what is known of their durations."""
    known = {pack.name: seconds_of(pack) for pack in {cell.pack.name: cell.pack for cell in cells}.values()}
    found: Plan = {}
    for cell in cells:
        urgent = cell.name in session.urgent
        found[cell.name] = tasks(cell, session.host, session.repeat, known[cell.pack.name], urgent=urgent)
    return found


def run(session: Session, cells: list[Cell], *, receipts: bool = True, plan: Plan | None = None) -> Account:
    """Run the lanes of cells that have not ended, and settle each cell; with `receipts`, write them.

    `plan` is given where somebody else has made it.
    """
    account = Account(faults=list(session.faults), planned=plan or planned(session, cells))
    settling = Settling(session, account, receipts)
    supervisor.adopt_orphans()
    with ExitStack() as stack:
        scratch = stack.enter_context(session.cache.scratch("run-"))
        cancel, cancel_end = os.pipe()  # lanes watch its first end, and are abandoned once the second is closed
        stack.callback(os.close, cancel)
        scheduler = Scheduler(session, Runner(session, scratch, cancel), settling.settle, account)
        scheduler.run(unique(chain.from_iterable(account.planned.values())), cancel_end)
    for cell in cells:  # whose lanes ended before, or are another cell's, or were interrupted
        settling.settle(cell, at_end=True)
    return account


@dataclass(frozen=True)
class Settling:
    """Settles cells: each is judged once, by the ends of its lanes, and its receipt written once."""

    session: Session
    account: Account  # knows what is planned, and takes what came of it
    receipts: bool = True  # whether they are written

    def settle(self, cell: Cell, *, at_end: bool = False) -> None:
        """Settle a cell whose lanes have all ended; `at_end` one whose lanes have not, by the runs that are whole."""
        results = self.account.results
        if cell.name in results or (not at_end and self.missing(cell)):
            return
        try:
            outcome = self._judged(cell)
            if outcome is not None:
                results[cell.name] = self._recorded(outcome) if self.receipts else outcome
        except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
            results[cell.name] = unjudged(error, cell)

    def missing(self, cell: Cell) -> bool:
        """Whether the verdict of every run would need the end of a lane that has not ended."""
        return any(None in run for run in self._runs(cell))

    def _runs(self, cell: Cell) -> list[list[LaneEnd | None]]:
        """List the ends that each run needs: of a pair that of the second lane only where the first shows the bug."""
        every, width, found = self.account.planned[cell.name], len(cell.lanes), []
        for start in range(0, len(every), width):
            first, *rest = (self.session.journal.read(task.key) for task in every[start : start + width])
            said = {first.lane, first.verdict} if first else set()
            found.append([first, *rest] if said & {LaneName.PATCHED, LaneVerdict.BUG_REPRODUCED} else [first])
        return found

    def _judged(self, cell: Cell) -> Outcome | None:
        """Judge a cell by its whole runs; None where there is not one."""
        if cell.evidence is None:
            return Outcome(cell, Judgement(cell.verdict, cell.reason))
        whole = tuple(tuple(end for end in run if end is not None) for run in self._runs(cell) if None not in run)
        if not whole:
            return None
        judgement, agreeing = pack_verdict.of_runs(whole, cell.about)
        cache, definition, tag = self.session.cache, cell.pack.definition, self.session.host.python_tag
        members = dependencies.chosen(cache, definition, cell.dependencies, cell.stated.dependencies, tag)
        return Outcome(cell, judgement, whole, agreeing, members)

    def _recorded(self, outcome: Outcome) -> Outcome:
        """Write the receipt of a cell into the run folder; say where, or why not."""
        if not outcome.lanes:
            return outcome
        cell, session = outcome.cell, self.session
        try:
            with writer.told():
                logs = {end.lane: (session.folder / end.log.file).read_text("utf-8") for end in outcome.last if end.log}
                folder = session.folder / (cell.column or "receipts") / cell.pack.name
                return replace(
                    outcome, receipt=writer.write(outcome, session.cache, session.command(cell), folder, logs)
                )
        except HarnessError as error:
            return replace(outcome, problem=str(error))
