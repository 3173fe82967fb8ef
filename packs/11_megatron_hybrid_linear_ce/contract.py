# ruff: noqa: SLF001 - the door to the kernels is a private name
"""HybridModel (MambaModel) trains with cross_entropy_fusion_impl="linear" (branch dev), as GPTModel does.

What upstream promises of it, and of process_mtp_loss, which both models share:

- 1, 2 and 4 tensor-parallel ranks beside replicas with other tokens, sequence parallel, gathered outputs; groups of
  parallel_state's, or of a pg_collection of another size or of other ranks;
- an output weight of its own, tied to the embedding, or tied on a last stage of its own;
- multi-token prediction (MTP) of 0 to 2 depths, heads detached, with labels and without; MuP multiplies logits once;
- any sequence and batch, labels that are ignored, loss masks, token ids or decoder_input, tensors of any layout;
- fp32 and bf16; train, eval, no_grad; calculate_per_token_loss; "linear", "native", and the fusion off;
- without labels logits, also of an inference engine: static and dynamic batches, all tokens' or the last ones';
- what the kernel returns (NaN, infinity) or raises reaches the caller, at each call;
- all that is given stays as it is, the configuration too, and nothing outlives a step;
- the output layer is built as GPTModel's is, and can be sharded (FSDP2) or replaced; an overridden _scale_logits
  counts;
- parameters in the order of the release, the names HybridModel and MambaModel, the keys of the state dict.

The models are real and small: one MLP layer of 8 hidden units in the decoder and in each depth of MTP, without a final
norm. Stand-ins on every device: the two entries of the fused kernel, by a vocab-parallel cross entropy in plain torch
with the same arguments, results and demands (contiguous, as many tokens as labels); where an inference engine asks, its
context and a decoder that returns what it gets. On the CPU besides: nvtx.range, current_device and the fork of the
GPU's random numbers. So nothing is said of the kernel, of speed, of memory, or of Mamba layers.

Not judged: what becomes of an error that backward raises; pickled or copied models, which hold process groups.

Tolerances: norms of the difference over norms of the reference, in float64 from what entered the output layer and the
whole weight. 2^-17, 64 roundings of float32, for sums of at most 28 classes, 24 tokens and 8 hidden units; where
gradients are rounded to bf16 2^-6 besides, for each of a few roundings of 2^-9 and what cancels; unfused in bf16, where
logits are rounded too, 2^-4. Logits have the bits of the unfused model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import os
import types
from dataclasses import dataclass

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # inductor takes a minute for what eager mode computes at once
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron wants it on Hopper
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")  # NCCL's watchdog leaves it to the rank to tell of them

import pytest
import torch

fused = pytest.importorskip("megatron.core.fusions.fused_linear_cross_entropy", reason="this tree has no such fusion")
from megatron.core import parallel_state
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.models.mamba import mamba_model
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from kit import current_target
from kit.ranks import assert_ranks_agree, own_group, partition, ranks
from kit.vocabulary import Storages, assert_close, on_ranks, perform, watching

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
HIDDEN, CLASSES = 8, 28
FLOAT32 = 2.0**-17
BFLOAT16 = 2.0**-6
UNFUSED_BFLOAT16 = 2.0**-4  # where logits and their gradients are rounded to bf16, which the fusion does not make
MTP_SCALE = 0.1  # mtp_loss_scaling_factor, as it is by default
IGNORED = -100
SIZES = (1, 2, 4)  # of tensor-parallel groups


@dataclass(frozen=True)
class Case:
    """What a model is built with and what it is given."""

    ranks: int = 1  # of the tensor-parallel group that the model is to use
    tied: bool = False
    depths: int = 0
    shape: tuple[int, int] = (5, 2)  # sequence, batch
    dtype: str = "float32"
    labels: str = "any"  # or "some ignored", or "all ignored", or "none" as in reinforcement learning
    mask: bool = False
    mode: str = "train"  # or "eval", or "no_grad"
    gathered: bool = False
    sequence_parallel: bool = False
    detached: bool = False
    per_token: bool = False
    mup: float = 1.0  # what MuP multiplies the logits by
    last_stage: bool = False
    fusion: bool = True
    implementation: str = "linear"
    model: str = "HybridModel"
    altered: str = ""  # what becomes of a model that is built: "sharded", "replaced", or "rescaled"
    laid: str = "dense"  # in memory, what is given for each token: or "sliced", or "sequence first"
    default: int = 0  # the size of parallel_state's groups, where the caller gives a collection of its own
    embedded: bool = False  # decoder_input is given, and no token ids, as by a multimodal model

    @property
    def initialized(self):
        """Return the size of the groups that parallel_state has."""
        return self.default or self.ranks

    @property
    def needs(self):
        """Return how many ranks it takes: groups of one size that differ are two at least."""
        return 2 * self.ranks if self.default == self.ranks else max(self.ranks, self.default)

    def other(self, **changes):
        """Return this case with some values changed."""
        return dataclasses.replace(self, **changes)


# fmt: off
CASES = {
    "plain": Case(),
    "plain-two_ranks": Case(ranks=2),
    "tied": Case(tied=True, shape=(7, 1)),
    "tied-two_ranks": Case(ranks=2, tied=True, shape=(4, 3), labels="some ignored", laid="sliced"),
    "mtp": Case(depths=1, shape=(7, 2), mask=True, laid="sliced"),
    "mtp-two_ranks": Case(ranks=2, depths=2, shape=(7, 2)),
    "mtp-tied": Case(tied=True, depths=2, shape=(8, 3), per_token=True, mask=True, laid="sequence first"),
    "mtp-tied-two_ranks": Case(ranks=2, tied=True, depths=1, labels="some ignored", mask=True),
    "mtp-detached": Case(depths=1, detached=True, per_token=True),
    "mtp-tied-detached": Case(ranks=2, tied=True, depths=1, detached=True),
    "mtp-eval": Case(depths=1, mode="eval", laid="sliced"),
    "mtp-bfloat16": Case(ranks=2, depths=1, dtype="bfloat16", mask=True),
    "bfloat16": Case(tied=True, dtype="bfloat16", labels="some ignored"),
    "one_token": Case(shape=(1, 1), labels="any"),
    "eval": Case(mode="eval", mask=True, shape=(3, 3), laid="sequence first"),
    "no_grad": Case(ranks=2, mode="no_grad", laid="sliced"),
    "gathered": Case(ranks=2, gathered=True),
    "sequence_parallel": Case(ranks=2, shape=(6, 2), sequence_parallel=True, laid="sliced"),
    "sequence_parallel-mtp-tied": Case(2, tied=True, depths=2, shape=(6, 1), sequence_parallel=True),
    "last_stage": Case(tied=True, last_stage=True, shape=(5, 1)),
    "last_stage-two_ranks": Case(ranks=2, tied=True, last_stage=True),
    "last_stage-mtp": Case(tied=True, depths=1, last_stage=True, shape=(4, 1)),  # with two output weights
    "mup": Case(mup=0.25),
    "mup-tied": Case(ranks=2, tied=True, mup=4.0, mode="eval"),
    "mup-mtp": Case(ranks=2, depths=2, mup=0.5, mask=True),
    "alias": Case(model="MambaModel", depths=1),
    "plain-four_ranks": Case(ranks=4, labels="some ignored"),
    "mtp-tied-four_ranks": Case(ranks=4, tied=True, depths=1, shape=(7, 1), mask=True),
    "sequence_parallel-mtp-four_ranks": Case(4, depths=1, shape=(8, 3), sequence_parallel=True, mask=True),
    "group": Case(ranks=2, depths=1, shape=(6, 2), sequence_parallel=True, mask=True, default=1),
    "group-crossed": Case(ranks=2, tied=True, shape=(5, 3), default=2),
    "mup-detached": Case(
        2, depths=2, shape=(6, 1), mask=True, sequence_parallel=True, detached=True, per_token=True, mup=2.0
    ),
    "mup-overridden": Case(depths=1, shape=(4, 2), mup=0.5, altered="rescaled"),
    "mup-tied-detached": Case(2, True, 1, mode="eval", detached=True, mup=0.5, last_stage=True, default=1),
    "sharded": Case(2, True, 1, (6, 1), "bfloat16", "some ignored", gathered=True, per_token=True, altered="sharded"),
    "mtp-no_grad": Case(tied=True, depths=1, labels="some ignored", mask=True, mode="no_grad"),
    "replaced": Case(depths=1, altered="replaced"),
    "all_ignored": Case(ranks=2, labels="all ignored"),
    "all_ignored-mtp": Case(tied=True, depths=1, shape=(4, 2), labels="all ignored", mask=True),
    "embedded": Case(ranks=2, embedded=True, shape=(4, 3)),
    "embedded-mup": Case(tied=True, embedded=True, mode="eval", mup=0.5),
    "mup-bfloat16": Case(ranks=2, depths=1, dtype="bfloat16", mup=0.5),
    "mup-no_grad": Case(tied=True, mode="no_grad", mup=2.0),
    "mup-mtp-no_grad": Case(depths=2, shape=(4, 1), mode="no_grad", mup=2.0),
}
# fmt: on
WITHOUT_LABELS = {
    "logits": Case(labels="none"),
    "logits-tied-two_ranks": Case(ranks=2, tied=True, labels="none", shape=(3, 2)),
    "logits-gathered": Case(ranks=2, gathered=True, labels="none", mup=0.5),
    "logits-group": Case(ranks=2, labels="none", shape=(3, 1), default=1),
    "rl": Case(depths=1, labels="none", mask=True, laid="sliced"),
    "rl-two_ranks": Case(ranks=2, tied=True, depths=2, labels="none", shape=(7, 1), laid="sequence first"),
    "rl-mup-last_stage": Case(2, tied=True, depths=1, labels="none", shape=(4, 2), mup=0.5, last_stage=True),
}

FREED = {  # of these, nothing outlives a forward and, while training, a backward
    "train": Case(2, depths=1, shape=(6, 2), mask=True, sequence_parallel=True, mup=0.5, laid="sliced"),
    "eval": Case(tied=True, depths=1, labels="some ignored", mode="eval"),
    "no_grad": Case(mode="no_grad"),
    "logits": Case(labels="none"),
    "off": Case(mask=True, fusion=False),
}

NONFINITE = {
    "nonfinite": Case(ranks=2, last_stage=True),
    "nonfinite-mtp": Case(tied=True, depths=1, last_stage=True, shape=(6, 2)),
}
REFUSED = {
    "refused": Case(),
    "refused-eval": Case(ranks=2, tied=True, mode="eval"),
    "refused-mtp": Case(ranks=2, depths=1),
    "refused-mtp-no_grad": Case(tied=True, depths=2, mode="no_grad"),
}

OWN_SCALE = 3.0  # what a caller's own function, or an overridden method, multiplies by: no configuration's

# process_mtp_loss called as GPTModel does, which has its layer in the release, with such a function or with None.
SCALED = {
    "none": (Case(2, depths=2, shape=(7, 2), mask=True, mup=0.5, model="GPTModel"), None),
    "own": (Case(tied=True, depths=1, shape=(6, 1), mup=0.25, model="GPTModel"), OWN_SCALE),
    "own-without_mup": (Case(2, depths=1, mask=True, model="GPTModel"), OWN_SCALE),
    "off": (Case(depths=2, mask=True, mup=0.5, model="GPTModel", fusion=False), OWN_SCALE),
    "off-none": (Case(2, tied=True, depths=1, mup=0.5, model="GPTModel", fusion=False), None),
}

TWINS = (  # of these, GPTModel is judged itself
    "plain",
    "tied-two_ranks",
    "mtp-two_ranks",
    "mtp-tied",
    "bfloat16",
    "sequence_parallel-mtp-tied",
    "sequence_parallel-mtp-four_ranks",
)

LAYERS = {
    "own": Case(),
    "tied": Case(ranks=2, tied=True, gathered=True),
    "bfloat16": Case(ranks=2, dtype="bfloat16", gathered=True, mode="eval"),
    "mtp": Case(ranks=4, depths=1),
    "last_stage": Case(ranks=2, tied=True, last_stage=True),
    "last_stage-own": Case(last_stage=True, gathered=True),
    "sequence_parallel": Case(ranks=2, sequence_parallel=True),
    "mup": Case(mup=0.25),
    "mup-mtp": Case(ranks=2, mup=4.0, depths=2, gathered=True),
    "mup-tied": Case(ranks=2, mup=0.5, tied=True),
    "mup-last_stage": Case(mup=0.5, tied=True, last_stage=True),
    "mup-last_stage-own": Case(ranks=2, mup=0.5, last_stage=True, sequence_parallel=True),
    "mup-off": Case(mup=0.25, fusion=False),
    "mup-native": Case(mup=2.0, implementation="native"),
    "group-of_one": Case(mup=0.5, default=2),
    "group-crossed": Case(ranks=2, tied=True, last_stage=True, sequence_parallel=True, default=2),
    "group-off": Case(ranks=2, fusion=False, default=1),
}

# The parameters of what callers reach; "=" has a default. Upstream's own check of compatibility refuses to move one.
# fmt: off
PARAMETERS = {
    "process_mtp_loss": (
        "hidden_states labels loss_mask output_layer output_weight runtime_gather_output is_training "
        "compute_language_model_loss config cp_group= tp_group= packed_seq_params= scale_logits_fn= input_ids= "
        "sequence_roll_context="
    ),
    "HybridModel.forward": (
        "self input_ids position_ids attention_mask decoder_input= labels= inference_context= runtime_gather_output="
    ),
    "LinearCrossEntropyModule.forward": (
        "self input_ weight= runtime_gather_output= output_cross_entropy_loss= labels= reduction= ignore_index="
    ),
}
# fmt: on


# The fused kernel's entries, in plain torch.


def kernel_forward(seen, *given):
    """Stand in for the entry of the fused forward."""
    hidden, weight, labels, tp_group, reduction, ignore_index, sequence_parallel = given
    group = torch.distributed.get_world_size(tp_group)
    rank = torch.distributed.get_rank(tp_group)
    assert hidden.dim() == 3
    assert labels.dim() == weight.dim() == 2
    assert hidden.is_contiguous()
    assert weight.is_contiguous()
    assert labels.is_contiguous()
    assert hidden.device == weight.device == labels.device
    wide = hidden
    if sequence_parallel and group > 1:
        wide = hidden.new_empty((hidden.shape[0] * group, *hidden.shape[1:]))
        torch.distributed.all_gather_into_tensor(wide, hidden, group=tp_group)
    assert wide.shape[:2].numel() == labels.numel()
    assert wide.shape[2] == weight.shape[1]
    logits = wide.flatten(0, 1).float() @ weight.float().t()
    maximum = logits.amax(-1)
    torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=tp_group)
    total = (logits - maximum.unsqueeze(-1)).exp().sum(-1)
    torch.distributed.all_reduce(total, group=tp_group)
    index, mine = own_classes(labels, weight, rank)
    chosen = logits.gather(-1, index).squeeze(-1) * mine
    torch.distributed.all_reduce(chosen, group=tp_group)
    valid = labels.view(-1) != ignore_index
    losses = (total.log() + maximum - chosen) * valid
    seen.append((reduction, f"{hidden.dtype} {weight.dtype}"))
    losses = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / valid.sum()}[reduction]
    return losses, maximum, total, valid.sum(), rank, group, wide


def own_classes(labels, weight, rank):
    """Return each label as a class of this rank, and whether it is one."""
    index = labels.reshape(-1) - rank * weight.shape[0]
    mine = (index >= 0) & (index < weight.shape[0])
    return index.where(mine, 0).unsqueeze(-1), mine


def kernel_backward(above, hidden, weight, labels, *given):
    """Stand in for the entry of the fused backward."""
    maximum, total, valid, reduction, ignore_index, group, rank, size, sequence_parallel = given
    flat = hidden.flatten(0, 1).float()
    index, mine = own_classes(labels, weight, rank)
    gradient = (flat @ weight.float().t() - maximum.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    gradient = gradient.scatter_add(-1, index, -mine.float().unsqueeze(-1))
    above = above / valid if reduction == "mean" else above
    gradient = gradient * (above * (labels.view(-1) != ignore_index)).unsqueeze(-1)
    towards_hidden = (gradient @ weight.float()).view_as(hidden)
    torch.distributed.all_reduce(towards_hidden, group=group)
    if sequence_parallel and size > 1:
        towards_hidden = towards_hidden.chunk(size)[rank].clone()
    return towards_hidden.type_as(hidden), (gradient.t() @ flat).type_as(weight)


# The models.


class Models:
    """Builds models on one rank of tensor-parallel groups of one size, and goes through them."""

    def __init__(self, size, rank):
        self.rank, self.count, self.device = rank.number, rank.count, torch.device(rank.device)
        self.replica = 0  # of the data-parallel ones, counted from the one that is judged
        self.collections = {}  # of process groups that are not parallel_state's, by the size of the tensor-parallel one
        self.kernels = []
        parallel_state.initialize_model_parallel(size, create_gloo_process_groups=False)
        enter_kernels(functools.partial(kernel_forward, self.kernels), kernel_backward)
        if self.device.type == "cuda":
            parallel_random.model_parallel_cuda_manual_seed(11)
            torch.set_float32_matmul_precision("highest")
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        else:
            torch.cuda.nvtx.range = lambda _: contextlib.nullcontext()
            torch.cuda.current_device = lambda: "cpu"
            parallel_random.get_cuda_rng_tracker().fork = contextlib.nullcontext  # nothing is drawn: dropout is 0

    def perform(self, job, **given):
        """Run a job; return what it found on the replica that is judged, whose ranks are others in the world."""
        case = given["case"]
        if case.needs > self.count:
            pytest.skip(f"needs {case.needs} GPUs")
        if case.default and case.ranks not in self.collections:
            self.collections[case.ranks] = self.collect(case.ranks)
        groups = self.count // case.ranks
        self.replica = groups - 1 - (self.rank % groups if case.default else self.rank // case.ranks)
        try:
            found = job(self, **given)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            # What this contract indexes is within bounds: an assertion on the device is the model's.
            if "device-side assert" in str(error):
                raise AssertionError(f"it raised {error}"[:400]) from error
            raise
        return found if self.replica == 0 else None

    def collect(self, size):
        """Return a caller's collection, with the strides of tensor- and data-parallel groups swapped."""
        tensor = own_group(partition(self.count, size, apart=True))
        data = own_group(partition(self.count, self.count // size))
        pipeline, context = (
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
        )
        return ProcessGroupCollection(tp=tensor, dp=data, dp_cp=data, embd=None, pp=pipeline, cp=context)

    def build(self, case, state=None, config=None):
        """Return a model, with these weights if there are any."""
        torch.default_generator.manual_seed(11)  # the weights are made on the CPU, wherever the ranks compute
        named = {
            "pre_process": not case.last_stage,
            "parallel_output": not case.gathered,
            "share_embeddings_and_output_weights": case.tied,
            "position_embedding_type": "none",
            "pg_collection": self.collections[case.ranks] if case.default else None,
        }
        config = config or configure(case)
        if case.model == "GPTModel":
            layer = ModuleSpec(module=TransformerLayer, submodules=layers(case))
            block = TransformerBlockSubmodules(layer_specs=[layer], layer_norm=None)
            named["mtp_block_spec"] = mtp_spec(case, layer).submodules if case.depths else None
            model = GPTModel(config, block, CLASSES, 16, **named)
        else:
            kind, pattern = getattr(mamba_model, case.model), "-" + "/-" * case.depths
            spec = hybrid_spec(case, mtp_block_spec=mtp_spec(case, None))
            model = kind(config, spec, CLASSES, 16, hybrid_layer_pattern=pattern, **named)
        if case.altered == "sharded":
            shard(model)
        if case.altered == "rescaled":
            scaled = {"_scale_logits": lambda _, logits: logits * OWN_SCALE}
            model.__class__ = type(f"Rescaled{type(model).__name__}", (type(model),), scaled)
        if case.altered == "replaced":
            model.output_layer = Handing(self.build(case.other(altered="")).output_layer)
        model.to(self.device, getattr(torch, case.dtype)).train(case.mode == "train")
        if state is not None:
            own = {neutral(name): tensor for name, tensor in model.state_dict().items() if tensor is not None}
            for name in own.keys() & state.keys():  # which keys there are is judged by itself, and their shapes
                if own[name].shape == state[name].shape:
                    own[name].copy_(state[name])
        return model

    def stage(self, case, config, *, first=True):
        """Return a stage of a pipeline that has no output layer."""
        named = {"hybrid_layer_pattern": "-", "pre_process": first, "post_process": False}
        return HybridModel(config, hybrid_spec(case), CLASSES, 16, **named).to(self.device)

    def given(self, case):
        """Return token ids, labels, loss mask, and the gradient of the losses that comes from above: on the CPU."""
        return given_to(case, self.replica)

    def given_laid(self, case):
        """Return the same where the ranks compute, in memory as the case has it."""
        return [None if each is None else laid(each.to(self.device), case.laid) for each in self.given(case)]

    def positions(self, case):
        """Return the positions of tokens, in memory as the case has it: dense, one row is all rows."""
        whole = torch.arange(case.shape[0], device=self.device).expand(case.shape[::-1])
        return whole if case.laid == "dense" else laid(whole, case.laid)

    def hidden_states(self, case):
        """Return the hidden states that enter a stage which does not embed tokens itself."""
        return hidden_for(case, self.replica).to(self.device)

    def step(self, case, state=None, **named):
        """Go forward and backward through a model; return what went into and came out of its output layer."""
        config = configure(case)
        settings = settings_of(config)
        staged = case.last_stage and not case.depths and not case.default and case.model != "GPTModel"
        if staged:  # as with a virtual pipeline, of which a rank has several stages, of one configuration
            self.stage(case, config)
        model = self.build(case, state, config)
        if staged:
            self.stage(case, config, first=False)
        ids, labels, mask, above = given = self.given_laid(case)
        calls, kept = watch(model.output_layer), keep(model)
        weights = {name: each.detach().clone() for name, each in model.named_parameters()}
        tracker = mtp.MTPLossLoggingHelper.tracker = {}
        self.kernels.clear()
        hidden = None
        if case.last_stage or case.embedded:
            hidden = self.hidden_states(case).requires_grad_(case.mode != "no_grad")
            kept["given"] = (hidden, hidden.detach().clone())
        if case.last_stage:
            model.set_input_tensor(hidden)
        if case.embedded:
            named["decoder_input"] = hidden
        # A caller that embeds tokens has none to give, nor has a last stage that is not to embed them for MTP.
        tokens = (None, None) if hidden is not None and not case.depths else (ids, self.positions(case))
        with torch.set_grad_enabled(case.mode != "no_grad"):
            found = model(*tokens, None, labels=labels, loss_mask=mask, **named)
        assert isinstance(found, torch.Tensor), f"the model returned {type(found).__name__}"
        towards = above if labels is not None else torch.ones_like(found)
        if found.requires_grad and found.shape == towards.shape:  # else there are no gradients, which is wrong
            found.backward(towards)
        kept |= {name: (each, weights.get(name)) for name, each in model.named_parameters()}
        pairs = zip(("ids", "labels", "mask", "above"), given, self.given(case), strict=True)
        kept |= {name: (own.cpu(), each) for name, own, each in pairs if own is not None}
        for name, (own, each) in kept.items():
            assert identical(own, each), f"{name} was changed"
        assert_settings_kept(config, settings)
        expected = " ".join([f"torch.{case.dtype}"] * 2)
        assert all(dtypes == expected for _, dtypes in self.kernels), f"the kernel was given {self.kernels}"
        weight = model.shared_embedding_or_output_weight() if case.tied else model.output_layer.weight
        gradients = {neutral(name): each.grad for name, each in model.named_parameters() if each.grad is not None}
        if hidden is not None and hidden.grad is not None:
            gradients["given"] = hidden.grad
        return {
            "found": found.detach(),
            "hidden": [each["hidden"] for each in calls],
            "towards_hidden": [each.get("gradient") for each in calls],
            "towards_given": [each.get("towards_given") for each in calls],
            "made": [each["made"] for each in calls],
            "kernels": [reduction for reduction, _ in self.kernels],
            "weight": None if weight is None else weight.detach(),
            "towards_weight": None if weight is None else weight.grad,
            "gradients": gradients,
            "logged": tracker.get("loss_sums"),
            "state": {neutral(name): each.detach() for name, each in model.named_parameters()},
        }


def given_to(case, replica=0):
    random = torch.Generator().manual_seed(7 + replica)
    size = case.shape[::-1]
    ids, labels = (torch.randint(CLASSES, size, generator=random) for _ in range(2))
    labels.view(-1)[0] = 0  # the class that a wrong ignore_index would leave out
    above = torch.randn(size, generator=random)
    if case.labels == "some ignored":
        labels.view(-1)[1::4] = IGNORED
    mask = (torch.arange(labels.numel()).view(size) % 3 != 1).float() if case.mask else None
    if case.labels == "all ignored":
        labels.fill_(IGNORED)
        mask = None if mask is None else mask.zero_()  # as a batch of padding has it
    return ids, None if case.labels == "none" else labels, mask, above


def hidden_for(case, replica=0):
    random = torch.Generator().manual_seed(5 + replica)
    return torch.randn(*case.shape, HIDDEN, generator=random).to(getattr(torch, case.dtype))


def layers(case):
    """Return the submodules of a layer that has an MLP alone; torch's norm knows no sequence parallelism."""
    local = get_gpt_layer_local_submodules()
    return TransformerLayerSubmodules(
        self_attention=ModuleSpec(module=IdentityOp, params={"attn_mask_type": AttnMaskType.causal}),
        pre_mlp_layernorm=IdentityOp if case.sequence_parallel else local.pre_mlp_layernorm,
        mlp=local.mlp,
        mlp_bda=local.mlp_bda,
    )


def hybrid_spec(case, **named):
    stack = HybridStackSubmodules(mlp_layer=ModuleSpec(module=MLPLayer, submodules=layers(case)), **named)
    return ModuleSpec(module=HybridStack, params={"post_layer_norm": False}, submodules=stack)


def mtp_spec(case, layer):
    """Return the specification of an MTP block whose inner layer this is."""
    backend = LocalSpecProvider()
    norm = IdentityOp if case.sequence_parallel else backend.layer_norm()
    inner = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=backend.column_parallel_linear(), mtp_model_layer=layer, layer_norm=norm
    )
    specs = [ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=inner)] * case.depths
    block = mtp.MultiTokenPredictionBlockSubmodules(layer_specs=specs)
    return ModuleSpec(module=mtp.MultiTokenPredictionBlock, submodules=block)


