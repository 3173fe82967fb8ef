# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["liger-kernel==0.8.5", "numpy==2.3.5", "packaging==26.3", "torch==2.11.0", "triton==3.6.0"]
# ///
"""Liger's fused linear cross entropy with reduction="none" rounds the weight of each token's loss to bfloat16.

A weight of 1 + 2^-8 acts as 1 on a bfloat16 input's gradient. Since https://github.com/linkedin/Liger-Kernel/pull/1298

    uv run reproduce.py                                # release 0.8.5: BUG_REPRODUCED, exit status 10
    PYTHONPATH=Liger-Kernel/src uv run reproduce.py    # patched checkout: FIX_VALIDATED, exit status 0
"""

import os

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
os.environ["TRITON_INTERPRET"] = str(int(device == "cpu"))  # read by the next import: kernels run on CPU tensors, too
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

WEIGHT = 1 + 2**-8
labels = torch.arange(32, device=device) % 4


def factor(dtype, *, fused):
    """Weigh the loss of each token by 1 and by WEIGHT; return what the weight multiplies the input's gradient by."""
    torch.manual_seed(0)
    hidden, head = (torch.randn(rows, 4, device=device, dtype=dtype, requires_grad=True) for rows in (32, 4))
    gradients = []
    for weight in (1.0, WEIGHT):
        eager = torch.nn.functional.cross_entropy((hidden @ head.T).float(), labels, reduction="none")
        losses = LigerFusedLinearCrossEntropyLoss(reduction="none")(head, hidden, labels) if fused else eager
        gradients.append(torch.autograd.grad((losses * weight).sum(), hidden)[0].double())
    return ((gradients[0] * gradients[1]).sum() / gradients[0].square().sum()).item()  # by projection on the first


for dtype in (torch.float32, torch.bfloat16):
    acting, reference = factor(dtype, fused=True), factor(dtype, fused=False)
    print(f"{dtype}: the weight {WEIGHT:.5f} acts as {acting:.5f}; in eager PyTorch as {reference:.5f}")
    right = abs(acting - WEIGHT) < 2**-9  # half of the 2^-8 that is lost; other roundings nearly cancel
    if dtype == torch.float32 and not right:
        print("UNSUPPORTED: float32 weights are wrong, too")
        raise SystemExit(125)
print("FIX_VALIDATED" if right else "BUG_REPRODUCED")
raise SystemExit(0 if right else 10)
