"""What a lane inherits, what is its own, and that both lanes never share a cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.host.host import cores
from harness.lane import environment
from harness.lane.environment import Share
from testing import toys
from testing.workbench import Workbench

KEPT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "CUDA_VISIBLE_DEVICES": "3",
    "LD_LIBRARY_PATH": "/usr/lib",
    "LC_CTYPE": "C.UTF-8",
}
DROPPED = {
    "GITHUB_TOKEN": "x",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": "/elsewhere",
    "PYTHONSTARTUP": "x",
    "HF_HOME": "x",
    "NVIDIA_API_KEY": "x",
    "CUDA_SECRET": "x",
    "NCCL_AUTH_TOKEN": "x",
    "LC_IDENTIFICATION": "x",
}


@pytest.mark.hostile("the environment of a lane")
def test_a_lane_keeps_the_switches_of_a_shared_host_and_drops_the_rest(tmp_path: Path) -> None:
    folders, paths = (tmp_path / "work", tmp_path / "kept"), [Path("/tree"), Path("/dependencies")]
    built = environment.build(KEPT | DROPPED, *folders, paths, Share(3, 2, "3"))
    assert KEPT.items() <= built.items()
    assert not (set(DROPPED) - {"PYTHONPATH"}) & set(built)
    assert (built["PYTHONPATH"], built["OMP_NUM_THREADS"]) == ("/tree:/dependencies", "3")
    assert built["REPRODUCER_PROCESSES"] == "2"
    chosen = environment.build(KEPT, *folders, [], Share(1, 1, "0,1"))
    assert (chosen["CUDA_VISIBLE_DEVICES"], chosen["CUDA_DEVICE_ORDER"]) == ("0,1", "PCI_BUS_ID")
    hidden = environment.build(KEPT, *folders, [], Share(1, 1, ""))
    assert hidden["CUDA_VISIBLE_DEVICES"] == ""
    assert hidden["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.hostile("the environment of a lane")
def test_a_real_lane_has_its_own_folders_and_the_switches(workbench: Workbench) -> None:
    folder = workbench.lay("01_confirmed")
    printing = 'import os\nprint("ENVIRONMENT", sorted(os.environ.items()), os.getcwd())\nvalues, weights ='
    toys.replace(folder / "reproduce.py", "values, weights =", printing)
    toys.replace(folder / "pack.toml", "[targets.cpu]\n", "[targets.cpu]\nprocesses = 1000\n")
    search = os.pathsep.join(["/elsewhere", *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = KEPT | DROPPED | {"PYTHONPATH": search, "NVIDIA_TF32_OVERRIDE": "0"}
    status, (row,) = workbench.rows(**variables)
    assert status == 0
    receipt = json.loads(next(workbench.receipts.rglob("cpu.*.json")).read_text())
    assert receipt["host"]["variables"] == ["NCCL_NVLS_ENABLE=0", "NVIDIA_TF32_OVERRIDE=0"], "they change numbers"
    logs = [Path(log).read_text() for log in row["logs"]]
    caches = [{part for part in log.split("'") if "/jit/" in part} for log in logs]
    assert caches[0]
    assert not caches[0] & caches[1], "no JIT or bytecode cache is shared between pristine and patched"
    for log in logs:
        assert "('NCCL_NVLS_ENABLE', '0')" in log
        assert "('TORCH_SYMM_MEM_DISABLE_MULTICAST', '1')" in log
        assert "('CUDA_VISIBLE_DEVICES', '')" in log
        assert not [name for name in DROPPED if f"('{name}', 'x')" in log]
        assert f"('REPRODUCER_PROCESSES', '{len(cores())}')" in log, "no more than the cores"
        assert "('HOME', '$HOME')" in log, "known places are names"


def test_a_script_shows_both_sentinels_without_the_runner(workbench: Workbench) -> None:
    folder = workbench.lay("01_confirmed")
    shutil.unpack_archive(next(workbench.cache.glob("downloads/*/*.zip")), workbench.folder)
    checkout = workbench.folder / "toykernel-1.0"

    def run() -> tuple[int, str]:
        command = [sys.executable, str(folder / "reproduce.py")]
        environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return process.returncode, process.stdout.splitlines()[-1]

    assert run() == (10, "BUG_REPRODUCED")
    subprocess.run(["git", "apply", "-p1", str(folder / "fix.patch")], cwd=checkout, check=True)
    assert run() == (0, "FIX_VALIDATED")
