"""A campaign: the mutants of packs on targets are judged through the scheduler.

First both lanes of each pack run with its own fix: checks that do not confirm it tell nothing of wrong fixes. Then each
mutant runs in the patched lane. Mutants whose lane was inconclusive run once more, one at a time.
"""

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.core import UNJUDGED, HarnessError, LaneName, LaneVerdict, Verdict, files
from harness.lane import Cell, LaneEnd, LaneRecord
from harness.mutate import changes, generated, handwritten
from harness.mutate.handwritten import Listed
from harness.pack.model import Pack
from harness.receipt import receipt, strength
from harness.receipt.receipt import FIRST_SIGHT
from harness.receipt.strength import OPEN, Fate, MutantRecord, Origin, Strength
from harness.schedule import lanes
from harness.schedule.session import Session
from harness.upstream import tree
from harness.verdict import pack_verdict
from harness.verdict.pack_verdict import Judgement, Outcome

#: The time limit of a mutant's lane: a factor on the seconds of the fix's own lane, and seconds on top. That lane may
#: have found its kernels compiled, and fewer lanes beside it.
LONGEST_FACTOR, LONGEST_BESIDES = 10.0, 60.0
#: Verdicts on a pack that say nothing against it; None: this host cannot show the target.
NEUTRAL = UNJUDGED | {None}


@dataclass(frozen=True)
class Order:
    """The options of the command line."""

    generated: int | None = None  # how many mutants are generated of a pack's patch; None: as pack.toml states
    unseen: bool = False  # only those in mutants/unseen/
    matrix: bool = False  # a lane goes on after a failed check

    def number_of(self, pack: Pack) -> int:
        """Return how many mutants are generated of a pack's patch."""
        if self.unseen:
            return 0
        return pack.definition.strength.generated if self.generated is None else self.generated


@dataclass(frozen=True)
class Result:
    """The strength of a pack on one target."""

    cell: Cell
    strength: Strength | None  # None where no mutant was judged
    problem: str = ""  # why no mutant was judged, or empty
    verdict: Verdict | None = None  # on the pack with its own fix
    #: the patch of each mutant by its name, and its log where it has one
    files: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)

    @property
    def open(self) -> list[MutantRecord]:
        """The mutants that survived or are unjudged, and are not listed as equivalent."""
        records = self.strength.mutants if self.strength else ()
        return [record for record in records if record.fate in OPEN]


def _timeout(reference: Outcome, times: int) -> float:
    """Return the time limit of a mutant's lane: `times` the usual one, and at most that of the pack."""
    limit = reference.cell.timeout or reference.cell.stated.timeout_s
    usual = reference.patched.seconds if reference.patched else limit
    return min(limit, times * (LONGEST_FACTOR * usual + LONGEST_BESIDES))


@dataclass
class _Trial:
    reference: Outcome  # of the pack with its own fix
    cell: Cell
    record: MutantRecord  # so far
    files: tuple[Path, ...]
    is_waiting: bool  # for its lane


