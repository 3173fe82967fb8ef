"""SIGKILL a sweep at random moments, again and again: prints what was lost, run twice, orphaned or broken (nothing).

Run it as ``python benchmarks/sweep_kills.py [--kills 200] [--seed 1]``. Each kill hits a sweep of 20 toy packs (40
lanes, 4 at once), which the same command then continues; a sweep that ends is checked as a whole, and the next begins.
The first violation ends it with a traceback.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from testing import sweeps  # noqa: E402 - found through the path above

PACKS, JOBS, LONGEST = 20, 4, 3.0


def main() -> None:
    """Kill, look, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as text:
        one = sweeps.siege(Path(text), PACKS, JOBS, asked.seed)
        while one.kills < asked.kills:
            one.assault(LONGEST)
            sweeps.prune(one.runs, keep=2)
        print(
            f"{one.kills} SIGKILLs of a sweep of {2 * PACKS} lanes (seed {asked.seed}), {one.ended} sweeps finished "
            f"meanwhile, {one.torn} torn journal lines, {time.monotonic() - started:.0f} s: "
            "no finished lane lost, none run twice, no orphan, no broken file"
        )


if __name__ == "__main__":
    main()
