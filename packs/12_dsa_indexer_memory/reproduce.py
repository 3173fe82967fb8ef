# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["megatron-core==0.19.2", "numpy==2.3.5", "packaging==26.3", "torch==2.11.0", "triton==3.6.0"]
# ///
"""DSA without fused kernels makes tensors of 4 GiB where 0.25 GiB would do, for 8192 tokens and 16 indexer heads.

The fp32 scores of all heads are held at once, though forward uses only their sum and backward can compute them again.
Values and peak memory are not judged. A user's case: https://github.com/modelscope/mcore-bridge/issues/36

    uv run reproduce.py                        # megatron-core 0.19.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a checkout with the patch: FIX_VALIDATED, exit status 0
"""

import sys
from types import SimpleNamespace

import torch
from megatron.core.transformer.experimental_attention_variant import dsa
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, HEADS, DEVICE = 8192, 16, "cuda" if torch.cuda.is_available() else "meta"  # tensors on meta have no data
sizes = {1: [], HEADS: []}  # by the number of heads: the GiB of each tensor that an operator returns


class Sizes(TorchDispatchMode):
    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        sizes[heads].append(getattr(result, "nbytes", 0) / 2**30)
        return result


one_rank = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
for heads in sizes:
    shapes = (heads, 32), (heads,), (32,), (1, 32), (1, 32)  # q, weights and k of the indexer; query and key
    inputs = [torch.zeros(TOKENS, 1, *x, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for x in shapes]
    with Sizes():
        dsa.FusedDSAIndexerLoss.apply(*inputs, 32**-0.5, 256, 1.0, None, False, one_rank)[1].backward()
of_one, of_all = (max(x) for x in sizes.values())
print(f"largest tensor: {of_all:.2f} GiB with {HEADS} heads, {of_one:.2f} GiB with 1; right: below 1 GiB")
if not 0.25 <= of_one < 0.5:  # GiB, of the scores of one head in fp32
    print("UNSUPPORTED: with 1 head the largest tensor is not that head's scores")
    sys.exit(125)
is_fixed = of_all < 1  # all heads' scores take 1 GiB even with a byte each
print("FIX_VALIDATED" if is_fixed else "BUG_REPRODUCED")
sys.exit(0 if is_fixed else 10)
