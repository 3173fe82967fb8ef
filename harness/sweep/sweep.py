"""One sweep from beginning to end: plan, run what has not ended, judge, compare, write."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from harness.core import files, room
from harness.core.cache import Cache
from harness.core.progress import Progress
from harness.core.words import Exit
from harness.host.gpu_health import GpuWatch
from harness.host.gpus import Device
from harness.host.host import Host
from harness.pack.model import Pack
from harness.receipt import receipt, redaction
from harness.schedule import inputs
from harness.schedule.estimates import Estimates
from harness.schedule.journal import FileJournal
from harness.schedule.scheduler import Account, GpuFault, Listener
from harness.schedule.session import Session
from harness.sweep import baseline, history, known, mutants, run_folder, selection, text_outputs
from harness.sweep.bisection import Bisection
from harness.sweep.collector import Collector
from harness.sweep.columns import Moving
from harness.sweep.html import Page
from harness.sweep.mutants import Night
from harness.sweep.results import SCHEMA, CellRow, GpuRow, HostRow, Results
from harness.sweep.run_folder import RunFolder, SweepRequest
from harness.verdict.cell import Cell


@dataclass(frozen=True)
class Order:
    """What the command line asks for.

    Attributes:
        packs: the packs that could be loaded.
        folder: where they lie.
        only: the values of ``--only``.
        moving: upstream's newest releases and default branches too.
        repeat: how often each lane runs.
        budget: in seconds; None without one.
        jobs: how many lanes run at once; None: as many as the cores and the memory allow.
        runs: the folder of the run folders.
        baseline: the value of ``--baseline``.
        mutants: how many wrong fixes of each pack.
        bisect: how long the bisections of verdicts that changed may take together, in seconds; None: there are none.
        cluster: what makes another sweep of it where Slurm runs its lanes; empty: this host does.
        notes: what the outputs have to say besides, such as packs that could not be loaded.

    """

    packs: list[Pack]
    folder: Path
    only: tuple[str, ...]
    moving: Moving
    repeat: int
    budget: float | None
    jobs: int | None
    runs: Path
    baseline: Path | None
    mutants: int = 0
    bisect: float | None = None
    cluster: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def request(self) -> SweepRequest:
        """What a sweep is continued by."""
        packs, moving = files.key_of(self.folder.resolve()), self.moving
        return SweepRequest(packs, self.only, moving.latest, self.repeat, self.mutants, moving.head, self.cluster)

    def command(self, cell: Cell) -> str:
        """Return the command that makes a cell's receipt anew."""
        text = f"runner.py sweep --only {cell.pack.name}:{cell.target}"
        text += f" --{cell.column}" if cell.column else ""
        return text + (f" --repeat {self.repeat}" if self.repeat > 1 else "")


class Engine(Protocol):
    """What runs the lanes of a sweep, and leaves their ends in the journal."""

    def run(self, session: Session, cells: Iterable[Cell]) -> Account:
        """Run the lanes of cells that have not ended."""

    def finished(self, run: Path) -> None:
        """Hear that the sweep of that run folder is finished."""


@dataclass(frozen=True)
class ThisHost:
    """Runs lanes here."""

    def run(self, session: Session, cells: Iterable[Cell]) -> Account:
        """Run the lanes of cells that have not ended."""
        return session.run(cells)

    def finished(self, run: Path) -> None:
        """Do nothing: nothing lies elsewhere."""


