"""The first run of a new pack: whether its script fails on the release that it is about."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.words import LaneName, LaneVerdict
from harness.lane.record import LaneRecord
from harness.pack.model import Pack
from harness.schedule.selection import Request, cells_of
from harness.schedule.session import Session

#: Characters of how the script failed.
MOST_SAID = 300


@dataclass(frozen=True)
class Trial:
    """Whether the script failed as it should, and what is said of it."""

    failed: bool
    text: str


def pristine(pack: Pack, session: Session) -> Trial:
    """Run a new pack's pristine lane once, on this host's GPU where there is one."""
    request = Request(lanes=(LaneName.PRISTINE,))
    (cell,) = cells_of([pack], "auto", request, session.host, session.cache)
    if cell.evidence is None:
        return Trial(failed=False, text=f"not judged here: {cell.reason}")
    account = session.run([cell])
    if account.interrupted:
        raise KeyboardInterrupt
    judged = session.judge.judged(cell)
    lane = judged.outcome.pristine if judged else None
    if lane is None:
        failure = account.failed.get(cell.name)
        return Trial(failed=False, text=f"it did not run: {failure.reason if failure else 'no lane ended'}")
    upstream = pack.definition.upstream
    return _said(lane, f"{upstream.package} {upstream.version} ({cell.target}, {cell.evidence})")


def _said(lane: LaneRecord, release: str) -> Trial:
    if lane.verdict == LaneVerdict.BUG_REPRODUCED:
        return Trial(failed=True, text=f"{lane.verdict}: the script fails on {release}: {_failure(lane)}")
    if lane.verdict == LaneVerdict.FIX_VALIDATED:
        return Trial(failed=False, text=f"the script does not fail on {release}")
    script = f"; script: {_failure(lane)}" if _failure(lane) else ""
    return Trial(failed=False, text=f"{lane.verdict}: nothing is shown on {release}: {lane.reason}{script}")


def _failure(lane: LaneRecord) -> str:
    """Return how the script failed, in its own words or those of what was raised."""
    check = next((one for one in lane.checks if one.name == "script"), None)
    return " ".join(str(check.measured or check.reason).split())[:MOST_SAID] if check else ""
