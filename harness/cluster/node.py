"""A task on its node: judge one cell with the ordinary worker, and return what its lanes showed."""

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
from harness.host.gpus import GpuPool, gpu_pool
from harness.host.host import Host
from harness.lane import built_environment
from harness.lane.cell import Cell
from harness.lane.record import LaneEnd
from harness.receipt import redaction
from harness.schedule import lanes
from harness.schedule.journal import Journal
from harness.schedule.session import GpuFault, Session
from harness.schedule.task import Task
from harness.verdict.pack_verdict import Judgement

#: A lane may last so many times as long as it did before: another node, and a cache with nothing compiled.
MARGIN = 4.0


@dataclass(frozen=True)
class Work:
    """What a task is to do."""

    cell: Cell  # to be judged
    lanes: tuple[Task, ...]  # of the cell, with what is known of their durations
    kind: str  # what the cluster calls its GPU
    cache: Path  # the folder of the cache
    mirrors: Path | None  # that of the repositories; None: there is none
    jobs: int  # how many lanes at once, one of several ranks counting as that many

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its lanes: they tell the cell from the same after a change of its script."""
        return tuple(lane.key for lane in self.lanes)

    @property
    def gpus(self) -> int:
        """How many GPUs its lanes need."""
        return self.lanes[0].gpus

    @property
    def place(self) -> str:
        """Where the lanes run: the GPUs as sbatch is asked for them, such as ``gpu:h200:2``, or ``cpu``."""
        return ":".join(part for part in ("gpu", self.kind, str(self.gpus)) if part) if self.gpus else "cpu"

    @property
    def longest(self) -> float:
        """How long its lanes may last together, in seconds: no lane outlives its own time-out."""
        bound = self.cell.timeout or self.cell.stated.timeout_s
        return sum(bound if lane.seconds is None else min(bound, MARGIN * lane.seconds) for lane in self.lanes)


@dataclass(frozen=True)
class Showed:
    """What a task showed."""

    ends: tuple[LaneEnd, ...] = ()  # of the cell's lanes
    logs: dict[str, str] = field(default_factory=dict)  # the scrubbed log of each, by its path in the run folder
    not_run: dict[str, str] = field(default_factory=dict)  # why a lane was not run, by its key
    faults: tuple[GpuFault, ...] = ()  # of the GPUs that the task had
    failure: Judgement | None = None  # why the cell could not be judged


def judge(work: Work) -> Showed:
    """Judge a cell; submitit calls it on the node. KeyboardInterrupt is raised where the task was told to stop."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # submitit passes it over
    sys.stdout.write(f"{socket.gethostname()}: {work.cell.name}\n")
    if not work.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Slurm says NoDevFiles, or nothing, where no GPU was asked for
    with gpu_pool() as pool:
        return _judged(work, this_host.detect(pool), pool)


def _judged(work: Work, host: Host, pool: GpuPool) -> Showed:
    cell = work.cell
    if host.count(cell.gpu) < work.gpus:
        if pool.lost:
            fault = GpuFault(work.place, work.kind or cell.gpu, pool.lost[0], cell.name)
            return Showed(faults=(fault,), not_run=dict.fromkeys(work.keys, fault.reason))
        names = ", ".join(sorted({f"{gpu.name} ({gpu.target})" for gpu in host.gpus})) or "no GPU"
        reason = f"Slurm gave {names} for {work.place}, and not {work.gpus} of {cell.gpu}"
        return Showed(not_run=dict.fromkeys(work.keys, reason))
    cache = Cache(work.cache, offline=True, mirrors=work.mirrors)
    cell = replace(cell, environment=built_environment.environment(cache, host, cell.stated.environment))
    with tempfile.TemporaryDirectory(prefix="reproducer-") as text:
        folder = Path(text)
        session = Session(
            cache=cache,
            host=host,
            devices=pool.devices,
            folder=folder,
            journal=Journal(),
            command=lambda _: "",
            jobs=work.jobs,
            watch=GpuWatch(),
            threads=1,
            locks=folder / "locks",  # the GPUs are this task's alone, and their numbers every node's
        )
        planned = [replace(lane, cell=cell) for lane in work.lanes]  # as the login node did: by its keys
        account = lanes.run(session, [cell], receipts=False, plan={cell.name: planned})
        if account.interrupted:
            raise KeyboardInterrupt
        found = map(session.journal.read, work.keys)
        ends = tuple(replace(end, place=work.place) for end in found if end is not None)
        outcome = account.results.get(cell.name)
        failure = None if outcome is None or outcome.runs else outcome.judgement
        if failure is not None:
            failure = replace(failure, reason=redaction.of_host(cache.places).scrub(failure.reason))
        return Showed(
            ends=ends,
            logs={end.log.file: (folder / end.log.file).read_text("utf-8") for end in ends if end.log is not None},
            not_run=account.not_run,
            faults=tuple(replace(fault, place=work.place) for fault in account.faults),
            failure=failure,
        )
