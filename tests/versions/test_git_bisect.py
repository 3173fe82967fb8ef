"""README's two bisections, run literally over a small history of the toy upstream."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from testing import histories
from testing.workbench import REPOSITORY, Workbench

#: Right, then wrong from the third commit on, then right again; between them what cannot be judged.
STATES = ["right", "right", "wrong", "unimportable", "wrong", "crashing", "right", "right"]


def _bisect(workbench: Workbench, number: int, **places: int) -> str:
    """Run two lines of README, in which words stand for commits; return what git says."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    lines = next(
        block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "git bisect" in block
    ).splitlines()
    block = "\n".join(lines[2 * number : 2 * number + 2])
    folder = workbench.folder / "history"
    commits = histories.commits(folder, STATES)
    for word, index in places.items():
        block = re.sub(rf"\b{word}\b", commits[index], block)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PACK": str(workbench.lay("01_confirmed")), "PATH": path}
    ended = subprocess.run(
        ["sh", "-c", block], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return ended.stdout + ended.stderr


def test_the_commit_that_brought_the_bug_in(workbench: Workbench) -> None:
    output = _bisect(workbench, 0, BAD=4, GOOD=0)
    assert "number 2, wrong" in output.rpartition("is the first bad commit")[2], output


def test_the_commit_that_mended_it(workbench: Workbench) -> None:
    output = _bisect(workbench, 1, FIXED=7, BROKEN=2)
    # what can only be skipped beside the fix cannot be told from it
    found = output.rpartition("The first fixed commit could be any of:")[2] or output
    assert "is the first fixed commit" in output or len(re.findall(r"(?m)^[0-9a-f]{40}$", found)) == 2, output
