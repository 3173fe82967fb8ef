"""What a report says of a verdict's strength: the wrong fixes that the probe refused, from the record of `mutate`."""

from __future__ import annotations

from dataclasses import dataclass

from harness.pack import judges
from harness.pack.model import Pack
from harness.receipt import strength

NOT_MEASURED, NO_PATCH = "not measured", "no patch"
#: What a reader of a report can see for himself, and a bundle shows: its own wrong fixes are no part of a bundle.
SEEN = {judges.CHANGED, "the patch changed"}


@dataclass(frozen=True)
class Strength:
    """How many wrong fixes were killed, of how many that the target can judge; `stale`: of another probe or patch."""

    killed: int
    of: int
    elsewhere: int
    date: str
    stale: bool

    def __str__(self) -> str:
        more = f" (+{self.elsewhere} elsewhere)" if self.elsewhere else ""
        return f"{self.killed}/{self.of}{more}, {self.date}" + (" STALE" if self.stale else "")


def find(pack: Pack, target: str, evidence: str) -> Strength | None:
    """Return the strength of a pack's verdict on a target, seen in that way; None where nobody measured it."""
    found = strength.find(pack, target, evidence)
    if found is None:
        return None
    stale = bool(SEEN.intersection(strength.stale(pack, found)))
    return Strength(found.whole.killed, found.whole.of, found.whole.elsewhere, found.date, stale)


def first_sight(pack: Pack, target: str, evidence: str) -> str:
    """Return ``7/10 at first sight``: of wrong fixes that the probe had not met; empty where there are none."""
    found = strength.at_first_sight(pack, target, evidence)
    if found is None:
        return ""
    return f"{found.whole.killed}/{found.whole.of} at first sight{strength.in_another_way(found, evidence)}"


def nothing(pack: Pack) -> str:
    """Say why there is no strength: it was not measured, or the pack has no patch that a wrong one could stand for."""
    return NOT_MEASURED if pack.definition.has_patch else NO_PATCH
