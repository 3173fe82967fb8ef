# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["megatron-core==0.19.2", "numpy==2.3.5", "packaging==26.3", "torch==2.13.0"]
# ///
"""Fused vocab-parallel cross entropy: the gradient of fp32 and fp16 logits is only as exact as bfloat16.

Its relative error is 8.2e-4; unfused, 1.7e-8 (fp32) and 1.5e-4 (fp16). Controls: the unfused loss, and bf16 logits.
Cause: calculate_gradients casts to bf16 (https://github.com/NVIDIA/Megatron-LM/pull/7229), and autograd casts back.

    uv run reproduce.py                        # megatron-core 0.19.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a checkout with the patch: FIX_VALIDATED, exit status 0
"""

import inspect

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy as fused_loss

torch.compiler.set_stance("force_eager")  # compiling takes a minute and does not change the result
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
group = [torch.distributed.group.WORLD] if "tp_group" in inspect.signature(fused_loss).parameters else []
logits, labels = torch.randn(64, 2, 1024, generator=torch.manual_seed(0)), torch.randint(1024, (64, 2))


def error_of(loss_function, dtype, *group):
    """Return the relative error of the gradient of logits [sequence, batch, vocabulary] against float64."""
    leaf = logits.to(dtype, copy=True).requires_grad_()
    loss_function(leaf.clone(), labels, *group).sum().backward()  # overwrites the clone
    exact = leaf.detach().double().softmax(-1) - torch.nn.functional.one_hot(labels, 1024)
    return float((leaf.grad.double() - exact).norm() / exact.norm())


wrong = False
# The limits are one rounding of fp16 and of bf16; 2^-17 is far above that of fp32 and below that of the others.
for dtype, limit in ((torch.float32, 2**-17), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)):
    fused, unfused = error_of(fused_loss, dtype, *group), error_of(tensor_parallel.vocab_parallel_cross_entropy, dtype)
    print(f"relative error of the gradient of {dtype} logits: fused {fused:.1e}, unfused {unfused:.1e}")
    if unfused > limit or (dtype == torch.bfloat16 and fused > limit):
        print("UNSUPPORTED: a gradient that should be right is wrong")
        raise SystemExit(125)
    wrong = wrong or fused > limit
print("BUG_REPRODUCED" if wrong else "FIX_VALIDATED")
raise SystemExit(10 if wrong else 0)
