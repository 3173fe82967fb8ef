# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["megatron-core==0.19.2", "tilelang==0.1.8", "apache-tvm-ffi==0.1.9", "torch==2.11.0", "triton==3.6.0"]
# ///
"""Megatron's TileLang backend declines absorbed MLA of 64 + 64 (latent + RoPE dimension) without a warning.

It accepts DeepSeek V3.2's 512 + 64 alone, the control. With other dimensions, attention takes the unfused path, which
holds [B, H, S, S] scores. Right is an output, or a warning. Without a GPU, PyTorch replaces the forward kernel, and the
errors of the outputs say nothing about the kernel.

    uv run reproduce.py                        # megatron-core 0.19.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a checkout with the patch: FIX_VALIDATED, exit status 0
"""

import logging
import os
import sys
import warnings
from types import SimpleNamespace

import torch
from megatron.core.transformer.experimental_attention_variant import dsa_kernels
from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa, tilelang_sparse_mla_fwd

os.environ.setdefault("RANK", "0")  # else Megatron warns that it knows none
SCALE, records, handler = 0.1, [], logging.Handler(logging.WARNING)
handler.emit = records.append
logging.getLogger("megatron").addHandler(handler)


def attention(query, key, indices, latent):
    """Attend to the keys that the indices of each query name; their first `latent` columns are the values."""
    chosen = key.squeeze()[indices.squeeze().long()]
    return (query.squeeze() @ chosen.mT * SCALE).softmax(-1) @ chosen[..., :latent]


def stand_in(_heads, latent, *_, **__):
    """Return what stands for the forward kernel. Its second result, the log-sum-exp, is not read."""
    return lambda q, k, i: (attention(q.float(), k.float(), i, latent)[None].bfloat16(), q[..., 0].float())


def is_right(latent, rope, *, may_decline):
    """Call the hook of DSAttention with 256 tokens and 16 heads; each token attends to 64 keys. Judge its answer."""
    query, key = (torch.randn(256, 1, heads, latent + rope).bfloat16().to(device) for heads in (16, 1))
    indices = torch.rand(1, 256, 256, device=device).argsort(-1)[..., :64]
    config = SimpleNamespace(dsa_kernel_backend="tilelang")
    records.clear()
    with warnings.catch_warnings(record=True, action="always") as caught:
        output = dsa_kernels.run_fused_absorbed_sparse_attention(config, query, key, indices, SCALE, latent)
    if output is None:
        texts = [record.getMessage() for record in records]
        texts += [str(warning.message) for warning in caught if "megatron" in warning.filename]
        print(f"{latent} + {rope}: declined, warnings: {texts}; right: an output{', or a warning' * may_decline}")
        return may_decline and len(texts) > 0
    expected = attention(query.double(), key.double(), indices, latent)
    error = float((output.squeeze() - expected).norm() / expected.norm())
    print(f"{latent} + {rope}: the relative error of the output is {error:.1e}; right: at most 1e-2")
    return error <= 0.01  # bfloat16 rounds probabilities and output by 2**-9 each


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    tilelang_sparse_mla_fwd.sparse_mla_fwd = stand_in
if tilelang_dsa.SparseMLA is None or not is_right(512, 64, may_decline=False):
    print("UNSUPPORTED: needs tilelang 0.1.8, or 512 + 64 is wrong too")
    sys.exit(125)
fixed = is_right(64, 64, may_decline=True)
print("FIX_VALIDATED" if fixed else "BUG_REPRODUCED")
sys.exit(0 if fixed else 10)
