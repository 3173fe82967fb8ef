"""The table that ends a run, and the same as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from harness.core.terminal import rendered
from harness.core.words import NO_EXPECTATION, Kind, Verdict
from harness.receipt import figures
from harness.verdict.outcome import Outcome

#: Verdicts that need no reason beside them.
PLAIN = {Verdict.CONFIRMED, Verdict.REPRODUCED, Verdict.VALIDATED, Verdict.FIXED_UPSTREAM}
#: Verdicts of what was not judged, unless pack.toml expects another one.
UNJUDGED = {Verdict.UNSUPPORTED, Verdict.UNAVAILABLE}
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
    """One pack on one target; `expectation` says so where pack.toml expects nothing of it; `ranks` are a receipt's."""

    pack: str
    kind: str
    target: str
    evidence: str
    pristine: str
    patched: str
    verdict: str
    figure: str
    deviation: str = ""
    reason: str = ""
    claims: tuple[str, ...] = ()
    receipt: str = ""
    logs: tuple[str, ...] = ()
    expectation: str = ""
    ranks: int = 1
    tree: str = ""


def row(outcome: Outcome, written: Path | None, logs: tuple[Path, ...] = ()) -> RunRow:
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
        deviation=outcome.deviation,
        reason=outcome.judgement.reason,
        claims=outcome.judgement.claims,
        receipt=str(written or ""),
        logs=tuple(str(log) for log in logs),
        expectation="" if cell.is_listed else NO_EXPECTATION,
        ranks=cell.stated.ranks,
        tree=f"{definition.upstream.package} {outcome.version}".strip(),
    )


def as_json(rows: list[RunRow]) -> str:
    """Write the rows as one JSON document."""
    return json.dumps([asdict(one) for one in rows], indent=1) + "\n"


def as_text(rows: list[RunRow]) -> str:
    """Write the rows: first what has to be said of some of them, with the logs of what deviates, then the table."""
    remarks = [f"{one.pack} {one.target}: {line}" for one in rows for line in _remarks(one)]
    table = Table("pack", "kind", "target", "evidence", "unpatched", "patched", "verdict", "figure", box=None)
    for one in rows:
        verdict = f"{one.verdict} ({one.expectation})" if one.expectation else one.verdict
        cells = (one.pack, one.kind, one.target, one.evidence, one.pristine, one.patched, verdict, one.figure)
        table.add_row(*(cell or "-" for cell in cells))
    return rendered([*remarks, _sentence(rows), table])


def _sentence(rows: list[RunRow]) -> str:
    """Say in words what the table says: of one row what it means, of several how many gave which verdict."""
    if len(rows) > 1:
        left = [one for one in rows if one.verdict in UNJUDGED and not one.deviation]
        judged = [one for one in rows if one not in left]
        expected = sum(not one.deviation for one in judged)
        parts = [f"{expected} of {len(judged)} as expected: {_counted(judged)}"] if judged else []
        parts += [f"{len(left)} not judged: {_counted(left)}"] if left else []
        return f"{'; '.join(parts)}."
    one = rows[0]
    said = SENTENCES.get(Verdict(one.verdict), "{verdict} on {target}.")
    return said.format(tree=one.tree or one.pack, target=one.target, verdict=one.verdict, what=Kind(one.kind).what)


def _counted(rows: list[RunRow]) -> str:
    counts = Counter(one.verdict for one in rows)
    return ", ".join(f"{number} {word}" for word, number in counts.items())


def _remarks(one: RunRow) -> list[str]:
    remarks = []
    if one.reason and one.verdict not in PLAIN:
        remarks.append(one.reason)
    if one.expectation:
        remarks.append(f"{one.expectation}: pack.toml does not list this target; its receipt stays in the run folder")
    if one.deviation and one.deviation != one.reason:
        remarks.append(f"deviates: {one.deviation}")
    return remarks + [f"log {log}" for log in one.logs if one.deviation]
