"""Judging packs on targets: CPU lanes beside each other, and alone whatever uses a GPU or measures time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness import durations, host, lane, origin, plan, recording, summary
from harness.errors import HarnessError
from harness.execute import Runner
from harness.judge import Judgement
from harness.outcome import Outcome, Request, deviation
from harness.pack import Pack
from harness.plan import Planned
from harness.privacy import PrivateTextError
from harness.words import Evidence, LaneName, Verdict

#: More lanes at once gain little, and each may take a gigabyte or two.
MOST_JOBS = 4


def default_jobs() -> int:
    """Return how many CPU lanes run at once where nobody says it: one a core, and no more than four."""
    return min(len(host.cores()), MOST_JOBS)


@dataclass(frozen=True)
class Cell:
    """A pack on one of its targets, and its place among the rows."""

    place: int
    pack: Pack
    planned: Planned

    @property
    def alone(self) -> bool:
        """Whether nothing may run beside it."""
        if self.planned.evidence == Evidence.EXECUTED:
            return True
        target = self.pack.definition.targets.get(self.planned.target)
        return self.planned.target == "cpu" and target is not None and target.exclusive  # compiling measures nothing

    def seconds(self, took: Mapping[tuple[str, str], float]) -> float:
        """Return how long both lanes took before, from `took`, the durations of its pack; 0 where nobody knows."""
        name = f"{self.planned.target}.{self.planned.evidence}"
        return sum(took.get((name, lane_name), 0.0) for lane_name in LaneName)


@dataclass
class Batch:
    """One call of ``run``: collects a row for each pack and target, and writes each receipt at once.

    Attributes:
        runner: runs the lanes.
        request: what was asked of each.
        receipts: where receipts go; None: where they belong.
        command_line: stands in the receipts.
        jobs: how many CPU lanes run at once.
        errors: what went wrong beside a verdict.

    """

    runner: Runner
    request: Request
    receipts: Path | None
    command_line: str
    jobs: int
    errors: list[HarnessError] = field(default_factory=list)
    _rows: dict[int, summary.Row] = field(default_factory=dict)

    @property
    def rows(self) -> list[summary.Row]:
        """The rows so far, in the order of packs and targets."""
        return [row for _, row in sorted(self._rows.items())]

    def every(self, packs: list[Pack], target: str) -> bool:
        """Judge all packs; return whether the user interrupted it."""
        pairs = [(one, planned) for one in packs for planned in plan.plan(one, target, self.runner.host)]
        cells = [Cell(place, one, planned) for place, (one, planned) in enumerate(pairs)]
        try:
            self._together([cell for cell in cells if not cell.alone])
            for cell in (cell for cell in cells if cell.alone):
                self._judge(cell, self.runner)
        except KeyboardInterrupt:
            return True
        return False

    def _together(self, cells: list[Cell]) -> None:
        if self.jobs == 1 or len(cells) == 1:
            for cell in cells:
                self._judge(cell, self.runner)
            return
        with self._crew() as (pool, runner):
            took = {cell.pack.name: durations.of_pack(cell.pack) for cell in cells}
            longest_first = sorted(cells, key=lambda cell: cell.seconds(took[cell.pack.name]), reverse=True)
            futures: list[Future[None]] = []
            for cell in longest_first:  # laid out in this thread, which can be interrupted; the last would end alone
                with contextlib.suppress(HarnessError):  # `_judge` meets and reports it
                    self._lay_out(cell)
                futures.append(pool.submit(self._judge, cell, runner))
            for future in futures:
                future.result()

    @contextlib.contextmanager
    def _crew(self) -> Iterator[tuple[ThreadPoolExecutor, Runner]]:
        """Yield threads, and a runner whose lanes are abandoned as soon as this block is left."""
        cancel, keep = os.pipe()
        pool = ThreadPoolExecutor(self.jobs)
        try:
            yield pool, replace(self.runner, cancel=cancel)
        finally:
            os.close(keep)  # now `cancel` can be read: it is at its end
            pool.shutdown(cancel_futures=True)
            os.close(cancel)

    def _lay_out(self, cell: Cell) -> None:
        if cell.planned.evidence is not None:
            source = origin.parse(self.request.upstream, cell.pack.definition)
            self.runner.prepare(cell.pack, cell.planned.target, cell.planned.evidence, source, self.request)

    def _judge(self, cell: Cell, runner: Runner) -> None:
        pack, planned = cell.pack, cell.planned
        if planned.evidence is None:
            unsupported = Outcome(pack, planned.target, None, Judgement(Verdict.UNSUPPORTED, planned.reason))
            self._rows[cell.place] = summary.row(unsupported, "", None)
            return
        try:
            outcome = runner.outcome(pack, planned.target, planned.evidence, self.request)
        except HarnessError as error:
            self.errors.append(HarnessError(f"{pack.name} {planned.target}: {error}"))
            return
        if all(one.reason != lane.ABANDONED for one in outcome.lanes):
            self._rows[cell.place] = summary.row(outcome, deviation(outcome, self.request), self._record(outcome))

    def _record(self, outcome: Outcome) -> Path | None:
        if not outcome.lanes:
            return None
        folder = recording.folder_for(outcome, self.request, self.receipts, self.runner.logs)
        try:
            return recording.write(outcome, self.runner.cache, self.runner.host, self.command_line, folder)
        except PrivateTextError as error:
            self.errors.append(HarnessError(f"{outcome.pack.name} {outcome.target}: {error}"))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            self.errors.append(HarnessError(f"{outcome.pack.name} {outcome.target}: no receipt written: {reason}"))
        return None
