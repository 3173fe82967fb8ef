"""Which GPUs this host shows: by number, by UUID, by MIG instance, as CUDA reads CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.workbench import REPOSITORY

ASK = """
import json
from harness.host import nvml
from harness.host.nvml import gpu_pool
with gpu_pool() as pool:
    devices = [[one.token, one.number, one.gpu.name, one.is_instance] for one in pool.devices]
    print(json.dumps([devices, [gpu.name for gpu in nvml.detect().gpus], pool.driver, pool.lost]))
"""
FIRST, SECOND, THIRD = (f"GPU-{number}0000000-0b7e-4a52-9d8c-0123456789ab" for number in (1, 2, 3))
PARTS = [f"MIG-{number}0000000-0b7e-4a52-9d8c-0123456789ab" for number in (7, 8)]
HOST = [
    {"name": "one", "capability": [9, 0], "uuid": FIRST},
    {"name": "two", "capability": [9, 0], "uuid": SECOND},
    {"name": "split", "capability": [8, 0], "uuid": THIRD, "instances": PARTS},
]


def _shown(folder: Path, visible: str | None) -> tuple[list[list[object]], list[str], str, list[str]]:
    (folder / "gpus.json").write_text(json.dumps({"devices": HOST}))
    path = f"{REPOSITORY / 'tests/resources/fake_nvml'}{os.pathsep}{REPOSITORY}"
    environment = os.environ | {"PYTHONPATH": path, "NCCL_FAKE_STATE": str(folder / "gpus.json")}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    process = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    devices, names, driver, lost = json.loads(process.stdout)
    return devices, names, driver, lost


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["one", "two", "split", "split"]),
        ("", []),
        ("-1", []),
        ("1", ["two"]),
        ("1,0", ["two", "one"]),
        ("0,-1,1", ["one"]),
        ("0,0", ["one"]),
        (SECOND, ["two"]),
        (SECOND[:8], ["two"]),
        (f"{SECOND},{FIRST}", ["two", "one"]),
        (PARTS[1], ["split"]),
        (f"0, {PARTS[0]}", ["one", "split"]),
    ],
)
def test_the_host_and_the_pool_see_the_same_gpus(tmp_path: Path, visible: str | None, names: list[str]) -> None:
    devices, host_names, driver, lost = _shown(tmp_path, visible)
    assert ([device[2] for device in devices], host_names, lost) == (names, names, [])
    assert driver == ("999.1" if names else "")


def test_a_gpu_that_is_split_is_used_by_its_instances(tmp_path: Path) -> None:
    devices, *_ = _shown(tmp_path, None)
    assert [device[0] for device in devices] == ["0", "1", *PARTS]
    assert [device[3] for device in devices] == [False, False, True, True]
    assert [device[1] for device in devices] == ["0", "1", "2", "3"], "a UUID gets into no output"


def test_what_names_no_gpu_is_told(tmp_path: Path) -> None:
    devices, _, _, lost = _shown(tmp_path, "0,GPU-99999999")
    assert ([device[2] for device in devices], len(lost)) == (["one"], 1)
    assert lost[0].startswith("gpu 1 cannot be used: ")
