"""The output of ``runner.py mutate``: the tables of fates and of checks, and JSON."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from rich.table import Table

from harness.core.terminal import render
from harness.mutate.campaign import Result
from harness.receipt import receipt
from harness.receipt.strength import Fate, MutantRecord, Origin, Strength

#: The number of checks of a cover that refuse each wrong fix, where so many do.
TIMES = 2
#: Of the JSON document.
SCHEMA = 1


def cover(refused: Mapping[str, set[str]]) -> list[str]:
    """Choose checks so that each wrong fix is refused by `TIMES` of them, or by all that refuse it.

    This is the greedy set cover: each next check refuses the most mutants that need one, the first by name of equals.
    """
    mutants = set().union(*refused.values())
    missing = {mutant: min(TIMES, sum(mutant in names for names in refused.values())) for mutant in mutants}
    chosen: list[str] = []
    while any(missing.values()):
        remaining = sorted(refused.keys() - set(chosen))
        best = max(remaining, key=lambda name: sum(missing[mutant] > 0 for mutant in refused[name]))
        chosen.append(best)
        for mutant in refused[best]:
            missing[mutant] = max(0, missing[mutant] - 1)
    return chosen


def _parts(result: Result) -> Iterator[Table | str]:
    strength = result.strength
    if strength is None:
        yield f"{result.cell.name}: not judged: {result.problem}"
        return
    seed = "" if strength.is_first_sight else f", seed {strength.seed}"
    yield f"{strength.pack} {strength.target} ({strength.evidence}){seed}"
    table = Table("fate", "mutant", "by", box=None)
    fates = [*Fate]
    for mutant in sorted(strength.mutants, key=lambda mutant: (fates.index(mutant.fate), mutant.origin != Origin.OWN)):
        origin = "" if mutant.origin == Origin.GENERATED else f" ({mutant.origin})"
        table.add_row(mutant.fate, f"{mutant.name}{origin}", _by(mutant))
    yield table
    for mutant in result.open:
        yield f"{mutant.fate}: {mutant.name}: {', '.join(str(path) for path in result.files.get(mutant.name, ()))}"
    for mutant in strength.mutants:
        if mutant.listed and mutant.fate == Fate.KILLED:
            yield f"listed as equivalent, and killed: {mutant.name}: take it off mutants/equivalent.toml"
    yield _summary(strength)


def _by(mutant: MutantRecord) -> str:
    reason = ", ".join(mutant.by) or mutant.reason
    return f"refused by the runner's comparison alone: {mutant.refused}" if mutant.refused else reason


def _summary(strength: Strength) -> str:
    total = strength.whole
    refused = sum(bool(mutant.refused) for mutant in strength.mutants if mutant.fate == Fate.SURVIVED)
    by_comparison = f" script and contract ({refused} refused by the comparison)" if refused else ""
    numbers = [
        (total.survived, f"survived{by_comparison}"),
        (total.unjudged, "unjudged"),
        (total.equivalent, "equivalent"),
        (total.elsewhere, "more in code that only another target runs"),
    ]
    remarks = "".join(f"; {number} {word}" for number, word in numbers if number)
    if strength.is_first_sight:
        return f"unseen wrong fixes: killed {total}{remarks}"
    return f"strength: killed {total} (own {strength.own}, generated {strength.made}){remarks}"


def as_text(results: Iterable[Result]) -> str:
    """Write the table of each result, or why it has none."""
    return render(part for result in results for part in _parts(result))


def as_json(results: Iterable[Result]) -> str:
    """Write the results as one JSON document."""
    documents = [
        {
            "pack": result.cell.pack.name,
            "target": result.cell.target,
            "problem": result.problem,
            "open": [mutant.name for mutant in result.open],
            "strength": asdict(result.strength) if result.strength else None,
        }
        for result in results
    ]
    return receipt.to_json({"schema": SCHEMA, "results": documents})


def matrix(results: Iterable[Result]) -> str:
    """Write a table for each pack: its checks, how many mutants each refuses, and which checks the cover needs."""
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
        table = Table("check", "refuses", "cover", box=None, title=pack, title_justify="left")
        for name in [*needed, *sorted(refused.keys() - set(needed))]:
            table.add_row(name, str(len(refused[name])), "needed" if name in needed else "")
        parts += [table, f"{pack}: {len(needed)} of {len(refused)} checks refuse each wrong fix twice, where two do"]
    return render(parts)
