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
from harness.core.words import LaneName, LaneVerdict
from harness.host import host as this_host
from harness.host.gpu_health import GpuWatch
from harness.host.gpus import Device
from harness.host.host import Host
from harness.lane import supervisor
from harness.lane.record import LaneEnd
from harness.pack import judges
from harness.receipt import receipt, writer
from harness.receipt.receipt import Receipt
from harness.receipt.writer import MadeBy
from harness.schedule.journal import Journal
from harness.schedule.lane_runner import Runner
from harness.schedule.queue import Places
from harness.schedule.scheduler import Account, GpuFault, Listener, Scheduler
from harness.schedule.task import Estimates, Task, at_least, tasks, unique
from harness.schedule.workers import LaneWork, failure_of
from harness.upstream import dependencies
from harness.verdict import pack_verdict
from harness.verdict.cell import Cell
from harness.verdict.outcome import Outcome
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
    listener: Listener = field(default_factory=Listener)  # whom to tell
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
        return CellJudge(self)

    def run(self, cells: Iterable[Cell], *, receipts: bool = True) -> Account:
        """Run the lanes of cells that have not ended; with `receipts`, write each cell's when its last lane ends."""
        cells = list(cells)
        account = Account(faults=list(self.faults))
        account.planned = {cell.name: tasks(cell, self.host, self.repeat) for cell in cells}
        planned = [self.estimates.of(task) for task in unique(chain.from_iterable(account.planned.values()))]
        self.listener.planned(sum(task.key not in self.journal for task in planned), self.seconds_left(planned))
        judge = CellJudge(self, account)

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


@dataclass(frozen=True)
class CellJudge:
    """Judges cells by what the journal holds of their lanes."""

    session: Session
    account: Account = field(default_factory=Account)  # knows what is planned, and what ran on other hosts

    def judged(self, cell: Cell) -> Outcome | None:
        """Judge a cell by its whole runs; None where there is not one."""
        runs = [self._ends(run) for run in self._repetitions(cell) if not self._missing(run)]
        if not runs:
            return None
        judgement, agreeing = pack_verdict.repeated([_judgement(run, cell.about) for run in runs])
        cache, definition, tag = self.session.cache, cell.pack.definition, self.session.host.python_tag
        members = dependencies.chosen(cache, definition, cell.dependencies, cell.stated.dependencies, tag)
        return Outcome(cell, judgement, tuple(runs), agreeing, members)

    def _ends(self, repetition: list[Task]) -> tuple[LaneEnd, ...]:
        """Return the ends of one repetition; where the bug is not there, its patched lane does not count."""
        ends = [end for end in (self.session.journal.read(task.key) for task in repetition) if end is not None]
        reproduced = ends[0].lane == LaneName.PATCHED or ends[0].verdict == LaneVerdict.BUG_REPRODUCED
        return tuple(ends if reproduced else ends[:1])

    def missing(self, cell: Cell) -> list[Task]:
        """List the tasks whose end the verdict of every run would need and does not have."""
        return [task for some in self._repetitions(cell) for task in self._missing(some)]

    def _repetitions(self, cell: Cell) -> list[list[Task]]:
        width = len(cell.lanes)
        every = self.account.planned.get(cell.name) or tasks(cell, self.session.host, self.session.repeat)
        return [every[start : start + width] for start in range(0, len(every), width)]

    def _missing(self, repetition: list[Task]) -> list[Task]:
        """List the tasks that have not ended; the second of a pair is not missed where the first shows no bug."""
        journal, missing = self.session.journal, []
        for task in repetition:
            second = task.lane == LaneName.PATCHED and len(repetition) > 1
            needed = not second or journal.verdict(task.pristine) == LaneVerdict.BUG_REPRODUCED
            if needed and task.key not in journal:
                missing.append(task)
        return missing

    def receipt_path(self, cell: Cell) -> Path:
        """Return where the receipt of a cell lies in the run folder."""
        folder = self.session.folder / (cell.column or "receipts") / cell.pack.name
        return folder / f"{cell.target}.{cell.evidence}.json"

    def logs(self, outcome: Outcome) -> dict[LaneName, Path]:
        """Return the scrubbed logs of the last run's lanes."""
        return {end.lane: self.session.folder / end.log.file for end in outcome.last if end.log is not None}

    def recorded(self, outcome: Outcome) -> Outcome:
        """Write the receipt of a cell into the run folder, unless it lies there already; say where, or why not."""
        if not outcome.lanes or outcome.receipt:
            return outcome
        path = self.receipt_path(outcome.cell)
        try:
            return replace(outcome, receipt=path if _lies_at(path, outcome) else self._write(outcome, path.parent))
        except HarnessError as error:
            return replace(outcome, problem=error)

    def receipt(self, outcome: Outcome) -> Receipt:
        """Return the receipt of a cell, written unless it lies there already; HarnessError: it cannot be written."""
        recorded = self.recorded(outcome)
        if recorded.problem is not None:
            raise recorded.problem
        return receipt.load(recorded.receipt or self.receipt_path(outcome.cell))

    def _write(self, outcome: Outcome, folder: Path) -> Path:
        with writer.told():
            texts = {name: path.read_text(encoding="utf-8") for name, path in self.logs(outcome).items()}
            host = self.account.elsewhere.get(outcome.last[-1].key, self.session.host)
            made_by = MadeBy(self.session.cache, host, self.session.command(outcome.cell))
            return writer.write(outcome, made_by, folder, texts)


def _judgement(run: tuple[LaneEnd, ...], about: tuple[str, ...]) -> Judgement:
    """Judge one repetition by the ends of its lanes."""
    records, stale = {end.lane: end.record for end in run}, "".join(end.stale for end in run)
    return pack_verdict.pair(records.get(LaneName.PRISTINE), records.get(LaneName.PATCHED), stale, about)


def _lies_at(path: Path, outcome: Outcome) -> bool:
    """Whether the receipt of an outcome lies there: neither none, nor one of other lanes (the script changed)."""
    try:
        found = receipt.load(path) if path.exists() else None
    except HarnessError:
        return False
    wanted = (writer.started(outcome), round(outcome.seconds, 3), len(outcome.runs), judges.sha256(outcome.cell.pack))
    return found is not None and (found.started, found.seconds, found.repeats.of, found.probe.sha256) == wanted
