"""The engine of a sweep on a cluster: lays out, submits, counts what was published; goes on after its own death.

What it knows lies beside the run folder, in one of the same name with the suffix ``.slurm``:

- ``arrays/NAME.json``: an array, noted before it is submitted, and again with Slurm's names of its tasks;
- ``packs/NAME/``: the scripts, contracts and patches as they were then;
- ``jobs/``: submitit's files: what tasks have to do, returned and printed.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from submitit import SlurmJob

from harness.cluster import node, slurm
from harness.cluster.node import Showed, Work
from harness.cluster.slurm import AwayError, RefusedError, Settings, TaskState
from harness.core import files, strict_json
from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.lane.record import LaneEnd
from harness.schedule.lane_runner import Runner
from harness.schedule.scheduler import Account
from harness.schedule.session import CellJudge, Session
from harness.schedule.task import expected_seconds
from harness.schedule.workers import Failure, failure_of
from harness.verdict.cell import Cell

#: Tasks of an array: Slurm's own limit (MaxArraySize) is 1001 where nobody set another.
MOST_TASKS = 1000
#: Seconds that a task has besides: Python on a cold file system, trees to be checked.
BESIDES = 300.0
#: Minutes, at least: clusters start short jobs no sooner than that.
SHORTEST = 10
#: How often an array is submitted before Slurm counts as out of reach.
TRIES = 3
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
        needs.setdefault((work.gres, work.jobs), []).append(work)
    for array in needs.values():
        yield from (array[start : start + MOST_TASKS] for start in range(0, len(array), MOST_TASKS))


def minutes(array: Iterable[Work]) -> int:
    """Return the time limit of an array's tasks, in minutes: that of the longest."""
    return max(SHORTEST, math.ceil((BESIDES + max(work.longest for work in array)) / 60))


