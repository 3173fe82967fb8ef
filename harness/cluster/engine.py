"""The engine of a sweep on a cluster: lays out, submits, counts what was returned; goes on after its own death.

What it knows lies beside the run folder, in one of the same name with the suffix ``.slurm``:

- ``jobs/``: submitit's files: by Slurm's names of the tasks, what each has to do, returned and printed;
- ``packs/``: the scripts, contracts and patches as they were then.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from submitit import SlurmJob

from harness.cluster import slurm
from harness.cluster.node import Showed, Work
from harness.cluster.slurm import AwayError, Settings
from harness.core import files
from harness.lane.cell import Cell
from harness.lane.record import LaneEnd
from harness.schedule import lanes
from harness.schedule.lane_runner import Runner
from harness.schedule.lanes import Settling
from harness.schedule.scheduler import Account
from harness.schedule.session import Session
from harness.schedule.task import expected_seconds
from harness.verdict.outcome import Outcome, unjudged
from harness.verdict.pack_verdict import Judgement

#: Tasks of an array: Slurm's own limit (MaxArraySize) is 1001 where nobody set another.
MOST_TASKS = 1000
#: Seconds that a task has besides: Python on a cold file system, trees to be checked.
BESIDES = 300.0
#: Minutes, at least: clusters start short jobs no sooner than that.
SHORTEST = 10
#: How often squeue is asked, in seconds: of a sweep that has just begun, and of a long one.
OFTEN, SELDOM = 0.3, 5.0
#: Seconds for which a task that is over may still publish: NFS shows a folder up to a minute late.
LAG = 60.0
#: Seconds for which a task may look over that Slurm is about to start again.
MOMENT = 2.0


def beside(run: Path) -> Path:
    """Return the folder of what a sweep's engine knows."""
    return run.with_name(f"{run.name}.slurm")


def arrays_of(works: Iterable[Work]) -> Iterator[list[Work]]:
    """Yield the work of each array: all of one need, what was left out last time and then the longest first."""

    def order(work: Work) -> tuple[bool, float]:
        return not any(lane.urgent for lane in work.lanes), -sum(map(expected_seconds, work.lanes))

    needs: dict[tuple[str, int], list[Work]] = {}
    for work in sorted(works, key=order):
        needs.setdefault((work.place, work.jobs), []).append(work)
    for array in needs.values():
        yield from (array[start : start + MOST_TASKS] for start in range(0, len(array), MOST_TASKS))


def minutes(array: Iterable[Work]) -> int:
    """Return the time limit of an array's tasks, in minutes: that of the longest."""
    return max(SHORTEST, math.ceil((BESIDES + max(work.longest for work in array)) / 60))


def run(settings: Settings, session: Session, cells: list[Cell]) -> Account:
    """Judge cells on nodes, in job arrays; what an earlier command submitted is not submitted again.

    HarnessError is raised where Slurm's commands are not here.
    """
    slurm.prepare(settings)
    folder = beside(session.folder)
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    account = Account(planned=lanes.planned(session, cells))
    collection = Collection(settings, session, folder, account)
    try:
        collection.begin(cells)
        collection.collect()
    except KeyboardInterrupt:
        account.interrupted = True
        collection.cancel()
    if not account.interrupted and not account.not_run and all(one.runs for one in account.results.values()):
        shutil.rmtree(folder, ignore_errors=True)
    for cell in cells:
        collection.settling.settle(cell, at_end=True)
    return account


