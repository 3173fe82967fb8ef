"""The lanes of a command, on this host: started as places become free, the longest first, until none can be run.

Every verb that runs lanes uses this module. `run`, `sweep` and `versions` differ in their cells, in whether the journal
is on disk, and in whether GPUs are watched. The account says which lanes are planned, and what became of each cell.
"""

import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from harness.core import HarnessError, LaneName, LaneVerdict, Verdict
from harness.host.host import place_name
from harness.lane import Cell, LaneEnd, environment, supervisor
from harness.receipt import writer
from harness.schedule.lane_runner import NoEnd, Prepared, Runner
from harness.schedule.session import GpuFault, Session
from harness.schedule.task import Devices, Places, Task, expected_seconds, lower_bound_seconds, rank, tasks
from harness.verdict import pack_verdict
from harness.verdict.pack_verdict import Judgement, Outcome, outcome_of_error

Result = TypeVar("Result")
#: The longest wait of the main thread, in seconds. Python runs signal handlers there between bytecodes: a signal that
#: comes just before the wait, or in another thread, does not end the wait.
POLL_SECONDS = 0.5
#: How many cells are laid out at once, beside the lanes.
PREPARING = 4
#: After so many faults of its GPUs a lane is given up.
MAX_FAULTS = 2
#: How many seconds an interrupted command waits for its lanes to end.
DRAIN_SECONDS = 30.0


@dataclass
class Account:
    """The plan of a command, and its results besides the ends in the journal.

    It judges each cell once, by the ends of its lanes, and writes its receipt once.
    """

    session: Session
    receipts: bool = True  # whether receipts are written
    planned: dict[str, list[Task]] = field(default_factory=dict)  # the lanes of each cell, by its name
    not_run: dict[str, str] = field(default_factory=dict)  # why a lane was not run, by its key
    total: int = 0  # how many lanes had not ended before
    ran: int = 0  # how many of them ended in this command
    resumed: int = 0  # how many lanes had ended before
    interrupted: bool = False  # by the user
    #: the outcome of each cell, by its name; a cell that could not be judged has one, too
    results: dict[str, Outcome] = field(default_factory=dict)

    def plan(self, cells: list[Cell]) -> None:
        """List the lanes of each cell. A cell whose script or contract cannot be read has none, and is an error."""
        session = self.session
        for cell in cells:
            urgent = cell.name in session.urgent
            try:
                self.planned[cell.name] = tasks(cell, session.host, session.repeat, urgent=urgent)
            except OSError as error:
                self.planned[cell.name] = []
                reason = f"{Path(error.filename).name} cannot be read ({error.strerror})"
                self.results[cell.name] = Outcome(cell, Judgement(Verdict.ERROR, reason))

    def pending(self) -> list[Task]:
        """List and count the lanes that have not ended before, each once: two cells may share lanes."""
        lanes: dict[str, Task] = {}
        for task in chain.from_iterable(self.planned.values()):
            lanes.setdefault(task.key, task)
        pending = [task for key, task in lanes.items() if key not in self.session.journal.ends]
        self.resumed, self.total = len(lanes) - len(pending), len(pending)
        return pending

    def count(self, end: LaneEnd) -> str:
        """Count a lane that ended, and return a line about it."""
        self.ran += 1
        verdict = end.verdict or "the patch does not apply"
        return f"{self.ran}/{self.total} {end.task}: {verdict}, {end.seconds:.1f} s on {end.place}"

    def reason_not_run(self, cell: Cell) -> str:
        """Return why not every lane of a cell was run."""
        reasons = (self.not_run[task.key] for task in self.planned[cell.name] if task.key in self.not_run)
        return next(reasons, "interrupted")

    def fail(self, outcome: Outcome) -> None:
        """Take the outcome of a cell that could not be judged, and tell its reason."""
        self.results[outcome.cell.name] = outcome
        if not outcome.problem:  # a wrong call, which the command itself reports
            self.session.progress.tell(f"{outcome.cell.name}: {outcome.judgement.reason}")

    def settle(self, cell: Cell, *, at_end: bool = False) -> None:
        """Judge a cell if all its lanes have ended; with `at_end` judge any cell, by its complete runs."""
        if cell.name in self.results or not (at_end or self.is_complete(cell)):
            return
        try:
            outcome = self._judge(cell)
            if outcome is not None:
                self.results[cell.name] = self._write_receipt(outcome) if self.receipts else outcome
        except Exception as error:  # noqa: BLE001 - the other cells go on; this one reports it
            self.results[cell.name] = outcome_of_error(error, cell)

    def is_complete(self, cell: Cell) -> bool:
        """Whether all lanes that a cell needs have ended."""
        return len(self._runs(cell)) * len(cell.lanes) == len(self.planned[cell.name])

    def _runs(self, cell: Cell) -> list[tuple[LaneEnd, ...]]:
        """List the complete runs. The second lane of a pair is needed only if the first shows the bug."""
        tasks, width, runs = self.planned[cell.name], len(cell.lanes), []
        for start in range(0, len(tasks), width):
            ends = [self.session.journal.ends.get(task.key) for task in tasks[start : start + width]]
            needed = ends if _shows_bug(ends[0]) else ends[:1]
            run = tuple(end for end in needed if end is not None)
            runs += [run] if len(run) == len(needed) else []
        return runs

    def _judge(self, cell: Cell) -> Outcome | None:
        """Judge a cell by its complete runs; None if it has none."""
        if cell.evidence is None:
            return Outcome(cell, Judgement(cell.verdict, cell.reason))
        runs = tuple(self._runs(cell))
        if not runs:
            return None
        judgement, agreeing = pack_verdict.judge_runs(runs, cell.about)
        return Outcome(cell, judgement, runs, agreeing, self.session.dependency_set(cell))

    def _write_receipt(self, outcome: Outcome) -> Outcome:
        """Write the receipt of a cell into the run folder; return the outcome with its path, or with the problem."""
        if not outcome.lanes:
            return outcome
        cell, session = outcome.cell, self.session
        try:
            with writer.translate_disk_errors():
                logs = {end.lane: (session.folder / end.log.file).read_text("utf-8") for end in outcome.last if end.log}
                folder = session.folder / (cell.column or "receipts") / cell.pack.name
                return replace(
                    outcome, receipt=writer.write(outcome, session.cache, session.command(cell), folder, logs)
                )
        except HarnessError as error:
            return replace(outcome, problem=str(error))


