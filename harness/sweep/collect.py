"""From what the engine left to results.json: a row for each cell, and what needs a person."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.errors import HarnessError
from harness.outcome import Request, deviation
from harness.receipt import Receipt
from harness.summary import figure_text
from harness.sweep import changes
from harness.sweep.account import Account
from harness.sweep.cell import Cell, Task
from harness.sweep.changes import Baseline
from harness.sweep.results import FLAKY, NOT_HERE, NOT_RUN, CellRow, ChangeRow, FigureRow, LaneRow
from harness.sweep.verdicts import Bench, Judged, lane_ends
from harness.words import LaneName, Verdict

#: How a reason begins that is the user's own choice.
BUDGET = "budget"


@dataclass(frozen=True)
class Collector:
    """Turns cells into rows.

    Attributes:
        bench: judges them.
        account: what was not run, and why.
        baseline: what they are compared with.

    """

    bench: Bench
    account: Account
    baseline: Baseline

    def rows(self, cells: list[Cell]) -> Iterator[CellRow]:
        """Yield the row of each cell."""
        for cell in cells:
            yield self._row(cell)

    def _row(self, cell: Cell) -> CellRow:
        if cell.evidence is None:
            return self._not_here(cell)
        judged = self.bench.judged(cell)
        if judged is None:
            return self._not_run(cell)
        try:
            now = self.bench.receipt(cell, judged)
        except HarnessError as error:
            return _broken(cell, str(error))
        return self._judged(cell, judged, now)

    def _not_here(self, cell: Cell) -> CellRow:
        """Build the row of a cell that this host cannot judge; it is a change where an earlier night here could."""
        if cell.broken:
            return _broken(cell, cell.reason)
        could = self.baseline.folder is not None and self.baseline.any_of(cell)
        lost = ChangeRow("newly unsupported", worse=True, text=cell.reason)
        return _blank(cell, NOT_HERE, cell.reason, *((lost,) if could else ()))

    def _not_run(self, cell: Cell) -> CellRow:
        if cell.name in self.account.failed:
            return _broken(cell, self.account.failed[cell.name])
        reason = self._why_not(self.bench.missing(cell))
        chosen = BUDGET in reason or self.account.interrupted
        found = () if chosen else (ChangeRow("not run", worse=True, text=reason),)
        return _blank(cell, NOT_RUN, reason, *found)

    def _why_not(self, missing: list[Task]) -> str:
        known = (self.account.not_run[task.key] for task in missing if task.key in self.account.not_run)
        return next(known, "interrupted" if self.account.interrupted else "a lane before it did not end")

    def _judged(self, cell: Cell, judged: Judged, now: Receipt) -> CellRow:
        outcome = judged.outcome
        verdict = str(outcome.judgement.verdict) if outcome.agreeing == outcome.repeats else FLAKY
        then = self.baseline.of(cell)
        before = changes.expected(cell, then)
        found = changes.of_verdict(verdict, before, f"{cell.pack.definition.upstream.package} {cell.version}")
        found += changes.of_claims(now, then) + changes.of_figures(cell, now, then)
        missing = self.bench.missing(cell)
        short = f"{outcome.repeats} of {self.bench.repeat} runs: {self._why_not(missing)}" if missing else ""
        name = cell.pack.definition.leading_figure
        return replace(
            _blank(cell, verdict, "; ".join(text for text in (outcome.judgement.reason, short) if text)),
            deviation=deviation(outcome, Request()),
            claims=outcome.judgement.claims,
            agreeing=outcome.agreeing,
            runs=outcome.repeats,
            seconds=round(outcome.seconds, 3),
            figure=figure_text(now.figure(name, LaneName.PRISTINE), now.figure(name, LaneName.PATCHED)),
            baseline=then.verdict if then else "",
            changes=tuple(sorted(found, key=lambda change: not change.worse)),
            lanes=tuple(_lane(judged, lane) for lane in LaneName if lane_ends(judged, lane)),
            figures=tuple(_figures(now)),
            receipt=str(self.bench.receipt_path(cell).relative_to(self.bench.night)),
        )


def _blank(cell: Cell, verdict: str, reason: str, *found: ChangeRow) -> CellRow:
    """Build the row of a cell without a verdict of its lanes."""
    definition = cell.pack.definition
    return CellRow(
        name=cell.name,
        pack=cell.pack.name,
        title=definition.title,
        kind=definition.kind,
        upstream=definition.upstream.package,
        release=cell.release,
        version=cell.version,
        target=cell.target,
        evidence=cell.evidence or "",
        verdict=verdict,
        reason=reason,
        changes=found,
    )


def _broken(cell: Cell, reason: str) -> CellRow:
    return _blank(cell, Verdict.ERROR, reason, ChangeRow("error", worse=True, text=reason))


def _lane(judged: Judged, name: LaneName) -> LaneRow:
    ends = lane_ends(judged, name)
    said = tuple(str(end.record.verdict) if end.record else "PATCH_STALE" for end in ends)
    return LaneRow(name, said, ends[-1].seconds, ends[-1].place, ends[-1].log.file if ends[-1].log else "")


def _figures(now: Receipt) -> Iterator[FigureRow]:
    names = dict.fromkeys(line.name for lane in now.lanes.values() for line in lane.figures)
    for name in names:
        pristine, patched = (now.figure(name, lane) for lane in LaneName)
        line = pristine or patched
        yield FigureRow(
            name=name,
            unit=line.unit if line else "",
            pristine=pristine.value if pristine else None,
            patched=patched.value if patched else None,
            spread_pristine=pristine.spread if pristine else None,
            spread_patched=patched.spread if patched else None,
        )
