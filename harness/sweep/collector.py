"""From what the scheduler left to results.json: a row for each cell, and what needs attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from harness.core.words import LaneName, Verdict
from harness.lane.record import LaneEnd
from harness.receipt.figures import figure_text
from harness.receipt.receipt import Receipt
from harness.receipt.redaction import Scrubber
from harness.schedule.scheduler import Account
from harness.schedule.session import CellJudge
from harness.schedule.task import Task
from harness.schedule.workers import failure_of
from harness.sweep import baseline as comparison
from harness.sweep.baseline import Baseline
from harness.sweep.results import FLAKY, NOT_HERE, NOT_RUN, CellRow, ChangeRow, FigureRow, LaneRow
from harness.verdict.cell import Cell
from harness.verdict.outcome import Outcome, deviation

#: Verdicts that no thread of upstream's explains: an exception is never a deviation that is known.
NEVER_KNOWN = {Verdict.ERROR, FLAKY, NOT_RUN, NOT_HERE}


@dataclass(frozen=True)
class Collector:
    """Turns cells into rows."""

    judge: CellJudge  # judges them
    account: Account  # what was not run, and why
    baseline: Baseline  # what they are compared with
    scrubber: Scrubber  # knows the places that an error may name

    def row(self, cell: Cell) -> CellRow:
        """Build the row of a cell; what goes wrong with one never takes the others' rows along."""
        try:
            return self._row_of(cell)
        except Exception as error:  # noqa: BLE001 - the other rows are written
            return self._broken(cell, failure_of(error, cell).reason)

    def _row_of(self, cell: Cell) -> CellRow:
        if cell.evidence is None and cell.verdict == Verdict.ERROR:
            return self._broken(cell, cell.reason)
        if cell.evidence is None:
            return self._not_here(cell)
        judged = self.account.results.get(cell.name) or self.judge.judged(cell)
        if judged is None:
            return self._not_run(cell)
        return self._judged(judged, self.judge.receipt(judged))

    def _not_here(self, cell: Cell) -> CellRow:
        """Build the row of a cell that this host cannot judge; it is a change where an earlier run here could."""
        if cell.verdict == Verdict.UNAVAILABLE:
            return _blank(cell, Verdict.UNAVAILABLE, self.clean(cell.reason))
        could = self.baseline.folder is not None and self.baseline.any_of(cell)
        lost = ChangeRow("newly unsupported", worse=True, text=cell.reason)
        return _blank(cell, NOT_HERE, cell.reason, *((lost,) if could else ()))

    def _not_run(self, cell: Cell) -> CellRow:
        failure = self.account.failed.get(cell.name)
        if failure is not None and failure.verdict == Verdict.UNAVAILABLE:
            return _blank(cell, Verdict.UNAVAILABLE, self.clean(failure.reason))
        if failure is not None:
            return self._broken(cell, failure.reason)
        reason = self.clean(self._why_not(self.judge.missing(cell)))
        chosen = "budget" in reason or self.account.interrupted  # by the user
        found = () if chosen else (ChangeRow("not run", worse=True, text=reason),)
        return _blank(cell, NOT_RUN, reason, *found)

    def _broken(self, cell: Cell, reason: str) -> CellRow:
        """Build the row of a cell that could not be laid out; the terminal has the reason with its paths."""
        clean = self.clean(reason)
        return _blank(cell, Verdict.ERROR, clean, ChangeRow("error", worse=True, text=clean))

    def clean(self, reason: str) -> str:
        """Take what is private out of a text, or leave it out."""
        text = self.scrubber.scrub(reason)
        return "[left out: it names something private]" if any(self.scrubber.findings(text)) else text

    def _why_not(self, missing: list[Task]) -> str:
        known = (self.account.not_run[task.key] for task in missing if task.key in self.account.not_run)
        return next(known, "interrupted" if self.account.interrupted else "a lane before it did not end")

    def _judged(self, outcome: Outcome, now: Receipt) -> CellRow:
        cell, runs = outcome.cell, len(outcome.runs)
        verdict = str(outcome.judgement.verdict) if outcome.agreeing == runs else FLAKY
        then = self.baseline.of(cell)
        before = comparison.expected(cell, then)
        found = comparison.of_verdict(verdict, before, f"{cell.pack.definition.upstream.package} {cell.version}")
        found += comparison.of_claims(now, then) + comparison.of_figures(cell, now, then)
        missing = self.judge.missing(cell)
        short = f"{runs} of {self.judge.session.repeat} runs: {self._why_not(missing)}" if missing else ""
        name = cell.pack.definition.leading_figure
        return replace(
            _blank(cell, verdict, "; ".join(text for text in (outcome.judgement.reason, short) if text)),
            deviation=deviation(outcome),
            claims=outcome.judgement.claims,
            agreeing=outcome.agreeing,
            runs=runs,
            seconds=round(outcome.seconds, 3),
            figure=figure_text(now.figure(name, LaneName.PRISTINE), now.figure(name, LaneName.PATCHED)),
            baseline=then.verdict if then else "",
            changes=tuple(sorted(found, key=lambda change: not change.worse)),
            lanes=tuple(_lane(lane, ends) for lane in LaneName if (ends := outcome.ends(lane))),
            figures=tuple(_figures(now)),
            receipt=str(self.judge.receipt_path(cell).relative_to(self.judge.session.folder)),
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
        release=cell.column or "pinned",
        version=cell.version,
        as_of=cell.seen,
        target=cell.target,
        evidence=cell.evidence or "",
        verdict=verdict,
        reason=reason,
        changes=found,
    )


def _lane(name: LaneName, ends: list[LaneEnd]) -> LaneRow:
    said = tuple(str(end.record.verdict) if end.record else "PATCH_STALE" for end in ends)
    return LaneRow(name, said, ends[-1].seconds, ends[-1].place, ends[-1].log.file if ends[-1].log else "")


def _figures(now: Receipt) -> Iterator[FigureRow]:
    names = dict.fromkeys(line.name for lane in now.lanes.values() for line in lane.figures)
    for name in names:
        lines = [now.figure(name, lane) for lane in LaneName]
        unit = next((line.unit for line in lines if line), "")
        yield FigureRow(name, unit, *(line and line.value for line in lines), *(line and line.spread for line in lines))


def marked(rows: list[CellRow], threads: Mapping[str, str]) -> Iterator[CellRow]:
    """Yield the rows; those that deviate name the thread, and where none of a pack does, its first one says so.

    `rows` are those of a whole sweep, `threads` the `known` of the packs that have it, by pack.
    """
    judged = [row for row in rows if row.lanes]
    deviating = {row.pack for row in rows if row.deviates}
    gone = {row.pack: row.name for row in reversed(judged) if row.pack in threads and row.pack not in deviating}
    for row in rows:
        thread = threads.get(row.pack, "")
        if row.deviates and row.verdict not in NEVER_KNOWN:
            yield replace(row, known=thread)
        elif gone.get(row.pack) == row.name:
            text = f"{thread}: no deviation was seen; `known` in pack.toml can go"
            yield replace(row, changes=(*row.changes, ChangeRow("known", worse=False, text=text)))
        else:
            yield row
