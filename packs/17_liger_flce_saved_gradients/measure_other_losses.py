"""What a second backward of other losses of the release returns, as a multiple of the first. Measured, never judged.

    PYTHONPATH=TREE/src:DEPENDENCIES python measure_other_losses.py

Runs on the CPU, in Triton's interpreter. Each backward has the factor 2 and retains the graph; right is 1. Writes
data/other_losses.json.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
parent = "liger_kernel.transformers"  # found, not executed: it would import the transformers library
sys.modules[parent] = importlib.util.module_from_spec(importlib.util.find_spec(parent))
import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction
from liger_kernel.ops.fused_linear_kl_div import LigerFusedLinearKLDivFunction
from triton.runtime import interpreter

convert = interpreter._implicit_cvt  # noqa: SLF001 - the interpreter takes no float as a kernel's argument


def convert_float(x):
    """Make a scalar of Triton of a float, and leave the rest to the interpreter."""
    if not isinstance(x, float):
        return convert(x)
    return tl.tensor(interpreter.TensorHandle(np.array([x], dtype=np.float32), tl.float32), tl.float32)


interpreter._implicit_cvt = convert_float  # noqa: SLF001
torch.manual_seed(0)
hidden, head, logits = (torch.randn(*size, requires_grad=True) for size in ((8, 4), (16, 4), (8, 16)))
teacher = torch.randn(8, 4), torch.randn(16, 4)
losses = {
    "cross entropy": (LigerCrossEntropyFunction.apply(logits * 1, torch.arange(8), None), [logits]),
    "fused linear JSD": (LigerFusedLinearJSDFunction.apply(hidden, head, *teacher), [hidden, head]),
    "fused linear KL divergence": (
        LigerFusedLinearKLDivFunction.apply(hidden, head, torch.randn(8, 16).softmax(-1)),
        [hidden, head],
    ),
}
found = {}
for name, (result, leaves) in losses.items():
    loss = result[0] if isinstance(result, tuple) else result
    norms = [
        [float(x.norm()) for x in torch.autograd.grad(loss, leaves, torch.tensor(2.0), retain_graph=True)]
        for _ in range(2)
    ]
    found[name] = max(second / first for first, second in zip(*norms, strict=True))
Path(__file__).with_name("data").joinpath("other_losses.json").write_text(json.dumps(found, indent=1) + "\n")
