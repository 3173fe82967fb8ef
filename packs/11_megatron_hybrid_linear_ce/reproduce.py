# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["numpy==2.3.5", "packaging==26.3", "torch==2.13.0"]
# ///
"""HybridModel with cross_entropy_fusion_impl="linear" raises in its first forward with labels; GPTModel does not.

It raises UnboundLocalError. Right: the loss of each token, by one call of the fused kernel (a stand-in here, on a CPU).
Control: no fusion. Cause: HybridModel builds ColumnParallelLinear and gives its logits to compute_language_model_loss,
which has no branch for "linear". Only on dev. GPTModel is right since https://github.com/NVIDIA/Megatron-LM/pull/3226

    PYTHONPATH=CHECKOUT uv run reproduce.py    # branch dev: BUG_REPRODUCED, exit status 10; patched: FIX_VALIDATED, 0
"""

import sys
from unittest import mock

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


fused = linear_cross_entropy.linear_cross_entropy = mock.Mock(wraps=cross_entropy)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
local = get_gpt_layer_local_submodules()
layer = TransformerLayerSubmodules(pre_mlp_layernorm=local.pre_mlp_layernorm, mlp=local.mlp, mlp_bda=local.mlp_bda)
stack = HybridStackSubmodules(mlp_layer=ModuleSpec(module=MLPLayer, submodules=layer))
spec = ModuleSpec(module=HybridStack, params={"post_layer_norm": False}, submodules=stack)
tokens = torch.randint(24, (2, 7), generator=torch.Generator().manual_seed(0))  # batch, sequence
SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "use_cpu_initialization": True}


def forward(fusion, labels):
    """Build the same small model each time; return the losses, or the logits where there are no labels."""
    torch.manual_seed(0)
    config = TransformerConfig(**SIZES, cross_entropy_loss_fusion=fusion, cross_entropy_fusion_impl="linear")
    model = HybridModel(config, spec, vocab_size=24, max_sequence_length=7, hybrid_layer_pattern="-").eval()
    return model(tokens, torch.arange(7).expand(2, 7), None, labels=labels).detach()


def is_right(fusion, calls):
    """Compare the loss of each token with that of its logits, and count the calls of the fused kernel."""
    losses = forward(fusion, tokens)
    error = (losses - expected).abs().max().item()
    print(f"fusion={fusion}: largest error of a loss {error:.0e}; fused calls: {fused.call_count}, expected {calls}")
    return error < 1e-5 and fused.call_count == calls


logits = forward(fusion=False, labels=None).double()  # [batch, sequence, vocabulary]
expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
if not is_right(fusion=False, calls=0):
    print("UNSUPPORTED: the losses without the fusion are wrong, too")
    sys.exit(125)
try:
    right = is_right(fusion=True, calls=1)
except UnboundLocalError as error:
    print(f"fusion=True: it raised {error!r}")
    right = False
print("FIX_VALIDATED" if right else "BUG_REPRODUCED")
sys.exit(0 if right else 10)
