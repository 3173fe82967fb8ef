"""Errors of PyTorch's flash attention backward in bf16, the norm for the SparseMLA kernel. Never judged.

    python measure_flash_norm.py

Needs a GPU, and nothing but PyTorch. Causal self-attention by scaled_dot_product_attention on its flash backend, two
heads, head dimensions 128 and 256; the gradients as returned (bf16) against float64, computed in chunks of queries. A
row per case is appended to data/flash_norm.csv; what is there already is not measured again.
"""

import argparse
import itertools
import math
import time
from pathlib import Path

import torch
from measure_context import appended, lookup
from reference import error
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS = 2
CASE = ("tokens", "head_dim", "score", "seed")
ERRORS = ("dq", "dk", "dv", "floor_cast_dk", "floor_cast_dv")


def grid():
    """List the cases: all lengths at score scale 1, all scales at the base length."""
    for head_dim, seed in itertools.product((128, 256), (0, 1, 2)):
        for tokens in (512 << i for i in range(8)):
            if seed == 0 or tokens <= 8192:
                yield {"tokens": tokens, "head_dim": head_dim, "score": 1.0, "seed": seed}
        for score in (0.1, 0.5, 2.0, 4.0, 8.0):
            yield {"tokens": 4096, "head_dim": head_dim, "score": score, "seed": seed}


def left(known):
    """Yield the cases that the known rows lack."""
    has = lookup(known, CASE)
    return (case for case in grid() if not has(case))


def exact_gradients(q, k, v, grad, scale):
    """Return float64 dQ, dK, dV of causal attention over [heads, tokens, head_dim]."""
    k, v = k.double(), v.double()
    dq, dk, dv = torch.empty_like(k), torch.zeros_like(k), torch.zeros_like(v)
    step = max(64, min(1024, 2**25 // k.shape[1]))
    for start in range(0, k.shape[1], step):
        end = min(start + step, k.shape[1])
        query, up = q[:, start:end].double(), grad[:, start:end].double()
        rows = torch.arange(start, end, device=k.device)[:, None]
        later = torch.arange(end, device=k.device) > rows
        p = torch.softmax((query @ k[:, :end].mT * scale).masked_fill_(later, -math.inf), -1)
        dp = up @ v[:, :end].mT
        dp = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[:, start:end] = dp @ k[:, :end]
        dk[:, :end] += dp.mT @ query
        dv[:, :end] += p.mT @ up
    return dq, dk, dv


def measure(case):
    """Run one case; return its row."""
    random = torch.Generator("cuda").manual_seed(case["seed"])
    shape = (1, HEADS, case["tokens"], case["head_dim"])
    q, k, v, grad = (torch.randn(shape, generator=random, device="cuda") for _ in range(4))
    q, k, v = ((x * factor).bfloat16().requires_grad_() for x, factor in ((q, case["score"]), (k, 1), (v, 1)))
    grad, scale = grad.bfloat16(), case["head_dim"] ** -0.5
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    found = torch.autograd.grad(out, (q, k, v), grad)
    wanted = exact_gradients(*(x.detach()[0] for x in (q, k, v, grad)), scale)
    row = {name: error(x[0], y) for name, x, y in zip(("dq", "dk", "dv"), found, wanted, strict=True)}
    floors = {f"floor_cast_{name}": error(x.bfloat16(), x) for name, x in zip(("dk", "dv"), wanted[1:], strict=True)}
    return {**case, **row, **floors}


def main():
    """Measure case after case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data", help="where the CSV file is")
    parser.add_argument("--seconds", type=float, default=500, help="begin no new case after that time")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    known, append = appended(arguments.data / "flash_norm.csv", CASE + ERRORS)
    for case in left(known):
        if time.monotonic() < end:
            append(row := measure(case))
            print(row, flush=True)


if __name__ == "__main__":
    main()
