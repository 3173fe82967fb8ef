"""Which check refuses which wrong fix, and a cover: few checks that still refuse each wrong fix, each by two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table

from harness.core.terminal import rendered
from harness.mutate.campaign import Result

#: How many checks of a cover refuse each wrong fix, where as many do.
TIMES = 2


def cover(refused: Mapping[str, set[str]]) -> list[str]:
    """Choose checks so that each wrong fix is refused by `TIMES` of them, or by all that refuse it.

    Greedy, as for set cover: each next check refuses the most that is still wanted; of equals the first by name.
    """
    mutants = set().union(*refused.values())
    wanted = {mutant: min(TIMES, sum(mutant in names for names in refused.values())) for mutant in mutants}
    chosen: list[str] = []
    while any(wanted.values()):
        rest = sorted(refused.keys() - set(chosen))
        best = max(rest, key=lambda name: sum(wanted[mutant] > 0 for mutant in refused[name]))
        chosen.append(best)
        for mutant in refused[best]:
            wanted[mutant] = max(0, wanted[mutant] - 1)
    return chosen


def as_text(results: Iterable[Result]) -> str:
    """Write a table for each pack: its checks, what they refuse on any target, and which the cover needs."""
    packs: dict[str, dict[str, set[str]]] = {}
    for result in results:
        if result.strength is not None:
            refused = packs.setdefault(result.cell.pack.name, {})
            for mutant in result.strength.mutants:
                for name in mutant.by:
                    refused.setdefault(name, set()).add(mutant.name)
    parts: list[Table | str] = []
    for pack, refused in packs.items():
        needed = cover(refused)
        table = Table("check", "refuses", "alone", "cover", box=None, title=pack, title_justify="left")
        for name in [*needed, *sorted(refused.keys() - set(needed))]:
            others = set().union(*(names for other, names in refused.items() if other != name))
            alone = len(refused[name] - others)
            table.add_row(name, str(len(refused[name])), str(alone), "needed" if name in needed else "")
        parts += [table, f"{pack}: {len(needed)} of {len(refused)} checks refuse each wrong fix twice, where two do"]
    return rendered(parts)
