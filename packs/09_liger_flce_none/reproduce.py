# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["liger-kernel==0.8.1", "numpy==2.3.5", "packaging==26.3", "torch==2.11.0", "triton==3.6.0"]
# ///
"""Liger's fused linear cross entropy with reduction="none" scales every gradient by the weight of the first token.

The losses are right. Weight them by token, as a loss mask does, and go backward: the gradients are those of the
unweighted sum times the weight of token 0. They are 0 where token 0 is masked out. No error, no warning.

Cause: forward makes the gradients in advance, and backward multiplies them by one scalar, which it loads from
grad_output. Reported in https://github.com/linkedin/Liger-Kernel/issues/968, fixed in release 0.8.2 by #1298.

    uv run reproduce.py                                # release 0.8.1: BUG_REPRODUCED, exit status 10
    PYTHONPATH=Liger-Kernel/src uv run reproduce.py    # patched checkout: FIX_VALIDATED, exit status 0
"""

import os
import sys

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
os.environ["TRITON_INTERPRET"] = str(int(device == "cpu"))  # read by the next import: kernels run on CPU tensors, too
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

torch.manual_seed(0)
hidden, head = (torch.randn(rows, 8, device=device, requires_grad=True) for rows in (4, 45))
labels = torch.randint(45, (4,), device=device)
right = {}
for name, mask in (("equal weights", [1.0, 1.0, 1.0, 1.0]), ("first token masked out", [0.0, 1.0, 0.5, 1.0])):
    weights = torch.tensor(mask, device=device)
    reference = torch.nn.functional.cross_entropy(hidden.double() @ head.double().T, labels, reduction="none")
    expected = torch.autograd.grad((reference * weights).sum(), (hidden, head))
    losses = LigerFusedLinearCrossEntropyLoss(reduction="none")(head, hidden, labels)
    gradients = torch.autograd.grad((losses * weights).sum(), (hidden, head))
    for tensor, x, y in zip(("hidden", "head"), gradients, expected, strict=True):
        print(f"{name}: the gradient of {tensor} has norm {x.norm():.4f}, expected {y.norm():.4f}")
    right[name] = all(torch.allclose(x, y, rtol=1e-3, atol=1e-5) for x, y in zip(gradients, expected, strict=True))

if not right["equal weights"]:
    print("UNSUPPORTED: gradients of equal weights are wrong already")
    sys.exit(125)
print("FIX_VALIDATED" if all(right.values()) else "BUG_REPRODUCED")
sys.exit(0 if all(right.values()) else 10)
