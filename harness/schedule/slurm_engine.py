"""The engine of a sweep on a cluster: lays out cells, submits arrays, collects results, and resumes after a kill.

Its state is in a folder beside the run folder, with the suffix ``.slurm``. submitit's files in ``jobs/`` are the work,
the result and the output of each task, by Slurm's name of the task.
"""

import math
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from submitit import SlurmJob

from harness.core import Cache, files
from harness.lane.cell import Cell
from harness.schedule import slurm
from harness.schedule.lane_runner import Runner
from harness.schedule.lanes import Account
from harness.schedule.session import Session
from harness.schedule.slurm import AwayError, Settings, TaskResult, Work
from harness.schedule.task import expected_seconds
from harness.verdict.pack_verdict import outcome_of_error

#: Seconds that a task needs besides its lanes: Python starts on a cold file system, and trees are checked.
OVERHEAD = 300.0
#: The shortest and the longest time between two calls of squeue, in seconds.
SHORTEST_WAIT, LONGEST_WAIT = 0.3, 5.0
#: How many seconds after its end a task may still publish its result: NFS shows a new folder up to a minute late.
LAG = 60.0
#: How many seconds a task may seem to have ended before Slurm requeues it.
REQUEUE_TIME = 2.0


def group_into_arrays(works: Iterable[Work]) -> list[list[Work]]:
    """Return the work of each array: all of one place and as many jobs, urgent work first, then the longest."""
    arrays: dict[tuple[str, int], list[Work]] = {}
    for work in sorted(works, key=lambda work: (not work.lanes[0].urgent, -sum(map(expected_seconds, work.lanes)))):
        arrays.setdefault((work.place, work.jobs), []).append(work)
    return list(arrays.values())


def time_limit_minutes(array: Iterable[Work]) -> int:
    """Return the time limit of an array's tasks, in minutes: enough for the time-outs of the lanes of each."""
    return math.ceil((OVERHEAD + max(len(work.lanes) * work.cell.stated.timeout_s for work in array)) / 60)


def run(settings: Settings, session: Session, cells: list[Cell]) -> Account:
    """Judge cells on nodes, in job arrays. The tasks of an earlier command are not submitted again.

    HarnessError is raised if Slurm's commands are not installed.
    """
    slurm.prepare(settings)
    folder = session.folder.with_name(f"{session.folder.name}.slurm")
    account = Account(session)
    account.plan(cells)
    collection = Collection(settings, account, folder)
    try:
        collection.begin(cells)
        collection.collect()
    except KeyboardInterrupt:
        account.interrupted = True
        collection.cancel()
    if not account.interrupted and not account.not_run and all(outcome.runs for outcome in account.results.values()):
        shutil.rmtree(folder, ignore_errors=True)
    for cell in cells:
        account.settle(cell, at_end=True)
    return account


