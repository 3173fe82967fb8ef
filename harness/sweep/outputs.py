"""A sweep for people: one line, what changed, summary.md for a pull request's page, and index.html."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jinja2

from harness.core import markdown
from harness.core.words import Verdict
from harness.receipt.figures import number
from harness.sweep.results import NOT_HERE, NOT_RUN, CellRow, LaneRow, Results

HERE = Path(__file__).parent
#: Of the log of a cell that needs attention, its last bytes go into the page; every whole one lies beside it.
LOG_BYTES = 8 * 1024
CALM = {Verdict.CONFIRMED, Verdict.FIXED_UPSTREAM, Verdict.REPRODUCED, Verdict.VALIDATED}


def headline(results: Results) -> str:
    """Say the sweep in one line."""
    rows = results.cells
    counts = Counter(row.verdict for row in rows)
    worse = sum(row.needs_attention for row in rows) + sum(bool(gpu.reason) for gpu in results.gpus)
    worse += len(results.notes)
    known = sum(bool(row.known) for row in rows)
    state = f"{worse} need{'s' * (worse == 1)} attention" if worse else "nothing needs attention"
    state += f", {known} known" if known else ""
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return f"{state}; {len(rows)} cells: {said}" + ("" if results.finished else "; INTERRUPTED")


def change_lines(results: Results) -> list[str]:
    """List what changed or needs attention, the worst first, a line each."""
    faults = [
        f"{gpu.place} ({gpu.name}) left the pool after {gpu.task}: {gpu.reason}" for gpu in results.gpus if gpu.reason
    ]
    known: list[str] = []
    worse: list[str] = []
    good: list[str] = []
    for row in results.cells:
        if row.known:
            known.append(f"{row.name}: KNOWN {row.known}: {_deviates(row)}")
            continue
        for change in row.changes:
            lines = worse if change.worse else good
            lines.append(f"{row.name}: {change.kind.upper()}: {change.text}" + (_because(row) if change.worse else ""))
        if row.deviation and not any(change.worse for change in row.changes):
            worse.append(f"{row.name}: STILL {row.says}: {row.deviation}")
    return [*results.notes, *faults, *worse, *known, *good]


def calm(results: Results) -> str:
    """Say what stands where no change is listed."""
    return "Nothing changed." if results.has_judged else "Nothing was judged."


def _deviates(row: CellRow) -> str:
    worse = [f"{change.kind.upper()}: {change.text}" for change in row.changes if change.worse]
    return "; ".join(worse) or f"{row.says}: {row.deviation}"


def _because(row: CellRow) -> str:
    return f" ({row.reason})" if row.reason and all(row.reason not in change.text for change in row.changes) else ""


def summary(results: Results) -> str:
    """Write summary.md: first what changed, then every cell."""
    host = results.host
    changed = "\n".join(f"- {markdown.inert(line)}" for line in change_lines(results))
    header = ["pack", "target", "release", "evidence", "verdict", "figure", "seconds", "remark"]
    rows = []
    for row in results.cells:
        seconds = f"{row.seconds:.1f}" if row.runs else ""
        rows.append([row.pack, row.target, _release(row), row.evidence, row.says, row.figure, seconds, row.reason])
    gpus = ", ".join(markdown.inert(gpu.name) for gpu in results.gpus) or "no GPU"
    return (
        f"# Sweep {results.run}: {headline(results)}\n\n"
        f"{results.lanes_run} lanes in {results.seconds:.0f} s on {gpus}; "
        f"Python {host.python}, torch {host.torch}, triton {host.triton}. "
        f"Compared with {results.baseline}.\n\n## Changed\n\n{changed or calm(results)}\n\n## Cells\n\n"
        f"{markdown.table(header, rows, markdown.inert_cell)}"
    )


def _release(row: CellRow) -> str:
    moving = "" if row.release == "pinned" else f" ({row.release}{f', as of {row.as_of}' if row.as_of else ''})"
    return f"{row.upstream} {row.version}{moving}"


def page(results: Results, folder: Path) -> Iterator[str]:
    """Yield index.html, one file without network or script, in pieces: not all need fit into memory.

    Its logs lie in `folder`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "plain": markdown.plain,
        "number": number,
        "id": lambda name: name.replace("/", ".").replace("@", "."),  # no name in an address needs escapes
        "mood": _mood,
        "log": functools.partial(_log, folder),
    }
    # Targets of which this host can judge nothing, and which lost nothing either, have no column.
    here = {row.target for row in results.cells if row.verdict != NOT_HERE or row.needs_attention}
    rows = [row for row in results.cells if row.target in here]
    names = {name for row in rows for name in (row.pack, row.target)}
    yield from environment.get_template("index.html.j2").generate(
        results=results,
        headline=headline(results),
        changes=change_lines(results) or [calm(results)],
        rows=rows,
        targets=sorted({row.target for row in rows}, key=lambda name: (name != "cpu", len(name), name)),
        absent=sorted({name for row in results.cells for name in (row.pack, row.target) if name not in names}),
    )


def _mood(row: CellRow) -> str:
    """Return the class of a cell, which gives it its colour."""
    if row.needs_attention:
        return "bad"
    if row.verdict in (NOT_HERE, NOT_RUN, Verdict.UNAVAILABLE):
        return "none"
    return "good" if row.verdict in CALM else "warn"


def _log(folder: Path, lane: LaneRow) -> str:
    """Return the end of a lane's log; empty where it is gone."""
    path = folder / lane.log
    if not path.is_file():
        return ""
    return markdown.tail(markdown.plain(path.read_text(encoding="utf-8", errors="replace")), LOG_BYTES)
