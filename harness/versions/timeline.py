"""Where the bug came in and where it was fixed, from the verdicts on an ordered list."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.words import Evidence, LaneVerdict

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
class History:
    """What `runner.py versions --record` keeps of a target; `checks`: by which alone it judged, if not by all."""

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


def _ends(rows: list[Entry], period: Period) -> str:
    """Say where the bug came and went: ``or earlier`` where what lies before could not be judged, too."""
    came = f"bug from {rows[period.first].label}"
    came += "" if period.before is not None and period.before + 1 == period.first else " or earlier"
    if period.after is None:
        return f"{came}, not fixed in {rows[period.last].label}"
    return f"{came}, fixed in {rows[period.after].label}{'' if period.last + 1 == period.after else ' or earlier'}"


def line(rows: list[Entry]) -> str:
    """Say in one line ``bug from A, fixed in B``, as exactly as the verdicts allow and no more."""
    judged = [row for row in rows if row.is_judged]
    if not judged:
        return f"nothing can be said: none of the {len(rows)} could be judged"
    found = periods(rows)
    if not found:
        unjudged = len(rows) - len(judged)
        return f"no bug in the {len(judged)} that were judged" + (f"; {unjudged} were not" if unjudged else "")
    return "; again ".join(_ends(rows, one) for one in found)