def configure(case):
    """Return the configuration of a case."""
    dtype = getattr(torch, case.dtype)
    mup = {"use_mup": True, "mup_base_hidden_size": HIDDEN, "mup_output_mult": case.mup} if case.mup != 1 else {}
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=12,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.7,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=case.ranks,
        sequence_parallel=case.sequence_parallel,
        mtp_num_layers=case.depths or None,
        mtp_detach_heads=case.detached,
        calculate_per_token_loss=case.per_token,
        cross_entropy_loss_fusion=case.fusion,
        cross_entropy_fusion_impl=case.implementation,
        **mup,
    )


def enter_kernels(forward, backward):
    """Put these in the place of the kernels' entries."""
    platform = types.SimpleNamespace(forward_func=forward, backward_func=backward)
    fused._get_platform = lambda: platform


@contextlib.contextmanager
def other_kernels():
    """Let a test put others in the place of the stand-ins."""
    before = fused._get_platform
    try:
        yield
    finally:
        fused._get_platform = before


def laid(tensor, how):
    """Return a copy of a tensor [batch, sequence] of some layout; what lies around it are tokens, too."""
    batch, sequence = tensor.shape
    if how == "dense":
        return tensor.clone()
    if how == "sliced":  # tokens[1:, 1:-1] of a longer batch
        found = tensor.new_ones(batch + 1, sequence + 2)[1:, 1:-1]
    else:
        found = tensor.new_ones(sequence + 2, batch + 1)[1:-1, 1:].t()
    return found.copy_(tensor)


