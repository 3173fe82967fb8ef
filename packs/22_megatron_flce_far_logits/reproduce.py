# /// script
# requires-python = ">=3.12"
# dependencies = ["numpy==2.3.5", "packaging==26.3", "torch==2.13.0", "triton==3.6.0"]
# ///
"""cross_entropy_fusion_impl="linear": a token whose logits are all below about -104 has the loss -inf.

Twenty logits of -150 have the cross entropy log(20) = 2.9957, whatever the level. The kernel returns -inf.

Cause: forward_dp_epilogue of megatron/core/fusions/linear_cross_entropy/blackwell/triton.py starts its running maximum
at 0, so exp(logit - maximum) underflows. It is on the branch dev only, so there is no package to install.
Related: https://github.com/NVIDIA/Megatron-LM/pull/2256

    PYTHONPATH=CHECKOUT uv run reproduce.py              # the branch dev, and the same with the patch
"""

import importlib.util
import math
import os
import sys
from pathlib import Path

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import megatron.core

# The kernel's file by itself: the package around it needs the CuTe DSL and a Blackwell GPU.
path = Path(megatron.core.__path__[0], "fusions/linear_cross_entropy/blackwell/triton.py")
if not path.exists():
    print("UNSUPPORTED: this Megatron-LM has no linear cross entropy fusion")
    sys.exit(125)
spec = importlib.util.spec_from_file_location("epilogue", path)
epilogue = importlib.util.module_from_spec(spec)
spec.loader.exec_module(epilogue)

# What the main loop hands over for one split of 20 classes, whose logits are all equal to the token's level.
levels = [0.0, -50.0, -95.0, -150.0]
tokens, classes = len(levels), 20
split_maximum = torch.tensor(levels, device=device).unsqueeze(1)
split_sum = torch.full((tokens, 1), float(classes), device=device)  # of exp(logit - maximum)
loss = torch.tensor(levels, device=device)  # the label's logit, which the kernel replaces by the loss
labels = torch.zeros(tokens, dtype=torch.int64, device=device)
valid_tokens = torch.tensor([tokens], device=device)
maximum, total, reduced_loss = (torch.empty(tokens, device=device) for _ in range(3))
epilogue.forward_dp_epilogue[(1,)](
    tokens, 1, -100, labels, 1, valid_tokens, split_maximum, *split_maximum.stride(), split_sum, *split_sum.stride(),
    maximum, 1, total, 1, loss, 1, reduced_loss, REDUCTION=0,
)  # fmt: skip

expected = math.log(classes)
for level, value in zip(levels, loss.tolist(), strict=True):
    print(f"{classes} logits of {level:6}: loss {value:8.5f}, expected {expected:.5f}")
right = [abs(value - expected) < 1e-4 for value in loss.tolist()]
if not right[0]:
    print("UNSUPPORTED: the loss is wrong for logits of 0, too")
    sys.exit(125)
print("FIX_VALIDATED" if all(right) else "BUG_REPRODUCED")
sys.exit(0 if all(right) else 10)
