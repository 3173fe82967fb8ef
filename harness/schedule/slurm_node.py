"""A task on its node: judge one cell as on any host, and return the ends of its lanes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.core.cache import Cache
from harness.host import host as this_host
from harness.host.gpu_health import GpuWatch
from harness.host.gpus import GpuPool
from harness.host.nvml import gpu_pool
from harness.lane import built_environment
from harness.lane.cell import Cell
from harness.lane.record import LaneEnd
from harness.receipt import redaction
from harness.schedule import lanes
from harness.schedule.journal import Journal
from harness.schedule.session import GpuFault, Session
from harness.schedule.task import Task
from harness.verdict.pack_verdict import Judgement

#: A lane may take so many times as long as before: on another node, with nothing compiled in the cache.
MARGIN = 4.0


@dataclass(frozen=True)
class Work:
    """The work of a task."""

    cell: Cell
    lanes: tuple[Task, ...]  # of the cell, with their known durations
    kind: str  # the cluster's name of the GPU; empty without a name
    cache: Path  # the folder of the cache
    mirrors: Path | None  # the folder of the mirrors
    jobs: int  # how many lanes run at once; a lane of several ranks counts once for each

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the lanes; they change with the script."""
        return tuple(lane.key for lane in self.lanes)

    @property
    def gpus(self) -> int:
        """How many GPUs each lane needs."""
        return self.lanes[0].gpus

    @property
    def place(self) -> str:
        """Where the lanes run: the GPUs in sbatch's words, such as ``gpu:h200:2``, or ``cpu``."""
        return ":".join(part for part in ("gpu", self.kind, str(self.gpus)) if part) if self.gpus else "cpu"

    @property
    def longest(self) -> float:
        """How many seconds the lanes may take together. No lane takes longer than its time-out."""
        bound = self.cell.timeout or self.cell.stated.timeout_s
        return sum(bound if lane.seconds is None else min(bound, MARGIN * lane.seconds) for lane in self.lanes)


@dataclass(frozen=True)
class TaskResult:
    """The result of a task."""

    ends: tuple[LaneEnd, ...] = ()
    logs: dict[str, str] = field(default_factory=dict)  # the scrubbed logs of the lanes, by path in the run folder
    not_run: dict[str, str] = field(default_factory=dict)  # why a lane was not run, by its key
    faults: tuple[GpuFault, ...] = ()  # of the task's GPUs
    failure: Judgement | None = None  # why the cell could not be judged


def judge(work: Work) -> TaskResult:
    """Judge a cell; submitit calls this on the node. KeyboardInterrupt is raised if Slurm stops the task."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # submitit ignores it
    sys.stdout.write(f"{socket.gethostname()}: {work.cell.name}\n")
    if not work.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # without a request for GPUs Slurm sets NoDevFiles, or nothing
    with gpu_pool() as pool:
        return _judge(work, pool)


def _judge(work: Work, pool: GpuPool) -> TaskResult:
    cell, host = work.cell, this_host.detect(pool)
    if host.count(cell.gpu) < work.gpus:
        if pool.lost:
            fault = GpuFault(work.place, work.kind or cell.gpu, pool.lost[0], cell.name)
            return TaskResult(faults=(fault,), not_run=dict.fromkeys(work.keys, fault.reason))
        names = ", ".join(sorted({f"{gpu.name} ({gpu.target})" for gpu in host.gpus})) or "no GPU"
        reason = f"Slurm gave {names} for {work.place}, and not {work.gpus} of {cell.gpu}"
        return TaskResult(not_run=dict.fromkeys(work.keys, reason))
    cache = Cache(work.cache, offline=True, mirrors=work.mirrors)
    cell = replace(cell, environment=built_environment.find_environment(cache, host, cell.stated.environment))
    with tempfile.TemporaryDirectory(prefix="reproducer-") as text:
        folder, faults = Path(text), list[GpuFault]()
        session = Session(
            cache=cache,
            host=host,
            devices=pool.devices,
            folder=folder,
            journal=Journal(),
            command=lambda _: "",
            note=faults.append,
            jobs=work.jobs,
            watch=GpuWatch(),
            threads=1,
            locks=folder / "locks",  # no other task has these GPUs, and all nodes number theirs alike
        )
        planned = [replace(lane, cell=cell) for lane in work.lanes]  # with the keys of the login node
        account = lanes.run(session, [cell], receipts=False, plan={cell.name: planned})
        if account.interrupted:
            raise KeyboardInterrupt
        ends = tuple(replace(end, place=work.place) for key in work.keys if (end := session.journal.ends.get(key)))
        outcome = account.results.get(cell.name)
        failure = None if outcome is None or outcome.runs else outcome.judgement
        if failure is not None:
            failure = replace(failure, reason=redaction.host_scrubber(cache.places).scrub(failure.reason))
        return TaskResult(
            ends=ends,
            logs={end.log.file: (folder / end.log.file).read_text("utf-8") for end in ends if end.log is not None},
            not_run=account.not_run,
            faults=tuple(replace(fault, place=work.place) for fault in faults),
            failure=failure,
        )
