"""The verdict on a pack, from its two lanes: the outcome of a cell, and whether it is what pack.toml expects."""

import fnmatch
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.core.errors import HarnessError, NoRoomError, UnavailableError, UnreachableError, UnsupportedHereError
from harness.core.words import BITWISE_IDENTICAL, UNJUDGED, Evidence, Exit, LaneName, LaneVerdict, Role, Verdict
from harness.host.host import Gpu
from harness.lane import BOTH_LANES, Cell, LaneEnd, LaneRecord, pack_lanes
from harness.pack.requirements import DependencySet

#: The verdicts of a pristine lane that decide alone, whatever the patched lane shows.
ALONE = {
    LaneVerdict.FIX_VALIDATED: Verdict.FIXED_UPSTREAM,
    LaneVerdict.CONTROL_FAILED: Verdict.CONTROL_FAILED,
    LaneVerdict.FIX_INCOMPLETE: Verdict.FIX_INCOMPLETE,
    LaneVerdict.UNSUPPORTED: Verdict.UNSUPPORTED,
    LaneVerdict.ERROR: Verdict.ERROR,
}
#: What the verdict of the patched lane means where the pristine lane reproduced the bug.
PATCHED = {
    LaneVerdict.FIX_VALIDATED: Verdict.CONFIRMED,
    LaneVerdict.BUG_REPRODUCED: Verdict.FIX_INEFFECTIVE,
    LaneVerdict.FIX_INCOMPLETE: Verdict.FIX_INCOMPLETE,
    LaneVerdict.CONTROL_FAILED: Verdict.PATCH_BREAKS,
    LaneVerdict.UNSUPPORTED: Verdict.PATCH_BREAKS,
}

#: What the verdict on a pack says about the tree without the patch. Other verdicts say nothing about the bug.
PRISTINE: dict[str, LaneVerdict] = {
    Verdict.CONFIRMED: LaneVerdict.BUG_REPRODUCED,
    Verdict.REPRODUCED: LaneVerdict.BUG_REPRODUCED,
    Verdict.FIX_INEFFECTIVE: LaneVerdict.BUG_REPRODUCED,
    Verdict.PATCH_BREAKS: LaneVerdict.BUG_REPRODUCED,
    Verdict.PATCH_STALE: LaneVerdict.BUG_REPRODUCED,
    Verdict.FIXED_UPSTREAM: LaneVerdict.FIX_VALIDATED,
}
#: The verdict that one lane alone must give where both lanes must give CONFIRMED.
HALF = {LaneName.PRISTINE: Verdict.REPRODUCED, LaneName.PATCHED: Verdict.VALIDATED}


@dataclass(frozen=True)
class Judgement:
    """A pack's verdict, its reason, and the claims that both lanes support."""

    verdict: Verdict
    reason: str = ""
    claims: tuple[str, ...] = ()


def differing_outputs(pristine: LaneRecord, patched: LaneRecord) -> list[str]:
    """Name the outputs that must match and differ, or that one lane lacks."""
    pristine_outputs = {line for line in pristine.outputs if line.must_match}
    patched_outputs = {line for line in patched.outputs if line.must_match}
    return sorted({line.name for line in pristine_outputs ^ patched_outputs})


def _defect_results(record: LaneRecord) -> dict[str, bool]:
    return {check.name: check.ok for check in record.checks if check.role == Role.DEFECT and check.ok is not None}


def matching_names(names: Iterable[str], about: tuple[str, ...]) -> set[str]:
    """Return the names that match one of the globs in `about`."""
    return {name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in about)}


def _judge_asked_checks(pristine: LaneRecord, patched: LaneRecord, about: tuple[str, ...]) -> Judgement:
    """Say whether a patch repairs the defect checks in `about`, and makes no other one wrong.

    Each of them must be wrong without the patch and right with it.
    """
    before, after = _defect_results(pristine), _defect_results(patched)
    requested_names = matching_names(before, about)
    if not requested_names:
        return Judgement(Verdict.ERROR, f"no defect check that was judged matches {', '.join(about)}")
    broken_names = {name for name, is_right in before.items() if is_right and not after.get(name)}
    problems = (
        (Verdict.ERROR, "right without the patch already", {name for name in requested_names if before[name]}),
        (Verdict.ERROR, "not judged in the patched lane", before.keys() - after.keys()),
        (Verdict.PATCH_BREAKS, "right without the patch, wrong with it", broken_names),
        (Verdict.FIX_INEFFECTIVE, "still wrong", {name for name in requested_names if not after.get(name)}),
    )
    judgements = (
        Judgement(verdict, f"{reason}: {', '.join(sorted(names))}") for verdict, reason, names in problems if names
    )
    return next(judgements, Judgement(Verdict.CONFIRMED))


