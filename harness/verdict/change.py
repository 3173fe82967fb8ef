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
#: What the two verdicts say of the change, by that on base and that on head; of other pairs, `_half_known` says it.
TABLE = {
    (BUG, BUG): NO_FIX,
    (BUG, FIXED): FIXES,
    (BUG, CONTROL): BREAKS,
    (FIXED, BUG): BRINGS_IT_IN,
    (FIXED, FIXED): BOTH_RIGHT,
    (FIXED, CONTROL): BREAKS,
}
#: A tree of which nothing is known of the bug, or what is, in a sentence.
IN_WORDS = {
    BUG: "{} has the bug",
    FIXED: "{} is right",
    CONTROL: "a control fails in {}",
    UNSUPPORTED: "{} cannot be judged here",
    ERROR: "the lane on {} ends in an error",
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


def _half_known(base: LaneVerdict, head: LaneVerdict) -> Change:
    """Say what is known where one of the trees says nothing of the bug: right is right, and an error was not there."""
    said = f"{IN_WORDS[base].format('base')}, and {IN_WORDS[head].format('head')}"
    if head == FIXED:
        return Change(Effect.RIGHT, said)
    worse = head == ERROR and base in (BUG, FIXED, CONTROL)
    return Change(Effect.WORSE if worse else Effect.UNKNOWN, f"{said}: what this change does is open")


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
    pair = (base.verdict, head.verdict)
    said = TABLE.get(pair) or _half_known(*pair)
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
