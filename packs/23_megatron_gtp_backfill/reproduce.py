# /// script
# requires-python = ">=3.12"
# dependencies = ["numpy==2.3.5", "packaging==26.3", "torch==2.13.0", "triton==3.6.0"]
# ///
"""The checkpoint of a GTP model is refused once the bf16 optimizer also holds an fp32 parameter.

Float16OptimizerWithFloat16Params saves the state of in_proj as out_proj, so that two tensors have one key.

Cause: _backfill_gtp_sharded_param_map counts the float16 parameters alone; the map that it fills counts all parameters.
The code is on the branch main alone. Related: https://github.com/NVIDIA/Megatron-LM/pull/5929

    PYTHONPATH=CHECKOUT uv run reproduce.py        # main, and the same with the patch; no GPU is needed
"""

import sys

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor, core
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, OptimizerConfig


class OnHost(torch.overrides.TorchFunctionMode):  # CPU tensors say that they are on a GPU, as the optimizer wants it
    def __torch_function__(self, function, _types, args=(), kwargs=None):
        result = function(*args, **{k: "cpu" if v == "cuda" else v for k, v in (kwargs or {}).items()})
        return result.replace("torch.", "torch.cuda.") if function is torch.Tensor.type else result


def checkpoint(first):
    """Return the names under which the states of three parameters are saved, and whether the checkpoint is accepted."""
    in_proj, out_proj = (torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)) for _ in range(2))
    model = {"first": torch.nn.Parameter(first), "in_proj": in_proj, "out_proj": out_proj}
    adam = torch.optim.Adam(model.values())
    sum(x.float().sum() for x in model.values()).backward()
    adam.step()
    for name in ("in_proj", "out_proj"):  # as GTP marks its shards of a weight
        vars(model[name]).update(is_gtp_weight_remat=True, _debug_name=name, group=torch.distributed.group.WORLD)
    model["in_proj"] = torch.ones(16, 8, dtype=torch.bfloat16)  # a Mamba mixer's entry: the shards of two ranks
    with OnHost():
        optimizer = Float16OptimizerWithFloat16Params(adam, OptimizerConfig(lr=0.1, bf16=True), None, None)
        state = optimizer.sharded_state_dict({k: ShardedTensor.from_rank_offsets(k, x) for k, x in model.items()})
    names = [state["optimizer"]["state"][n]["exp_avg"].key.rpartition(".")[2] for n in range(3)]
    try:
        save_preprocess(state)  # what dist_checkpointing.save does first
    except core.CheckpointingException as error:
        return names, "refused: " + str(error).partition("Errors: ")[2][:77] + "..."
    return names, "accepted"


torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
right = ["first", "in_proj", "out_proj"], "accepted"
if checkpoint(torch.ones(8, 8, dtype=torch.bfloat16)) != right:
    print("UNSUPPORTED: the state is wrong without an fp32 parameter, too")
    sys.exit(125)
names, answer = checkpoint(torch.ones(8, 8))
print(f"first (fp32), in_proj, out_proj are saved as {', '.join(names)}; the checkpoint is {answer}")
print("FIX_VALIDATED" if (names, answer) == right else "BUG_REPRODUCED")
sys.exit(0 if (names, answer) == right else 10)
