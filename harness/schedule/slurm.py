"""Slurm: submitit submits job arrays, squeue gives the states of their tasks; a task judges one cell on its node.

submitit asks sacct for states. Without Slurm's accounting sacct answers nothing, and a sweep would wait for a cancelled
task without end. squeue answers on every cluster.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from harness.core import Cache, HarnessError, files
from harness.core.words import TARGET_PATTERN
from harness.host import host as this_host
from harness.host.gpu_health import GpuWatch
from harness.host.host import Gpu, GpuPool
from harness.host.nvml import gpu_pool
from harness.lane import Cell, LaneEnd
from harness.lane.environment import find_environment
from harness.schedule import lanes
from harness.schedule.session import GpuFault, Journal, Session
from harness.schedule.task import Task

#: Variables that would change what this sweep's commands do: sbatch prefers a variable to a line of submitit's script.
MISLEADING = re.compile(
    r"SQUEUE_|SCANCEL_|SLURM_(?!CONF$)"
    r"|SBATCH_(?:ARRAY_INX|ERROR|GRES|JOB_NAME|NO_REQUEUE|OPEN_MODE|OUTPUT|TEST_ONLY|TIMELIMIT|WAIT)$"
)
#: What Slurm answers if it no longer knows the jobs, or they have ended.
FORGOTTEN = re.compile(r"invalid job id specified|already compl", re.IGNORECASE)
#: The states of tasks that have ended. A task that is requeued is PENDING again.
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
#: The reasons of pending tasks that Slurm will never run.
NEVER = {
    "AccountNotAllowed", "BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionNodeLimit", "PartitionTimeLimit",
    "QOSNotAllowed",
}  # fmt: skip
#: An option of sbatch with its value, except the options that the sweep sets itself.
OPTION = r"(?!(?:array|chdir|error|gres|job-name|ntasks|output)\b(?!-))([a-z][a-z-]+)(?:=(.*))?"
#: How many GPUs of one node a lane may need.
MOST_GPUS = 16
#: After so many seconds without an answer Slurm counts as out of reach.
PATIENCE = 120.0


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
        environment = find_environment(cache, host, cell.stated.environment)
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


class AwayError(Exception):
    """Slurm cannot be asked now, or does not take an array."""


@dataclass(frozen=True)
class Settings:
    """How jobs are submitted."""

    gpu_types: dict[str, str | None]  # the cluster's name of a GPU by its architecture; None without a name
    options: dict[str, str | None]  # of sbatch, by their long names; None for an option without a value

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that nodes are assumed to have. Slurm refuses a task that needs more than they have."""
        digits = {target: target.removeprefix("sm_").removesuffix("a") for target in self.gpu_types}
        return MOST_GPUS * tuple(
            Gpu(kind or target, f"{digits[target][:-1]}.{digits[target][-1]}")
            for target, kind in self.gpu_types.items()
        )


def settings(gpu_types: Iterable[str], options: Iterable[str]) -> Settings:
    """Read ``ARCH[=TYPE]`` and ``NAME[=VALUE]`` from the command line.

    HarnessError is raised if a text has another form, or a name occurs twice.
    """
    types = _pairs("--gpu-type", gpu_types, rf"(?!cpu)({TARGET_PATTERN.pattern})(?:=([\w.-]+))?", "sm_90a=h200")
    return Settings(types, _pairs("--slurm-option", options, OPTION, "partition=gpu"))


def _pairs(option: str, texts: Iterable[str], pattern: str, example: str) -> dict[str, str | None]:
    pairs: dict[str, str | None] = {}
    for text in texts:
        match = re.fullmatch(pattern, text, re.ASCII)
        if match is None or match[1] in pairs:
            raise HarnessError(f"{option} {text}: no such value, or given twice. Next: {option} {example}")
        pairs[match[1]] = match[2]
    return pairs


def prepare(settings: Settings) -> None:
    """Check that Slurm's commands are installed, and delete variables that would change what they do.

    HarnessError is raised if a command is missing.
    """
    for command in ("sbatch", "srun", "squeue", "scancel"):
        if shutil.which(command) is None:
            raise HarnessError(f"--slurm: {command} is not on PATH. Next: run this on a login node of the cluster")
    overriding = {f"SBATCH_{name.upper().replace('-', '_')}" for name in settings.options}
    for name in [name for name in os.environ if MISLEADING.match(name) or name in overriding]:
        del os.environ[name]


def submit(folder: Path, name: str, work: Sequence[Work], minutes: int, settings: Settings) -> list[str]:
    """Submit an array, one task for each piece of work, and return Slurm's names of the tasks.

    All work has the same place and jobs. `folder` is for submitit's files; `minutes` is the time limit of a task. If a
    kill comes before this returns, the tasks find no work under their names and end. AwayError is raised if Slurm does
    not accept the array.
    """
    options = {option: True if value is None else value for option, value in settings.options.items()}
    executor = submitit.SlurmExecutor(folder)
    executor.update_parameters(
        job_name=name,
        gres=work[0].place if work[0].gpus else None,
        cpus_per_task=work[0].jobs,
        time=minutes,
        array_parallelism=len(work),
        stderr_to_stdout=True,
        use_srun=False,  # a task is one process, and a step of its own would take time
        wckey=None,
        additional_parameters={"requeue": True, "ntasks": 1, "chdir": str(files.REPOSITORY)} | options,
    )
    try:
        return [task.job_id for task in executor.map_array(judge, work)]
    except (FailedJobError, FailedSubmissionError) as error:
        raise AwayError(_words(str(error)) or "sbatch failed and said nothing") from None


def _words(text: str) -> str:
    """Return the error output of a command on one line, without the name of the command."""
    lines = re.sub(r"(?m)^(?:sbatch|squeue|scancel|slurm_load_jobs)(?:: error)?:? (?:error: )?", "", text)
    return "; ".join(part.strip() for part in lines.splitlines() if part.strip())


def _run(*command: str) -> str:
    """Run a short command and return its output. It is no error that Slurm has forgotten the jobs."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False, process_group=0
        )
    except subprocess.TimeoutExpired:
        raise AwayError(f"{command[0]} did not answer within {PATIENCE:g} s") from None
    if process.returncode != 0 and not FORGOTTEN.search(process.stderr):
        raise AwayError(_words(process.stderr))
    return process.stdout


def states(tasks: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return squeue's state of each task, and its reason; a task that Slurm has forgotten is left out.

    AwayError is raised if Slurm does not answer.
    """
    jobs = sorted({task.partition("_")[0] for task in tasks})
    options = ("--noheader", "--states=all", "--array", "--format=%i|%T|%r")
    lines = _run("squeue", *options, f"--jobs={','.join(jobs)}").splitlines()
    return {task: (state, reason) for task, state, reason in (line.split("|", 2) for line in lines)}


def cancel(argument: str) -> str:
    """Cancel tasks by an argument of scancel; return Slurm's error, or an empty text."""
    try:
        _run("scancel", argument)
    except AwayError as error:
        return str(error)
    return ""
