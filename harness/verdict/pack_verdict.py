"""The verdict on a pack, from what its two lanes showed."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.core.words import BITWISE_IDENTICAL, LaneName, LaneVerdict, Role, Verdict
from harness.lane.record import LaneEnd, LaneRecord

#: What a pristine lane alone decides, whatever a patch does.
ALONE = {
    LaneVerdict.FIX_VALIDATED: Verdict.FIXED_UPSTREAM,
    LaneVerdict.CONTROL_FAILED: Verdict.CONTROL_FAILED,
    LaneVerdict.FIX_INCOMPLETE: Verdict.FIX_INCOMPLETE,
    LaneVerdict.UNSUPPORTED: Verdict.UNSUPPORTED,
    LaneVerdict.ERROR: Verdict.ERROR,
}
#: What a patched lane says of the patch, where the pristine one reproduced the bug.
PATCHED = {
    LaneVerdict.FIX_VALIDATED: Verdict.CONFIRMED,
    LaneVerdict.BUG_REPRODUCED: Verdict.FIX_INEFFECTIVE,
    LaneVerdict.FIX_INCOMPLETE: Verdict.FIX_INCOMPLETE,
    LaneVerdict.CONTROL_FAILED: Verdict.PATCH_BREAKS,
    LaneVerdict.UNSUPPORTED: Verdict.PATCH_BREAKS,
}

#: What the verdict on a pack says of the tree without the patch; the other verdicts say nothing of the bug.
PRISTINE: dict[str, LaneVerdict] = {
    Verdict.CONFIRMED: LaneVerdict.BUG_REPRODUCED,
    Verdict.REPRODUCED: LaneVerdict.BUG_REPRODUCED,
    Verdict.FIX_INEFFECTIVE: LaneVerdict.BUG_REPRODUCED,
    Verdict.PATCH_BREAKS: LaneVerdict.BUG_REPRODUCED,
    Verdict.PATCH_STALE: LaneVerdict.BUG_REPRODUCED,
    Verdict.FIXED_UPSTREAM: LaneVerdict.FIX_VALIDATED,
}


@dataclass(frozen=True)
class Judgement:
    """A pack's verdict, why, and the claims that both lanes support."""

    verdict: Verdict
    reason: str = ""
    claims: tuple[str, ...] = ()


def differing_outputs(pristine: LaneRecord, patched: LaneRecord) -> list[str]:
    """Name the outputs that had to match and do not, or that one lane lacks."""
    first = {line.name: line for line in pristine.outputs if line.must_match}
    second = {line.name: line for line in patched.outputs if line.must_match}
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


def _defects(record: LaneRecord) -> dict[str, bool]:
    """Map the defect checks that a lane judged to whether each was right."""
    return {check.name: check.ok for check in record.checks if check.role == Role.DEFECT and check.ok is not None}


def chosen(names: Iterable[str], about: tuple[str, ...]) -> set[str]:
    """Return those of the names that one of the globs in `about` names."""
    return {name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in about)}


def asked(pristine: LaneRecord, patched: LaneRecord, about: tuple[str, ...]) -> Judgement:
    """Say whether a patch repairs the defect checks that it is about, and makes no other one wrong.

    The verdict is CONFIRMED, with no claims, where every such check is wrong before and right after.
    """
    before, after = _defects(pristine), _defects(patched)
    wanted = chosen(before, about)
    if not wanted:
        return Judgement(Verdict.ERROR, f"no defect check that was judged matches {', '.join(about)}")
    worse = {name for name, right in before.items() if right and not after.get(name)}
    problems = (
        (Verdict.ERROR, "right without the patch already", {name for name in wanted if before[name]}),
        (Verdict.ERROR, "not judged in the patched lane", before.keys() - after.keys()),
        (Verdict.PATCH_BREAKS, "right without the patch, wrong with it", worse),
        (Verdict.FIX_INEFFECTIVE, "still wrong", {name for name in wanted if not after.get(name)}),
    )
    found = (Judgement(verdict, f"{why}: {', '.join(sorted(names))}") for verdict, why, names in problems if names)
    return next(found, Judgement(Verdict.CONFIRMED))


