"""index.html: a sweep as one file that needs no network and no script."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import jinja2

from harness.core import markdown
from harness.core.words import Verdict
from harness.receipt.figures import number
from harness.sweep import text_outputs
from harness.sweep.results import NOT_HERE, NOT_RUN, CellRow, LaneRow, Results

HERE = Path(__file__).parent
#: Of the log of a cell that needs attention, its last bytes go into the page; every whole one lies beside it.
LOG_BYTES = 8 * 1024
CALM = {Verdict.CONFIRMED, Verdict.FIXED_UPSTREAM, Verdict.REPRODUCED, Verdict.VALIDATED}


def pieces(results: Results, folder: Path) -> Iterator[str]:
    """Yield the page piece by piece: a sweep of many packs need not fit into memory. Its logs lie in `folder`."""
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
        "id": _anchor,
        "mood": _mood,
        "log": functools.partial(_log, folder),
    }
    rows = _shown(results)
    names = {name for row in rows for name in (row.pack, row.target)}
    yield from environment.get_template("index.html.j2").generate(
        results=results,
        headline=text_outputs.headline(results),
        changes=text_outputs.change_lines(results) or [text_outputs.calm(results)],
        rows=rows,
        targets=sorted({row.target for row in rows}, key=lambda name: (name != "cpu", len(name), name)),
        absent=sorted({name for row in results.cells for name in (row.pack, row.target) if name not in names}),
    )


def _shown(results: Results) -> list[CellRow]:
    """List the cells of a page: without targets of which this host can judge nothing, which lost nothing either."""
    here = {row.target for row in results.cells if row.verdict != NOT_HERE or row.needs_attention}
    return [row for row in results.cells if row.target in here]


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


def _anchor(name: str) -> str:
    """Return the id of a cell's element: no name in an address needs escapes."""
    return name.replace("/", ".").replace("@", ".")
