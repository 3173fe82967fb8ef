"""What a lane said: the checks, figures and outputs of its contract, and the modules that it loaded."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.words import Evidence, LaneVerdict, Role

#: Characters of a name, which stands in tables, placeholders and sentences.
LONGEST_NAME = 200


@dataclass(frozen=True)
class TargetLine:
    """What the lane judged, how, and on what device."""

    target: str
    evidence: Evidence
    device: str


@dataclass(frozen=True)
class UpstreamLine:
    """One module under test, as the lane loaded it."""

    module: str
    file: str
    sha256: str


@dataclass(frozen=True)
class CheckLine:
    """One check: `ok` is None where it was not judged, and then `reason` says why."""

    name: str
    role: Role
    ok: bool | None
    measured: object = None
    tolerance: object = None
    unit: str = ""
    reason: str = ""


@dataclass(frozen=True)
class FigureLine:
    """A measured value that nobody judges; `spread` in the same unit, or None."""

    name: str
    value: object
    unit: str = ""
    spread: object = None


@dataclass(frozen=True)
class OutputLine:
    """One tensor by its hash, compared between the lanes where `must_match` says so."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    must_match: bool


@dataclass(frozen=True)
class Transcript:
    """All that a lane said; `problems` is empty only where it may be believed."""

    verdict: LaneVerdict = LaneVerdict.ERROR
    reason: str = ""
    target: TargetLine | None = None
    upstream: tuple[UpstreamLine, ...] = ()
    checks: tuple[CheckLine, ...] = ()
    figures: tuple[FigureLine, ...] = ()
    outputs: tuple[OutputLine, ...] = ()
    claims: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    script: str = ""
    printed: str = ""


def implied(checks: tuple[CheckLine, ...]) -> LaneVerdict:
    """Return the verdict that the checks themselves imply."""
    wrong = {check.role for check in checks if check.ok is False}
    if Role.CONTROL in wrong:
        return LaneVerdict.CONTROL_FAILED
    if Role.DEFECT in wrong:
        return LaneVerdict.BUG_REPRODUCED
    judged = any(check.role == Role.DEFECT and check.ok for check in checks)
    return LaneVerdict.FIX_VALIDATED if judged else LaneVerdict.UNSUPPORTED
