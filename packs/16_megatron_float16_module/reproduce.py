# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "einops==0.8.1", "megatron-core==0.19.2", "numpy==2.3.5", "packaging==26.3", "torch==2.13.0", "triton==3.6.0",
# ]
# ///
"""A bf16 model's Mamba heads decay at rates exp(A_log) that are off by up to 0.8 %: Float16Module rounds A_log and D.

MambaMixer makes both in fp32, with the comments "Keep A_log in fp32" and "Keep in fp32".

Cause: Float16Module calls module.bfloat16() or module.half(), which cast every parameter.
No GPU and no mamba_ssm are needed: only the mixer's constructor runs.

    uv run reproduce.py                         # megatron-core 0.19.2
    PYTHONPATH=CHECKOUT python reproduce.py     # a patched checkout of Megatron-LM
"""

import contextlib
import sys
import types

import torch
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

mamba_mixer.HAVE_MAMBA_SSM = True  # no kernel is called
mamba_mixer.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)
torch.cuda.current_device = lambda: "cpu"  # where the mixer makes its parameters
one_rank = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)


class Linear(torch.nn.Linear):
    """Stands for Megatron's parallel linear layers on one rank."""

    def __init__(self, inputs, outputs, **_):
        super().__init__(inputs, outputs, bias=False)


sizes = {"hidden_size": 1024, "mamba_num_heads": 128, "mamba_head_dim": 16, "mamba_state_dim": 16}
config = TransformerConfig(num_layers=1, num_attention_heads=8, bf16=True, params_dtype=torch.bfloat16, **sizes)
torch.manual_seed(0)
mixer = mamba_mixer.MambaMixer(
    config,
    types.SimpleNamespace(in_proj=Linear, out_proj=Linear),
    d_model=1024,
    rmsnorm=False,
    layer_number=1,
    pg_collection=types.SimpleNamespace(tp=one_rank, cp=one_rank),
)
made = {name: getattr(mixer, name).detach().clone() for name in ("A_log", "D")}
Float16Module(config, mixer)
if any(x.dtype != torch.float32 for x in made.values()) or mixer.in_proj.weight.dtype != torch.bfloat16:
    print("UNSUPPORTED: the mixer does not make both in fp32, or Float16Module does not cast the linear layers")
    sys.exit(125)
wrong = False
for name, before in made.items():
    after = getattr(mixer, name)
    print(f"{name} is made in {before.dtype}; in Float16Module it is {after.dtype}")
    wrong |= after.dtype != before.dtype or not torch.equal(after, before)
error = (mixer.A_log.double().exp() / made["A_log"].double().exp() - 1).abs()
print(f"decay rates exp(A_log): {int((error > 0).sum())} of {len(error)} are off, by up to {error.max():.2%}; right: 0")
print("BUG_REPRODUCED" if wrong else "FIX_VALIDATED")
sys.exit(10 if wrong else 0)
