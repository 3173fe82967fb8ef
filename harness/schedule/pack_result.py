"""From the ends of a cell's lanes to its verdict and its receipt."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.core.words import LaneName, LaneVerdict
from harness.host.host import Host
from harness.pack import judges
from harness.receipt import receipt, writer
from harness.receipt.receipt import Receipt
from harness.receipt.writer import MadeBy
from harness.schedule.journal import Journal, LaneEnd
from harness.schedule.task import Task, tasks
from harness.upstream import dependencies
from harness.verdict import pack_verdict
from harness.verdict.cell import Cell
from harness.verdict.outcome import Outcome
from harness.verdict.pack_verdict import Judgement

#: Builds the command that makes a cell's receipt anew.
CommandOf = Callable[[Cell], str]


@dataclass(frozen=True)
class Run:
    """One repetition of a cell: the ends of its lanes; None where a lane was not requested or had no reason to run.

    `about` names the defect checks that the verdict is about; empty: all of them.
    """

    pristine: LaneEnd | None
    patched: LaneEnd | None
    about: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[LaneEnd, ...]:
        """The lanes that ended."""
        return tuple(end for end in (self.pristine, self.patched) if end is not None)

    def of(self, lane: LaneName) -> LaneEnd | None:
        """Return the end of one lane."""
        return self.pristine if lane == LaneName.PRISTINE else self.patched

    @property
    def judgement(self) -> Judgement:
        """What the lanes say together."""
        patched = self.patched
        return pack_verdict.pair(
            self.pristine.record if self.pristine else None,
            patched.record if patched else None,
            patched.stale if patched else "",
            self.about,
        )


@dataclass(frozen=True)
class Judged:
    """A cell whose lanes ended: what came of it, and the runs that count.

    Attributes:
        outcome: what the runs say together.
        runs: the whole ones.
        receipt: where its receipt lies in the run folder; None where none was written.
        problem: why none was.

    """

    outcome: Outcome
    runs: tuple[Run, ...]
    receipt: Path | None = None
    problem: HarnessError | None = None

    def ends(self, lane: LaneName) -> list[LaneEnd]:
        """List the ends of one lane, in the order of the runs."""
        return [end for end in (run.of(lane) for run in self.runs) if end is not None]


@dataclass(frozen=True)
class CellJudge:
    """Judges cells by what the journal holds of their lanes.

    Attributes:
        cache: whose names stand in receipts.
        host: what it is.
        folder: of the run, with the logs and the receipts.
        journal: the ends.
        repeat: how often the lanes were requested.
        command: that makes a receipt anew.
        elsewhere: the hosts of lanes that ran on another, by the keys of their tasks.
        planned: the tasks of cells that are planned already, by the names of the cells.

    """

    cache: Cache
    host: Host
    folder: Path
    journal: Journal
    repeat: int
    command: CommandOf
    elsewhere: Mapping[str, Host] = field(default_factory=dict)
    planned: Mapping[str, list[Task]] = field(default_factory=dict)

    def judged(self, cell: Cell) -> Judged | None:
        """Judge a cell by its whole runs; None where there is not one."""
        runs = [run for run in (self._run(some) for some in self._repetitions(cell)) if run is not None]
        if not runs:
            return None
        judgement, agreeing = pack_verdict.repeated([run.judgement for run in runs])
        last, first = runs[-1], runs[0].ends[0]
        members = dependencies.chosen(
            self.cache, cell.pack.definition, cell.dependencies, cell.stated.dependencies, self.host.python_tag
        )
        outcome = Outcome(
            cell=cell,
            judgement=judgement,
            pristine=last.pristine.record if last.pristine else None,
            patched=last.patched.record if last.patched else None,
            dependency_set=members,
            version=last.ends[0].version,
            tree=last.ends[0].tree,
            patch=last.patched.patch if last.patched and last.patched.record else "",
            gpus=last.ends[-1].gpus,
            started=dt.datetime.fromisoformat(first.started),
            seconds=sum(end.seconds for run in runs for end in run.ends),
            agreeing=agreeing,
            repeats=len(runs),
        )
        return Judged(outcome, tuple(runs))

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

    def _run(self, repetition: list[Task]) -> Run | None:
        if self._missing(repetition):
            return None
        ends = {task.lane: self.journal.read(task.key) for task in repetition}
        pristine, patched = ends.get(LaneName.PRISTINE), ends.get(LaneName.PATCHED)
        reproduced = pristine is None or pristine.verdict == LaneVerdict.BUG_REPRODUCED
        return Run(pristine, patched if reproduced else None, repetition[0].cell.about)

    def receipt_path(self, cell: Cell) -> Path:
        """Return where the receipt of a cell lies in the run folder."""
        folder = self.folder / (cell.column or "receipts") / cell.pack.name
        return folder / f"{cell.target}.{cell.evidence}.json"

    def logs(self, judged: Judged) -> dict[LaneName, Path]:
        """Return the scrubbed logs of the last run's lanes."""
        last = judged.runs[-1]
        return {end.lane: self.folder / end.log.file for end in last.ends if end.log is not None}

    def recorded(self, judged: Judged) -> Judged:
        """Write the receipt of a cell into the run folder, unless it lies there already; say where, or why not."""
        if not judged.outcome.lanes:
            return judged
        path = self.receipt_path(judged.outcome.cell)
        try:
            lies_there = path.exists() and self._written(path, judged.outcome) is not None
            return replace(judged, receipt=path if lies_there else self.write(judged, path.parent))
        except HarnessError as error:
            return replace(judged, problem=error)

    def receipt(self, judged: Judged) -> Receipt:
        """Return the receipt of a cell, written unless it lies there already.

        Raises:
            HarnessError: something private would be written, or the disk does not take it.

        """
        if judged.receipt is not None:
            return receipt.load(judged.receipt)
        outcome = judged.outcome
        path = self.receipt_path(outcome.cell)
        written = self._written(path, outcome)
        return written if written is not None else receipt.load(self.write(judged, path.parent))

    def write(self, judged: Judged, folder: Path) -> Path:
        """Write the receipt of a cell into `folder` and return its path.

        Raises:
            HarnessError: something private would be written, or the disk does not take it.

        """
        outcome = judged.outcome
        try:
            texts = {name: path.read_text(encoding="utf-8") for name, path in self.logs(judged).items()}
            host = self.elsewhere.get(judged.runs[-1].ends[-1].key, self.host)
            return writer.write(outcome, MadeBy(self.cache, host, self.command(outcome.cell)), folder, texts)
        except (OSError, UnicodeDecodeError) as error:
            name = Path(error.filename).name if isinstance(error, OSError) and error.filename else ""
            why = (error.strerror or str(error)) if isinstance(error, OSError) else "a log is not UTF-8"
            raise HarnessError(f"no receipt written: {why}{f' ({name})' if name else ''}") from None

    def _written(self, path: Path, outcome: Outcome) -> Receipt | None:
        """Return the receipt that lies there; None where there is none, or one of other lanes (the probe changed)."""
        try:
            found = receipt.load(path) if path.exists() else None
        except HarnessError:
            return None
        started = outcome.started.isoformat(timespec="seconds") if outcome.started else ""
        wanted = (started, round(outcome.seconds, 3), outcome.repeats, judges.sha256(outcome.cell.pack))
        same = found and (found.started, found.seconds, found.repeats.of, found.probe.sha256) == wanted
        return found if same else None
