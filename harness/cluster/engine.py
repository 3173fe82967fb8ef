"""The engine of a sweep on a cluster: lays out, submits, polls, counts what was published; goes on after its own death.

What it knows lies beside the run folder, in one of the same name with the suffix ``.slurm``:

- ``arrays/0001.json``: an array, written before it is submitted and again with Slurm's number behind it;
- ``packs-0001/``: the probes and patches as they were then;
- ``results/``: what tasks published; ``output/``: what they printed;
- ``counted.jsonl``: the attempts that count, each noted before the journal hears of its lanes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.cluster import attempts, plan, slurm, submitting
from harness.cluster.array_task import OUTPUT, RESULTS
from harness.cluster.attempts import Attempt, Published
from harness.cluster.plan import Array, Wanted
from harness.cluster.slurm import AwayError, Settings, TaskState
from harness.cluster.submitting import Arrays
from harness.core import files, strict_json
from harness.core.errors import HarnessError
from harness.schedule.journal import LaneEnd
from harness.schedule.scheduler import Account
from harness.schedule.session import Session
from harness.schedule.workers import Failure
from harness.verdict.cell import Cell

COUNTED, COMPLETE, LOCK = "counted.jsonl", "complete", "lock"
#: Seconds by which what a task published may be seen late here: NFS shows a folder up to a minute late.
LAG = 60.0
#: Which cell of which task of which array.
At = tuple[int, int, int]


def beside(run: Path) -> Path:
    """Return the folder of what a sweep's engine knows."""
    return run.with_name(f"{run.name}.slurm")


@dataclass(frozen=True)
class SlurmEngine:
    """Runs the lanes of a sweep as job arrays.

    Attributes:
        settings: how jobs are submitted.
        tell: takes a line for people.

    """

    settings: Settings
    tell: Callable[[str], None]

    def run(self, session: Session, cells: Iterable[Cell]) -> Account:
        """Judge cells on nodes; what an earlier command submitted is not submitted again.

        Raises:
            HarnessError: Slurm cannot be reached, or its commands are not here.

        """
        folder = beside(session.folder)
        for name in ("arrays", RESULTS, OUTPUT):
            (folder / name).mkdir(parents=True, exist_ok=True)
        with submitting.held(folder / LOCK) as lock:
            arrays = Arrays(self.settings, session, folder, self.tell, lock)
            one = Collection(session, folder, self.tell, arrays)
            try:
                one.begin(cells)
                one.collect()
            except KeyboardInterrupt:
                one.account.interrupted = True
                one.cancel()
            one.close()
        return one.account

    def finished(self, run: Path) -> None:
        """Remove what nobody needs behind a finished sweep; where something went wrong, it tells what."""
        if (beside(run) / COMPLETE).exists():
            shutil.rmtree(beside(run), ignore_errors=True)


