# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["numpy==2.3.5", "packaging==26.3", "torch==2.13.0"]
# ///
"""The checkpoint of a GTP model is refused if an fp32 parameter comes before in_proj in the bf16 optimizer.

Float16OptimizerWithFloat16Params saves the state of in_proj as out_proj, so that two tensors have one key. Without the
fp32 parameter all names must be right. No GPU is needed.
Cause: _backfill_gtp_sharded_param_map counts the float16 parameters alone; the map that it fills counts all parameters.
The code is on the branch main alone. Related: https://github.com/NVIDIA/Megatron-LM/pull/5929

    PYTHONPATH=CHECKOUT uv run reproduce.py    # branch main: BUG_REPRODUCED, exit status 10; patched: FIX_VALIDATED, 0
"""

import sys

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, OptimizerConfig

NAMES, BF16 = ["first", "in_proj", "out_proj"], torch.bfloat16
tensor = torch.tensor  # the optimizer wants a GPU: it asks for "cuda", and for the type of each parameter
torch.tensor = lambda *args, **options: tensor(*args, **options | {"device": "cpu"})
torch.Tensor.type = lambda x: "torch.cuda.BFloat16Tensor" if x.dtype == BF16 else "torch.cuda.FloatTensor"


def names_of_states(dtype):
    """Return the names under which the states of three parameters are saved; the first has this dtype."""
    first, weight, other = (torch.nn.Parameter(torch.ones(8, 8, dtype=x)) for x in (dtype, BF16, BF16))
    for name, x in zip(NAMES[1:], (weight, other), strict=True):  # as GTP marks its shards of a weight
        vars(x).update(is_gtp_weight_remat=True, _debug_name=name, group=torch.distributed.group.WORLD)
    gathered = torch.ones(16, 8, dtype=BF16)  # a Mamba mixer's entry of in_proj: the shards of two ranks
    entries = zip(NAMES, (first, gathered, other), strict=True)
    model = {name: ShardedTensor.from_rank_offsets(name, x) for name, x in entries}
    adam = torch.optim.Adam([first, weight, other])
    sum(x.float().sum() for x in (first, weight, other)).backward()
    adam.step()
    optimizer = Float16OptimizerWithFloat16Params(adam, OptimizerConfig(lr=0.1, bf16=True), None, None)
    state = optimizer.sharded_state_dict(model)["optimizer"]["state"]
    return [state[n]["exp_avg"].key.rpartition(".")[2] for n in range(3)]


torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
if names_of_states(BF16) != NAMES:
    sys.exit(print("UNSUPPORTED: the names are wrong without an fp32 parameter, too") or 125)
names = names_of_states(torch.float32)
print(f"after an fp32 parameter, the states are saved as {', '.join(names)}; right: {', '.join(NAMES)}")
print("FIX_VALIDATED" if names == NAMES else "BUG_REPRODUCED")
sys.exit(0 if names == NAMES else 10)
