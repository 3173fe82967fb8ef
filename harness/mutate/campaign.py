"""A campaign: the mutants of packs and targets, through the one scheduler, and what became of each.

First both lanes of each pack itself: a probe that does not confirm the fix says nothing of wrong ones. Then the
mutants, in the patched lane alone. Last, one after the other, those whose lane said nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.core import files
from harness.core.errors import HarnessError
from harness.core.words import LaneName, Verdict
from harness.lane import script
from harness.lane.cell import Cell
from harness.mutate import fates, generated, mutants
from harness.mutate.mutants import Origin
from harness.pack.model import Pack
from harness.receipt import receipt, strength, wrong_fixes
from harness.receipt.receipt import FIRST_SIGHT
from harness.receipt.strength import Fate, MutantRecord, Strength
from harness.schedule import lanes
from harness.schedule.session import Session
from harness.upstream import tree
from harness.verdict.outcome import Outcome
from harness.verdict.pack_verdict import Judgement

#: A mutant's lane may take so many times the seconds of the fix's own lane, and so many seconds besides: that one may
#: have found its kernels compiled, and fewer lanes beside it.
LONGEST_FACTOR, LONGEST_BESIDES = 10.0, 60.0
#: Characters of an exception that a reason quotes.
MOST_SAID = 200
#: Verdicts on a pack itself that this host or the outside is to blame for; None: it cannot show the target.
NEUTRAL = {None, Verdict.UNSUPPORTED, Verdict.UNAVAILABLE}


@dataclass(frozen=True)
class Order:
    """What the command line asks for."""

    generated: int | None = None  # how many mutants are made of a pack's patch; None: as many as pack.toml says
    unseen: bool = False  # those of the packs' mutants/unseen/ alone
    matrix: bool = False  # a lane goes on after a check that fails

    def number_of(self, pack: Pack) -> int:
        """Return how many mutants are made of a pack's patch."""
        if self.unseen:
            return 0
        return pack.definition.strength.generated if self.generated is None else self.generated


@dataclass(frozen=True)
class Result:
    """What a pack's probe did with wrong fixes on one target."""

    cell: Cell
    strength: Strength | None  # None where nothing was judged
    problem: str = ""  # why nothing was, or not all of it
    verdict: Verdict | None = None  # on the pack itself
    #: of each mutant by its name: its patch, and its log where it has one
    files: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)

    @property
    def open(self) -> list[MutantRecord]:
        """The mutants that survived or are unjudged, and are not listed as equivalent."""
        found = self.strength.mutants if self.strength else ()
        return [one for one in found if one.fate in fates.OPEN]


def _timeout(right: Outcome, times: int) -> float:
    """Return the seconds that a mutant's lane may take: so many times the usual, and no more than is stated."""
    stated = right.cell.timeout or right.cell.stated.timeout_s
    usual = right.patched.seconds if right.patched else stated
    return min(stated, times * (LONGEST_FACTOR * usual + LONGEST_BESIDES))


@dataclass
class _Trial:
    """One mutant, while it is judged."""

    right: Outcome  # of the pack itself, whose own fix is right
    cell: Cell  # of its lane
    record: MutantRecord  # by now
    files: tuple[Path, ...]
    waits: bool  # for a lane