@dataclass
class Collection:
    """The part of one command in a sweep on a cluster."""

    settings: Settings
    account: Account  # the plan and the results
    folder: Path  # of the state
    _waiting: dict[str, Work] = field(default_factory=dict)  # the work of tasks without a result, by Slurm's name
    _ended_at: dict[str, float] = field(default_factory=dict)  # when such a task was first seen to have ended
    _last_told: str = ""

    def __post_init__(self) -> None:
        self._session = self.account.session
        self._tell = self._session.progress.tell
        self._job_name = f"reproducer-{self._session.folder.name}"

    def begin(self, cells: Iterable[Cell]) -> None:
        """Wait for the tasks of an earlier command, and submit the rest.

        If a kill came before that command named the work of its tasks, they find none and end.
        """
        works = self._works(cells)
        self._session.progress.begin(len(self.account.pending()), None)
        for job in self._jobs():
            work = works.pop(job.submission().args[0].keys, None)
            if work is not None:
                self._waiting[job.job_id] = work
        unsubmitted = [work for work in works.values() if not self.account.is_complete(work.cell)]
        for array in group_into_arrays(self._lay_out(unsubmitted)):
            self._submit(array)

    def _works(self, cells: Iterable[Cell]) -> dict[tuple[str, ...], Work]:
        """Map the keys of lanes to the work on cells that can be judged; cells with the same lanes share one."""
        here, works = self._session.cache, dict[tuple[str, ...], Work]()
        cache = Cache(here.root, offline=True, mirrors=here.mirrors)
        for cell in cells:
            if lanes := tuple(self.account.planned[cell.name]):
                kind, jobs = self.settings.gpu_types.get(cell.gpu), self._session.most_jobs * cell.stated.ranks
                place = ":".join(filter(None, ("gpu", kind, str(lanes[0].gpus)))) if cell.gpu else "cpu"
                inputs = {path.name: path.read_bytes() for path in cell.pack.script.parent.iterdir() if path.is_file()}
                work = Work(cell, lanes, place, cache, jobs, inputs)
                works.setdefault(work.keys, work)
        return works

    def _jobs(self) -> list[SlurmJob[TaskResult]]:
        """List the tasks of this command and of earlier ones, except those that were cancelled."""
        paths = sorted((self.folder / "jobs").glob("*_submitted.pkl"))
        return [SlurmJob(path.parent, path.name.removesuffix("_submitted.pkl")) for path in paths]

    def _lay_out(self, works: list[Work]) -> list[Work]:
        """Lay out trees and dependencies in the cache, since nodes have no network; return the work without errors."""
        runner = Runner(self._session)
        for work in works:
            try:
                runner.prepare(work.cell)
            except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
                self.account.fail(outcome_of_error(error, work.cell))
        return [work for work in works if work.cell.name not in self.account.results]

    def _submit(self, array: list[Work]) -> None:
        """Submit an array. If Slurm does not accept it, its cells are not run."""
        try:
            tasks = slurm.submit(self.folder / "jobs", self._job_name, array, time_limit_minutes(array), self.settings)
        except AwayError as error:
            reason = f"Slurm does not take a task on {array[0].place}: {error}"
            self._tell(reason)
            for work in array:
                self._give_up(work, reason)
            return
        self._waiting |= dict(zip(tasks, array, strict=True))
        self._tell(f"{array[0].place}: {len(array)} tasks, Slurm's job {tasks[0].partition('_')[0]}")

    def _give_up(self, work: Work, reason: str) -> None:
        for key in work.keys:
            self.account.not_run.setdefault(key, reason)

    def collect(self) -> None:
        """Take the results of tasks until every task has ended, or the budget."""
        start, stop_at = time.monotonic(), self._session.stop_at
        while self._waiting:
            self._take_results()
            self._check_states()
            if stop_at is not None and time.monotonic() > stop_at:
                self.cancel()
                for work in self._waiting.values():
                    self._give_up(work, "the budget ended before Slurm was through with it")
                return
            if self._waiting:
                time.sleep(min(LONGEST_WAIT, max(SHORTEST_WAIT, (time.monotonic() - start) / 20)))

    def _check_states(self) -> None:
        """Ask squeue once about the tasks without a result."""
        try:
            states = slurm.states(self._waiting) if self._waiting else {}
        except AwayError as error:
            self._tell_once(f"Slurm cannot be reached: {error}; jobs run on, and it is asked again")
            return
        now, waiting = time.monotonic(), Counter[str]()
        for task in list(self._waiting):
            state, reason = states.get(task, ("", ""))
            patience = LAG if state in {"", "COMPLETED"} else REQUEUE_TIME
            if state == "PENDING" and reason in slurm.NEVER:
                slurm.cancel(task)
                self._lose(task, f"is never run ({reason})")
            elif state and state not in slurm.OVER:
                self._ended_at.pop(task, None)
                waiting[f"{state.lower()} ({reason})".removesuffix(" (None)")] += 1
            elif now - self._ended_at.setdefault(task, now) >= patience:
                self._lose(task, f"is {state or 'no longer known'} and returned nothing")
        self._tell_once(", ".join(f"{count} {state}" for state, count in waiting.items()))

    def _tell_once(self, text: str) -> None:
        if text and text != self._last_told:
            self._tell(text)
        self._last_told = text

    def _lose(self, task: str, reason: str) -> None:
        """Give up a task that returned no result."""
        work = self._waiting.pop(task)
        self._give_up(work, f"Slurm: task {task} {reason}")
        self._tell(f"{work.cell.name}: task {task} {reason}; what it printed: {self.folder}/jobs/{task}_0_log.out")

    def _take_results(self) -> None:
        """Take the results of tasks. If Slurm started a task twice, its first result counts."""
        for task, work in list(self._waiting.items()):
            job: SlurmJob[TaskResult] = SlurmJob(self.folder / "jobs", task)
            if job.paths.result_pickle.exists():
                try:
                    result = job.result()
                except Exception as error:  # noqa: BLE001 - the task raised it, or the file is damaged
                    self._lose(task, f"returned nothing that can be read: {type(error).__name__}")
                    continue
                del self._waiting[task]
                self._take(work, result)

    def _take(self, work: Work, result: TaskResult) -> None:
        """Store the result of a task; an end that the journal has stays as it is."""
        account = self.account
        if result.reason:
            self._give_up(work, result.reason)
        for fault in result.faults:
            self._session.note(fault)
            self._tell(f"{fault.place}: {fault.reason}, after {fault.task}; what its task printed names the node")
        for end in result.ends:
            if end.key not in self._session.journal.ends:
                if end.log is not None:
                    files.write_atomic(self._session.folder / end.log.file, result.logs[end.log.file])
                self._session.journal.append(end)  # its log is on disk
                self._session.progress.end(end.key, account.count(end))
        account.settle(work.cell)

    def cancel(self) -> None:
        """Take the results so far, and cancel the other tasks; another command submits them again."""
        self._take_results()
        error = slurm.cancel(f"--name={self._job_name}")
        for job in self._jobs():  # also of an array whose submission was interrupted
            if not job.paths.result_pickle.exists():
                job.paths.submitted_pickle.unlink()
        self._tell("; ".join(filter(None, [f"cancelled: {len(self._waiting)} tasks", error])))
