"""What two verdicts on two trees say of the change between them."""

from __future__ import annotations

import itertools

import pytest

from harness.core.words import Exit, LaneVerdict, Role
from harness.lane.results import CheckLine, LaneRecord
from harness.verdict import change
from harness.verdict.change import Change, Effect, Side, compare_sides

BUG, FIXED, CONTROL, INCOMPLETE, UNSUPPORTED, ERROR = LaneVerdict
SILENT = {UNSUPPORTED, ERROR}
PAIRS = list(itertools.product((BUG, FIXED, CONTROL, UNSUPPORTED, ERROR), repeat=2))


def _side(verdict: LaneVerdict, **checks: bool | None) -> Side:
    """Build a tree whose lane made these checks; one whose name begins with c is a control."""
    lines = tuple(
        CheckLine(name, Role.CONTROL if name.startswith("c") else Role.DEFECT, ok) for name, ok in checks.items()
    )
    return Side(verdict, "", "", LaneRecord(verdict, "", 0, 1.0, 0, 0, "", "", checks=lines))


def test_no_two_pairs_have_the_same_sentence_unless_they_say_the_same() -> None:
    sentences = [compare_sides(Side(base), Side(head)).sentence for base, head in PAIRS]
    twice = {sentence for sentence in sentences if sentences.count(sentence) > 1}
    assert twice == {change.BREAKS.sentence}, "a control that breaks is told alike, whether the bug was there or not"


@pytest.mark.parametrize(("base", "head"), PAIRS)
def test_only_a_verdict_on_both_trees_says_anything_of_the_bug(base: LaneVerdict, head: LaneVerdict) -> None:
    result = compare_sides(Side(base), Side(head))
    assert (result.effect == Effect.FIXES) == ((base, head) == (BUG, FIXED))
    assert (result is change.BRINGS_IT_IN) == ((base, head) == (FIXED, BUG))
    if head == UNSUPPORTED or base in SILENT:
        assert result.effect == (Effect.RIGHT if head == FIXED else Effect.UNKNOWN)


@pytest.mark.parametrize(
    ("base", "head", "expected", "names"),
    [
        (_side(BUG, d=False), _side(FIXED, d=True), change.FIXES, ()),
        (_side(BUG, d=False), _side(FIXED, e=True), change.OTHER_CHECKS, ("d is gone",)),
        (_side(BUG, d=False), _side(FIXED, d=None, e=True), change.OTHER_CHECKS, ("d was judged and is not",)),
        (_side(FIXED, d=True, e=True), _side(FIXED, d=True), change.OTHER_CHECKS, ("e is gone",)),
        (_side(FIXED, d=True), _side(FIXED, d=True, e=True), change.BOTH_RIGHT, ()),
        (_side(FIXED, d=True, e=True), _side(BUG, d=True, e=False), change.BRINGS_IT_IN, ("e",)),
        (_side(BUG, d=False), _side(BUG, d=False), change.NO_FIX, ()),
        (_side(BUG, d=False, e=False), _side(INCOMPLETE, d=True, e=False), change.PARTLY_FIXED, ("d",)),
        (_side(INCOMPLETE, d=True, e=False), _side(FIXED, d=True, e=True), change.FIXES, ()),
        (_side(FIXED, d=True, e=True), _side(INCOMPLETE, d=True, e=False), change.BRINGS_IT_IN, ("e",)),
        (_side(BUG, d=False, e=False), _side(BUG, d=True, e=False), change.PARTLY_FIXED, ("d",)),
        (_side(BUG, d=False, e=True), _side(BUG, d=False, e=False), change.PARTLY_WORSE, ("e",)),
        (_side(BUG, d=False, e=True), _side(BUG, d=True, e=False), change.PARTLY_WORSE, ("e",)),
        (_side(BUG, d=False, c=True), _side(CONTROL, d=True, c=False), change.BREAKS, ("c",)),
        (_side(FIXED, d=True, c=True), _side(CONTROL, d=True, c=False), change.BREAKS, ("c",)),
        (_side(FIXED, d=True, c=None), _side(CONTROL, d=True, c=False), change.NEW_CONTROL, ("c",)),
        (_side(CONTROL, c=False), _side(CONTROL, c=False), compare_sides(Side(CONTROL), Side(CONTROL)), ()),
        (_side(CONTROL, c=False, c2=True), _side(CONTROL, c=False, c2=False), change.BREAKS, ("c2",)),
    ],
)
def test_the_checks_refine_the_sentence(base: Side, head: Side, expected: Change, names: tuple[str, ...]) -> None:
    result = compare_sides(base, head)
    assert (result.effect, result.sentence, result.names) == (expected.effect, expected.sentence, names)


def test_a_bug_that_was_there_before_reddens_nothing() -> None:
    for base, expected in ((BUG, Exit.AS_EXPECTED), (FIXED, Exit.DEVIATES), (UNSUPPORTED, Exit.NOTHING_JUDGED)):
        assert change.status([compare_sides(Side(base), Side(BUG))]) == expected


UNKNOWN = compare_sides(Side(BUG), Side(UNSUPPORTED))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], 5),
        ([change.FIXES], 0),
        ([UNKNOWN, change.NO_FIX], 0),
        ([UNKNOWN, UNKNOWN], 5),
        ([change.BOTH_RIGHT, change.BREAKS], 1),
        ([UNKNOWN, change.BREAKS], 1),
    ],
)
def test_the_worst_of_several_packs_counts(changes: list[Change], expected: int) -> None:
    assert change.status(changes) == expected