def unlike_checks(pristine: LaneRecord, patched: LaneRecord, about: tuple[str, ...] = ()) -> list[str]:
    """Say which checks of the pristine lane the patched lane did not make, or made as something else.

    What the pristine lane judged, the patched one has to judge, under the same name and in the same role; what was
    wrong has to be right, unless it is none of those that a patch is `about`. Otherwise a probe could drop its defect
    where the patch does not repair it.
    """
    after, problems = {line.name: line for line in patched.checks}, []
    for before in pristine.checks:
        now = after.get(before.name)
        if now is None:
            problems.append(f"{before.name} is gone")
        elif now.role != before.role:
            problems.append(f"{before.name} was a {before.role} and is a {now.role}")
        elif before.ok is not None and now.ok is None:
            problems.append(f"{before.name} was judged and is not")
        elif before.ok is False and now.ok is not True and (not about or chosen([before.name], about)):
            problems.append(f"{before.name} is wrong in both lanes")
    return problems


def both(pristine: LaneRecord, patched: LaneRecord, about: tuple[str, ...] = ()) -> Judgement:
    """Judge a pack whose pristine lane reproduced the bug and whose patched lane ran.

    With `about`, the verdict is on the defect checks that it names: others may stay wrong.
    """
    if patched.verdict not in PATCHED:
        return Judgement(Verdict.ERROR, f"patched lane: {patched.verdict}: {patched.reason}")
    verdict, reason = PATCHED[patched.verdict], patched.reason
    if about and verdict in (Verdict.CONFIRMED, Verdict.FIX_INEFFECTIVE, Verdict.FIX_INCOMPLETE):
        found = asked(pristine, patched, about)
        verdict, reason = found.verdict, found.reason
    if verdict != Verdict.CONFIRMED:
        return Judgement(verdict, reason)
    unlike = unlike_checks(pristine, patched, about)
    if unlike:
        return Judgement(Verdict.ERROR, f"the lanes made other checks: {'; '.join(unlike)}")
    differing = differing_outputs(pristine, patched)
    if differing:
        return Judgement(Verdict.PATCH_BREAKS, f"outputs differ from the pristine lane's: {', '.join(differing)}")
    matched = any(line.must_match for line in patched.outputs)
    claims = (*patched.claims, *([BITWISE_IDENTICAL] if matched else []))
    return Judgement(verdict, "", claims)


def pair(
    pristine: LaneRecord | None, patched: LaneRecord | None, stale: str = "", about: tuple[str, ...] = ()
) -> Judgement:
    """Judge a pack by its lanes; None is one that was not requested, or had no reason to run.

    `stale` says why the patch does not apply cleanly. `about` names the defect checks that the verdict is about, where
    these are not all of them.
    """
    if pristine is not None and pristine.verdict in ALONE:
        return Judgement(ALONE[pristine.verdict], pristine.reason)
    if stale:
        return Judgement(Verdict.PATCH_STALE, stale)
    if patched is None:
        claims = pristine.claims if pristine else ()
        return Judgement(Verdict.REPRODUCED, pristine.reason if pristine else "", claims)
    if pristine is not None:
        return both(pristine, patched, about)
    if patched.verdict == LaneVerdict.FIX_VALIDATED:
        return Judgement(Verdict.VALIDATED, patched.reason, patched.claims)
    without_it = {**ALONE, **PATCHED, LaneVerdict.UNSUPPORTED: Verdict.UNSUPPORTED}
    return Judgement(without_it[patched.verdict], patched.reason)


def of_runs(runs: Sequence[tuple[LaneEnd, ...]], about: tuple[str, ...] = ()) -> tuple[Judgement, int]:
    """Judge a pack by the ends of its lanes in each run, and say how many of the runs agree with that.

    Runs that differ are no verdict: they give ERROR and the counts.
    """
    judgements = []
    for run in runs:
        records = {end.lane: end.record for end in run}
        stale = "".join(end.stale for end in run)
        judgements.append(pair(records.get(LaneName.PRISTINE), records.get(LaneName.PATCHED), stale, about))
    counts = Counter(str(judgement.verdict) for judgement in judgements)
    if len(counts) == 1:
        common = set.intersection(*(set(judgement.claims) for judgement in judgements))
        last = judgements[-1]
        return replace(last, claims=tuple(claim for claim in last.claims if claim in common)), len(judgements)
    text = ", ".join(f"{word} {count}/{len(judgements)}" for word, count in sorted(counts.items()))
    return Judgement(Verdict.ERROR, f"the runs differ: {text}"), max(counts.values())
