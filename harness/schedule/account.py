"""The account of a command: the lanes that are planned for its cells, and what became of each cell."""

from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from harness.core.errors import HarnessError
from harness.core.words import LaneVerdict, Verdict
from harness.lane.cell import Cell
from harness.lane.results import LaneEnd
from harness.receipt import writer
from harness.schedule.session import Session
from harness.schedule.task import Task, tasks
from harness.verdict import pack_verdict
from harness.verdict.pack_verdict import Judgement, Outcome, outcome_of_error


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
            is_reproduced = ends[0] is not None and ends[0].verdict == LaneVerdict.BUG_REPRODUCED
            needed = ends if is_reproduced else ends[:1]
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
