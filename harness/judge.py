"""The verdict on a pack, from its two lanes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.lane import LaneResult
from harness.words import BITWISE_IDENTICAL, LaneVerdict, Verdict

#: What a pristine lane alone decides, whatever a patch does.
ALONE = {
    LaneVerdict.FIX_VALIDATED: Verdict.FIXED_UPSTREAM,
    LaneVerdict.CONTROL_FAILED: Verdict.CONTROL_FAILED,
    LaneVerdict.UNSUPPORTED: Verdict.UNSUPPORTED,
    LaneVerdict.ERROR: Verdict.ERROR,
}
#: What a patched lane says of the patch.
PATCHED = {
    LaneVerdict.FIX_VALIDATED: Verdict.CONFIRMED,
    LaneVerdict.BUG_REPRODUCED: Verdict.FIX_INEFFECTIVE,
    LaneVerdict.CONTROL_FAILED: Verdict.PATCH_BREAKS,
}


@dataclass(frozen=True)
class Judgement:
    """A pack's verdict, why, and the claims that both lanes support."""

    verdict: Verdict
    reason: str = ""
    claims: tuple[str, ...] = ()


def differing_outputs(pristine: LaneResult, patched: LaneResult) -> list[str]:
    """Name the outputs that had to match and do not, or that one lane lacks."""
    first = {line.name: line for line in pristine.transcript.outputs if line.must_match}
    second = {line.name: line for line in patched.transcript.outputs if line.must_match}
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


def both(pristine: LaneResult, patched: LaneResult) -> Judgement:
    """Judge a pack whose pristine lane reproduced the bug and whose patched lane ran."""
    if patched.verdict not in PATCHED:
        return Judgement(Verdict.ERROR, f"patched lane: {patched.verdict}: {patched.reason}")
    verdict = PATCHED[patched.verdict]
    if verdict != Verdict.CONFIRMED:
        return Judgement(verdict, patched.reason)
    differing = differing_outputs(pristine, patched)
    if differing:
        return Judgement(Verdict.PATCH_BREAKS, f"outputs differ from the pristine lane's: {', '.join(differing)}")
    matched = any(line.must_match for line in patched.transcript.outputs)
    claims = (*patched.transcript.claims, *([BITWISE_IDENTICAL] if matched else []))
    return Judgement(verdict, "", claims)


def pair(pristine: LaneResult | None, patched: LaneResult | None, stale: str = "") -> Judgement:
    """Judge a pack.

    Args:
        pristine: the lane on the untouched tree; None where only the patched lane was asked for.
        patched: the lane on the patched tree; None where it was not asked for, or had no reason to run.
        stale: why the patch does not apply cleanly; empty where it does or was not tried.

    """
    if pristine is not None and pristine.verdict in ALONE:
        return Judgement(ALONE[pristine.verdict], pristine.reason)
    if stale:
        return Judgement(Verdict.PATCH_STALE, stale)
    if patched is None:
        claims = pristine.transcript.claims if pristine else ()
        return Judgement(Verdict.REPRODUCED, pristine.reason if pristine else "", claims)
    if pristine is not None:
        return both(pristine, patched)
    if patched.verdict == LaneVerdict.FIX_VALIDATED:
        return Judgement(Verdict.VALIDATED, patched.reason, patched.transcript.claims)
    return Judgement(PATCHED.get(patched.verdict, ALONE.get(patched.verdict, Verdict.ERROR)), patched.reason)


def repeated(judgements: list[Judgement]) -> tuple[Judgement, int]:
    """Return the judgement of several runs of the same lanes, and how many of them agree with it.

    Runs that differ are no verdict: they give ERROR and the counts.
    """
    last = judgements[-1]
    agreeing = [judgement for judgement in judgements if judgement.verdict == last.verdict]
    if len(agreeing) == len(judgements):
        common = set.intersection(*(set(judgement.claims) for judgement in judgements))
        return replace(last, claims=tuple(claim for claim in last.claims if claim in common)), len(agreeing)
    counts: dict[str, int] = {}
    for judgement in judgements:
        counts[judgement.verdict] = counts.get(judgement.verdict, 0) + 1
    text = ", ".join(f"{word} {count}/{len(judgements)}" for word, count in sorted(counts.items()))
    return Judgement(Verdict.ERROR, f"the runs differ: {text}"), max(counts.values())
