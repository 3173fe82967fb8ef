"""Plants every hostile case that the tests know, and prints how many are refused.

``python benchmarks/hostile.py [WORD]``.

Exit status 0 where all are, 1 where one is not; WORD chooses the cases whose names hold it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from testing import hostile


def main() -> int:
    """Try each case in a folder of its own."""
    wanted = " ".join(sys.argv[1:])
    cases = [case for case in hostile.CASES if wanted in case.name]
    taken = 0
    for case in cases:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            problem = hostile.refused(case, Path(folder))
        taken += bool(problem)
        print(f"{'TAKEN  ' if problem else 'refused'}  {time.monotonic() - started:5.1f} s  {case.name}", flush=True)
        if problem:
            print(f"    {problem[:1500]}", flush=True)
    print(f"refused {len(cases) - taken} of {len(cases)}")
    return int(taken > 0)


if __name__ == "__main__":
    sys.exit(main())
