"""Where the bug came in and where it was fixed, from the verdicts on releases in their order."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.core.words import Evidence, LaneVerdict

#: Of the document that `runner.py versions --record` writes.
SCHEMA = 1
WRONG, RIGHT = LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED


@dataclass(frozen=True)
class Entry:
    """The verdict on one release or commit."""

    label: str
    date: str
    verdict: LaneVerdict
    figure: str = ""
    reason: str = ""
    seconds: float = 0.0  # the wall time of its lane

    @property
    def is_judged(self) -> bool:
        """Whether it is right or wrong: no other verdict tells of the bug."""
        return self.verdict in (WRONG, RIGHT)


@dataclass(frozen=True)
class History:
    """The document of `runner.py versions --record` for a target; `checks` are those that decided, empty: all."""

    schema: int
    pack: str
    target: str
    evidence: Evidence
    over: str
    line: str
    probe: str
    python: str
    torch: str
    triton: str
    command: str
    rows: tuple[Entry, ...]
    checks: tuple[str, ...] = ()
    meaning: str = ""  # as `judges.meaning_of` says it; empty in older documents


@dataclass(frozen=True)
class Period:
    """A stretch of rows with the bug, by their labels."""

    first: str  # the first wrong row
    last: str  # the last wrong row
    before: str  # the last right row before it, or empty
    after: str  # the first right row after it, or empty


def periods(verdicts: Mapping[str, LaneVerdict]) -> list[Period]:
    """List the stretches with the bug. A row that could not be judged neither begins nor ends a stretch."""
    stretches: list[Period] = []
    last_right, first_wrong, last_wrong = "", "", ""
    for label, verdict in verdicts.items():
        if verdict == WRONG:
            first_wrong, last_wrong = first_wrong or label, label
        elif verdict == RIGHT:
            if first_wrong:
                stretches.append(Period(first_wrong, last_wrong, last_right, label))
            last_right, first_wrong = label, ""
    return [*stretches, Period(first_wrong, last_wrong, last_right, "")] if first_wrong else stretches


def _ends(period: Period, adjacent: set[tuple[str, str]]) -> str:
    """Say where the bug came and went, ``or earlier`` where the row before was not judged."""
    came = f"bug from {period.first}{'' if (period.before, period.first) in adjacent else ' or earlier'}"
    if not period.after:
        return f"{came}, not fixed in {period.last}"
    return f"{came}, fixed in {period.after}{'' if (period.last, period.after) in adjacent else ' or earlier'}"


def line(rows: Sequence[Entry]) -> str:
    """Say in one line where the bug came and went, such as ``bug from A, fixed in B``."""
    judged = [row for row in rows if row.is_judged]
    if not judged:
        return f"nothing can be said: none of the {len(rows)} could be judged"
    stretches = periods({row.label: row.verdict for row in rows})
    if not stretches:
        unjudged = len(rows) - len(judged)
        return f"no bug in the {len(judged)} that were judged" + (f"; {unjudged} were not" if unjudged else "")
    adjacent = set(itertools.pairwise(row.label for row in rows))
    return "; again ".join(_ends(period, adjacent) for period in stretches)
