# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["megatron-core==0.19.2", "numpy==2.3.5", "packaging==26.3", "torch==2.11.0", "triton==3.6.0"]
# ///
"""DSA without fused kernels makes tensors of 4 GiB where 0.25 GiB would do, for 8192 tokens and 16 indexer heads.

It holds the indexer's scores of all heads at once, [queries, batch, heads, keys] in fp32: in the top-k, in the
indexer loss, and again in its backward. Only their sum over heads is used. One head must make its own scores alone.
Met in https://github.com/modelscope/mcore-bridge/issues/36. Without a GPU, tensors are on meta: they have no data.

    uv run reproduce.py                        # megatron-core 0.19.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a checkout with the patch: FIX_VALIDATED, exit status 0
"""

import sys
from types import SimpleNamespace

import torch
from megatron.core.transformer.experimental_attention_variant import dsa
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOKENS, HEADS, DEVICE = 8192, 16, "cuda" if torch.cuda.is_available() else "meta"


class Sizes(TorchDispatchMode):
    """Notes the GiB of each tensor that an operator returns."""

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        sizes.extend(x.nbytes / 2**30 for x in tree_leaves(result) if torch.is_tensor(x))
        return result


largest = {}  # GiB, of a step: the top-k, the loss, and its backward
for heads in (1, HEADS):
    shapes = (heads, 32), (heads,), (32,), (1, 32), (1, 32)  # q, weights and k of the indexer; query and key
    inputs = [torch.zeros(TOKENS, 1, *x, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for x in shapes]
    one_rank, sizes = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)), []
    with Sizes():
        dsa.FusedDSAIndexerLoss.apply(*inputs, 32**-0.5, 256, 1.0, None, False, one_rank)[1].backward()
    largest[heads] = max(sizes)
print(f"largest tensor: {largest[HEADS]:.2f} GiB with {HEADS} heads, {largest[1]:.2f} GiB with 1; right: below 1 GiB")
if not 0.25 <= largest[1] < 0.5:  # GiB, of the scores of one head in fp32
    print("UNSUPPORTED: with 1 head the largest tensor is not that head's scores")
    sys.exit(125)
is_fixed = largest[HEADS] < 1  # all heads' scores take 1 GiB even with a byte each
print("FIX_VALIDATED" if is_fixed else "BUG_REPRODUCED")
sys.exit(0 if is_fixed else 10)
