"""A campaign: the mutants of packs and targets, through the one scheduler, and what became of each.

First both lanes of each pack itself: a probe that does not confirm the fix says nothing of wrong ones. Then the
mutants, in the patched lane alone. Last, one after the other, those whose lane said nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.core import files
from harness.core.errors import HarnessError
from harness.core.words import LaneName, Verdict
from harness.lane import script
from harness.lane.record import LaneEnd, LaneRecord
from harness.mutate import fates, generated, mutants
from harness.mutate.mutants import Listed, Origin
from harness.mutate.state import State
from harness.pack.model import Pack
from harness.receipt import receipt, strength, wrong_fixes
from harness.receipt.receipt import FIRST_SIGHT, Hashed
from harness.receipt.strength import Fate, MutantRecord, Strength
from harness.schedule.session import Session
from harness.schedule.task import Estimates, tasks
from harness.upstream import tree
from harness.verdict.cell import Cell

#: A mutant's lane may take so many times the seconds of the fix's own lane, and so many seconds besides: that one may
#: have found its kernels compiled, and fewer lanes beside it.
LONGEST_FACTOR, LONGEST_BESIDES = 10.0, 60.0
#: A mutant that is not listed is expected to take this share of the fix's seconds, since a failed check ends its lane.
#: (Medians of killed lanes on H200s: 0.06 to 0.7 of them for nine packs, 1.4 and 2.7 times them for two.)
#: Those that are listed run to the end, so that they go first.
KILLED_SHARE = 0.5
#: Characters of an exception that a reason quotes.
MOST_SAID = 200
#: Verdicts on a pack itself that this host or the outside is to blame for; None: it cannot show the target.
NEUTRAL = {None, Verdict.UNSUPPORTED, Verdict.UNAVAILABLE}
#: Why nothing is recorded of a pack that was edited meanwhile.
CHANGED = "the probe or fix.patch changed while the wrong fixes were judged. Next: the same command again"


@dataclass(frozen=True)
class Order:
    """What the command line asks for."""

    generated: int | None = None  # how many mutants are made of a pack's patch; None: as many as pack.toml says
    unseen: bool = False  # those of the packs' mutants/unseen/ alone
    matrix: bool = False  # a lane goes on after a check that fails

    @property
    def makes_none(self) -> bool:
        """Whether no mutants are made, not even those that survived last time."""
        return self.unseen or self.generated == 0

    def number_of(self, pack: Pack) -> int:
        """Return how many mutants are made of a pack's patch."""
        if self.makes_none:
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


@dataclass
class _Trial:
    """One mutant, while it is judged."""

    unjudged: MutantRecord  # before any lane
    record: MutantRecord  # by now
    files: tuple[Path, ...]
    cell: Cell | None  # that a lane has to judge; None where none has to, or none any more


@dataclass
class _Subject:
    """One pack on one target, while its mutants are judged."""

    cell: Cell
    pristine: LaneRecord
    seconds: float
    gpu: str
    judged: tuple[Hashed, Hashed]
    trials: dict[str, _Trial] = field(default_factory=dict)  # by the names of the mutants
    first: tuple[str, ...] = ()  # of these

    def timeout(self, times: int) -> float:
        """Return the seconds that a lane may take: so many times the usual, and no more than is stated."""
        stated = self.cell.timeout or self.cell.stated.timeout_s
        return min(stated, times * (LONGEST_FACTOR * self.seconds + LONGEST_BESIDES))


