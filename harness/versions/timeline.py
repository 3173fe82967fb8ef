"""Where the bug came in and where it was fixed, from the verdicts on releases in their order."""

from __future__ import annotations

from collections.abc import Sequence
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
    """A stretch of rows with the bug, by their indices."""

    first: int  # the first wrong row
    last: int  # the last wrong row
    before: int | None  # the last right row before it, or None
    after: int | None  # the first right row after it, or None


def periods(verdicts: Sequence[LaneVerdict]) -> list[Period]:
    """List the stretches with the bug. A row that could not be judged neither begins nor ends a stretch."""
    stretches: list[Period] = []
    last_right: int | None = None
    first_wrong: int | None = None
    last_wrong = 0
    for index, verdict in enumerate(verdicts):
        if verdict == WRONG:
            first_wrong, last_wrong = (index if first_wrong is None else first_wrong), index
        elif verdict == RIGHT:
            if first_wrong is not None:
                stretches.append(Period(first_wrong, last_wrong, last_right, index))
            last_right, first_wrong = index, None
    return stretches if first_wrong is None else [*stretches, Period(first_wrong, last_wrong, last_right, None)]


def _ends(rows: Sequence[Entry], period: Period) -> str:
    """Say where the bug came and went, ``or earlier`` where the row before was not judged."""
    came = f"bug from {rows[period.first].label}"
    came += "" if period.before is not None and period.before + 1 == period.first else " or earlier"
    if period.after is None:
        return f"{came}, not fixed in {rows[period.last].label}"
    return f"{came}, fixed in {rows[period.after].label}{'' if period.last + 1 == period.after else ' or earlier'}"


def line(rows: Sequence[Entry]) -> str:
    """Say in one line where the bug came and went, such as ``bug from A, fixed in B``."""
    judged = [row for row in rows if row.is_judged]
    if not judged:
        return f"nothing can be said: none of the {len(rows)} could be judged"
    stretches = periods([row.verdict for row in rows])
    if not stretches:
        unjudged = len(rows) - len(judged)
        return f"no bug in the {len(judged)} that were judged" + (f"; {unjudged} were not" if unjudged else "")
    return "; again ".join(_ends(rows, period) for period in stretches)
