"""The table that ends a run, and the same as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.core.words import NO_EXPECTATION, Verdict
from harness.receipt import figures
from harness.receipt.figures import WIDTH
from harness.verdict.outcome import Outcome, deviation

#: Verdicts that need no reason beside them.
PLAIN = {Verdict.CONFIRMED, Verdict.REPRODUCED, Verdict.VALIDATED, Verdict.FIXED_UPSTREAM}


@dataclass(frozen=True)
class RunRow:
    """One pack on one target; `expectation` says so where pack.toml expects nothing of it; `ranks` are a receipt's."""

    pack: str
    kind: str
    target: str
    evidence: str
    pristine: str
    patched: str
    verdict: str
    figure: str
    deviation: str
    reason: str
    claims: tuple[str, ...]
    receipt: str
    logs: tuple[str, ...]
    expectation: str = ""
    ranks: int = 1


def row(outcome: Outcome, receipt: Path | None, logs: tuple[Path, ...] = ()) -> RunRow:
    """Build the row of one outcome."""
    cell = outcome.cell
    definition = cell.pack.definition
    return RunRow(
        pack=cell.pack.name,
        kind=definition.kind,
        target=cell.target,
        evidence=cell.evidence or "",
        pristine=outcome.pristine.verdict if outcome.pristine else "",
        patched=outcome.patched.verdict if outcome.patched else "",
        verdict=outcome.judgement.verdict,
        figure=figures.leading(definition.leading_figure, outcome.pristine, outcome.patched),
        deviation=deviation(outcome),
        reason=outcome.judgement.reason,
        claims=outcome.judgement.claims,
        receipt=str(receipt or ""),
        logs=tuple(str(log) for log in logs),
        expectation="" if cell.is_listed else NO_EXPECTATION,
        ranks=cell.stated.ranks,
    )


def as_json(rows: list[RunRow]) -> str:
    """Write the rows as one JSON document."""
    return json.dumps([asdict(one) for one in rows], indent=1) + "\n"


def as_text(rows: list[RunRow], *, verbose: bool = False) -> str:
    """Write the rows: first what has to be said of some of them, with their logs, then the table.

    Logs and receipts of what is as expected are named only where `verbose`.
    """
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, highlight=False, markup=False)
    for one in rows:
        for line in _remarks(one, verbose=verbose):
            console.print(f"{one.pack} {one.target}: {line}", soft_wrap=True)
    table = Table("pack", "kind", "target", "evidence", "pristine", "patched", "verdict", "figure", box=None)
    for one in rows:
        verdict = f"{one.verdict} ({one.expectation})" if one.expectation else one.verdict
        cells = (one.pack, one.kind, one.target, one.evidence, one.pristine, one.patched, verdict, one.figure)
        table.add_row(*(cell or "-" for cell in cells))
    console.print(table, soft_wrap=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _remarks(one: RunRow, *, verbose: bool) -> list[str]:
    remarks = []
    if one.reason and one.verdict not in PLAIN:
        remarks.append(one.reason)
    if one.expectation:
        remarks.append(f"{one.expectation}: pack.toml does not list this target; its receipt stays in the run folder")
    if one.deviation and one.deviation != one.reason:
        remarks.append(f"deviates: {one.deviation}")
    if verbose and one.claims:
        remarks.append(f"claims {', '.join(one.claims)}")
    if one.deviation or verbose:
        remarks += [f"log {log}" for log in one.logs]
    if one.receipt and verbose:
        remarks.append(f"receipt {one.receipt}")
    return remarks