@dataclass(frozen=True)
class SlurmEngine:
    """Runs the lanes of a sweep as job arrays."""

    settings: Settings  # how jobs are submitted
    tell: Callable[[str], None]  # takes a line for people

    def run(self, session: Session, cells: Iterable[Cell]) -> Account:
        """Judge cells on nodes; what an earlier command submitted is not submitted again.

        HarnessError is raised where Slurm cannot be reached, or its commands are not here.
        """
        slurm.prepare(self.settings)
        folder = beside(session.folder)
        for name in ("arrays", "jobs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        collection = Collection(self.settings, session, folder, self.tell)
        try:
            collection.begin(cells)
            collection.collect()
        except KeyboardInterrupt:
            collection.account.interrupted = True
            collection.cancel()
        return collection.account

    def finished(self, run: Path, account: Account) -> None:
        """Remove what nobody needs after a finished sweep; where something went wrong, it tells what."""
        if not account.failed and not account.not_run:
            shutil.rmtree(beside(run), ignore_errors=True)


@dataclass
class Collection:
    """One command's part in a sweep on a cluster."""

    settings: Settings  # how jobs are submitted
    session: Session  # whose journal takes the ends of lanes
    folder: Path  # what is known, on disk
    tell: Callable[[str], None]  # takes a line for people
    account: Account = field(default_factory=Account)  # what came of it
    _names: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    _arrays: dict[str, dict[str, str]] = field(default_factory=dict)
    _waiting: dict[str, Work] = field(default_factory=dict)
    _counted: set[str] = field(default_factory=set)
    _over_since: dict[str, float] = field(default_factory=dict)
    _said: str = ""
    _total: int = 0

    def begin(self, cells: Iterable[Cell]) -> None:
        """Follow what an earlier command submitted, and submit the rest."""
        works = self._works(cells)
        ended = [lane.key in self.session.journal for work in works for lane in work.lanes]
        self.account.resumed = sum(ended)
        self._total = len(ended) - sum(ended)
        left = [work for work in self._not_followed(works) if self.session.judge.missing(work.cell)]
        for array in arrays_of(self._laid_out(left)):
            self._submit(array)

    def _works(self, cells: Iterable[Cell]) -> list[Work]:
        """List the cells that can be judged; of two with the same lanes (the newest release is the pinned one) one."""
        session, found = self.session, dict[tuple[str, ...], Work]()
        for cell in cells:
            lanes = tuple(session.tasks([cell]))
            if lanes:
                kind, jobs = self.settings.gpu_types.get(cell.gpu, ""), session.most_jobs * lanes[0].cores
                cache = session.cache
                work = Work(cell, lanes, kind or "", cache.root, cache.mirrors, session.repeat, jobs)
                found.setdefault(work.keys, work)
                self._names.setdefault(work.keys, []).append(cell.name)
        return list(found.values())

    def _note(self, name: str, tasks: dict[str, str]) -> None:
        """Keep on disk which task of an array has which lanes; nothing: nobody knows yet whether Slurm took it."""
        self._arrays[name] = tasks
        files.write_atomic(self.folder / "arrays" / f"{name}.json", json.dumps(tasks))

    def _forget(self, name: str) -> None:
        del self._arrays[name]
        (self.folder / "arrays" / f"{name}.json").unlink()

    def _not_followed(self, works: list[Work]) -> list[Work]:
        """Follow the arrays of an earlier command; return the cells that none of them has."""
        by_keys = {" ".join(work.keys): work for work in works}
        for path in sorted((self.folder / "arrays").glob("*.json")):
            tasks = self._arrays[path.stem] = dict(strict_json.loads(path.read_bytes()))
            if not tasks:  # the command was killed meanwhile; what Slurm may have taken finds nothing to do
                slurm.cancel(f"--name={path.stem}")
                self._forget(path.stem)
            self._waiting |= {task: by_keys.pop(keys) for task, keys in tasks.items() if keys in by_keys}
        return list(by_keys.values())

    def _laid_out(self, left: list[Work]) -> list[Work]:
        """Lay out in the cache what nodes need, since they reach no network; return the work where that went well."""
        session = self.session
        runner = Runner(session.cache, session.host, session.folder, session.folder)
        failures: dict[tuple[str, str, str], Failure | None] = {}
        for work in left:
            shared = (work.cell.pack.name, work.cell.column, work.cell.stated.dependencies)
            if shared not in failures:
                failures[shared] = None
                try:
                    runner.prepare(work.cell)
                except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
                    failures[shared] = failure_of(error, work.cell)
            self._fail(work, failures[shared])
        return [work for work in left if self._names[work.keys][0] not in self.account.failed]

    def _submit(self, array: list[Work]) -> None:
        """Submit an array, a few times where Slurm is away; HarnessError is raised where it stays away."""
        name = f"reproducer-{self.session.folder.name}-{secrets.token_hex(4)}"
        frozen = [self._frozen(work, self.folder / "packs" / name) for work in array]
        self._note(name, {})
        for tries in range(TRIES):
            try:
                tasks = slurm.submit(self.folder / "jobs", name, node.judge, frozen, minutes(array), self.settings)
                break
            except RefusedError as error:
                self._forget(name)
                self.tell(f"{array[0].place}: Slurm refuses: {error}")
                for work in array:
                    self._refuse(work, f"Slurm refuses {array[0].gres or 'a task on cores'}: {error}")
                return
            except AwayError as error:
                away = f"Slurm cannot be reached: {error}"
                self.tell(away)
                time.sleep(SELDOM if tries else OFTEN)
                slurm.cancel(f"--name={name}")  # Slurm may have taken it all the same
        else:
            again = "the same command again, which goes on where it was"
            raise HarnessError(f"{away}. Next: {again}", status=Exit.DEVIATES)
        followed = dict(zip(tasks, array, strict=True))
        self._note(name, {task: " ".join(work.keys) for task, work in followed.items()})
        self._waiting |= followed
        self.tell(f"{array[0].place}: {len(array)} tasks, Slurm's job {tasks[0].partition('_')[0]}")

    def _frozen(self, work: Work, packs: Path) -> Work:
        """Return work with copies of its pack's files, whatever is edited meanwhile."""
        pack = work.cell.pack
        if not (packs / pack.name).exists():
            shutil.copytree(pack.inputs or pack.folder, packs / pack.name)
        return replace(work, cell=replace(work.cell, pack=replace(pack, inputs=packs / pack.name)))

    def _fail(self, work: Work, failure: Failure | None) -> None:
        if failure is not None:
            for name in self._names[work.keys]:
                self.account.failed[name] = failure
                self.session.listener.failed(name, failure.reason)

    def _refuse(self, work: Work, words: str) -> None:
        self.account.refused |= dict.fromkeys(self._names[work.keys], words)

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
        now, found = time.monotonic(), {task: states.get(task, TaskState()) for task in self._waiting}
        for task, state in found.items():
            patience = LAG if state.state in {"", "COMPLETED"} else MOMENT
            if state.is_hopeless:
                slurm.cancel(task)
                self._refuse(self._waiting.pop(task), f"Slurm took it and never runs it ({state.reason})")
            elif not state.is_over:
                self._over_since.pop(task, None)
            elif now - self._over_since.setdefault(task, now) >= patience:
                self._lose(task, f"is {state.state or 'no longer known'} and returned nothing")
        counts = Counter(f"{one.state.lower()} ({one.reason})" for one in found.values() if not one.is_over)
        self._tell_once(", ".join(f"{count} {state}" for state, count in counts.items()).replace(" (None)", ""))

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
                self._counted.add(task)
                del self._waiting[task]
                self._take(work, showed)

    def _take(self, work: Work, showed: Showed) -> None:
        """Give the journal what a task showed; what it has already it keeps."""
        account, judge = self.account, CellJudge(self.session, self.account)
        account.elsewhere |= dict.fromkeys(work.keys, showed.host)
        account.not_run |= showed.not_run or {}
        account.faults += showed.faults
        for fault in showed.faults:
            self.tell(f"{fault.place}: {fault.reason}, after {fault.task}; what its task printed names the node")
        for end in showed.ends:
            place = f"gpu {end.place.partition(' ')[2].partition(',')[0]}"
            names = {*account.seen.get(place, "").split(", "), *(gpu.name for gpu in end.gpus)} - {""}
            if names:  # what a cluster calls one type may be several
                account.seen[place] = ", ".join(sorted(names))
            if end.key not in self.session.journal:
                self._append(work, end, (showed.logs or {})[end.log.file] if end.log else "")
        if showed.refused:
            self._refuse(work, showed.refused)
        self._fail(work, showed.failure)
        judged = None if judge.missing(work.cell) else judge.judged(work.cell)
        if judged is not None:
            judge.recorded(judged)  # a problem is told in the end, by whoever asks for the receipt

    def _append(self, work: Work, end: LaneEnd, log: str) -> None:
        """Write a lane's log, then its end, and tell of it."""
        lane = next(lane for lane in work.lanes if lane.key == end.key)
        if end.log is not None:
            files.write_atomic(self.session.folder / lane.log, log)
            end = replace(end, log=replace(end.log, file=lane.log))
        self.session.journal.append(replace(end, task=lane.name))
        self.account.ran += 1
        said = end.verdict or "the patch does not apply"
        line = f"{self.account.ran}/{self._total} {lane.name}: {said}, {end.seconds:.1f} s on {end.place}"
        self.session.listener.ended(lane, line)

    def cancel(self) -> None:
        """Count what was returned until now, and cancel what is still to come: another command submits it again."""
        self._count()
        for name, tasks in list(self._arrays.items()):
            self._note(name, {task: keys for task, keys in tasks.items() if task in self._counted})
        said = [slurm.cancel(f"--name={name}") for name in self._arrays]
        self.tell("; ".join([f"cancelled: {len(self._waiting)} tasks", *filter(None, said)]))
