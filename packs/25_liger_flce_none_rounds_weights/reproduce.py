# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["liger-kernel==0.8.5", "numpy==2.3.5", "packaging==26.3", "torch==2.11.0", "triton==3.6.0"]
# ///
"""Liger's fused linear cross entropy with reduction="none" rounds each token's weight to bfloat16 before the product.

The weights come as float32. 1 and 1 + 2^-8 give the same gradient of a bfloat16 input, bit for bit; eager PyTorch tells
them apart, and a float32 input must. Since 0.8.2, which lets each token have its own weight:
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

torch.manual_seed(0)
labels = torch.randint(45, (64,), device=device)


def changed(dtype):
    """Return how many elements of the input's gradient change with a weight of 1 + 2^-8 in place of 1."""
    hidden, head = (torch.randn(rows, 16, device=device, dtype=dtype, requires_grad=True) for rows in (64, 45))
    gradients = []
    for weight in (1.0, 1.0 + 2**-8):
        losses = LigerFusedLinearCrossEntropyLoss(reduction="none")(head, hidden, labels)
        gradients += torch.autograd.grad((losses * weight).sum(), hidden)
    different = (gradients[0] != gradients[1]).sum().item()
    print(f"{dtype}: {different} of {hidden.numel()} elements change with the weight; expected: more than half")
    return different > hidden.numel() // 2  # not all: bfloat16 also rounds the gradient, which hides some changes


if not changed(torch.float32):
    print("UNSUPPORTED: float32 weights have no effect, too")
    sys.exit(125)
right = changed(torch.bfloat16)
print("FIX_VALIDATED" if right else "BUG_REPRODUCED")
sys.exit(0 if right else 10)
