# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["megatron-core==0.19.2", "tilelang==0.1.8", "apache-tvm-ffi==0.1.9", "torch==2.11.0", "triton==3.6.0"]
# ///
"""Megatron's TileLang backend declines absorbed MLA of 64 + 64 (latent + RoPE dimension), and 0 warnings say so.

So does it for all dimensions but DeepSeek V3.2's 512 + 64. Attention then takes the unfused path, which holds
[B, H, S, S] scores; one DEBUG message says so. Right is an output, or a warning. On a GPU the output is compared with
float64. Without one, a stand-in for the builder of the forward kernel notes the dimensions that it is asked for.

    uv run reproduce.py                        # megatron-core 0.19.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT python reproduce.py    # a checkout with the patch: FIX_VALIDATED, exit status 0
"""

import logging
import sys
from types import SimpleNamespace

import torch
from megatron.core.transformer.experimental_attention_variant import dsa_kernels
from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa, tilelang_sparse_mla_fwd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, HEADS, TOP_K, SCALE = 256, 16, 64, 0.1
built, warnings = [], []
logging.getLogger("megatron").addHandler(handler := logging.Handler(logging.WARNING))
handler.emit = warnings.append


def stand_in(heads, latent, rope, *_, **__):
    """Note the dimensions; return a kernel that gives zeros in place of output and log-sum-exp."""
    built.append((latent, rope))
    return lambda query, *_: (query.new_zeros(1, LENGTH, heads, latent), torch.zeros(1, LENGTH, heads))


def is_right(latent, rope):
    """Call the hook of DSAttention, and judge its answer."""
    config = SimpleNamespace(dsa_kernel_backend="tilelang")
    query, key = (torch.randn(LENGTH, 1, heads, latent + rope, device=DEVICE).bfloat16() for heads in (HEADS, 1))
    indices = torch.rand(1, LENGTH, LENGTH, device=DEVICE).argsort(-1)[..., :TOP_K]
    output = dsa_kernels.run_fused_absorbed_sparse_attention(config, query, key, indices, SCALE, latent)
    if output is None:
        print(f"{latent} + {rope}: declined with {len(warnings)} warnings, right is an output or a warning")
        return len(warnings) > 0
    if DEVICE == "cpu":
        print(f"{latent} + {rope}: the forward kernel is built for {built[-1]}, right is {latent, rope}")
        return built[-1] == (latent, rope)
    chosen = key[:, 0, 0].double()[indices[0]]  # [queries, top-k, dimensions]
    weights = torch.einsum("shd,skd->shk", query[:, 0].double() * SCALE, chosen).softmax(-1)
    error = float((output[:, 0] - (expected := weights @ chosen[..., :latent])).norm() / expected.norm())
    print(f"{latent} + {rope}: the relative error of the output is {error:.1e}, right is at most 1e-2")
    return error <= 0.01  # bfloat16 rounds probabilities and output by 2**-9 each


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
