"""From the ends of a cell's lanes to its verdict and its receipt, by the rules of a single run."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from pathlib import Path

from harness import files, judge, receipt, recording
from harness.cache import Cache
from harness.errors import HarnessError
from harness.host import Host
from harness.judge import Judgement
from harness.lane import LaneResult
from harness.outcome import Outcome
from harness.receipt import Receipt
from harness.sweep import lane_end
from harness.sweep.cell import Cell, Release, Task, tasks
from harness.sweep.journal import Journal
from harness.sweep.lane_end import LaneEnd
from harness.words import LaneName, LaneVerdict


@dataclass(frozen=True)
class Judged:
    """A cell whose lanes ended.

    Attributes:
        outcome: as a single run gives it.
        ends: the ends of every run that counts, pristine and patched (None where it had no reason to run).
        gpu_host: the host as the last run saw it, for the receipt.

    """

    outcome: Outcome
    ends: tuple[tuple[LaneEnd, LaneEnd | None], ...]
    gpu_host: Host


@dataclass(frozen=True)
class Bench:
    """Judges cells.

    Attributes:
        cache: whose names stand in receipts.
        host: what it is.
        night: the folder with the journal and the logs.
        journal: the ends.
        repeat: how often both lanes were asked for.

    """

    cache: Cache
    host: Host
    night: Path
    journal: Journal
    repeat: int

    def judged(self, cell: Cell) -> Judged | None:
        """Judge a cell by its whole runs; None where there is not one."""
        ends = [pair for pair in (self._pair(*some) for some in self._runs(cell)) if pair is not None]
        if not ends:
            return None
        runs = [self._judge(pristine, patched) for pristine, patched in ends]
        judgement, agreeing = judge.repeated([run[0] for run in runs])
        _, pristine, patched = runs[-1]
        last = ends[-1]
        outcome = Outcome(
            pack=cell.pack,
            target=cell.target,
            evidence=cell.evidence,
            judgement=judgement,
            origin=cell.origin,
            companion_set=cell.companion_set(self.host),
            tree=replace(pristine.tree, version=last[0].version) if pristine else None,
            pristine=pristine,
            patched=patched,
            started=dt.datetime.fromisoformat(ends[0][0].started),
            seconds=sum(end.seconds for pair in ends for end in pair if end),
            agreeing=agreeing,
            repeats=len(runs),
        )
        return Judged(outcome, tuple(ends), replace(self.host, gpus=last[0].gpus))

    def missing(self, cell: Cell) -> list[Task]:
        """List the tasks whose end the verdict of every run would need and does not have."""
        return [task for pair in self._runs(cell) for task in self._missing(*pair)]

    def _runs(self, cell: Cell) -> list[tuple[Task, Task]]:
        every = tasks(cell, self.host, self.repeat)
        return list(zip(every[::2], every[1::2], strict=True))

    def _missing(self, pristine: Task, patched: Task) -> list[Task]:
        line = self.journal.line(pristine.key)
        if line is None:
            return [pristine]
        needed = line.verdict == LaneVerdict.BUG_REPRODUCED and patched.key not in self.journal
        return [patched] if needed else []

    def _pair(self, pristine: Task, patched: Task) -> tuple[LaneEnd, LaneEnd | None] | None:
        first = self.journal.read(pristine.key)
        if first is None or self._missing(pristine, patched):
            return None
        reproduced = first.record is not None and first.record.verdict == LaneVerdict.BUG_REPRODUCED
        return first, self.journal.read(patched.key) if reproduced else None

    def _judge(
        self, pristine: LaneEnd, patched: LaneEnd | None
    ) -> tuple[Judgement, LaneResult | None, LaneResult | None]:
        first = lane_end.result(pristine, self.cache, self.night)
        second = lane_end.result(patched, self.cache, self.night) if patched else None
        return judge.pair(first, second, patched.stale if patched else ""), first, second

    def receipt_path(self, cell: Cell) -> Path:
        """Return where the receipt of a cell lies: laid out as ``--receipts DIR`` lays them out."""
        folder = "receipts" if cell.release == Release.PINNED else str(cell.release)
        return self.night / folder / cell.pack.name / f"{cell.target}.{cell.evidence}.json"

    def receipt(self, cell: Cell, judged: Judged) -> Receipt:
        """Return the receipt of a cell, written unless it lies there already.

        Raises:
            HarnessError: something private would be written.

        """
        path = self.receipt_path(cell)
        written = self._written(path, judged)
        if written is not None:
            return written
        command = f"runner.py sweep --only {cell.pack.name}:{cell.target}"
        command += " --latest" if cell.release == Release.LATEST else ""
        command += f" --repeat {self.repeat}" if self.repeat > 1 else ""
        recording.write(judged.outcome, self.cache, judged.gpu_host, command, path.parent)
        return receipt.load(path)

    def _written(self, path: Path, judged: Judged) -> Receipt | None:
        """Return the receipt that lies there; None where there is none, or one of other lanes (the probe changed)."""
        try:
            found = receipt.load(path) if path.exists() else None
        except HarnessError:
            return None
        outcome = judged.outcome
        started = outcome.started.isoformat(timespec="seconds") if outcome.started else ""
        wanted = (started, round(outcome.seconds, 3), outcome.repeats, files.sha256_file(outcome.pack.probe))
        same = found and (found.started, found.seconds, found.repeats.of, found.probe.sha256) == wanted
        return found if same else None


def lane_ends(judged: Judged, name: LaneName) -> list[LaneEnd]:
    """List the ends of one lane, in the order of the runs."""
    picked = (pair[0] if name == LaneName.PRISTINE else pair[1] for pair in judged.ends)
    return [end for end in picked if end is not None]
