"""Slurm, by its own commands: sbatch, squeue, scancel. Nothing here knows what the jobs do."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core.errors import HarnessError

#: Variables that would turn a command into another one; SBATCH_QOS, SBATCH_RESERVATION and the like are the user's.
MISLEADING = re.compile(r"SQUEUE_|SCANCEL_|SBATCH_(?:WAIT|JOB_NAME|ARRAY_INX|TEST_ONLY)$|SLURM_(?!CONF$)")
#: How Slurm says that it could not be asked: that is neither a refusal nor the end of a job.
AWAY = re.compile(r"unable to contact|socket timed out|temporarily unable|connection (?:refused|reset)", re.IGNORECASE)
#: How squeue says that it knows none of the jobs (any more).
FORGOTTEN = "Invalid job id specified"
#: And scancel, that there is nothing left to cancel.
ENDED = re.compile(rf"{FORGOTTEN}|already compl", re.IGNORECASE)
#: States behind which a task does nothing more. One that is requeued is PENDING again.
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
#: Why a task waits that no waiting helps: an array that Slurm took and will not run.
NEVER = {
    "AccountNotAllowed", "BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionNodeLimit", "PartitionTimeLimit",
    "QOSNotAllowed",
}  # fmt: skip
#: How long one question may take, in seconds, before Slurm counts as away.
PATIENCE = 120.0


class RefusedError(Exception):
    """Slurm does not take a job, and says why."""


class AwayError(Exception):
    """Slurm cannot be asked now."""


@dataclass(frozen=True)
class Settings:
    """How jobs are submitted.

    Attributes:
        partition: of the cluster; empty: its default.
        account: to be charged; empty: the user's default.
        constraint: features that a node must have; empty: none.
        gpu_types: by target, what the cluster calls a GPU of it; empty where the cluster names no types.
        poll_s: how often squeue is asked, in seconds.

    """

    partition: str = ""
    account: str = ""
    constraint: str = ""
    gpu_types: tuple[tuple[str, str], ...] = ()
    poll_s: float = 5.0

    @property
    def request(self) -> tuple[str, ...]:
        """What makes another sweep of it: everything but how often squeue is asked."""
        types = (f"{target}={name}" for target, name in self.gpu_types)
        return ("slurm", self.partition, self.account, self.constraint, *types)

    @property
    def options(self) -> list[str]:
        """What sbatch is told of them."""
        given = (("partition", self.partition), ("account", self.account), ("constraint", self.constraint))
        return [f"--{name}={value}" for name, value in given if value]


@dataclass(frozen=True)
class Job:
    """An array to be submitted: so many tasks, each of them the same command on one node.

    Attributes:
        name: its own alone, so that it is found again where nobody noted its number.
        tasks: how many.
        gpus: what each task asks for, as ``--gres`` has it; empty: no GPU.
        cores: that each task asks for.
        minutes: that each task may last.
        output: the file of each task's output, with Slurm's own placeholders.
        folder: where they run.
        command: that they run.

    """

    name: str
    tasks: int
    gpus: str
    cores: int
    minutes: int
    output: Path
    folder: Path
    command: tuple[str, ...]

    def arguments(self, settings: Settings) -> list[str]:
        """Build the command line of sbatch."""
        gpus = [f"--gres={self.gpus}"] if self.gpus else []
        return [
            "sbatch",
            "--parsable",
            f"--job-name={self.name}",
            f"--array=0-{self.tasks - 1}",
            "--ntasks=1",
            f"--cpus-per-task={self.cores}",
            *gpus,
            f"--time={self.minutes}",
            "--requeue",
            "--open-mode=append",
            f"--output={self.output}",
            f"--chdir={self.folder}",
            *settings.options,
            f"--wrap=exec {shlex.join(self.command)}",
        ]


@dataclass(frozen=True)
class TaskState:
    """What squeue says of a task: its state in Slurm's words, and why it waits."""

    state: str
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it does nothing more."""
        return self.state in OVER

    @property
    def is_hopeless(self) -> bool:
        """Whether Slurm took it and will not run it."""
        return self.state == "PENDING" and self.reason in NEVER

    @property
    def is_ending(self) -> bool:
        """Whether its command has ended, though Slurm may still wait for the node to say so."""
        return self.is_over or self.state == "COMPLETING"

    @property
    def is_through(self) -> bool:
        """Whether it ended by itself, and well."""
        return self.state == "COMPLETED"


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not MISLEADING.match(name)}
    return kept | {"SLURM_BITSTR_LEN": "0"}  # squeue shortens a long list of tasks otherwise


def _words(text: str) -> str:
    """Return what a command said, on one line, without its own name before each part."""
    parts = (re.sub(r"^(?:sbatch|squeue|scancel|slurm_load_jobs)(?:: error)?:? (?:error: )?", "", line) for line in
             text.splitlines())  # fmt: skip
    return "; ".join(part.strip() for part in parts if part.strip())


def _missing(command: str) -> HarnessError:
    return HarnessError(f"--slurm: {command} is not on PATH. Next: run this on a login node of the cluster")


def submit(job: Job, settings: Settings, lock: int) -> str:
    """Submit an array and return its number.

    sbatch is seen through: an interruption waits until it has said whether the array was taken.

    Args:
        job: the array.
        settings: of the command.
        lock: a descriptor that sbatch holds as long as it lives, also where its caller was killed.

    Raises:
        RefusedError: Slurm does not take it.
        AwayError: Slurm cannot be asked now; the array may have been taken all the same.

    """
    try:
        process = subprocess.Popen(
            job.arguments(settings),
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=[lock],
            start_new_session=True,
        )
    except FileNotFoundError:
        raise _missing("sbatch") from None
    with process:
        try:
            said, wrong = process.communicate()
        except KeyboardInterrupt:
            process.communicate()
            raise
    number = said.strip().partition(";")[0]
    if process.returncode == 0 and number.isdecimal():
        return number
    words = _words(wrong) or f"sbatch ended with status {process.returncode} and said {said.strip()[:80]!r}"
    raise AwayError(words) if AWAY.search(words) else RefusedError(words)


def _asked(command: Sequence[str]) -> str:
    """Run a short command and return what it printed.

    Raises:
        AwayError: Slurm cannot be asked now.
        RefusedError: it said something else that is wrong.

    """
    try:
        ended = subprocess.run(
            command,
            env=_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise _missing(command[0]) from None
    except subprocess.TimeoutExpired:
        raise AwayError(f"{command[0]} did not answer within {PATIENCE:g} s") from None
    if ended.returncode != 0:
        words = _words(ended.stderr)
        raise AwayError(words) if AWAY.search(words) else RefusedError(words)
    return ended.stdout


def find(name: str) -> str:
    """Return the number of the array of that name; empty where Slurm knows none (any more).

    Raises:
        AwayError: Slurm cannot be asked now.

    """
    try:
        lines = _asked(["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%F"]).split()
    except RefusedError:
        return ""
    return min(lines, key=int) if lines else ""


def states(numbers: Sequence[str]) -> dict[tuple[str, int], TaskState]:
    """Return what squeue says of the tasks of arrays, by the array's number and the task's: one question for all.

    A task that is not there is one that Slurm has forgotten: it was over for a while.

    Raises:
        AwayError: Slurm cannot be asked now.

    """
    wanted = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(numbers)}", "--format=%F|%K|%T|%r"]
    try:
        text = _asked(wanted)
    except RefusedError as error:
        if FORGOTTEN in str(error):
            return {}
        raise AwayError(str(error)) from None
    found: dict[tuple[str, int], TaskState] = {}
    for line in text.splitlines():
        number, tasks, state, reason = (*line.split("|", 3), "", "", "")[:4]
        found |= {(number, task): TaskState(state, reason) for task in indices(tasks)}
    return found


def indices(text: str) -> Iterator[int]:
    """Yield the numbers of an array's tasks as squeue writes them: ``7``, ``0-9%4``, ``1-3,8``, ``0-8:2``."""
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip("[] "))
        if match is not None:
            yield from range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))


def cancel(numbers: Sequence[str], names: Sequence[str] = ()) -> str:
    """Cancel arrays, by their numbers or their names; return what Slurm said against it, empty where nothing."""
    said = []
    for command in (["scancel", *numbers] if numbers else [], *(["scancel", f"--name={name}"] for name in names)):
        if command:
            try:
                _asked(command)
            except (AwayError, RefusedError) as error:
                said += [] if ENDED.search(str(error)) else [str(error)]
    return "; ".join(said)
