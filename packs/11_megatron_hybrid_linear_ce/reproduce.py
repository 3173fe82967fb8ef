# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["numpy==2.3.5", "packaging==26.3", "torch==2.13.0"]
# ///
"""HybridModel with cross_entropy_fusion_impl="linear" raises in its first forward with labels; GPTModel does not.

It is an UnboundLocalError: 'loss'. Control: the loss without the fusion. The script compares mean losses on a CPU.
Cause: HybridModel builds ColumnParallelLinear and gives its logits to compute_language_model_loss, which has no branch
for "linear". The fusion is on the branch dev only. Related: https://github.com/NVIDIA/Megatron-LM/pull/3226

    PYTHONPATH=CHECKOUT uv run reproduce.py    # branch dev: BUG_REPRODUCED, exit status 10; patched: FIX_VALIDATED, 0
"""

import sys

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig, TransformerLayerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

try:
    from megatron.core.transformer import linear_cross_entropy
except ImportError as error:
    print(f"UNSUPPORTED: {error}")
    sys.exit(125)


def cross_entropy(hidden, weight, labels, **_):
    """Stand in for the fused kernel, which needs a Blackwell GPU; HybridModel raises before it would be called."""
    return torch.nn.functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none")


linear_cross_entropy.linear_cross_entropy = cross_entropy

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
local = get_gpt_layer_local_submodules()
layer = TransformerLayerSubmodules(pre_mlp_layernorm=local.pre_mlp_layernorm, mlp=local.mlp, mlp_bda=local.mlp_bda)
stack = HybridStackSubmodules(mlp_layer=ModuleSpec(module=MLPLayer, submodules=layer))
spec = ModuleSpec(module=HybridStack, params={"post_layer_norm": False}, submodules=stack)
tokens = torch.randint(24, (2, 7), generator=torch.Generator().manual_seed(0))  # batch, sequence


def forward(fusion, labels):
    """Build the same small model each time; return the losses, or the logits where there are no labels."""
    torch.manual_seed(0)
    options = {"cross_entropy_loss_fusion": fusion, "cross_entropy_fusion_impl": "linear"}
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True, **options
    )
    model = HybridModel(config, spec, vocab_size=24, max_sequence_length=7, hybrid_layer_pattern="-").eval()
    return model(tokens, torch.arange(7).expand(2, 7), None, labels=labels).detach()


logits = forward(fusion=False, labels=None)  # [batch, sequence, vocabulary]
expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), tokens.flatten())
unfused = forward(fusion=False, labels=tokens).mean()
print(f"loss without the fusion {unfused:.5f}, expected {expected:.5f}")
if abs(unfused - expected) > 1e-5:
    print("UNSUPPORTED: the loss without the fusion is wrong, too")
    sys.exit(125)

try:
    loss = forward(fusion=True, labels=tokens).mean()
except UnboundLocalError as error:
    print(f"with the fusion it raised {error!r}")
    print("BUG_REPRODUCED")
    sys.exit(10)
print(f"loss with the fusion {loss:.5f}, expected {expected:.5f}")
right = abs(loss - expected) < 1e-5
print("FIX_VALIDATED" if right else "BUG_REPRODUCED")
sys.exit(0 if right else 10)
