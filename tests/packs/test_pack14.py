"""The reference of pack 14's contract is what autograd gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/14_sparse_mla_precision"
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
