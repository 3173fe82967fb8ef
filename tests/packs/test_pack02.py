"""Pack 02 takes no tilelang that does not work for the bug."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.pack import load
from testing.workbench import REPOSITORY, installed, unpacked

PACK = REPOSITORY / "packs/02_sparse_mla_dims"
BROKEN = {  # what the module is, and what the reason of each check has to name
    "missing": (
        "raise ModuleNotFoundError(\"No module named 'tilelang'\", name='tilelang')",
        "No module named 'tilelang'",
    ),
    "no library": ("raise OSError('libtvm.so: cannot open shared object file')", "libtvm.so"),
    "another API": ("__version__ = '9'", "tilelang"),
}


@pytest.fixture(scope="module")
def folders() -> tuple[Path, Path]:
    """Return the folders of the release's tree and of the dependencies."""
    one = load.load_pack(PACK)
    return unpacked(one).import_root, installed(one)


def ended(arguments: list[str], folders: tuple[Path, ...], **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the CPU with these folders on its path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "CUDA_VISIBLE_DEVICES": ""} | more
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("how", BROKEN)
def test_contract_judges_nothing_with_a_tilelang_that_does_not_work(
    how: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    source, reason = BROKEN[how]
    (tmp_path / "tilelang.py").write_text(source + "\n")
    results = tmp_path / "results.jsonl"
    arguments = ["-m", "pytest", "-c", os.devnull, "-p", "kit.plugin", "-p", "no:cacheprovider"]
    arguments += [
        "--import-mode=importlib",
        "-k",
        "hands_its_dimensions or asked_for or apply_alone",
        str(PACK / "contract.py"),
    ]
    told = {"REPRODUCER_RESULTS": str(results), "REPRODUCER_TARGET": "cpu", "REPRODUCER_MODULES": "megatron"}
    told["REPRODUCER_TREE"] = str(folders[0])
    ended(arguments, (tmp_path, *folders, REPOSITORY), **told)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    checks = [line for line in lines if line["kind"] == "check"]
    assert len(checks) >= 5
    assert {check["ok"] for check in checks} == {None}
    assert all(reason in check["reason"] for check in checks)
    assert not [line for line in lines if line["kind"] == "problem"]


def test_script_says_unsupported_without_tilelang(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "tilelang.py").write_text(BROKEN["missing"][0] + "\n")
    found = ended([str(PACK / "reproduce.py")], (tmp_path, *folders))
    assert found.returncode == 125, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1].startswith("UNSUPPORTED: needs tilelang 0.1.8")
