"""Finding where verdicts change in about log2(n) lanes; what cannot be judged is skipped, never an answer.

A search yields the index of the entry that it wants judged next, and is sent that entry: several searches can so be
driven side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

from harness.versions.timeline import WRONG, Entry

#: Yields indices, is sent their entries, and returns what it found.
Search = Generator[int, Entry, None]
#: Judges several entries at once.
JudgeAll = Callable[[set[int]], dict[int, Entry]]


def _next(untried: list[int], left: int, right: int, skips: int) -> int:
    """Return the untried index nearest the middle; after skips in a row, one at twice the distance for each."""
    middle = (left + right) // 2
    away = (1 << skips) >> 1
    far = [index for index in untried if abs(index - middle) >= away]
    return min(far or untried, key=lambda index: abs(index - middle))


def narrow(left: int, right: int) -> Search:
    """Judge entries between two judged ones of different verdicts until these two are neighbours among the judged."""
    first = yield left
    skipped, skips = set[int](), 0
    while untried := [index for index in range(left + 1, right) if index not in skipped]:
        index = _next(untried, left, right, skips)
        entry = yield index
        if not entry.is_judged:
            skipped.add(index)
            skips += 1
            continue
        skips = 0
        if entry.verdict == first.verdict:
            left = index
        else:
            right = index


def outermost(end: int, anchor: int) -> Generator[int, Entry, int]:
    """Return a judged entry towards `end`: `end` itself, or the farthest one that halving the distance finds."""
    if (yield end).is_judged:
        return end
    unjudged, judged = end, anchor
    while abs(judged - unjudged) > 1:
        middle = (judged + unjudged) // 2
        if (yield middle).is_judged:
            judged = middle
        else:
            unjudged = middle
    return judged


def search(end: int, anchor: int) -> Search:
    """Judge what decides where the bug of the entry `anchor` begins or ends towards the entry `end`."""
    reached = yield from outermost(end, anchor)
    if (yield reached).verdict != WRONG:
        yield from narrow(min(reached, anchor), max(reached, anchor))


def drive(searches: Iterable[Search], known: dict[int, Entry], judge: JudgeAll) -> None:
    """Drive searches side by side: what all of them want next is judged at once; `known` takes every entry."""
    wanted: dict[Search, int] = {}

    def advance(one: Search, entry: Entry | None) -> None:
        """Send an entry, and those known already that are wanted next, until one is wanted that is not."""
        try:
            index = next(one) if entry is None else one.send(entry)
            while index in known:
                index = one.send(known[index])
            wanted[one] = index
        except StopIteration:
            wanted.pop(one, None)

    for one in searches:
        advance(one, None)
    while wanted:
        known |= judge(set(wanted.values()))
        for one, index in list(wanted.items()):
            advance(one, known[index])
