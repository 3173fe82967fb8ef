"""What was asked for, what came of it, and whether that is what pack.toml expects."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from harness.companions import CompanionSet
from harness.judge import Judgement
from harness.lane import LaneResult
from harness.origin import Origin
from harness.pack import Pack
from harness.tree import Tree
from harness.words import Evidence, LaneName, Verdict


@dataclass(frozen=True)
class Request:
    """What was asked for, for every pack of a run alike.

    Attributes:
        upstream: the text of ``--upstream``; None is the pinned release.
        companions: the values of ``--with``.
        lanes: the lanes asked for.
        timeout: in seconds; None is the pack's own.
        repeat: how often the lanes run.

    """

    upstream: str | None = None
    companions: tuple[str, ...] = ()
    lanes: tuple[LaneName, ...] = (LaneName.PRISTINE, LaneName.PATCHED)
    timeout: float | None = None
    repeat: int = 1


@dataclass(frozen=True)
class Outcome:
    """What one pack showed on one target; lanes that did not run are None."""

    pack: Pack
    target: str
    evidence: Evidence | None
    judgement: Judgement
    origin: Origin | None = None
    companion_set: CompanionSet | None = None
    tree: Tree | None = None
    pristine: LaneResult | None = None
    patched: LaneResult | None = None
    started: dt.datetime | None = None
    seconds: float = 0.0
    agreeing: int = 1
    repeats: int = 1

    @property
    def lanes(self) -> tuple[LaneResult, ...]:
        """The lanes that ran."""
        return tuple(result for result in (self.pristine, self.patched) if result is not None)

    def is_stated(self, request: Request) -> bool:
        """Whether pack.toml speaks of it: the pinned release with the target's own companion set."""
        return (self.origin is None or self.origin.is_pinned) and not request.companions

    def belongs_to_pack(self, request: Request) -> bool:
        """Whether its receipt is the pack's own: stated, and both lanes asked for."""
        return self.is_stated(request) and len(request.lanes) == len(LaneName)


#: What a single lane must give where both together must give CONFIRMED.
HALF = {LaneName.PRISTINE: Verdict.REPRODUCED, LaneName.PATCHED: Verdict.VALIDATED}


def deviation(outcome: Outcome, request: Request) -> str:
    """Say how an outcome deviates from what pack.toml states; empty where it does not.

    Of an origin or companion set that pack.toml states nothing of, only ERROR and CONTROL_FAILED deviate.
    """
    verdict = outcome.judgement.verdict
    if verdict == Verdict.ERROR:
        return outcome.judgement.reason
    if verdict == Verdict.UNSUPPORTED and not outcome.lanes:
        return ""
    target = outcome.pack.definition.targets.get(outcome.target)
    if target is None or not outcome.is_stated(request):
        return "controls are wrong" if verdict == Verdict.CONTROL_FAILED else ""
    both = outcome.belongs_to_pack(request)
    expected = target.verdict if both or target.verdict != Verdict.CONFIRMED else HALF[request.lanes[0]]
    if verdict != expected:
        return f"{expected} was expected"
    stated = target.claims_of(outcome.evidence) if both else ()
    missing = [claim for claim in stated if claim not in outcome.judgement.claims]
    return f"missing claims: {', '.join(missing)}" if missing else ""
