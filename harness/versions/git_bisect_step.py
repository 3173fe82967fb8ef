"""One step of ``git bisect run``: judges the commit that git names. Exit status 0: as the old end; 1: not; 125: skip.

Run as a script: ``python -P step.py STEP.json COMMIT``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.core import git
from harness.core.cache import Cache
from harness.core.words import Evidence
from harness.host import host
from harness.host.gpus import gpu_pool
from harness.pack import load
from harness.schedule.journal import MemoryJournal
from harness.schedule.session import Session
from harness.versions import git_bisect
from harness.versions.judging import Judging

SKIP = 125


def _end_with_runner() -> None:
    """Wait until the runner is gone, whose pipe standard input is; 255 makes git stop the bisection."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(255)


def main() -> int:
    """Judge one commit, and append it to the journal."""
    threading.Thread(target=_end_with_runner, daemon=True).start()
    step = git_bisect.Step(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    commit = sys.argv[2]
    date = git.run(["log", "-1", "--format=%cd", "--date=short", commit], Path.cwd()).stdout.strip()
    with gpu_pool() as pool:
        session = Session(
            cache=Cache(Path(step.cache), step.offline),
            host=host.detect(pool),
            devices=pool.devices,
            folder=Path(step.folder),
            journal=MemoryJournal(),
            command=lambda cell: f"runner.py versions {cell.pack.name}",
        )
        pack = replace(load.load_pack(Path(step.pack)), inputs=Path(step.inputs))
        judging = Judging(session, pack, step.target, Evidence(step.evidence), step.timeout)
        entry = judging.one(git_bisect.candidate_of(step.url, commit, date, tuple(step.dependencies)))
    with Path(step.journal).open("a", encoding="utf-8") as journal:
        journal.write(json.dumps({"commit": commit, "row": asdict(entry)}) + "\n")
    if not entry.is_judged:
        return SKIP
    return int(entry.verdict != step.old)


if __name__ == "__main__":
    sys.exit(main())
