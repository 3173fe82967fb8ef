"""The verdict on a lane: how its process ended, what it printed, and whether it loaded the lane's own tree."""

import signal
from pathlib import Path, PurePosixPath

from harness.core.words import LaneVerdict, Role
from harness.lane.lane import RAISED, Lane, LaneRun
from harness.lane.process import Ended
from harness.lane.results import CheckLine, LaneRecord, UpstreamLine, check_names
from harness.lane.script import NO_SENTINEL, STATUS, Script, last_exception

#: Exit statuses of a script that ended in an exception and printed no sentinel.
FAILED = (STATUS[LaneVerdict.UNSUPPORTED], RAISED)
#: Characters of the exception that a reason quotes.
MOST_SAID = 200
#: The reason of a lane whose script shows the bug and whose contract does not.
MISSES = "the contract misses the bug: all its checks are right, and the script says BUG_REPRODUCED"
#: How the reason begins where the script could not judge here.
CONTRACT_ALONE = "contract alone"


def judge_files(script: Script, checks: tuple[CheckLine, ...]) -> tuple[LaneVerdict, str]:
    """Return the verdict and its reason; where no check was judged, the script decides alone."""
    controls, defects = (", ".join(check_names(checks, role, ok=False)) for role in (Role.CONTROL, Role.DEFECT))
    if controls:
        return LaneVerdict.CONTROL_FAILED, controls
    if script.verdict == LaneVerdict.ERROR:
        return (LaneVerdict.BUG_REPRODUCED, defects) if defects else (LaneVerdict.ERROR, script.reason)
    if script.verdict == LaneVerdict.UNSUPPORTED:
        verdict, prefix = verdict_of_checks(checks), f"{CONTRACT_ALONE} ({script.reason})"
        reason = f"{prefix}: {defects}" if defects else prefix
        return verdict, script.reason if verdict == LaneVerdict.UNSUPPORTED else reason
    if all(check.ok is None for check in checks):
        return script.verdict, script.reason
    if script.verdict == LaneVerdict.BUG_REPRODUCED:
        return (LaneVerdict.BUG_REPRODUCED, defects) if defects else (LaneVerdict.ERROR, MISSES)
    return (LaneVerdict.FIX_INCOMPLETE if defects else LaneVerdict.FIX_VALIDATED), defects


def verdict_of_checks(checks: tuple[CheckLine, ...]) -> LaneVerdict:
    """Return the verdict that the checks imply without a script."""
    if check_names(checks, Role.CONTROL, ok=False):
        return LaneVerdict.CONTROL_FAILED
    if check_names(checks, Role.DEFECT, ok=False):
        return LaneVerdict.BUG_REPRODUCED
    return LaneVerdict.FIX_VALIDATED if check_names(checks, Role.DEFECT, ok=True) else LaneVerdict.UNSUPPORTED


def record_of(lane: Lane, run: LaneRun) -> LaneRecord:
    """Judge a lane that ended."""
    end, results = run.ended, run.results
    verdict, reason = _judge(lane, run)
    if reason == NO_SENTINEL and end.status in FAILED:
        exception = last_exception(end.log, of=": rank ")  # of several ranks, one that is named
        reason += f" ({exception[:MOST_SAID]})" if exception else ""
    return LaneRecord(
        verdict=verdict,
        reason=reason,
        exit_status=end.status,
        seconds=round(end.seconds, 3),
        peak_memory=end.peak_memory,
        left_behind=end.left_behind,
        tree=lane.tree.sha256,
        device=results.target.device if results.target else "",
        upstream=_recorded_modules(lane, run.loaded),
        checks=results.checks,
        figures=results.figures,
        outputs=results.outputs,
        claims=results.claims,
        waited=round(end.waited, 3),
        script=run.script.text,
        printed=end.printed,
    )


def _recorded_modules(lane: Lane, loaded: tuple[UpstreamLine, ...]) -> tuple[UpstreamLine, ...]:
    """Return the modules that a record keeps: the packages under test, and the files of `lane.recorded`."""
    files = {str(lane.tree.folder / path) for path in lane.recorded}
    return tuple(line for line in loaded if line.module in lane.modules or line.file in files)


def _judge(lane: Lane, run: LaneRun) -> tuple[LaneVerdict, str]:
    results = run.results
    verdict, reason = judge_files(run.script, results.checks)
    abnormal = abnormal_end(run.ended, lane.timeout)
    abnormal += f" in {results.running}" if abnormal and results.running else ""
    script_error = run.script.reason if verdict == run.script.verdict == LaneVerdict.ERROR else ""
    origin = () if verdict == LaneVerdict.UNSUPPORTED else _origin_problems(lane, run)
    problems = (run.problem, abnormal, script_error, *results.problems, *unexplained_checks(results.checks), *origin)
    problem = next(filter(None, problems), "")
    return (LaneVerdict.ERROR, problem) if problem else (verdict, reason)


def unexplained_checks(checks: tuple[CheckLine, ...]) -> list[str]:
    """Name the checks that are not judged and give no reason."""
    without_reason = (check for check in checks if check.ok is None and not check.reason)
    return [f"check {check.name!r} is not judged and gives no reason" for check in without_reason]


def abnormal_end(end: Ended, timeout: float) -> str:
    """Say how a process ended; empty where it exited by itself."""
    if end.reason == "timed out":
        return f"timed out after {timeout:g} s"
    if end.reason != "exited":
        return "its supervisor was killed"
    if end.status >= 0:
        return ""
    names = {int(member): member.name for member in signal.Signals}
    name = names.get(-end.status, f"signal {-end.status}")
    return f"killed by {name}" + (" (as the out-of-memory killer does)" if name == "SIGKILL" else "")


def _origin_problems(lane: Lane, run: LaneRun) -> list[str]:
    """List what the lane judged outside its own tree, target and evidence."""
    problems, target = [], run.results.target
    cell = lane.cell
    if target and (target.target, target.evidence) != (cell.target, cell.evidence):
        problems.append(f"it judged {target.target} ({target.evidence}), requested was {cell.target} ({cell.evidence})")
    if not run.loaded:
        problems.append("nothing of the modules under test was loaded")
    loaded = set()
    for line in run.loaded:
        path = _path_in_tree(Path(line.file), lane.tree.folder)
        is_under_test = line.module.split(".")[0] in lane.modules
        if path is None and not is_under_test:
            problems.append(f"{line.module} is none of the modules under test ({', '.join(lane.modules)})")
        elif path is None:
            problems.append(f"{line.module} was loaded from outside the lane's tree: {line.file}")
        elif is_under_test and lane.tree.entries.get(path) != line.sha256:
            problems.append(f"{line.module} has another hash than {path} in the lane's tree")
        else:
            loaded.add(path)  # a module of another package counts by its path: its name differs
    problems += [f"{path} was never loaded" for path in lane.must_load if path not in loaded]
    return problems


def _path_in_tree(file: Path, folder: Path) -> str | None:
    try:
        return PurePosixPath(file.resolve().relative_to(folder.resolve())).as_posix()
    except (ValueError, OSError, RuntimeError):  # outside the folder, or a loop of links
        return None
