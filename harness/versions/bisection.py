"""Bisection: where the verdict changes among releases, in about log2(n) lanes.

It assumes one change between two ends. A release that cannot be judged is skipped, and is never the answer.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.upstream.download import ReleaseFile
from harness.versions.judging import Judging
from harness.versions.timeline import WRONG, Entry

#: Judges the release at an index.
Judge = Callable[[int], Entry]


def search(judge: Judge, end: int, anchor: int) -> None:
    """Judge what decides where, between `anchor` and `end`, the bug of `anchor` begins or ends.

    Until a right release is found, one that cannot be judged counts as the edge of what can be judged.
    """
    step = 1 if end > anchor else -1
    untried = list(range(anchor + step, end + step, step))
    place, is_bounded = len(untried) - 1, False
    while untried:
        entry = judge(untried[place])
        if entry.verdict == WRONG:
            untried = untried[place + 1 :]
        elif entry.is_judged or not is_bounded:
            is_bounded = is_bounded or entry.is_judged
            untried = untried[:place]
        else:
            del untried[place]
        place = len(untried) // 2


def bisect(judging: Judging, releases: list[ReleaseFile]) -> tuple[list[Entry], bool]:
    """Judge what decides where the bug of the pinned release, or else of the newest, begins and ends.

    Return the entries in the order of the releases, and whether the user interrupted. HarnessError is raised where that
    release does not have the bug.
    """
    entries: dict[int, Entry] = {}

    def judge(index: int) -> Entry:
        if index not in entries:
            entries[index] = judging.judge(releases[index])
        return entries[index]

    last = len(releases) - 1
    anchor = next((index for index, release in enumerate(releases) if judging.is_pinned(release)), last)
    is_interrupted = False
    try:
        if judge(anchor).verdict != WRONG:
            raise HarnessError(
                f"--bisect starts from {judge(anchor).label}, which gives {judge(anchor).verdict}. "
                "Next: the same without --bisect",
                status=Exit.DEVIATES,
            )
        search(judge, 0, anchor)
        search(judge, last, anchor)
    except KeyboardInterrupt:
        is_interrupted = True
    return [entries[index] for index in sorted(entries)], is_interrupted