def check_differences(pristine: LaneRecord, patched: LaneRecord, about: tuple[str, ...] = ()) -> list[str]:
    """Say which checks of the pristine lane the patched lane did not make, or made as something else.

    The patched lane must judge every check that the pristine lane judged, in the same role. A wrong check must become
    right, unless `about` does not name it. Otherwise a contract could drop the defect that a patch does not repair.
    """
    patched_checks, problems = {line.name: line for line in patched.checks}, []
    for before in pristine.checks:
        after = patched_checks.get(before.name)
        if after is None:
            problems.append(f"{before.name} is gone")
        elif after.role != before.role:
            problems.append(f"{before.name} was a {before.role} and is a {after.role}")
        elif before.ok is not None and after.ok is None:
            problems.append(f"{before.name} was judged and is not")
        elif before.ok is False and after.ok is not True and (not about or matching_names([before.name], about)):
            problems.append(f"{before.name} is wrong in both lanes")
    return problems


def _judge_both_lanes(pristine: LaneRecord, patched: LaneRecord, about: tuple[str, ...] = ()) -> Judgement:
    """Judge a pack whose pristine lane reproduced the bug and whose patched lane ran."""
    if patched.verdict not in PATCHED:
        return Judgement(Verdict.ERROR, f"patched lane: {patched.verdict}: {patched.reason}")
    verdict, reason = PATCHED[patched.verdict], patched.reason
    if about and verdict in (Verdict.CONFIRMED, Verdict.FIX_INEFFECTIVE, Verdict.FIX_INCOMPLETE):
        judgement = _judge_asked_checks(pristine, patched, about)
        verdict, reason = judgement.verdict, judgement.reason
    if verdict != Verdict.CONFIRMED:
        return Judgement(verdict, reason)
    differences = check_differences(pristine, patched, about)
    if differences:
        return Judgement(Verdict.ERROR, f"the lanes made other checks: {'; '.join(differences)}")
    outputs = differing_outputs(pristine, patched)
    if outputs:
        return Judgement(Verdict.PATCH_BREAKS, f"outputs differ from the unpatched lane's: {', '.join(outputs)}")
    has_matching_output = any(line.must_match for line in patched.outputs)
    claims = (*patched.claims, *([BITWISE_IDENTICAL] if has_matching_output else []))
    return Judgement(verdict, "", claims)


def judge_lanes(
    pristine: LaneRecord | None, patched: LaneRecord | None, stale_reason: str = "", about: tuple[str, ...] = ()
) -> Judgement:
    """Judge a pack by its lanes; None stands for a lane that was not requested, or had no reason to run.

    `stale_reason` says why the patch does not apply cleanly. With `about` the verdict is on the defect checks that it
    names: others may stay wrong.
    """
    if pristine is not None and pristine.verdict in ALONE:
        return Judgement(ALONE[pristine.verdict], pristine.reason)
    if stale_reason:
        return Judgement(Verdict.PATCH_STALE, stale_reason)
    if patched is None:
        claims = pristine.claims if pristine else ()
        return Judgement(Verdict.REPRODUCED, pristine.reason if pristine else "", claims)
    if pristine is not None:
        return _judge_both_lanes(pristine, patched, about)
    if patched.verdict == LaneVerdict.FIX_VALIDATED:
        return Judgement(Verdict.VALIDATED, patched.reason, patched.claims)
    verdicts = {**ALONE, **PATCHED, LaneVerdict.UNSUPPORTED: Verdict.UNSUPPORTED}
    return Judgement(verdicts[patched.verdict], patched.reason)


def judge_runs(runs: Sequence[tuple[LaneEnd, ...]], about: tuple[str, ...] = ()) -> tuple[Judgement, int]:
    """Judge a pack by the ends of its lanes in each run, and count the runs that agree.

    Runs that differ give ERROR, and the reason has the counts.
    """
    judgements = []
    for run in runs:
        records = {end.lane: end.record for end in run}
        stale_reason = "".join(end.stale for end in run)
        judgements.append(
            judge_lanes(records.get(LaneName.PRISTINE), records.get(LaneName.PATCHED), stale_reason, about)
        )
    counts = Counter(str(judgement.verdict) for judgement in judgements)
    if len(counts) == 1:
        common_claims = set.intersection(*(set(judgement.claims) for judgement in judgements))
        last = judgements[-1]
        return replace(last, claims=tuple(claim for claim in last.claims if claim in common_claims)), len(judgements)
    text = ", ".join(f"{word} {count}/{len(judgements)}" for word, count in sorted(counts.items()))
    return Judgement(Verdict.ERROR, f"the runs differ: {text}"), max(counts.values())


