# ruff: noqa: SLF001 - the door to the kernels is a private name
"""HybridModel (MambaModel) trains with cross_entropy_fusion_impl="linear" (branch dev), as GPTModel does.

Losses, gradients and logits are right on tensor-parallel ranks beside replicas with other tokens, with any output
weight (own, tied to the embedding, or tied on a last stage), with MuP, and with multi-token prediction (MTP). Both
models share process_mtp_loss. Inputs and configuration stay as they are.

The models are real and small: one MLP layer of 8 hidden units in the decoder and in each depth of MTP, without a final
norm. Stand-ins on every device: for the two entries of the fused kernel, a vocab-parallel cross entropy in plain torch
with the same arguments, results and demands (contiguous, as many tokens as labels); for an inference engine, its
context and a decoder that returns its input. On the CPU also nvtx.range, current_device and the fork of the GPU's
random numbers. So the contract says nothing of the kernel, speed, memory, or Mamba layers.

Not judged: an error that backward raises; pickled or copied models, which hold process groups.

Tolerances: the norm of the difference over the norm of the reference. The reference is float64, from the hidden states
that the decoder or MTP returns and from the whole weight. 2^-17, 64 roundings of float32, for sums of at most 28
classes, 24 tokens and 8 hidden units. Where gradients are rounded to bf16, 2^-6 besides, for a few roundings of 2^-9
and for what cancels.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import os
import types
from dataclasses import dataclass, replace
from unittest import mock

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # inductor takes a minute for what eager mode computes at once
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron wants it on Hopper
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")  # NCCL's watchdog leaves it to the rank to tell of them

import pytest
import torch

torch.compile = functools.partial(torch.compile, backend="eager")  # else it imports inductor, which takes seconds
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
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from kit.capture import watching
from kit.ranks import own_group
from kit.vocabulary import (
    Handed,
    Storages,
    assert_close,
    assert_same,
    counted_ranks,
    gathered,
    on_ranks,
    perform,
)

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
HIDDEN, CLASSES = 8, 28
FLOAT32 = 2.0**-17
BFLOAT16 = 2.0**-6
MTP_SCALE = 0.1  # mtp_loss_scaling_factor, as it is by default
IGNORED = -100


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
    wrapped: bool = False  # the output layer of a model that is built is replaced, by a module around another one
    sliced: bool = False  # what is given for each token is tokens[1:, 1:-1] of a longer batch
    default: int = 0  # the size of parallel_state's groups, where the caller gives a collection of its own
    embedded: bool = False  # decoder_input is given, and no token ids, as by a multimodal model

    @property
    def world(self):
        """Return how many ranks it takes: groups of one size that differ are two at least."""
        return 2 * self.ranks if self.default == self.ranks else max(self.ranks, self.default)


# fmt: off
CASES = {
    "plain": Case(),
    "plain-four_ranks": Case(ranks=4, labels="some ignored"),
    "tied": Case(tied=True, shape=(7, 1)),
    "tied-two_ranks": Case(ranks=2, tied=True, shape=(4, 3), labels="some ignored", sliced=True),
    "mtp": Case(depths=1, shape=(7, 2), mask=True, sliced=True),
    "mtp-two_ranks": Case(ranks=2, depths=2, shape=(7, 2)),
    "mtp-tied": Case(tied=True, depths=2, shape=(8, 3), per_token=True, mask=True, sliced=True),
    "mtp-tied-detached": Case(ranks=2, tied=True, depths=1, detached=True, per_token=True),
    "mtp-eval": Case(depths=1, mode="eval", sliced=True),
    "mtp-bfloat16": Case(ranks=2, depths=1, dtype="bfloat16", mask=True),
    "eval": Case(mode="eval", mask=True, shape=(3, 3), sliced=True),
    "gathered": Case(ranks=2, gathered=True),
    "sequence_parallel": Case(ranks=2, shape=(6, 2), sequence_parallel=True, sliced=True),
    "sequence_parallel-mtp-tied": Case(2, tied=True, depths=2, shape=(6, 1), sequence_parallel=True),
    "sequence_parallel-mtp-four_ranks": Case(4, depths=1, shape=(8, 3), sequence_parallel=True, mask=True),
    "last_stage": Case(ranks=2, tied=True, last_stage=True, shape=(5, 1)),
    "last_stage-own": Case(last_stage=True, mode="eval"),
    "last_stage-mtp": Case(tied=True, depths=1, last_stage=True, shape=(4, 1)),  # with two output weights
    "alias": Case(model="MambaModel", depths=1),
    "group": Case(ranks=2, depths=1, shape=(6, 2), sequence_parallel=True, mask=True, default=1),
    "group-crossed": Case(ranks=2, tied=True, shape=(5, 3), default=2),
    "mup": Case(mup=0.25),
    "mup-mtp": Case(ranks=2, depths=2, mup=0.5, mask=True),
    "mup-detached": Case(
        2, depths=2, shape=(6, 1), mask=True, sequence_parallel=True, detached=True, per_token=True, mup=2.0
    ),
    "mup-tied-detached": Case(2, True, 1, mode="eval", detached=True, mup=0.5, last_stage=True, default=1),
    "mup-bfloat16": Case(ranks=2, depths=1, dtype="bfloat16", mup=0.5),
    "mup-mtp-no_grad": Case(depths=2, shape=(4, 1), mode="no_grad", mup=2.0),
    "wrapped": Case(depths=1, wrapped=True),
    "wrapped-two_ranks": Case(2, depths=1, shape=(6, 1), dtype="bfloat16", labels="some ignored", wrapped=True),
    "all_ignored": Case(ranks=2, labels="all ignored"),
    "all_ignored-mtp": Case(tied=True, depths=1, shape=(4, 2), labels="all ignored", mask=True),
    "rl": Case(depths=1, labels="none", mask=True, sliced=True),
    "rl-two_ranks": Case(ranks=2, tied=True, depths=2, labels="none", shape=(7, 1), sliced=True),
    "rl-mup-last_stage": Case(2, tied=True, depths=1, labels="none", shape=(4, 2), mup=0.5, last_stage=True),
    "embedded": Case(ranks=2, embedded=True, shape=(4, 3)),
    "embedded-mup": Case(tied=True, embedded=True, mode="eval", mup=0.5),
}
# fmt: on
TWINS = {name: CASES[name] for name in ("tied", "mtp-two_ranks", "mtp-tied", "sequence_parallel-mtp-tied")}
NEIGHBOURS = {
    "gpt": Case(model="GPTModel", labels="some ignored"),
    "gpt-mtp-tied": Case(2, tied=True, depths=2, shape=(6, 1), sequence_parallel=True, model="GPTModel"),
    "off-linear": Case(depths=1, shape=(7, 2), mask=True, fusion=False),
    "off-linear-two_ranks": Case(2, depths=2, shape=(7, 2), mup=0.5, fusion=False),
    "off-native": Case(2, depths=1, mask=True, mup=2.0, fusion=False, implementation="native"),
    "native": Case(2, depths=1, shape=(7, 2), mask=True, implementation="native"),
    "native-tied": Case(2, tied=True, depths=2, shape=(7, 2), implementation="native"),
    "logits": Case(labels="none"),
    "logits-tied-two_ranks": Case(ranks=2, tied=True, labels="none", shape=(3, 2), mup=2.0),
    "logits-gathered": Case(ranks=2, gathered=True, labels="none", mup=0.5),
    "logits-group": Case(ranks=2, labels="none", shape=(3, 1), default=1),
}


# The fused kernel's entries, in plain torch.


def losses_of_tokens(hidden, whole_weight, labels, ignore_index):
    """Return the loss of each token; a label that is no class is no reason to end a GPU's process."""
    labels = labels.flatten().where(labels.flatten() < whole_weight.shape[0], ignore_index)
    logits = hidden.flatten(0, 1) @ whole_weight.t()
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")


