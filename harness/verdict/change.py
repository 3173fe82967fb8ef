"""What a change does to a bug: one probe on two trees of a maintainer's own, the base of the change and its head.

The verdict on each tree is the lane's judge's. The table below says what the two mean together; a sentence is as wide
as they are: UNSUPPORTED and ERROR say nothing of the bug, and a failed control only of what it controls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from harness.core.words import Exit, LaneVerdict, Role
from harness.lane.record import LaneRecord
from harness.verdict import pack_verdict


class Effect(StrEnum):
    """What a change does."""

    FIXES = "fixes"
    RIGHT = "right"
    AS_BEFORE = "as before"
    WORSE = "worse"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Change:
    """What a change does, in a sentence; `names` are the checks that it speaks of, or why nothing is known."""

    effect: Effect
    sentence: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """One of the two trees."""

    verdict: LaneVerdict
    reason: str = ""
    version: str = ""  # as the runner knows it; empty where the tree could not be had
    record: LaneRecord | None = None  # None where the lane did not begin


BUG, FIXED, CONTROL = LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED, LaneVerdict.CONTROL_FAILED
INCOMPLETE, UNSUPPORTED, ERROR = LaneVerdict.FIX_INCOMPLETE, LaneVerdict.UNSUPPORTED, LaneVerdict.ERROR
FIXES = Change(Effect.FIXES, "this change fixes it")
NO_FIX = Change(Effect.AS_BEFORE, "this change does not fix it; it was there before")
BRINGS_IT_IN = Change(Effect.WORSE, "this change brings it in")
BOTH_RIGHT = Change(Effect.RIGHT, "both are right")
BREAKS = Change(Effect.WORSE, "this change breaks what was right")
#: What the two verdicts say of the change: by that on base, then by that on head.
TABLE: dict[LaneVerdict, dict[LaneVerdict, Change]] = {
    BUG: {
        BUG: NO_FIX,
        FIXED: FIXES,
        CONTROL: BREAKS,
        UNSUPPORTED: Change(Effect.UNKNOWN, "it is in base; head cannot be judged here, so whether it is gone is open"),
        ERROR: Change(Effect.WORSE, "the lane ends in an error with this change; whether the bug is gone is open"),
    },
    FIXED: {
        BUG: BRINGS_IT_IN,
        FIXED: BOTH_RIGHT,
        CONTROL: BREAKS,
        UNSUPPORTED: Change(Effect.UNKNOWN, "base is right; head cannot be judged here"),
        ERROR: Change(Effect.WORSE, "the lane ends in an error with this change; base is right"),
    },
    CONTROL: {
        BUG: Change(Effect.UNKNOWN, "it is in head; a control fails in base, so who brought it in is open"),
        FIXED: Change(Effect.RIGHT, "head is right; a control fails in base, so whether it had the bug is open"),
        CONTROL: Change(Effect.UNKNOWN, "a control fails in both, so nothing can be said of the bug"),
        UNSUPPORTED: Change(Effect.UNKNOWN, "a control fails in base, and head cannot be judged here"),
        ERROR: Change(Effect.WORSE, "the lane ends in an error with this change; in base a control fails"),
    },
    UNSUPPORTED: {
        BUG: Change(Effect.UNKNOWN, "it is in head; base cannot be judged here, so who brought it in is open"),
        FIXED: Change(Effect.RIGHT, "head is right; base cannot be judged here"),
        CONTROL: Change(Effect.UNKNOWN, "a control fails in head, and base cannot be judged here"),
        UNSUPPORTED: Change(Effect.UNKNOWN, "neither can be judged here"),
        ERROR: Change(Effect.UNKNOWN, "base cannot be judged here, and the lane on head ends in an error"),
    },
    ERROR: {
        BUG: Change(Effect.UNKNOWN, "it is in head; the lane on base ends in an error, so who brought it in is open"),
        FIXED: Change(Effect.RIGHT, "head is right; the lane on base ends in an error"),
        CONTROL: Change(Effect.UNKNOWN, "a control fails in head, and the lane on base ends in an error"),
        UNSUPPORTED: Change(Effect.UNKNOWN, "the lane on base ends in an error, and head cannot be judged here"),
        ERROR: Change(Effect.UNKNOWN, "both lanes end in an error"),
    },
}
OTHER_CHECKS = Change(Effect.UNKNOWN, "nothing is said: head did not make the checks that base made")
NEW_CONTROL = Change(Effect.UNKNOWN, "a control fails in head that was not judged in base")
PARTLY_WORSE = Change(Effect.WORSE, "a part of it was there before, and this change brings in the rest")
PARTLY_FIXED = Change(Effect.AS_BEFORE, "this change fixes only a part of it")
STATUS = {
    Effect.FIXES: Exit.AS_EXPECTED,
    Effect.RIGHT: Exit.AS_EXPECTED,
    Effect.AS_BEFORE: Exit.AS_EXPECTED,
    Effect.WORSE: Exit.DEVIATES,
    Effect.UNKNOWN: Exit.NOTHING_JUDGED,
}


def failed(record: LaneRecord | None, role: Role) -> tuple[str, ...]:
    """Name the checks of one role that a lane found wrong."""
    return tuple(one.name for one in record.checks if one.role == role and one.ok is False) if record else ()


def _right(record: LaneRecord, role: Role) -> set[str]:
    return {one.name for one in record.checks if one.role == role and one.ok}


def _controls(base: LaneRecord, head: LaneRecord, said: Change) -> Change:
    """Say which control fails in head and was right in base."""
    wrong, right = failed(head, Role.CONTROL), _right(base, Role.CONTROL)
    broken = tuple(name for name in wrong if name in right)
    if broken:
        return replace(BREAKS, names=broken)
    new = tuple(name for name in wrong if name not in failed(base, Role.CONTROL))
    return replace(NEW_CONTROL, names=new) if new else said


def _defects(base: LaneRecord, head: LaneRecord) -> Change:
    """Compare two trees that both have the bug, check by check."""
    brought = tuple(name for name in failed(head, Role.DEFECT) if name in _right(base, Role.DEFECT))
    if brought:
        return replace(PARTLY_WORSE, names=brought)
    mended = tuple(name for name in failed(base, Role.DEFECT) if name in _right(head, Role.DEFECT))
    return replace(PARTLY_FIXED, names=mended) if mended else NO_FIX


def _as_bug(side: Side) -> Side:
    """Take a tree that has a part of the bug for one that has it: which part, its checks say."""
    return replace(side, verdict=BUG) if side.verdict == INCOMPLETE else side


def between(base: Side, head: Side) -> Change:
    """Say what a change from `base` to `head` does.

    Both lanes made the same checks where it is called right: a check that is gone, or is no longer judged, shows
    nothing (see `pack_verdict.unlike_checks`).
    """
    base, head = _as_bug(base), _as_bug(head)
    said = TABLE[base.verdict][head.verdict]
    if base.record is None or head.record is None:
        return said
    if head.verdict == CONTROL and base.verdict in (BUG, FIXED, CONTROL):
        return _controls(base.record, head.record, said)
    if (base.verdict, head.verdict) == (BUG, BUG):
        return _defects(base.record, head.record)
    if said is BRINGS_IT_IN:
        return replace(said, names=failed(head.record, Role.DEFECT))
    unlike = pack_verdict.unlike_checks(base.record, head.record) if said in (FIXES, BOTH_RIGHT) else []
    return replace(OTHER_CHECKS, names=tuple(unlike)) if unlike else said


def status(change: Change) -> Exit:
    """Return the exit status that a change stands for."""
    return STATUS[change.effect]


def together(statuses: list[Exit]) -> Exit:
    """Return the exit status of several changes: what is worse counts, then what is known."""
    if Exit.DEVIATES in statuses:
        return Exit.DEVIATES
    return Exit.AS_EXPECTED if Exit.AS_EXPECTED in statuses else Exit.NOTHING_JUDGED
