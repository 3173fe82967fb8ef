"""Where the bug came in and where it was fixed, from the verdicts on an ordered list."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.words import LaneVerdict

WRONG, RIGHT = LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED


@dataclass(frozen=True)
class Entry:
    """What the probe said of one release or commit; `seconds` is the wall time of its lane."""

    label: str
    date: str
    verdict: LaneVerdict
    figure: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def is_judged(self) -> bool:
        """Whether it is right or wrong; whatever else it is says nothing of the bug."""
        return self.verdict in (WRONG, RIGHT)


@dataclass(frozen=True)
class Period:
    """One stretch of judged rows with the bug, by their indices."""

    first: int  # the first wrong row
    last: int  # the last wrong row
    before: int | None  # the last right row before it; None where nothing before it is right
    after: int | None  # the first right row after it; None where nothing after it is right


def periods(rows: list[Entry]) -> list[Period]:
    """List the stretches with the bug; rows that could not be judged neither end nor begin one."""
    found: list[Period] = []
    right: int | None = None
    first: int | None = None
    last = 0
    for index, row in enumerate(rows):
        if row.verdict == WRONG:
            first, last = (index if first is None else first), index
        elif row.verdict == RIGHT:
            if first is not None:
                found.append(Period(first, last, right, index))
            right, first = index, None
    return found if first is None else [*found, Period(first, last, right, None)]


def _or(rows: list[Entry], between: range) -> str:
    """Name what lies between the last of one kind and the first of the other: each of them may be the one."""
    labels = [rows[index].label for index in between]
    if not labels:
        return ""
    span = labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"
    return f" (or {span}, not judged)"


def _unjudged(count: int, where: str) -> str:
    if count == 1:
        return f"the one {where} it that was tried could not be judged"
    return f"none of the {count} {where} it that were tried could be judged"


def _came(rows: list[Entry], period: Period) -> str:
    text = f"bug from {rows[period.first].label}"
    if period.before is not None:
        return text + _or(rows, range(period.before + 1, period.first))
    if period.first == 0:
        return f"{text} or earlier"
    return f"{text} or earlier ({_unjudged(period.first, 'before')})"


def _went(rows: list[Entry], period: Period) -> str:
    if period.after is not None:
        return f"fixed in {rows[period.after].label}" + _or(rows, range(period.last + 1, period.after))
    later = len(rows) - 1 - period.last
    tried = f" ({_unjudged(later, 'after')})" if later else ""
    return f"not fixed in {rows[period.last].label}{tried}"


def line(rows: list[Entry]) -> str:
    """Say in one line ``bug from A, fixed in B``, as exactly as the verdicts allow and no more."""
    judged = [row for row in rows if row.is_judged]
    if not judged:
        return f"nothing can be said: none of the {len(rows)} could be judged"
    found = periods(rows)
    if not found:
        unjudged = len(rows) - len(judged)
        return f"no bug in the {len(judged)} that were judged" + (f"; {unjudged} were not" if unjudged else "")
    return "; again ".join(f"{_came(rows, one)}, {_went(rows, one)}" for one in found)