@dataclass
class Campaign:
    """Judges mutants."""

    session: Session  # runs the lanes; its journal is kept
    state: State
    order: Order
    begin: Callable[[int, float | None], None]  # is told how many lanes follow, and their shortest time in seconds
    interrupted: bool = False  # by the user

    def run(self, cells: Iterable[Cell]) -> list[Result]:
        """Judge the mutants of cells; `interrupted` says whether the user stopped it, and then nothing is returned."""
        listed = list(cells)
        for pack in {cell.pack.name: cell.pack for cell in listed}.values():
            mutants.listed(pack)  # what is wrong with them is said before anything runs
        results, subjects = self._references(listed)
        for subject in subjects:
            self._choose(subject)
        self._judge(subjects)
        if self.interrupted:
            return []
        results |= {one.cell.name: self._result(one) for one in subjects}
        return [results[cell.name] for cell in listed]

    def _lanes(self, session: Session, cells: list[Cell]) -> dict[str, str]:
        """Run the lanes of cells; return why some could not be laid out, by their names."""
        if not cells:
            return {}
        wanted = session.tasks(cells)
        self.begin(sum(task.key not in session.journal for task in wanted), session.seconds_left(wanted))
        account = session.run(cells, receipts=False)
        self.interrupted = self.interrupted or account.interrupted
        return {name: failure.reason for name, failure in account.failed.items()}

    def _references(self, cells: list[Cell]) -> tuple[dict[str, Result], list[_Subject]]:
        """Run both lanes of each pack itself; return the results of those that say nothing, and the others."""
        results = {cell.name: Result(cell, None, cell.reason) for cell in cells if cell.evidence is None}
        for cell in cells:
            if cell.is_stated and cell.stated.verdict != Verdict.CONFIRMED:
                problem = f"pack.toml expects {cell.stated.verdict}: no fix of it is right, so that none is wrong"
                results[cell.name] = Result(cell, None, problem)
        judged = [cell for cell in cells if cell.name not in results]
        judged_by = {cell.name: _judged_by(cell.pack) for cell in judged}
        failed = self._lanes(self.session, judged)
        subjects = []
        for cell in judged if not self.interrupted else []:
            outcome = self.session.judge.judged(cell) if cell.name not in failed else None
            if outcome and outcome.judgement.verdict == Verdict.CONFIRMED and outcome.pristine and outcome.patched:
                gpu = next((gpu.name for gpu in outcome.last[-1].gpus), "")
                seconds = outcome.patched.seconds
                subjects.append(_Subject(cell, outcome.pristine, seconds, gpu, judged_by[cell.name]))
                continue
            verdict = outcome.judgement.verdict if outcome else Verdict.ERROR
            why = failed.get(cell.name) or (outcome.judgement.reason if outcome else "it was not judged")
            problem = f"its own fix gives {verdict}, so that wrong ones say nothing" + (f": {why}" if why else "")
            results[cell.name] = Result(cell, None, problem, verdict)
        return results, subjects

    def _choose(self, subject: _Subject) -> None:
        """Choose the mutants of a cell, write those that are made, and give a cell to each that is not the fix."""
        pack, target = subject.cell.pack, subject.cell.target
        known = strength.find(pack, target, str(subject.cell.evidence or ""))
        subject.first = tuple(one.name for one in known.mutants if one.fate in fates.OPEN) if known else ()
        pristine = tree.materialize(self.session.cache, pack.definition.upstream, subject.cell.source)
        fix = generated.fix_of(pack, pristine)
        made = generated.candidates(fix, subject.cell.stated.loads)
        first = () if self.order.makes_none else subject.first
        number, seed = self.order.number_of(pack), pack.definition.strength.seed
        own = mutants.own(pack, Origin.UNSEEN if self.order.unseen else Origin.OWN)
        for one in [*own, *generated.sample(fix, made, number, seed, first)]:
            mutant = generated.on_release(one, pack, pristine, fix)
            file, path = self.state.patch_on_release(pack.name, mutant.slug), mutant.path
            files.write_atomic(file, mutant.on_release)
            if mutant.origin == Origin.GENERATED:
                path = self.state.patch(pack.name, mutant.slug)
                files.write_atomic(path, mutant.patch)
            cell = replace(
                subject.cell,
                lanes=(LaneName.PATCHED,),
                patch=file,
                is_wrong_fix=True,
                judges_all=self.order.matrix,
                column=mutant.slug,
                timeout=subject.timeout(1),
            )
            needs_lane = not mutant.same and not mutant.misfit
            trial = _Trial(mutant.unjudged, mutant.unjudged, (path,), cell if needs_lane else None)
            subject.trials[mutant.name] = trial

    def _judge(self, subjects: list[_Subject]) -> None:
        """Run the lanes of mutants; then once more, each alone and with twice the time, those that said nothing."""
        urgent: list[str] = []
        seconds: dict[tuple[str, str, str], float] = {}
        for subject in subjects:
            listed = _listed(subject.cell)
            for name, trial in subject.trials.items():
                if trial.cell is not None:
                    share = 1.0 if name in listed else KILLED_SHARE
                    seconds[trial.cell.name, str(trial.cell.evidence), LaneName.PATCHED] = share * subject.seconds
                    urgent += [trial.cell.name] if name in subject.first else []
        self._run(subjects, Estimates(seconds, urgent))
        if self.interrupted:
            return
        for subject in subjects:
            for trial in subject.trials.values():
                cell, end = trial.cell, self._end(trial.cell) if trial.cell else None
                trial.cell = None
                if cell is not None and end is not None and fates.says_nothing(end.record):
                    column = f"{cell.column}.alone"
                    trial.cell = replace(cell, alone=True, column=column, timeout=subject.timeout(2))
        self._run(subjects, Estimates())

    def _run(self, subjects: list[_Subject], estimates: Estimates) -> None:
        waiting = [(one, trial, trial.cell) for one in subjects for trial in one.trials.values() if trial.cell]
        failed = self._lanes(replace(self.session, estimates=estimates), [cell for *_, cell in waiting])
        for subject, trial, cell in waiting:
            end = self._end(cell)
            found = fates.of_lane(trial.unjudged, subject.pristine, end)
            if cell.name in failed:
                found = replace(trial.unjudged, reason=failed[cell.name])
            elif cell.alone and found.fate == Fate.UNJUDGED:
                found = replace(found, reason=f"{found.reason} (run twice, the second time alone)")
            if end is not None and end.log is not None:
                log = self.session.folder / end.log.file
                trial.files = (trial.files[0], log)
                said = script.last_exception(log.read_text("utf-8", errors="replace"))[:MOST_SAID]
                if found.fate == Fate.UNJUDGED and fates.says_nothing(end.record) and said not in found.reason:
                    found = replace(found, reason=f"{said}: {found.reason}")
            trial.record = found

    def _end(self, cell: Cell) -> LaneEnd | None:
        """Return the end of a mutant's lane; None where it was not run."""
        return self.session.journal.read(tasks(cell, self.session.host, 1)[0].key)

    def _result(self, subject: _Subject) -> Result:
        cell, host = subject.cell, self.session.host
        pack = cell.pack
        if subject.judged != _judged_by(pack):  # lanes are found by what they ran: a record would name another probe
            return Result(cell, None, CHANGED, Verdict.CONFIRMED)
        listed = _listed(cell)
        trials = subject.trials.items()
        records = tuple(fates.listed_as(trial.record, listed.get(name)) for name, trial in trials)
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
            probe=subject.judged[0],
            patch=subject.judged[1],
            upstream=pack.definition.upstream.sha256,
            python=host.python,
            torch=host.torch or "",
            triton=host.triton or "",
            gpu=subject.gpu,
            seconds=round(sum(one.seconds for one in records), 1),
            command=f"runner.py mutate {pack.name} --target {cell.target}",
            mutants=records,
        )
        return Result(cell, measured, verdict=Verdict.CONFIRMED, files={name: trial.files for name, trial in trials})


def _listed(cell: Cell) -> dict[str, Listed]:
    """Map the names of the mutants that mutants/equivalent.toml lists for a cell's target to what it says of them."""
    return {one.name: one for one in mutants.listed(cell.pack) if one.covers(cell.target)}


def _judged_by(pack: Pack) -> tuple[Hashed, Hashed]:
    """Return the probe and the patch of a pack, as they are now."""
    return receipt.judged_by(pack), receipt.hashed(pack.patch)


def names(pack: Pack, fix: generated.Fix) -> set[str]:
    """Return the names of every mutant that a pack has: its own, the unseen, those that can be made on any target."""
    found = {one.name for origin in mutants.FOLDERS for one in mutants.own(pack, origin)}
    for target in pack.definition.targets.values():
        found |= {one.name for one in generated.candidates(fix, target.loads)}
    return found


def refuse(order: Order, packs: list[Pack]) -> None:
    """Raise HarnessError where the sample that was asked for is not the one that may be recorded."""
    for pack in packs:
        stated = pack.definition.strength
        if order.number_of(pack) != stated.generated:
            raise HarnessError(
                f"--record: {pack.name}/pack.toml states {stated.generated} generated mutants. "
                "Next: --record without --generated, or change [strength]"
            )


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
