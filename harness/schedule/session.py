"""One command's lanes from beginning to end: the cells it judges, on the cores and GPUs it may use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from harness.core.cache import Cache
from harness.host import host as this_host
from harness.host.gpu_health import GpuWatch
from harness.host.gpus import Device
from harness.host.host import Host
from harness.lane import supervisor
from harness.schedule.journal import Journal
from harness.schedule.lane_runner import Runner
from harness.schedule.pack_result import CellJudge, CommandOf
from harness.schedule.queue import Places
from harness.schedule.scheduler import Account, GpuFault, Listener, Scheduler
from harness.schedule.task import Estimates, Task, at_least, tasks, unique
from harness.schedule.workers import LaneWork, failure_of
from harness.verdict.cell import Cell

#: What a lane takes of the host's memory, in GiB: torch and a compiler, imported.
LANE_MEMORY_GIB = 2.0


def default_jobs(cores: int, memory_gib: float) -> int:
    """Return how many lanes run at once where nobody says it: one a core, as far as memory goes."""
    return max(1, min(cores, int(memory_gib // LANE_MEMORY_GIB)))


@dataclass(frozen=True)
class Session:
    """Where a command's lanes run."""

    cache: Cache  # of trees, dependency sets and JIT results
    host: Host  # what it is; its GPUs are `devices`
    devices: list[Device]  # the GPUs that lanes may use
    folder: Path  # of the run: logs and receipts
    journal: Journal  # takes the ends of lanes
    command: CommandOf  # that makes a cell's receipt anew
    listener: Listener = field(default_factory=Listener)  # whom to tell
    jobs: int | None = None  # how many lanes run at once; None: as many as the cores and the memory allow
    repeat: int = 1  # how often each lane runs
    estimates: Estimates = field(default_factory=Estimates)  # how long lanes take
    stop_at: float | None = None  # when the budget ends, on the monotonic clock; None without one
    watch: GpuWatch | None = None  # looks at GPUs before and after lanes; None: nobody does
    faults: tuple[GpuFault, ...] = ()  # the GPUs that had one before this command
    keep_raw: bool = False  # whether the raw log of a lane that ended in an error stays in the run folder
    threads: int | None = None  # that a lane's libraries use; None: the cores, shared among the lanes at once
    #: the folder of the files that lanes lock while they share a GPU; None: the cache's, for every runner here
    locks: Path | None = None

    @property
    def most_jobs(self) -> int:
        """How many lanes run at once."""
        return self.jobs or default_jobs(len(this_host.cores()), this_host.memory_gib())

    def tasks(self, cells: Iterable[Cell]) -> list[Task]:
        """List the lanes of cells, each with what is known of its duration."""
        return [
            self.estimates.of(task)
            for task in unique(task for cell in cells for task in tasks(cell, self.host, self.repeat))
        ]

    def seconds_left(self, tasks: Iterable[Task]) -> float | None:
        """Return a bound below which these lanes cannot end, in seconds; None where no duration is known."""
        return at_least((task for task in tasks if task.key not in self.journal), self.most_jobs)

    @property
    def judge(self) -> CellJudge:
        """What judges cells by their lanes' ends."""
        return CellJudge(self.cache, self.host, self.folder, self.journal, self.repeat, self.command)

    def run(self, cells: Iterable[Cell], *, receipts: bool = True) -> Account:
        """Run the lanes of cells that have not ended; with `receipts`, write each cell's when its last lane ends."""
        cells = list(cells)
        account = Account(faults=list(self.faults))
        account.planned = {cell.name: tasks(cell, self.host, self.repeat) for cell in cells}
        planned = [self.estimates.of(task) for task in unique(chain.from_iterable(account.planned.values()))]
        self.listener.planned(len(planned), self.seconds_left(planned))
        judge = replace(self.judge, planned=account.planned)

        def settle(cell: Cell) -> None:
            judged = judge.judged(cell)
            if judged is not None:
                account.results[cell.name] = judge.recorded(judged)

        def finish(cell: Cell) -> None:
            if receipts and not judge.missing(cell):
                settle(cell)

        supervisor.adopt_orphans()
        faulty = {fault.place for fault in self.faults}
        devices = [device for device in self.devices if device.place not in faulty]
        with self._cancellable() as (cancel, cancel_end), self.cache.scratch("run-") as scratch:
            runner = Runner(
                cache=self.cache,
                host=self.host,
                folder=self.folder,
                scratch=scratch,
                cancel=cancel,
                threads=self.threads or max(1, len(this_host.cores()) // self.most_jobs),
                stop_at=self.stop_at,
                keep_raw=self.keep_raw,
            )
            lanes = LaneWork(runner, self.journal, finish, self.watch, self.locks or self.cache.root / "locks")
            places = Places(self.most_jobs, devices)
            Scheduler(lanes, places, self.listener, self.stop_at, account).run(planned, cancel_end)
        for cell in cells if receipts else ():  # whose lanes ended before, or are another cell's, or were interrupted
            if cell.name not in account.results and cell.name not in account.failed:
                try:
                    settle(cell)
                except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
                    account.failed[cell.name] = failure_of(error, cell)
        return account

    @staticmethod
    @contextmanager
    def _cancellable() -> Iterator[tuple[int, int]]:
        """Yield a pipe: lanes watch its first end, and are abandoned once the second is closed."""
        cancel, cancel_end = os.pipe()
        try:
            yield cancel, cancel_end
        finally:
            os.close(cancel)