@dataclass(frozen=True)
class Campaign:
    """Judges mutants."""

    session: Session
    folder: Path  # of the patches
    order: Order

    def run(self, cells: list[Cell]) -> list[Result]:
        """Judge the mutants of cells. KeyboardInterrupt: the user interrupted."""
        results = {cell.name: Result(cell, None, reason) for cell in cells if (reason := _unmeasured(cell))}
        references = self._lanes([cell for cell in cells if cell.name not in results])
        results |= {name: _refused(reference) for name, reference in references.items()}
        confirmed = [reference for name, reference in references.items() if not results[name].problem]
        trials = [trial for reference in confirmed for trial in self._trials(reference)]
        self._judge(trials)
        for trial in trials:
            if trial.is_waiting:
                cell, timeout = trial.cell, _timeout(trial.reference, 2)
                trial.cell = replace(cell, alone=True, column=f"{cell.column}.alone", timeout=timeout)
        self._judge(trials)
        for reference in confirmed:
            own_trials = [trial for trial in trials if trial.reference is reference]
            results[reference.cell.name] = self._result(reference, own_trials)
        return [results[cell.name] for cell in cells]

    def _lanes(self, cells: list[Cell]) -> dict[str, Outcome]:
        if not cells:
            return {}
        account = lanes.run(self.session, cells, receipts=False)
        if account.interrupted:
            raise KeyboardInterrupt("the same command goes on from here")
        unjudged = {cell.name: Outcome(cell, Judgement(Verdict.ERROR, "it was not judged")) for cell in cells}
        return unjudged | account.results

    def _trials(self, reference: Outcome) -> list[_Trial]:
        """Choose the mutants of a pack on a target, and write their patches."""
        pack, trials = reference.cell.pack, []
        pristine = tree.materialize(self.session.cache, pack.definition.upstream, reference.cell.source)
        fix = generated.fix_of(pack, pristine)
        candidates, seed = generated.candidates(fix, reference.cell.stated.loads), pack.definition.strength.seed
        origin = Origin.UNSEEN if self.order.unseen else Origin.OWN
        made = generated.sample(fix, candidates, self.order.number_of(pack), seed)
        for mutant in [*strength.handwritten(pack, origin), *made]:
            folder, path, text = self.folder / pack.name, mutant.path, mutant.release_patch
            fate, reason = Fate.EQUIVALENT if mutant.equivalence else Fate.UNJUDGED, mutant.equivalence
            if mutant.origin == Origin.GENERATED:  # in the form that mutants/ takes
                path = folder / f"{mutant.slug}.patch"
                files.write_atomic(path, mutant.patch)
            else:
                try:
                    effect = generated.effect(mutant, pack, pristine, fix)
                    text = changes.format_patch(f"{mutant.why}\n", effect.old, effect.new)
                except ValueError as error:
                    reason = f"its patch does not apply: {error}"
            file = folder / "on_release" / f"{mutant.slug}.patch"
            files.write_atomic(file, text)
            cell = replace(
                reference.cell,
                lanes=(LaneName.PATCHED,),
                patch=file,
                is_wrong_fix=True,
                judges_all=self.order.matrix,
                column=mutant.slug,
                timeout=_timeout(reference, 1),
            )
            words = (mutant.name, mutant.origin, mutant.operator, mutant.why, mutant.sha256)
            record = MutantRecord(*words, fate, reason=reason)
            trials.append(_Trial(reference, cell, record, (path,), is_waiting=not reason))
        return trials

    def _judge(self, trials: list[_Trial]) -> None:
        """Run the lanes of the waiting mutants. A mutant whose lane was inconclusive waits for another."""
        waiting = [trial for trial in trials if trial.is_waiting]
        outcomes = self._lanes([trial.cell for trial in waiting])
        for trial in waiting:
            outcome, record = outcomes[trial.cell.name], trial.record
            trial.record, trial.is_waiting = replace(record, reason=outcome.judgement.reason), False
            for end in outcome.last:
                record = fate_of_lane(replace(record, reason=""), trial.reference.pristine, end)
                if trial.cell.alone and record.fate == Fate.UNJUDGED:
                    record = replace(record, reason=f"{record.reason} (run twice, the second time alone)")
                if end.log is not None:
                    trial.files = (trial.files[0], self.session.folder / end.log.file)
                # A check that failed before the error has killed it.
                trial.record, trial.is_waiting = record, record.fate == Fate.UNJUDGED and is_inconclusive(end.record)

    def _result(self, reference: Outcome, trials: list[_Trial]) -> Result:
        cell, host, pack = reference.cell, self.session.host, reference.cell.pack
        exemptions = {entry.name: entry for entry in handwritten.exemptions(pack) if entry.covers(cell.target)}
        records = tuple(apply_exemption(trial.record, exemptions.get(trial.record.name)) for trial in trials)
        own, made = strength.counts(records)
        measurement = Strength(
            schema=strength.SCHEMA,
            pack=pack.name,
            target=cell.target,
            evidence=cell.known_evidence,
            date=dt.datetime.now(dt.UTC).date().isoformat(),
            seed=pack.definition.strength.seed,
            generated=self.order.number_of(pack),
            own=own,
            made=made,
            probe=receipt.judged_by(pack),
            patch=receipt.hashed(pack.patch),
            upstream=pack.definition.upstream.sha256,
            python=host.python,
            torch=host.torch,
            triton=host.triton,
            gpu=next((gpu.name for gpu in reference.gpus), ""),
            seconds=round(sum(record.seconds for record in records), 1),
            command=f"runner.py mutate {pack.name} --target {cell.target}",
            mutants=records,
        )
        return Result(cell, measurement, "", Verdict.CONFIRMED, {trial.record.name: trial.files for trial in trials})


def is_inconclusive(record: LaneRecord | None) -> bool:
    """Whether a lane runs again, alone: the host may be to blame for a crash, a time-out, or a rank that hangs."""
    return record is not None and record.verdict == LaneVerdict.ERROR