def shard(model):
    """Give every module a generated subclass and new parameters, as FSDP2's fully_shard does."""
    renewed = {}
    for module in model.modules():
        module.__class__ = type(f"Sharded{type(module).__name__}", (type(module),), {})
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) not in renewed:
                renewed[id(weight)] = torch.nn.Parameter(weight.detach().clone())
                vars(renewed[id(weight)]).update(vars(weight))  # what Megatron has marked it with
            setattr(module, name, renewed[id(weight)])


class Handing(torch.nn.Module):
    """A module that hands everything to an output layer, whose weights it has doubled."""

    def __init__(self, layer):
        super().__init__()
        self.inner = layer
        with torch.no_grad():
            for weight in layer.parameters():
                weight.mul_(2)

    def forward(self, *given, **named):
        return self.inner(*given, **named)

    def __getattr__(self, name):
        own = super().__getattr__
        return getattr(own("inner"), name) if name != "inner" and name not in self._modules else own(name)


def neutral(name):
    """Return the name of a parameter of HybridModel as GPTModel has it."""
    return name.replace("mtp_model_layer.layers.0.", "mtp_model_layer.")


def identical(tensor, other):
    """Return whether one tensor is another's twin: torch.equal refuses those of two dtypes, or devices."""
    same = other is not None and (tensor.dtype, tensor.device) == (other.dtype, other.device)
    return same and tensor.equal(other)


