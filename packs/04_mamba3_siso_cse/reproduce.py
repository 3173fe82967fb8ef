# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["einops==0.8.1", "numpy==2.3.5", "torch==2.11.0", "triton==3.6.0"]
# ///
"""mamba3_siso_bwd_kernel_dqkv computes V @ dO^T three times for each chunk, and once is enough.

It writes the product with its causal decay as dAinv for dADT, dp_t_block for dK and s_block for dQ. The results are
right, and in the configuration that was compiled, Triton merges the products: this is a clean-up. Triton's interpreter
counts the products, without a GPU. https://github.com/state-spaces/mamba/pull/1025 changes the same backward.

    PYTHONPATH=mamba_ssm-2.3.2.post1 uv run reproduce.py    # an unpacked sdist: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py                 # with the patch: FIX_VALIDATED, exit status 0
"""

import os
import sys
from importlib.util import find_spec, module_from_spec

import torch

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
from triton.runtime.interpreter import InterpreterBuilder

sys.modules["mamba_ssm"] = module_from_spec(find_spec("mamba_ssm"))  # its __init__ needs compiled extensions
from mamba_ssm.ops.triton.mamba3 import mamba3_siso_bwd

mamba3_siso_bwd.mamba3_siso_bwd_kernel_dqkv.configs[1:] = []  # nothing to autotune
torch.Tensor.is_cuda = True  # compute_dqkv asserts this, and the interpreter takes CPU tensors
dots, create_dot = [], InterpreterBuilder.create_dot
InterpreterBuilder.create_dot = lambda *operands: dots.append(create_dot(*operands)) or dots[-1]

torch.manual_seed(0)
q, k, v, d_out = torch.randn(4, 16, 16)  # a chunk of 16 steps of a head: no decay, state before it, skip connection
zeros, states = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16, 16)
inputs = *(x[None, :, None] for x in (q, k, v)), zeros, zeros[..., :1], zeros, states, d_out[None, :, None]
gradients = mamba3_siso_bwd.compute_dqkv(*inputs, chunk_size=16)[:3]
products = sum(torch.allclose(torch.tensor(dot.data), v @ d_out.T, atol=1e-4) for dot in dots)
print(f"V @ dO^T was computed {products} times for one chunk (right: 1)")

_, right = torch.autograd.functional.vjp(lambda q, k, v: (q @ k.T).tril(-1) @ v, (q, k, v), d_out)
if products == 0 or not torch.allclose(torch.stack(gradients).squeeze(), torch.stack(right), atol=1e-4):
    print("UNSUPPORTED: the gradients are wrong, or the product is not found")
    sys.exit(125)
print("BUG_REPRODUCED" if products > 1 else "FIX_VALIDATED")
sys.exit(10 if products > 1 else 0)
