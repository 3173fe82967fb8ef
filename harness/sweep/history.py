"""What the finished sweeps of a folder said, also as older runners wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from harness.core import strict_json, structure
from harness.schedule.estimates import Estimates
from harness.sweep import run_folder
from harness.sweep.results import NOT_RUN, SCHEMA, Results

#: How many runs tell how long a lane takes.
LOOKED_AT = 10


def read(folder: Path) -> Results:
    """Read the results of one finished run, of this schema or an older one.

    Schema 1 called the run a night; what a schema did not know stays empty.

    Raises:
        OSError: there are no results, or they cannot be read.
        ValueError: they are damaged, of a newer schema, or those of a run that did not end.

    """
    document = strict_json.loads((folder / run_folder.RESULTS).read_bytes())
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(document, dict) or type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise ValueError(f"no results of schema 1 to {SCHEMA}")
    if schema == 1:
        document = {("run" if key == "night" else key): value for key, value in document.items()}
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
    seconds: dict[tuple[str, str, str], float] = {}
    left_out: frozenset[str] | None = None
    for _, (_, results) in zip(range(LOOKED_AT), finished(runs, before), strict=False):
        if left_out is None:
            left_out = frozenset(cell.name for cell in results.cells if cell.verdict == NOT_RUN)
        for cell in results.cells:
            for lane in cell.lanes:
                seconds.setdefault((cell.name, cell.evidence, lane.lane), lane.seconds)
    return Estimates(seconds, left_out or frozenset())
