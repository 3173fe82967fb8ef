"""What a lane inherits, what is its own, and that both lanes never share a cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.host.host import cores
from harness.lane import environment
from harness.lane.environment import NO_GPU, Folders, Gpus, Share
from harness.pack import probe
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
}


def test_a_lane_keeps_the_switches_of_a_shared_host_and_drops_the_rest(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "work", tmp_path / "kept")
    built = environment.build(KEPT | DROPPED, folders, [Path("/tree"), Path("/dependencies")], Gpus(), Share(3, 2))
    assert KEPT.items() <= built.items()
    assert not {"GITHUB_TOKEN", "TRITON_INTERPRET", "PYTHONSTARTUP", "HF_HOME"} & set(built)
    assert (built["PYTHONPATH"], built["OMP_NUM_THREADS"]) == ("/tree:/dependencies", "3")
    assert built["REPRODUCER_PROCESSES"] == "2"
    chosen = environment.build(KEPT, folders, [], Gpus("0,1", Path("/gate")))
    assert (chosen["CUDA_VISIBLE_DEVICES"], chosen["CUDA_DEVICE_ORDER"]) == ("0,1", "PCI_BUS_ID")
    assert chosen["REPRODUCER_GPU_GATE"] == "/gate"
    hidden = environment.build(KEPT, folders, [], NO_GPU)
    assert hidden["CUDA_VISIBLE_DEVICES"] == ""
    assert hidden["NCCL_NVLS_ENABLE"] == "0"


def test_a_real_lane_has_its_own_folders_and_the_switches(workbench: Workbench) -> None:
    folder = workbench.lay("01_confirmed")
    probe = folder / "reproduce.py"
    shown = '    import os\n    print("ENVIRONMENT", sorted(os.environ.items()), os.getcwd())\n    values, weights ='
    probe.write_text(probe.read_text().replace("    values, weights =", shown))
    definition = folder / "pack.toml"
    definition.write_text(definition.read_text().replace("[targets.cpu]\n", "[targets.cpu]\nprocesses = 1000\n"))
    search = os.pathsep.join(["/elsewhere", *filter(None, [os.environ.get("PYTHONPATH")])])
    status, (row,) = workbench.rows(
        "--receipts", str(workbench.folder / "out"), **(KEPT | DROPPED | {"PYTHONPATH": search})
    )
    assert status == 0
    logs = [Path(log).read_text() for log in row["logs"]]
    caches = [{part for part in log.split("'") if "/jit/" in part} for log in logs]
    assert caches[0]
    assert not caches[0] & caches[1], "no JIT or bytecode cache is shared between pristine and patched"
    for log in logs:
        assert "('NCCL_NVLS_ENABLE', '0')" in log
        assert "('TORCH_SYMM_MEM_DISABLE_MULTICAST', '1')" in log
        assert "('CUDA_VISIBLE_DEVICES', '')" in log
        assert "GITHUB_TOKEN" not in log
        assert f"('REPRODUCER_PROCESSES', '{len(cores())}')" in log, "no more than the cores"
        assert "('HOME', '$HOME')" in log, "known places are names"


def _run_lines(commands: list[str], folder: Path, pack_folder: Path) -> list[tuple[int, str]]:
    environment_here = os.environ | {
        "PACK": str(pack_folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    ended = [
        subprocess.run(
            ["sh", "-c", line], cwd=folder, env=environment_here, capture_output=True, text=True, check=False
        )
        for line in commands
    ]
    return [(one.returncode, one.stdout + one.stderr) for one in ended]


def test_the_four_lines_of_a_docstring_show_both_sentinels(workbench: Workbench) -> None:
    folder = workbench.lay("01_confirmed")
    commands = probe.read((folder / "reproduce.py").read_text()).commands
    unpacked, pristine, applied, patched = _run_lines(commands, workbench.folder, folder)
    assert (unpacked[0], applied[0]) == (0, 0), unpacked[1] + applied[1]
    assert (pristine[0], "BUG_REPRODUCED" in pristine[1]) == (10, True), pristine[1]
    assert (patched[0], "FIX_VALIDATED" in patched[1]) == (0, True), patched[1]
