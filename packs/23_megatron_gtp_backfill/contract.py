"""Every state of the bf16 optimizer is saved under the name of its own parameter, GTP's backfill included.

With GTP, generalized tensor parallelism, a rank has a shard of a weight, and the backfill finds the shard's entry.
Parameters are found in the model's state by identity. The backfill finds two kinds of GTP weight: an fp8 weight, whose
entry is a dequantized copy with a link to it, and in_proj of a Mamba mixer, whose entry has the shards of all ranks.
The optimizer, Adam, the backfill and the check of a checkpoint are real. GTP needs Transformer Engine and a GPU. Here
parameters have GTP's attributes, a bf16 copy stands for the fp8 one, and CPU tensors say that they are on a GPU.
Not judged: several ranks; the file; LayerWiseDistributedOptimizer around this optimizer.
"""

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

torch.compile = lambda function, **_: function  # Megatron's fused functions: to import their compiler takes seconds

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, _backfill_gtp_sharded_param_map

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
# Parameters, "/" between groups: fp32, frozen (z; x: without an entry), plain, GTP's gathered, fp8 (q), identical (w).
RIGHT = ("gw", "gwf", "g/q", "qqzf", "fw/zp", "fpw", "pgqw/w", "p/gf", "wq/pf")
WRONG = ("fgw", "zgw", "fqq", "gfgw", "wfg", "wzq", "gzfqgw", "f/gw", "gf/qw", "pf/zg", "zq", "xg", "fqpg/fqw")
SIZES = {"same": lambda _: (8, 8), "others": lambda n: (8 + n, 4)}


class OnHost(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, _types, args=(), kwargs=None):
        result = function(*args, **{k: "cpu" if v == "cuda" else v for k, v in (kwargs or {}).items()})
        return result.replace("torch.", "torch.cuda.") if function is torch.Tensor.type else result


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


class Trained:
    def __init__(self, layout, size="same", *, expert=False):
        self.params, self.model, groups = {}, {}, [[]]
        torch.manual_seed(len(layout))
        for n, kind in enumerate(layout):
            if kind == "/":
                groups.append([])
                continue
            name, dtype = f"layers.{n}.{kind}", torch.float32 if kind == "f" else torch.bfloat16
            x = torch.nn.Parameter(torch.randn(SIZES[size](n)).to(dtype), requires_grad=kind not in "zx")
            if kind in "gqw":
                x.is_gtp_weight_remat, x._debug_name = True, name  # noqa: SLF001 - what GTP sets
                x.group, x.allreduce = torch.distributed.group.WORLD, not expert
            x.grad = torch.randn_like(x) if x.requires_grad else None
            entry = {"g": torch.cat([x.detach(), x.detach()]), "q": x.detach().clone()}.get(kind, x)
            if kind == "q":
                entry._gtp_dequant_src = x  # noqa: SLF001 - the link that upstream sets
            self.params[name] = x
            self.model |= {name: ShardedTensor.from_rank_offsets(name, entry)} if kind != "x" else {}
            groups[-1].append(x)
        self.adam = torch.optim.Adam([{"params": row, "wd_mult": n} for n, row in enumerate(groups)])
        self.adam.step()
        self.initialised = []
        with OnHost():
            self.optimizer = Float16OptimizerWithFloat16Params(
                self.adam, OptimizerConfig(lr=0.1, bf16=True), None, lambda *args: self.initialised.append(args)
            )
        self.mains = {name: getattr(x, "main_param", x) for name, x in self.params.items()}

    def values(self):
        """Return what the inner optimizer keeps, by the key under which it has to be saved."""
        moments = {n: {k: v for k, v in self.adam.state[x].items() if k != "step"} for n, x in self.mains.items()}
        copies = {n: {"fp32_param": x} for n, x in self.mains.items() if x is not self.params[n]}
        pairs = [*moments.items(), *copies.items()]
        return {f"optimizer.state.{kind}.{name}": x for name, kept in pairs for kind, x in kept.items()}

    def state(self, *, loading=False):
        with OnHost():
            return self.optimizer.sharded_state_dict(self.model, is_loading=loading)


def misnamed(trained, state):
    """Return the keys that are missing, or hold another parameter's value or a part of one."""
    entries, values = [x for x in tree_leaves(state) if isinstance(x, ShardedTensor)], trained.values()
    right = {(key, x.data_ptr(), tuple(x.shape), tuple(x.shape)) for key, x in values.items()}
    saved = [(x.key, x.data.data_ptr(), tuple(x.local_shape), tuple(x.global_shape)) for x in entries]
    return sorted({row[0] for row in saved if row not in right} | values.keys() - {row[0] for row in saved})


def layouts(right, wrong):
    rows = [pytest.param(layout, marks=pytest.mark.control) for layout in right]
    rows += [pytest.param(layout, marks=pytest.mark.defect) for layout in wrong]
    return pytest.mark.parametrize("layout", rows)


every_layout = layouts(RIGHT, WRONG)


@every_layout
@pytest.mark.parametrize("size", SIZES)
def test_each_state_has_the_name_of_its_own_parameter(layout, size):
    trained = Trained(layout, size)
    for loading in (False, True):
        wrong = misnamed(trained, trained.state(loading=loading))
        assert not wrong, f"of another parameter, in part, or missing: {wrong}"
        assert len(trained.initialised) == loading


def read(x, written):
    return written[x.key] if isinstance(x, ShardedTensor) else x.unwrap() if hasattr(x, "unwrap") else x


@pytest.mark.defect
def test_a_weight_after_an_fp32_parameter_keeps_its_own_state(figure):
    trained = Trained("fgw")
    wrong = misnamed(trained, trained.state())
    figure("misnamed", len(wrong), f"of {len(trained.values())} keys of an optimizer with three parameters")
    assert not wrong


@every_layout
def test_a_checkpoint_is_accepted_and_read_back(layout):
    trained, other = Trained(layout), Trained(layout)
    state = trained.state()
    save_preprocess(state)
    written = {x.key: x.data.clone() for x in tree_leaves(state) if isinstance(x, ShardedTensor)}
    for x in other.values().values():
        x.data.zero_()

    other.optimizer.load_state_dict(tree_map(lambda x: read(x, written), other.state(loading=True)))
    ours, theirs = trained.values(), other.values()
    assert [*ours] == [*theirs]
    wrong = [key for key, x in ours.items() if not x.equal(theirs[key])]
    assert not wrong, f"read back with other values: {wrong}"


@layouts(["gw"], ["fgw"])
def test_an_experts_gathered_weight_is_refused_by_name(layout):
    known = Trained("qw", expert=True)
    assert not misnamed(known, known.state())
    with pytest.raises(ValueError, match=rf"layers\.{layout.index('g')}\.g"):
        Trained(layout, expert=True).state()


@layouts(["pw", "wp", "fgp"], ["fpw"])
def test_a_parameter_outside_the_models_state_is_refused(layout):
    trained = Trained(layout)
    del trained.model[f"layers.{layout.index('p')}.p"]
    with pytest.raises((KeyError, ValueError), match=r"\d"):
        trained.state()


@pytest.mark.control  # as upstream's test_gtp_dcp.py calls it
def test_backfill_takes_a_list_of_groups():
    trained, entries = Trained("gpw"), {}
    groups = [[trained.params["layers.0.g"]], [trained.params["layers.1.p"], trained.params["layers.2.w"]]]
    with OnHost():
        _backfill_gtp_sharded_param_map(entries, groups, trained.model)
    assert {number: entry.key for number, entry in entries.items()} == {0: "layers.0.g", 2: "layers.2.w"}
