"""One sweep: plan it, run the lanes that have not ended, judge, compare, write."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.core import files, room
from harness.core.words import Exit
from harness.host.gpu_health import GpuWatch
from harness.host.gpus import place_name
from harness.lane.cell import Cell
from harness.pack.model import Pack
from harness.receipt import receipt, redaction
from harness.schedule.account import Account
from harness.schedule.journal import Journal
from harness.schedule.selection import copied_inputs
from harness.schedule.session import GpuFault, Session
from harness.sweep import baseline, columns, outputs, run_folder
from harness.sweep.collector import Collector
from harness.sweep.results import SCHEMA, HostRow, Results
from harness.sweep.run_folder import Request, RunFolder


@dataclass(frozen=True)
class Order:
    """What the command line requests."""

    packs: list[Pack]  # without those that could not be loaded
    folder: Path  # of the packs
    selectors: tuple[str, ...]  # the packs and targets to judge; empty: all
    columns: tuple[str, ...]  # upstream's newest releases (LATEST) and default branches (HEAD), too
    repeat: int  # how often each lane runs
    budget: float | None  # in seconds
    runs: Path  # the folder of the run folders
    baseline: Path | None  # the value of ``--baseline``
    cluster: tuple[str, ...] = ()  # how Slurm runs the lanes; empty: this host runs them
    notes: tuple[str, ...] = ()  # further lines of the outputs, such as packs that could not be loaded

    @property
    def request(self) -> Request:
        """The words that a sweep is resumed by."""
        only = tuple(f"only {selector}" for selector in self.selectors)
        return (files.key_of(self.folder.resolve()), *self.columns, f"--repeat {self.repeat}", *only, *self.cluster)

    def command(self, cell: Cell) -> str:
        """Return the command that makes a cell's receipt anew."""
        text = f"runner.py sweep {cell.pack.name}:{cell.target}"
        text += f" --{cell.column}" if cell.column else ""
        return text + (f" --repeat {self.repeat}" if self.repeat > 1 else "")


#: Runs the lanes of cells, and stores their ends in the journal.
Engine = Callable[[Session, list[Cell]], Account]


def run(order: Order, base: Session, engine: Engine) -> tuple[Results, RunFolder]:
    """Run an order, or the rest of it after an earlier command, and write every output.

    The sweep's session is `base` with a run folder and a journal of its own. `engine` runs the lanes.
    """
    start = time.monotonic()
    selection = columns.select(order.packs, order.selectors)
    with (
        room.guard(order.runs, "the folder of runs", "--runs DIR"),
        copied_inputs(base.cache, order.packs) as copies,
        run_folder.open_run(order.runs, order.request, run_folder.now()) as folder,
    ):
        reference = baseline.find(order.baseline, order.runs, folder.name)
        packs = {pack.name: pack for pack in copies}
        pairs = [(packs[pack.name], target) for pack, target in selection]
        cells = columns.cells(pairs, base.host, base.cache, *order.columns)
        with Journal(folder.path / run_folder.JOURNAL) as journal:
            session = _session(order, base, folder, journal, start)
            progress = f"{len(cells)} cells, {len(journal.ends)} lanes ended before"
            base.progress.tell(f"run folder {session.folder}: {progress}")
            account = engine(session, cells)
            places = {**session.cache.places, order.folder.absolute(): "$PACKS", order.runs: "$RUNS"}
            collector = Collector(session, account, reference, redaction.host_scrubber(places))
            results = _results(order, folder, collector, cells)
        write(results, folder.path)
        if results.finished:
            folder.record(finished=True)
    return results, folder


def _session(order: Order, base: Session, folder: RunFolder, journal: Journal, start: float) -> Session:
    faulty = {fault.place for fault in folder.faults}
    return replace(
        base,
        devices=[device for device in base.devices if place_name(device) not in faulty],
        folder=folder.path,
        journal=journal,
        command=order.command,
        note=folder.note,
        repeat=order.repeat,
        urgent=run_folder.cells_not_run(order.runs, folder.name),
        stop_at=None if order.budget is None else start + order.budget,
        watch=GpuWatch(),
    )


def _results(order: Order, folder: RunFolder, collector: Collector, cells: list[Cell]) -> Results:
    session, account, host = collector.session, collector.account, collector.session.host
    gpus = {place_name(device): GpuFault(place_name(device), device.gpu.name, "", "") for device in session.devices}
    ends = [end for outcome in account.results.values() for end in outcome.last]
    nodes = [end.host for end in ends if end.host != host]  # of a cluster
    names = sorted({gpu.name for node in nodes for gpu in node.gpus})
    gpus |= {name: GpuFault("a node", name, "", "") for name in names}
    gpus |= {fault.place: fault for fault in folder.faults}
    drivers = sorted({node.driver for node in nodes if node.driver})
    results = Results(
        schema=SCHEMA,
        run=folder.name,
        started=folder.started.isoformat(timespec="seconds"),
        seconds=round((run_folder.now() - folder.started).total_seconds(), 1),
        finished=not account.interrupted,
        status=0,
        baseline=collector.baseline.text,
        lanes_run=account.ran,
        lanes_resumed=account.resumed,
        host=HostRow(
            python=host.python,
            torch=host.torch or "",
            triton=host.triton or "",
            cuda=host.cuda,
            driver=", ".join(drivers) or host.driver,
            jobs=session.most_jobs,
        ),
        gpus=tuple(gpus.values()),
        notes=order.notes,
        cells=tuple(collector.rows(cells)),
    )
    return replace(results, status=int(_status(results)))


def write(results: Results, folder: Path) -> None:
    """Write every output of a sweep, each whole or not at all."""
    files.write_atomic(folder / run_folder.RESULTS, receipt.to_json(asdict(results)))
    files.write_atomic(folder / "summary.md", outputs.summary(results))
    files.write_atomic(folder / "index.html", outputs.page(results, folder))


def _status(results: Results) -> Exit:
    if not results.finished:
        return Exit.INTERRUPTED
    worse = any(row.needs_attention for row in results.cells) or any(gpu.reason for gpu in results.gpus)
    if worse or results.notes:
        return Exit.DEVIATES
    return Exit.AS_EXPECTED if results.has_judged else Exit.NOTHING_JUDGED
