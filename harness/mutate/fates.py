"""The fate of a mutant, from the record of its lane and that of the pristine lane."""

from __future__ import annotations

from dataclasses import replace

from harness.core.words import LaneVerdict, Verdict
from harness.lane.record import LaneEnd, LaneRecord
from harness.lane.script import STATUS
from harness.mutate.mutants import Listed
from harness.receipt.strength import Fate, MutantRecord
from harness.verdict import pack_verdict

#: The fates of wrong fixes that no check refused.
OPEN = frozenset({Fate.SURVIVED, Fate.UNJUDGED})


def is_inconclusive(record: LaneRecord | None) -> bool:
    """Whether a lane has to run again, alone: the host may be to blame for a crash, a time-out or a lack of memory.

    A lane that ended with the status of a verdict would end so again. UNSUPPORTED shares its status with a traceback.
    """
    conclusive = {STATUS[LaneVerdict.BUG_REPRODUCED], STATUS[LaneVerdict.FIX_VALIDATED]}
    return record is not None and record.verdict == LaneVerdict.ERROR and record.exit_status not in conclusive


def fate_of_lane(mutant: MutantRecord, pristine: LaneRecord | None, end: LaneEnd | None) -> MutantRecord:
    """Judge a mutant by its lane: a failed check kills it, and so does UNSUPPORTED, since the pristine tree was judged.

    A maintainer runs script and contract alone. A mutant that only the comparison of the two lanes refuses has
    therefore survived, and `refused` says so.
    """
    record = end.record if end else None
    if record is None:
        reason = f"its patch does not apply: {end.stale}" if end else "it was not run"
        return replace(mutant, fate=Fate.UNJUDGED, reason=reason)
    mutant = replace(mutant, seconds=round(record.seconds, 3))
    failed = tuple(check.name for check in record.checks if check.ok is False)
    if not failed and record.script.startswith(LaneVerdict.BUG_REPRODUCED):
        return replace(mutant, fate=Fate.KILLED, by=("reproduce.py",))
    if record.verdict in (LaneVerdict.BUG_REPRODUCED, LaneVerdict.CONTROL_FAILED, LaneVerdict.FIX_INCOMPLETE):
        return replace(mutant, fate=Fate.KILLED, by=failed)
    if record.verdict == LaneVerdict.UNSUPPORTED:
        reason = f"UNSUPPORTED, which the pristine tree is not: {record.reason}"
        return replace(mutant, fate=Fate.KILLED, reason=reason)
    if record.verdict == LaneVerdict.ERROR:
        return replace(mutant, fate=Fate.UNJUDGED, reason=record.reason)
    judgement = pack_verdict.judge_lanes(pristine, record)
    refused = "" if judgement.verdict == Verdict.CONFIRMED else f"{judgement.verdict}: {judgement.reason}"
    return replace(mutant, fate=Fate.SURVIVED, refused=refused)


def apply_exemption(record: MutantRecord, exemption: Listed | None) -> MutantRecord:
    """Note that mutants/equivalent.toml lists a mutant, and take its fate and reason unless the mutant was killed."""
    if exemption is None:
        return record
    if record.fate in OPEN:
        record = replace(record, fate=exemption.fate, reason=exemption.reason)
    return replace(record, listed=True)
