"""What came of a cell, and whether that is what pack.toml expects."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from harness.core.words import LaneName, Verdict
from harness.host.gpus import Gpu
from harness.lane.record import LaneRecord
from harness.upstream.dependencies import DependencySet
from harness.verdict.cell import BOTH_LANES, Cell
from harness.verdict.pack_verdict import Judgement


@dataclass(frozen=True)
class Outcome:
    """What one cell showed.

    Attributes:
        cell: what it is about.
        judgement: the verdict, why, and the claims.
        pristine: what that lane of the last run showed; None where it did not run.
        patched: likewise.
        dependency_set: what the lanes imported; None where none ran.
        version: of the tree, as the runner knows it.
        tree: the sha256 of the pristine tree.
        patch: the name of the patch's file; empty where no patched lane ran.
        gpus: those that the last run had.
        started: when its first lane began, in UTC; None where none ran.
        seconds: of all its lanes together.
        agreeing: how many of its runs gave the verdict.
        repeats: of how many.

    """

    cell: Cell
    judgement: Judgement
    pristine: LaneRecord | None = None
    patched: LaneRecord | None = None
    dependency_set: DependencySet | None = None
    version: str = ""
    tree: str = ""
    patch: str = ""
    gpus: tuple[Gpu, ...] = ()
    started: dt.datetime | None = None
    seconds: float = 0.0
    agreeing: int = 1
    repeats: int = 1

    @property
    def lanes(self) -> dict[LaneName, LaneRecord]:
        """The lanes that ran."""
        both = {LaneName.PRISTINE: self.pristine, LaneName.PATCHED: self.patched}
        return {name: record for name, record in both.items() if record is not None}

    @property
    def belongs_to_pack(self) -> bool:
        """Whether its receipt is the pack's own: pack.toml speaks of it, and all its lanes were requested."""
        return self.cell.is_stated and self.cell.is_whole


#: What a single lane must give where both together must give CONFIRMED.
HALF = {LaneName.PRISTINE: Verdict.REPRODUCED, LaneName.PATCHED: Verdict.VALIDATED}


def deviation(outcome: Outcome) -> str:
    """Say how an outcome deviates from what pack.toml states; empty where it does not.

    Of a tree or dependency set that pack.toml states nothing of, only ERROR and CONTROL_FAILED deviate.
    """
    verdict, cell = outcome.judgement.verdict, outcome.cell
    if verdict == Verdict.ERROR:
        return outcome.judgement.reason
    if verdict in (Verdict.UNSUPPORTED, Verdict.UNAVAILABLE) and not outcome.lanes:
        return ""
    if cell.about and cell.lanes == BOTH_LANES:
        return "" if verdict == Verdict.CONFIRMED else f"{Verdict.CONFIRMED} was expected"
    if not cell.is_stated:
        return "controls are wrong" if verdict == Verdict.CONTROL_FAILED else ""
    stated = cell.stated
    whole = outcome.belongs_to_pack or stated.verdict != Verdict.CONFIRMED
    expected = stated.verdict if whole else HALF[cell.lanes[0]]
    if verdict != expected:
        return f"{expected} was expected"
    claims = stated.claims_of(cell.evidence) if outcome.belongs_to_pack else ()
    missing = [claim for claim in claims if claim not in outcome.judgement.claims]
    return f"missing claims: {', '.join(missing)}" if missing else ""
