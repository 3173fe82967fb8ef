"""Pack 03's formula against plain loops, and what stands in for the kernels against the formula."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/03_sparse_mla_fp8"
SETUP = """
import json, math, sys
import torch
import reproduce

torch.manual_seed(0)
scale, keys = 0.07, 9
query = torch.randn(2, 4, 3, reproduce.D, dtype=torch.double, requires_grad=True)
key = torch.randn(2, keys, reproduce.D, dtype=torch.double, requires_grad=True)
indices = torch.randint(-3, keys, (2, 4, 6)).clamp(min=-1)
indices[:, 1] = -1
counts = reproduce.named(indices, keys)
output, sums = reproduce.attention(torch, query, key, counts, scale)
"""
LOOPS = """
worst = 0.0
for b in range(2):
    for s in range(4):
        rows = [key[b, one] for one in indices[b, s].tolist() if one >= 0]
        for h in range(3):
            weights = torch.stack([row @ query[b, s, h] * scale for row in rows]).exp() if rows else None
            wanted = sum(w * row[:512] for w, row in zip(weights, rows)) / weights.sum() if rows else 0
            worst = max(worst, float((output[b, s, h] - wanted).abs().max()))
            worst = max(worst, abs(float(sums[b, s, h]) - (math.log2(float(weights.sum())) if rows else 0)))
print(json.dumps(worst))
"""
STAND_INS = """
sizes = {"sm_scale": scale, "dim": reproduce.DV}
wide, each = key[:, :, None], indices[:, :, None].int()
made, total = reproduce.forward_kernel(torch, sizes, query, wide, each)
scaled = reproduce.forward_kernel(torch, sizes, query / 3, wide / 5, each, torch.tensor([3.0]), torch.tensor([5.0]))
given = torch.randn(output.shape, dtype=torch.double)
found = torch.zeros(wide.shape)
delta = reproduce.STAND_INS["preprocess"](torch, {}, output, given)
operands = query.detach(), wide.detach(), given, each, sums.float(), delta, found
gradient = reproduce.backward_kernel(torch, sizes, *operands)
wanted = torch.autograd.grad(output, (query, key), given)
pairs = [(made, output), (total, sums), *zip(scaled, (output, sums))]
pairs += [(gradient, wanted[0]), (found[:, :, 0], wanted[1])]
print(json.dumps(max(reproduce.distance(x.detach(), y.detach()) for x, y in pairs)))
"""


@pytest.mark.parametrize(("question", "limit"), [(LOOPS, 1e-12), (STAND_INS, 2**-7)], ids=["loops", "stand-ins"])
def test_the_formula_and_what_stands_in_for_the_kernels(question: str, limit: float) -> None:
    command = [sys.executable, "-c", SETUP + question]
    ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert 0 <= json.loads(ended.stdout) < limit