@dataclass
class Collection:
    """One command's part in a sweep on a cluster.

    Attributes:
        session: whose journal takes the ends of lanes.
        folder: what is known, on disk.
        tell: takes a line for people.
        arrays: what is submitted.
        account: what came of it.

    """

    session: Session
    folder: Path
    tell: Callable[[str], None]
    arrays: Arrays
    account: Account = field(default_factory=Account)
    _names: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    _waiting: dict[At, Wanted] = field(default_factory=dict)
    _lost: dict[At, tuple[Wanted, str]] = field(default_factory=dict)
    _over_since: dict[At, float] = field(default_factory=dict)
    _counted: set[tuple[str, ...]] = field(default_factory=set)
    _said: str = ""
    _total: int = 0

    @property
    def _results(self) -> Path:
        return self.folder / RESULTS

    def begin(self, cells: Iterable[Cell]) -> None:
        """Take up what is known of these cells, and submit the others."""
        wanted = self._wanted(cells)
        self._total = sum(task.key not in self.session.journal for one in wanted for task in one.tasks)
        self.account.resumed = sum(task.key in self.session.journal for one in wanted for task in one.tasks)
        self._recall({one.keys: one for one in wanted})
        left = [one for one in wanted if one.keys not in self._counted]
        left = self._followed([one for one in left if self.session.judge.missing(one.cell)])
        self._submit(left)

    def _wanted(self, cells: Iterable[Cell]) -> list[Wanted]:
        """List the cells that can be judged; of two with the same lanes (the newest release is the pinned one) one."""
        found: dict[tuple[str, ...], Wanted] = {}
        for cell in cells:
            tasks = tuple(self.session.tasks([cell]))
            if tasks:
                one = Wanted(cell, tasks)
                found.setdefault(one.keys, one)
                self._names.setdefault(one.keys, []).append(cell.name)
        return list(found.values())

    def _recall(self, wanted: Mapping[tuple[str, ...], Wanted]) -> None:
        """Take up the attempts that an earlier command counted."""
        path = self.folder / COUNTED
        for line in path.read_bytes().split(b"\n") if path.is_file() else ():
            with suppress(OSError, ValueError, KeyError, TypeError):  # a kill may have left half a line
                document = strict_json.loads(line)
                keys = tuple(document["keys"])
                attempt = attempts.attempt_of(document["file"])
                if attempt is not None and keys in wanted and keys not in self._counted:
                    self._take(wanted[keys], attempts.read(self._results, attempt, keys))

    def _followed(self, left: list[Wanted]) -> list[Wanted]:
        """Follow the arrays of an earlier command; return the cells that none of them has."""
        by_identity = {(one.cell.name, one.keys): one for one in left}
        newest = attempts.newest(self._results)
        for array in plan.read_all(self.folder):
            self.arrays.known[array.number] = array
            mine = [
                ((array.number, task, at), by_identity[planned.name, planned.keys])
                for task, at, planned in array.cells
                if (planned.name, planned.keys) in by_identity
                and (not array.cancelled or (array.number, task, at) in newest)
            ]
            self._waiting |= dict(mine)
            for _, one in mine:
                by_identity.pop((one.cell.name, one.keys), None)
            published = next((attempt.job for at, attempt in newest.items() if at[0] == array.number), None)
            words = self.arrays.find(array, published) if mine else ""
            if words:
                self._refuse(array, words)
        return list(by_identity.values())

    def _submit(self, left: list[Wanted]) -> None:
        """Submit the cells that can be laid out."""
        ready = []
        for one, failure in zip(left, submitting.lay_out(self.session, left), strict=True):
            if failure is None:
                ready.append(one)
            else:
                self._fail(one, failure)
        for array, tasks in self.arrays.planned(ready) if ready else ():
            self._waiting |= {
                (array.number, task, at): one for task, some in enumerate(tasks) for at, one in enumerate(some)
            }
            words = self.arrays.submit(array)
            if words:
                self._refuse(array, words)

    def _fail(self, one: Wanted, failure: Failure) -> None:
        for name in self._names[one.keys]:
            self.account.failed[name] = failure
            self.session.listener.failed(name, failure.reason)

    def _refuse(self, array: Array, words: str) -> None:
        self.tell(f"{array.place}: Slurm refuses: {words}")
        for task, at, planned in array.cells:
            self._waiting.pop((array.number, task, at), None)
            for name in self._names.get(planned.keys, ()):
                self.account.refused[name] = f"Slurm refuses {array.gres or 'a task on cores'}: {words}"
        self.arrays.forget(array)

    def collect(self) -> None:
        """Count what tasks publish until every task is over, or the budget is."""
        while self._waiting:
            self._look()
            stop_at = self.session.stop_at
            if stop_at is not None and time.monotonic() > stop_at:
                self._stop()
            elif self._waiting:
                time.sleep(self.arrays.settings.poll_s)

    def _open(self) -> list[Array]:
        """List the arrays of which something is still to come."""
        numbers = {at[0] for at in self._waiting}
        return [array for number, array in sorted(self.arrays.known.items()) if number in numbers]

    def _look(self) -> None:
        """Ask squeue once, and count the tasks that are over."""
        try:
            states = slurm.states([array.job for array in self._open()])
        except AwayError as error:
            self._tell_once(f"Slurm cannot be reached: {error}; jobs run on, and it is asked again")
            return
        newest = attempts.newest(self._results)
        for at in [at for at in self._lost if at in newest]:  # of a node that Slurm had lost
            self._waiting[at] = self._lost.pop(at)[0]
        found = {at: states.get((self.arrays.known[at[0]].job, at[1])) for at in self._waiting}
        for at, state in found.items():
            if at in newest and (state is None or state.is_ending):
                self._count(at, newest[at])
            elif state is not None and not state.is_over:
                self._over_since.pop(at, None)
            elif at not in self._over_since:  # a task that is about to be started again may look so for a moment
                self._over_since[at] = time.monotonic()
            elif time.monotonic() - self._over_since[at] >= (LAG if state is None or state.is_through else 0.0):
                self._lose(at, state)
        self._give_up(found)
        self._tell_once("; ".join(self._said_of(array, found) for array in self._open()))

    def _give_up(self, found: Mapping[At, TaskState | None]) -> None:
        """Cancel the arrays that Slurm took and will not run."""
        hopeless = {at[0]: state.reason for at, state in found.items() if state is not None and state.is_hopeless}
        for array in [array for array in self._open() if array.number in hopeless]:
            slurm.cancel([array.job])
            self._refuse(array, f"it waits for ever ({hopeless[array.number]})")

    def _said_of(self, array: Array, found: Mapping[At, TaskState | None]) -> str:
        """Say how an array stands."""
        mine = [state for at, state in found.items() if at[0] == array.number and at in self._waiting and state]
        counts = Counter(state.state.lower() for state in mine if not state.is_over)
        why = Counter(state.reason for state in mine if state.state == "PENDING" and state.reason != "None")
        reason = f" ({', '.join(why)})" if why else ""
        return f"{array.place}: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) + reason

    def _tell_once(self, text: str) -> None:
        if text and text != self._said:
            self.tell(text)
        self._said = text

    def _lose(self, at: At, state: TaskState | None) -> None:
        """Note a task that is over and published nothing."""
        array, one = self.arrays.known[at[0]], self._waiting.pop(at)
        said = state.state if state is not None else "no longer known"
        last = _last_line(self.folder / OUTPUT / f"{array.number:04d}.{at[1]}.out")  # it may name the node
        self._lost[at] = (one, f"Slurm: task {array.job}_{at[1]} is {said} and published nothing")
        self.tell(f"{one.cell.name}: {self._lost[at][1]}{last}")

    def _count(self, at: At, attempt: Attempt) -> None:
        """Count an attempt: from now on no other one at this cell does."""
        one = self._waiting.pop(at)
        try:
            published = attempts.read(self._results, attempt, one.keys)
        except (OSError, ValueError) as error:
            self._lost[at] = (one, f"what its task published cannot be read: {error}")
            with suppress(OSError):
                (self._results / attempt.file).rename(self._results / f"{attempt.file}.damaged")
            return
        with (self.folder / COUNTED).open("a", encoding="utf-8") as stream:
            line = json.dumps({"file": attempt.file, "keys": one.keys})
            stream.write(f"\n{line}\n")  # a kill may have left half a line before it
            stream.flush()
            os.fsync(stream.fileno())
        self._take(one, published)

    def _take(self, one: Wanted, published: Published) -> None:
        """Give the journal what an attempt showed; what it has already it keeps."""
        account, journal = self.account, self.session.journal
        self._counted.add(one.keys)
        account.elsewhere |= dict.fromkeys(one.keys, published.host)
        account.not_run |= published.not_run or {}
        account.faults += published.faults
        for fault in published.faults:
            self.tell(f"{fault.place}: {fault.reason}, after {fault.task}; the output of its task names the node")
        for end in published.ends:
            self._see(end)
            if end.key not in journal:
                self._append(one, end, attempts.log_of(published, end))
        for name in self._names[one.keys] if published.refused else ():
            account.refused[name] = published.refused
        if published.failure is not None:
            self._fail(one, published.failure)
        judge = replace(self.session.judge, elsewhere=account.elsewhere)
        judged = None if judge.missing(one.cell) else judge.judged(one.cell)
        if judged is not None:
            with suppress(HarnessError):  # told in the end, by whoever asks for the receipt
                judge.receipt(judged)

    def _see(self, end: LaneEnd) -> None:
        """Note the names of a lane's GPUs; what a cluster calls one type may be several."""
        place = f"gpu {end.place.partition(' ')[2].partition(',')[0]}"
        known = self.account.seen.get(place, "").split(", ")
        names = {*known, *(gpu.name for gpu in end.gpus)} - {""}
        if names:
            self.account.seen[place] = ", ".join(sorted(names))

    def _append(self, one: Wanted, end: LaneEnd, log: str) -> None:
        """Write a lane's log, then its end, and tell of it."""
        task = next(task for task in one.tasks if task.key == end.key)
        if end.log is not None:
            files.write_atomic(self.session.folder / task.log, log)
            end = replace(end, log=replace(end.log, file=task.log))
        end = replace(end, task=task.name)
        self.session.journal.append(end)
        self.account.ran += 1
        said = end.verdict or "the patch does not apply"
        line = f"{self.account.ran}/{self._total} {task.name}: {said}, {end.seconds:.1f} s on {end.place}"
        self.session.listener.ended(task, line)

    def _stop(self) -> None:
        """Cancel what the budget leaves no time for."""
        self.cancel()
        for one in self._waiting.values():
            self.account.not_run |= dict.fromkeys(one.keys, "the budget ended before Slurm was through with it")
        self._waiting.clear()

    def cancel(self) -> None:
        """Cancel what is still to come, and count what was published until now."""
        self.arrays.cancel(self._open())
        newest = attempts.newest(self._results)
        for at in [at for at in self._waiting if at in newest]:
            self._count(at, newest[at])

    def close(self) -> None:
        """Say why each lane that is missing was not run."""
        for one, reason in self._lost.values():
            for key in one.keys:
                self.account.not_run.setdefault(key, reason)
        troubled = self._lost or self._waiting or self.account.failed or self.account.not_run
        if not troubled and not self.account.interrupted:
            (self.folder / COMPLETE).touch()


def _last_line(path: Path) -> str:
    """Say what a task printed last; empty where its output cannot be read."""
    with suppress(OSError):
        lines = path.read_text("utf-8", errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; the last line of its output: {said[:200]}" if said else f"; its output is {path.name}, empty"
    return ""
