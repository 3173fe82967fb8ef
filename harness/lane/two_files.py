"""The verdict of a lane from its two files: the script's sentinel and the contract's checks."""

from __future__ import annotations

from harness.core.words import LaneVerdict, Role
from harness.lane.results import Results
from harness.lane.script import Script
from harness.lane.transcript import CheckLine, Transcript, UpstreamLine, implied

#: The reason of a lane whose script shows the bug that its contract does not see.
MISSES = "the contract misses the bug: all its checks are right, and the script says BUG_REPRODUCED"
#: Before the reason of a lane whose script could not judge here.
CONTRACT_ALONE = "contract alone"


def _wrong(checks: tuple[CheckLine, ...], role: Role) -> str:
    return ", ".join(check.name for check in checks if check.role == role and check.ok is False)


def verdict(script: Script, checks: tuple[CheckLine, ...]) -> tuple[LaneVerdict, str]:
    """Return the verdict and its reason; without checks, or where none is judged, the script's word stands alone."""
    controls, defects = _wrong(checks, Role.CONTROL), _wrong(checks, Role.DEFECT)
    if controls:
        return LaneVerdict.CONTROL_FAILED, controls
    if script.verdict == LaneVerdict.ERROR:
        return (LaneVerdict.BUG_REPRODUCED, defects) if defects else (LaneVerdict.ERROR, script.reason)
    if script.verdict == LaneVerdict.UNSUPPORTED:
        found = implied(checks)
        alone = f"{CONTRACT_ALONE} ({script.reason})"
        return found, script.reason if found == LaneVerdict.UNSUPPORTED else f"{alone}: {defects}".removesuffix(": ")
    if all(check.ok is None for check in checks):
        return script.verdict, script.reason
    if script.verdict == LaneVerdict.BUG_REPRODUCED:
        return (LaneVerdict.BUG_REPRODUCED, defects) if defects else (LaneVerdict.ERROR, MISSES)
    return (LaneVerdict.FIX_INCOMPLETE if defects else LaneVerdict.FIX_VALIDATED), defects


def transcript(
    script: Script, results: Results | None, loaded: tuple[UpstreamLine, ...], printed: str = ""
) -> Transcript:
    """Put together what a lane showed.

    Args:
        script: what reproduce.py said.
        results: of contract.py; None where there is none, or it did not run.
        loaded: the modules under test, by the witness.
        printed: what reproduce.py wrote to standard output.

    """
    found = results or Results()
    word, reason = verdict(script, found.checks)
    mute = (f"check {check.name!r} is not judged and gives no reason" for check in found.checks if _is_mute(check))
    return Transcript(
        verdict=word,
        reason=reason,
        target=found.target,
        upstream=loaded,
        checks=found.checks,
        figures=found.figures,
        outputs=found.outputs,
        claims=found.claims,
        problems=(*([script.reason] if word == LaneVerdict.ERROR and script.reason else []), *found.problems, *mute),
        script=script.text,
        printed=printed,
    )


def _is_mute(check: CheckLine) -> bool:
    return check.ok is None and not check.reason
