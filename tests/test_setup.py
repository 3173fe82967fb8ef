"""`setup.sh` installs what can be installed: both of its environments resolve, without installing anything."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def _resolved(*requirements: str) -> str:
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header", "--python", sys.executable]
    ended = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True, check=False)
    if "error sending request" in ended.stderr:
        pytest.skip("no package index can be reached")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_host_with_a_gpu_gets_a_torch_and_the_triton_that_it_asks_for() -> None:
    pins = [text for text in EXTRAS["gpu"] if "==" in text]
    found = _resolved(*pins)
    assert all(re.search(rf"^{re.escape(pin)}$", found, re.MULTILINE) for pin in pins), found


def test_a_host_without_one_gets_the_cpu_build_by_name() -> None:
    (torch,) = [text for text in EXTRAS["cpu"] if text.startswith("torch==")]
    script = (REPOSITORY / "setup.sh").read_text()
    assert "^cpu = " in script
    assert "+cpu" in script
    found = subprocess.run(
        ["sed", "-n", r's/^cpu = .*"torch==\([0-9.]*\)".*/\1/p', str(REPOSITORY / "pyproject.toml")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"torch=={found.stdout.strip()}" == torch
