"""Deviations that are known: pack.toml names the thread, a sweep names the deviation and does not fail for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from harness.core.words import Verdict
from harness.sweep.results import FLAKY, NOT_HERE, NOT_RUN, CellRow, ChangeRow

#: Verdicts that no thread of upstream's explains: an exception is never a deviation that is known.
NEVER_KNOWN = {Verdict.ERROR, FLAKY, NOT_RUN, NOT_HERE}


def marked(rows: list[CellRow], threads: Mapping[str, str]) -> Iterator[CellRow]:
    """Yield the rows; those that deviate name the thread, and where none of a pack does, its first one says so.

    Args:
        rows: of a whole sweep.
        threads: the `known` of the packs that have it, by pack.

    """
    judged = [row for row in rows if row.lanes]
    deviating = {row.pack for row in rows if row.deviates}
    gone = {row.pack: row.name for row in reversed(judged) if row.pack in threads and row.pack not in deviating}
    for row in rows:
        thread = threads.get(row.pack, "")
        if row.deviates and row.verdict not in NEVER_KNOWN:
            yield replace(row, known=thread)
        elif gone.get(row.pack) == row.name:
            text = f"{thread}: no deviation was seen; `known` in pack.toml can go"
            yield replace(row, changes=(*row.changes, ChangeRow("known", worse=False, text=text)))
        else:
            yield row
