# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["liger-kernel==0.8.5", "numpy==2.3.5", "packaging==26.3", "torch==2.11.0", "triton==3.6.0"]
# ///
"""Liger's fused linear cross entropy with reduction="none" rounds each token's weight to bfloat16 before the product.

The weights come as float32. A weight of 1 + 2^-8 acts as 1 on the gradient of a bfloat16 input. In eager PyTorch it
acts as itself but for rounding; in Liger it does for a float32 input. Since 0.8.2, when each token got its own weight:
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

WEIGHT = 1 + 2**-8
labels = torch.arange(128, device=device) % 4


def eager(head, hidden, labels):
    """Return the loss of each token by plain PyTorch."""
    return torch.nn.functional.cross_entropy((hidden @ head.T).float(), labels, reduction="none")


def applied_weight(losses, dtype):
    """Weigh each token's loss; return the factor by which that scales the input's gradient, as its projection."""
    torch.manual_seed(0)
    hidden, head = (torch.randn(rows, 4, device=device, dtype=dtype, requires_grad=True) for rows in (128, 4))
    results = (losses(head, hidden, labels) * weight for weight in (1.0, WEIGHT))
    unweighted, weighted = (torch.autograd.grad(loss.sum(), hidden)[0].double() for loss in results)
    return ((weighted * unweighted).sum() / unweighted.square().sum()).item()


liger = LigerFusedLinearCrossEntropyLoss(reduction="none")
right = {}
for dtype in (torch.float32, torch.bfloat16):
    weight, reference = applied_weight(liger, dtype), applied_weight(eager, dtype)
    print(f"{dtype}: the weight {WEIGHT:.5f} acts as {weight:.5f}; in eager PyTorch as {reference:.5f}")
    right[dtype] = abs(weight - WEIGHT) < 2**-9  # half of the 2^-8 that is lost; other roundings nearly cancel
if not right[torch.float32]:
    print("UNSUPPORTED: float32 weights are wrong, too")
    sys.exit(125)
print("FIX_VALIDATED" if right[torch.bfloat16] else "BUG_REPRODUCED")
sys.exit(0 if right[torch.bfloat16] else 10)
