# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["einops==0.8.1", "numpy==2.3.5", "torch==2.11.0", "triton==3.6.0"]
# ///
# mamba-ssm has no wheel, so it is not a dependency: PYTHONPATH=CHECKOUT is an unpacked sdist or a clone.
"""mamba3_siso_bwd_kernel_dqkv computes V @ dO^T three times for each chunk, and once is enough.

The kernel writes the product, and the causal decay on it, under three names: dAinv for dADT, dp_t_block for dK and
s_block for dQ. The results are right, and the compiler merges the three: this is a clean-up and makes nothing faster.
Triton's interpreter, which merges nothing, counts the products. No GPU is needed.
https://github.com/state-spaces/mamba/pull/1025 changes the same backward.

    PYTHONPATH=mamba_ssm-2.3.2.post1 uv run reproduce.py    # the release, unpacked: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py                 # with the patch: FIX_VALIDATED, exit status 0
"""

import importlib.util
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

# The package's own __init__ imports compiled extensions, and this kernel needs none: leave the __init__ out.
sys.modules["mamba_ssm"] = importlib.util.module_from_spec(importlib.util.find_spec("mamba_ssm"))
from mamba_ssm.ops.triton.mamba3 import mamba3_siso_bwd

mamba3_siso_bwd.mamba3_siso_bwd_kernel_dqkv.configs[1:] = []  # nothing to autotune
torch.Tensor.is_cuda = True  # compute_dqkv asserts this, and the interpreter takes CPU tensors

torch.manual_seed(0)
steps = 16  # one chunk of one head, with no decay, no state before it and no skip connection
q, k, v, d_out = torch.randn(4, steps, 16)
zeros, states = torch.zeros(1, 1, steps), torch.zeros(1, 1, 16, 16)
dots, create_dot = [], InterpreterBuilder.create_dot
InterpreterBuilder.create_dot = lambda *operands: dots.append(create_dot(*operands)) or dots[-1]
inputs = *(x[None, :, None] for x in (q, k, v)), zeros, zeros[..., :1], zeros, states, d_out[None, :, None]
gradients = mamba3_siso_bwd.compute_dqkv(*inputs, chunk_size=steps)[:3]
products = sum(np.allclose(dot.data, v @ d_out.T, atol=1e-4) for dot in dots)

q, k, v = exact = [x.double().requires_grad_() for x in (q, k, v)]
right = torch.autograd.grad((q @ k.T).tril(-1) @ v, exact, d_out.double())
errors = [((x[0, :, 0] - y).abs().max() / y.abs().max()).item() for x, y in zip(gradients, right, strict=True)]
print("largest error of dQ, dK, dV:", ", ".join(f"{error:.1e}" for error in errors), "(right: below 1e-5)")
print(f"V @ dO^T was computed {products} times for one chunk (right: 1)")
if products == 0 or not all(error < 1e-5 for error in errors):
    print("UNSUPPORTED: the gradients are wrong, or the product is not found")
    sys.exit(125)
print("BUG_REPRODUCED" if products > 1 else "FIX_VALIDATED")
sys.exit(10 if products > 1 else 0)
