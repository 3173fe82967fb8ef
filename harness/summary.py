"""The table that ends a run, and the same as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.lane import LaneResult
from harness.outcome import Outcome
from harness.transcript import FigureLine
from harness.words import Verdict

WIDTH = 160


@dataclass(frozen=True)
class Row:
    """One pack on one target."""

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


def number(value: object) -> str:
    """Write a measured value shortly: four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def figure_text(pristine: FigureLine | None, patched: FigureLine | None) -> str:
    """Write the leading figure of both lanes, such as ``max_error 0.25 -> 0.0031``."""
    values = [number(line.value) for line in (pristine, patched) if line]
    line = pristine or patched
    if line is None:
        return ""
    unit = f" {line.unit}" if line.unit not in ("", "1") else ""
    return f"{line.name} {' -> '.join(values)}{unit}"


def _figure_line(result: LaneResult | None, name: str) -> FigureLine | None:
    figures = result.transcript.figures if result else ()
    return next((line for line in figures if line.name == name), None)


def row(outcome: Outcome, deviation: str, receipt: Path | None) -> Row:
    """Build the row of one outcome."""
    name = outcome.pack.definition.leading_figure
    return Row(
        pack=outcome.pack.name,
        kind=outcome.pack.definition.kind,
        target=outcome.target,
        evidence=outcome.evidence or "",
        pristine=outcome.pristine.verdict if outcome.pristine else "",
        patched=outcome.patched.verdict if outcome.patched else "",
        verdict=outcome.judgement.verdict,
        figure=figure_text(_figure_line(outcome.pristine, name), _figure_line(outcome.patched, name)),
        deviation=deviation,
        reason=outcome.judgement.reason,
        claims=outcome.judgement.claims,
        receipt=str(receipt or ""),
        logs=tuple(str(lane.log) for lane in outcome.lanes),
    )


def as_json(rows: list[Row]) -> str:
    """Write the rows as one JSON document."""
    return json.dumps([asdict(one) for one in rows], indent=1) + "\n"


def as_text(rows: list[Row]) -> str:
    """Write the rows as a table, with the reasons, receipts and logs below it."""
    table = Table("pack", "kind", "target", "evidence", "pristine", "patched", "verdict", "figure", box=None)
    for one in rows:
        cells = (one.pack, one.kind, one.target, one.evidence, one.pristine, one.patched, one.verdict, one.figure)
        table.add_row(*(cell or "-" for cell in cells))
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, highlight=False, markup=False)
    console.print(table, soft_wrap=False)
    for one in rows:
        for line in _remarks(one):
            console.print(f"{one.pack} {one.target}: {line}", soft_wrap=True)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _remarks(one: Row) -> list[str]:
    remarks = []
    if one.reason and one.verdict not in (Verdict.CONFIRMED, Verdict.REPRODUCED, Verdict.FIXED_UPSTREAM):
        remarks.append(one.reason)
    if one.deviation and one.deviation != one.reason:
        remarks.append(f"deviates: {one.deviation}")
    if one.claims:
        remarks.append(f"claims {', '.join(one.claims)}")
    return [*remarks, *(f"log {log}" for log in one.logs), *([f"receipt {one.receipt}"] if one.receipt else [])]