@dataclass(frozen=True)
class Sweep:
    """Runs an order on a host.

    Attributes:
        order: what to do.
        cache: of trees, dependency sets and JIT results.
        host: what it is; its GPUs are those of the pool.
        devices: the GPUs.
        listener: whom to tell of lanes.
        progress: whom to tell of the rest.
        engine: what runs the lanes.

    """

    order: Order
    cache: Cache
    host: Host
    devices: list[Device]
    listener: Listener
    progress: Progress
    engine: Engine = field(default_factory=ThisHost)

    def run(self) -> tuple[Results, RunFolder]:
        """Run it, or what an earlier command left of it, and write every output."""
        with room.guard(self.order.runs, "the folder of runs", "--runs DIR"):
            return self._run()

    def _run(self) -> tuple[Results, RunFolder]:
        clock = time.monotonic()
        order = self.order
        chosen = selection.selected(order.packs, order.only)
        with (
            inputs.taken(self.cache, order.packs) as copies,
            run_folder.opened(order.runs, order.request, run_folder.now()) as folder,
        ):
            compared = baseline.find(order.baseline, order.runs, folder.name)
            packs = {one.name: one for one in copies}
            chosen = [(packs[one.name], target) for one, target in chosen]
            cells = selection.cells(chosen, self.host, self.cache, order.moving)
            past = history.estimates(order.runs, folder.name)
            with FileJournal(folder.path / run_folder.JOURNAL) as journal:
                again = f"; {journal.passed_over} damaged lines are passed over" if journal.passed_over else ""
                ended = f"{len(journal)} lanes ended before{again}"
                self.progress.tell(f"run folder {folder.path}: {len(cells)} cells, {ended}")
                session = self._session(folder, journal, past, clock)
                tasks = session.tasks(cells)
                self.progress.begin(
                    sum(task.key not in journal for task in tasks),
                    None if order.cluster else session.seconds_left(tasks),
                )
                account = self.engine.run(session, cells)
                night = self._mutants(session, cells, account)
                places = {**self.cache.places, order.folder.absolute(): "$PACKS", order.runs: "$RUNS"}
                judge = replace(session.judge, elsewhere=account.elsewhere, planned=account.planned)
                collector = Collector(judge, account, compared, redaction.of_host(places), night.killed)
                threads = {one.name: one.definition.known for one in copies if one.definition.known}
                rows = list(known.marked(list(collector.rows(cells)), threads))
                before = len(journal)
                bisection = Bisection(session, compared, self.progress.tell, collector.clean)
                self._bisect(bisection, account, cells, rows)
                account.ran += len(journal) - before
            seconds = (run_folder.now() - folder.started).total_seconds()
            results = self._results(folder, session, account, tuple(rows), compared.text, seconds)
            results = replace(results, notes=(*results.notes, *night.notes))
            results = replace(results, status=int(_status(results)))
            patches = {name: one.patch for name, one in packs.items()}
            write(results, folder.path, patches)
            if results.finished:
                folder.finish(order.request)
                self.engine.finished(folder.path)
        return results, folder

    def _mutants(self, session: Session, cells: list[Cell], account: Account) -> Night:
        """Run the wrong fixes that were asked for, behind everything else."""
        if not self.order.mutants or account.interrupted:
            return Night()
        night = mutants.run(session, self.order.runs, cells, self.order.mutants, self.progress)
        account.interrupted = night.interrupted
        return night

    def _bisect(self, bisection: Bisection, account: Account, cells: list[Cell], rows: list[CellRow]) -> None:
        """Find out which release or commit changed verdicts, behind everything else; the rows take what is found."""
        if self.order.bisect is None or account.interrupted:
            return
        session = bisection.session
        ends = [time.monotonic() + self.order.bisect, *([] if session.stop_at is None else [session.stop_at])]
        bisection = replace(bisection, session=replace(session, stop_at=min(ends)))
        try:
            for place, row in enumerate(bisection.rows(cells, list(rows))):
                rows[place] = row
        except KeyboardInterrupt:
            account.interrupted = True

    def _session(self, folder: RunFolder, journal: FileJournal, past: Estimates, clock: float) -> Session:
        def note(fault: GpuFault) -> None:
            folder.note(fault)
            self.listener.fault(fault)

        order = self.order
        return Session(
            cache=self.cache,
            host=self.host,
            devices=self.devices,
            folder=folder.path,
            journal=journal,
            command=order.command,
            listener=replace(self.listener, fault=note),
            jobs=order.jobs,
            repeat=order.repeat,
            estimates=past,
            stop_at=None if order.budget is None else clock + order.budget,
            watch=GpuWatch(),
            faults=tuple(folder.gpu_faults()),
        )

    def _results(  # noqa: PLR0913, PLR0917 - what the parts of a sweep left
        self,
        folder: RunFolder,
        session: Session,
        account: Account,
        rows: tuple[CellRow, ...],
        compared: str,
        seconds: float,
    ) -> Results:
        host, faults = self.host, {one.place: one for one in account.faults}
        names = {device.place: device.gpu.name for device in self.devices} | dict(sorted(account.seen.items()))
        names |= {place: fault.name for place, fault in faults.items() if place not in names}
        gpus = tuple(
            GpuRow(place, name, faults[place].reason, faults[place].task)
            if place in faults
            else GpuRow(place, name, "", "")
            for place, name in names.items()
        )
        drivers = sorted({node.driver for node in account.elsewhere.values() if node.driver})
        jobs = session.most_jobs
        results = Results(
            schema=SCHEMA,
            run=folder.name,
            started=folder.started.isoformat(timespec="seconds"),
            seconds=round(seconds, 1),
            finished=not account.interrupted,
            status=0,
            baseline=compared,
            lanes_run=account.ran,
            lanes_resumed=account.resumed,
            host=HostRow(
                host.python, host.torch or "", host.triton or "", host.cuda, ", ".join(drivers) or host.driver, jobs
            ),
            gpus=gpus,
            notes=self.order.notes,
            cells=rows,
        )
        return replace(results, status=int(_status(results)))


def write(results: Results, folder: Path, patches: dict[str, Path]) -> None:
    """Write every output of a sweep, each whole or not at all."""
    files.write_atomic(folder / run_folder.RESULTS, receipt.to_json(asdict(results)))
    files.write_atomic(folder / "summary.md", text_outputs.summary(results))
    files.write_atomic(folder / "junit.xml", text_outputs.junit(results))
    files.write_atomic(folder / "index.html", Page(results, folder, patches).pieces())


def _status(results: Results) -> Exit:
    if not results.finished:
        return Exit.INTERRUPTED
    worse = any(row.needs_attention for row in results.cells) or any(gpu.reason for gpu in results.gpus)
    if worse or results.notes:
        return Exit.DEVIATES
    return Exit.AS_EXPECTED if results.has_judged else Exit.NOTHING_JUDGED
