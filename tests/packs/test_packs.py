"""The real packs, on the CPU evidence that they offer: real upstream code, in child processes.

They need the package index once; what they fetch stays in the user's cache.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.core import cache, git
from harness.core.cache import Cache
from harness.pack import load, probe
from harness.pack.model import Pack
from harness.report import packs_table, run_table
from harness.report.run_table import RunRow
from harness.upstream import download, mirrors
from testing.workbench import REPOSITORY, installed, unpacked

MEASURING = sorted(REPOSITORY.glob("packs/*/measure_*.py"))
PACKS = [load.load_pack(folder) for folder in sorted((REPOSITORY / "packs").glob("*_*"))]
ON_CPU = [one for one in PACKS if "cpu" in one.definition.targets]


@pytest.mark.parametrize("one", PACKS, ids=lambda one: one.name)
def test_a_probe_keeps_its_contract(one: Pack) -> None:
    text = one.probe.read_text(encoding="utf-8")
    assert probe.read(text, has_patch=one.definition.has_patch).errors == ()


@pytest.mark.parametrize("script", MEASURING, ids=lambda script: f"{script.parent.name[:2]}-{script.stem}")
def test_what_a_script_takes_of_its_probe_is_there(script: Path) -> None:
    taken = sorted(set(re.findall(r"\breproduce\.([A-Za-z_]\w*)", script.read_text(encoding="utf-8"))) - {"py"})
    command = [sys.executable, "-B", "-c", f"import reproduce\nfor name in {taken}: getattr(reproduce, name)"]
    ended = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("one", ON_CPU, ids=lambda one: one.name)
def test_a_pack_gives_what_it_states_on_the_cpu(one: Pack, tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "runner.py"), "run", one.name, "--target", "cpu", "--json"]
    ended = subprocess.run([*command, "--receipts", str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = json.loads(ended.stdout)
    assert row["verdict"] == one.definition.targets["cpu"].verdict
    if one.name == packs_table.FIRST_RUN[0]:  # README.md shows what this run prints
        readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
        assert f"```\n{run_table.as_text([RunRow(**row)])}```\n" in readme


def _offer(one: Pack, folder: Path, programs: Path) -> None:
    """Offer what the first line unpacks: the file of a release, or a commit's archive by way of `curl`."""
    upstream = one.definition.upstream
    if not upstream.is_commit:
        shutil.copy(
            download.fetch(Cache(cache.default_root()), upstream.package, upstream.file, upstream.sha256), folder
        )
        return
    offered = os.environ.get("REPRODUCER_PACKS_MIRRORS")
    mirror = mirrors.folder_of(Path(offered), upstream.repository) if offered else None
    if mirror is None:
        pytest.skip(f"no mirror of {upstream.repository}")
    prefix = f"{upstream.repository.rpartition('/')[2]}-{upstream.commit}/"
    curl = programs / "curl"
    curl.write_text(
        f"#!/bin/sh\nexec git --git-dir='{mirror}' archive --format=tar.gz --prefix={prefix} {upstream.commit}\n"
    )
    curl.chmod(0o755)


@pytest.mark.parametrize("one", ON_CPU, ids=lambda one: one.name)
def test_the_four_lines_of_the_docstring_show_both_sentinels(one: Pack, tmp_path: Path) -> None:
    shim = tmp_path / "bin/python"
    shim.parent.mkdir()
    _offer(one, tmp_path, shim.parent)
    shim.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{installed(one)}" exec {sys.executable} "$@"\n')
    shim.chmod(0o755)
    environment = os.environ | {"PACK": str(one.folder), "PATH": f"{shim.parent}:{os.environ['PATH']}"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    ended = [
        subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        for line in probe.read(one.probe.read_text(encoding="utf-8")).commands
    ]
    statuses = [each.returncode for each in ended]
    assert statuses == [0, 10, 0, 0], "\n".join(each.stderr[-2000:] for each in ended)
    assert "BUG_REPRODUCED" in ended[1].stdout
    assert "FIX_VALIDATED" in ended[3].stdout


@pytest.mark.parametrize("one", PACKS, ids=lambda one: one.name)
def test_the_readme_lists_the_pack(one: Pack) -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert f"[{one.name}](packs/{one.name}/REPORT.md)" in text
    assert one.definition.upstream.version in text


def test_the_three_patches_for_mamba_apply_in_series(tmp_path: Path) -> None:
    series = [one for one in PACKS if one.definition.upstream.package == "mamba-ssm"]
    assert {one.definition.upstream.sha256 for one in series} == {series[0].definition.upstream.sha256}
    content = tmp_path / "tree"
    shutil.copytree(unpacked(series[0]).folder, content)
    for one in series:
        applied = git.run(["apply", "-p1", "--whitespace=nowarn", str(one.patch)], content, git.PLAIN)
        assert applied.returncode == 0, f"{one.name}: {applied.stderr}"
        assert git.run(["apply", "-p1", "--reverse", "--check", str(one.patch)], content, git.PLAIN).returncode == 0
