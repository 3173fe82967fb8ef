"""A few wrong fixes a night: of each pack those that were not run for longest, until all were, and then again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.core import files
from harness.core.errors import HarnessError
from harness.core.progress import Progress
from harness.mutate import fates, generated
from harness.mutate.campaign import Campaign, Order, Result
from harness.mutate.mutants import Mutant
from harness.mutate.state import State
from harness.receipt import strength
from harness.receipt.strength import Fate, MutantRecord
from harness.schedule.session import Session
from harness.verdict.cell import Cell

#: In the folder of the run folders: when each mutant was run, by pack and target.
RUNS_OF_MUTANTS = "mutants.json"


@dataclass(frozen=True)
class Night:
    """What a sweep showed of wrong fixes.

    Attributes:
        killed: how many of how many, by the name of the cell.
        notes: what needs attention: survivors, and those that said nothing.
        interrupted: by the user.

    """

    killed: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    interrupted: bool = False


def _read(path: Path) -> dict[str, dict[str, str]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return document if isinstance(document, dict) else {}
    except (OSError, ValueError):
        return {}


def _one_a_pack(cells: Iterable[Cell]) -> list[Cell]:
    """Choose the cell of each pack's pinned release that shows most: of the strongest evidence, then the first."""
    found: dict[str, Cell] = {}
    for cell in cells:
        if cell.evidence is None or cell.column or not cell.pack.patch.exists():
            continue
        best = found.get(cell.pack.name)
        if best is None or best.evidence is None or cell.evidence.rank < best.evidence.rank:
            found[cell.pack.name] = cell
    return list(found.values())


def _ran(one: MutantRecord) -> bool:
    return one.reason != fates.NOT_RUN


def run(session: Session, runs: Path, cells: list[Cell], wanted: int, progress: Progress) -> Night:
    """Run so many mutants of each pack, and note in `runs` that they were run.

    Args:
        session: of the sweep; what it has judged is not run again.
        runs: the folder of the run folders.
        cells: of the sweep.
        wanted: how many mutants a pack.
        progress: whom to tell.

    """
    known = _read(runs / RUNS_OF_MUTANTS)

    def choose(cell: Cell, own: list[Mutant], fix: generated.Fix) -> list[Mutant]:
        before, seed = known.get(cell.name, {}), cell.pack.definition.strength.seed
        written = {one.name: one for one in own}
        ranked = {one.name: one for one in generated.ranked(generated.candidates(fix, cell.stated.loads), seed)}
        maker, chosen = generated.Maker(fix), []
        for name in sorted([*written, *ranked], key=lambda name: before.get(name, "")):  # stable: in the sample's order
            made = written.get(name) or maker.make(ranked[name])
            chosen += [made] if made and not made.same else []
            if len(chosen) >= wanted:
                break
        return chosen

    quiet = replace(session, watch=None, repeat=1)  # a wrong fix may crash a kernel, which is no fault of the GPU
    campaign = Campaign(
        quiet,
        State(session.folder, resumed=False),
        Order(generated=wanted),
        lambda cell: f"runner.py mutate {cell.pack.name} --target {cell.target}",
        progress.begin,
        choose,
    )
    try:
        results = campaign.run(_one_a_pack(cells))
    except HarnessError as error:
        return Night(notes=(str(error),))
    if campaign.interrupted:
        return Night(interrupted=True)
    for result in results:
        ran = [one.name for one in result.strength.mutants if _ran(one)] if result.strength else []
        known.setdefault(result.cell.name, {}).update(dict.fromkeys(ran, session.folder.name))
    files.write_atomic(runs / RUNS_OF_MUTANTS, json.dumps(known, indent=1) + "\n")
    notes = tuple(note for result in results for note in _notes(result))
    return Night({one.cell.name: _killed(one) for one in results if one.strength is not None}, notes)


def _killed(result: Result) -> str:
    ran = [one for one in result.strength.mutants if _ran(one)] if result.strength else []
    count = strength.count(ran)
    return f"this run killed {count.killed} of {count.of}"


def _notes(result: Result) -> list[str]:
    said = {Fate.SURVIVED: "a wrong fix survived", Fate.UNJUDGED: "a wrong fix is unjudged"}
    return [f"{result.cell.name}: {said[one.fate]}: {one.name}" for one in result.open if _ran(one)]
