"""A task on its node: judge one cell as on any host, and return the ends of its lanes."""

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
from harness.schedule import lanes
from harness.schedule.journal import Journal
from harness.schedule.session import GpuFault, Session
from harness.schedule.task import Task


@dataclass(frozen=True)
class Work:
    """The work of a task."""

    cell: Cell
    lanes: tuple[Task, ...]  # of the cell
    place: str  # where the lanes run: the GPUs in sbatch's words, such as ``gpu:h200:2``, or ``cpu``
    cache: Cache  # without network, since nodes have none
    jobs: int  # how many lanes run at once; a lane of several ranks counts once for each
    inputs: dict[str, bytes]  # script, contract and patches, by file name: somebody may edit the pack meanwhile

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the lanes; they change with the script."""
        return tuple(lane.key for lane in self.lanes)

    @property
    def gpus(self) -> int:
        return self.lanes[0].gpus


@dataclass(frozen=True)
class TaskResult:
    """The result of a task."""

    ends: tuple[LaneEnd, ...] = ()
    logs: dict[str, str] = field(default_factory=dict)  # the scrubbed logs of the lanes, by path in the run folder
    reason: str = ""  # why a lane was not run, or the cell could not be judged
    faults: tuple[GpuFault, ...] = ()  # of the task's GPUs


def judge(work: Work) -> TaskResult:
    """Judge a cell; submitit calls this on the node. KeyboardInterrupt is raised if Slurm stops the task."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # submitit ignores it
    sys.stdout.write(f"{socket.gethostname()}: {work.cell.name}\n")
    if not work.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # without a request for GPUs Slurm sets NoDevFiles, or nothing
    with gpu_pool() as pool:
        return _judge(work, pool)


def _judge(work: Work, pool: GpuPool) -> TaskResult:
    cell, cache, host = work.cell, work.cache, this_host.detect(pool)
    if host.count(cell.gpu) < work.gpus:
        if pool.lost:
            fault = GpuFault(work.place, cell.gpu, pool.lost[0], cell.name)
            return TaskResult(faults=(fault,), reason=fault.reason)
        names = ", ".join(sorted({f"{gpu.name} ({gpu.target})" for gpu in host.gpus})) or "no GPU"
        return TaskResult(reason=f"Slurm gave {names} for {work.place}, and not {work.gpus} of {cell.gpu}")
    with tempfile.TemporaryDirectory(prefix="reproducer-") as text:
        folder, faults = Path(text), list[GpuFault]()
        inputs = folder / cell.pack.name
        inputs.mkdir()
        for name, data in work.inputs.items():
            (inputs / name).write_bytes(data)
        environment = built_environment.find_environment(cache, host, cell.stated.environment)
        cell = replace(cell, pack=replace(cell.pack, inputs=inputs), environment=environment)
        session = Session(
            cache=cache,
            host=host,
            devices=pool.devices,
            folder=folder,
            journal=Journal(),
            command=lambda _: "",
            note=faults.append,
            jobs=work.jobs,
            repeat=work.lanes[-1].number,
            watch=GpuWatch(),
            threads=1,
            locks=folder / "locks",  # no other task has these GPUs, and all nodes number theirs alike
        )
        account = lanes.run(session, [cell], receipts=False)
        if account.interrupted:
            raise KeyboardInterrupt
        done, lanes_here = session.journal.ends, account.planned[cell.name]
        pairs = zip(work.keys, lanes_here, strict=True)  # the keys of the login node name another host
        ends = tuple(replace(done[lane.key], key=key, place=work.place) for key, lane in pairs if lane.key in done)
        failures = [outcome.judgement.reason for outcome in account.results.values() if not outcome.runs]
        return TaskResult(
            ends=ends,
            logs={end.log.file: (folder / end.log.file).read_text("utf-8") for end in ends if end.log is not None},
            reason=next(iter([*failures, *account.not_run.values()]), ""),
            faults=tuple(replace(fault, place=work.place) for fault in faults),
        )
