"""A clone of this repository in a workbench, with toy packs in place of its own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from testing.workbench import REPOSITORY, Workbench


def lay(workbench: Workbench, name: str = "clone") -> Path:
    """Lay out a clone with the sound toy pack, and a `.venv` that is this interpreter."""
    clone = workbench.folder / name
    for part in ("harness", "kit"):
        package, ignored = REPOSITORY / part, shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, clone / part, ignore=ignored)
    shutil.copy(REPOSITORY / "runner.py", clone)
    workbench.lay("01_confirmed")
    shutil.copytree(workbench.packs, clone / "packs")
    python = clone / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return clone


def address(clone: Path, url: str) -> None:
    """Give a clone's repository an address on the web."""
    (clone / "pyproject.toml").write_text(f'[tool.reproducer-packs]\nrepository_url = "{url}"\n', encoding="utf-8")
