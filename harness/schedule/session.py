"""One command's lanes from beginning to end: where they run, and how cells are judged by the ends of their lanes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.core.progress import Progress
from harness.core.words import LaneName, LaneVerdict
from harness.host import host as this_host
from harness.host.gpu_health import GpuWatch
from harness.host.gpus import Device
from harness.host.host import Host
from harness.lane import supervisor
from harness.lane.record import LaneEnd
from harness.receipt import writer
from harness.schedule.journal import Journal
from harness.schedule.lane_runner import Runner
from harness.schedule.queue import Places
from harness.schedule.scheduler import Account, GpuFault, Scheduler
from harness.schedule.task import Estimates, Task, tasks, unique
from harness.upstream import dependencies
from harness.verdict import pack_verdict
from harness.verdict.cell import Cell
from harness.verdict.outcome import Outcome, unjudged
from harness.verdict.pack_verdict import Judgement

#: What a lane takes of the host's memory, in GiB: torch and a compiler, imported.
LANE_MEMORY_GIB = 2.0


@dataclass(frozen=True)
class Session:
    """Where a command's lanes run."""

    cache: Cache  # of trees, dependency sets and JIT results
    host: Host  # what it is; its GPUs are `devices`
    devices: list[Device]  # the GPUs that lanes may use
    folder: Path  # of the run: logs and receipts
    journal: Journal  # takes the ends of lanes
    command: Callable[[Cell], str]  # that makes a cell's receipt anew
    progress: Progress = field(default_factory=Progress)  # whom to tell
    note: Callable[[GpuFault], None] = lambda _: None  # keeps that a GPU left the pool
    jobs: int | None = None  # how many lanes run at once; None: as many as the cores and the memory allow
    repeat: int = 1  # how often each lane runs
    estimates: Estimates = field(default_factory=Estimates)  # how long lanes take
    stop_at: float | None = None  # when the budget ends, on the monotonic clock; None without one
    watch: GpuWatch | None = None  # looks at GPUs before and after lanes; None: nobody does
    faults: tuple[GpuFault, ...] = ()  # the GPUs that had one before this command
    lost: tuple[str, ...] = ()  # why GPUs of this host cannot be used
    keep_raw: bool = False  # whether the raw log of a lane that ended in an error stays in the run folder
    threads: int | None = None  # that a lane's libraries use; None: the cores, shared among the lanes at once
    #: the folder of the files that lanes lock while they share a GPU; None: the cache's, for every runner here
    locks: Path | None = None

    @property
    def most_jobs(self) -> int:
        """How many lanes run at once; where nobody says it, one a core, as far as memory goes."""
        return self.jobs or max(1, min(len(this_host.cores()), int(this_host.memory_gib() // LANE_MEMORY_GIB)))

    def planned(self, cells: Iterable[Cell]) -> dict[str, list[Task]]:
        """List the lanes of each cell by its name, with what is known of their durations."""
        return {cell.name: [self.estimates.of(task) for task in tasks(cell, self.host, self.repeat)] for cell in cells}

    def run(self, cells: list[Cell], *, receipts: bool = True, planned: dict[str, list[Task]] | None = None) -> Account:
        """Run the lanes of cells that have not ended, and settle each cell; with `receipts`, write them.

        `planned` holds the lanes of each cell where somebody else has planned them.
        """
        account = Account(faults=list(self.faults), planned=planned or self.planned(cells))
        wanted = unique(chain.from_iterable(account.planned.values()))
        settling = Settling(self, account, receipts)
        supervisor.adopt_orphans()
        faulty = {fault.place for fault in self.faults}
        devices = [device for device in self.devices if device.place not in faulty]
        with ExitStack() as stack:
            scratch = stack.enter_context(self.cache.scratch("run-"))
            cancel, cancel_end = os.pipe()  # lanes watch its first end, and are abandoned once the second is closed
            stack.callback(os.close, cancel)
            runner = Runner(
                cache=self.cache,
                host=self.host,
                folder=self.folder,
                scratch=scratch,
                cancel=cancel,
                threads=self.threads or max(1, len(this_host.cores()) // self.most_jobs),
                stop_at=self.stop_at,
                keep_raw=self.keep_raw,
                watch=self.watch,
                locks=self.locks,
            )
            places = Places(self.most_jobs, devices)
            scheduler = Scheduler(
                runner, self.journal, places, settling.settle, self.progress, self.note, self.stop_at, account
            )
            scheduler.run(wanted, cancel_end)
        for cell in cells:  # whose lanes ended before, or are another cell's, or were interrupted
            settling.settle(cell, at_end=True)
        return account


@dataclass(frozen=True)
class Settling:
    """Settles cells: each is judged once, by the ends of its lanes, and its receipt written once."""

    session: Session
    account: Account  # knows what is planned, and takes what came of it
    receipts: bool = True  # whether they are written

    def settle(self, cell: Cell, *, at_end: bool = False) -> None:
        """Settle a cell whose lanes have all ended; `at_end` one whose lanes have not, by the runs that are whole."""
        results = self.account.results
        if cell.name in results or (not at_end and self.missing(cell)):
            return
        try:
            outcome = self._judged(cell)
            if outcome is not None:
                results[cell.name] = self._recorded(outcome) if self.receipts else outcome
        except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
            results[cell.name] = unjudged(error, cell)

    def missing(self, cell: Cell) -> bool:
        """Whether the verdict of every run would need the end of a lane that has not ended."""
        return any(None in run for run in self._runs(cell))

    def _runs(self, cell: Cell) -> list[list[LaneEnd | None]]:
        """List the ends that each run needs: of a pair that of the second lane only where the first shows the bug."""
        every, width, found = self.account.planned[cell.name], len(cell.lanes), []
        for start in range(0, len(every), width):
            first, *rest = (self.session.journal.read(task.key) for task in every[start : start + width])
            said = {first.lane, first.verdict} if first else set()
            found.append([first, *rest] if said & {LaneName.PATCHED, LaneVerdict.BUG_REPRODUCED} else [first])
        return found

    def _judged(self, cell: Cell) -> Outcome | None:
        """Judge a cell by its whole runs; None where there is not one."""
        if cell.evidence is None:
            return Outcome(cell, Judgement(cell.verdict, cell.reason))
        whole = tuple(tuple(end for end in run if end is not None) for run in self._runs(cell) if None not in run)
        if not whole:
            return None
        judgement, agreeing = pack_verdict.of_runs(whole, cell.about)
        cache, definition, tag = self.session.cache, cell.pack.definition, self.session.host.python_tag
        members = dependencies.chosen(cache, definition, cell.dependencies, cell.stated.dependencies, tag)
        return Outcome(cell, judgement, whole, agreeing, members)

    def _recorded(self, outcome: Outcome) -> Outcome:
        """Write the receipt of a cell into the run folder; say where, or why not."""
        if not outcome.lanes:
            return outcome
        cell, session = outcome.cell, self.session
        try:
            with writer.told():
                logs = {end.lane: (session.folder / end.log.file).read_text("utf-8") for end in outcome.last if end.log}
                folder = session.folder / (cell.column or "receipts") / cell.pack.name
                return replace(
                    outcome, receipt=writer.write(outcome, session.cache, session.command(cell), folder, logs)
                )
        except HarnessError as error:
            return replace(outcome, problem=str(error))
