"""The timer, the service and the workflow: checked by their own tools, and their commands run over toy packs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing import clones, package_index, toys
from testing.workbench import REPOSITORY, Workbench

DEPLOY = REPOSITORY / "deploy"
WORKFLOW = REPOSITORY / ".github/workflows/nightly-sweep.yml"
HOME = "/opt/reproducer-packs"


@pytest.fixture
def environment(workbench: Workbench) -> dict[str, str]:
    """Return the environment of a host whose folders all lie in the workbench."""
    places = {"HOME": "home", "CACHE_DIRECTORY": "cache", "STATE_DIRECTORY": "state", "XDG_CACHE_HOME": "xdg"}
    found = {name: str(workbench.folder / folder) for name, folder in places.items()}
    return (
        os.environ | found | {"GITHUB_STEP_SUMMARY": str(workbench.folder / "step.md"), "PIP_CONFIG_FILE": os.devnull}
    )


def _served(workbench: Workbench) -> package_index.Shelf:
    archive = workbench.folder / "toykernel-1.0.zip"
    return package_index.Shelf({"toykernel": {archive.name: archive.read_bytes()}})


def _settings(name: str) -> dict[str, list[str]]:
    """Read a unit: every value by its key."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / name).read_text().replace("\\\n", " ").splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here; apt-get install systemd")
def test_systemd_finds_nothing_to_complain_of(tmp_path: Path) -> None:
    for path in DEPLOY.glob("reproducer-sweep.*"):
        text = path.read_text().replace(f"{HOME}/.venv/bin/python", sys.executable)
        (tmp_path / path.name).write_text(text)
    command = ["systemd-analyze", "verify", *sorted(str(path) for path in tmp_path.iterdir())]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.strip()) == (0, "")


def test_the_service_runs_a_sweep(workbench: Workbench, environment: dict[str, str]) -> None:
    clone = clones.lay(workbench)
    (start,) = _settings("reproducer-sweep.service")["ExecStart"]
    for name in ("CACHE_DIRECTORY", "STATE_DIRECTORY"):
        start = start.replace(f"${{{name}}}", environment[name])
    command = shlex.split(start.replace(HOME, str(clone)))
    with package_index.served(_served(workbench)) as url:
        for _ in range(2):
            ended = subprocess.run(
                command,
                cwd=clone,
                env=environment | {"PIP_INDEX_URL": url},
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == 0, ended.stderr
    first, second = sorted((workbench.folder / "state/sweeps").glob("*/results.json"))
    document = json.loads(second.read_text())
    assert document["baseline"] == f"the run {first.parent.name}"
    assert [cell["verdict"] for cell in document["cells"]] == ["CONFIRMED", "CONFIRMED"]
    assert document["lanes_run"] == 2, "the newest release is the pinned one: its lanes are not run twice"


def _workflow() -> dict[str, Any]:
    yaml = pytest.importorskip("ruamel.yaml").YAML(typ="safe")
    return dict(yaml.load(WORKFLOW.read_text()))


def test_the_steps_of_the_workflow_run_a_sweep(workbench: Workbench, environment: dict[str, str]) -> None:
    clone = clones.lay(workbench)
    steps = {step.get("name"): step for step in _workflow()["jobs"]["sweep"]["steps"]}
    variables = {"ONLY": ":cpu", "BUDGET": "5h"}
    assert set(steps["Sweep"]["env"]) == set(variables)
    with package_index.served(_served(workbench)) as url:
        here = environment | variables | {"PIP_INDEX_URL": url}
        for name in ("Sweep", "Collect the run folder"):
            command = ["bash", "-e", "-o", "pipefail", "-c", steps[name]["run"]]
            ended = subprocess.run(command, cwd=clone, env=here, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stderr
    assert (workbench.folder / "step.md").read_text().startswith("# Sweep ")
    assert (clone / "sweep/index.html").exists()
    assert toys.BASE in (clone / "sweep/summary.md").read_text()
