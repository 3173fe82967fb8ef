# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["megatron-core==0.19.2", "numpy==2.3.5", "packaging==26.3", "torch==2.11.0", "triton==3.6.0"]
# ///
"""DSA without fused kernels makes tensors of 4 GiB where 0.25 GiB would do, for 8192 tokens and 16 indexer heads.

It holds the indexer's scores of all heads at once, [queries, batch, heads, keys] in fp32: in the top-k, in the
indexer loss, and again in its backward. Only their sum over heads is used. modelscope/mcore-bridge#36 is a user.

    uv run reproduce.py                         # megatron-core 0.19.2; without a GPU it uses tensors without data
    PYTHONPATH=CHECKOUT python reproduce.py     # a patched checkout of Megatron-LM
"""

import sys
import types

import torch
from megatron.core.transformer.experimental_attention_variant import dsa
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOKENS, HEADS, WIDTH, TOPK = 8192, 16, 32, 256
ONE_HEAD = 4 * TOKENS * TOKENS  # bytes of one head's scores, and of the sum over heads
device = "cuda" if torch.cuda.is_available() else "meta"
one_rank = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 1))


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operator returns."""

    bytes = 0

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.bytes = max([self.bytes, *(x.nbytes for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


def largest_tensor(heads):
    """Return the bytes of the largest tensor in a step: the top-k, the loss, and its backward."""
    shapes = {"q": (heads, WIDTH), "weights": (heads,), "k": (WIDTH,), "query": (1, WIDTH), "key": (1, WIDTH)}
    inputs = {name: torch.zeros(TOKENS, 1, *shape, device=device).bfloat16() for name, shape in shapes.items()}
    for name in ("q", "weights", "k"):
        inputs[name].requires_grad_()
    with Largest() as mode:
        loss = dsa.FusedDSAIndexerLoss.apply(*inputs.values(), WIDTH**-0.5, TOPK, 1.0, None, False, one_rank)[1]
        loss.backward()
    return mode.bytes


single, many = largest_tensor(1), largest_tensor(HEADS)
print(f"largest tensor of a step: {many / 2**30:.2f} GiB with {HEADS} heads, {single / 2**30:.2f} GiB with 1 head")
if not ONE_HEAD <= single < 2 * ONE_HEAD:  # right in the release, too
    print("UNSUPPORTED: with 1 head the largest tensor is not that head's scores")
    sys.exit(125)
# A tensor with a byte or more for each query, head and key grows by a quarter of ONE_HEAD a head.
wrong = many - single > (HEADS - 1) * ONE_HEAD / 4
print("BUG_REPRODUCED" if wrong else "FIX_VALIDATED")
sys.exit(10 if wrong else 0)