@dataclass(frozen=True)
class Outcome:
    """What one cell showed: the result of a pack on a target."""

    cell: Cell
    judgement: Judgement
    #: the ends of the lanes in each whole repetition; empty where no lane ran
    runs: tuple[tuple[LaneEnd, ...], ...] = ()
    agreeing: int = 1  # how many of the runs gave the verdict
    dependency_set: DependencySet | None = None  # what the lanes imported; None where no lane ran
    receipt: Path | None = None  # the receipt in the run folder; None where none was written
    #: why no receipt could be written; where no lane ran, what the call names and does not exist
    problem: str = ""

    @property
    def last(self) -> tuple[LaneEnd, ...]:
        return self.runs[-1] if self.runs else ()

    @property
    def lanes(self) -> dict[LaneName, LaneRecord]:
        """What each lane that ran showed in the last run."""
        return {end.lane: end.record for end in self.last if end.record is not None}

    @property
    def pristine(self) -> LaneRecord | None:
        return self.lanes.get(LaneName.PRISTINE)

    @property
    def patched(self) -> LaneRecord | None:
        return self.lanes.get(LaneName.PATCHED)

    @property
    def version(self) -> str:
        return self.last[0].version if self.last else ""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that the lanes ran on; empty for evidence that needs none."""
        return self.last[-1].gpus if self.last and self.cell.evidence == Evidence.EXECUTED else ()

    @property
    def seconds(self) -> float:
        """The seconds of all lanes, added up."""
        return sum(end.seconds for run in self.runs for end in run)

    @property
    def ranks(self) -> int:
        """The ranks of the largest group that the contract starts."""
        return self.cell.stated.ranks_on(len(self.gpus))

    def ends(self, lane: LaneName) -> list[LaneEnd]:
        return [end for run in self.runs for end in run if end.lane == lane]

    @property
    def belongs_to_pack(self) -> bool:
        """Whether the receipt is one of the pack's own: pack.toml states the cell, and all lanes were requested."""
        return self.cell.is_stated and self.cell.lanes == pack_lanes(self.cell.pack)

    @property
    def deviation(self) -> str:
        """How the outcome deviates from pack.toml; empty where it does not.

        On a tree or dependency set that pack.toml does not state, only ERROR and CONTROL_FAILED deviate.
        """
        verdict, cell = self.judgement.verdict, self.cell
        if verdict == Verdict.ERROR:
            return self.judgement.reason
        if verdict in UNJUDGED and not self.lanes:
            return ""
        if cell.about and cell.lanes == BOTH_LANES:
            return "" if verdict == Verdict.CONFIRMED else f"{Verdict.CONFIRMED} was expected"
        if not cell.is_stated:
            return "controls are wrong" if verdict == Verdict.CONTROL_FAILED else ""
        expected = cell.pack.definition.expected if self.belongs_to_pack else HALF[cell.lanes[0]]
        if verdict != expected:
            return f"{expected} was expected"
        claims = cell.stated.claims_of(cell.evidence) if self.belongs_to_pack else ()
        missing_claims = [claim for claim in claims if claim not in self.judgement.claims]
        return f"missing claims: {', '.join(missing_claims)}" if missing_claims else ""


def outcome_of_error(error: BaseException, cell: Cell) -> Outcome:
    """Return the outcome of a cell that an error ended; a fault of the harness is printed whole on standard error."""
    is_outside = isinstance(error, UnavailableError) and not isinstance(error, NoRoomError) and cell.may_be_unavailable
    if isinstance(error, UnsupportedHereError):
        verdict = Verdict.UNSUPPORTED
    elif is_outside or (isinstance(error, UnreachableError) and cell.source.is_pinned):
        verdict = Verdict.UNAVAILABLE
    elif isinstance(error, HarnessError):
        problem = str(error) if error.status == Exit.WRONG_CALL else ""
        return Outcome(cell, Judgement(Verdict.ERROR, str(error)), problem=problem)
    else:
        traceback.print_exception(error)
        return Outcome(cell, Judgement(Verdict.ERROR, f"the harness failed: {type(error).__name__}: {error}"))
    return Outcome(cell, Judgement(verdict, str(error)))
