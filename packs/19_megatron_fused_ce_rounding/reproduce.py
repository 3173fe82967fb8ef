# /// script
# requires-python = ">=3.12"
# dependencies = ["megatron-core==0.19.2", "numpy==2.3.5", "packaging==26.3", "torch==2.13.0"]
# ///
"""Fused vocab-parallel cross entropy: the gradient of fp32 and fp16 logits is only as exact as bfloat16.

The loss is exact and autograd casts the gradient back to the logits' dtype, so nothing shows. The relative error of the
gradient of fp32 logits is 8e-4; the unfused function has 2e-8.

Cause: calculate_gradients in megatron/core/fusions/fused_cross_entropy.py ends in `grad_input.to(torch.bfloat16)`.
Related: https://github.com/NVIDIA/Megatron-LM/pull/7229

    uv run reproduce.py                                  # megatron-core 0.19.2
    PYTHONPATH=CHECKOUT uv run reproduce.py              # a checkout of Megatron-LM
"""

import os
import sys
import tempfile

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # compiling takes a minute and does not change the result

import torch
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

store = f"file://{tempfile.mkdtemp()}/store"
torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
group = torch.distributed.group.WORLD
torch.manual_seed(0)
logits = torch.randn(64, 2, 1024)  # sequence, batch, vocabulary
labels = torch.randint(1024, (64, 2))


def gradient_error(loss_function, dtype):
    """Return the relative error of the logits' gradient against float64."""
    leaf = logits.to(dtype, copy=True).requires_grad_()
    loss_function(leaf.clone(), labels, tp_group=group).sum().backward()  # a clone: fp32 logits are overwritten
    exact = leaf.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return ((leaf.grad.double() - exact.grad).norm() / exact.grad.norm()).item()


wrong = False
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    fused = gradient_error(fused_vocab_parallel_cross_entropy, dtype)
    unfused = gradient_error(vocab_parallel_cross_entropy, dtype)
    limit = 2.0**-17 + (0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2)  # one rounding to the dtype
    print(f"relative error of the gradient of {dtype} logits: fused {fused:.1e}, unfused {unfused:.1e}")
    if unfused > limit or (dtype == torch.bfloat16 and fused > limit):
        print("UNSUPPORTED: a gradient that should be right is wrong")
        sys.exit(125)
    wrong = wrong or fused > limit

print("BUG_REPRODUCED" if wrong else "FIX_VALIDATED")
sys.exit(10 if wrong else 0)
