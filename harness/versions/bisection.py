"""Finding where verdicts change in about log2(n) lanes; what cannot be judged is skipped, never an answer."""

from __future__ import annotations

from collections.abc import Callable

from harness.versions.history import WRONG, Row

Judge = Callable[[int], Row]


def _next(untried: list[int], left: int, right: int, skips: int) -> int:
    """Return the untried index nearest the middle; after skips in a row, one at twice the distance for each."""
    middle = (left + right) // 2
    away = (1 << skips) >> 1
    far = [index for index in untried if abs(index - middle) >= away]
    return min(far or untried, key=lambda index: abs(index - middle))


def narrow(judge: Judge, left: int, right: int) -> None:
    """Judge rows between two judged ones of different verdicts until these two are neighbours among the judged."""
    verdict, skipped, skips = judge(left).verdict, set[int](), 0
    while untried := [index for index in range(left + 1, right) if index not in skipped]:
        index = _next(untried, left, right, skips)
        row = judge(index)
        if not row.is_judged:
            skipped.add(index)
            skips += 1
            continue
        skips = 0
        if row.verdict == verdict:
            left = index
        else:
            right = index


def outermost(judge: Judge, end: int, anchor: int) -> int:
    """Return a judged row towards `end`: `end` itself, or the farthest one that halving the distance finds."""
    if judge(end).is_judged:
        return end
    unjudged, judged = end, anchor
    while abs(judged - unjudged) > 1:
        middle = (judged + unjudged) // 2
        if judge(middle).is_judged:
            judged = middle
        else:
            unjudged = middle
    return judged


def search(judge: Judge, end: int, anchor: int) -> None:
    """Judge what decides where the bug of the row `anchor` begins or ends towards the row `end`."""
    reached = outermost(judge, end, anchor)
    if judge(reached).verdict != WRONG:
        narrow(judge, min(reached, anchor), max(reached, anchor))