@dataclass
class Collection:
    """One command's part in a sweep on a cluster."""

    settings: Settings  # how jobs are submitted
    session: Session  # whose journal takes the ends of lanes
    folder: Path  # what is known, on disk
    account: Account  # what is planned, and what came of it
    _cells: dict[tuple[str, ...], list[Cell]] = field(default_factory=dict)  # by the keys of their lanes
    _waiting: dict[str, Work] = field(default_factory=dict)  # by Slurm's names of the tasks
    _over_since: dict[str, float] = field(default_factory=dict)
    _said: str = ""

    @property
    def settling(self) -> Settling:
        """What judges cells by the ends in the journal."""
        return Settling(self.session, self.account)

    def tell(self, text: str) -> None:
        """Say something to people."""
        self.session.progress.tell(text)

    @property
    def _job_name(self) -> str:
        return f"reproducer-{self.session.folder.name}"

    def begin(self, cells: Iterable[Cell]) -> None:
        """Follow what an earlier command submitted, and submit the rest."""
        works = self._works(cells)
        ended = [lane.key in self.session.journal for work in works for lane in work.lanes]
        self.account.resumed = sum(ended)
        self.account.total = len(ended) - sum(ended)
        self.session.progress.begin(self.account.total, None)
        left = [work for work in self._not_followed(works) if self.settling.missing(work.cell)]
        for array in arrays_of(self._laid_out(left)):
            self._submit(array)

    def _works(self, cells: Iterable[Cell]) -> list[Work]:
        """List the cells that can be judged; of two with the same lanes (the newest release is the pinned one) one."""
        session, found = self.session, dict[tuple[str, ...], Work]()
        for cell in cells:
            lanes = tuple(self.account.planned[cell.name])
            if lanes:
                kind, jobs = self.settings.gpu_types.get(cell.gpu, ""), session.most_jobs * lanes[0].cores
                cache = session.cache
                work = Work(cell, lanes, kind or "", cache.root, cache.mirrors, jobs)
                found.setdefault(work.keys, work)
                self._cells.setdefault(work.keys, []).append(cell)
        return list(found.values())

    def _not_followed(self, works: list[Work]) -> list[Work]:
        """Follow the tasks of an earlier command; return the cells that none of them has.

        Tasks of a command that was killed before it named their work find none, and end.
        """
        left = {work.keys: work for work in works}
        for path in sorted((self.folder / "jobs").glob("*_submitted.pkl")):
            job: SlurmJob[Showed] = SlurmJob(path.parent, path.name.removesuffix("_submitted.pkl"))
            work = left.pop(job.submission().args[0].keys, None)
            if work is not None:
                self._waiting[job.job_id] = work
        return list(left.values())

    def _laid_out(self, left: list[Work]) -> list[Work]:
        """Lay out in the cache what nodes need, since they reach no network; return the work where that went well."""
        session = self.session
        runner = Runner(session, session.folder)
        failures: dict[tuple[str, str, str], Judgement | None] = {}
        for work in left:
            shared = (work.cell.pack.name, work.cell.column, work.cell.stated.dependencies)
            if shared not in failures:
                failures[shared] = None
                try:
                    runner.prepare(work.cell)
                except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
                    failures[shared] = unjudged(error, work.cell).judgement
            self._fail(work, failures[shared])
        return [work for work in left if work.cell.name not in self.account.results]

    def _submit(self, array: list[Work]) -> None:
        """Submit an array; where Slurm does not take it, its cells are not run."""
        frozen = [self._frozen(work) for work in array]
        try:
            tasks = slurm.submit(self.folder / "jobs", self._job_name, frozen, minutes(array), self.settings)
        except AwayError as error:
            reason = f"Slurm does not take a task on {array[0].place}: {error}"
            self.tell(reason)
            for work in array:
                self._give_up(work, reason)
            return
        self._waiting |= dict(zip(tasks, array, strict=True))
        self.tell(f"{array[0].place}: {len(array)} tasks, Slurm's job {tasks[0].partition('_')[0]}")

    def _frozen(self, work: Work) -> Work:
        """Return work with copies of its pack's files, whatever is edited meanwhile."""
        pack = work.cell.pack
        copy = self.folder / "packs" / files.key_of(*work.keys) / pack.name
        if not copy.exists():
            shutil.copytree(pack.inputs or pack.folder, copy)
        return replace(work, cell=replace(work.cell, pack=replace(pack, inputs=copy)))

    def _fail(self, work: Work, failure: Judgement | None) -> None:
        if failure is not None:
            for cell in self._cells[work.keys]:
                self.account.results[cell.name] = Outcome(cell, failure)
                self.tell(f"{cell.name}: {failure.reason}")

    def _give_up(self, work: Work, reason: str) -> None:
        for key in work.keys:
            self.account.not_run.setdefault(key, reason)

    def collect(self) -> None:
        """Count what tasks return until every task is over, or the budget is."""
        begun, stop_at = time.monotonic(), self.session.stop_at
        while self._waiting:
            self._count()
            self._ask()
            if stop_at is not None and time.monotonic() > stop_at:
                self.cancel()
                for work in self._waiting.values():
                    self._give_up(work, "the budget ended before Slurm was through with it")
                return
            if self._waiting:
                time.sleep(min(SELDOM, max(OFTEN, (time.monotonic() - begun) / 20)))

    def _ask(self) -> None:
        """Ask squeue once about the tasks that returned nothing yet."""
        try:
            states = slurm.states(self._waiting) if self._waiting else {}
        except AwayError as error:
            self._tell_once(f"Slurm cannot be reached: {error}; jobs run on, and it is asked again")
            return
        now, waiting = time.monotonic(), Counter[str]()
        for task in list(self._waiting):
            state, reason = states.get(task, ("", ""))
            patience = LAG if state in {"", "COMPLETED"} else MOMENT
            if state == "PENDING" and reason in slurm.NEVER:
                slurm.cancel(task)
                self._lose(task, f"is never run ({reason})")
            elif state and state not in slurm.OVER:
                self._over_since.pop(task, None)
                waiting[f"{state.lower()} ({reason})".removesuffix(" (None)")] += 1
            elif now - self._over_since.setdefault(task, now) >= patience:
                self._lose(task, f"is {state or 'no longer known'} and returned nothing")
        self._tell_once(", ".join(f"{count} {state}" for state, count in waiting.items()))

    def _tell_once(self, text: str) -> None:
        if text and text != self._said:
            self.tell(text)
        self._said = text

    def _lose(self, task: str, words: str) -> None:
        """Note a task that says nothing about its cell."""
        work = self._waiting.pop(task)
        self._give_up(work, f"Slurm: task {task} {words}")
        self.tell(f"{work.cell.name}: task {task} {words}; what it printed: {self.folder}/jobs/{task}_0_log.out")

    def _count(self) -> None:
        """Count what tasks returned; a task that Slurm started twice counts once, and its first result."""
        for task, work in list(self._waiting.items()):
            job: SlurmJob[Showed] = SlurmJob(self.folder / "jobs", task)
            if job.paths.result_pickle.exists():
                try:
                    showed = job.result()
                except Exception as error:  # noqa: BLE001 - what a task raised, or pickle of a damaged file
                    self._lose(task, f"returned nothing that can be read: {type(error).__name__}")
                    continue
                del self._waiting[task]
                self._take(work, showed)

    def _take(self, work: Work, showed: Showed) -> None:
        """Give the journal what a task showed; what it has already it keeps."""
        account = self.account
        account.not_run |= showed.not_run
        account.faults += showed.faults
        for fault in showed.faults:
            self.tell(f"{fault.place}: {fault.reason}, after {fault.task}; what its task printed names the node")
        for end in showed.ends:
            if end.key not in self.session.journal:
                self._append(end, showed.logs[end.log.file] if end.log else "")
        self._fail(work, showed.failure)
        for cell in self._cells[work.keys]:
            self.settling.settle(cell)

    def _append(self, end: LaneEnd, log: str) -> None:
        """Write a lane's log, then its end, and tell of it."""
        if end.log is not None:
            files.write_atomic(self.session.folder / end.log.file, log)
        self.session.journal.append(end)
        self.session.progress.end(end.key, self.account.count(end))

    def cancel(self) -> None:
        """Count what was returned until now, and cancel what is still to come: another command submits it again."""
        self._count()
        said = slurm.cancel(f"--name={self._job_name}")
        for task in self._waiting:
            SlurmJob(self.folder / "jobs", task).paths.submitted_pickle.unlink(missing_ok=True)
        self.tell("; ".join(filter(None, [f"cancelled: {len(self._waiting)} tasks", said])))