def settings_of(config):
    """Return what each attribute of a configuration is, in words, which tell of a list that was changed as well.

    What begins with an underscore is not its caller's: a block of GPTModel keeps a context there.
    """
    return {name: repr(each) for name, each in vars(config).items() if not name.startswith("_")}


def assert_settings_kept(config, settings):
    changed = [name for name, each in settings_of(config).items() if settings.get(name) != each]
    assert not changed, f"the configuration was changed: {', '.join(changed)}"


def keep(model):
    """Keep what a model's parts return, as a hook does that is there for distillation, each with a copy of it."""
    kept = {}

    def after(name, _, __, made):
        if hasattr(made, "detach"):
            kept[name] = (made, made.detach().clone())

    for name in ("embedding", "decoder", "mtp"):
        if hasattr(model, name):
            getattr(model, name).register_forward_hook(functools.partial(after, name))
    return kept


def watch(layer):
    """Record, for every call of an output layer, what enters, its gradient, and the shape of what is made.

    A weight that is handed to it is another layer's, too, where its gradients are added up: that of a call is recorded.
    """
    calls = []

    def before(_, args, named):
        hidden = args[0] if args else named["input_"]
        record = {"hidden": hidden.detach().clone()}
        calls.append(record)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: record.update(gradient=gradient.clone()))
        weight = named.get("weight")
        if weight is None or not weight.requires_grad:
            return None
        alias = weight.view_as(weight)
        alias.register_hook(lambda gradient: record.update(towards_given=gradient.clone()))
        return args, named | {"weight": alias}

    def after(_, __, ___, made):
        calls[-1]["made"] = list((made[0] if isinstance(made, tuple) else made).shape)

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after, with_kwargs=True)
    return calls


