"""Which check refuses which wrong fix, and a cover: few checks that still refuse each wrong fix, each by two."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from harness.mutate.campaign import Result
from harness.receipt.figures import WIDTH
from harness.receipt.strength import Strength

#: How many checks of a cover refuse each wrong fix, where as many do.
TIMES = 2


@dataclass(frozen=True)
class Check:
    """What one check refuses."""

    name: str
    refuses: tuple[str, ...]  # names of wrong fixes
    alone: tuple[str, ...]  # those of them that no other check refuses
    is_in_cover: bool


def refused_by(strengths: Iterable[Strength]) -> dict[str, set[str]]:
    """Map each check to the wrong fixes that it refuses, on any of the targets."""
    found: dict[str, set[str]] = {}
    for one in strengths:
        for mutant in one.mutants:
            for name in mutant.by:
                found.setdefault(name, set()).add(mutant.name)
    return found


def cover(refused: Mapping[str, set[str]], times: int = TIMES) -> list[str]:
    """Choose checks so that each wrong fix is refused by `times` of them, or by all that refuse it.

    Greedy, as for set cover: each next check refuses the most that is still wanted; of equals the first by name.
    """
    mutants = set().union(*refused.values()) if refused else set()
    wanted = {mutant: min(times, sum(mutant in names for names in refused.values())) for mutant in mutants}
    chosen: list[str] = []
    while any(wanted.values()):
        rest = sorted(refused.keys() - set(chosen))
        best = max(rest, key=lambda name: sum(wanted[mutant] > 0 for mutant in refused[name]))
        chosen.append(best)
        for mutant in refused[best]:
            wanted[mutant] = max(0, wanted[mutant] - 1)
    return chosen


def checks(strengths: Iterable[Strength]) -> list[Check]:
    """Return what each check refuses, those of the cover first."""
    refused = refused_by(strengths)
    order = cover(refused)
    found = []
    for name in [*order, *sorted(refused.keys() - set(order))]:
        others = set().union(*(names for other, names in refused.items() if other != name))
        found.append(Check(name, tuple(sorted(refused[name])), tuple(sorted(refused[name] - others)), name in order))
    return found


def as_text(results: Iterable[Result]) -> str:
    """Write a table for each pack: its checks, what they refuse, and which the cover needs."""
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, highlight=False, markup=False)
    packs: dict[str, list[Strength]] = {}
    for one in results:
        if one.strength is not None:
            packs.setdefault(one.cell.pack.name, []).append(one.strength)
    for name, strengths in packs.items():
        found = checks(strengths)
        table = Table("check", "refuses", "alone", "cover", box=None, title=name, title_justify="left")
        for check in found:
            needed = "needed" if check.is_in_cover else ""
            table.add_row(check.name, str(len(check.refuses)), str(len(check.alone)), needed)
        console.print(table)
        needed_number = sum(check.is_in_cover for check in found)
        console.print(f"{name}: {needed_number} of {len(found)} checks refuse each wrong fix twice, where two do")
    return stream.getvalue()