def fate_of_lane(mutant: MutantRecord, pristine: LaneRecord | None, end: LaneEnd) -> MutantRecord:
    """Judge a mutant by its lane: a failed check kills it, and so does UNSUPPORTED, since the pristine tree was judged.

    A maintainer runs script and contract alone. A mutant that only the comparison of the two lanes refuses has
    therefore survived, and `refused` says so.
    """
    record = end.record
    if record is None:
        return replace(mutant, fate=Fate.UNJUDGED, reason=f"its patch does not apply: {end.stale}")
    mutant = replace(mutant, seconds=round(record.seconds, 3))
    failed = tuple(check.name for check in record.checks if check.ok is False)
    if not failed and record.script.startswith(LaneVerdict.BUG_REPRODUCED):
        return replace(mutant, fate=Fate.KILLED, by=("reproduce.py",))
    if record.verdict in (LaneVerdict.BUG_REPRODUCED, LaneVerdict.CONTROL_FAILED, LaneVerdict.FIX_INCOMPLETE):
        return replace(mutant, fate=Fate.KILLED, by=failed)
    if record.verdict == LaneVerdict.UNSUPPORTED:
        reason = f"UNSUPPORTED, which the unpatched tree is not: {record.reason}"
        return replace(mutant, fate=Fate.KILLED, reason=reason)
    if record.verdict == LaneVerdict.ERROR:
        return replace(mutant, fate=Fate.UNJUDGED, reason=record.reason)
    judgement = pack_verdict.judge_lanes(pristine, record)
    refused = "" if judgement.verdict == Verdict.CONFIRMED else f"{judgement.verdict}: {judgement.reason}"
    return replace(mutant, fate=Fate.SURVIVED, refused=refused)


def apply_exemption(record: MutantRecord, exemption: Listed | None) -> MutantRecord:
    """Note that mutants/equivalent.toml lists a mutant, and take its fate and reason unless the mutant was killed."""
    if exemption is None:
        return record
    if record.fate in OPEN:
        record = replace(record, fate=exemption.fate, reason=exemption.reason)
    return replace(record, listed=True)


def _refused(reference: Outcome) -> Result:
    """Say why the lanes of a pack with its own fix tell nothing of wrong fixes, if so."""
    verdict, reason = reference.judgement.verdict, reference.judgement.reason
    problem = f"its own fix gives {verdict}, so that wrong ones say nothing{f': {reason}' if reason else ''}"
    return Result(reference.cell, None, "" if verdict == Verdict.CONFIRMED else problem, verdict)


def _unmeasured(cell: Cell) -> str:
    """Say why no strength can be measured, if so."""
    if cell.evidence is None:
        return cell.reason
    if not cell.is_listed:  # the files that a fix must load there are not stated
        return "pack.toml does not list this target, and a strength is about one that it lists"
    if not cell.pack.definition.has_patch:
        return f"pack.toml expects {Verdict.REPRODUCED}: no fix of it is right, so that none is wrong"
    return ""


def refuse_unreadable(packs: Iterable[Pack]) -> None:
    """Raise HarnessError for a mutants/equivalent.toml that cannot be read, before a lane runs."""
    for pack in packs:
        handwritten.exemptions(pack)


def refuse_second_sight(cells: Iterable[Cell]) -> None:
    """Raise HarnessError where a pack has no unseen wrong fix to record, or its checks have met one already."""
    for cell in cells:
        pack, folder = cell.pack, strength.FOLDERS[Origin.UNSEEN]
        unseen = strength.identities(pack, Origin.UNSEEN)
        if not unseen:
            step = "Next: let somebody who has not read the contract write some"
            raise HarnessError(f"{pack.name}: no {folder}/*.patch. {step}")
        own = {sha256: f"mutants/{name}.patch" for name, sha256 in strength.identities(pack).items()}
        places = {name: own[sha256] for name, sha256 in unseen.items() if sha256 in own}
        if recorded := strength.find(pack, cell.target, str(cell.evidence or ""), FIRST_SIGHT):
            pairs = strength.match_names(pack, recorded, Origin.UNSEEN)
            places |= {name: f"recorded on {recorded.date}" for _, name in pairs}
        if places:
            listing = ", ".join(f"{name} ({place})" for name, place in places.items())
            step = "Next: --unseen without --record, a set of others, or the packs that are left"
            raise HarnessError(f"--record: {pack.name}/{folder}: the pack was shown {listing}. {step}")
