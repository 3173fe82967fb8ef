# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["liger-kernel==0.8.5", "numpy==2.3.5", "packaging==26.3", "torch==2.11.0", "triton==3.6.0"]
# ///
"""A second backward through Liger's fused linear cross entropy scales its gradients twice.

Go backward twice through loss * 2 (retain_graph=True): the second gradient is twice the right one, without an error.
Cause: backward scales the saved gradients in place, in a Triton kernel whose writes autograd cannot see.
reduction="sum" has the bug, too. Since https://github.com/linkedin/Liger-Kernel/pull/1298, "none" is right.
The script runs "mean" alone.

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
hidden, head = (torch.randn(rows, 8, device=device, requires_grad=True) for rows in (13, 45))
labels = torch.randint(45, (13,), device=device)
reference = torch.nn.functional.cross_entropy(hidden.double() @ head.double().T, labels) * 2
expected = torch.autograd.grad(reference, (head, hidden))

loss = LigerFusedLinearCrossEntropyLoss()(head, hidden, labels) * 2
right = {}
for backward in ("first", "second"):
    gradients = torch.autograd.grad(loss, (head, hidden), retain_graph=True)
    for name, actual, correct in zip(("head", "hidden"), gradients, expected, strict=True):
        print(
            f"{backward} backward: the gradient of {name} has norm {actual.norm():.4f}, expected {correct.norm():.4f}"
        )
        right[backward, name] = torch.allclose(actual, correct, rtol=1e-3, atol=1e-5)
if not right["first", "head"] or not right["first", "hidden"]:
    print("UNSUPPORTED: the first backward is wrong already")
    sys.exit(125)
print("FIX_VALIDATED" if all(right.values()) else "BUG_REPRODUCED")
sys.exit(0 if all(right.values()) else 10)
