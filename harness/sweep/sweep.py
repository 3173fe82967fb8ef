"""One sweep from beginning to end: plan, run what has not ended, judge, compare, write."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.core import files, room
from harness.core.words import Exit
from harness.host.gpu_health import GpuWatch
from harness.lane.cell import Cell
from harness.pack.model import Pack
from harness.receipt import receipt, redaction
from harness.schedule import lanes
from harness.schedule.journal import Journal
from harness.schedule.scheduler import Account
from harness.schedule.selection import taken
from harness.schedule.session import GpuFault, Session
from harness.sweep import baseline, columns, outputs, run_folder
from harness.sweep.collector import Collector
from harness.sweep.results import SCHEMA, HostRow, Results
from harness.sweep.run_folder import Request, RunFolder


@dataclass(frozen=True)
class Order:
    """What the command line asks for."""

    packs: list[Pack]  # the packs that could be loaded
    folder: Path  # where they lie
    only: tuple[str, ...]  # the packs and targets that are named; empty: all
    moving: tuple[str, ...]  # upstream's newest releases (LATEST) and default branches (HEAD) too
    repeat: int  # how often each lane runs
    budget: float | None  # in seconds; None without one
    runs: Path  # the folder of the run folders
    baseline: Path | None  # the value of ``--baseline``
    #: what makes another sweep of it where Slurm runs its lanes; empty: this host does
    cluster: tuple[str, ...] = ()
    #: what the outputs have to say besides, such as packs that could not be loaded
    notes: tuple[str, ...] = ()

    @property
    def request(self) -> Request:
        """What a sweep is continued by."""
        only = tuple(f"only {text}" for text in self.only)
        return (files.key_of(self.folder.resolve()), *self.moving, f"--repeat {self.repeat}", *only, *self.cluster)

    def command(self, cell: Cell) -> str:
        """Return the command that makes a cell's receipt anew."""
        text = f"runner.py sweep {cell.pack.name}:{cell.target}"
        text += f" --{cell.column}" if cell.column else ""
        return text + (f" --repeat {self.repeat}" if self.repeat > 1 else "")


#: What runs the lanes of cells elsewhere, and leaves their ends in the journal.
Engine = Callable[[Session, list[Cell]], Account]


def run(order: Order, usual: Session, engine: Engine = lanes.run) -> tuple[Results, RunFolder]:
    """Run an order, or what an earlier command left of it, and write every output.

    `usual` is where lanes run, whatever a sweep has of its own, and `engine` what runs them.
    """
    begun = time.monotonic()
    chosen = columns.selected(order.packs, order.only)
    with (
        room.guard(order.runs, "the folder of runs", "--runs DIR"),
        taken(usual.cache, order.packs) as copies,
        run_folder.opened(order.runs, order.request, run_folder.now()) as folder,
    ):
        compared = baseline.find(order.baseline, order.runs, folder.name)
        packs = {one.name: one for one in copies}
        taken_here = [(packs[one.name], target) for one, target in chosen]
        cells = columns.cells(taken_here, usual.host, usual.cache, *order.moving)
        with Journal(folder.path / run_folder.JOURNAL) as journal:
            session = _session(order, usual, folder, journal, begun)
            before = f"{len(cells)} cells, {len(journal)} lanes ended before"
            usual.progress.tell(f"run folder {session.folder}: {before}")
            account = engine(session, cells)
            places = {**session.cache.places, order.folder.absolute(): "$PACKS", order.runs: "$RUNS"}
            collector = Collector(session, account, compared, redaction.of_host(places))
            results = _results(order, folder, collector, cells)
        write(results, folder.path)
        if results.finished:
            folder.record(finished=True)
    return results, folder


def _session(order: Order, usual: Session, folder: RunFolder, journal: Journal, begun: float) -> Session:
    return replace(
        usual,
        folder=folder.path,
        journal=journal,
        command=order.command,
        note=folder.note,
        repeat=order.repeat,
        urgent=run_folder.left_out(order.runs, folder.name),
        stop_at=None if order.budget is None else begun + order.budget,
        watch=GpuWatch(),
        faults=tuple(folder.faults),
    )


def _results(order: Order, folder: RunFolder, collector: Collector, cells: list[Cell]) -> Results:
    session, account, host = collector.session, collector.account, collector.session.host
    gpus = {device.place: GpuFault(device.place, device.gpu.name, "", "") for device in session.devices}
    ends = [end for outcome in account.results.values() for end in outcome.last]
    nodes = [end.host for end in ends if end.host != host]  # of a cluster
    seen = sorted({gpu.name for node in nodes for gpu in node.gpus})
    gpus |= {name: GpuFault("a node", name, "", "") for name in seen}
    gpus |= {one.place: GpuFault(one.place, one.name, one.reason, one.task) for one in account.faults}
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
