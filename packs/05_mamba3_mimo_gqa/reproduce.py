# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["apache-tvm-ffi==0.1.9", "einops==0.8.2", "numpy==2.3.5", "tilelang==0.1.8", "torch==2.11.0"]
# ///
"""Mamba-3 MIMO's backward raises "G value of 2 is not currently supported!" for 2 groups of 8 heads.

mamba_mimo_bwd_combined gets dQ and dK of each head from its kernels, and sums them over a group's heads only where
there is one group. The forward accepts every number that divides the heads. The varlen twin raises, too. The error
comes after both kernels. Stand-ins replace the kernels, so the script judges the sum alone, without a GPU. Control: one
group.
https://github.com/state-spaces/mamba/pull/967 has fixed the default branch; no release has it.

    PYTHONPATH=mamba_ssm-2.3.2.post1 uv run reproduce.py    # an unpacked sdist: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py                 # with the patch: FIX_VALIDATED, exit status 0
"""

import sys
from importlib.util import find_spec, module_from_spec

import torch

sys.modules["mamba_ssm"] = module_from_spec(find_spec("mamba_ssm"))  # its __init__ needs compiled extensions
from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo_bwd

B, S, R, H, N, P, chunk = 1, 64, 4, 8, 32, 64, 16
device = "cuda" if torch.cuda.is_available() else "cpu"


def write_head_numbers(*tensors):
    """Stand for both kernels: dQ and dK of head h are 2**h, so that each set of heads has a sum of its own."""
    for x in tensors:
        if x is not None and x.shape == (B, S * R, H, N):
            x.copy_(2.0 ** torch.arange(H)[:, None])


mamba3_mimo_bwd.mamba_mimo_bwd_fwd = mamba3_mimo_bwd.mamba_mimo_bwd_bwd = lambda *_, **__: write_head_numbers
mamba3_mimo_bwd.bwd_dtrap_ddt_triton = lambda *_, **__: (None, None)  # this and the next one follow the sums
mamba3_mimo_bwd.bwd_dadt_fused_triton = lambda *_, **__: 0


def backward(groups):
    """Return dQ and dK of upstream's backward: bfloat16, without MIMO_Out, Z and D."""
    qk, bias, step, decay = (B, S, R, groups, N), (H, R, N), (B, H, S), (B, H, S // chunk, chunk, chunk)
    shapes = [(B, S, R, H, P), qk, qk, (B, S, H, P), bias, bias, (H, R, P), None, None, None, (B, S, H, N // 4)]
    shapes += [step, step, step, step, None, decay]
    inputs = [None if shape is None else torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    return mamba3_mimo_bwd.mamba_mimo_bwd_combined(*inputs, chunk, 4, torch.bfloat16)[:2]


wrong = {}
for groups in (1, 2):
    right = (2.0 ** torch.arange(H)).view(groups, -1).sum(1)
    try:
        gradients = [x.float().cpu() for x in backward(groups)]
        print(f"{groups} of {H}: dQ, dK", *(x[0, 0, 0, :, 0].tolist() for x in gradients), f"(right: {right.tolist()})")
        wrong[groups] = not all(torch.equal(x, right[:, None].expand(B, S, R, -1, N)) for x in gradients)
    except ValueError as error:
        if "not currently supported" not in str(error):
            raise
        print(f"{groups} of {H}: ValueError: {error} (right: {right.tolist()})")
        wrong[groups] = True
    except RuntimeError as error:  # newer code sums over heads in a Triton kernel
        if "0 active drivers" not in str(error):
            raise
        print("UNSUPPORTED: the sum over heads needs a GPU")
        sys.exit(125)
if wrong[1]:
    print("UNSUPPORTED: a single group is wrong already")
    sys.exit(125)
print("BUG_REPRODUCED" if wrong[2] else "FIX_VALIDATED")
sys.exit(10 if wrong[2] else 0)
