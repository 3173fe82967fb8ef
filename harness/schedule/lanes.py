"""The lanes of a command's cells, on this host."""

from __future__ import annotations

from harness.lane import supervisor
from harness.lane.cell import Cell
from harness.schedule.account import Account
from harness.schedule.lane_runner import Runner
from harness.schedule.scheduler import Scheduler
from harness.schedule.session import Session
from harness.schedule.task import Task


def run(
    session: Session, cells: list[Cell], *, receipts: bool = True, plan: dict[str, list[Task]] | None = None
) -> Account:
    """Run the lanes that have not ended, and judge each cell. Without `receipts` no receipt is written.

    `plan` replaces the plan of this host: a node of a cluster uses that of the login node.
    """
    account = Account(session, receipts, plan or {})
    if plan is None:
        account.plan(cells)
    supervisor.adopt_orphans()
    with session.cache.scratch("run-") as scratch:
        Scheduler(account, Runner(session, scratch)).run()
    for cell in cells:  # also those whose lanes ended before, belong to another cell too, or were interrupted
        account.settle(cell, at_end=True)
    return account
