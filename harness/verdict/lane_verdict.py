"""The verdict on a lane: how its process ended, what it printed, and whether that was about the lane's own tree."""

from __future__ import annotations

import signal
from pathlib import Path, PurePosixPath

from harness.core import tracebacks
from harness.core.words import LaneVerdict
from harness.lane.lane import ABANDONED, RAISED, Lane, LaneRun
from harness.lane.process import Ended
from harness.lane.record import LaneRecord
from harness.lane.script import NO_SENTINEL, STATUS
from harness.lane.transcript import Transcript, UpstreamLine

#: Exit statuses of a script without a sentinel after which the log ends in what was raised.
FAILED = (STATUS[LaneVerdict.UNSUPPORTED], RAISED)
#: Characters of what it raised.
MOST_SAID = 200


def record_of(lane: Lane, run: LaneRun) -> LaneRecord:
    """Judge a lane that ended."""
    ended, said = run.ended, run.transcript
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
        device=said.target.device if said.target else "",
        upstream=_kept(lane, said),
        checks=said.checks,
        figures=said.figures,
        outputs=said.outputs,
        claims=said.claims,
        waited=round(ended.waited, 3),
        script=said.script,
        printed=said.printed,
    )


def _kept(lane: Lane, said: Transcript) -> tuple[UpstreamLine, ...]:
    """Return what a record keeps of the modules: those of the changed files, and the packages under test themselves."""
    changed = {str(lane.tree.folder / path) for path in lane.changed}
    return tuple(line for line in said.upstream if line.module in lane.modules or line.file in changed)


def _judged(lane: Lane, run: LaneRun) -> tuple[LaneVerdict, str]:
    ended, said, changed = run.ended, run.transcript, run.changed
    abnormal = abnormal_end(ended, lane.timeout)
    abnormal += f" in {run.running}" if abnormal and run.running else ""
    problem = changed or abnormal or next(iter((*said.problems, *_foreign(lane, said))), "")
    return (LaneVerdict.ERROR, problem) if problem else (said.verdict, said.reason)


def raised(log: Path) -> str:
    """Return what a probe raised, in brackets: the line that names a rank where one does, else the last; or nothing."""
    line = tracebacks.last_exception(log.read_text("utf-8", errors="replace"), of=": rank ")
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


def _foreign(lane: Lane, said: Transcript) -> list[str]:
    """List where the lane judged something else than this lane's tree, target or evidence."""
    if said.verdict == LaneVerdict.UNSUPPORTED:
        return []
    problems = []
    if said.target and (said.target.target, said.target.evidence) != (lane.target, lane.evidence):
        problems.append(
            f"it judged {said.target.target} ({said.target.evidence}), requested was {lane.target} ({lane.evidence})"
        )
    if not said.upstream:
        problems.append("nothing of the modules under test was loaded")
    loaded = set()
    for line in said.upstream:
        inside = _inside(Path(line.file), lane.tree.folder)
        if inside is not None and line.module.split(".")[0] not in lane.modules:
            loaded.add(inside)  # loaded by its path, under another name
        elif line.module.split(".")[0] not in lane.modules:
            problems.append(f"{line.module} is none of the modules under test ({', '.join(lane.modules)})")
        elif inside is None:
            problems.append(f"{line.module} was loaded from outside the lane's tree: {line.file}")
        elif lane.tree.entries.get(inside) != line.sha256:
            problems.append(f"{line.module} has another hash than {inside} in the lane's tree")
        else:
            loaded.add(inside)
    problems += [f"{path} was never loaded" for path in lane.must_load if path not in loaded]
    return problems


def _inside(file: Path, folder: Path) -> str | None:
    try:
        return PurePosixPath(file.resolve().relative_to(folder.resolve())).as_posix()
    except (ValueError, OSError, RuntimeError):  # outside, or a loop of links
        return None
