"""One sweep from beginning to end: plan, run what has not ended, judge, compare, write."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness import files
from harness.cache import Cache
from harness.host import Host
from harness.pack import Pack
from harness.sweep import changes, history, night, planning, writing
from harness.sweep.account import Account, Reporter, Sickness
from harness.sweep.cell import Cell
from harness.sweep.collect import Collector
from harness.sweep.crew import Crew
from harness.sweep.engine import Engine
from harness.sweep.journal import Journal
from harness.sweep.night import Night, Wish
from harness.sweep.nvml import Device
from harness.sweep.queue import Queue
from harness.sweep.results import NOT_HERE, NOT_RUN, SCHEMA, CellRow, GpuRow, HostRow, Results
from harness.sweep.verdicts import Bench
from harness.sweep.workshop import Workshop
from harness.words import Exit, Verdict

#: Verdicts behind which nothing was judged.
UNJUDGED = {NOT_HERE, NOT_RUN, Verdict.UNSUPPORTED}


@dataclass(frozen=True)
class Order:
    """What the command line asks for.

    Attributes:
        packs: the packs that could be loaded.
        folder: where they lie.
        only: the values of ``--only``.
        latest: also upstream's newest releases.
        repeat: how often each lane runs.
        budget: in seconds; None without one.
        jobs: how many lanes the cores take at once, besides those of the GPUs.
        nights: the folder of the nights.
        baseline: the value of ``--baseline``.
        notes: what the outputs have to say besides, such as packs that could not be loaded.

    """

    packs: list[Pack]
    folder: Path
    only: tuple[str, ...]
    latest: bool
    repeat: int
    budget: float | None
    jobs: int
    nights: Path
    baseline: Path | None
    notes: tuple[str, ...] = ()

    @property
    def wish(self) -> Wish:
        """What a night is continued by."""
        return Wish(files.key_of(self.folder.resolve()), self.only, self.latest, self.repeat)


@dataclass(frozen=True)
class Sweep:
    """Runs an order on a host.

    Attributes:
        order: what to do.
        cache: of trees, companion sets and JIT results.
        host: what it is; its GPUs are those of the pool.
        devices: the GPUs.
        tell: takes a line for each end.

    """

    order: Order
    cache: Cache
    host: Host
    devices: list[Device]
    tell: Callable[[str], None]

    def run(self) -> tuple[Results, Night]:
        """Run it, or what an earlier command left of it, and write every output."""
        clock = time.monotonic()
        order = self.order
        chosen = planning.selected(order.packs, order.only)
        with night.opened(order.nights, order.wish, night.now()) as tonight:
            compared = changes.baseline(order.baseline, order.nights, tonight.name)
            cells = planning.cells(chosen, self.host, self.cache, latest=order.latest)
            past = history.read(order.nights, tonight.name)
            with Journal(tonight.folder / night.JOURNAL) as journal:
                self.tell(f"night {tonight.folder}: {len(cells)} cells, {len(journal)} lanes ended before")
                bench = Bench(self.cache, self.host, tonight.folder, journal, order.repeat)
                account = self._work(tonight, bench, cells, past, clock)
                rows = tuple(Collector(bench, account, compared).rows(cells))
            seconds = (night.now() - tonight.started).total_seconds()
            results = self._results(tonight, account, rows, compared.text, seconds)
            writing.write(results, past, tonight.folder, {one.name: one.patch for one in order.packs})
            if results.finished:
                tonight.finish(order.wish)
        return results, tonight

    def _work(self, tonight: Night, bench: Bench, cells: list[Cell], past: history.History, clock: float) -> Account:
        estimates = history.Estimates(past)
        stop_at = None if self.order.budget is None else clock + self.order.budget
        earlier = tonight.sicknesses()
        sick = {sickness.place for sickness in earlier}
        devices = [device for device in self.devices if device.place not in sick]
        cancel, cancel_end = os.pipe()
        try:
            with self.cache.scratch("sweep-") as scratch:
                work = Workshop(self.cache, self.host, bench, scratch, cancel, stop_at)
                reporter = Reporter(self.tell, lambda sickness: self._note(tonight, sickness))
                engine = Engine(
                    Crew(work, bench.journal), bench.journal, devices, Queue(self.order.jobs), reporter, stop_at
                )
                engine.account.sick.extend(earlier)
                tasks = planning.unique_tasks(cells, self.host, self.order.repeat)
                return engine.run((estimates.of(task) for task in tasks), cancel_end)
        finally:
            os.close(cancel)

    def _note(self, tonight: Night, sickness: Sickness) -> None:
        tonight.note(sickness)
        self.tell(f"{sickness.place} leaves the pool after {sickness.task}: {sickness.reason}")

    def _results(
        self, tonight: Night, account: Account, rows: tuple[CellRow, ...], baseline: str, seconds: float
    ) -> Results:
        host, sick = self.host, {one.place: one for one in account.sick}
        gpus = tuple(
            GpuRow(device.place, device.gpu.name, sick[device.place].reason, sick[device.place].task)
            if device.place in sick
            else GpuRow(device.place, device.gpu.name, "", "")
            for device in self.devices
        )
        results = Results(
            schema=SCHEMA,
            night=tonight.name,
            started=tonight.started.isoformat(timespec="seconds"),
            seconds=round(seconds, 1),
            finished=not account.interrupted,
            status=0,
            baseline=baseline,
            lanes_run=account.ran,
            lanes_resumed=account.resumed,
            host=HostRow(host.python, host.torch or "", host.triton or "", host.cuda, host.driver, self.order.jobs),
            gpus=gpus,
            notes=self.order.notes,
            cells=rows,
        )
        return replace(results, status=int(_status(results)))


def _status(results: Results) -> Exit:
    if not results.finished:
        return Exit.INTERRUPTED
    worse = any(row.needs_a_person for row in results.cells) or any(gpu.reason for gpu in results.gpus)
    if worse or results.notes:
        return Exit.DEVIATES
    return Exit.AS_EXPECTED if any(row.verdict not in UNJUDGED for row in results.cells) else Exit.NOTHING_JUDGED
