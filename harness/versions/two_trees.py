"""Judging the base and the head of a change: one script and contract, two trees, no patch of ours."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.core.errors import HarnessError
from harness.core.words import Evidence, LaneName
from harness.host.eligibility import Planned
from harness.pack.model import Pack
from harness.schedule.selection import Request, cell_of
from harness.schedule.session import Session
from harness.verdict.cell import Cell
from harness.verdict.change import Change, Side, between
from harness.versions.judging import side_of

BASE, HEAD = "base", "head"


@dataclass(frozen=True)
class Trees:
    """The two trees: each as ``--upstream`` names one, with the dependency set and the seconds of a lane."""

    base: str
    head: str
    dependencies: tuple[str, ...] = ()
    timeout: float | None = None


@dataclass(frozen=True)
class Pair:
    """The cells of both trees, of one pack on one target."""

    evidence: Evidence
    base: Cell
    head: Cell


@dataclass(frozen=True)
class Compared:
    """What one pack on one target says of a change, and how that was seen: the tree before it, and the tree with it."""

    pack: Pack
    target: str
    evidence: Evidence
    base: Side
    head: Side

    @property
    def change(self) -> Change:
        """What the change does."""
        return between(self.base, self.head)


def pair(session: Session, pack: Pack, target: str, evidence: Evidence, trees: Trees) -> Pair:
    """Build the cells of both trees; HarnessError where one of them names nothing of this pack."""
    cells = []
    for name, upstream in ((BASE, trees.base), (HEAD, trees.head)):
        request = Request(upstream, trees.dependencies, (LaneName.PRISTINE,), trees.timeout)
        cell = cell_of(pack, Planned(target, evidence), request, session.host, session.cache)
        cells.append(replace(cell, column=name))
    return Pair(evidence, *cells)


def compared(session: Session, pairs: list[Pair]) -> tuple[list[Compared], bool]:
    """Run the lanes of all pairs; return what they say, and whether the user interrupted.

    HarnessError is raised where the call names a folder that is not there.
    """
    cells = [cell for pair in pairs for cell in (pair.base, pair.head)]
    account = session.run(cells, receipts=False)
    for cell in cells:
        failure = account.failed.get(cell.name)
        if failure is not None and failure.wrong_call:
            raise HarnessError(f"--{cell.column}: {failure.reason}")
    found = []
    for pair in pairs:
        base, head = side_of(session, pair.base, account), side_of(session, pair.head, account)
        if base is not None and head is not None:
            found.append(Compared(pair.base.pack, pair.base.target, pair.evidence, base, head))
    return found, account.interrupted
