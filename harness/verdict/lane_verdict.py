"""The verdict on a lane: how its process ended, what it printed, and whether that was about the lane's own tree."""

from __future__ import annotations

import signal
from pathlib import Path, PurePosixPath

from harness.core.words import LaneVerdict, Role
from harness.lane.lane import ABANDONED, RAISED, Lane, LaneRun
from harness.lane.process import Ended
from harness.lane.record import CheckLine, LaneRecord, UpstreamLine
from harness.lane.script import NO_SENTINEL, STATUS, Script, last_exception

#: Exit statuses of a script without a sentinel after which the log ends in what was raised.
FAILED = (STATUS[LaneVerdict.UNSUPPORTED], RAISED)
#: Characters of what it raised.
MOST_SAID = 200
#: The reason of a lane whose script shows the bug that its contract does not see.
MISSES = "the contract misses the bug: all its checks are right, and the script says BUG_REPRODUCED"
#: Before the reason of a lane whose script could not judge here.
CONTRACT_ALONE = "contract alone"


def _wrong(checks: tuple[CheckLine, ...], role: Role) -> str:
    return ", ".join(check.name for check in checks if check.role == role and check.ok is False)


def of_two_files(script: Script, checks: tuple[CheckLine, ...]) -> tuple[LaneVerdict, str]:
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


def implied(checks: tuple[CheckLine, ...]) -> LaneVerdict:
    """Return the verdict that the checks themselves imply."""
    wrong = {check.role for check in checks if check.ok is False}
    if Role.CONTROL in wrong:
        return LaneVerdict.CONTROL_FAILED
    if Role.DEFECT in wrong:
        return LaneVerdict.BUG_REPRODUCED
    judged = any(check.role == Role.DEFECT and check.ok for check in checks)
    return LaneVerdict.FIX_VALIDATED if judged else LaneVerdict.UNSUPPORTED


def record_of(lane: Lane, run: LaneRun) -> LaneRecord:
    """Judge a lane that ended."""
    ended, found = run.ended, run.results
    verdict, reason = _judged(lane, run)
    if reason == NO_SENTINEL and ended.status in FAILED:
        reason += raised(run.log)
    return LaneRecord(
        verdict=verdict,
        reason=reason,
        exit_status=ended.status,
        seconds=round(ended.seconds, 3),
        peak_memory=ended.peak_memory,
        left_behind=ended.left_behind,
        tree=lane.tree.sha256,
        device=found.target.device if found.target else "",
        upstream=_kept(lane, run.loaded),
        checks=found.checks,
        figures=found.figures,
        outputs=found.outputs,
        claims=found.claims,
        waited=round(ended.waited, 3),
        script=run.script.text,
        printed=run.printed,
    )


def _kept(lane: Lane, loaded: tuple[UpstreamLine, ...]) -> tuple[UpstreamLine, ...]:
    """Return what a record keeps of the modules: those of such files, and the packages under test themselves."""
    files = {str(lane.tree.folder / path) for path in lane.recorded}
    return tuple(line for line in loaded if line.module in lane.modules or line.file in files)


def _judged(lane: Lane, run: LaneRun) -> tuple[LaneVerdict, str]:
    found = run.results
    verdict, reason = of_two_files(run.script, found.checks)
    abnormal = abnormal_end(run.ended, lane.timeout)
    abnormal += f" in {found.running}" if abnormal and found.running else ""
    failed = run.script.reason if verdict == run.script.verdict == LaneVerdict.ERROR else ""
    foreign = () if verdict == LaneVerdict.UNSUPPORTED else _foreign(lane, run)
    problem = next(filter(None, (run.problem, abnormal, failed, *found.problems, *mute(found.checks), *foreign)), "")
    return (LaneVerdict.ERROR, problem) if problem else (verdict, reason)


def mute(checks: tuple[CheckLine, ...]) -> list[str]:
    """Name the checks that are not judged and do not say why."""
    return [
        f"check {one.name!r} is not judged and gives no reason" for one in checks if one.ok is None and not one.reason
    ]


def raised(log: Path) -> str:
    """Return what a probe raised, in brackets: the line that names a rank where one does, else the last; or nothing."""
    line = last_exception(log.read_text("utf-8", errors="replace"), of=": rank ")
    return f" ({line[:MOST_SAID]})" if line else ""


def abnormal_end(ended: Ended, timeout: float) -> str:
    """Say how a process that did not exit by itself ended; empty where it did."""
    if ended.reason == "timed out":
        return f"timed out after {timeout:g} s"
    if ended.reason == ABANDONED:
        return ABANDONED
    if ended.reason != "exited":
        return "its supervisor was killed"
    if ended.status >= 0:
        return ""
    known = {int(one): one.name for one in signal.Signals}
    name = known.get(-ended.status, f"signal {-ended.status}")
    return f"killed by {name}" + (" (as the out-of-memory killer does)" if name == "SIGKILL" else "")


def _foreign(lane: Lane, run: LaneRun) -> list[str]:
    """List where the lane judged something else than this lane's tree, target or evidence."""
    problems, target = [], run.results.target
    cell = lane.cell
    if target and (target.target, target.evidence) != (cell.target, cell.evidence):
        problems.append(f"it judged {target.target} ({target.evidence}), requested was {cell.target} ({cell.evidence})")
    if not run.loaded:
        problems.append("nothing of the modules under test was loaded")
    loaded = set()
    for line in run.loaded:
        inside = _inside(Path(line.file), lane.tree.folder)
        is_under_test = line.module.split(".")[0] in lane.modules
        if inside is None and not is_under_test:
            problems.append(f"{line.module} is none of the modules under test ({', '.join(lane.modules)})")
        elif inside is None:
            problems.append(f"{line.module} was loaded from outside the lane's tree: {line.file}")
        elif is_under_test and lane.tree.entries.get(inside) != line.sha256:
            problems.append(f"{line.module} has another hash than {inside} in the lane's tree")
        else:
            loaded.add(inside)  # of another package: by its path, under another name
    problems += [f"{path} was never loaded" for path in lane.must_load if path not in loaded]
    return problems


def _inside(file: Path, folder: Path) -> str | None:
    try:
        return PurePosixPath(file.resolve().relative_to(folder.resolve())).as_posix()
    except (ValueError, OSError, RuntimeError):  # outside, or a loop of links
        return None
