"""Pack 02 never takes a tilelang that does not work for the bug: Megatron swallows that, and answers None for all."""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.pack import load
from testing.workbench import REPOSITORY, installed, unpacked

BROKEN = {  # what the module is, and what the reason of the verdict has to name
    "missing": ("raise ModuleNotFoundError(\"No module named 'tilelang'\")", "No module named 'tilelang'"),
    "no library": ("raise OSError('libtvm.so: cannot open shared object file')", "libtvm.so"),
    "another API": ("__version__ = '9'", "tilelang"),
}


@pytest.fixture(scope="module")
def folders() -> tuple[Path, Path]:
    """Return the folders of the release's tree and of the dependencies."""
    one = load.load_pack(REPOSITORY / "packs/02_sparse_mla_dims")
    return unpacked(one).import_root, installed(one)


@pytest.mark.parametrize("how", BROKEN)
def test_a_tilelang_that_does_not_work_is_no_verdict(how: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, reason = BROKEN[how]
    (tmp_path / "tilelang.py").write_text(source + "\n")
    paths = os.pathsep.join(map(str, (tmp_path, *folders)))
    command = [sys.executable, str(REPOSITORY / "packs/02_sparse_mla_dims/reproduce.py"), "--target", "cpu"]
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    word, _, content = ended.stdout.strip().splitlines()[-1].partition(" ")
    last: dict[str, Any] = json.loads(content)
    assert (word, ended.returncode) == ("UNSUPPORTED", 125), ended.stderr[-2000:]
    assert reason in last["reason"]


def _literals() -> dict[str, Any]:
    tree = ast.parse((REPOSITORY / "packs/02_sparse_mla_dims/reproduce.py").read_text(encoding="utf-8"))
    found = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {name: ast.literal_eval(found[name]) for name in ("FACTORS", "CASES", "EXCLUDED")}


def test_every_possible_pair_of_values_is_in_a_case() -> None:
    given = _literals()
    factors, excluded = given["FACTORS"], given["EXCLUDED"]
    rows = [dict(zip(factors, case, strict=True)) for case in given["CASES"]]
    for row in rows:
        assert not [rule for rule in excluded if row[rule[0]] == rule[1] and row[rule[2]] == rule[3]], row
    for one, other in itertools.combinations(factors, 2):
        have = {(row[one], row[other]) for row in rows}
        never = {(x, y) for a, x, b, y in excluded if (a, b) == (one, other)}
        never |= {(y, x) for a, x, b, y in excluded if (b, a) == (one, other)}
        assert set(itertools.product(factors[one], factors[other])) - never == have, (one, other)
