"""Where a verdict changes among releases, in about log2(n) lanes.

It is taken that the verdict changes once between two ends. What cannot be judged is skipped, and is never an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.versions.judging import Candidate, Judging
from harness.versions.timeline import WRONG, Entry

#: Judges the entry at an index.
Judge = Callable[[int], Entry]


@dataclass
class Known:
    """Judges each candidate when it is first asked for; `rows` are the entries by index."""

    judging: Judging
    listed: list[Candidate]
    rows: dict[int, Entry] = field(default_factory=dict)

    def __call__(self, index: int) -> Entry:
        """Return the entry at an index."""
        if index not in self.rows:
            self.rows[index] = self.judging.one(self.listed[index])
        return self.rows[index]

    @property
    def entries(self) -> list[Entry]:
        """What was judged, in the order of the candidates."""
        return [self.rows[index] for index in sorted(self.rows)]


def narrow(judge: Judge, left: int, right: int) -> None:
    """Judge, by halving, between two entries of different verdicts until none between them can be judged."""
    first = judge(left).verdict
    untried = list(range(left + 1, right))
    while untried:
        index = untried[len(untried) // 2]
        entry = judge(index)
        if not entry.is_judged:
            untried.remove(index)
        elif entry.verdict == first:
            untried = [one for one in untried if one > index]
        else:
            untried = [one for one in untried if one < index]


def search(judge: Judge, end: int, anchor: int) -> None:
    """Judge what decides where the bug of the entry `anchor` begins or ends towards the entry `end`."""
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


def around_the_bug(known: Known) -> None:
    """Judge what decides where the bug of the pinned release (or of the newest) begins and ends.

    HarnessError: that release does not have the bug, so there is nothing to search from. KeyboardInterrupt: the user
    interrupted; `known` holds what was judged.
    """
    last = len(known.listed) - 1
    anchor = next((index for index, candidate in enumerate(known.listed) if candidate.is_pinned), last)
    if known(anchor).verdict != WRONG:
        raise HarnessError(
            f"--bisect starts from {known(anchor).label}, which gives {known(anchor).verdict}. "
            "Next: the same without --bisect",
            status=Exit.DEVIATES,
        )
    search(known, 0, anchor)
    search(known, last, anchor)