# The reference.


def rolled(tensor, steps):
    """Return what is shifted to the left by so many tokens, with zeros at the end."""
    moved = tensor.roll(-steps, -1)
    moved[:, tensor.shape[1] - steps :] = 0
    return moved


def targets(case):
    """Return, for each call of the output layer in its order, labels and the gradient of their losses."""
    ids, labels, mask, above = given_to(case)
    start = 0 if labels is not None else 1
    mask = torch.ones_like(above) if mask is None else mask
    before = rolled(mask, start).sum()
    found = []
    for depth in range(case.depths):
        kept = rolled(mask, start + depth + 1)
        weight = MTP_SCALE / case.depths * kept / kept.sum().clamp(min=1)
        label = rolled(ids if labels is None else labels, start + depth + 1)
        found.append((label, weight * before if case.per_token else weight, kept))
    return found + ([] if labels is None else [(labels, above, None)])


def reference(hidden, weight, labels, above):
    """Return losses [batch, sequence], and the gradients of hidden states and weight, in float64."""
    hidden, weight = hidden.double(), weight.double()
    scores, labels = hidden @ weight.t(), labels.t()
    kept = labels != IGNORED
    index = labels.where(kept, 0).unsqueeze(-1)
    losses = (scores.logsumexp(-1) - scores.gather(-1, index).squeeze(-1)) * kept
    towards = scores.softmax(-1).scatter_add(-1, index, -kept.double().unsqueeze(-1))
    towards = towards * (above.t().double() * kept).unsqueeze(-1)
    return losses.t(), towards @ weight, towards.flatten(0, 1).t() @ hidden.flatten(0, 1)


# The judges. Each gets the list of what the ranks of the group found.

near = functools.partial(assert_close, least=1e-30)


def whole(parts, what):
    """Join what all ranks have of a weight."""
    assert all(part is not None for part in parts), f"no {what}"
    return torch.cat(parts)


