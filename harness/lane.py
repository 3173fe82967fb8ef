"""A lane: one probe, one tree, one companion set, one target, in a process group of its own."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness import environment, files, made, process, transcript
from harness.cache import Cache
from harness.capture import Lines, Log
from harness.companions import CompanionSet
from harness.host import Host
from harness.transcript import Transcript
from harness.tree import Tree
from harness.words import Evidence, LaneName, LaneVerdict

#: The reason of a lane that was cancelled: it says nothing of anything.
ABANDONED = "abandoned"


@dataclass(frozen=True)
class Lane:
    """What to run.

    Attributes:
        name: which of the two trees it is.
        probe: the probe's file.
        tree: the tree, patched or not.
        companion_set: its name and members.
        companions: the folder that the set was merged into.
        target: what the verdict is about.
        evidence: how it has to be seen on this host.
        modules: the accused import names.
        must_load: files of the tree that the probe has to load, or its verdict is about something else.
        claims: the words that a probe may print besides the fixed ones.
        timeout: in seconds.
        device: the GPU it sees where it executes, as CUDA_VISIBLE_DEVICES names it; empty: whatever the host shows.
        cancel: a file descriptor; once it can be read, the lane is abandoned.
        environment: whose interpreter runs it; None: the runner's own.

    """

    name: LaneName
    probe: Path
    tree: Tree
    companion_set: CompanionSet
    companions: Path
    target: str
    evidence: Evidence
    modules: tuple[str, ...]
    must_load: tuple[str, ...]
    claims: tuple[str, ...]
    timeout: float
    device: str = ""
    cancel: int | None = None
    environment: Path | None = None


@dataclass(frozen=True)
class LaneResult:
    """What a lane showed; `reason` is empty only behind a verdict of the probe that needs none."""

    name: LaneName
    verdict: LaneVerdict
    reason: str
    transcript: Transcript
    tree: Tree
    status: int
    seconds: float
    peak_memory: int
    left_behind: int
    log: Path


def kept_key(lane: Lane, host: Host) -> str:
    """Name the lane's caches: never shared between two trees, sets, targets or toolchains."""
    prefix = made.prefix(lane.environment)
    return files.key_of(
        lane.tree.key, lane.companion_set.sha256, lane.target, prefix, host.python, host.torch, host.triton
    )


def run(cache: Cache, host: Host, lane: Lane, log: Path) -> LaneResult:
    """Run one lane and judge it by the rules of the protocol."""
    with cache.guard(), cache.scratch("lane-") as work:
        toolchain = files.key_of(made.prefix(lane.environment), host.python, host.torch, host.triton)
        folders = environment.Folders(
            work, cache.entry("jit", kept_key(lane, host)), cache.entry("bytecode", toolchain)
        )
        folders.create()
        hide_gpu = lane.evidence != Evidence.EXECUTED
        paths = [lane.tree.import_root, lane.companions]
        command = process.Command(
            arguments=(str(made.interpreter(lane.environment)), "-P", str(lane.probe), "--target", lane.target),
            environment=environment.build(
                environment.with_device(os.environ, lane.device), folders, paths, hide_gpu=hide_gpu
            ),
            folder=folders.current,
            timeout=lane.timeout,
            cancel=lane.cancel,
        )
        lines = Lines(lane.claims)
        ended = process.run(command, lines, Log(log))
    said = transcript.read(lines, ended.status)
    verdict, reason = _judge(lane, said, ended)
    return LaneResult(
        name=lane.name,
        verdict=verdict,
        reason=reason,
        transcript=said,
        tree=lane.tree,
        status=ended.status,
        seconds=ended.seconds,
        peak_memory=ended.peak_memory,
        left_behind=ended.left_behind,
        log=log,
    )


def _judge(lane: Lane, said: Transcript, ended: process.Ended) -> tuple[LaneVerdict, str]:
    problem = _abnormal_end(ended, lane.timeout) or next(iter((*said.problems, *_foreign(lane, said))), "")
    if problem or said.verdict is None:
        return LaneVerdict.ERROR, problem or "no verdict line"
    return said.verdict, said.reason


def _abnormal_end(ended: process.Ended, timeout: float) -> str:
    if ended.reason == "timed out":
        return f"timed out after {timeout:g} s"
    if ended.reason == ABANDONED:
        return ABANDONED
    if ended.reason != "exited":
        return "its supervisor was killed"
    if ended.status >= 0:
        return ""
    name = signal.Signals(-ended.status).name
    return f"killed by {name}" + (" (as the out-of-memory killer does)" if name == "SIGKILL" else "")


def _foreign(lane: Lane, said: Transcript) -> list[str]:
    """List where the probe judged something else than this lane's tree, target or evidence."""
    if said.verdict == LaneVerdict.UNSUPPORTED:
        return []
    problems = []
    if said.target and (said.target.target, said.target.evidence) != (lane.target, lane.evidence):
        problems.append(
            f"it judged {said.target.target} ({said.target.evidence}), asked was {lane.target} ({lane.evidence})"
        )
    if not said.upstream:
        problems.append("no UPSTREAM line: nothing says what was judged")
    loaded = set()
    for line in said.upstream:
        inside = _inside(Path(line.file), lane.tree.folder)
        if line.module.split(".")[0] not in lane.modules:
            problems.append(f"{line.module} is none of the accused modules ({', '.join(lane.modules)})")
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
    except (ValueError, OSError):
        return None
