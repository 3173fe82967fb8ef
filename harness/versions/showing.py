"""What ``runner.py versions`` prints and keeps: the table, the line below it, and the same as JSON."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.table import Table

from harness import files, receipt
from harness.privacy import PrivateTextError, Scrubber
from harness.summary import WIDTH
from harness.versions.history import Row
from harness.versions.lanes import Judging

SCHEMA = 1


@dataclass(frozen=True)
class Shown:
    """The rows in order, what they are (release, commit, companion set), and the answer in one line."""

    what: str
    rows: list[Row]
    line: str


def scrubbed(row: Row, scrub: Scrubber) -> Row:
    """Return a row whose texts may be shown to anybody: a reason that still looks private is withheld."""
    try:
        return replace(row, reason=str(scrub.document(row.reason, "the reason")))
    except PrivateTextError as error:
        return replace(row, reason=f"withheld: {str(error).partition(' holds ')[2].partition('.')[0]}")


def as_text(shown: Shown) -> str:
    """Write the table and the line."""
    table = Table(shown.what, "date", "verdict", "figure", "reason", box=None)
    for row in shown.rows:
        table.add_row(row.label, row.date or "-", row.verdict, row.figure or "-", row.reason)
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, highlight=False, markup=False)
    console.print(table)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    return "\n".join([*lines, shown.line]) + "\n"


def document(shown: Shown, judging: Judging, command: str) -> dict[str, object]:
    """Return what was found as a JSON document, with what it was found by."""
    host = judging.runner.host
    return {
        "schema": SCHEMA,
        "pack": judging.pack.name,
        "target": judging.target,
        "evidence": judging.evidence,
        "over": shown.what,
        "line": shown.line,
        "probe": files.sha256_file(judging.pack.probe),
        "python": host.python,
        "torch": host.torch,
        "triton": host.triton,
        "command": command,
        "rows": [asdict(row) for row in shown.rows],
    }


def save(found: dict[str, object], judging: Judging, scrub: Scrubber) -> str:
    """Write the document into the pack's data/ and return its name; refuse where something private is in it."""
    name = f"history.{judging.target}.json"
    text = receipt.to_json(scrub.document(found, name))
    files.write_atomic(judging.pack.folder / "data" / name, text)
    return f"{judging.pack.name}/data/{name}"
