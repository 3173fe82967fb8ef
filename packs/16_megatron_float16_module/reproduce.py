# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["einops==0.8.1", "megatron-core==0.19.2", "numpy==2.3.5", "packaging==26.3", "torch==2.13.0"]
# ///
"""A bf16 model's Mamba heads decay at rates exp(A_log) that are off by up to 0.8 %: Float16Module rounds A_log and D.

MambaMixer makes both in fp32 on purpose. Float16Module calls module.bfloat16() or half(), which cast every parameter.
Control: linear layers are cast, as before. Neither a GPU nor mamba_ssm is needed.

    uv run reproduce.py                        # megatron-core 0.19.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a checkout with the patch: FIX_VALIDATED, exit status 0
"""

import contextlib
import sys
from types import SimpleNamespace

import torch
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

mamba_mixer.HAVE_MAMBA_SSM = True  # only the mixer's constructor runs, which calls no kernel
mamba_mixer.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=contextlib.nullcontext)
mamba_mixer.build_module = lambda _, inputs, outputs, **__: torch.nn.Linear(inputs, outputs)  # plain layers
torch.cuda.current_device = lambda: "cpu"  # where the mixer makes its parameters
one_rank = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
groups = SimpleNamespace(tp=one_rank, cp=one_rank)
linears = SimpleNamespace(in_proj=None, out_proj=None)

config = TransformerConfig(num_layers=1, hidden_size=1024, num_attention_heads=8, mamba_num_heads=128, bf16=True)
torch.manual_seed(0)
mixer = mamba_mixer.MambaMixer(config, linears, 1024, rmsnorm=False, pg_collection=groups)
A_log, D = mixer.A_log.detach().clone(), mixer.D.detach().clone()
Float16Module(config, mixer)  # casts the mixer in place
if {A_log.dtype, D.dtype} != {torch.float32} or mixer.in_proj.weight.dtype != torch.bfloat16:
    print("UNSUPPORTED: the mixer does not make both in fp32, or Float16Module does not cast the linear layers")
    sys.exit(125)
error = (mixer.A_log.double().exp() / A_log.double().exp() - 1).abs()
print(f"A_log and D are {mixer.A_log.dtype} and {mixer.D.dtype} in Float16Module; right: {A_log.dtype} and {D.dtype}")
print(f"decay rates exp(A_log): {int((error > 0).sum())} of {len(error)} are off, by up to {error.max():.2%}; right: 0")
fixed = mixer.A_log.dtype == mixer.D.dtype == torch.float32 and not error.any()
print("FIX_VALIDATED" if fixed else "BUG_REPRODUCED")
sys.exit(0 if fixed else 10)
