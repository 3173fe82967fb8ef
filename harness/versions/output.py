"""The output of ``runner.py versions``: a table and a line, or JSON, and the document in the pack's data/."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from harness.core import files
from harness.core.terminal import render
from harness.pack import judges
from harness.pack.model import Pack
from harness.receipt import receipt
from harness.receipt.redaction import Scrubber
from harness.versions.judging import Judging
from harness.versions.timeline import Entry, History

SCHEMA = 1


def as_text(rows: list[Entry], line: str) -> str:
    """Write the table and the line."""
    table = Table("release", "date", "verdict", "figure", "reason", box=None)
    for row in rows:
        table.add_row(row.label, row.date or "-", row.verdict, row.figure or "-", row.reason)
    return render([table, line])


def history(judging: Judging, rows: list[Entry], line: str, command: str) -> History:
    """Return the rows and the line, with what they were judged by."""
    host, pack = judging.session.host, judging.pack
    return History(
        schema=SCHEMA,
        pack=pack.name,
        target=judging.target,
        evidence=judging.evidence,
        over="release",
        line=line,
        probe=judges.sha256(pack),
        python=host.python,
        torch=host.torch or "",
        triton=host.triton or "",
        command=command,
        rows=tuple(rows),
        checks=pack.definition.versions.checks,
        meaning=judges.meaning_of(pack),
    )


def save(document: History, pack: Pack, scrub: Scrubber) -> str:
    """Write the document into the pack's data/ and return its name; PrivateTextError: a field looks private."""
    name = f"history.{document.target}.json"
    text = receipt.to_json(scrub.document(asdict(document), name))
    files.write_atomic(pack.folder / "data" / name, text)
    return f"{pack.name}/data/{name}"
