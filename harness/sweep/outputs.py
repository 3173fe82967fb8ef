"""The outputs of a sweep: results.json, summary.md for a pull request's page, index.html, and lines for a terminal."""

import functools
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import jinja2

from harness.core import Verdict, files, markdown
from harness.receipt import receipt
from harness.receipt.figures import number
from harness.sweep import run_folder
from harness.sweep.run_folder import NOT_HERE, NOT_RUN, CellRow, LaneRow, Results

FOLDER = Path(__file__).parent
#: How many of the last bytes of a log go into the page, if the cell needs attention.
LOG_BYTES = 8 * 1024
#: Characters of a reason in the lines for a terminal: one contract can have dozens of wrong checks.
REASON_WIDTH = 200
GOOD = {Verdict.CONFIRMED, Verdict.FIXED_UPSTREAM, Verdict.REPRODUCED, Verdict.VALIDATED}


def write(results: Results, folder: Path) -> None:
    """Write every output of a sweep, each whole or not at all."""
    files.write_atomic(folder / run_folder.RESULTS, receipt.to_json(asdict(results)))
    files.write_atomic(folder / "summary.md", summary(results))
    files.write_atomic(folder / "index.html", page(results, folder))


def headline(results: Results) -> str:
    """Summarize the sweep in one line."""
    rows = results.cells
    counts = Counter(row.verdict for row in rows)
    worse, known = results.attention, sum(bool(row.known) for row in rows)
    state = f"{worse} need{'s' * (worse == 1)} attention" if worse else "nothing needs attention"
    state += f", {known} known" if known else ""
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return f"{state}; {len(rows)} cells: {verdicts}" + ("" if results.finished else "; INTERRUPTED")


def change_lines(results: Results) -> list[str]:
    """List what changed or needs attention, the worst first; or say that nothing did."""
    faults = [
        f"{gpu.place} ({gpu.name}) left the pool after {gpu.task}: {gpu.reason}" for gpu in results.gpus if gpu.reason
    ]
    known: list[str] = []
    worse: list[str] = []
    good: list[str] = []
    for row in results.cells:
        problems = [f"{change.kind.upper()}: {change.text}" for change in row.changes if change.worse]
        if row.deviation and not problems:
            problems = [f"STILL {row.says}: {row.deviation}"]
        reason = textwrap.shorten(row.reason, REASON_WIDTH, placeholder=" ...")
        reason = "" if any(row.reason in text for text in problems) else f" ({reason})"
        if row.known:
            known.append(f"{row.name}: KNOWN {row.known}: {'; '.join(problems)}")
        else:
            worse += [f"{row.name}: {text}{reason}" for text in problems]
        good += [f"{row.name}: {change.kind.upper()}: {change.text}" for change in row.changes if not change.worse]
    lines = [*results.notes, *faults, *worse, *known, *good]
    return lines or ["Nothing changed." if results.has_judged else "Nothing was judged."]


def summary(results: Results) -> str:
    """Return summary.md: first what changed, then every cell."""
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
        f"Compared with {results.baseline}.\n\n## Changed\n\n{changed}\n\n## Cells\n\n"
        f"{markdown.table(header, rows, markdown.inert_cell)}"
    )


def _release(row: CellRow) -> str:
    moving = "" if row.release == "pinned" else f" ({row.release}{f', as of {row.as_of}' if row.as_of else ''})"
    return f"{row.upstream} {row.version}{moving}"


def page(results: Results, folder: Path) -> str:
    """Return index.html, which needs no network and no script; `folder` has the logs."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "plain": markdown.plain,
        "number": number,
        "id": lambda name: name.replace("/", ".").replace("@", "."),  # so that an address needs no escapes
        "mood": _mood,
        "log": functools.partial(_log, folder),
    }
    # A target has no column if this host judges none of its cells, and none needs attention.
    targets = {row.target for row in results.cells if row.verdict != NOT_HERE or row.needs_attention}
    rows = [row for row in results.cells if row.target in targets]
    names = {name for row in rows for name in (row.pack, row.target)}
    return environment.get_template("index.html.j2").render(
        results=results,
        headline=headline(results),
        changes=change_lines(results),
        rows=rows,
        targets=sorted(targets, key=lambda name: (name != "cpu", len(name), name)),
        absent=sorted({name for row in results.cells for name in (row.pack, row.target) if name not in names}),
    )


def _mood(row: CellRow) -> str:
    """Return the CSS class of a cell, which sets its colour."""
    if row.needs_attention:
        return "bad"
    if row.verdict in (NOT_HERE, NOT_RUN, Verdict.UNAVAILABLE):
        return "none"
    return "good" if row.verdict in GOOD else "warn"


def _log(folder: Path, lane: LaneRow) -> str:
    """Return the end of a lane's log; empty if the log is gone."""
    path = folder / lane.log
    if not path.is_file():
        return ""
    return markdown.tail(markdown.plain(path.read_text(encoding="utf-8", errors="replace")), LOG_BYTES)
