# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["megatron-core==0.19.2", "tilelang==0.1.8", "apache-tvm-ffi==0.1.9", "torch==2.11.0", "triton==3.6.0"]
# ///
"""Megatron's fused sparse MLA answers None for latent + RoPE dimensions of 64 + 64: no kernel runs, and nobody is told.

So does it for all dimensions but DeepSeek V3.2's 512 + 64: fused_sparse_mla_absorbed returns None unless query and key
are 576 wide and v_channels is 512, and attention takes the unfused path, which holds [B, H, S, S] scores. The kernels
take both dimensions as arguments, but what calls them does not pass them on. On a GPU the output is compared with
float64. Without one, a stand-in for the builder of the forward kernel notes the dimensions that it is asked for.
https://github.com/NVIDIA/Megatron-LM/pull/5049 brought the dispatcher.

    uv run reproduce.py                        # megatron-core 0.19.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT python reproduce.py    # a checkout with the patch: FIX_VALIDATED, exit status 0
"""

import sys

import torch
from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa, tilelang_sparse_mla_fwd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, HEADS, TOP_K, SCALE = 256, 16, 64, 0.1
TOLERANCE = 0.01  # bfloat16 rounds probabilities and output by 2**-9 each
asked = []


def stand_in(heads, latent, rope, *_, **__):
    """Note the dimensions; return a kernel that gives zeros in place of output and log-sum-exp."""
    asked.append((latent, rope))
    return lambda query, *_: (query.new_zeros(1, LENGTH, heads, latent), torch.zeros(1, LENGTH, heads))


def is_right(latent, rope):
    """Ask the dispatcher, and judge its answer."""
    query, key = (torch.randn(LENGTH, 1, heads, latent + rope, device=DEVICE).bfloat16() for heads in (HEADS, 1))
    indices = torch.rand(1, LENGTH, LENGTH, device=DEVICE).argsort(-1)[..., :TOP_K]
    output = tilelang_dsa.fused_sparse_mla_absorbed(query, key, indices, SCALE, latent)
    if output is None:
        print(f"{latent} + {rope}: the answer is None, right is an output of {LENGTH} x 1 x {HEADS} x {latent}")
        return False
    if DEVICE == "cpu":
        print(f"{latent} + {rope}: the forward kernel is built for {asked[-1]}, right is {latent, rope}")
        return asked[-1] == (latent, rope)
    chosen = key[:, 0, 0].double()[indices[0]]  # [queries, top-k, dimensions]
    weights = torch.einsum("shd,skd->shk", query[:, 0].double() * SCALE, chosen).softmax(-1)
    expected = weights @ chosen[..., :latent]
    error = float((output[:, 0] - expected).norm() / expected.norm())
    print(f"{latent} + {rope}: the relative error of the output is {error:.1e}, right is at most {TOLERANCE}")
    return error <= TOLERANCE


if tilelang_dsa.SparseMLA is None:
    print("UNSUPPORTED: needs tilelang 0.1.8")
    sys.exit(125)
if DEVICE == "cpu":
    tilelang_sparse_mla_fwd.sparse_mla_fwd = stand_in
if not is_right(512, 64):
    print("UNSUPPORTED: 512 + 64 is wrong too")
    sys.exit(125)
fixed = is_right(64, 64)
print("FIX_VALIDATED" if fixed else "BUG_REPRODUCED")
sys.exit(0 if fixed else 10)
