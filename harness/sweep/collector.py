"""From the scheduler's account to results.json: a row for each cell, with its changes since the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from harness.core.words import LaneName, Verdict
from harness.lane.cell import Cell
from harness.lane.record import LaneEnd
from harness.receipt import figures
from harness.receipt.redaction import Scrubber
from harness.schedule.account import Account
from harness.schedule.session import Session
from harness.sweep import baseline as comparison
from harness.sweep.baseline import Baseline
from harness.sweep.results import FLAKY, NOT_HERE, NOT_RUN, CellRow, ChangeRow, FigureRow, LaneRow
from harness.verdict.outcome import Outcome, outcome_of_error

#: Verdicts that are never a known deviation: no thread of upstream's explains them.
NEVER_KNOWN = {Verdict.ERROR, FLAKY, NOT_RUN, NOT_HERE}


@dataclass(frozen=True)
class Collector:
    """Turns the outcomes of cells into rows."""

    session: Session
    account: Account
    baseline: Baseline
    scrubber: Scrubber  # of the folders that an error may name

    def rows(self, cells: list[Cell]) -> Iterator[CellRow]:
        """Yield the rows of a whole sweep."""
        threads = {cell.pack.name: cell.pack.definition.known for cell in cells if cell.pack.definition.known}
        yield from _with_threads([self._row_or_error(cell) for cell in cells], threads)

    def _row_or_error(self, cell: Cell) -> CellRow:
        """Build the row of a cell. An exception makes the row an error."""
        try:
            return self._row(cell, self.account.results.get(cell.name))
        except Exception as error:  # noqa: BLE001 - the other rows are written
            return self._unjudged(outcome_of_error(error, cell))

    def _row(self, cell: Cell, outcome: Outcome | None) -> CellRow:
        if outcome is None:
            reason = self._clean(self.account.reason_not_run(cell))
            is_intended = "budget" in reason or self.account.interrupted
            changes = () if is_intended else (ChangeRow("not run", worse=True, text=reason),)
            return _blank(cell, NOT_RUN, reason, *changes)
        if outcome.runs and not outcome.problem:
            return self._judged(outcome)
        return self._unjudged(outcome)

    def _unjudged(self, outcome: Outcome) -> CellRow:
        """Build the row of a cell without a verdict of its lanes; only the terminal shows the reason with its paths.

        A cell that this host cannot judge is a change if an earlier run judged it.
        """
        cell, verdict = outcome.cell, outcome.judgement.verdict
        reason = self._clean(outcome.problem or outcome.judgement.reason)
        if verdict == Verdict.UNAVAILABLE:
            return _blank(cell, verdict, reason)
        if verdict == Verdict.UNSUPPORTED and not outcome.problem:
            was_judged = self.baseline.sweeps and self.baseline.has_receipt_of(cell)
            lost = ChangeRow("newly unsupported", worse=True, text=reason)
            return _blank(cell, NOT_HERE, reason, *((lost,) if was_judged else ()))
        return _blank(cell, Verdict.ERROR, reason, ChangeRow("error", worse=True, text=reason))

    def _clean(self, reason: str) -> str:
        """Replace private parts of a text, or the whole text if it still looks private."""
        text = self.scrubber.scrub(reason)
        return "[left out: it names something private]" if any(self.scrubber.findings(text)) else text

    def _judged(self, outcome: Outcome) -> CellRow:
        cell, runs, repeat = outcome.cell, len(outcome.runs), self.session.repeat
        verdict = str(outcome.judgement.verdict) if outcome.agreeing == runs else FLAKY
        earlier = self.baseline.receipt_of(cell)
        before = comparison.expected(cell, earlier)
        changes = comparison.verdict_changes(verdict, before, f"{cell.pack.definition.upstream.package} {cell.version}")
        changes += comparison.claim_changes(outcome, earlier) + comparison.figure_changes(outcome, earlier)
        short = f"{runs} of {repeat} runs: {self._clean(self.account.reason_not_run(cell))}" if runs < repeat else ""
        return replace(
            _blank(cell, verdict, "; ".join(text for text in (outcome.judgement.reason, short) if text)),
            deviation=outcome.deviation,
            claims=outcome.judgement.claims,
            agreeing=outcome.agreeing,
            runs=runs,
            seconds=round(outcome.seconds, 3),
            figure=figures.leading(cell.pack.definition.leading_figure, outcome.pristine, outcome.patched),
            baseline=earlier.verdict if earlier else "",
            changes=tuple(sorted(changes, key=lambda change: not change.worse)),
            lanes=tuple(_lane(lane, ends) for lane in LaneName if (ends := outcome.ends(lane))),
            figures=tuple(_figures(outcome)),
            receipt=str(outcome.receipt.relative_to(self.session.folder)) if outcome.receipt else "",
        )


def _blank(cell: Cell, verdict: str, reason: str, *changes: ChangeRow) -> CellRow:
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
        changes=changes,
    )


def _lane(name: LaneName, ends: list[LaneEnd]) -> LaneRow:
    verdicts = tuple(str(end.record.verdict) if end.record else "PATCH_STALE" for end in ends)
    return LaneRow(name, verdicts, ends[-1].seconds, ends[-1].place, ends[-1].log.file if ends[-1].log else "")


def _figures(outcome: Outcome) -> Iterator[FigureRow]:
    names = dict.fromkeys(line.name for lane in outcome.lanes.values() for line in lane.figures)
    for name in names:
        lines = [lane and lane.figure(name) for lane in (outcome.pristine, outcome.patched)]
        unit = next((line.unit for line in lines if line), "")
        yield FigureRow(name, unit, *(line and line.value for line in lines), *(line and line.spread for line in lines))


def _with_threads(rows: list[CellRow], threads: Mapping[str, str]) -> Iterator[CellRow]:
    """Yield the rows of a sweep. A row that deviates gets the pack's thread from `threads`.

    If no row of a pack with a thread deviates, its first judged row says that `known` can be removed.
    """
    judged = [row for row in rows if row.lanes]
    deviating = {row.pack for row in rows if row.deviates}
    obsolete = {row.pack: row.name for row in reversed(judged) if row.pack in threads and row.pack not in deviating}
    for row in rows:
        thread = threads.get(row.pack, "")
        if row.deviates and row.verdict not in NEVER_KNOWN:
            yield replace(row, known=thread)
        elif obsolete.get(row.pack) == row.name:
            text = f"{thread}: no deviation was seen; `known` in pack.toml can go"
            yield replace(row, changes=(*row.changes, ChangeRow("known", worse=False, text=text)))
        else:
            yield row
