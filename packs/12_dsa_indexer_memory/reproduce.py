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
ONE_RANK = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))


class Sizes(TorchDispatchMode):
    """Notes the GiB of each tensor that an operator returns."""

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.seen = [*getattr(self, "seen", []), *(x.nbytes / 2**30 for x in tree_leaves(result) if torch.is_tensor(x))]
        return result


def largest_tensor(heads):
    """Return the GiB of the largest tensor in a step: the top-k, the loss, and its backward."""
    shapes = (heads, 32), (heads,), (32,), (1, 32), (1, 32)  # q, weights and k of the indexer; query and key
    inputs = [torch.zeros(TOKENS, 1, *x, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for x in shapes]
    with Sizes() as sizes:
        dsa.FusedDSAIndexerLoss.apply(*inputs, 32**-0.5, 256, 1.0, None, False, ONE_RANK)[1].backward()
    return max(sizes.seen)


single, many = largest_tensor(1), largest_tensor(HEADS)
print(f"largest tensor of a step: {many:.2f} GiB with {HEADS} heads, {single:.2f} GiB with 1 head; right: below 1 GiB")
if not 0.25 <= single < 0.5:  # GiB, of the scores of one head in fp32
    sys.exit(print("UNSUPPORTED: with 1 head the largest tensor is not that head's scores") or 125)
fixed = many < 1  # all heads' scores take 1 GiB even with a byte each
print("FIX_VALIDATED" if fixed else "BUG_REPRODUCED")
sys.exit(0 if fixed else 10)
