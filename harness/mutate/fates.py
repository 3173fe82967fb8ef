"""What became of a mutant: from what its lane showed, beside the pristine lane's record."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.core.words import LaneVerdict, Verdict
from harness.lane.record import LaneEnd, LaneRecord
from harness.lane.script import STATUS
from harness.mutate.mutants import Listed, Mutant
from harness.receipt.strength import Fate, MutantRecord
from harness.verdict import pack_verdict

#: Exit statuses with which a probe ends that came to a verdict.
CONCLUDED = set(STATUS.values())
#: What kills a mutant that shows the reported bug.
SCRIPT = "reproduce.py"
#: The reason of a mutant whose lane the budget left out.
NOT_RUN = "it was not run"


@dataclass(frozen=True)
class Found:
    """A mutant's fate by its lane alone, and how it came to it; as in `MutantRecord`."""

    fate: Fate
    by: tuple[str, ...] = ()
    reason: str = ""
    refused: str = ""


def says_nothing(record: LaneRecord | None) -> bool:
    """Whether a lane has to be run again, alone: a crash, a time-out, out of memory may be the host's fault.

    A probe that came to a verdict which the runner does not believe would do so again.
    """
    if record is None or record.verdict != LaneVerdict.ERROR:
        return False
    no_verdict = record.exit_status == STATUS[LaneVerdict.UNSUPPORTED]  # its traceback ends so as well
    return no_verdict or record.exit_status not in CONCLUDED


def of_lane(pristine: LaneRecord, end: LaneEnd | None) -> Found:
    """Judge a mutant by its lane: only a failed check kills, or a mode refused that the pristine tree does not refuse.

    The probe alone has to kill it, since that is what a maintainer runs: what only the comparison of the two lanes
    refuses has survived, and `refused` says so.
    """
    if end is None:
        return Found(Fate.UNJUDGED, reason=NOT_RUN)
    record = end.record
    if record is None:
        return Found(Fate.UNJUDGED, reason=f"its patch does not apply: {end.stale}")
    wrong = tuple(check.name for check in record.checks if check.ok is False)
    if not wrong and record.script.startswith(LaneVerdict.BUG_REPRODUCED):
        return Found(Fate.KILLED, (SCRIPT,))
    if record.verdict in (LaneVerdict.BUG_REPRODUCED, LaneVerdict.CONTROL_FAILED, LaneVerdict.FIX_INCOMPLETE):
        return Found(Fate.KILLED, wrong)
    if record.verdict == LaneVerdict.UNSUPPORTED:
        return Found(Fate.KILLED, reason=f"UNSUPPORTED, which the pristine tree is not: {record.reason}")
    return _of_pair(pristine, record)


def _of_pair(pristine: LaneRecord, record: LaneRecord) -> Found:
    if record.verdict == LaneVerdict.ERROR:
        return Found(Fate.UNJUDGED, reason=record.reason)
    judgement = pack_verdict.pair(pristine, record)
    refused = "" if judgement.verdict == Verdict.CONFIRMED else f"{judgement.verdict}: {judgement.reason}"
    return Found(Fate.SURVIVED, refused=refused)


def recorded(mutant: Mutant, found: Found, listed: Listed | None, seconds: float = 0.0) -> MutantRecord:
    """Build the record of a mutant; one that is listed as equivalent or elsewhere, and was not killed, is that."""
    if listed is not None and found.fate in (Fate.SURVIVED, Fate.UNJUDGED):
        found = replace(found, fate=listed.fate, reason=listed.reason)
    return MutantRecord(
        name=mutant.name,
        origin=mutant.origin,
        operator=mutant.operator,
        why=mutant.why,
        sha256=mutant.sha256,
        fate=found.fate,
        by=found.by,
        reason=found.reason,
        refused=found.refused,
        listed=listed is not None,
        seconds=round(seconds, 3),
    )
