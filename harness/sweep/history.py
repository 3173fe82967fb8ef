"""What the finished sweeps of a folder said."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.core import strict_json, structure
from harness.schedule.task import Estimates
from harness.sweep import run_folder
from harness.sweep.results import NOT_RUN, SCHEMA, Results

#: How many runs tell how long a lane takes.
LOOKED_AT = 10


def read(folder: Path) -> Results:
    """Read the results of one finished run.

    Raises:
        OSError: there are no results, or they cannot be read.
        ValueError: they are damaged, of another schema, or those of a run that did not end.

    """
    document = strict_json.loads((folder / run_folder.RESULTS).read_bytes())
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"no results of schema {SCHEMA}")
    found = structure.structure(document, Results)
    if not found.finished:
        raise ValueError("the sweep was interrupted")
    return found


def finished(
    runs: Path, before: str | None = None, pass_over: Callable[[Path, Exception], None] | None = None
) -> Iterator[tuple[Path, Results]]:
    """Yield the finished runs before the one named `before`, the newest first; `pass_over` hears of unreadable ones."""
    for folder in run_folder.earlier(runs, before):
        try:
            yield folder, read(folder)
        except (OSError, ValueError) as error:
            if pass_over is not None:
                pass_over(folder, error)


def estimates(runs: Path, before: str) -> Estimates:
    """Return how long each lane took in the newest run that ran it, and which cells the newest run left out."""
    newest = [results for _, results in itertools.islice(finished(runs, before), LOOKED_AT)]
    seconds: dict[tuple[str, str, str], float] = {}
    for cell in (cell for results in newest for cell in results.cells):
        for lane in cell.lanes:
            seconds.setdefault((cell.name, cell.evidence, lane.lane), lane.seconds)
    left_out = [cell.name for results in newest[:1] for cell in results.cells if cell.verdict == NOT_RUN]
    return Estimates(seconds, left_out)
