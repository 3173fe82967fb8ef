# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["numpy==2.3.5", "packaging==26.3", "torch==2.13.0"]
# ///
"""On a Hopper GPU cross_entropy_fusion_impl="linear" raises `ValueError: Unsupported architecture: 9`.

A model can be built, but its first forward with labels raises. With the patch the loss and both gradients are those of
torch.nn.functional.cross_entropy in float64. Without a GPU, torch answers as on a host with a Hopper.
Cause: Platform in megatron/core/fusions/fused_linear_cross_entropy.py accepts compute capability 10 alone. The fusion
is on the branch dev only. Related: https://github.com/NVIDIA/Megatron-LM/pull/3345

    PYTHONPATH=CHECKOUT uv run reproduce.py    # branch dev: BUG_REPRODUCED, exit status 10; patched: FIX_VALIDATED, 0
"""

import contextlib
import sys

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    mm = torch.mm  # on a CPU it takes no out_dtype
    torch.mm = lambda x, y, out_dtype=None, **out: mm(x.to(out_dtype or x.dtype), y.to(out_dtype or y.dtype), **out)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda _device=None: "NVIDIA H100"
    torch.cuda.get_device_capability = lambda _device=None: (9, 0)
    torch.cuda.nvtx.range = lambda _name: contextlib.nullcontext()
try:
    from megatron.core.fusions.fused_linear_cross_entropy import linear_cross_entropy
except ImportError as error:
    print(f"UNSUPPORTED: {error}")
    sys.exit(125)
if torch.cuda.get_device_capability()[0] != 9:
    print("UNSUPPORTED: needs a Hopper GPU, or no GPU")
    sys.exit(125)

torch.manual_seed(0)
hidden = torch.randn(64, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
weight = torch.randn(1000, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
labels = torch.randint(1000, (64,), device=device)
expected = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().t(), labels)
try:
    loss = linear_cross_entropy(hidden, weight, labels, reduction="mean")
except ValueError as error:
    if "Unsupported architecture: 9" not in str(error):
        raise
    print(f"linear_cross_entropy raised {error!r}; expected a loss of {expected:.4f}")
    print("BUG_REPRODUCED")
    sys.exit(10)

print(f"loss {loss:.4f}, expected {expected:.4f}")
right = abs(loss - expected) < 1e-3
gradients = torch.autograd.grad(loss, (hidden, weight))
references = torch.autograd.grad(expected, (hidden, weight))
for name, gradient, reference in zip(("hidden", "weight"), gradients, references, strict=True):
    error = ((gradient.double() - reference).norm() / reference.norm()).item()
    print(f"relative error of the gradient of {name}: {error:.1e}, bfloat16 allows 1e-2")
    right = right and error < 1e-2
print("FIX_VALIDATED" if right else "BUG_REPRODUCED")
sys.exit(0 if right else 10)