def entering(case, found, number, key):
    """Return what entered a call of the output layer, or its gradient, on each rank: whole.

    Sequence parallel, each rank has a part of it, or all where it was gathered before.
    """
    shape = (*case.shape, HIDDEN)
    part = (case.shape[0] // case.ranks, *shape[1:])
    parts = [each[key][number] if number < len(each[key]) else None for each in found]
    assert all(each is not None for each in parts), f"call {number} has no {key}"
    if case.sequence_parallel and all(each.shape == part for each in parts):
        return [torch.cat(parts)]
    assert all(each.shape == shape for each in parts), f"{key} of shapes {[list(each.shape) for each in parts]}"
    return parts


def judge_step(found, case):
    """Judge the losses and the gradients at the output layer."""
    calls, trains = targets(case), case.mode != "no_grad"
    # "native" rounds the logits' gradient to bf16, whatever the model's dtype is.
    rounded = case.dtype == "bfloat16" or (case.fusion and case.implementation == "native")
    limit = FLOAT32 + (BFLOAT16 if rounded else 0.0)
    expected = len(calls) + (case.labels == "none")  # then the last one makes logits
    assert [len(each["hidden"]) for each in found] == [expected] * len(found), "calls of the output layer"
    weight = whole([each["weight"] for each in found], "output weight")
    assert all(each["weight"].shape == (CLASSES // case.ranks, HIDDEN) for each in found), "not a rank's part of it"
    assert all(each[key] == found[0][key] for each in found for key in ("kernels", "made")), "the ranks differ"
    if case.labels != "none":
        assert_ranks_agree([each["found"] for each in found], "the losses")
    summed = 0.0
    for number, (labels, above, kept) in enumerate(calls):
        hidden = entering(case, found, number, "hidden")
        assert_ranks_agree(hidden, "what enters the output layer")
        losses, towards, product = reference(hidden[0], weight, labels, above)
        # With detached heads the loss of the last call alone reaches the weight.
        summed = product if case.detached else summed + product
        if trains and case.labels != "none" and case.tied:
            parts = [each["towards_given"][number] for each in found]
            if case.detached and number < len(calls) - 1:
                assert all(part is None for part in parts), "a detached head reaches the output weight"
            else:
                near(whole(parts, "gradient of the weight"), product, limit, f"the weight's gradient, call {number}")
        if kept is None or case.mode == "train":
            for each in found:
                judge_losses(each, case, number, losses, kept)
        if trains:
            for each in entering(case, found, number, "towards_hidden"):
                near(each, towards, limit, f"the hidden states' gradient, call {number}")
    if trains and case.labels != "none" and not case.tied:
        near(whole([each["towards_weight"] for each in found], "gradient"), summed, limit, "the weight's gradient")


def judge_losses(each, case, number, losses, kept):
    """Judge the losses that came out, or those of MTP that are logged while training."""
    if kept is None:
        near(each["found"], losses, FLOAT32, "the losses")
        return
    assert each["logged"] is not None, "no loss of MTP is logged"
    logged = (losses * kept).sum() / (1 if case.per_token else kept.sum().clamp(min=1))
    near(each["logged"][number], logged, FLOAT32, f"the logged loss of MTP, depth {number}")


def assert_alike(one, other, tolerance, what):
    """Assert that losses and all gradients of two models are alike."""
    assert sorted(one["gradients"]) == sorted(other["gradients"]), f"other parameters have a gradient than {what}"
    near(one["found"], other["found"], tolerance, f"losses or logits, {what}")
    largest = max((float(each.double().norm()) for each in other["gradients"].values()), default=0.0)
    for name, each in other["gradients"].items():
        # A gradient that is nothing but rounding, of a weight that one-hot minus softmax cancels, has no direction.
        if float(each.double().norm()) > largest * 2.0**-12:
            near(one["gradients"][name], each, tolerance, f"the gradient of {name}, {what}")


def told(record):
    """Return what is judged of a step, with all gradients in one tensor."""
    gradients = [gradient.flatten() for _, gradient in sorted(record.pop("gradients").items())]
    del record["state"]
    return record | {"gradients": torch.cat(gradients) if gradients else None}


class World:
    """Ranks for each size of a tensor-parallel group, and how many jobs raised on them."""

    def __init__(self, stack, count, device):
        self.groups = {
            size: stack.enter_context(ranks(count, functools.partial(Models, size), device=device, seconds=60.0))
            for size in SIZES
            if size <= count
        }
        self.raised = 0

    def run(self, function, module, name, given):
        """Run a job on the ranks that a case asks for; return what the group that is judged found."""
        group = self.groups.get(given["case"].initialized)
        if group is None:
            pytest.skip(f"needs {given['case'].initialized} GPUs")
        try:
            found = group.run(function, module, name, given)
        except AssertionError as error:
            self.raised += "it raised" in str(error)
            raise
        return [each for each in found if each is not None]


@pytest.fixture(scope="session")
def world(figure):
    """One rank for each GPU, 1, 2 or 4; on the CPU four."""
    target = current_target()
    count = max(size for size in SIZES if size <= torch.cuda.device_count()) if target.executed else SIZES[-1]
    with contextlib.ExitStack() as stack:
        made = World(stack, count, target.device)
        yield made
    figure("defect_checks_that_raise", made.raised)


@pytest.fixture
def found(world):
    """Return a function: what a job found on each rank of the group that is judged."""
    return lambda job, **given: world.run(perform, __name__, job.__name__, given)


def cases(table, mark):
    """Return parameters: each case of a table, with a mark, or with the mark that a function gives it."""
    marked = mark if callable(mark) and not isinstance(mark, pytest.MarkDecorator) else lambda _: mark
    return pytest.mark.parametrize("case", [pytest.param(each, id=n, marks=marked(each)) for n, each in table.items()])


DEFECT, CONTROL = pytest.mark.defect, pytest.mark.control
AS_GPT = {name: CASES[name].other(model="GPTModel") for name in TWINS}
OFF = {
    f"{name}-{count}": Case(count, depths=count, shape=(7, 2), mask=True).other(**changes)
    for count in (1, 2)
    for name, changes in {
        "off-linear": {"fusion": False},
        "off-native": {"fusion": False, "implementation": "native"},
        "native": {"implementation": "native", "tied": count == 2},
    }.items()
}


def record(output, name, found):
    """Record what every rank came to: its bits are those of the other tree."""
    for rank, each in enumerate(found):
        named = {f"towards_hidden.{number}": tensor for number, tensor in enumerate(each["towards_hidden"])}
        for key, tensor in {"found": each["found"], "gradients": each["gradients"], **named}.items():
            if tensor is not None:
                output(f"{name}.{key}.{rank}", tensor)


def step(up, case):
    return told(up.step(case))


def compare(up, case):
    """Go through HybridModel, through GPTModel with the same weights, and through HybridModel unfused."""
    mine = up.step(case)
    # Unfused, labels are not ignored, and gathered logits are not what the vocab-parallel loss expects.
    if case.labels == "any" and not case.gathered and (case.dtype == "float32" or case.mup != 1):
        limit = FLOAT32 if case.dtype == "float32" else UNFUSED_BFLOAT16
        assert_alike(mine, up.step(case.other(fusion=False), mine["state"]), limit, "than unfused")
    if case.mup == 1:  # with MuP GPTModel scales logits that it has not made
        limit = FLOAT32 + (BFLOAT16 if case.dtype == "bfloat16" else 0.0)
        assert_alike(mine, up.step(case.other(model="GPTModel"), mine["state"]), limit, "than GPTModel")
    return told(mine)


@cases(CASES, DEFECT)
def test_losses_and_gradients_are_exact(found, case):
    """By float64, by GPTModel with the same weights, and by itself unfused."""
    mine = found(compare, case=case)
    if case.mup == 1:  # with MuP a fix may scale what enters the output layer or the scores: the unfused model tells
        judge_step(mine, case)
    assert mine[0]["found"].dtype == torch.float32, f"losses of {mine[0]['found'].dtype}"
    losses = case.depths + 1
    assert mine[0]["kernels"] == ["none"] * losses, f"the kernels were called for {mine[0]['kernels']}"
    assert mine[0]["made"] == [list(case.shape[::-1])] * losses, f"the output layer made {mine[0]['made']}"


def logits(up, case):
    """Go through HybridModel without labels, with and without the fusion, and with outputs gathered on demand."""
    mine = up.step(case)
    unfused = up.step(case.other(fusion=False), mine["state"])
    assert_alike(mine, unfused, FLOAT32, "than unfused")
    assert mine["found"].equal(unfused["found"]), "other bits than unfused"
    gathered = up.step(case, mine["state"], runtime_gather_output=True)["found"]
    return told(mine) | {"gathered": gathered}


@cases(WITHOUT_LABELS, lambda case: DEFECT if case.depths else CONTROL)
def test_logits_without_labels_are_those_of_the_unfused_model(found, output, request, case):
    """And the losses of MTP beside them, as in reinforcement learning."""
    mine = found(logits, case=case)
    if not case.depths:
        record(output, request.node.callspec.id, mine)
    elif case.mup == 1:  # a fix may scale what enters for the losses of MTP: the unfused model tells
        judge_step(mine, case)
    every = mine[0]["found"] if case.gathered else torch.cat([each["found"] for each in mine], -1)
    part = CLASSES if case.gathered else CLASSES // case.ranks
    hidden, weights = entering(case, mine, case.depths, "hidden"), [each["weight"] for each in mine]
    for each, entered, own in zip(mine, hidden, weights, strict=True):
        assert each["gathered"].equal(every), "gathered on demand they are others"
        assert each["found"].shape == (*case.shape[::-1], part), f"logits of shape {list(each['found'].shape)}"
        assert each["kernels"] == ["none"] * case.depths, f"the kernels were called for {each['kernels']}"
        weight = whole(weights, "output weight") if case.gathered else own
        expected = (entered.double() @ weight.double().t()).transpose(0, 1)
        # With MuP a fix may have scaled what enters: that it is scaled once, the unfused model tells.
        factor = case.mup if (each["found"].double() - expected * case.mup).norm() < expected.norm() / 8 else 1.0
        near(each["found"], expected * factor, FLOAT32, "the logits")


@cases({f"gpt-{name}": case for name, case in AS_GPT.items()} | OFF, CONTROL)
def test_neighbours_are_right(found, output, request, case):
    """GPTModel, and models whose configuration does not ask for the fused kernel, which is not reached then."""
    mine = found(step, case=case)
    record(output, request.node.callspec.id, mine)
    judge_step(mine, case)
    kernels = ["none"] * (case.depths + 1) if case.model == "GPTModel" else []
    assert mine[0]["kernels"] == kernels, f"the kernels were called for {mine[0]['kernels']}"


@cases({name: CASES[name] for name in TWINS}, CONTROL)
@on_ranks
def test_state_dict_has_the_keys_of_gpt_model(up, case):
    mine, gpt = (sorted(map(neutral, up.build(each).state_dict())) for each in (case, case.other(model="GPTModel")))
    assert mine == gpt


@cases({"plain": Case()}, CONTROL)
@on_ranks
def test_stage_without_an_output_layer_gives_hidden_states(up, case):
    config = configure(case)
    settings, (ids, labels) = settings_of(config), (each.to(up.device) for each in up.given(case)[:2])
    model = up.stage(case, config)
    found = model(ids, ids, None, labels=labels)
    assert found.shape == (*case.shape, HIDDEN), f"shape {list(found.shape)}"
    assert not hasattr(model, "output_layer"), "it has an output layer"
    assert_settings_kept(config, settings)


# How the output layer is built.


def ramp(start, tensor):
    """Initialise a whole weight so that each part of it tells where it is from."""
    with torch.no_grad():
        return tensor.copy_(torch.arange(start, start + tensor.numel()).view_as(tensor))


def plain(thing, names=None):
    """Return the plain ones of something's attributes, or of those of these names."""
    named = {name: each for name, each in vars(thing).items() if isinstance(each, bool | int | float | str | None)}
    names = {name for name in named if not name.startswith("_")} if names is None else names
    return {name: named.get(name, "none") for name in sorted(names)}


def described(up, case, like=None):
    """Return what tells how a model has built its output layer, in the words that another model's has, if given."""
    config = configure(case)
    config.init_method = functools.partial(ramp, 1000)
    config.embedding_init_method = functools.partial(ramp, 2000)
    config.output_layer_init_method = functools.partial(ramp, 3000)
    model = up.build(case, config=config)
    layer, weight, shared = model.output_layer, model.output_layer.weight, model.shared_embedding_or_output_weight
    found = {
        "layer": plain(layer, like and like["layer"]),
        "config": layer.config is config,
        "ranks": torch.distributed.get_process_group_ranks(layer.tp_group),
        "biased": layer.bias is not None,
        "output_weight": weight is not None and (not case.tied or weight is shared()),
    }
    if weight is None:
        return found
    values = weight.detach().double().cpu().flatten()
    return found | {
        "weight": plain(weight, like and like.get("weight")),
        "tensor": [str(weight.dtype), list(weight.shape), weight.requires_grad, str(weight.device)],
        "values": [float(values[0]), float(values.sum())],
    }


@cases(LAYERS, CONTROL)
@on_ranks
def test_output_layer_is_built_as_that_of_gpt_model(up, case):
    gpt = described(up, case.other(model="GPTModel"))
    mine = described(up, case, gpt)
    assert mine == gpt, {key: (mine.get(key), each) for key, each in gpt.items() if mine.get(key) != each}


CALLED = {
    "process_mtp_loss": mtp.process_mtp_loss,
    "HybridModel.forward": HybridModel.forward,
    "LinearCrossEntropyModule.forward": LinearCrossEntropyModule.forward,
}


@pytest.mark.control
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_in_the_order_of_the_release_and_no_more_are_needed(name):
    every = inspect.signature(CALLED[name]).parameters.values()
    expected = PARAMETERS[name].replace("=", "").split()
    by_position = [each.name for each in every if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert by_position[: len(expected)] == expected
    needed = {each.name for each in every if each.default is each.empty}
    assert needed <= {each for each in PARAMETERS[name].split() if "=" not in each}


# What the kernel returns or raises, and what outlives a step.


def for_both_models(table):
    """Return parameters: HybridModel's cases, which are wrong in the release, and GPTModel's."""
    found = [pytest.param(case, id=name, marks=DEFECT) for name, case in table.items()]
    found += [pytest.param(x.other(model="GPTModel"), id=f"gpt-{name}", marks=CONTROL) for name, x in table.items()]
    return pytest.mark.parametrize("case", found)


NOT_A_NUMBER, INFINITE, NEGATIVE = places = 2, 3, 4  # the places of losses that are not finite, sequence first


@for_both_models(NONFINITE)
@on_ranks
def test_losses_that_are_not_finite_reach_the_caller(up, case):
    """As the kernel returns them; and its backward gets what comes from above."""
    model, hidden = up.build(case), up.hidden_states(case)
    ids, labels, mask, above = up.given_laid(case)
    hidden.flatten(0, 1)[NOT_A_NUMBER] = float("nan")
    made, arrived = [], []
    tracker = mtp.MTPLossLoggingHelper.tracker = {}

    def forward(*given):
        losses, *others = kernel_forward([], *given)
        losses[INFINITE], losses[NEGATIVE] = float("inf"), -float("inf")
        made.append(losses.clone())
        return losses, *others

    def backward(gradient, *given):
        arrived.append(gradient.clone())
        return kernel_backward(gradient, *given)

    model.set_input_tensor(hidden)
    with other_kernels():
        enter_kernels(forward, backward)
        found = model(ids, up.positions(case), None, labels=labels, loss_mask=mask)
        assert found.shape == case.shape[::-1], f"losses of shape {list(found.shape)}"
        found.backward(above)
    flat, above = found.detach().t().flatten(), up.given(case)[3].to(up.device).t().flatten()
    assert len(made) == case.depths + 1, f"{len(made)} calls of the kernel"
    assert [str(float(each)) for each in flat[[*places]]] == ["nan", "inf", "-inf"], flat[[*places]].tolist()
    # A NaN equals nothing: where they are is told by those that are finite, which equal what was made.
    assert identical(flat.nan_to_num(), made[-1].flatten().nan_to_num()), "not the kernel's losses"
    assert int(flat.isfinite().sum()) == above.numel() - len(places), "others are not finite, too"
    assert any(identical(each.flatten(), above) for each in arrived), "backward got something else"
    logged = [] if tracker.get("loss_sums") is None else tracker["loss_sums"].tolist()[: case.depths]
    assert [str(each) for each in logged] == ["nan"] * case.depths, f"logged losses of MTP: {logged}"


class KernelError(Exception):
    """Of the fused kernel, and of a type that nothing else can know of."""


# "Unsupported architecture" and "CUDA is not available" are a ValueError and an AssertionError.
KERNEL_ERRORS = (ValueError, AssertionError, ImportError, RuntimeError, NotImplementedError, KernelError)


@for_both_models(REFUSED)
@on_ranks
def test_error_of_the_kernel_reaches_the_caller(up, case):
    """The very object, be it of the door to the kernels, or of any call."""
    ids, labels, mask = up.given_laid(case)[:3]

    def go(name, error):
        mtp.MTPLossLoggingHelper.tracker = {}
        try:
            with torch.set_grad_enabled(case.mode != "no_grad"):
                model(ids, up.positions(case), None, labels=labels, loss_mask=mask)
        except Exception as found:
            if found is not error:
                raise AssertionError(f"it raised {type(found).__name__}: {found}, for {error!r} of {name}") from found
        else:
            raise AssertionError(f"{type(error).__name__} of {name} is swallowed")

    def fail(error, *_):
        raise error

    def call(left, number, error, *given):
        left.append(len(left))
        return fail(error) if left[-1] == number else kernel_forward([], *given)

    errors = [kind("of the fused kernel") for kind in KERNEL_ERRORS]
    with other_kernels():
        fused._get_platform = functools.partial(fail, errors[0])
        model = up.build(case)  # where there is no kernel, there is a model
        for error in errors:
            fused._get_platform = functools.partial(fail, error)
            go("the door", error)
            for number in range(case.depths + 1):
                enter_kernels(functools.partial(call, [], number, error), kernel_backward)
                go(f"call {number}", error)


@cases(FREED, lambda case: DEFECT if case.fusion and (case.depths or case.labels != "none") else CONTROL)
@on_ranks
def test_nothing_outlives_a_step(up, case):
    """It is the second step: what the first makes for all that follow may stay. What backward makes is not asked."""
    model, storages = up.build(case), Storages()
    mtp.MTPLossLoggingHelper.tracker = {}
    for note in (lambda *_: None, storages.note_new):
        with watching(note), torch.set_grad_enabled(case.mode != "no_grad"):
            ids, labels, mask, above = up.given_laid(case)
            found = model(ids, up.positions(case), None, labels=labels, loss_mask=mask)
        if case.mode == "train":
            found.backward(above if labels is not None else torch.ones_like(found))
        del ids, labels, mask, above, found
    storages.living(seconds=3.0)
    gc.collect()  # what refers to itself is no leak
    living = storages.living()
    assert storages.made, "nothing was seen"
    assert not living, f"there live on {[shape for _, shape in living]}"


# process_mtp_loss by itself.


def scale(up, case, factor):
    """Call process_mtp_loss with a function that multiplies by a number, or with None; and go backward.

    Hidden states of all depths are [(depths + 1) * sequence, batch, hidden].
    """
    model = up.build(case)
    shape = ((case.depths + 1) * case.shape[0], case.shape[1], HIDDEN)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(up.device).requires_grad_()
    entered, (_, labels, mask, _) = hidden.detach().clone(), up.given_laid(case)
    weight = model.shared_embedding_or_output_weight() if case.tied else model.output_layer.weight
    part, tracker = weight.detach().clone(), {}
    mtp.MTPLossLoggingHelper.tracker = tracker
    given = (labels, mask, model.output_layer, weight if case.tied else None, None, True)
    function = None if factor is None else lambda logits: logits * factor
    named = {"scale_logits_fn": function, "tp_group": parallel_state.get_tensor_model_parallel_group()}
    found = mtp.process_mtp_loss(hidden, *given, model.compute_language_model_loss, model.config, **named)
    found.backward(torch.full_like(found, 2.0))
    towards = {"towards_hidden": hidden.grad, "towards_weight": weight.grad}
    return {"found": found.detach(), "hidden": entered, "weight": part, "logged": tracker.get("loss_sums")} | towards


def scaled_by(found, case, factor):
    """Assert what process_mtp_loss logs, returns and gives back, with the scores multiplied by a factor."""
    weight, hidden = torch.cat([each["weight"] for each in found]), found[0]["hidden"].chunk(case.depths + 1)
    logged, towards, towards_weight = [], [torch.full((*case.shape, HIDDEN), 2.0).double()], 0.0
    for (labels, above, kept), entered in zip(targets(case), hidden[1:], strict=False):
        losses, gradient, product = reference(entered.double() * factor, weight, labels, above)
        logged.append((losses * kept).sum() / kept.sum().clamp(min=1))
        towards.append(gradient * factor)
        towards_weight = towards_weight + product
    for each in found:
        near(each["found"], hidden[0], FLOAT32, "what it returns")
        near(each["logged"], torch.stack(logged), FLOAT32, "the logged losses")
        near(each["towards_hidden"], torch.cat(towards), FLOAT32, "the hidden states' gradient")
    parts = [each["towards_weight"] for each in found]
    near(whole(parts, "gradient of the weight"), towards_weight, FLOAT32, "the weight's gradient")


@pytest.mark.control
@pytest.mark.parametrize(("case", "factor"), SCALED.values(), ids=SCALED)
def test_process_mtp_loss_scales_as_its_caller_says(found, case, factor):
    mine = found(scale, case=case, factor=factor)
    factor = 1.0 if factor is None else factor
    # The release does not ask the function for the fused loss; a fix that scales for HybridModel alone may leave that.
    try:
        scaled_by(mine, case, factor)
    except AssertionError:
        if not case.fusion or factor == 1.0:
            raise
        scaled_by(mine, case, 1.0)


# Inference.


@dataclass(frozen=True)
class Serving:
    """How a model is asked for logits by an inference engine, or as by one."""

    batching: str = "dynamic"  # or "static", or "" without a context
    last: bool = True  # materialize_only_last_token_logits
    active: bool = True  # InferenceMode
    speculative: int = 0
    quantized: bool = False  # then the embeddings of padding are zeroed in dynamic batches
    hashed: bool = False  # mixture of experts routed by hashes: the decoder is told the token ids
    embedded: bool = False  # decoder_input is given, and no token ids
    deprecated: bool = False  # the context is given as inference_params


CHOSEN = (4, 1, 2)  # the last tokens of a dynamic batch's requests, in their order
PADDING = 1  # the token that is its padding: one of those, so that it is seen what became of it

SERVED = {
    "static": (Case(ranks=2, tied=True, shape=(4, 3)), Serving("static", quantized=True)),
    "static-all": (Case(shape=(5, 2), mup=0.5), Serving("static", last=False)),
    "static-mtp": (Case(ranks=2, depths=1, shape=(3, 2), mup=0.5), Serving("static", hashed=True)),
    "dynamic": (Case(shape=(5, 1)), Serving()),
    "dynamic-all": (Case(ranks=2, mup=4.0, shape=(6, 1)), Serving(last=False, quantized=True, deprecated=True)),
    "dynamic-sequence_parallel": (
        Case(2, tied=True, shape=(6, 1), sequence_parallel=True, mup=0.25, default=1),
        Serving(hashed=True),
    ),
    "dynamic-sequence_parallel-all": (Case(2, shape=(6, 1), sequence_parallel=True), Serving(last=False)),
    "dynamic-mtp-speculative": (Case(tied=True, depths=2, shape=(7, 1), mup=4.0), Serving(speculative=2)),
    "dynamic-quantized": (Case(ranks=2, shape=(7, 1)), Serving(quantized=True)),
    "dynamic-embedded": (Case(shape=(6, 1)), Serving(quantized=True, hashed=True, embedded=True)),
    "no_context": (Case(ranks=2, gathered=True, shape=(3, 2)), Serving("", quantized=True)),
    "inactive": (Case(shape=(5, 1), mode="eval"), Serving(active=False, quantized=True, hashed=True)),
}


def serve(up, case, serving):
    """Ask HybridModel for logits as an inference engine does; its decoder returns what it gets, and tells that."""
    seen = {}
    model, ids = up.build(case), up.given(case)[0].to(up.device)

    def last_token_logits(hidden):
        seen["chosen_from"] = list(hidden.shape)
        # Index by index, which is refused before a GPU is asked: with a list of them it is a device-side assert there.
        return torch.cat([hidden[0, token].unsqueeze(0) for token in CHOSEN])

    context = types.SimpleNamespace(  # it chooses the tokens whose logits are asked for
        config=types.SimpleNamespace(materialize_only_last_token_logits=serving.last),
        is_static_batching=lambda: serving.batching == "static",
        is_dynamic_batching=lambda: serving.batching == "dynamic",
        num_speculative_tokens=serving.speculative,
        padding_slice=slice(PADDING, PADDING + 1),
        last_token_logits=last_token_logits,
    )
    context = context if serving.batching else None
    mask, padding = (torch.ones(1, device=up.device) for _ in range(2))
    model.config.fp8 = "hybrid" if serving.quantized else None
    model.config.moe_n_hash_layers = int(serving.hashed)

    def decode(hidden_states, **named):
        seen["wrapped"] = hasattr(hidden_states, "unwrap")
        expected = {"attention_mask": mask, "inference_context": context, "padding_mask": padding}
        expected |= {"rotary_pos_emb": None, "packed_seq_params": None}
        if serving.hashed and not serving.embedded:
            expected["input_ids"] = ids
        seen["told"] = named.keys() == expected.keys() and all(named[key] is each for key, each in expected.items())
        return hidden_states.unwrap() if seen["wrapped"] else hidden_states

    model.decoder.forward = decode
    calls = watch(model.output_layer)
    named = {"inference_params" if serving.deprecated else "inference_context": context, "padding_mask": padding}
    embedded = up.hidden_states(case) if serving.embedded else None
    given = (None, None, mask, embedded) if serving.embedded else (ids, ids, mask)
    with torch.no_grad(), InferenceMode.active() if serving.active else contextlib.nullcontext():
        found = model(*given, runtime_gather_output=True, **named)
    weight = model.shared_embedding_or_output_weight() if case.tied else model.output_layer.weight
    return {
        "found": found,
        "seen": seen,
        "made": [each["made"] for each in calls],
        "sequence_parallel": model.output_layer.sequence_parallel,
        "cached": getattr(model, "_decoder_hidden_states_cache", None),
        "embedding": model.embedding.word_embeddings.weight,
        "weight": weight,
    }


@pytest.mark.control
@pytest.mark.parametrize(("case", "serving"), SERVED.values(), ids=SERVED)
def test_logits_of_an_inference_engine(found, case, serving):
    """Which of them are made, what the decoder is told, and what is cached for speculation, which MuP leaves alone."""
    mine = found(serve, case=case, serving=serving)
    weight, embedding = (torch.cat([each[key] for each in mine]).double() for key in ("weight", "embedding"))
    hidden = hidden_for(case).double() if serving.embedded else embedding[given_to(case)[0].t()]
    if serving.active and serving.quantized and serving.batching == "dynamic" and not serving.embedded:
        hidden[PADDING] = 0
    kept, seen = hidden, {"told": True, "wrapped": serving.active}
    if serving.active and serving.batching and serving.last:
        hidden = hidden[-1:] if serving.batching == "static" else hidden[list(CHOSEN)]
        seen |= {"chosen_from": [1, case.shape[0], HIDDEN]} if serving.batching == "dynamic" else {}
    for each in mine:
        assert each["seen"] == seen, each["seen"]
        assert each["made"] == [[*hidden.shape[:2], CLASSES]], f"the output layer made {each['made']}"
        assert each["sequence_parallel"] == case.sequence_parallel, "sequence_parallel of the output layer"
        assert (each["cached"] is not None) == bool(case.depths), "hidden states are cached for MTP alone"
        near(each["found"], (hidden @ weight.t() * case.mup).transpose(0, 1), FLOAT32, "the logits")
        if case.depths:
            near(each["cached"], kept, FLOAT32, "the cached hidden states")
