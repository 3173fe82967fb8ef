"""Pack 14's sweeps go on from their files: what is there is not measured again, and what is missing is."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/14_sparse_mla_precision"
ASK = """
import json, pathlib, sys
import measure_context
import measure_flash_norm
rows, _ = measure_context.appended(pathlib.Path(sys.argv[1]), ())
both = {"context": lambda: measure_context.left(rows, ("pristine", "patched"))}
both["flash_norm"] = lambda: measure_flash_norm.left(rows)
print(json.dumps(list(both[sys.argv[2]]())))
"""
# The contract imports upstream, which its reference does not need.
CONTRACT = """
import json, math, sys, unittest.mock
import torch
package = ["megatron", "core", "transformer", "experimental_attention_variant", "ops"]
for depth in range(1, len(package) + 1):
    sys.modules[".".join(package[:depth])] = unittest.mock.MagicMock()
unittest.mock.patch("kit.sparse_attention.bare_megatron").start()
import contract
from kit.errors import relative_error
"""
AUTOGRAD = """
case = contract.OTHER._replace(heads=2, topk=3, batch=2, keys=5, masked=True, queries=4)
given = contract.example(case, "cpu")
made = contract.reference(given, 1 / 11)
q, kv = (x.double().requires_grad_() for x in (given.q, given.kv))
one_key = lambda b, s, g, j: kv[b, given.index[b, s, g, j], g]
out, lse = torch.zeros_like(made.out), torch.zeros_like(made.lse)
for b, s, h in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
    chosen = [one_key(b, s, h // 2, j) for j in range(3) if given.index[b, s, h // 2, j] >= 0]
    if chosen:
        keys = torch.stack(chosen)
        scores = keys @ q[b, s, h] / 11
        out[b, s, h] = torch.softmax(scores, 0) @ keys[:, :512]
        lse[b, s, h] = torch.logsumexp(scores, 0) / math.log(2)
dq, dkv = torch.autograd.grad(out, (q, kv), given.grad.double())
found = {"out": out, "lse": lse, "dq": dq, "dkv": dkv}
print(json.dumps({name: relative_error(getattr(made, name), x.detach()) for name, x in found.items()}))
"""


def _left(path: Path) -> list[Any]:
    command = [sys.executable, "-c", ASK, str(path), path.stem]
    ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: list[Any] = json.loads(ended.stdout)
    return found


def test_a_sweep_goes_on_from_its_file(tmp_path: Path) -> None:
    text = (FOLDER / "data/context.csv").read_text()
    copy = tmp_path / "context.csv"
    copy.write_text(text)
    assert _left(copy) == []
    lines = text.splitlines(keepends=True)
    copy.write_text("".join(lines[:-1]))
    last = list(csv.DictReader(lines))[-1]
    ((case, trees),) = _left(copy)
    assert (case["tokens"], trees) == (int(last["tokens"]), [last["tree"]])


def test_the_sweep_of_the_norm_goes_on_too(tmp_path: Path) -> None:
    lines = (FOLDER / "data/flash_norm.csv").read_text().splitlines(keepends=True)
    copy = tmp_path / "flash_norm.csv"
    copy.write_text("".join(lines))
    assert _left(copy) == []
    copy.write_text("".join(lines[:-1]))
    last = list(csv.DictReader(lines))[-1]
    (case,) = _left(copy)
    assert (case["score"], case["seed"]) == (float(last["score"]), int(last["seed"]))


def _asked_of_the_contract(script: str) -> str:
    command = [sys.executable, "-c", CONTRACT + script]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "REPRODUCER_TARGET": "cpu"}
    ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_reference_is_what_autograd_gives() -> None:
    """Masked keys, a query without any, two sequences and two key groups, in float64."""
    distances = json.loads(_asked_of_the_contract(AUTOGRAD))
    assert set(distances) == {"out", "lse", "dq", "dkv"}
    assert max(distances.values()) < 1e-12
