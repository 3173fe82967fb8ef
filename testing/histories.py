"""Histories of the toy upstream: releases, and commits, that are right, wrong, or cannot be judged."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from testing import toys
from testing.package_index import Shelf

BASE = toys.RESOURCES / "upstream/toykernel-1.0"
WRONG_LINE = "[value * weights[0] for value in values]"
RIGHT_LINE = "[value * weight for value, weight in zip(values, weights)]"
WRONG = (BASE / "src/toykernel/scale.py").read_text(encoding="utf-8")
RIGHT = WRONG.replace(WRONG_LINE, RIGHT_LINE)
#: What scale.py holds in each state.
STATES = {
    "wrong": WRONG,
    "right": RIGHT,
    "unimportable": "import a_package_that_nobody_has\n" + WRONG,
    "other API": "def scale_all(values, weights):\n    return values\n",
    "crashing": "import os\nos.abort()\n",
    "hanging": "import time\ntime.sleep(600)\n",
    "control": WRONG.replace("sum(", "1 + sum("),
}


def _release(folder: Path, version: str, state: str) -> bytes:
    """Build the sdist of one release in one state."""
    source = folder / f"toykernel-{version}"
    shutil.copytree(BASE, source)
    (source / "src/toykernel/scale.py").write_text(STATES[state], encoding="utf-8")
    toys.zip_folder(source, folder / f"{source.name}.zip")
    return (folder / f"{source.name}.zip").read_bytes()


def shelf(folder: Path, states: dict[str, str]) -> Shelf:
    """Build an index of the toy upstream with a release in each of these states, beside the pinned one if named."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"toykernel-{version}.zip": _release(folder, version, state) for version, state in states.items()}
    if "1.0" in states:
        assert states["1.0"] == "wrong"
        (folder / "pinned").mkdir()
        files["toykernel-1.0.zip"] = toys.sdist(folder / "pinned")[0].read_bytes()
    return Shelf({"toykernel": files})


def git(folder: Path, *arguments: str) -> str:
    """Run git with an identity of its own."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    ended = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return ended.stdout.strip()


def redirected(url: str, folder: Path) -> dict[str, str]:
    """Return the variables that lead git from a URL to a folder, as a user's configuration may."""
    rule = {"GIT_CONFIG_KEY_0": f"url.{folder.as_uri()}.insteadOf", "GIT_CONFIG_VALUE_0": url}
    return {"GIT_CONFIG_COUNT": "1"} | rule


def commits(folder: Path, states: list[str]) -> list[str]:
    """Make a repository with one commit for each state; return their hashes."""
    shutil.copytree(BASE, folder)
    git(folder, "init", "-q", "-b", "main")
    found = []
    for number, state in enumerate(states):
        (folder / "src/toykernel/scale.py").write_text(f"{STATES[state]}# {number}\n", encoding="utf-8")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", f"number {number}, {state}")
        found.append(git(folder, "rev-parse", "HEAD"))
    return found
