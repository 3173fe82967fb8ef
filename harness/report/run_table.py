"""The table at the end of a run, as text and as JSON."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from harness.core.terminal import render
from harness.core.words import NO_EXPECTATION, UNJUDGED, Kind, LaneName, Verdict
from harness.lane.results import FigureLine
from harness.receipt import figures
from harness.verdict.pack_verdict import Outcome

#: Of the JSON document.
SCHEMA = 1
#: Verdicts that are shown without a reason.
PLAIN = {Verdict.CONFIRMED, Verdict.REPRODUCED, Verdict.VALIDATED, Verdict.FIXED_UPSTREAM}
SENTENCES = {
    Verdict.CONFIRMED: "{tree} has {what} on {target}; with the patch it is right.",
    Verdict.REPRODUCED: "{tree} has {what} on {target}; no patch was judged.",
    Verdict.VALIDATED: "{tree} with the patch is right on {target}.",
    Verdict.FIXED_UPSTREAM: "{tree} does not have {what} on {target}.",
    Verdict.FIX_INEFFECTIVE: "{tree} has {what} on {target}, with the patch, too.",
    Verdict.FIX_INCOMPLETE: "{tree} on {target}: a fix is there, and checks of the contract are still wrong.",
    Verdict.PATCH_STALE: "{tree} has {what} on {target}; the patch does not apply to it.",
}


@dataclass(frozen=True)
class RunRow:
    """One pack on one target; `expectation` is empty unless pack.toml does not list the target."""

    pack: str
    kind: str
    target: str
    evidence: str
    pristine: str
    patched: str
    verdict: str
    figure: dict[LaneName, FigureLine]  # the leading figure of each lane that measured it
    deviation: str = ""
    reason: str = ""
    claims: tuple[str, ...] = ()
    receipt: str = ""
    logs: tuple[str, ...] = ()
    expectation: str = ""
    ranks: int = 1
    tree: str = ""


def row(outcome: Outcome, logs: tuple[Path, ...]) -> RunRow:
    """Build the row of one outcome."""
    cell = outcome.cell
    definition = cell.pack.definition
    measured = {name: lane.figure(definition.leading_figure) for name, lane in outcome.lanes.items()}
    return RunRow(
        pack=cell.pack.name,
        kind=definition.kind,
        target=cell.target,
        evidence=cell.evidence or "",
        pristine=outcome.pristine.verdict if outcome.pristine else "",
        patched=outcome.patched.verdict if outcome.patched else "",
        verdict=outcome.judgement.verdict,
        figure={name: line for name, line in measured.items() if line},
        deviation=outcome.deviation,
        reason=outcome.judgement.reason,
        claims=outcome.judgement.claims,
        receipt=str(outcome.receipt or ""),
        logs=tuple(str(log) for log in logs),
        expectation="" if cell.is_listed else NO_EXPECTATION,
        ranks=outcome.ranks,
        tree=f"{definition.upstream.package} {outcome.version}".strip(),
    )


def as_json(rows: list[RunRow]) -> str:
    """Write the rows as one JSON document."""
    return json.dumps({"schema": SCHEMA, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def as_text(rows: list[RunRow]) -> str:
    """Write the remarks on rows, with the logs of rows that deviate, then a sentence, then the table."""
    remarks = [f"{row.pack} {row.target}: {line}" for row in rows for line in _remarks(row)]
    table = Table("pack", "kind", "target", "evidence", "unpatched", "patched", "verdict", "figure", box=None)
    for row in rows:
        verdict = f"{row.verdict} ({row.expectation})" if row.expectation else row.verdict
        figure = figures.figure_text(row.figure.get(LaneName.PRISTINE), row.figure.get(LaneName.PATCHED))
        cells = (row.pack, row.kind, row.target, row.evidence, row.pristine, row.patched, verdict, figure)
        table.add_row(*(cell or "-" for cell in cells))
    return render([*remarks, _summary(rows), table])


def _summary(rows: list[RunRow]) -> str:
    """Sum up the table in a sentence: the meaning of a single row, or the counts of several."""
    if len(rows) > 1:
        unjudged = [row for row in rows if row.verdict in UNJUDGED and not row.deviation]
        judged = [row for row in rows if row not in unjudged]
        expected = sum(not row.deviation for row in judged)
        parts = [f"{expected} of {len(judged)} as expected: {_count_text(judged)}"] if judged else []
        parts += [f"{len(unjudged)} not judged: {_count_text(unjudged)}"] if unjudged else []
        return f"{'; '.join(parts)}."
    row = rows[0]
    sentence = SENTENCES.get(Verdict(row.verdict), "{verdict} on {target}.")
    return sentence.format(tree=row.tree or row.pack, target=row.target, verdict=row.verdict, what=Kind(row.kind).what)


def _count_text(rows: list[RunRow]) -> str:
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{number} {word}" for word, number in counts.items())


def _remarks(row: RunRow) -> list[str]:
    remarks = []
    if row.reason and row.verdict not in PLAIN:
        remarks.append(row.reason)
    if row.expectation:
        place = "; its receipt stays in the run folder" if row.receipt else ""
        remarks.append(f"{row.expectation}: pack.toml does not list this target{place}")
    if row.deviation and row.deviation != row.reason:
        remarks.append(f"deviates: {row.deviation}")
    return remarks + [f"log {log}" for log in row.logs if row.deviation]
