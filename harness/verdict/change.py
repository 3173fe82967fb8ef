"""What a change does to a bug: one pack on two trees of a maintainer, the base of the change and its head.

Each tree is judged as every lane is. TABLE says what two verdicts mean together. A sentence claims no more than they
do: UNSUPPORTED and ERROR say nothing about the bug, and a failed control speaks only of what it controls.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from harness.core.words import Evidence, Exit, LaneVerdict, Role
from harness.lane.results import LaneRecord, check_names
from harness.pack.model import Pack
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
    """What a change does, in a sentence; `names` holds the checks of the sentence, or why nothing is known."""

    effect: Effect
    sentence: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """One of the two trees."""

    verdict: LaneVerdict
    reason: str = ""
    version: str = ""  # as the runner knows it; empty where the tree could not be fetched
    record: LaneRecord | None = None  # None where the lane did not begin


BASE, HEAD = "base", "head"
BUG, FIXED, CONTROL = LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED, LaneVerdict.CONTROL_FAILED
INCOMPLETE, UNSUPPORTED, ERROR = LaneVerdict.FIX_INCOMPLETE, LaneVerdict.UNSUPPORTED, LaneVerdict.ERROR
FIXES = Change(Effect.FIXES, "this change fixes it")
NO_FIX = Change(Effect.AS_BEFORE, "this change does not fix it; it was there before")
BRINGS_IT_IN = Change(Effect.WORSE, "this change brings it in")
BOTH_RIGHT = Change(Effect.RIGHT, "both are right")
BREAKS = Change(Effect.WORSE, "this change breaks what was right")
#: What a change does, by the verdicts on base and head. `_one_sided_change` covers the other pairs.
TABLE = {
    (BUG, BUG): NO_FIX,
    (BUG, FIXED): FIXES,
    (BUG, CONTROL): BREAKS,
    (FIXED, BUG): BRINGS_IT_IN,
    (FIXED, FIXED): BOTH_RIGHT,
    (FIXED, CONTROL): BREAKS,
}
#: What one verdict says about its tree.
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


def _one_sided_change(base: LaneVerdict, head: LaneVerdict) -> Change:
    """Return the change where one verdict says nothing about the bug: an error in head is worse than a judged base."""
    sentence = f"{IN_WORDS[base].format('base')}, and {IN_WORDS[head].format('head')}"
    if head == FIXED:
        return Change(Effect.RIGHT, sentence)
    is_worse = head == ERROR and base in (BUG, FIXED, CONTROL)
    return Change(Effect.WORSE if is_worse else Effect.UNKNOWN, f"{sentence}: what this change does is open")


def compare_sides(base: Side, head: Side) -> Change:
    """Say what a change from `base` to `head` does.

    FIX_INCOMPLETE is BUG_REPRODUCED here: the checks say which part of the bug is left. A change is called right only
    where both lanes made the same checks (see `pack_verdict.check_differences`).
    """
    base, head = (replace(side, verdict=BUG) if side.verdict == INCOMPLETE else side for side in (base, head))
    pair = (base.verdict, head.verdict)
    change = TABLE.get(pair) or _one_sided_change(*pair)
    if base.record is None or head.record is None:
        return change
    refinements = _refinements(change, pair, base.record, head.record)
    return next((replace(refined, names=tuple(names)) for refined, names in refinements if names), change)


def _refinements(
    change: Change, pair: tuple[LaneVerdict, LaneVerdict], base: LaneRecord, head: LaneRecord
) -> Iterator[tuple[Change, Sequence[str]]]:
    """Yield what the change is where there are checks of these names."""

    def changed(role: Role, *, ok: bool) -> list[str]:
        """Name the checks that the change made right (`ok`), or those that it made wrong."""
        before = check_names(base.checks, role, ok=not ok)
        return [name for name in check_names(head.checks, role, ok=ok) if name in before]

    if pair in ((BUG, CONTROL), (FIXED, CONTROL), (CONTROL, CONTROL)):
        yield BREAKS, changed(Role.CONTROL, ok=False)
        old_names = check_names(base.checks, Role.CONTROL, ok=False)
        yield NEW_CONTROL, [name for name in check_names(head.checks, Role.CONTROL, ok=False) if name not in old_names]
    elif pair == (BUG, BUG):
        yield PARTLY_WORSE, changed(Role.DEFECT, ok=False)
        yield PARTLY_FIXED, changed(Role.DEFECT, ok=True)
    elif change is BRINGS_IT_IN:
        yield change, check_names(head.checks, Role.DEFECT, ok=False)
    elif change in (FIXES, BOTH_RIGHT):
        yield OTHER_CHECKS, pack_verdict.check_differences(base, head)


@dataclass(frozen=True)
class Compared:
    """The results of one pack on one target before a change, and with it."""

    pack: Pack
    target: str
    evidence: Evidence
    base: Side
    head: Side

    @property
    def change(self) -> Change:
        return compare_sides(self.base, self.head)


def status(changes: Iterable[Change]) -> Exit:
    """Return the exit status of changes: one that is worse counts first, then any that is known."""
    effects = {change.effect for change in changes}
    if Effect.WORSE in effects:
        return Exit.DEVIATES
    return Exit.NOTHING_JUDGED if effects <= {Effect.UNKNOWN} else Exit.AS_EXPECTED
