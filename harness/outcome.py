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

    @property
    def is_default(self) -> bool:
        """Whether pack.toml says what the run must give, and its receipt belongs to the pack."""
        return self.upstream is None and not self.companions and len(self.lanes) == len(LaneName)


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


def deviation(outcome: Outcome, request: Request) -> str:
    """Say how an outcome deviates from what pack.toml states; empty where it does not.

    Of an origin, companion set or single lane that pack.toml states nothing of, only ERROR and CONTROL_FAILED deviate.
    """
    verdict = outcome.judgement.verdict
    if verdict == Verdict.ERROR or outcome.target not in outcome.pack.definition.targets:
        return "" if verdict == Verdict.UNSUPPORTED else outcome.judgement.reason
    expected = outcome.pack.definition.targets[outcome.target]
    if request.is_default:
        missing = [claim for claim in expected.claims if claim not in outcome.judgement.claims]
        if verdict != expected.verdict:
            return f"{expected.verdict} was expected"
        return f"missing claims: {', '.join(missing)}" if missing else ""
    return "controls are wrong" if verdict == Verdict.CONTROL_FAILED else ""