def kernel_forward(seen, *arguments):
    """Stand in for the entry of the fused forward."""
    hidden, weight, labels, group, reduction, ignore_index, sequence_parallel = arguments
    assert reduction == "none", f"one loss is asked for, by reduction {reduction}"
    assert (hidden.dim(), weight.dim(), labels.dim()) == (3, 2, 2)
    assert all(tensor.is_contiguous() and tensor.device == hidden.device for tensor in (hidden, weight, labels))
    wide = torch.cat(gathered(hidden, group)) if sequence_parallel else hidden
    assert wide.shape[:2].numel() == labels.numel()
    assert wide.shape[2] == weight.shape[1]
    losses = losses_of_tokens(wide.float(), torch.cat(gathered(weight, group)).float(), labels, ignore_index)
    seen.append(f"{hidden.dtype} {weight.dtype}")
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    return losses, losses, losses, losses, rank, size, wide


def kernel_backward(above, hidden, weight, labels, *arguments):
    """Stand in for the entry of the fused backward."""
    _, _, _, _, ignore_index, group, rank, size, sequence_parallel = arguments
    leaves = [x.detach().float().requires_grad_() for x in (hidden, torch.cat(gathered(weight, group)))]
    with torch.enable_grad():
        losses = losses_of_tokens(*leaves, labels, ignore_index)
    towards_hidden, towards_weight = torch.autograd.grad(losses, leaves, above)
    if sequence_parallel:
        towards_hidden = towards_hidden.chunk(size)[rank].clone()
    return towards_hidden.type_as(hidden), towards_weight.chunk(size)[rank].type_as(weight)


