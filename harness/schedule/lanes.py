"""The lanes of a command's cells: plan and run them, judge each cell once, and write its receipt once."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

from harness.core.errors import HarnessError
from harness.core.words import LaneVerdict
from harness.lane import supervisor
from harness.lane.cell import Cell
from harness.lane.record import LaneEnd
from harness.receipt import writer
from harness.schedule.lane_runner import Runner
from harness.schedule.scheduler import Account, Scheduler
from harness.schedule.session import Session
from harness.schedule.task import Task, tasks
from harness.upstream import dependencies
from harness.verdict import pack_verdict
from harness.verdict.outcome import Outcome, outcome_of_error
from harness.verdict.pack_verdict import Judgement

#: The lanes of each cell by its name.
Plan = dict[str, list[Task]]


def make_plan(session: Session, cells: list[Cell]) -> Plan:
    """List the lanes of each cell."""
    host, urgent = session.host, session.urgent
    return {cell.name: tasks(cell, host, session.repeat, urgent=cell.name in urgent) for cell in cells}


def run(session: Session, cells: list[Cell], *, receipts: bool = True, plan: Plan | None = None) -> Account:
    """Run the lanes that have not ended, and settle each cell. Without `receipts` no receipt is written.

    `plan` replaces the plan of this host: a node of a cluster uses that of the login node.
    """
    account = Account(planned=plan or make_plan(session, cells))
    settling = Settling(session, account, receipts)
    supervisor.adopt_orphans()
    with ExitStack() as stack:
        scratch = stack.enter_context(session.cache.scratch("run-"))
        cancel, cancel_end = os.pipe()  # lanes watch its first end, and are abandoned once the second is closed
        stack.callback(os.close, cancel)
        scheduler = Scheduler(session, Runner(session, scratch, cancel), settling.settle, account)
        scheduler.run(chain.from_iterable(account.planned.values()), cancel_end)
    for cell in cells:  # also those whose lanes ended before, belong to another cell too, or were interrupted
        settling.settle(cell, at_end=True)
    return account


@dataclass(frozen=True)
class Settling:
    """Judges each cell once, by the ends of its lanes, and writes its receipt once."""

    session: Session
    account: Account  # has the plan, and takes the outcomes
    receipts: bool = True  # whether receipts are written

    def settle(self, cell: Cell, *, at_end: bool = False) -> None:
        """Settle a cell if all its lanes have ended; with `at_end` settle any cell, by its complete runs."""
        results = self.account.results
        if cell.name in results or not (at_end or self.is_complete(cell)):
            return
        try:
            outcome = self._judge(cell)
            if outcome is not None:
                results[cell.name] = self._write_receipt(outcome) if self.receipts else outcome
        except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
            results[cell.name] = outcome_of_error(error, cell)

    def is_complete(self, cell: Cell) -> bool:
        """Whether all lanes that a cell needs have ended."""
        return len(self._runs(cell)) * len(cell.lanes) == len(self.account.planned[cell.name])

    def _runs(self, cell: Cell) -> list[tuple[LaneEnd, ...]]:
        """List the complete runs. The second lane of a pair is needed only if the first shows the bug."""
        tasks, width, runs = self.account.planned[cell.name], len(cell.lanes), []
        for start in range(0, len(tasks), width):
            ends = [self.session.journal.ends.get(task.key) for task in tasks[start : start + width]]
            is_reproduced = ends[0] is not None and ends[0].verdict == LaneVerdict.BUG_REPRODUCED
            needed = ends if is_reproduced else ends[:1]
            run = tuple(end for end in needed if end is not None)
            runs += [run] if len(run) == len(needed) else []
        return runs

    def _judge(self, cell: Cell) -> Outcome | None:
        """Judge a cell by its complete runs; None if it has none."""
        if cell.evidence is None:
            return Outcome(cell, Judgement(cell.verdict, cell.reason))
        runs = tuple(self._runs(cell))
        if not runs:
            return None
        judgement, agreeing = pack_verdict.judge_runs(runs, cell.about)
        cache, definition, tag = self.session.cache, cell.pack.definition, self.session.host.python_tag
        members = dependencies.requested_set(cache, definition, cell.dependencies, cell.stated.dependencies, tag)
        return Outcome(cell, judgement, runs, agreeing, members)

    def _write_receipt(self, outcome: Outcome) -> Outcome:
        """Write the receipt of a cell into the run folder; return the outcome with its path, or with the problem."""
        if not outcome.lanes:
            return outcome
        cell, session = outcome.cell, self.session
        try:
            with writer.translate_disk_errors():
                logs = {end.lane: (session.folder / end.log.file).read_text("utf-8") for end in outcome.last if end.log}
                folder = session.folder / (cell.column or "receipts") / cell.pack.name
                return replace(
                    outcome, receipt=writer.write(outcome, session.cache, session.command(cell), folder, logs)
                )
        except HarnessError as error:
            return replace(outcome, problem=str(error))
