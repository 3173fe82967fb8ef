"""From the scheduler's account to the results of a sweep: a row for each cell, with its changes since the baseline."""

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from harness.core import HarnessError, LaneName, Verdict
from harness.host.host import place_name
from harness.lane import Cell, FigureLine, LaneEnd
from harness.receipt import figures, receipt
from harness.receipt.figures import number
from harness.receipt.receipt import Receipt
from harness.receipt.redaction import Scrubber
from harness.schedule.lanes import Account
from harness.schedule.selection import HEAD, LATEST
from harness.schedule.session import GpuFault, Session
from harness.sweep import run_folder
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
#: Good verdicts on a release that has the bug. After a release without it, they are no recovery.
HAVE_BUG = {Verdict.CONFIRMED, Verdict.REPRODUCED}
#: Units of memory, where more is worse, and of throughput, where less is worse.
MEMORY = frozenset({"bytes", "B", "KiB", "MiB", "GiB", "KB", "MB", "GB"})
RATES = frozenset({"GB/s", "TB/s", "GFLOP/s", "TFLOP/s", "tokens/s"})
#: Units of figures that another lane on the host would change. In units of time, too, more is worse.
DISTURBED = {"s", "ms", "us", "µs", "ns"} | MEMORY | RATES
#: A difference below this share of the value is no change: clocks and temperatures vary from run to run by more than
#: the spread inside a run.
FLOOR = 0.05


@dataclass(frozen=True)
class Baseline:
    """The receipts that a sweep is compared with: those of the packs, or those of earlier sweeps.

    A sweep may have judged some packs alone, so that each cell is compared with the newest sweep that judged it.
    """

    sweeps: tuple[Path, ...]  # the folders of earlier sweeps, the newest first; empty: the packs' own receipts
    text: str  # a name for people

    def receipt_of(self, cell: Cell) -> Receipt | None:
        """Return the receipt to compare a cell with; None if there is none that can be read.

        It has the same evidence. For a cell that this host cannot judge, it may have any.
        """
        folders = [sweep / (cell.column or "receipts") / cell.pack.name for sweep in self.sweeps]
        folders = folders or [cell.pack.receipts / cell.column]
        name = f"{cell.target}.{cell.evidence or '*'}.json"
        path = next((path for folder in folders for path in sorted(folder.glob(name))), None)
        try:
            return receipt.load(path) if path is not None else None
        except HarnessError:
            return None  # of an older schema, or damaged


def find_baseline(folder: Path | None) -> Baseline:
    """Find the baseline: a run folder, the finished runs in a folder that judged anything, or the committed receipts.

    HarnessError is raised if the folder is missing or its run judged nothing.
    """
    if folder is None:
        return Baseline((), "the committed receipts")
    if not folder.is_dir():
        raise HarnessError(f"--baseline {folder}: no such folder. Next: name a run folder, or the folder of them")
    is_run = (folder / run_folder.RECORD).exists()
    runs = [folder] if is_run else run_folder.finished(folder)
    sweeps = tuple(run for run in runs if any(run.glob("*/*/*.json")))  # a run that judged nothing has no receipt
    if sweeps:
        return Baseline(sweeps, f"the run {sweeps[0].name}{' and those before it' if sweeps[1:] else ''}")
    if is_run:
        problem = f"--baseline {folder}: that run judged nothing"
        raise HarnessError(f"{problem}. Next: name another, or the folder of them")
    return Baseline((), "the committed receipts: no earlier run judged anything")


def expected(cell: Cell, earlier: Receipt | None) -> str:
    """Return the verdict to compare with: the baseline's, else the one that pack.toml states or implies."""
    if earlier is not None:
        return earlier.verdict if earlier.repeats.agreeing == earlier.repeats.of else FLAKY
    fixed_in = cell.pack.definition.fixed_in
    if cell.column == LATEST and fixed_in and cell.version and Version(cell.version) >= Version(fixed_in):
        return Verdict.FIXED_UPSTREAM
    head = cell.pack.definition.head
    if cell.column == HEAD and head is not None:
        return head.verdict
    return cell.pack.definition.expected


def verdict_changes(verdict: str, before: str, release: str) -> list[ChangeRow]:
    """Compare verdicts. A change to CONFIRMED or REPRODUCED is good news, unless the release before was right."""
    if verdict == before:
        return []
    if verdict not in HAVE_BUG:
        kind = "newly unsupported" if verdict == Verdict.UNSUPPORTED else verdict.lower().replace("_", " ")
        return [ChangeRow(kind, worse=True, text=f"{release}: was {before}")]
    is_back = before == Verdict.FIXED_UPSTREAM
    kind = "has the bug" if is_back else "recovered"
    return [ChangeRow(kind, worse=is_back, text=f"{release}: {verdict}, was {before}")]


def claim_changes(outcome: Outcome, earlier: Receipt) -> list[ChangeRow]:
    """List the claims that the baseline supported and this sweep does not."""
    lost = sorted(set(earlier.claims) - set(outcome.judgement.claims))
    is_same = earlier.verdict == outcome.judgement.verdict
    return [ChangeRow("claims lost", worse=True, text=", ".join(lost))] if lost and is_same else []


def figure_changes(outcome: Outcome, earlier: Receipt) -> list[ChangeRow]:
    """List the figures that differ by more than their noise on the same GPU.

    Times, rates and memory are compared only if no other lane ran beside this one.
    """
    if [gpu.name for gpu in outcome.gpus] != [gpu.name for gpu in earlier.host.gpus]:
        return []
    changes = []
    for name, lane in outcome.lanes.items():
        for figure in lane.figures:
            before = earlier.figure(figure.name, name)
            if before is not None and (outcome.cell.measures or figure.unit not in DISTURBED):
                changes += _figure(name.label, figure, before)
    return changes


def _figure(lane: str, figure: FigureLine, earlier: FigureLine) -> list[ChangeRow]:
    after, before, *spreads = map(_measured, (figure.value, earlier.value, figure.spread, earlier.spread))
    is_unknown = figure.unit not in MEMORY and None in spreads  # the noise
    if after is None or before is None or is_unknown or figure.unit != earlier.unit:
        return []
    floor = FLOOR * abs(before) if figure.unit in DISTURBED else 0.0
    noise = max(sum(spread or 0.0 for spread in spreads), floor)
    loss = before - after if figure.unit in RATES else after - before
    if abs(loss) <= noise:
        return []
    better, worse = ("less memory", "more memory") if figure.unit in MEMORY else ("faster", "slower")
    if figure.unit not in DISTURBED:
        better = worse = "figure changed"  # more of it may be better or worse
    is_worse = loss > 0 and figure.unit in DISTURBED
    text = f"{lane} {figure.name}: {number(after)} {figure.unit}, was {number(before)} (noise {number(noise)})"
    return [ChangeRow(worse if loss > 0 else better, worse=is_worse, text=text)]


def _measured(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


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
        before = expected(cell, earlier)
        changes = verdict_changes(verdict, before, f"{cell.pack.definition.upstream.package} {cell.version}")
        if earlier is not None:
            changes += claim_changes(outcome, earlier) + figure_changes(outcome, earlier)
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
