# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["megatron-core==0.19.2", "numpy==2.3.5", "packaging==26.3", "torch==2.11.0", "triton==3.6.0"]
# ///
"""Megatron DSA: the backward of the indexer's loss makes 1 copy from the host, not 0, so no CUDA graph captures it.

bwd_fused_indexer_loss_naive makes the number of rows with torch.tensor(float(b * sq), device=...), and a capture
refuses that: "Cannot copy between CPU and CUDA tensors during CUDA graph capture". Control: the loss per token, a sum
over rows, needs no such number. On a GPU the script captures both. Without one it takes meta tensors through the same
lines, and counts the calls of torch.tensor(number, device=...). It then finds no other copy.

    uv run reproduce.py                        # megatron-core 0.19.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a checkout with the patch: FIX_VALIDATED, exit status 0
"""

import sys
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import FusedDSAIndexerLoss

DEVICE = "cuda" if torch.cuda.is_available() else "meta"
SHAPES = (32, 2, 3, 4), (32, 2, 3), (32, 2, 4), (32, 2, 2, 4), (32, 2, 2, 4)  # q, weights, k, query, key
inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in SHAPES]


def step(per_token):
    """Go forward and backward through the loss, which is a mean over all rows or, per token, a sum."""
    one_rank = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    scale_topk_coefficient, masks = (0.5, 6, 0.7), (None, None, None, None)
    _, loss = FusedDSAIndexerLoss.apply(*inputs, *scale_topk_coefficient, None, False, one_rank, *masks, per_token)
    torch.autograd.grad(loss, inputs[:3])


def obstacles(per_token):
    """Count the captures that fail; without a GPU, the tensors that a step makes on the device from numbers."""
    with mock.patch("torch.tensor", wraps=torch.tensor) as literal:
        step(per_token)  # on a GPU: a warm-up
    if DEVICE == "meta":
        return sum("device" in call.kwargs for call in literal.mock_calls)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step(per_token)
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        print(error.__context__ or error)
        return 1
    return 0


what = "copies from the host" if DEVICE == "meta" else "failed captures"
per_token, mean = obstacles(per_token=True), obstacles(per_token=False)  # in this order: a failed capture breaks CUDA
print(f"loss per token: {per_token} {what}, right is 0\nloss as a mean: {mean} {what}, right is 0")
if per_token:
    print("UNSUPPORTED: the loss per token, which needs no number of rows, is wrong too")
    sys.exit(125)
print("BUG_REPRODUCED" if mean else "FIX_VALIDATED")
sys.exit(10 if mean else 0)