def run(session: Session, cells: list[Cell], *, receipts: bool = True) -> Account:
    """Run the lanes that have not ended, and judge each cell. Without `receipts` no receipt is written."""
    account = Account(session, receipts)
    account.plan(cells)
    supervisor.adopt_orphans()
    environment.store_bytecode(session.progress.tell)
    Scheduler(account, Runner(session)).run()
    for cell in cells:  # also those whose lanes ended before, belong to another cell too, or were interrupted
        account.settle(cell, at_end=True)
    return account


def _shows_bug(end: LaneEnd | None) -> bool:
    """Whether a lane has ended and shows the bug, so that the second lane of its pair is needed."""
    return end is not None and end.verdict == LaneVerdict.BUG_REPRODUCED


def _in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Run `work` in a daemon thread, which ends with the command."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the future raises it again
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@dataclass
class Scheduler:
    """Runs the lanes of one command: each lane in a thread of its own, every decision in the main thread."""

    account: Account  # the lanes to run, and what becomes of them
    runner: Runner
    _layouts: dict[Future[Prepared], Cell] = field(default_factory=dict)
    _lanes: dict[Future[LaneEnd | NoEnd], Task] = field(default_factory=dict)
    _to_lay_out: deque[Cell] = field(default_factory=deque)
    _prepared: dict[str, Prepared] = field(default_factory=dict)
    #: by its key, each lane that has neither ended nor been given up; `rank` puts it after the lanes that it waits for
    _open: dict[str, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._session = self.account.session
        self._cancel, self._cancel_end = os.pipe()  # once the second end is closed, lanes that watch the first end
        self._places = Places(self._session.most_jobs, list(self._session.devices))

    def run(self) -> None:
        """Run every lane that has not ended before."""
        pending = self.account.pending()
        dependent_seconds: defaultdict[str, float] = defaultdict(float)
        for task in reversed(pending):
            for key in task.after:
                chain_seconds = expected_seconds(task) + dependent_seconds[task.key]
                dependent_seconds[key] = max(dependent_seconds[key], chain_seconds)
        pending.sort(key=lambda task: rank(task, dependent_seconds[task.key]))
        self._open = {task.key: task for task in pending}
        self._session.progress.begin(len(pending), lower_bound_seconds(pending, self._places.jobs))
        self._to_lay_out.extend({task.cell.name: task.cell for task in pending}.values())
        for _ in range(PREPARING):
            self._lay_out_next()
        try:
            while self._layouts or self._lanes:
                ended = self._await(POLL_SECONDS)
                self._start_lanes()
                for cell in ended:
                    self.account.settle(cell)
        except KeyboardInterrupt:
            self.account.interrupted = True
        finally:
            os.close(self._cancel_end)
            self._to_lay_out.clear()
            wait(self._lanes, DRAIN_SECONDS)
            self._await(0.0)
            os.close(self._cancel)
        for task in self._open.values():
            reason = "interrupted" if self.account.interrupted else self._places.never(task) or "nothing could take it"
            self.account.not_run.setdefault(task.key, reason)

    def _await(self, seconds: float) -> list[Cell]:
        """Wait up to `seconds` for a lane or a layout to end, and handle those that have; return the lanes' cells."""
        running: list[Future[Any]] = [*self._layouts, *self._lanes]
        done = wait(running, seconds, FIRST_COMPLETED).done
        for layout in [layout for layout in self._layouts if layout in done]:
            self._handle_layout(self._layouts.pop(layout), layout)
        ended = []
        for lane in [lane for lane in self._lanes if lane in done]:
            task = self._lanes.pop(lane)
            ended.append(task.cell)
            self._handle_lane(task, lane)
        return ended

    def _lay_out_next(self) -> None:
        if self._to_lay_out:
            cell = self._to_lay_out.popleft()
            self._layouts[_in_thread(partial(self.runner.prepare, cell))] = cell

    def _handle_layout(self, cell: Cell, layout: Future[Prepared]) -> None:
        self._lay_out_next()
        error = layout.exception()
        if error is None:
            self._prepared[cell.name] = layout.result()
        elif not self.account.interrupted:  # Ctrl-C on a terminal also ends the programs that lay out a tree
            self.account.fail(outcome_of_error(error, cell))
            self._open = {key: task for key, task in self._open.items() if task.cell.name != cell.name}

    def _start_lanes(self) -> None:
        """Start each lane that may start and has a place."""
        while (start := self._places.take(self._ready())) is not None:
            task, devices = start
            self._session.progress.start(task.key, f"{task.name} on {place_name(*devices)}", task.seconds)
            self._lanes[_in_thread(partial(self._run_lane, task, devices))] = task

    def _ready(self) -> list[Task]:
        """List the lanes that may start, in their order; drop those that are not needed, or exceed the budget."""
        ready = []
        for task in list(self._open.values()):
            is_laid_out = task.cell.name in self._prepared
            if is_laid_out and task.key not in self._places.running and self._open.keys().isdisjoint(task.after):
                if not self._is_needed(task):
                    del self._open[task.key]
                elif reason := self._over_budget(task):
                    self._give_up(task, reason)
                else:
                    ready.append(task)
        return ready

    def _is_needed(self, task: Task) -> bool:
        """Whether a task is not the second of a pair whose first lane is over, and did not show the bug."""
        is_second = task.lane == LaneName.PATCHED and LaneName.PRISTINE in task.cell.lanes
        is_open = task.pristine in self._open
        return not is_second or is_open or _shows_bug(self._session.journal.ends.get(task.pristine))

    def _over_budget(self, task: Task) -> str:
        """Say why a task does not fit into the rest of the budget; empty if it fits."""
        remaining = math.inf if self._session.stop_at is None else self._session.stop_at - time.monotonic()
        if remaining > 0 and (task.seconds or 0.0) <= remaining:
            return ""
        expected = "" if task.seconds is None else f"it takes about {task.seconds:.0f} s, and "
        return f"{expected}{max(0.0, remaining):.0f} s were left of the budget"

    def _give_up(self, task: Task, reason: str) -> None:
        self.account.not_run[task.key] = reason
        del self._open[task.key]

    def _run_lane(self, task: Task, devices: Devices) -> LaneEnd | NoEnd:
        result = self.runner.run(task, self._prepared[task.cell.name], devices, self._cancel)
        if isinstance(result, LaneEnd):
            self._session.journal.append(result)
        return result

    def _handle_lane(self, task: Task, lane: Future[LaneEnd | NoEnd]) -> None:
        """Handle the result of a lane; one that was abandoned stays open."""
        del self._places.running[task.key]
        line, error = "", lane.exception()
        if error is not None:
            self.account.fail(outcome_of_error(error, task.cell))
            del self._open[task.key]
        elif isinstance(result := lane.result(), LaneEnd):
            line = self.account.count(result)
            del self._open[task.key]
        elif result.reason:
            self._give_up(task, result.reason)
        else:
            self._repeat_elsewhere(task, result)
        self._session.progress.end(task.key, line)

    def _repeat_elsewhere(self, task: Task, result: NoEnd) -> None:
        """Let a lane run again if a GPU has a fault, or another program uses the GPU of a lane that measures."""
        self._places.busy += result.busy
        for device, reason in result.faults:
            if device in self._places.devices:  # a GPU leaves the pool once; its other lanes run to their end
                self._places.devices.remove(device)
                fault = GpuFault(place_name(device), device.gpu.name, reason, task.name)
                self._session.progress.tell(f"{fault.place} leaves the pool after {fault.task}: {fault.reason}")
                self._session.note(fault)
        if result.faults:
            task = self._open[task.key] = replace(task, faults=task.faults + 1)
            if task.faults >= MAX_FAULTS:
                self._give_up(task, f"{task.faults} GPUs had a fault after it, the last one: {result.faults[-1][1]}")
