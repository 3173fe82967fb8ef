"""What changed since the baseline, the worst first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from harness.core.errors import HarnessError
from harness.core.words import Verdict
from harness.lane.cell import Cell
from harness.lane.record import FigureLine
from harness.receipt import receipt
from harness.receipt.figures import number
from harness.receipt.receipt import Receipt
from harness.sweep import run_folder
from harness.sweep.columns import HEAD, LATEST
from harness.sweep.results import FLAKY, ChangeRow
from harness.verdict.outcome import Outcome

#: What a verdict that was not there before is called; whatever is not listed is good news.
WORSE = {
    Verdict.ERROR: "error",
    FLAKY: "flaky",
    Verdict.CONTROL_FAILED: "control failed",
    Verdict.PATCH_BREAKS: "patch breaks",
    Verdict.PATCH_STALE: "patch stale",
    Verdict.FIX_INEFFECTIVE: "fix ineffective",
    Verdict.FIXED_UPSTREAM: "fixed upstream",
    Verdict.UNSUPPORTED: "newly unsupported",
}
RECOVERED, BUG_AGAIN = "recovered", "has the bug"
#: Verdicts on a release that has the bug; where the release before it was right, that is no recovery.
HAVE_BUG = {Verdict.CONFIRMED, Verdict.REPRODUCED}
#: Units of memory, in which more is worse, and of throughput, in which less is.
MEMORY = frozenset({"bytes", "B", "KiB", "MiB", "GiB", "KB", "MB", "GB"})
RATES = frozenset({"GB/s", "TB/s", "GFLOP/s", "TFLOP/s", "tokens/s"})
#: Units of figures that another lane beside it would change: these and those of time, in which more is worse.
DISTURBED = {"s", "ms", "us", "µs", "ns"} | MEMORY | RATES
#: Below this share of its value a difference is no change: clocks and temperatures differ from run to run by more
#: than the spread inside one run tells.
FLOOR = 0.05


@dataclass(frozen=True)
class Baseline:
    """What a sweep is compared with: the packs' committed receipts, or an earlier sweep's."""

    folder: Path | None  # the earlier sweep's folder; None: the packs' own receipts
    text: str  # what it is, for people

    def of(self, cell: Cell) -> Receipt | None:
        """Return the receipt to compare a cell with; None where there is none of the same evidence."""
        path = self._place(cell) / f"{cell.target}.{cell.evidence}.json"
        try:
            return receipt.load(path) if path.exists() else None
        except HarnessError:
            return None  # of an older schema, or damaged: nothing to compare with

    def any_of(self, cell: Cell) -> bool:
        """Whether there is a receipt of the cell, of whatever evidence."""
        return any(self._place(cell).glob(f"{cell.target}.*.json"))

    def _place(self, cell: Cell) -> Path:
        if self.folder is None:
            return cell.pack.receipts / cell.column
        return self.folder / (cell.column or "receipts") / cell.pack.name


def find(wanted: Path | None, runs: Path, today: str) -> Baseline:
    """Find the baseline: the committed receipts, a run folder, or the newest before `today` that judged anything.

    HarnessError is raised where there is no such folder, or the run that it is judged nothing.
    """
    if wanted is None:
        return Baseline(None, "the committed receipts")
    if not wanted.is_dir() and wanted.absolute() != runs.absolute():
        raise HarnessError(f"--baseline {wanted}: no such folder. Next: name a run folder, or the folder of them")
    if run_folder.is_run(wanted):
        if not any(wanted.glob("*/*/*.json")):
            said = f"--baseline {wanted}: that run judged nothing"
            raise HarnessError(f"{said}. Next: name another, or the folder of them")
        return Baseline(wanted, wanted.name)
    newest = next((folder for folder, results in run_folder.finished(wanted, today) if results.has_judged), None)
    if newest is None:
        return Baseline(None, "the committed receipts: no earlier run judged anything")
    return Baseline(newest, f"the run {newest.name}")


def expected(cell: Cell, then: Receipt | None) -> str:
    """Return the verdict to compare with: the baseline's, else what pack.toml leads to expect."""
    if then is not None:
        return then.verdict if then.repeats.agreeing == then.repeats.of else FLAKY
    fixed_in = cell.pack.definition.fixed_in
    if cell.column == LATEST and fixed_in and cell.version and Version(cell.version) >= Version(fixed_in):
        return Verdict.FIXED_UPSTREAM
    head = cell.pack.definition.head
    if cell.column == HEAD and head is not None:
        return head.verdict
    return cell.pack.definition.targets[cell.target].verdict


def of_verdict(verdict: str, before: str, release: str) -> list[ChangeRow]:
    """Compare verdicts."""
    if verdict == before:
        return []
    if before == Verdict.FIXED_UPSTREAM and verdict in HAVE_BUG:
        return [ChangeRow(BUG_AGAIN, worse=True, text=f"{release}: {verdict}, was {before}")]
    if verdict in WORSE:
        return [ChangeRow(WORSE[verdict], worse=True, text=f"{release}: was {before}")]
    return [ChangeRow(RECOVERED, worse=False, text=f"{release}: {verdict}, was {before}")]


def of_claims(outcome: Outcome, then: Receipt | None) -> list[ChangeRow]:
    """Name the claims that the baseline supported and this sweep does not."""
    now = outcome.judgement
    lost = sorted(set(then.claims) - set(now.claims)) if then and then.verdict == now.verdict else []
    return [ChangeRow("claims lost", worse=True, text=", ".join(lost))] if lost else []


def of_figures(now: Outcome, then: Receipt | None) -> list[ChangeRow]:
    """Name the figures that differ by more than their noise on the same GPU.

    Times, rates and memory are compared only where nothing else ran beside the lane.
    """
    if then is None or [gpu.name for gpu in now.gpus] != [gpu.name for gpu in then.host.gpus]:
        return []
    found = []
    for name, lane in now.lanes.items():
        for figure in lane.figures:
            before = then.figure(figure.name, name)
            if before is not None and (now.cell.measures or figure.unit not in DISTURBED):
                found += _figure(name, figure, before)
    return found


def _figure(lane: str, now: FigureLine, then: FigureLine) -> list[ChangeRow]:
    after, before, *spreads = map(_measured, (now.value, then.value, now.spread, then.spread))
    is_unknown = now.unit not in MEMORY and None in spreads  # what it may differ by without meaning anything
    if after is None or before is None or is_unknown or now.unit != then.unit:
        return []
    floor = FLOOR * abs(before) if now.unit in DISTURBED else 0.0
    noise = max(sum(spread or 0.0 for spread in spreads), floor)
    loss = before - after if now.unit in RATES else after - before
    if abs(loss) <= noise:
        return []
    better, worse = ("less memory", "more memory") if now.unit in MEMORY else ("faster", "slower")
    if now.unit not in DISTURBED:
        better = worse = "figure changed"  # whether more of it is worse is not known
    is_worse = loss > 0 and now.unit in DISTURBED
    text = f"{lane} {now.name}: {number(after)} {now.unit}, was {number(before)} (noise {number(noise)})"
    return [ChangeRow(worse if loss > 0 else better, worse=is_worse, text=text)]


def _measured(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