@dataclass(frozen=True)
class Campaign:
    """Judges mutants."""

    session: Session  # runs the lanes; its journal is kept
    folder: Path  # takes the patches
    order: Order

    def run(self, cells: list[Cell]) -> list[Result]:
        """Judge the mutants of cells. KeyboardInterrupt: the user stopped it."""
        for pack in {cell.pack.name: cell.pack for cell in cells}.values():
            mutants.listed(pack)  # what is wrong with them is said before anything runs
        results, confirmed = self._judged(cells)
        trials = [trial for right in confirmed for trial in self._trials(right)]
        self._judge(trials)
        for trial in trials:
            if trial.waits:
                cell, timeout = trial.cell, _timeout(trial.right, 2)
                trial.cell = replace(cell, alone=True, column=f"{cell.column}.alone", timeout=timeout)
        self._judge(trials)
        for right in confirmed:
            results[right.cell.name] = self._result(right, [trial for trial in trials if trial.right is right])
        return [results[cell.name] for cell in cells]

    def _lanes(self, cells: list[Cell]) -> dict[str, Outcome]:
        """Run the lanes of cells; return what came of them, by their names."""
        if not cells:
            return {}
        account = lanes.run(self.session, cells, receipts=False)
        if account.interrupted:
            raise KeyboardInterrupt
        return account.results

    def _judged(self, cells: list[Cell]) -> tuple[dict[str, Result], list[Outcome]]:
        """Run both lanes of each pack itself; return the results of those that say nothing, and what confirms."""
        results = {cell.name: Result(cell, None, why) for cell in cells if (why := _unmeasured(cell))}
        judged = [cell for cell in cells if cell.name not in results]
        outcomes = self._lanes(judged)
        confirmed = []
        for cell in judged:
            outcome = outcomes.get(cell.name) or Outcome(cell, Judgement(Verdict.ERROR, "it was not judged"))
            verdict, why = outcome.judgement.verdict, outcome.judgement.reason
            if verdict == Verdict.CONFIRMED:
                confirmed.append(outcome)
                continue
            problem = f"its own fix gives {verdict}, so that wrong ones say nothing"
            results[cell.name] = Result(cell, None, f"{problem}: {why}" if why else problem, verdict)
        return results, confirmed

    def _trials(self, right: Outcome) -> list[_Trial]:
        """Choose the mutants of a pack on a target, and write those that are made."""
        pack = right.cell.pack
        pristine = tree.materialize(self.session.cache, pack.definition.upstream, right.cell.source)
        fix = generated.fix_of(pack, pristine)
        made = generated.candidates(fix, right.cell.stated.loads)
        own = mutants.own(pack, Origin.UNSEEN if self.order.unseen else Origin.OWN)
        found = []
        for one in [*own, *generated.sample(fix, made, self.order.number_of(pack), pack.definition.strength.seed)]:
            mutant = generated.on_release(one, pack, pristine, fix)
            folder, path = self.folder / pack.name, mutant.path
            file = folder / "on_release" / f"{mutant.slug}.patch"  # takes fix.patch's place in its lane
            files.write_atomic(file, mutant.on_release)
            if mutant.origin == Origin.GENERATED:  # as it would stand in mutants/
                path = folder / f"{mutant.slug}.patch"
                files.write_atomic(path, mutant.patch)
            cell = replace(
                right.cell,
                lanes=(LaneName.PATCHED,),
                patch=file,
                is_wrong_fix=True,
                judges_all=self.order.matrix,
                column=mutant.slug,
                timeout=_timeout(right, 1),
            )
            waits = not mutant.same and not mutant.misfit
            found.append(_Trial(right, cell, mutant.unjudged, (path,), waits))
        return found

    def _judge(self, trials: list[_Trial]) -> None:
        """Run the lanes of the mutants that wait for one; a mutant whose lane said nothing waits for another."""
        waiting = [trial for trial in trials if trial.waits]
        outcomes = self._lanes([trial.cell for trial in waiting])
        for trial in waiting:
            cell = trial.cell
            outcome = outcomes.get(cell.name)
            end = next(iter(outcome.last), None) if outcome else None
            found = fates.of_lane(replace(trial.record, reason=""), trial.right.pristine, end)
            nothing = end is not None and fates.says_nothing(end.record)
            if outcome and end is None:
                found = replace(found, reason=outcome.judgement.reason)
            elif cell.alone and found.fate == Fate.UNJUDGED:
                found = replace(found, reason=f"{found.reason} (run twice, the second time alone)")
            if end is not None and end.log is not None:
                log = self.session.folder / end.log.file
                trial.files = (trial.files[0], log)
                said = script.last_exception(log.read_text("utf-8", errors="replace"))[:MOST_SAID]
                if nothing and found.fate == Fate.UNJUDGED and said not in found.reason:
                    found = replace(found, reason=f"{said}: {found.reason}")
            trial.record, trial.waits = found, nothing

    def _result(self, right: Outcome, trials: list[_Trial]) -> Result:
        cell, host, pack = right.cell, self.session.host, right.cell.pack
        listed = {one.name: one for one in mutants.listed(pack) if one.covers(cell.target)}
        records = tuple(fates.listed_as(trial.record, listed.get(trial.record.name)) for trial in trials)
        measured = Strength(
            schema=strength.SCHEMA,
            pack=pack.name,
            target=cell.target,
            evidence=cell.known_evidence,
            date=dt.datetime.now(dt.UTC).date().isoformat(),
            seed=pack.definition.strength.seed,
            generated=self.order.number_of(pack),
            own=strength.count(one for one in records if one.origin != Origin.GENERATED),
            made=strength.count(one for one in records if one.origin == Origin.GENERATED),
            probe=receipt.judged_by(pack),
            patch=receipt.hashed(pack.patch),
            upstream=pack.definition.upstream.sha256,
            python=host.python,
            torch=host.torch or "",
            triton=host.triton or "",
            gpu=next((gpu.name for gpu in right.gpus), ""),
            seconds=round(sum(one.seconds for one in records), 1),
            command=f"runner.py mutate {pack.name} --target {cell.target}",
            mutants=records,
        )
        return Result(cell, measured, "", Verdict.CONFIRMED, {trial.record.name: trial.files for trial in trials})


def _unmeasured(cell: Cell) -> str:
    """Say why no strength can be measured; empty where it can."""
    if cell.evidence is None:
        return cell.reason
    if not cell.is_listed:  # which files a fix must load there is not stated
        return "pack.toml does not list this target, and a strength is about one that it lists"
    if cell.is_stated and cell.stated.verdict != Verdict.CONFIRMED:
        return f"pack.toml expects {cell.stated.verdict}: no fix of it is right, so that none is wrong"
    return ""


def names(pack: Pack, fix: generated.Fix) -> set[str]:
    """Return the names of every mutant that a pack has: its own, the unseen, those that can be made on any target."""
    found = {one.name for origin in mutants.FOLDERS for one in mutants.own(pack, origin)}
    for target in pack.definition.targets.values():
        found |= {one.name for one in generated.candidates(fix, target.loads)}
    return found


def refuse_second_sight(cells: Iterable[Cell]) -> None:
    """Raise HarnessError where wrong fixes that are to be recorded as unseen are not: a first sight is had once."""
    for cell in cells:
        pack = cell.pack
        unseen = mutants.own(pack, Origin.UNSEEN)
        if not unseen:
            raise HarnessError(
                f"{pack.name}: no {wrong_fixes.UNSEEN}/*.patch. "
                "Next: let somebody who has not read the probe write some"
            )
        own = {sha256: f"mutants/{name}.patch" for name, sha256 in wrong_fixes.identities(pack).items()}
        said = {one.name: own[one.sha256] for one in unseen if one.sha256 in own}
        if before := strength.find(pack, cell.target, str(cell.evidence or ""), FIRST_SIGHT):
            pairs = strength.found_again(pack, before, wrong_fixes.UNSEEN)
            said |= {name: f"recorded on {before.date}" for _, name in pairs}
        if said:
            shown = ", ".join(f"{name} ({where})" for name, where in said.items())
            raise HarnessError(
                f"--record: {pack.name}/{wrong_fixes.UNSEEN}: the probe was shown {shown}. "
                "Next: --unseen without --record, or a set of others"
            )
