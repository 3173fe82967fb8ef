"""Judging the base and the head of a change with the script and the contract of a pack; fix.patch has no part in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.core.errors import HarnessError
from harness.core.words import Evidence, LaneName
from harness.host.eligibility import Planned
from harness.pack.model import Pack
from harness.schedule import lanes
from harness.schedule.selection import Request, cell_of
from harness.schedule.session import Session
from harness.verdict.change import Change, Side, compare_sides
from harness.versions.judging import side_of

BASE, HEAD = "base", "head"


@dataclass(frozen=True)
class Compared:
    """The results of one pack on one target before a change, and with it."""

    pack: Pack
    target: str
    evidence: Evidence
    base: Side
    head: Side

    @property
    def change(self) -> Change:
        """What the change does."""
        return compare_sides(self.base, self.head)


def compare(
    session: Session, subjects: list[tuple[Pack, str, Evidence]], trees: Mapping[str, str], timeout: float | None
) -> tuple[list[Compared], bool]:
    """Judge BASE and HEAD of `trees`, which name them as ``--upstream`` does, by each pack on its target.

    `timeout` is that of a lane, in seconds. Return the results, and whether the user interrupted. HarnessError is
    raised where a tree cannot be that of a pack's upstream, or is not there.
    """
    cells = []
    for pack, target, evidence in subjects:
        for column, upstream in trees.items():
            request = Request(upstream, (), (LaneName.PRISTINE,), timeout)
            cell = cell_of(pack, Planned(target, evidence), request, session.host, session.cache)
            cells.append(replace(cell, column=column))
    account = lanes.run(session, cells, receipts=False)
    for cell in cells:
        outcome = account.results.get(cell.name)
        if outcome is not None and outcome.problem:
            raise HarnessError(f"--{cell.column}: {outcome.problem}")
    sides = [side_of(session, cell, account) for cell in cells]
    comparisons = []
    for (pack, target, evidence), base, head in zip(subjects, sides[::2], sides[1::2], strict=True):
        if base is not None and head is not None:
            comparisons.append(Compared(pack, target, evidence, base, head))
    return comparisons, account.interrupted
