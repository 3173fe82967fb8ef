"""Judging the base and the head of a change: one script and contract, two trees, no patch of ours."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.core.errors import HarnessError
from harness.core.words import Evidence, LaneName
from harness.host.eligibility import Planned
from harness.pack.model import Pack
from harness.schedule import lanes
from harness.schedule.selection import Request, cell_of
from harness.schedule.session import Session
from harness.verdict.change import Change, Side, between
from harness.versions.judging import side_of

BASE, HEAD = "base", "head"


@dataclass(frozen=True)
class Trees:
    """The two trees: each as ``--upstream`` names one, with the seconds of a lane."""

    base: str
    head: str
    timeout: float | None = None


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


def compared(session: Session, judged: list[tuple[Pack, str, Evidence]], trees: Trees) -> tuple[list[Compared], bool]:
    """Judge both trees by packs, each on a target; return what they say, and whether the user interrupted.

    HarnessError is raised where a tree names nothing of a pack, or a folder that is not there.
    """
    cells = []
    for pack, target, evidence in judged:
        for column, upstream in ((BASE, trees.base), (HEAD, trees.head)):
            request = Request(upstream, (), (LaneName.PRISTINE,), trees.timeout)
            cell = cell_of(pack, Planned(target, evidence), request, session.host, session.cache)
            cells.append(replace(cell, column=column))
    account = lanes.run(session, cells, receipts=False)
    for cell in cells:
        outcome = account.results.get(cell.name)
        if outcome is not None and outcome.problem:
            raise HarnessError(f"--{cell.column}: {outcome.problem}")
    sides = [side_of(session, cell, account) for cell in cells]
    found = []
    for (pack, target, evidence), base, head in zip(judged, sides[::2], sides[1::2], strict=True):
        if base is not None and head is not None:
            found.append(Compared(pack, target, evidence, base, head))
    return found, account.interrupted