# The models.


class Models:
    """Builds models on one rank of tensor-parallel groups of one size, and goes through them."""

    def __init__(self, rank):
        self.rank, self.count, self.device = rank.number, rank.count, torch.device(rank.device)
        self.replica = 0  # of the data-parallel ones, which get other tokens
        self.group = None  # the tensor-parallel one that a case asks for
        self.states = {}  # of parallel_state, by the size of its tensor-parallel groups
        self.collections = {}  # of process groups that are not parallel_state's, by that size
        self.kernels = []
        for size in (size for size in (1, 2, 4) if size <= self.count):
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(size, create_gloo_process_groups=False)
            self.states[size] = dict(vars(parallel_state))
            self.collections[size] = self.collect(size)
        fused._get_platform = kernels(functools.partial(kernel_forward, self.kernels), kernel_backward)
        if self.device.type == "cuda":
            parallel_random.model_parallel_cuda_manual_seed(11)
            torch.set_float32_matmul_precision("highest")
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        else:
            torch.cuda.nvtx.range = lambda _: contextlib.nullcontext()
            torch.cuda.current_device = lambda: "cpu"
            parallel_random.get_cuda_rng_tracker().fork = contextlib.nullcontext  # nothing is drawn: dropout is 0

    def enter(self, case):
        """Use the groups of a case; each replica has tokens of its own."""
        vars(parallel_state).update(self.states[case.default or case.ranks])
        self.replica = self.rank % (self.count // case.ranks) if case.default else self.rank // case.ranks
        own = case.default and self.collections[case.ranks].tp
        self.group = own or parallel_state.get_tensor_model_parallel_group()

    def collect(self, size):
        """Return a caller's collection, with the strides of tensor- and data-parallel groups swapped."""
        tensor, data = own_group(size, apart=True), own_group(self.count // size)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        context = parallel_state.get_context_parallel_group()
        return ProcessGroupCollection(tp=tensor, dp=data, dp_cp=data, embd=None, pp=pipeline, cp=context)

    def whole(self, case, hidden):
        """Return hidden states [sequence, batch, hidden] of all depths: sequence parallel, each rank has a part."""
        if not case.sequence_parallel:
            return hidden.detach()
        chunks = zip(*(part.chunk(case.depths + 1) for part in gathered(hidden, self.group)), strict=True)
        return torch.cat([torch.cat(parts) for parts in chunks])

    def build(self, case, state=None, config=None):
        """Return a model, with the parameters of another one if they are given."""
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
        if case.wrapped:
            model.output_layer = Wrapper(self.build(replace(case, wrapped=False)).output_layer)
        model.to(self.device, getattr(torch, case.dtype)).train(case.mode == "train")
        for name, parameter in model.named_parameters() if state else ():
            parameter.data.copy_(state[neutral(name)])
        return model

    def stage(self, case, config, *, first=True):
        """Return a stage of a pipeline that has no output layer."""
        named = {"hybrid_layer_pattern": "-", "pre_process": first, "post_process": False}
        return HybridModel(config, hybrid_spec(case), CLASSES, 16, **named).to(self.device)

    def inputs(self, case):
        """Return token ids, labels, loss mask, and the gradient of the losses that comes from above."""
        random = torch.Generator().manual_seed(7 + self.replica)
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
        inputs = []
        for tensor in (ids, None if case.labels == "none" else labels, mask, above):
            if tensor is not None and case.sliced:  # what lies around are tokens, too
                inputs.append(torch.nn.functional.pad(tensor, (1, 1, 1, 0), value=1).to(self.device)[1:, 1:-1])
            else:
                inputs.append(tensor if tensor is None else tensor.to(self.device))
        return inputs

    def positions(self, case):
        return torch.arange(case.shape[0], device=self.device).expand(case.shape[::-1])

    def step(self, case, state=None):
        """Go forward and backward through a model; assert that what it is given stays as it is."""
        config, (ids, labels, mask, above) = configure(case), self.inputs(case)
        settings, handed = settings_of(config), Handed()
        staged = case.last_stage and not case.depths and not case.default
        if staged:  # as with a virtual pipeline, of which a rank has several stages, of one configuration
            assert self.stage(case, config)(ids, ids, None).shape == (*case.shape, HIDDEN), "no hidden states"
        model = self.build(case, state, config)
        if staged:
            self.stage(case, config, first=False)
        named, hidden = {"labels": labels, "loss_mask": mask}, None
        if case.last_stage or case.embedded:
            random = torch.Generator().manual_seed(5 + self.replica)
            hidden = torch.randn(*case.shape, HIDDEN, generator=random).to(self.device, getattr(torch, case.dtype))
            hidden.requires_grad_(case.mode != "no_grad")
            model.set_input_tensor(hidden if case.last_stage else None)
            named |= {"decoder_input": hidden} if case.embedded else {}
        # A caller that embeds tokens has none to give, nor has a last stage that is not to embed them for MTP.
        tokens = (None, None) if hidden is not None and not case.depths else (ids, self.positions(case))
        kept = named | {"ids": ids, "hidden": hidden, "above": above} | dict(model.named_parameters())
        for name, tensor in kept.items():
            if tensor is not None:
                handed.watch(name, tensor)
        mine = watch(model, handed)
        mine.weight, mine.inputs = output_weight(model, case), (ids, labels, mask, above)
        mtp.MTPLossLoggingHelper.tracker = tracker = {}
        self.kernels.clear()
        with torch.set_grad_enabled(case.mode != "no_grad"):
            result = model(*tokens, None, **named)
        assert isinstance(result, torch.Tensor), f"neither losses nor logits: {result}"
        towards = above if labels is not None else torch.ones_like(result)
        assert result.shape == towards.shape, f"losses of shape {list(result.shape)}"
        if case.mode != "no_grad":
            assert result.requires_grad, "nothing to go backward from"
            result.backward(towards)
        handed.assert_unaltered()
        assert settings_of(config) == settings, "the configuration was changed"
        mine.result, mine.kernels, mine.logged = result.detach(), [*self.kernels], tracker.get("loss_sums")
        mine.keys = {*map(neutral, model.state_dict())}
        mine.parameters = {neutral(name): parameter for name, parameter in model.named_parameters()}
        return mine


def watch(model, handed):
    """Keep what a model's parts return, as the hook of a distillation does; return what enters the output layer."""
    mine = types.SimpleNamespace(calls=0)

    def called(*_):
        mine.calls += 1

    def after(name, _, __, returned):
        if isinstance(returned, torch.Tensor):
            handed.watch(f"what {name} returned", returned)
            mine.hidden = returned
            if returned.requires_grad:
                returned.retain_grad()

    for name in ("embedding", "decoder", "mtp"):
        if hasattr(model, name):
            getattr(model, name).register_forward_hook(functools.partial(after, name))
    model.output_layer.register_forward_hook(called)
    return mine


def output_weight(model, case):
    """Return the weight that the model is to use; a tied one as a view, which has the output layer's gradient alone."""
    if not case.tied:
        return model.output_layer.weight
    shared = model.shared_embedding_or_output_weight()
    weight = shared.view_as(shared)
    if case.mode != "no_grad":
        weight.retain_grad()
    model.shared_embedding_or_output_weight = lambda: weight
    return weight


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


def kernels(forward, backward):
    """Return what hands these out as the kernels' entries."""
    platform = types.SimpleNamespace(forward_func=forward, backward_func=backward)
    return lambda: platform


class Wrapper(torch.nn.Module):
    """Hands everything to an output layer, whose weights it has doubled; FSDP2 and adapters replace layers, too."""

    def __init__(self, layer):
        super().__init__()
        self.inner = layer
        for weight in layer.parameters():
            weight.data.mul_(2)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def __getattr__(self, name):
        inner = super().__getattr__("inner")
        return inner if name == "inner" else getattr(inner, name)


def neutral(name):
    """Return the name of a parameter of HybridModel as GPTModel has it."""
    return name.replace("mtp_model_layer.layers.0.", "mtp_model_layer.")


def settings_of(config):
    """Return what each attribute of a configuration is, in words, which tell of a list that was changed as well.

    What begins with an underscore is not its caller's: a block of GPTModel keeps a context there.
    """
    return {name: repr(value) for name, value in vars(config).items() if not name.startswith("_")}


# The reference.


def rolled(tensor, steps):
    """Return what is shifted to the left by so many tokens, with zeros at the end."""
    moved = tensor.roll(-steps, -1)
    moved[:, tensor.shape[1] - steps :] = 0
    return moved


def reference(case, hidden, weight, inputs):
    """Return losses or logits, the logged losses of MTP, and the gradients of hidden states and weight, in float64."""
    ids, labels, mask, above = inputs
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    main, *depths = hidden.chunk(case.depths + 1)
    mask = torch.ones_like(above) if mask is None else mask
    mtp_labels, before = (rolled(ids, 1), rolled(mask, 1)) if labels is None else (labels, mask)

    def logits_of(states, weight):
        return (states @ weight.t()).transpose(0, 1) * case.mup

    def losses_of(states, weight, labels):
        logits = logits_of(states, weight).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)

    logged, total = [], 0.0
    for depth, states in enumerate(depths, 1):
        kept = rolled(before, depth)
        head = weight.detach() if case.detached else weight  # the loss of the main head alone reaches it then
        summed = (losses_of(states, head, rolled(mtp_labels, depth)) * kept).sum()
        mean = summed / kept.sum().clamp(min=1)
        logged.append(summed if case.per_token else mean)
        total = total + MTP_SCALE / case.depths * mean * (before.sum() if case.per_token else 1)
    result = logits_of(main, weight) if labels is None else losses_of(main, weight, labels)
    total = total + (result.sum() if labels is None else (result * above).sum())
    return result.detach(), logged, *torch.autograd.grad(total, (hidden, weight))


near = functools.partial(assert_close, least=1e-30)


def judge(up, case, mine):
    """Judge what came out, the losses of MTP that are logged, and the gradients at the output layer."""
    # "native" rounds the logits' gradient to bf16, whatever the model's dtype is.
    rounded = case.dtype == "bfloat16" or (case.fusion and case.implementation == "native")
    limit = FLOAT32 + (BFLOAT16 if rounded else 0.0)
    assert mine.weight.shape == (CLASSES // case.ranks, HIDDEN), "not a rank's part of the weight"
    weight = torch.cat(gathered(mine.weight, up.group))
    expected, logged, *towards = reference(case, up.whole(case, mine.hidden), weight, mine.inputs)
    if case.labels == "none" and not case.gathered:
        expected = expected.chunk(case.ranks, -1)[up.group.rank()]
    near(mine.result, expected, FLOAT32, "losses or logits")
    if case.labels != "none":
        losses = gathered(mine.result, up.group)
        assert_same(losses, losses[:1] * len(losses), "the losses of another rank")
        assert mine.result.dtype == torch.float32, f"losses of {mine.result.dtype}"
    if case.depths and case.mode == "train":
        assert mine.logged is not None, "no loss of MTP is logged"
        near(mine.logged[: case.depths], torch.stack(logged), FLOAT32, "the logged losses of MTP")
    if case.mode != "no_grad":
        assert mine.hidden.grad is not None, "no gradient of the hidden states"
        assert mine.weight.grad is not None, "no gradient of the weight"
        near(up.whole(case, mine.hidden.grad), towards[0], limit, "the hidden states' gradient")
        near(torch.cat(gathered(mine.weight.grad, up.group)), towards[1], limit, "the weight's gradient")
    losses = case.depths + (case.labels != "none") if case.implementation == "linear" and case.fusion else 0
    assert mine.kernels == [f"torch.{case.dtype} torch.{case.dtype}"] * losses, f"the kernels got {mine.kernels}"
    assert mine.calls == case.depths + 1, f"{mine.calls} calls of the output layer"


@pytest.fixture(scope="session")
def up(figure):
    with counted_ranks(Models, figure) as group:
        yield group


def cases(table):
    return pytest.mark.parametrize("case", table.values(), ids=table)


# Losses, logits and gradients.


@pytest.mark.defect
@cases(CASES)
@on_ranks
def test_losses_and_gradients_are_exact(up, case):
    """Losses come out, and those of MTP are logged; without labels, as in reinforcement learning, logits come out."""
    judge(up, case, up.step(case))


@pytest.mark.defect
@cases(TWINS)
@on_ranks
def test_gpt_model_and_the_unfused_model_have_the_same_gradients_and_keys(up, case):
    mine = up.step(case)
    gradients = {name: weight.grad for name, weight in mine.parameters.items() if weight.grad is not None}
    # A gradient that is nothing but rounding, of a weight that one-hot minus softmax cancels, has no direction.
    least = max(float(gradient.norm()) for gradient in gradients.values()) / 8
    for other in (replace(case, model="GPTModel"), replace(case, fusion=False)):
        theirs = up.step(other, mine.parameters)
        assert mine.keys == theirs.keys, "other keys of the state dict"
        near(mine.result, theirs.result, FLOAT32, "the losses")
        for name, weight in theirs.parameters.items():
            assert (weight.grad is None) == (name not in gradients), f"a gradient of {name}"
            if weight.grad is not None:
                assert_close(gradients[name], weight.grad, FLOAT32, f"the gradient of {name}", least)


def judged(up, case):
    """Judge a step; return what the other tree has to come to as well."""
    mine = up.step(case)
    judge(up, case, mine)
    return {"found": mine.result, "towards_hidden": mine.hidden.grad, "towards_weight": mine.weight.grad}


@pytest.mark.control
@cases(NEIGHBOURS)
def test_neighbours_are_right(up, output, request, case):
    """GPTModel, models whose configuration does not ask for the fused kernel, and logits: with the bits of release."""
    for rank, tensors in enumerate(up.run(perform, judged, {"case": case})):
        for name, tensor in tensors.items():
            output(f"{request.node.callspec.id}.{name}.{rank}", tensor)


# How the model and its output layer are built.


def ramp(start, tensor):
    """Initialise a whole weight so that each part of it tells where it is from."""
    with torch.no_grad():
        return tensor.copy_(torch.arange(start, start + tensor.numel()).view_as(tensor))


def built(up, case):
    """Return what tells how a model has built its output layer."""
    config = configure(case)
    config.init_method = functools.partial(ramp, 1000)
    config.embedding_init_method = functools.partial(ramp, 2000)
    config.output_layer_init_method = functools.partial(ramp, 3000)
    layer = up.build(case, config=config).output_layer
    told = {"own config": layer.config is config, "bias": layer.bias, "weight": layer.weight is not None}
    told["ranks"] = torch.distributed.get_process_group_ranks(layer.tp_group)
    for owner in (layer, layer.weight) if told["weight"] else (layer,):
        plain = {name: value for name, value in vars(owner).items() if isinstance(value, bool | int | float | str)}
        told |= {f"{owner is not layer}.{name}": value for name, value in plain.items() if name[0] != "_"}
    if told["weight"]:
        values = layer.weight.detach().double().cpu()
        told["tensor"] = [layer.weight.dtype, values.shape, float(values[0, 0]), float(values.sum())]
    return told


@pytest.mark.control
@cases(
    {
        "last_stage": Case(ranks=2, tied=True, last_stage=True),
        "mup-mtp": Case(ranks=2, mup=4.0, depths=2, gathered=True),
        "mup-last_stage": Case(mup=0.5, tied=True, last_stage=True),
        "mup-last_stage-own": Case(ranks=2, mup=0.5, last_stage=True, sequence_parallel=True),
        "group-of_one": Case(mup=0.5, default=2),
        "group-crossed": Case(ranks=2, tied=True, last_stage=True, sequence_parallel=True, default=2),
        "group-off": Case(ranks=2, fusion=False, default=1),
    }
)
@on_ranks
def test_output_layer_is_built_as_that_of_gpt_model(up, case):
    mine, gpt = built(up, case), built(up, replace(case, model="GPTModel"))
    differ = {name: (mine.get(name), value) for name, value in gpt.items() if mine.get(name) != value}
    assert not differ, f"it has, and GPTModel's has: {differ}"


@pytest.mark.control
def test_process_mtp_loss_takes_its_arguments_in_the_order_of_the_release():
    """Upstream's own check of compatibility refuses to move one."""
    names = [*inspect.signature(mtp.process_mtp_loss).parameters]
    assert names[12:15] == ["scale_logits_fn", "input_ids", "sequence_roll_context"], f"the arguments are {names}"


# What the kernel returns or raises, and what outlives a step.


@pytest.mark.defect
@cases({"plain": Case(ranks=2), "mtp": Case(tied=True, depths=1, shape=(6, 2))})
@on_ranks
def test_losses_that_are_not_finite_reach_the_caller(up, case):
    model, (ids, labels, _, _) = up.build(case), up.inputs(case)
    tracker = mtp.MTPLossLoggingHelper.tracker = {}

    def forward(*inputs):
        losses, *others = kernel_forward([], *inputs)
        losses[2], losses[3], losses[4] = float("nan"), float("inf"), -float("inf")
        return losses, *others

    with mock.patch.object(fused, "_get_platform", kernels(forward, kernel_backward)):
        losses = model(ids, up.positions(case), None, labels=labels).detach().t().flatten().tolist()
    assert [str(loss) for loss in losses[2:5]] == ["nan", "inf", "-inf"], f"losses {losses}"
    logged = tracker["loss_sums"].tolist()[: case.depths] if case.depths else []
    assert [str(loss) for loss in logged] == ["nan"] * case.depths, f"logged losses of MTP: {logged}"


class KernelError(Exception):
    """Of the fused kernel, and of a type that nothing else can know of."""


# "Unsupported architecture" and "CUDA is not available" are a ValueError and an AssertionError.
KERNEL_ERRORS = (ValueError, AssertionError, ImportError, RuntimeError, NotImplementedError, KernelError)


@pytest.mark.defect
@cases(
    {
        "plain": Case(),
        "mtp": Case(ranks=2, depths=1),
        "mtp-no_grad": Case(tied=True, depths=2, mode="no_grad"),
    }
)
@on_ranks
def test_error_of_the_kernel_reaches_the_caller(up, case):
    """The very object, from the first call or a later one; and where there is no kernel, there is a model."""
    ids, labels, mask, _ = up.inputs(case)
    for kind, number in itertools.product(KERNEL_ERRORS, range(case.depths + 1)):
        error, caught = kind("of the fused kernel"), None
        answers = [fused._get_platform()] * number + [error]
        with mock.patch.object(fused, "_get_platform", side_effect=answers):
            model = up.build(case)
            mtp.MTPLossLoggingHelper.tracker = {}
            try:
                with torch.set_grad_enabled(case.mode != "no_grad"):
                    model(ids, up.positions(case), None, labels=labels, loss_mask=mask)
            except Exception as raised:
                caught = raised
        if caught is not error:
            told = f"it raised {caught!r}" if caught else "it is swallowed"
            raise AssertionError(f"{told}: {error!r} of call {number}") from caught


@pytest.mark.defect
@cases(
    {
        "train": Case(2, depths=1, shape=(6, 2), mask=True, sequence_parallel=True, mup=0.5, sliced=True),
        "eval": Case(tied=True, depths=1, labels="some ignored", mode="eval"),
        "no_grad": Case(mode="no_grad"),
    }
)
@on_ranks
def test_nothing_outlives_a_step(up, case):
    """Nor the second one: what the first makes for all that follow may stay. What backward makes is not asked."""
    model, storages = up.build(case), Storages()
    mtp.MTPLossLoggingHelper.tracker = {}
    for note in (lambda *_: None, storages.note):
        with watching(note), torch.set_grad_enabled(case.mode != "no_grad"):
            ids, labels, mask, above = up.inputs(case)
            losses = model(ids, up.positions(case), None, labels=labels, loss_mask=mask)
        if case.mode == "train":
            losses.backward(above)
        del ids, labels, mask, above, losses
    gc.collect()  # what refers to itself is no leak
    living = storages.living(seconds=3.0)
    assert storages.made, "nothing was seen"
    assert not living, f"there live on {[shape for _, shape in living]}"


# process_mtp_loss by itself, called as GPTModel does, which has its layer in the release.


@pytest.mark.control
@pytest.mark.parametrize(
    ("case", "factor"),
    [
        pytest.param(Case(2, depths=2, shape=(7, 2), mask=True, mup=0.5, model="GPTModel"), None, id="none"),
        pytest.param(Case(tied=True, depths=1, mup=0.25, model="GPTModel"), 3.0, id="own"),
        pytest.param(Case(2, depths=2, mask=True, mup=0.5, model="GPTModel", fusion=False), 3.0, id="off"),
        pytest.param(Case(2, tied=True, depths=1, mup=0.5, model="GPTModel", fusion=False), None, id="off-none"),
    ],
)
@on_ranks
def test_process_mtp_loss_scales_as_its_caller_says(up, case, factor):
    """By the function that is given, whatever the configuration says."""
    model, (_, labels, mask, _) = up.build(case), up.inputs(case)
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn((case.depths + 1) * case.shape[0], case.shape[1], HIDDEN, generator=random).to(up.device)
    weight = output_weight(model, case)
    mtp.MTPLossLoggingHelper.tracker = tracker = {}
    mtp.process_mtp_loss(
        hidden.requires_grad_(),
        labels,
        mask,
        model.output_layer,
        weight if case.tied else None,
        None,
        True,
        model.compute_language_model_loss,
        model.config,
        scale_logits_fn=factor and (lambda logits: logits * factor),
        tp_group=up.group,
    ).sum().backward()
    logged, start = tracker["loss_sums"][: case.depths], case.shape[0]
    # The release does not ask the function for the fused loss; a fix that scales for HybridModel alone may leave that.
    right = [factor or 1.0, 1.0] if case.fusion else [factor or 1.0]
    whole = torch.cat(gathered(weight, up.group))
    references = [reference(replace(case, mup=scale), hidden, whole, up.inputs(case)) for scale in right]
    expected = min(references, key=lambda results: float((torch.stack(results[1]) - logged).norm()))
    near(logged, torch.stack(expected[1]), FLOAT32, "the logged losses")
    near(hidden.grad[start:], expected[2][start:], FLOAT32, "the hidden states' gradient")


# Inference.


CHOSEN = (4, 1, 2)  # the last tokens of a dynamic batch's requests, in their order
PADDING = 1  # the token that is its padding: one of those, so that it is seen what became of it

SERVED = {  # a case, "static" or "dynamic" batching, and what else is asked for
    "static": (Case(ranks=2, tied=True, shape=(4, 3)), {"static", "last", "quantized"}),
    "static-mtp": (Case(2, depths=1, shape=(3, 2), mup=0.5), {"static", "last", "hashed"}),
    "dynamic": (Case(shape=(5, 1)), {"dynamic", "last"}),
    "dynamic-all": (Case(ranks=2, mup=4.0, shape=(6, 1)), {"dynamic", "quantized"}),
    "dynamic-sequence_parallel": (
        Case(2, tied=True, shape=(6, 1), sequence_parallel=True, mup=0.25, default=1),
        {"dynamic", "last", "hashed"},
    ),
}


@pytest.mark.control
@pytest.mark.parametrize(("case", "asked"), SERVED.values(), ids=SERVED)
@on_ranks
def test_logits_of_an_inference_engine(up, case, asked):
    """Which of them are made, what the decoder is told, and what is cached for speculation, which MuP leaves alone.

    "last" are the last tokens alone. "quantized" zeroes the embeddings of padding in dynamic batches. "hashed" is a
    mixture of experts that is routed by token ids, so the decoder is told them.
    """
    model, ids = up.build(case), up.inputs(case)[0]
    mask, padding = (torch.ones(1, device=up.device) for _ in range(2))
    context = types.SimpleNamespace(  # it chooses the tokens whose logits are asked for
        config=types.SimpleNamespace(materialize_only_last_token_logits="last" in asked),
        is_static_batching=lambda: "static" in asked,
        is_dynamic_batching=lambda: "dynamic" in asked,
        num_speculative_tokens=0,
        padding_slice=slice(PADDING, PADDING + 1),
        # Index by index, which is refused before a GPU is asked: with a list of them it is a device-side assert there.
        last_token_logits=lambda hidden: torch.cat([hidden[0, token].unsqueeze(0) for token in CHOSEN]),
    )
    model.config.fp8 = "hybrid" if "quantized" in asked else None
    model.config.moe_n_hash_layers = int("hashed" in asked)
    expected = {"attention_mask": mask, "inference_context": context, "padding_mask": padding}
    expected |= {"rotary_pos_emb": None, "packed_seq_params": None}
    expected |= {"input_ids": ids} if "hashed" in asked else {}

    def decode(hidden_states, **named):
        assert named.keys() == expected.keys(), f"the decoder is told {', '.join(named)}"
        assert all(named[key] is value for key, value in expected.items()), "the decoder is told something else"
        return hidden_states.unwrap()  # wrapped, for the decoder to free it

    model.decoder.forward = decode
    made = []
    model.output_layer.register_forward_hook(lambda _, __, returned: made.append([*returned[0].shape]))
    table, weight = (
        torch.cat(gathered(part, up.group)).double()
        for part in (model.embedding.word_embeddings.weight, output_weight(model, case))
    )
    hidden = table[ids.t()]
    with torch.no_grad(), InferenceMode.active():
        logits = model(ids, ids, mask, runtime_gather_output=True, inference_context=context, padding_mask=padding)
    if {"quantized", "dynamic"} <= asked:
        hidden[PADDING] = 0
    if case.depths:
        near(model._decoder_hidden_states_cache, hidden, FLOAT32, "the hidden states that are cached")
    if "last" in asked:
        hidden = hidden[-1:] if "static" in asked else hidden[list(CHOSEN)]
    assert made == [[*hidden.shape[:2], CLASSES]], f"the output layer made {made}"
    assert model.output_layer.sequence_parallel == case.sequence_parallel, "sequence_parallel of the output layer"
    near(logits, (hidden @ weight.t() * case.mup).transpose(0, 1), FLOAT32, "the logits")
