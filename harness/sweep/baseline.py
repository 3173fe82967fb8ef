"""The baseline of a sweep, and what changed since."""

from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from harness.core.errors import HarnessError
from harness.core.words import Verdict
from harness.lane.cell import Cell
from harness.lane.results import FigureLine
from harness.receipt import receipt
from harness.receipt.figures import number
from harness.receipt.receipt import Receipt
from harness.schedule.selection import HEAD, LATEST
from harness.sweep import run_folder
from harness.sweep.run_folder import FLAKY, ChangeRow
from harness.verdict.pack_verdict import Outcome

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


def find(folder: Path | None) -> Baseline:
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
                changes += _figure(name, figure, before)
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
