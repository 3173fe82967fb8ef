# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["liger-kernel==0.8.5", "numpy==2.3.5", "packaging==26.3", "torch==2.11.0", "triton==3.6.0"]
# ///
"""Liger's fused linear cross entropy gives a head no gradient if its input is frozen, and raises no error.

A new lm_head on a frozen model is such a head. Release 0.6.2 is right, 0.6.3 raises, and 0.6.4 to 0.8.5 leave grad
at None. Forward makes gradients only if the input is trained: https://github.com/linkedin/Liger-Kernel/pull/931

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
labels = torch.randint(45, (13,), device=device)
right = {}
for name, trained in (("trained", True), ("frozen", False)):
    hidden = torch.randn(13, 8, device=device, requires_grad=trained)
    head = torch.randn(45, 8, device=device, requires_grad=True)
    torch.nn.functional.cross_entropy(hidden.double() @ head.double().T, labels).backward()
    expected, head.grad = head.grad, None
    LigerFusedLinearCrossEntropyLoss()(head, hidden, labels).backward()
    norm = "None" if head.grad is None else f"{head.grad.norm():.4f}"
    print(f"input {name}: the head's gradient has norm {norm}, expected {expected.norm():.4f}")
    right[name] = head.grad is not None and torch.allclose(head.grad, expected, rtol=1e-3, atol=1e-5)

if not right["trained"]:
    print("UNSUPPORTED: the gradient is wrong with a trained input, too")
    sys.exit(125)
print("FIX_VALIDATED" if right["frozen"] else "BUG_REPRODUCED")
sys.exit(0 if right["frozen"] else 10)
