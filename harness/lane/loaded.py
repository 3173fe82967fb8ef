"""What the witness of a lane noted: the files of the modules under test, and the hashes of what was executed."""

from __future__ import annotations

from pathlib import Path

from harness.core import strict_json, structure
from harness.lane.transcript import UpstreamLine

WITNESS = Path(__file__).with_name("witness")
MOST_LINES = 50_000


def read(file: Path) -> tuple[UpstreamLine, ...]:
    """Return each file once, in the order in which it was loaded first.

    Raises:
        ValueError: a line is not the witness's, or there are too many.

    """
    lines = file.read_bytes().splitlines() if file.exists() else []
    if len(lines) > MOST_LINES:
        raise ValueError(f"the lane loaded more than {MOST_LINES} modules")
    return tuple(structure.structure(strict_json.loads(line), UpstreamLine) for line in dict.fromkeys(lines))
