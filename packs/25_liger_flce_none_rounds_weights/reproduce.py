# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["liger-kernel==0.8.5", "numpy==2.3.5", "packaging==26.3", "torch==2.11.0", "triton==3.6.0"]
# ///
"""Liger's fused linear cross entropy with reduction="none" rounds each token's weight to bfloat16 before the product.

The weights come as float32. 1 and 1 + 2^-8 give the same gradient of a bfloat16 input, bit for bit. Eager PyTorch
gives two gradients, and so does Liger for a float32 input. Since 0.8.2, which lets each token have its own weight:
https://github.com/linkedin/Liger-Kernel/pull/1298

    uv run reproduce.py                                # release 0.8.5: BUG_REPRODUCED, exit status 10
    PYTHONPATH=Liger-Kernel/src uv run reproduce.py    # patched checkout: FIX_VALIDATED, exit status 0
"""

import os
import sys

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
os.environ["TRITON_INTERPRET"] = str(int(device == "cpu"))  # read by the next import: kernels run on CPU tensors, too
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

labels = torch.arange(64, device=device) % 45


def eager(head, hidden, labels):
    """Return the loss of each token by plain PyTorch."""
    return torch.nn.functional.cross_entropy((hidden @ head.T).float(), labels, reduction="none")


def changed(losses, dtype):
    """Return which part of the input's gradient changes with a weight of 1 + 2^-8 in place of 1."""
    torch.manual_seed(0)
    hidden, head = (torch.randn(rows, 16, device=device, dtype=dtype, requires_grad=True) for rows in (64, 45))
    weighted = [losses(head, hidden, labels) * weight for weight in (1.0, 1.0 + 2**-8)]
    first, second = (torch.autograd.grad(loss.sum(), hidden)[0] for loss in weighted)
    return (first != second).float().mean().item()


liger = LigerFusedLinearCrossEntropyLoss(reduction="none")
changes = {dtype: changed(liger, dtype) for dtype in (torch.float32, torch.bfloat16)}
for dtype, part in changes.items():
    print(f"{dtype}: {part:.0%} of the gradient changes with the weight; eager PyTorch: {changed(eager, dtype):.0%}")
if changes[torch.float32] < 0.9:
    print("UNSUPPORTED: float32 weights have no effect, too")
    sys.exit(125)
right = changes[torch.bfloat16] > 0.25  # not all of it: rounding the gradient itself hides some changes
print("FIX_VALIDATED" if right else "BUG_REPRODUCED")
sys.exit(0 if right else 10)
