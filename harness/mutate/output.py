"""What ``runner.py mutate`` prints and keeps: the tables of fates and of checks, JSON, and the record in the pack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from harness.core import files
from harness.core.terminal import rendered
from harness.mutate.campaign import Result
from harness.receipt import receipt, strength
from harness.receipt.redaction import Scrubber
from harness.receipt.strength import Count, Fate, MutantRecord, Strength

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


def _shown(result: Result) -> Iterator[Table | str]:
    found = result.strength
    if found is None:
        yield f"{result.cell.name}: not judged: {result.problem}"
        return
    seed = "" if found.is_first_sight else f", seed {found.seed}"
    yield f"{found.pack} {found.target} ({found.evidence}){seed}"
    table = Table("fate", "mutant", "by", box=None)
    for one in sorted(found.mutants, key=lambda one: ([*Fate].index(one.fate), one.origin != "own")):
        table.add_row(one.fate, one.name if one.origin == "generated" else f"{one.name} ({one.origin})", _by(one))
    yield table
    checks = Counter(name for one in found.mutants for name in one.by)
    if checks:
        yield "killed by check: " + ", ".join(f"{name} {number}" for name, number in checks.most_common())
    for one in result.open:
        yield f"{one.fate}: {one.name}: {', '.join(str(path) for path in result.files.get(one.name, ()))}"
    for one in found.mutants:
        if one.listed and one.fate == Fate.KILLED:
            yield f"listed as equivalent, and killed: {one.name}: take it off mutants/equivalent.toml"
    yield line(found)


def _by(one: MutantRecord) -> str:
    said = ", ".join(one.by) or one.reason
    return f"refused by the runner's comparison alone: {one.refused}" if one.refused else said


def _counted(count: Count) -> str:
    return f"{count.killed} of {count.of}"


def line(found: Strength) -> str:
    """Write a record in one line."""
    whole = found.whole
    refused = sum(bool(one.refused) for one in found.mutants if one.fate == Fate.SURVIVED)
    numbers = [
        (whole.survived, "survived" + (f" the probe alone ({refused} refused by the comparison)" if refused else "")),
        (whole.unjudged, "unjudged"),
        (whole.equivalent, "equivalent"),
        (whole.elsewhere, strength.NOT_RUN_HERE),
    ]
    rest = "".join(f"; {number} {word}" for number, word in numbers if number)
    if found.is_first_sight:
        return f"unseen wrong fixes: killed {_counted(whole)}{rest}"
    return f"strength: killed {_counted(whole)} (own {_counted(found.own)}, generated {_counted(found.made)}){rest}"


def as_text(results: Iterable[Result]) -> str:
    """Write the tables, and why a pack was not judged."""
    return rendered(part for result in results for part in _shown(result))


def as_json(results: Iterable[Result]) -> str:
    """Write the results as one JSON document."""
    documents = [
        {
            "pack": result.cell.pack.name,
            "target": result.cell.target,
            "problem": result.problem,
            "open": [one.name for one in result.open],
            "strength": asdict(result.strength) if result.strength else None,
        }
        for result in results
    ]
    return receipt.to_json(documents)


def record(found: Strength, folder: Path, scrub: Scrubber) -> Path:
    """Write a record into a folder of receipts and return its path; PrivateTextError: a field looks private."""
    path = folder / found.name
    files.write_atomic(path, receipt.to_json(scrub.document(asdict(found), "strength")))
    return path


def matrix(results: Iterable[Result]) -> str:
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
