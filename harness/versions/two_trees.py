"""Judging the base and the head of a change: one probe, two trees, no patch of ours."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.core.errors import HarnessError
from harness.core.words import Evidence, LaneName, LaneVerdict, Verdict
from harness.host.eligibility import Planned
from harness.pack.model import Pack
from harness.schedule.scheduler import Account
from harness.schedule.selection import Request, cell_of
from harness.schedule.session import Session
from harness.verdict.cell import Cell
from harness.verdict.change import Change, Side, between
from harness.versions import judging

BASE, HEAD = "base", "head"


@dataclass(frozen=True)
class Compared:
    """What one pack on one target says of a change.

    Attributes:
        pack: whose probe it is.
        target: what the verdicts are about.
        evidence: how they were seen.
        base: the tree before the change.
        head: the tree with it.

    """

    pack: Pack
    target: str
    evidence: Evidence
    base: Side
    head: Side

    @property
    def change(self) -> Change:
        """What the change does."""
        return between(self.base, self.head)


@dataclass(frozen=True)
class Trees:
    """The two trees: each as ``--upstream`` names one, with the dependency set and the seconds of a lane."""

    base: str
    head: str
    dependencies: tuple[str, ...] = ()
    timeout: float | None = None

    def request(self, name: str) -> Request:
        """Return what is requested of one of them."""
        upstream = self.base if name == BASE else self.head
        return Request(upstream, self.dependencies, (LaneName.PRISTINE,), self.timeout)


@dataclass(frozen=True)
class Pair:
    """The cells of both trees, of one pack on one target."""

    evidence: Evidence
    base: Cell
    head: Cell


def pair(session: Session, pack: Pack, target: str, evidence: Evidence, trees: Trees) -> Pair:
    """Build the cells of both trees.

    Raises:
        HarnessError: one of them names nothing of this pack.

    """
    planned = Planned(target, evidence)
    base, head = (
        replace(cell_of(pack, planned, trees.request(name), session.host, session.cache), column=name)
        for name in (BASE, HEAD)
    )
    return Pair(evidence, base, head)


def compared(session: Session, pairs: list[Pair]) -> tuple[list[Compared], bool]:
    """Run the lanes of all pairs; return what they say, and whether the user interrupted.

    Raises:
        HarnessError: the call names a folder that is not there.

    """
    account = session.run([cell for one in pairs for cell in (one.base, one.head)], receipts=False)
    found = []
    for one in pairs:
        base, head = (_side(session, cell, account) for cell in (one.base, one.head))
        if base is not None and head is not None:
            found.append(Compared(one.base.pack, one.base.target, one.evidence, base, head))
    return found, account.interrupted


def _side(session: Session, cell: Cell, account: Account) -> Side | None:
    """Say what came of one tree; None where the user interrupted."""
    if cell.evidence is None:
        return Side(LaneVerdict.ERROR, cell.reason)
    failure = account.failed.get(cell.name)
    if failure is not None and failure.wrong_call:
        raise HarnessError(f"--{cell.column}: {failure.reason}")
    if failure is not None:
        unsupported = failure.verdict == Verdict.UNSUPPORTED
        return Side(LaneVerdict.UNSUPPORTED if unsupported else LaneVerdict.ERROR, failure.reason)
    judged = session.judge.judged(cell)
    if judged is None:
        return None
    (end,) = judged.runs[-1].ends
    if end.record is None:
        return Side(LaneVerdict.ERROR, "its lane did not begin", end.version)
    verdict, reason = judging.verdict_of(session, end.record, end.log)
    return Side(verdict, reason, end.version, end.record)
