"""`setup.sh` installs what can be installed: both of its environments resolve, without installing anything."""

from __future__ import annotations

import os
import re
import shutil
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


def test_it_installs_as_a_command_that_judges_packs_without_torch(tmp_path: Path) -> None:
    source, venv = tmp_path / "source", tmp_path / "venv"
    for folder in ("harness", "kit", "advisories"):
        shutil.copytree(REPOSITORY / folder, source / folder)
    for file in ("pyproject.toml", "README.md", "LICENSE", "runner.py"):
        shutil.copy(REPOSITORY / file, source)
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    install = [*uv, "pip", "install", "--quiet", "--python", str(venv / "bin/python"), f"{source}[audit]"]
    ended = subprocess.run(install, capture_output=True, text=True, check=False)
    if "error sending request" in ended.stderr:
        pytest.skip("no package index can be reached")
    assert ended.returncode == 0, ended.stderr
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def command(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        script = [str(venv / "bin/reproducer-packs"), *arguments]
        return subprocess.run(script, env=clean | more, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert not list(venv.glob("lib/*/site-packages/torch"))
    missing = command("list")
    assert (missing.returncode, "no folder of packs" in missing.stderr) == (2, True)
    shutil.copytree(REPOSITORY / "packs/24_liger_flce_frozen_input", tmp_path / "packs/24_liger_flce_frozen_input")
    assert "24_liger_flce_frozen_input" in command("list").stdout
    (tmp_path / "pins.txt").write_text("liger-kernel==0.8.5\n")
    audited = command("audit", "-r", "pins.txt", "--no-deps", "--disable-pip")
    assert (audited.returncode, "liger-kernel 0.8.5: affected" in audited.stderr) == (1, True), audited
    shell = {"_REPRODUCER_PACKS_COMPLETE": "bash_complete", "COMP_WORDS": "reproducer-packs pr", "COMP_CWORD": "1"}
    assert [line.partition(",")[2] for line in command(**shell).stdout.split()] == ["pr-verdict", "prune"]
