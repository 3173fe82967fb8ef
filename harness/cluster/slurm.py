"""Slurm: submitit submits job arrays, squeue says how their tasks stand.

submitit asks sacct for states. Without Slurm's accounting sacct says nothing, and a task that was cancelled would be
waited for without end; squeue answers on every cluster.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from harness.cluster import node
from harness.cluster.node import Work
from harness.core import files
from harness.core.errors import HarnessError
from harness.core.words import is_target
from harness.host.gpus import Gpu

#: Variables of a job, or of a command, that would change what the commands of this sweep do: for sbatch a variable
#: counts more than a line of submitit's script.
MISLEADING = re.compile(
    r"SQUEUE_|SCANCEL_|SLURM_(?!CONF$)"
    r"|SBATCH_(?:ARRAY_INX|ERROR|GRES|JOB_NAME|NO_REQUEUE|OPEN_MODE|OUTPUT|TEST_ONLY|TIMELIMIT|WAIT)$"
)
#: How Slurm says that it knows none of the jobs (any more), or that they are over.
FORGOTTEN = re.compile(r"invalid job id specified|already compl", re.IGNORECASE)
#: States after which a task does nothing more. A task that is requeued is PENDING again.
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
#: Reasons to wait that no waiting helps: Slurm took the array and will not run it.
NEVER = {
    "AccountNotAllowed", "BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionNodeLimit", "PartitionTimeLimit",
    "QOSNotAllowed",
}  # fmt: skip
#: An option of sbatch, and its value; not those that the sweep sets itself.
OPTION = r"(?!(?:array|chdir|error|gres|job-name|ntasks|output)\b(?!-))([a-z][a-z-]+)(?:=(.*))?"
#: GPUs of a node that a lane may need.
MOST_GPUS = 16
#: Seconds that one question may take before Slurm counts as out of reach.
PATIENCE = 120.0


class AwayError(Exception):
    """Slurm cannot be asked now, or does not take an array."""


@dataclass(frozen=True)
class Settings:
    """How jobs are submitted."""

    #: by architecture, what the cluster calls its GPU; None where the cluster names no types
    gpu_types: dict[str, str | None]
    options: dict[str, str | None]  # of sbatch, by their long names; None for one without a value

    @property
    def request(self) -> tuple[str, ...]:
        """The words that make another sweep of it."""
        return ("slurm", *(f"{name}={value}" for name, value in (self.gpu_types | self.options).items()))

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that nodes are taken to have; Slurm says where they have fewer than a lane needs."""
        digits = {target: target.removeprefix("sm_").removesuffix("a") for target in self.gpu_types}
        return MOST_GPUS * tuple(
            Gpu(kind or target, (int(digits[target][:-1]), int(digits[target][-1])))
            for target, kind in self.gpu_types.items()
        )


def settings(gpu_types: Iterable[str], options: Iterable[str]) -> Settings:
    """Read ``ARCH[=TYPE]`` and ``NAME[=VALUE]`` from the command line.

    HarnessError is raised where a text is neither, or a name comes twice.
    """
    types = _pairs("--gpu-type", gpu_types, r"(sm_\d+a?)(?:=([\w.-]+))?", "sm_90a=h200")
    if wrong := next((target for target in types if not is_target(target)), None):
        raise HarnessError(f"--gpu-type {wrong}: no architecture such as sm_80. Next: --gpu-type sm_90a=h200")
    return Settings(types, _pairs("--slurm-option", options, OPTION, "partition=gpu"))


def _pairs(option: str, texts: Iterable[str], pattern: str, example: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for text in texts:
        match = re.fullmatch(pattern, text, re.ASCII)
        if match is None or match[1] in found:
            raise HarnessError(f"{option} {text}: no such value, or given twice. Next: {option} {example}")
        found[match[1]] = match[2]
    return found


def prepare(chosen: Settings) -> None:
    """Check that Slurm's commands are here, and take out of the environment what would mislead them.

    HarnessError is raised where a command is not here.
    """
    for command in ("sbatch", "srun", "squeue", "scancel"):
        if shutil.which(command) is None:
            raise HarnessError(f"--slurm: {command} is not on PATH. Next: run this on a login node of the cluster")
    given = {f"SBATCH_{name.upper().replace('-', '_')}" for name in chosen.options}  # they would win over the option
    for name in [name for name in os.environ if MISLEADING.match(name) or name in given]:
        del os.environ[name]


def submit(folder: Path, name: str, work: Sequence[Work], minutes: int, chosen: Settings) -> list[str]:
    """Submit an array, one task for each piece of work (all of one need), and return Slurm's names of the tasks.

    `folder` takes submitit's files. Each task may last so many `minutes`. A kill before this returns leaves tasks that
    do nothing: each waits for its work under Slurm's name, and gives up. AwayError is raised where Slurm does not take
    the array.
    """
    more = {option: True if value is None else value for option, value in chosen.options.items()}
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
        additional_parameters={"requeue": True, "ntasks": 1, "chdir": str(files.REPOSITORY)} | more,
    )
    try:
        return [task.job_id for task in executor.map_array(node.judge, work)]
    except (FailedJobError, FailedSubmissionError) as error:
        raise AwayError(_words(str(error)) or "sbatch failed and said nothing") from None


def _words(text: str) -> str:
    """Return what a command said, on one line, without its own name before each part."""
    said = re.sub(r"(?m)^(?:sbatch|squeue|scancel|slurm_load_jobs)(?:: error)?:? (?:error: )?", "", text)
    return "; ".join(part.strip() for part in said.splitlines() if part.strip())


def _asked(*command: str) -> str:
    """Run a short command and return what it printed; nothing where Slurm has forgotten the jobs."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False, process_group=0
        )
    except subprocess.TimeoutExpired:
        raise AwayError(f"{command[0]} did not answer within {PATIENCE:g} s") from None
    if ended.returncode != 0 and not FORGOTTEN.search(ended.stderr):
        raise AwayError(_words(ended.stderr))
    return ended.stdout


def states(tasks: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the state of tasks in squeue's words, and why each waits; of a task that Slurm has forgotten, nothing.

    AwayError is raised where Slurm cannot be asked now.
    """
    numbers = sorted({task.partition("_")[0] for task in tasks})
    every = ("--noheader", "--states=all", "--array", "--format=%i|%T|%r")
    lines = _asked("squeue", *every, f"--jobs={','.join(numbers)}").splitlines()
    return {task: (state, reason) for task, state, reason in (line.split("|", 2) for line in lines)}


def cancel(what: str) -> str:
    """Cancel what scancel's argument names; return what Slurm said against it, empty where nothing."""
    try:
        return _asked("scancel", what) and ""
    except AwayError as error:
        return str(error)
