"""From the scheduler's account to the results of a sweep: a row for each cell, with its changes."""

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.core.words import LaneName, Verdict
from harness.host.host import place_name
from harness.lane.cell import Cell
from harness.lane.results import LaneEnd
from harness.receipt import figures
from harness.receipt.redaction import Scrubber
from harness.schedule.account import Account
from harness.schedule.session import GpuFault, Session
from harness.sweep import baseline as comparison
from harness.sweep.baseline import Baseline
from harness.sweep.run_folder import (
    FLAKY,
    NOT_HERE,
    NOT_RUN,
    SCHEMA,
    CellRow,
    ChangeRow,
    FigureRow,
    HostRow,
    LaneRow,
    Results,
    RunFolder,
)
from harness.verdict.pack_verdict import Outcome, outcome_of_error

#: Verdicts that are never a known deviation: no thread of upstream's explains them.
NEVER_KNOWN = {Verdict.ERROR, FLAKY, NOT_RUN, NOT_HERE}


@dataclass(frozen=True)
class Collector:
    """Turns the outcomes of cells into results."""

    session: Session
    account: Account
    baseline: Baseline
    scrubber: Scrubber  # of the folders that an error may name

    def results(self, folder: RunFolder, cells: list[Cell], notes: tuple[str, ...]) -> Results:
        session, account, host = self.session, self.account, self.session.host
        nodes = {end.host for outcome in account.results.values() for end in outcome.last} - {host}  # of a cluster
        drivers = sorted({node.driver for node in nodes if node.driver})
        faults = {fault.place: fault for fault in folder.record.faults}
        gpus = [GpuFault(place_name(device), device.gpu.name, "", "") for device in session.devices]
        gpus += [GpuFault("a node", name, "", "") for name in sorted({gpu.name for node in nodes for gpu in node.gpus})]
        gpus = [*(gpu for gpu in gpus if gpu.place not in faults), *faults.values()]
        results = Results(
            schema=SCHEMA,
            run=folder.path.name,
            started=folder.started.isoformat(timespec="seconds"),
            seconds=round((dt.datetime.now(dt.UTC) - folder.started).total_seconds(), 1),
            finished=not account.interrupted,
            status=0,
            baseline=self.baseline.text,
            lanes_run=account.ran,
            lanes_resumed=account.resumed,
            host=HostRow(
                python=host.python,
                torch=host.torch,
                triton=host.triton,
                cuda=host.cuda,
                driver=", ".join(drivers) or host.driver,
                jobs=session.most_jobs,
            ),
            gpus=tuple(gpus),
            notes=notes,
            cells=tuple(self._rows(cells)),
        )
        return replace(results, status=int(results.exit_status))

    def _rows(self, cells: list[Cell]) -> Iterator[CellRow]:
        """Yield the row of each cell. A row that deviates names the thread that pack.toml knows for it.

        If no row of a pack with such a thread deviates, its first judged row says that `known` can be removed.
        """
        rows = [self._row_or_error(cell) for cell in cells]
        settled = {row.pack for row in rows if row.deviates}
        for cell, row in zip(cells, rows, strict=True):
            thread = cell.pack.definition.known
            if row.deviates and row.verdict not in NEVER_KNOWN:
                yield replace(row, known=thread)
            elif thread and row.lanes and row.pack not in settled:
                settled.add(row.pack)
                text = f"{thread}: no deviation was seen; `known` in pack.toml can go"
                yield replace(row, changes=(*row.changes, ChangeRow("known", worse=False, text=text)))
            else:
                yield row

    def _row_or_error(self, cell: Cell) -> CellRow:
        """Build the row of a cell. An exception makes the row an error."""
        try:
            return self._row(cell, self.account.results.get(cell.name))
        except Exception as error:  # noqa: BLE001 - the other rows are written
            return self._unjudged(outcome_of_error(error, cell))

    def _row(self, cell: Cell, outcome: Outcome | None) -> CellRow:
        if outcome is None:
            reason = self.scrubber.shown(self.account.reason_not_run(cell))
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
        reason = self.scrubber.shown(outcome.problem or outcome.judgement.reason)
        if verdict == Verdict.UNAVAILABLE:
            return _blank(cell, verdict, reason)
        if verdict == Verdict.UNSUPPORTED and not outcome.problem:
            was_judged = self.baseline.sweeps and self.baseline.receipt_of(cell)
            lost = ChangeRow("newly unsupported", worse=True, text=reason)
            return _blank(cell, NOT_HERE, reason, *((lost,) if was_judged else ()))
        return _blank(cell, Verdict.ERROR, reason, ChangeRow("error", worse=True, text=reason))

    def _judged(self, outcome: Outcome) -> CellRow:
        cell, runs, repeat = outcome.cell, len(outcome.runs), self.session.repeat
        verdict = str(outcome.judgement.verdict) if outcome.agreeing == runs else FLAKY
        earlier = self.baseline.receipt_of(cell)
        before = comparison.expected(cell, earlier)
        changes = comparison.verdict_changes(verdict, before, f"{cell.pack.definition.upstream.package} {cell.version}")
        if earlier is not None:
            changes += comparison.claim_changes(outcome, earlier) + comparison.figure_changes(outcome, earlier)
        reasons = [outcome.judgement.reason]
        if runs < repeat:
            reasons.append(f"{runs} of {repeat} runs: {self.scrubber.shown(self.account.reason_not_run(cell))}")
        return replace(
            _blank(cell, verdict, "; ".join(filter(None, reasons))),
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
