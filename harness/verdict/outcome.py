"""The outcome of a cell, and whether it is what pack.toml expects."""

import traceback
from dataclasses import dataclass
from pathlib import Path

from harness.core.errors import HarnessError, NoRoomError, UnavailableError, UnreachableError, UnsupportedHereError
from harness.core.words import UNJUDGED, Evidence, Exit, LaneName, Verdict
from harness.host.gpus import Gpu
from harness.lane.cell import BOTH_LANES, Cell, pack_lanes
from harness.lane.record import LaneEnd, LaneRecord
from harness.pack.requirements import DependencySet
from harness.verdict.pack_verdict import Judgement

#: The verdict that one lane alone must give where both lanes must give CONFIRMED.
HALF = {LaneName.PRISTINE: Verdict.REPRODUCED, LaneName.PATCHED: Verdict.VALIDATED}


@dataclass(frozen=True)
class Outcome:
    """What one cell showed: the result of a pack on a target."""

    cell: Cell
    judgement: Judgement
    #: the ends of the lanes in each whole repetition; empty where no lane ran
    runs: tuple[tuple[LaneEnd, ...], ...] = ()
    agreeing: int = 1  # how many of the runs gave the verdict
    dependency_set: DependencySet | None = None  # what the lanes imported; None where no lane ran
    receipt: Path | None = None  # the receipt in the run folder; None where none was written
    #: why no receipt could be written; where no lane ran, what the call names and does not exist
    problem: str = ""

    @property
    def last(self) -> tuple[LaneEnd, ...]:
        return self.runs[-1] if self.runs else ()

    @property
    def lanes(self) -> dict[LaneName, LaneRecord]:
        """What each lane that ran showed in the last run."""
        return {end.lane: end.record for end in self.last if end.record is not None}

    @property
    def pristine(self) -> LaneRecord | None:
        return self.lanes.get(LaneName.PRISTINE)

    @property
    def patched(self) -> LaneRecord | None:
        return self.lanes.get(LaneName.PATCHED)

    @property
    def version(self) -> str:
        return self.last[0].version if self.last else ""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that the lanes ran on; empty for evidence that needs none."""
        return self.last[-1].gpus if self.last and self.cell.evidence == Evidence.EXECUTED else ()

    @property
    def ranks(self) -> int:
        """The ranks of the largest group that the contract starts."""
        return self.cell.stated.ranks_on(len(self.gpus))

    @property
    def seconds(self) -> float:
        """The seconds of all lanes, added up."""
        return sum(end.seconds for run in self.runs for end in run)

    def ends(self, lane: LaneName) -> list[LaneEnd]:
        return [end for run in self.runs for end in run if end.lane == lane]

    @property
    def belongs_to_pack(self) -> bool:
        """Whether the receipt is one of the pack's own: pack.toml states the cell, and all lanes were requested."""
        return self.cell.is_stated and self.cell.lanes == pack_lanes(self.cell.pack)

    @property
    def deviation(self) -> str:
        """How the outcome deviates from pack.toml; empty where it does not.

        On a tree or dependency set that pack.toml does not state, only ERROR and CONTROL_FAILED deviate.
        """
        verdict, cell = self.judgement.verdict, self.cell
        if verdict == Verdict.ERROR:
            return self.judgement.reason
        if verdict in UNJUDGED and not self.lanes:
            return ""
        if cell.about and cell.lanes == BOTH_LANES:
            return "" if verdict == Verdict.CONFIRMED else f"{Verdict.CONFIRMED} was expected"
        if not cell.is_stated:
            return "controls are wrong" if verdict == Verdict.CONTROL_FAILED else ""
        expected = cell.pack.definition.expected if self.belongs_to_pack else HALF[cell.lanes[0]]
        if verdict != expected:
            return f"{expected} was expected"
        claims = cell.stated.claims_of(cell.evidence) if self.belongs_to_pack else ()
        missing_claims = [claim for claim in claims if claim not in self.judgement.claims]
        return f"missing claims: {', '.join(missing_claims)}" if missing_claims else ""


def outcome_of_error(error: BaseException, cell: Cell) -> Outcome:
    """Return the outcome of a cell that an error ended; a fault of the harness is printed whole on standard error."""
    is_outside = isinstance(error, UnavailableError) and not isinstance(error, NoRoomError) and cell.may_be_unavailable
    if isinstance(error, UnsupportedHereError):
        verdict = Verdict.UNSUPPORTED
    elif is_outside or (isinstance(error, UnreachableError) and cell.source.is_pinned):
        verdict = Verdict.UNAVAILABLE
    elif isinstance(error, HarnessError):
        problem = str(error) if error.status == Exit.WRONG_CALL else ""
        return Outcome(cell, Judgement(Verdict.ERROR, str(error)), problem=problem)
    else:
        traceback.print_exception(error)
        return Outcome(cell, Judgement(Verdict.ERROR, f"the harness failed: {type(error).__name__}: {error}"))
    return Outcome(cell, Judgement(verdict, str(error)))
