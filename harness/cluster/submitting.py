"""Submitting arrays: each is noted before, so that whoever comes after a kill finds it, and submits none twice."""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.cluster import plan, slurm
from harness.cluster.array_task import OUTPUT
from harness.cluster.plan import Array, Wanted
from harness.cluster.slurm import AwayError, Job, RefusedError, Settings
from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.schedule.lane_runner import Runner
from harness.schedule.session import Session
from harness.schedule.workers import PREPARING, Failure, failure_of

REPOSITORY = Path(__file__).resolve().parents[2]
#: Lanes at once in a task where nobody says it: a cell has two.
JOBS = 2
#: How often an array is submitted before Slurm counts as out of reach.
TRIES = 5
#: How long to wait, in seconds, for an sbatch whose command was killed.
LONGEST_SUBMISSION = 120.0


@contextmanager
def held(path: Path) -> Iterator[int]:
    """Hold a lock that an sbatch of ours holds as long as it lives: one whose command was killed may still submit."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = time.monotonic() + LONGEST_SUBMISSION
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise HarnessError(f"{path} is held by an sbatch that does not end. Next: end it") from None
                time.sleep(0.1)
        yield descriptor
    finally:
        os.close(descriptor)


def lay_out(session: Session, left: list[Wanted]) -> list[Failure | None]:
    """Fetch and lay out in the cache what nodes need, since they reach nothing; return what failed of each cell."""
    runner = Runner(session.cache, session.host, session.folder, session.folder)

    def prepare(one: Wanted) -> Failure | None:
        try:
            runner.prepare(one.cell)
        except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
            return failure_of(error, one.cell)
        return None

    of_cell = [(one.cell.pack.name, one.cell.column, one.cell.stated.dependencies) for one in left]
    first = dict(zip(of_cell, left, strict=True))
    with ThreadPoolExecutor(PREPARING) as pool:
        try:
            failures = dict(zip(first, pool.map(prepare, first.values()), strict=True))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return [failures[shared] for shared in of_cell]


@dataclass
class Arrays:
    """The arrays of a sweep.

    Attributes:
        settings: how jobs are submitted.
        session: whose cells they judge.
        folder: where their files are.
        tell: takes a line for people.
        lock: a descriptor that each sbatch holds.
        known: by their numbers.

    """

    settings: Settings
    session: Session
    folder: Path
    tell: Callable[[str], None]
    lock: int
    known: dict[int, Array] = field(default_factory=dict)

    def note(self, array: Array) -> None:
        """Keep on disk what is known of an array."""
        self.known[array.number] = array
        plan.write(self.folder, array)

    def forget(self, array: Array) -> None:
        """Remove an array that Slurm does not run."""
        plan.path_of(self.folder, array.number).unlink()
        del self.known[array.number]

    def planned(self, ready: list[Wanted]) -> Iterator[tuple[Array, list[list[Wanted]]]]:
        """Yield an array for each architecture, number of GPUs, and number of ranks, noted and not yet submitted."""
        session, settings = self.session, self.settings
        first = 1 + max(self.known, default=0)
        packs = f"packs-{first:04d}"
        plan.freeze({one.cell.pack.name: one.cell.pack for one in ready}.values(), self.folder / packs)
        for number, tasks in enumerate(plan.grouped(ready), first):
            target, gpus, ranks = tasks[0][0].group
            array = Array(
                schema=plan.SCHEMA,
                number=number,
                name=f"reproducer-{session.folder.name}-{number}-{secrets.token_hex(4)}",
                target=target,
                gpus=gpus,
                kind=dict(settings.gpu_types).get(target, ""),
                packs=packs,
                cache=str(session.cache.root),
                mirrors=str(session.cache.mirrors or ""),
                repeat=session.repeat,
                jobs=session.most_jobs * ranks,
                minutes=plan.minutes(tasks),
                tasks=tuple(tuple(one.planned() for one in task) for task in tasks),
            )
            self.note(array)
            yield array, tasks

    def submit(self, array: Array) -> str:
        """Submit an array; return Slurm's words where it does not take it, else nothing.

        Raises:
            HarnessError: Slurm cannot be reached.

        """
        job = Job(
            name=array.name,
            tasks=len(array.tasks),
            gpus=array.gres,
            cores=array.jobs,
            minutes=array.minutes,
            output=self.folder / OUTPUT / f"{array.number:04d}.%a.out",
            folder=REPOSITORY,
            command=(sys.executable, "-m", "harness.cluster.array_task", str(plan.path_of(self.folder, array.number))),
        )

        def again() -> str:
            return slurm.find(array.name) or slurm.submit(job, self.settings, self.lock)

        try:
            try:
                number = slurm.submit(job, self.settings, self.lock)
            except AwayError:  # it may have been taken all the same
                number = self._patiently(again)
        except RefusedError as error:
            return str(error)
        self.note(replace(array, job=number))
        cells = sum(map(len, array.tasks))
        self.tell(f"{array.place}: {cells} cells in {len(array.tasks)} tasks, Slurm's job {number}")
        return ""

    def find(self, array: Array, published: int | None) -> str:
        """Learn the number of an array whose command was killed before it noted it; submit it if Slurm has none.

        Return Slurm's words where it does not take it, else nothing.

        Args:
            array: the array.
            published: Slurm's number of one of its tasks, where one has published: then it ran.

        """
        if array.job:
            return ""
        number = self._patiently(lambda: slurm.find(array.name)) or str(published or "")
        if not number:
            return self.submit(array)
        self.note(replace(array, job=number))
        return ""

    def _patiently(self, ask: Callable[[], str]) -> str:
        """Ask Slurm, a few times where it is away.

        Raises:
            HarnessError: it stays away.

        """
        for left in reversed(range(TRIES)):
            try:
                return ask()
            except AwayError as error:
                if not left:
                    raise HarnessError(
                        f"Slurm cannot be reached: {error}. Next: the same command again, which goes on where it was",
                        status=Exit.DEVIATES,
                    ) from None
                self.tell(f"Slurm cannot be reached: {error}; it is asked again")
                time.sleep(self.settings.poll_s)
        raise AssertionError  # not reached

    def cancel(self, arrays: Iterable[Array]) -> None:
        """Cancel arrays; from now on nobody follows them."""
        chosen = list(arrays)
        for array in chosen:
            self.note(replace(array, cancelled=True))
        numbers = [array.job for array in chosen if array.job]
        said = slurm.cancel(numbers, [array.name for array in chosen if not array.job])
        against = f"; but Slurm said: {said}. Next: scancel {' '.join(numbers)}" if said else ""
        self.tell(f"cancelled: {', '.join(numbers) or 'nothing'}{against}")
