"""From the ends of a cell's lanes to its verdict and its receipt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.core.words import LaneName, LaneVerdict
from harness.host.host import Host
from harness.lane.record import LaneEnd
from harness.pack import judges
from harness.receipt import receipt, writer
from harness.receipt.receipt import Receipt
from harness.receipt.writer import MadeBy
from harness.schedule.journal import Journal
from harness.schedule.task import Task, tasks
from harness.upstream import dependencies
from harness.verdict import pack_verdict
from harness.verdict.cell import Cell
from harness.verdict.outcome import Outcome
from harness.verdict.pack_verdict import Judgement

#: Builds the command that makes a cell's receipt anew.
CommandOf = Callable[[Cell], str]


@dataclass(frozen=True)
class CellJudge:
    """Judges cells by what the journal holds of their lanes."""

    cache: Cache  # whose names stand in receipts
    host: Host  # what it is
    folder: Path  # of the run, with the logs and the receipts
    journal: Journal  # the ends
    repeat: int  # how often the lanes were requested
    command: CommandOf  # that makes a receipt anew
    #: the hosts of lanes that ran on another, by the keys of their tasks
    elsewhere: Mapping[str, Host] = field(default_factory=dict)
    #: the tasks of cells that are planned already, by the names of the cells
    planned: Mapping[str, list[Task]] = field(default_factory=dict)

    def judged(self, cell: Cell) -> Outcome | None:
        """Judge a cell by its whole runs; None where there is not one."""
        runs = [self._ends(run) for run in self._repetitions(cell) if not self._missing(run)]
        if not runs:
            return None
        judgement, agreeing = pack_verdict.repeated([_judgement(run, cell.about) for run in runs])
        members = dependencies.chosen(
            self.cache, cell.pack.definition, cell.dependencies, cell.stated.dependencies, self.host.python_tag
        )
        return Outcome(cell, judgement, tuple(runs), agreeing, members)

    def _ends(self, repetition: list[Task]) -> tuple[LaneEnd, ...]:
        """Return the ends of one repetition; where the bug is not there, its patched lane does not count."""
        ends = [end for end in (self.journal.read(task.key) for task in repetition) if end is not None]
        reproduced = ends[0].lane == LaneName.PATCHED or ends[0].verdict == LaneVerdict.BUG_REPRODUCED
        return tuple(ends if reproduced else ends[:1])

    def missing(self, cell: Cell) -> list[Task]:
        """List the tasks whose end the verdict of every run would need and does not have."""
        return [task for some in self._repetitions(cell) for task in self._missing(some)]

    def _repetitions(self, cell: Cell) -> list[list[Task]]:
        every = self.planned[cell.name] if cell.name in self.planned else tasks(cell, self.host, self.repeat)
        width = len(cell.lanes)
        return [every[start : start + width] for start in range(0, len(every), width)]

    def _missing(self, repetition: list[Task]) -> list[Task]:
        missing = []
        for task in repetition:
            second = task.lane == LaneName.PATCHED and len(repetition) > 1
            if second and self.journal.verdict(task.pristine) != LaneVerdict.BUG_REPRODUCED:
                continue  # the bug is not there, or its own lane is missing
            if task.key not in self.journal:
                missing.append(task)
        return missing

    def receipt_path(self, cell: Cell) -> Path:
        """Return where the receipt of a cell lies in the run folder."""
        folder = self.folder / (cell.column or "receipts") / cell.pack.name
        return folder / f"{cell.target}.{cell.evidence}.json"

    def logs(self, outcome: Outcome) -> dict[LaneName, Path]:
        """Return the scrubbed logs of the last run's lanes."""
        return {end.lane: self.folder / end.log.file for end in outcome.last if end.log is not None}

    def recorded(self, outcome: Outcome) -> Outcome:
        """Write the receipt of a cell into the run folder, unless it lies there already; say where, or why not."""
        if not outcome.lanes or outcome.receipt:
            return outcome
        path = self.receipt_path(outcome.cell)
        try:
            return replace(outcome, receipt=path if _lies_at(path, outcome) else self.write(outcome, path.parent))
        except HarnessError as error:
            return replace(outcome, problem=error)

    def receipt(self, outcome: Outcome) -> Receipt:
        """Return the receipt of a cell, written unless it lies there already.

        Raises:
            HarnessError: something private would be written, or the disk does not take it.

        """
        recorded = self.recorded(outcome)
        if recorded.problem is not None:
            raise recorded.problem
        return receipt.load(recorded.receipt or self.receipt_path(outcome.cell))

    def write(self, outcome: Outcome, folder: Path) -> Path:
        """Write the receipt of a cell into `folder` and return its path.

        Raises:
            HarnessError: something private would be written, or the disk does not take it.

        """
        try:
            texts = {name: path.read_text(encoding="utf-8") for name, path in self.logs(outcome).items()}
            host = self.elsewhere.get(outcome.last[-1].key, self.host)
            return writer.write(outcome, MadeBy(self.cache, host, self.command(outcome.cell)), folder, texts)
        except (OSError, UnicodeDecodeError) as error:
            name = Path(error.filename).name if isinstance(error, OSError) and error.filename else ""
            why = (error.strerror or str(error)) if isinstance(error, OSError) else "a log is not UTF-8"
            raise HarnessError(f"no receipt written: {why}{f' ({name})' if name else ''}") from None


def _judgement(run: tuple[LaneEnd, ...], about: tuple[str, ...]) -> Judgement:
    """Judge one repetition by the ends of its lanes."""
    ends = {end.lane: end for end in run}
    pristine, patched = ends.get(LaneName.PRISTINE), ends.get(LaneName.PATCHED)
    return pack_verdict.pair(
        pristine.record if pristine else None,
        patched.record if patched else None,
        patched.stale if patched else "",
        about,
    )


def _lies_at(path: Path, outcome: Outcome) -> bool:
    """Whether the receipt of an outcome lies there: neither none, nor one of other lanes (the script changed)."""
    try:
        found = receipt.load(path) if path.exists() else None
    except HarnessError:
        return False
    wanted = (writer.started(outcome), round(outcome.seconds, 3), len(outcome.runs), judges.sha256(outcome.cell.pack))
    return found is not None and (found.started, found.seconds, found.repeats.of, found.probe.sha256) == wanted
