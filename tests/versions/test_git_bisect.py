"""README's two bisections, run literally over a small history of the toy upstream."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from testing import toys
from testing.workbench import REPOSITORY, Workbench

RIGHT = "[value * weight for value, weight in zip(values, weights)]"
WRONG = "[value * weights[0] for value in values]"


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    ended = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return ended.stdout.strip()


def _history(folder: Path) -> dict[str, str]:
    """Commit right, harmless, wrong, unimportable, wrong, crashing, right and harmless states, in this order."""
    shutil.copytree(toys.RESOURCES / "upstream/toykernel-1.0", folder)
    scale = folder / "src/toykernel/scale.py"
    original = scale.read_text()
    right = original.replace(WRONG, RIGHT)
    states = {
        "first": right,
        "harmless": right + "\n# harmless\n",
        "brought in": original,
        "unimportable": "import a_package_that_nobody_has\n" + original,
        "still wrong": original + "\n# more\n",
        "crashing": "import os\nos.abort()\n",
        "fixed": right + "\n# fixed\n",
        "last": right + "\n# last\n",
    }
    _git(folder, "init", "-q")
    commits = {}
    for name, text in states.items():
        scale.write_text(text)
        _git(folder, "add", "-A")
        _git(folder, "commit", "-qm", name)
        commits[name] = _git(folder, "rev-parse", "HEAD")
    return commits


def _blocks() -> list[str]:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    return [block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "git bisect" in block]


def _bisect(workbench: Workbench, block: str, **places: str) -> str:
    pack = workbench.lay("01_confirmed")
    folder = workbench.folder / "history"
    commits = _history(folder)
    for word, name in places.items():
        block = re.sub(rf"\b{word}\b", commits[name], block)
    environment = os.environ | {
        "PACK": str(pack),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    ended = subprocess.run(
        ["sh", "-c", block], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return ended.stdout + ended.stderr


def test_the_commit_that_brought_the_bug_in(workbench: Workbench) -> None:
    output = _bisect(workbench, _blocks()[0], BAD="still wrong", GOOD="first")
    assert "brought in" in output.rpartition("is the first bad commit")[2], output


def test_the_commit_that_mended_it(workbench: Workbench) -> None:
    output = _bisect(workbench, _blocks()[1], FIXED="last", BROKEN="brought in")
    # what can only be skipped beside the fix cannot be told from it
    found = output.rpartition("The first fixed commit could be any of:")[2] or output
    assert "is the first fixed commit" in output or len(re.findall(r"(?m)^[0-9a-f]{40}$", found)) == 2, output
