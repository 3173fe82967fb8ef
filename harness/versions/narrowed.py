"""A verdict on a release by some of the probe's checks: those that pack.toml's [versions] names."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.words import LaneVerdict, Role
from harness.lane.record import LaneRecord
from harness.lane.transcript import CheckLine
from harness.verdict import pack_verdict

#: What a lane says that went through all of its checks. In any other its checks are not all there.
WHOLE = (LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED, LaneVerdict.CONTROL_FAILED)


def by_checks(record: LaneRecord, verdict: LaneVerdict, reason: str, about: tuple[str, ...]) -> tuple[LaneVerdict, str]:
    """Return the verdict of the checks that `about` names, and why, with the other controls that are wrong.

    One control among them has to be right: a release in which nothing works has no bug of its own. `verdict` and
    `reason` are what the lane says as a whole, and stay where it did not go through all of its checks.
    """
    if verdict not in WHOLE:
        return verdict, reason
    names = pack_verdict.chosen((line.name for line in record.checks), about)
    judged = [line for line in record.checks if line.name in names and line.ok is not None]
    if wrong := _wrong_controls(judged):
        return LaneVerdict.CONTROL_FAILED, ", ".join(wrong)
    if not any(line.role == Role.CONTROL for line in judged):
        return LaneVerdict.UNSUPPORTED, f"no control among {', '.join(about)} could be judged"
    defects = [line.ok for line in judged if line.role == Role.DEFECT]
    if not defects:
        return LaneVerdict.UNSUPPORTED, f"no defect check among {', '.join(about)} could be judged"
    others = _wrong_controls(line for line in record.checks if line.name not in names)
    beside = f"; controls of other options are wrong: {', '.join(others)}" if others else ""
    found = LaneVerdict.FIX_VALIDATED if all(defects) else LaneVerdict.BUG_REPRODUCED
    return found, f"by {len(judged)} of {len(record.checks)} checks{beside}"


def _wrong_controls(lines: Iterable[CheckLine]) -> list[str]:
    return [line.name for line in lines if line.role == Role.CONTROL and line.ok is False]
