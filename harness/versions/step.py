"""One step of ``git bisect run``: judges the commit that git names. Exit status 0: as the old end; 1: not; 125: skip.

Run as a script: ``python -P step.py STEP.json COMMIT``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import git, host, pack
from harness.cache import Cache
from harness.execute import Runner
from harness.outcome import Request
from harness.versions import commits
from harness.versions.lanes import Judging
from harness.words import Evidence

SKIP = 125


def _quiet(_: str) -> None:
    """Say nothing: git's own output is what is read."""


def main() -> int:
    """Judge one commit, and append it to the journal."""
    step = commits.Step(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    commit = sys.argv[2]
    date = git.run(["log", "-1", "--format=%cd", "--date=short", commit], Path.cwd()).stdout.strip()
    runner = Runner(Cache(Path(step.cache), step.offline), host.detect(), Path(step.logs), _quiet)
    request = Request(timeout=step.timeout)
    judging = Judging(runner, pack.load(Path(step.pack)), step.target, Evidence(step.evidence), request)
    row = judging.judge(commits.candidate_of(step.url, commit, date, tuple(step.companions)))
    with Path(step.journal).open("a", encoding="utf-8") as journal:
        journal.write(json.dumps({"commit": commit, "row": asdict(row)}) + "\n")
    if not row.is_judged:
        return SKIP
    return int(row.verdict != step.old)


if __name__ == "__main__":
    sys.exit(main())
