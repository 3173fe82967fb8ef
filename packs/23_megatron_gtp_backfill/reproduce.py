# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["numpy==2.3.5", "packaging==26.3", "torch==2.13.0"]
# ///
"""Saving a GTP model is refused if an fp32 parameter comes before in_proj in the bf16 optimizer.

GTP: generalized tensor parallelism. in_proj's fp32 copy gets the key of out_proj: _backfill_gtp_sharded_param_map
counts float16 parameters, its map all. Nothing is saved here. Since https://github.com/NVIDIA/Megatron-LM/pull/5929

    PYTHONPATH=CHECKOUT uv run reproduce.py    # branch main: BUG_REPRODUCED, exit status 10; patched: FIX_VALIDATED, 0
"""

import sys
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, OptimizerConfig

NAMES, BF16 = ["in_proj", "out_proj"], torch.bfloat16
TYPES = {BF16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}  # as on a GPU
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
right = {}
for dtype in (BF16, torch.float32):
    first, in_proj, out_proj = (torch.nn.Parameter(torch.ones(8, 8, dtype=x)) for x in (dtype, BF16, BF16))
    for name, x in zip(NAMES, (in_proj, out_proj), strict=True):  # as GTP marks its shards of a weight
        vars(x).update(is_gtp_weight_remat=True, _debug_name=name, group=torch.distributed.group.WORLD)
    gathered = torch.ones(16, 8, dtype=BF16)  # a Mamba mixer's entry of in_proj: the shards of two ranks
    entries = zip(("first", *NAMES), (first, gathered, out_proj), strict=True)
    model = {name: ShardedTensor.from_rank_offsets(name, x) for name, x in entries}
    adam = torch.optim.Adam([first, in_proj, out_proj])
    # The constructor makes two CUDA scalars, and takes parameters of CUDA types alone.
    with mock.patch("torch.tensor"), mock.patch("torch.Tensor.type", lambda x: TYPES[x.dtype]):
        optimizer = Float16OptimizerWithFloat16Params(adam, OptimizerConfig(lr=0.1, bf16=True), None, None)
    [copies] = optimizer.sharded_state_dict(model)["fp32_from_fp16_params"]
    names = [copy.key.rpartition(".")[2] for copy in copies[-2:]]
    print(f"after a parameter in {dtype}, the keys of two weights are {', '.join(names)}; right: {', '.join(NAMES)}")
    right[dtype] = names == NAMES
if not right[BF16]:
    print("UNSUPPORTED: the names are wrong without an fp32 parameter, too")
    sys.exit(125)
print("FIX_VALIDATED" if right[torch.float32] else "BUG_REPRODUCED")
sys.exit(0 if right[torch.float32] else 10)
