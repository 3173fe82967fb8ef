"""Bisection: where the verdict changes among releases, in about log2(n) lanes.

It assumes one change between two ends. A release that cannot be judged is skipped, and is never the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.versions.judging import Candidate, Judging
from harness.versions.timeline import WRONG, Entry

#: Judges the candidate at an index.
Judge = Callable[[int], Entry]


@dataclass
class Known:
    """Judges a candidate when its entry is first needed."""

    judging: Judging
    listed: list[Candidate]
    rows: dict[int, Entry] = field(default_factory=dict)  # the entries by index

    def __call__(self, index: int) -> Entry:
        if index not in self.rows:
            self.rows[index] = self.judging.judge(self.listed[index])
        return self.rows[index]

    @property
    def entries(self) -> list[Entry]:
        """The entries, in the order of the candidates."""
        return [self.rows[index] for index in sorted(self.rows)]


def narrow(judge: Judge, start: int, end: int) -> None:
    """Bisect between two entries of different verdicts until no candidate between them can be judged."""
    verdict = judge(start).verdict
    untried = list(range(start + 1, end))
    while untried:
        index = untried[len(untried) // 2]
        entry = judge(index)
        if not entry.is_judged:
            untried.remove(index)
        elif entry.verdict == verdict:
            untried = [candidate for candidate in untried if candidate > index]
        else:
            untried = [candidate for candidate in untried if candidate < index]


def search(judge: Judge, end: int, anchor: int) -> None:
    """Judge what decides where, between the entries `anchor` and `end`, the bug of `anchor` begins or ends."""
    unjudged, reached = end, anchor
    if judge(end).is_judged:
        unjudged = reached = end
    while abs(reached - unjudged) > 1:
        middle = (reached + unjudged) // 2
        if judge(middle).is_judged:
            reached = middle
        else:
            unjudged = middle
    if judge(reached).verdict != WRONG:
        narrow(judge, min(reached, anchor), max(reached, anchor))


def bisect_around_pinned(judge: Known) -> None:
    """Judge what decides where the bug of the pinned release, or else of the newest, begins and ends.

    HarnessError is raised where that release does not have the bug. After a KeyboardInterrupt `judge` holds the entries
    so far.
    """
    last = len(judge.listed) - 1
    anchor = next((index for index, candidate in enumerate(judge.listed) if candidate.is_pinned), last)
    if judge(anchor).verdict != WRONG:
        raise HarnessError(
            f"--bisect starts from {judge(anchor).label}, which gives {judge(anchor).verdict}. "
            "Next: the same without --bisect",
            status=Exit.DEVIATES,
        )
    search(judge, 0, anchor)
    search(judge, last, anchor)
