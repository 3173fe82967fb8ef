"""Pack 01's patch leaves eager mode as it is, over random and adversarial inputs, in the real trees."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, installed, unpacked

from harness import git, pack

SCRIPT = Path(__file__).with_name("pack01_properties.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the functions gave in each of the two trees."""
    one = pack.load(REPOSITORY / "packs/01_dsa_cuda_graph")
    site, pristine = installed(one), unpacked(one).folder
    patched = tmp_path_factory.mktemp("patched") / "tree"
    shutil.copytree(pristine, patched)
    assert git.run(["apply", "-p1", str(one.patch)], patched, git.PLAIN).returncode == 0
    answers = {}
    for name, folder in (("pristine", pristine), ("patched", patched)):
        paths = os.pathsep.join(map(str, (folder, site)))
        environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, str(SCRIPT)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]
        answers[name] = json.loads(ended.stdout)
    return answers


def test_eager_results_and_refusals_are_bit_for_bit_the_same(found: dict[str, Any]) -> None:
    assert found["patched"]["eager"] == found["pristine"]["eager"]


def test_eager_results_are_those_of_an_independent_reference(found: dict[str, Any]) -> None:
    assert found["patched"]["wrong"]
    assert not any(found["patched"]["wrong"].values())


def test_what_runs_under_capture_gives_what_eager_mode_gives(found: dict[str, Any]) -> None:
    # A batch of nothing but empty sequences has no rows in eager mode; a graph's shapes cannot depend on that.
    assert {name for name in found["patched"]["captured"] if not name.endswith(".empty")} == set()
