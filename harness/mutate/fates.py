"""What became of a mutant: from what its lane showed, beside the pristine lane's record."""

from __future__ import annotations

from dataclasses import replace

from harness.core.words import LaneVerdict, Verdict
from harness.lane.record import LaneEnd, LaneRecord
from harness.lane.script import STATUS
from harness.mutate.mutants import Listed
from harness.receipt.strength import Fate, MutantRecord
from harness.verdict import pack_verdict

#: The fates of wrong fixes that the probe did not refuse.
OPEN = frozenset({Fate.SURVIVED, Fate.UNJUDGED})


def says_nothing(record: LaneRecord | None) -> bool:
    """Whether a lane has to be run again, alone: a crash, a time-out, out of memory may be the host's fault.

    A probe that came to a verdict which the runner does not believe would do so again.
    """
    told = {
        STATUS[LaneVerdict.BUG_REPRODUCED],
        STATUS[LaneVerdict.FIX_VALIDATED],
    }  # a traceback ends as UNSUPPORTED does
    return record is not None and record.verdict == LaneVerdict.ERROR and record.exit_status not in told


def of_lane(mutant: MutantRecord, pristine: LaneRecord | None, end: LaneEnd | None) -> MutantRecord:
    """Judge a mutant by its lane: only a failed check kills, or a mode refused that the pristine tree does not refuse.

    The probe alone has to kill it, since that is what a maintainer runs: what only the comparison of the two lanes
    refuses has survived, and `refused` says so.
    """
    record = end.record if end else None
    if record is None:
        reason = f"its patch does not apply: {end.stale}" if end else "it was not run"
        return replace(mutant, fate=Fate.UNJUDGED, reason=reason)
    mutant = replace(mutant, seconds=round(record.seconds, 3))
    wrong = tuple(check.name for check in record.checks if check.ok is False)
    if not wrong and record.script.startswith(LaneVerdict.BUG_REPRODUCED):
        return replace(mutant, fate=Fate.KILLED, by=("reproduce.py",))
    if record.verdict in (LaneVerdict.BUG_REPRODUCED, LaneVerdict.CONTROL_FAILED, LaneVerdict.FIX_INCOMPLETE):
        return replace(mutant, fate=Fate.KILLED, by=wrong)
    if record.verdict == LaneVerdict.UNSUPPORTED:
        reason = f"UNSUPPORTED, which the pristine tree is not: {record.reason}"
        return replace(mutant, fate=Fate.KILLED, reason=reason)
    if record.verdict == LaneVerdict.ERROR:
        return replace(mutant, fate=Fate.UNJUDGED, reason=record.reason)
    judgement = pack_verdict.pair(pristine, record)
    refused = "" if judgement.verdict == Verdict.CONFIRMED else f"{judgement.verdict}: {judgement.reason}"
    return replace(mutant, fate=Fate.SURVIVED, refused=refused)


def listed_as(record: MutantRecord, listed: Listed | None) -> MutantRecord:
    """Note that mutants/equivalent.toml lists a mutant; one that was not killed is what the list says."""
    if listed is None:
        return record
    if record.fate in OPEN:
        record = replace(record, fate=listed.fate, reason=listed.reason)
    return replace(record, listed=True)
