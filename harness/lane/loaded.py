"""What the witness of a lane noted: the files of the modules under test, and the hashes of what was executed."""

from __future__ import annotations

from pathlib import Path

from harness.core import strict_json, structure
from harness.lane.record import UpstreamLine

WITNESS = Path(__file__).with_name("witness")
MOST_LINES = 50_000


def read(file: Path) -> tuple[tuple[UpstreamLine, ...], str]:
    """Return each file once, in the order in which it was loaded first, and why that cannot be read."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    if len(lines) > MOST_LINES:
        return (), f"the lane loaded more than {MOST_LINES} modules"
    try:
        return tuple(structure.structure(strict_json.loads(line), UpstreamLine) for line in dict.fromkeys(lines)), ""
    except (ValueError, TypeError) as error:
        return (), f"what the witness noted cannot be read: {error}"
