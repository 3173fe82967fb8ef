"""A_log and D of Mamba mixers stay in fp32 inside Float16Module, as the mixer's comments say.

MambaMixer makes both in fp32, with "Keep A_log in fp32" and "Keep in fp32" beside them. In a bf16 or fp16 model each
head's rate of decay, exp(A_log), has to be the one that was made or loaded, for the kernels, the optimizer and in
checkpoints. All else is cast as module.bfloat16() or half() did: parameters, their gradients and buffers, frozen,
tied, empty or in a child; complex numbers and integers, identities, attributes and modes stay. Where the tree has
mark_keep_in_fp32, what is marked stays in fp32, also after the module was written and read whole, but not where the
mark's attribute is set to False, nor a namesake in another module. Once fp32 parameters stand between 16-bit ones, the
optimizer for bf16 and fp16 has to step them, and to write and read the state of each under its own name.

Judged is what the real mixer in the real Float16Module hands to its kernels in training, static prefill and static
decode. No CUDA kernel runs: the kernels and mamba_ssm's gated norm are their formulas in PyTorch, in fp32,
differentiable. Linear layers are torch's. Process groups of one rank are an object with a rank and a size, or PyTorch's
fake group. The optimizer is the real one on CPU tensors.

Not judged: GPUs; mamba_ssm's kernels; dynamic batching; several ranks; speed; loss; what becomes of a gradient that a
marked parameter has at the cast; the meta device, for the mixer itself names its parameters' device. dt_bias is made in
params_dtype, so nothing says that it is kept; a figure tells what its rounding costs. Gated delta nets make A_log in
params_dtype and are left alone; a gated delta product, whose A_log bears the comment, is judged where the tree has one.

Tolerances: a kept A_log is exact, and the exponential of fp32 errs by two units in the last place at most (EXACT). What
is left of a state is exp(-x) for x = rate * time: an error of the rate changes it by x * exp(-x) times that, which is
1 / e at most (DECAY). Gradients are sums in fp32 of TOKENS * BATCH * CHANNELS * STATE terms, whose errors grow like the
root of their number; 8 is room for the exponentials (GRADIENT). Adam's steps in fp32 round values below 4 by 2^-23.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import io
import itertools
import math
import pickle
import sys
import types
import zipfile
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from kit import pairwise
from kit.autograd import kept_alive, weak_storages

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
silu, softplus = torch.nn.functional.silu, torch.nn.functional.softplus
NOTED = types.SimpleNamespace(given={}, rates=[], run={})  # of the last call of a kernel


def recurrence(x, dt, rates, b, c, skip):  # noqa: PLR0917
    """Run Mamba-2's recurrence; x is [batch, tokens, heads, channels], dt the step after softplus."""
    heads = x.shape[2]
    b, c = (each.repeat_interleave(heads // each.shape[2], 2) for each in (b, c))
    state, outputs = 0, []
    for n in range(x.shape[1]):
        left = (dt[:, n] * rates).exp()[..., None, None]
        state = state * left + (dt[:, n, :, None] * x[:, n])[..., None] * b[:, n, :, None]
        outputs.append((state * c[:, n, :, None]).sum(-1))
    return torch.stack(outputs, 1) + x * skip.view(heads, -1)


def note(rates, skip, bias):
    """Note what a kernel is given: one value a head of A and dt_bias, and all of D, in float64."""
    given = {"A": rates, "D": skip, "dt_bias": bias}
    NOTED.given = {name: x.detach().double().flatten() for name, x in given.items()}


def convolve(x, weight, bias, **_):
    """Stand for causal_conv1d_fn: convolve [batch, channels, tokens] with what came before, and apply SiLU."""
    padded = torch.nn.functional.pad(x, (weight.shape[-1] - 1, 0))
    return silu(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight)))


def scan(x, dt, A, B, C, *_, D, z=None, dt_bias, return_final_states=False, state_dtype=None, **_options):  # noqa: ARG001
    """Stand for mamba_chunk_scan_combined; note in float64 what it computes from, and its result's gradient."""
    note(A, D, dt_bias)
    inputs = [x.float(), softplus(dt.float() + dt_bias), B.float(), C.float()]
    result = recurrence(*inputs[:2], A, *inputs[2:], D.float())
    NOTED.run = {"inputs": [each.detach().double() for each in inputs]}
    if result.requires_grad:
        result.register_hook(lambda gradient: NOTED.run.update(gradient=gradient.double()))
    result = (result if z is None else result * silu(z.float())).to(x.dtype)
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[-1])
    return (result, state) if return_final_states else result


def whole_scan(zxbcdt, weight, bias, dt_bias, A, D, chunk_size, *, ngroups, headdim, state_dtype=None, **_):  # noqa: ARG001, PLR0917
    """Stand for mamba_split_conv1d_scan_combined."""
    heads, width = len(A), len(A) * (headdim or D.shape[-1])
    state = (zxbcdt.shape[-1] - 2 * width - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([width, width + 2 * ngroups * state, heads], -1)
    xbc = convolve(xbc.transpose(1, 2), weight, bias).transpose(1, 2)
    x, b, c = xbc.split([width, ngroups * state, ngroups * state], -1)
    x, b, c = x.unflatten(-1, (heads, -1)), b.unflatten(-1, (ngroups, -1)), c.unflatten(-1, (ngroups, -1))
    return scan(x, dt, A, b, c, chunk_size, D=D, dt_bias=dt_bias, z=z.unflatten(-1, (heads, -1))).flatten(-2)


def decode_step(_state, x, _dt, A, _b, _c, D, *, dt_bias, **_):
    """Stand for selective_state_update, whose A, D and dt_bias are repeated for each channel; keep the last two A."""
    NOTED.rates = [*NOTED.rates[-1:], A]
    note(A[:, 0, 0], D[:, 0], dt_bias[:, 0])
    return torch.zeros_like(x)


class GatedNorm(torch.nn.Module):
    """Stands for mamba_ssm's RMSNorm with a gate, of one group."""

    def __init__(self, size, *, eps, dtype, **_):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size, dtype=dtype)), eps

    def forward(self, x, z=None):
        gated = x.float() if z is None else x.float() * silu(z.float())
        return (torch.nn.functional.rms_norm(gated, gated.shape[-1:], eps=self.eps) * self.weight).to(x.dtype)


class Linear(torch.nn.Linear):
    """Stands for Megatron's parallel linear layers: the first is cut by its outputs, the second by its inputs."""

    def __init__(self, inputs, outputs, *, config, input_is_parallel=False, **_):
        ranks = config.tensor_model_parallel_size
        inputs, outputs = (inputs // ranks, outputs) if input_is_parallel else (inputs, outputs // ranks)
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def forward(self, x):
        return super().forward(x), None


# Upstream imports these compiled packages.
STAND_INS = {
    "mamba_ssm": {}, "mamba_ssm.ops": {}, "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": scan, "mamba_split_conv1d_scan_combined": whole_scan,
    },
    "fla": {}, "fla.modules": {}, "fla.modules.l2norm": {"l2_norm": None},
    "fla.ops": {}, "fla.ops.gated_delta_product": {"chunk_gated_delta_product": None},
}  # fmt: skip
for package, attributes in STAND_INS.items():
    sys.modules[package] = types.ModuleType(package)
    vars(sys.modules[package]).update(attributes)
torch.cuda.current_device = lambda: torch.device("cpu")

from megatron.core import utils
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.optimizer import clip_grads, grad_scaler, optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer import module
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig


gtp_api, gated_delta_product = (  # which only some releases have
    importlib.import_module(name) if importlib.util.find_spec(name) else None
    for name in ("megatron.core.tensor_parallel.gtp_api", "megatron.core.ssm.gated_delta_product")
)
for user in (clip_grads, optimizer):  # what they use where neither Transformer Engine nor Apex is installed
    user.multi_tensor_applier, user.multi_tensor_scale_tensor_impl = utils.local_multi_tensor_applier, None
    user.l2_norm_impl, user.multi_tensor_scale_impl = utils.local_multi_tensor_l2_norm, utils.local_multi_tensor_scale
for user in filter(None, (mamba_mixer, gated_delta_product)):
    user.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)
if gated_delta_product:
    gated_delta_product.check_fla_sequence_packing_support = lambda: (True, None)
mamba_mixer.causal_conv1d_fn, mamba_mixer.causal_conv1d_update = convolve, lambda x, *_, **_options: x
mamba_mixer.selective_state_update = decode_step

HALVES = ("bfloat16", "float16")
FACTORS = {
    "half": ["bfloat16", "float16"],
    "d": ["heads", "channels"],  # a value for each head or each channel, which decode does not take
    "groups": [1, 2],
    "norm": ["norm", "plain"],  # with the gated norm, or without
    "params": ["half", "float32"],  # params_dtype; where it is fp32 Float16Module casts every other parameter
}
USUAL = {name: values[0] for name, values in FACTORS.items()}
CASES = {"-".join(map(str, row.values())): row for row in pairwise(FACTORS)}
# Options of the configuration and arguments of the mixer, for one layer of a model. With tensor parallelism the layer
# is the second rank's, with half of the heads.
SETTINGS = {
    "from a checkpoint": ({"perform_initialization": False}, {}),
    "initialised on the CPU": ({"use_cpu_initialization": True}, {"conv_init": 0.5}),
    "heads by width": ({"mamba_num_heads": None}, {"expand": 3}),
    "two kernels": ({"use_mamba_mem_eff_path": False}, {"rmsnorm": False}),
    "states in fp32": ({"mamba_training_ssm_states_dtype": torch.float32}, {"chunk_size": 4}),
    "a later layer": ({"num_layers": 9}, {"layer_number": 7, "pp_layer_offset": 4, "name": "layers.6.mixer"}),
    "no number": ({}, {"layer_number": None, "D_has_hdim": True}),
    "one rate": ({}, {"A_init_range": (3, 3), "dt_min": 0.01, "dt_max": 0.02, "dt_init_floor": 0.015}),
    "tensor parallel": ({"tensor_model_parallel_size": 2}, {}),
    "from a checkpoint, a D for each channel": ({"perform_initialization": False}, {"D_has_hdim": True}),
}
FROZEN = ("no number", "two kernels")  # of SETTINGS: with a D for each channel, and without
# How the state of a Float16Module is asked for.
WAYS = {
    "state_dict": lambda module: module.state_dict(),
    "state_dict, prefixed variables": lambda module: module.state_dict(prefix="a.", keep_vars=True),
    "state_dict into another": lambda module: module.state_dict(destination={}, prefix="a."),
    "to be saved": lambda module: module.state_dict_for_save_checkpoint(),
    "to be saved, prefixed variables": lambda module: module.state_dict_for_save_checkpoint("a.", keep_vars=True),
    "sharded": lambda module: module.sharded_state_dict("a.", metadata={"dp_cp_group": group()}),
}
# By what the optimizer groups the n-th parameter x: fp32 ones stand before or between the others, or alone.
GROUPINGS = {
    "matrices_first": lambda _, x: x.dim() < 2,
    "one_group": lambda *_: 0,
    "a_group_each": lambda n, _: n,
}
SCALERS = {
    "bfloat16": lambda: grad_scaler.ConstantGradScaler(2.0**12),
    "float16": lambda: grad_scaler.DynamicGradScaler(2.0**12, 1.0, 2.0, 0.5, 2, 1),
}
# Where the n-th parameter has its gradient: in the buffer of DDP, or in its own.
PLACES = {
    "main_grad": lambda _: "main_grad",
    "even ones in main_grad": lambda n: "grad" if n % 2 else "main_grad",
    "odd ones in main_grad": lambda n: "main_grad" if n % 2 else "grad",
}
# How the model's sharded state can be when it is given to the optimizer, call by call.
GIVEN = {
    "prefixed": lambda trained: trained.model("a."),
    "the second of three layers": lambda trained: trained.model(sharded_offsets=((0, 1, 3),)),
    "the last of three layers": lambda trained: trained.model(sharded_offsets=((0, 2, 3),)),
    "another replica": lambda trained: replica(trained.model()),
    "nested, in another order": lambda trained: {"a": [], "b": [dict(reversed([*trained.model().items()]))]},
}
# What happens to a mixer between two decodes.
CHANGES = {
    "loaded": lambda mixer: mixer.load(torch.float32),
    "loaded in 16 bits": lambda mixer: mixer.load(mixer.half),
    "trained": lambda mixer: mixer.learn(),
    "wrapped again": lambda mixer: Float16Module(mixer.config, mixer.mixer),
    "loaded once more": lambda mixer: mixer.load(torch.float32),
}
# By what a mixer says that a parameter is split over tensor-parallel ranks: all are, but those of the linear layers,
# which say it themselves. Of what does not say it, the first rank's gradient alone counts in the norm.
PARALLEL = {"tensor_model_parallel": True, "partition_dim": 0}
# Which of the fp32 tensors of a module are marked, by name; a child has tensors of the same names, one of them tied.
MARKED = {
    "all": lambda _: True,
    "its own": lambda name: not name.startswith("child."),
    "the child's": lambda name: name.startswith("child."),
}
# How a state is given to be loaded.
GIVEN_STATES = {"as it was made": lambda x: x, "read-only": types.MappingProxyType}
HEADS, CHANNELS, STATE, HIDDEN, TOKENS, BATCH = 6, 4, 5, 16, 12, 2
TYPES = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64", "int64", "bool")
MANY = 128  # heads of the mixer whose decay is measured
LENGTHS = [2**n for n in range(18)]  # up to 131072 tokens
RATE, STEPS = 1e-4, 5  # of the optimizer
EXACT = 2 * 2**-23
DECAY = EXACT / math.e
GRADIENT = 8 * 2**-23 * math.sqrt(TOKENS * BATCH * CHANNELS * STATE)
UPDATED = STEPS * 2**-22 + EXACT
STEPPED = 2**-4  # of a step of RATE: the values are below 16, whose fp32 has 2**-20; a step that was not made is 1
CLIP = 1.0  # of the gradients, whose norm is above 10
SUMMED = 2**-16  # of a norm or a moment in fp32, which some hundred roundings by 2**-24 have made


def group(size=1, rank=0):
    """Stand for a process group of which only size and rank are read."""
    return types.SimpleNamespace(size=functools.partial(int, size), rank=functools.partial(int, rank))


def groups_of(**groups):
    """Return process groups, of one rank each where nothing else is given."""
    return ProcessGroupCollection(**{"tp": group(), "cp": group(), "pp": group()} | groups)


def config_of(half=None, **options):
    """Return a configuration for parameters in 16 bits; half names their type."""
    fixed = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 1}
    return TransformerConfig(**fixed | options, bf16=half == "bfloat16", fp16=half == "float16")


MAMBA = {"mamba_num_heads": HEADS, "mamba_head_dim": CHANNELS, "mamba_state_dim": STATE}
PARTS = {"in_proj": Linear, "out_proj": Linear}


class Mixer:
    """A real mixer in a real Float16Module, and its parameters in float64 as they were before that."""

    def __init__(self, case, *, heads=HEADS):
        self.half, params = getattr(torch, case["half"]), case["params"].replace("half", case["half"])
        options = MAMBA | {"mamba_num_heads": heads, "mamba_num_groups": case["groups"]}
        self.config = config_of(case["half"], params_dtype=getattr(torch, params), **options)
        torch.manual_seed(heads)
        self.mixer = mamba_mixer.MambaMixer(
            self.config, mamba_mixer.MambaMixerSubmodules(**PARTS), HIDDEN, rmsnorm=case["norm"] == "norm",
            D_has_hdim=case["d"] == "channels", layer_number=1, pg_collection=groups_of(),
        )  # fmt: skip
        self.mixer.register_buffer("floats", torch.randn(3))
        self.mixer.register_buffer("integers", torch.arange(3))
        self.original = dict(self.mixer.named_parameters())
        self.attributes = {name: dict(vars(x)) for name, x in self.original.items()}
        self.made = {name: x.detach().double() for name, x in self.original.items()}
        self.wrapped = Float16Module(self.config, self.mixer)

    def load(self, dtype):
        """Load a checkpoint in which A_log and D are of this dtype; return both in float64."""
        state = {name: x.detach().clone() for name, x in self.wrapped.state_dict().items()}
        state["A_log"] = (torch.rand(state["A_log"].shape) * 4 - 1).to(dtype)
        state["D"] = (1 + torch.randn(state["D"].shape) / 4).to(dtype)
        self.wrapped.load_state_dict(state)
        return {name: state[name].double() for name in ("A_log", "D")}

    def train(self):
        """Go forward; return the result."""
        return self.wrapped(torch.randn(TOKENS, BATCH, HIDDEN))[0]

    def learn(self):
        """Go forward and back, and make a step of gradient descent."""
        self.train().sum().backward()
        torch.optim.SGD(self.mixer.parameters(), lr=2.0**-10).step()

    def infer(self, *, decode):
        """Run the prompt, and as many tokens after it, one by one."""
        context = StaticInferenceContext(max_batch_size=BATCH, max_sequence_length=TOKENS + decode)
        context.seqlen_offset = 0
        self.wrapped.eval()
        with torch.no_grad(), InferenceMode.active():
            self.wrapped(torch.randn(TOKENS, BATCH, HIDDEN), inference_context=context)
            for token in range(decode):
                context.sequence_len_offset = context.seqlen_offset = TOKENS + token
                self.wrapped(torch.randn(1, BATCH, HIDDEN), inference_context=context)
        self.wrapped.train()

    def run(self, path):
        """Run a path; return what its kernel was given."""
        NOTED.given = {}
        if path == "training":
            self.train()
        else:
            self.infer(decode=int(path == "decode"))
        return NOTED.given


def off(found, exact):
    """Return the largest relative error."""
    return ((found - exact).abs() / exact.abs()).max().item()


def assert_off(errors, tolerance=EXACT):
    """Assert that no error is above the tolerance."""
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors {wrong}, tolerance {tolerance:.2e}"


def assert_given(given, exact, what=""):
    """Assert the rates and D that a kernel was given, by A_log and D in float64."""
    assert_off({f"{what} A": off(given["A"], -exact["A_log"].exp()), f"{what} D": off(given["D"], exact["D"])})


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_path = pytest.mark.parametrize(
    ("case", "path"),
    [
        pytest.param(case, path, id=f"{path}-{name}")
        for name, case in CASES.items()
        for path in ("training", "prefill", "decode")
        if (case["d"], path) != ("channels", "decode")
    ],
)
every_half = pytest.mark.parametrize("half", HALVES)


@pytest.mark.defect
@every_path
def test_kernels_are_given_the_rates_that_were_made_or_loaded_in_fp32(case, path):
    mixer = Mixer(case)
    assert_given(mixer.run(path), mixer.made, "made")
    exact = mixer.load(torch.float32)
    assert_given(mixer.run(path), exact, "loaded")


@pytest.mark.control
@every_path
def test_a_checkpoint_in_16_bits_gives_values_and_no_types(case, path):
    """Then PyTorch casts the mixer, and spares nothing: the rates are computed in fp32 all the same."""
    mixer = Mixer(case)
    kinds = {name: x.dtype for name, x in mixer.mixer.named_parameters()}
    exact = mixer.load(mixer.half)
    changed = [name for name, x in mixer.mixer.named_parameters() if x.dtype != kinds[name]]
    assert not changed, f"loading changed the types of {changed}"
    for step in ("loaded", "cast by PyTorch"):
        given = mixer.run(path)
        assert_given(given, exact, step)
        assert_off({f"{step}: dt_bias": off(given["dt_bias"], mixer.made["dt_bias"].to(mixer.half).double())})
        mixer.mixer.to(mixer.half)


@pytest.mark.defect
@every_case
def test_gradients_of_both_are_those_of_fp32(case):
    mixer = Mixer(case)
    exact = mixer.load(torch.float32)
    result = mixer.train()
    (result * torch.randn(result.shape)).sum().backward()
    leaves = [exact[name].clone().requires_grad_() for name in ("A_log", "D")]
    x, step, b, c = NOTED.run["inputs"]
    reference = recurrence(x, step, -leaves[0].exp(), b, c, leaves[1])
    right = torch.autograd.grad(reference, leaves, NOTED.run["gradient"])
    found = {"A_log": mixer.mixer.A_log.grad, "D": mixer.mixer.D.grad}
    errors = {n: ((x.double() - y).norm() / y.norm()).item() for (n, x), y in zip(found.items(), right, strict=True)}
    assert_off(errors, GRADIENT)


@pytest.mark.control
@every_case
def test_all_else_is_cast_and_stays_itself(case):
    mixer = Mixer(case)
    found, kept = dict(mixer.mixer.named_parameters()), {"A_log", "D"}
    wrong = [name for name, x in found.items() if name not in kept and x.dtype != mixer.half]
    wrong += [name for name, x in found.items() if x is not mixer.original[name] or not x.requires_grad]
    wrong += [n for n, x in found.items() if not mixer.attributes[n].items() <= vars(x).items()]
    wrong += [n for n, x in found.items() if n not in kept and not x.equal(mixer.made[n].to(mixer.half))]
    split = {x: [getattr(found[x], name, None) for name in PARALLEL] for x in found if "_proj" not in x}
    wrong += [f"{name}: {values}, of {[*PARALLEL]}" for name, values in split.items() if values != [*PARALLEL.values()]]
    assert not wrong, f"not cast, or not itself: {wrong}"
    assert 0.25 < mixer.made["conv1d_bias"].abs().max() <= 0.5  # 1 / sqrt(4), of its width
    assert (mixer.mixer.floats.dtype, mixer.mixer.integers.dtype) == (mixer.half, torch.int64)
    assert mixer.mixer.integers.tolist() == [0, 1, 2]
    assert mixer.wrapped.module is mixer.mixer
    assert mixer.train().dtype == torch.float32


@pytest.mark.control
@every_half
def test_what_is_done_to_every_tensor_is_done_to_these(half):
    """All is multiplied by 2, as this host has one device; then made float64; then moved to "meta" and cast at once."""
    mixer = Mixer(USUAL | {"half": half})
    exact = {name: x.detach() * 2 for name, x in mixer.mixer.state_dict().items()}
    mixer.wrapped._apply(lambda tensor: tensor * 2)  # noqa: SLF001 - what cuda() and to() call
    found = mixer.mixer.state_dict()
    wrong = [name for name, x in exact.items() if not torch.equal(found[name], x)]
    doubled = mixer.wrapped.double().state_dict()
    wrong += [f"{n}: not float64" for n, x in doubled.items() if x.is_floating_point() and x.dtype != torch.float64]
    away = mixer.wrapped.to("meta", mixer.half).state_dict()
    wrong += [f"{name}: not on the device" for name, x in away.items() if x.device.type != "meta"]
    assert not wrong, f"left as it was: {wrong}"


@pytest.mark.defect
@every_case
def test_state_dicts_hand_both_out_in_fp32(case):
    mixer, wrong = Mixer(case), []
    kinds = {name: torch.float32 if name in {"A_log", "D"} else mixer.half for name in mixer.made}
    for way, give in WAYS.items():
        state = {key.removeprefix("a."): getattr(x, "data", x) for key, x in give(mixer.wrapped).items()}
        for name, dtype in kinds.items():
            found, exact = state.get(name), mixer.made[name].to(dtype)
            right = found is not None and found.dtype == dtype and torch.equal(found, exact)
            wrong += [] if right else [f"{way}: {name}"]
    assert not wrong, f"missing, of another type or value: {wrong}"


@pytest.mark.defect
@every_half
def test_what_is_left_of_a_state_after_many_tokens(half, figure):
    """With the step sizes with which training begins. Figures: the rates, and what rounding dt_bias costs."""
    mixer = Mixer(USUAL | {"half": half}, heads=MANY)
    given, right = mixer.run("training"), -mixer.made["A_log"].exp()
    times = softplus(given["dt_bias"]) * torch.tensor(LENGTHS, dtype=torch.float64)[:, None]
    error = ((given["A"] * times).exp() - (right * times).exp()).abs().max().item()
    wrong = ((given["A"] / right - 1).abs() > EXACT).sum().item()
    figure(f"{half}.heads", wrong, f"of {MANY} heads decay at another rate")
    figure(f"{half}.rate", 100 * off(given["A"], right), "% of a head's rate of decay")
    figure(f"{half}.left", 100 * error, "% of a state, over all heads and lengths")
    steps = torch.linspace(math.log(0.001), math.log(0.1), 100_000, dtype=torch.float64).exp()
    bias = steps + (-(-steps).expm1()).log()  # the mixer's formula
    rounded = softplus(bias.to(getattr(torch, half)).double())
    figure(f"{half}.dt_bias", 100 * off(rounded, steps), "% of a step, by rounding dt_bias")
    assert error <= DECAY, f"what is left is off by {error:.2e} of a state, tolerance {DECAY:.2e}"


@pytest.mark.defect
@pytest.mark.parametrize("mode", ["training", "evaluation"])
@every_half
def test_layers_with_other_settings_keep_a_checkpoint_in_fp32(half, mode):
    """The layers of one model, cast in training or in evaluation; loaded before the cast, and again after it."""
    dtype = getattr(torch, half)
    common = {"num_attention_heads": 2, "params_dtype": dtype, "mamba_num_groups": 2} | MAMBA
    torch.manual_seed(HEADS)
    layers, errors = torch.nn.ModuleDict(), {}
    for name, (options, arguments) in SETTINGS.items():
        config = config_of(half, **common | options)
        ranks = config.tensor_model_parallel_size
        given = {"layer_number": 1, "pg_collection": groups_of(tp=group(ranks, ranks - 1))} | arguments
        layer = mamba_mixer.MambaMixer(config, mamba_mixer.MambaMixerSubmodules(**PARTS), HIDDEN, **given)
        layers[name] = layer.requires_grad_(name not in FROZEN)
    for step in ("before", "after"):
        state = {name: torch.ones_like(x, dtype=torch.float32) / 3 for name, x in layers.state_dict().items()}
        for name in [name for name in state if name.endswith((".A_log", ".D"))]:
            state[name] += torch.rand(state[name].shape)
        layers.load_state_dict(state)
        if step == "before":
            Float16Module(config_of(half, **common), layers.train(mode == "training"))
            layers.train()
        for name, layer in layers.items():
            NOTED.given = {}
            layer(torch.randn(TOKENS, BATCH, HIDDEN).to(dtype))
            errors[f"{name}, {step}: A"] = off(NOTED.given["A"], -state[f"{name}.A_log"].double().exp())
            errors[f"{name}, {step}: D"] = off(NOTED.given["D"], state[f"{name}.D"].double())
    assert_off(errors)


@pytest.mark.defect
def test_gated_delta_product_keeps_A_log_in_fp32():  # noqa: N802
    if gated_delta_product is None:
        pytest.skip("this tree has no gated delta product")
    config = config_of("bfloat16", params_dtype=torch.bfloat16, mamba_num_groups=2, **MAMBA)
    parts = gated_delta_product.GatedDeltaProductMixerSubmodules(**PARTS)
    mixer = gated_delta_product.GatedDeltaProductMixer(
        config, parts, HIDDEN, A_init_range=(1, 16), layer_number=1, pg_collection=groups_of()
    )
    exact = mixer.A_log.detach().double()
    Float16Module(config, mixer)
    assert_off({"A_log": off(mixer.cp.get_A_log().detach().double(), exact)}, 0.0)


@pytest.mark.control
@every_half
def test_rates_kept_between_decodes_are_brought_up_to_date_where_they_lie(half):
    """A CUDA graph that has captured a decode reads the storages which it was given then; no graph is captured here.

    Upstream keeps the rates in a cache that is written in its place ("its address [...] stays valid across every graph
    capture and replay, including across RL train/eval cycles") and expanded with strides of 0, by which the kernel
    takes its fast path. Rates that are computed anew for every token need not stay: a graph computes them, too.
    """
    mixer, errors = Mixer(USUAL | {"half": half}), {}
    mixer.infer(decode=3)  # of which the last two are noted: the first may compute what it then keeps
    rates, again = NOTED.rates
    kept = rates.data_ptr() == again.data_ptr()  # both are alive, so that others would lie elsewhere
    old = {name: x.detach() for name, x in mixer.mixer.named_parameters()}
    for step, change in CHANGES.items():
        change(mixer)
        mixer.run("decode")
        right = -mixer.mixer.A_log.detach().double().exp()
        errors[f"{step}: first A"] = off(rates[:, 0, 0].double(), right) if kept else 0.0
        errors[f"{step}: A"] = off(NOTED.rates[-1].double(), right[:, None, None])
        errors[f"{step}: strides"] = sum(NOTED.rates[-1].stride()[1:])
        found = dict(mixer.mixer.named_parameters())
        errors[f"{step}: moved"] = sum(found[name].data_ptr() != x.data_ptr() for name, x in old.items())
    assert_off(errors)


def far(found, exact, scale=None):
    """Return the largest error, in a scale, or in the largest value."""
    return ((found.detach().double() - exact).abs().max() / (scale or exact.abs().max())).item()


@pytest.mark.control
@every_half
def test_decode_without_compiled_packages_gives_16_bits(half):
    """Upstream computes it in PyTorch then; the linear layer after it takes 16 bits."""
    mixer = Mixer(USUAL | {"half": half, "norm": "plain"})  # the gated norm is mamba_ssm's
    layer, dtype = mixer.mixer, mixer.half
    decode = getattr(layer, "ssm_decode", None) or layer._ssm_decode  # noqa: SLF001 - its name until 0.19
    state, convolved = torch.randn(BATCH, HEADS, CHANNELS, STATE), torch.randn(BATCH, *layer.conv1d_weight[:, 0].shape)
    given = torch.randn(BATCH, 1, layer.in_proj.weight.shape[0])
    absent = {"selective_state_update": None, "causal_conv1d_update": None}
    with mock.patch.multiple(mamba_mixer, **absent), torch.no_grad():
        found = decode(given.to(dtype), conv_state=convolved.to(dtype), ssm_state=state.to(dtype))
    assert (found.dtype, found.shape) == (dtype, (BATCH, 1, HEADS * CHANNELS))
    assert found.isfinite().all()


def shown(nested, change):
    """Return a nested value with its tensors' values and types, where a type is changed to another."""

    def of(x):
        return x.detach().to(change.get(x.dtype, x.dtype)).tolist(), change.get(x.dtype, x.dtype)

    return tree_map_only(torch.Tensor, of, nested)


@pytest.mark.control
@every_half
@pytest.mark.parametrize("rank", [0, 1], ids=["first", "last"])
def test_arguments_and_results_are_converted_on_a_pipelines_ends(half, rank):
    """On the first stage fp32 tensors among the positional arguments become 16-bit ones, also in lists and tuples.

    On the last, 16-bit results become fp32, if fp32_output is not False. All else stays. The model begins with a
    parameter that is marked, where the tree has a mark.
    """
    dtype = getattr(torch, half)
    tensors = [(torch.arange(6) / 3).to(getattr(torch, name)) for name in ("float32", "float64", half, "int64", "bool")]
    nested = (tensors[0], [tensors, (None, 2.5)], torch.nn.Parameter(tensors[0]), "text")

    class Model(torch.nn.Module):
        def forward(self, *given, **named):
            self.given = given, named
            return nested

    config, model = config_of(half), Model()
    config.virtual_pipeline_model_parallel_size = 2  # two ranks with two parts of the model each
    model.vp_stage, model.pg_collection = rank, ProcessGroupCollection(pp=group(2, rank))
    model.first, model.second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    getattr(module, "mark_keep_in_fp32", id)(model.first)
    wrapped = Float16Module(config, model)
    for options in ({}, {"fp32_output": False}):
        with mock.patch.object(torch.distributed, "is_initialized", return_value=True):  # else all is one stage
            found = wrapped(*nested, named=tensors[0], **options)
        assert shown(found, {}) == shown(nested, {dtype: torch.float32} if rank and not options else {}), options
        given, named = model.given
        assert shown(given, {}) == shown(nested, {} if rank else {torch.float32: dtype}), "arguments"
        assert [*named] == ["named"]
        assert named["named"] is tensors[0]


@pytest.mark.control
@pytest.mark.parametrize("way", GIVEN_STATES)
@every_half
def test_loading_leaves_the_state_as_it_is(half, way):
    mixer = Mixer(USUAL | {"half": half})
    for dtype in (mixer.half, torch.float32, torch.float64):
        state = mixer.wrapped.state_dict()
        for name in [name for name, x in state.items() if x.is_floating_point()]:
            state[name] = torch.randn(state[name].shape).to(dtype)
        before = {name: (x, x.dtype, x.clone()) for name, x in state.items()}
        mixer.wrapped.load_state_dict(GIVEN_STATES[way](state))
        assert [*state] == [*before], f"{dtype}: the names have changed"
        changed = [n for n, (x, kind, y) in before.items() if state[n] is not x or x.dtype != kind or not x.equal(y)]
        assert not changed, f"{dtype}: loading changed {changed} of what was given"
        found = mixer.mixer.state_dict()
        wrong = [name for name, (*_, x) in before.items() if not found[name].equal(x.to(found[name].dtype))]
        assert not wrong, f"{dtype}: loaded with other values: {wrong}"


@pytest.mark.control
@pytest.mark.parametrize(("entry", "change"), [("A_log", dict.pop), ("more", dict.setdefault)], ids=["missing", "more"])
@every_half
def test_loading_refuses_a_missing_entry_and_one_more(half, entry, change):
    mixer = Mixer(USUAL | {"half": half})
    state = {name: x + 1 for name, x in mixer.wrapped.state_dict().items()}
    change(state, entry, torch.ones(1))
    with pytest.raises(RuntimeError, match=entry):
        mixer.wrapped.load_state_dict(state)


# The cast of any module.


def of_all_types():
    """Make a module with a parameter and a buffer of each type, also in a child, where they are frozen and empty."""
    made, random = torch.nn.Module(), torch.Generator().manual_seed(16)
    values = torch.randn(3, 4, dtype=torch.float64, generator=random).mT * 1e4  # their strides are not the usual ones
    made.child = torch.nn.Module()
    for each, numbers in ((made, values), (made.child, values), (made.child, values[:0])):
        for name in TYPES:
            dtype, size = getattr(torch, name), f"{name}_{numbers.numel()}"
            learns = each is made and (dtype.is_floating_point or dtype.is_complex)
            each.register_parameter(f"{size}_parameter", torch.nn.Parameter(numbers.to(dtype), requires_grad=learns))
            each.register_buffer(f"{size}_buffer", numbers.to(dtype), persistent=each is made)
    made.child.register_parameter("tied", made.float32_12_parameter)
    return made


def reread(value):
    """Return a module that was written whole, and read."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except (pickle.PicklingError, AttributeError, RecursionError, TypeError) as error:
        raise AssertionError(f"what the module bears cannot be written: {error}") from error
    file.seek(0)
    return torch.load(file, weights_only=False)


def bytes_of(tensor):
    """Return the bytes of a tensor's elements in order."""
    return tensor.detach().contiguous().clone().untyped_storage().tolist()


def tensors_of(value):
    """Return parameters and buffers by name, tied ones under each."""
    return dict([*value.named_parameters(remove_duplicate=False), *value.named_buffers(remove_duplicate=False)])


def assert_cast_as_by_pytorch(half, mark=None, which="all", *, whole=False, back=False):
    """Assert that a module is cast as PyTorch casts it: names, values, types, strides, modes, and what stays itself.

    With a mark, which fp32 tensors are given (MARKED), these alone stay as they are, also where the module is written
    and read before the cast: what a tensor bears as an attribute is kept then. (A deep copy of a parameter has no
    attributes.) Where it is taken back, all is cast: the mark of main is an attribute, which is then False.
    """
    ours = of_all_types()
    theirs = copy.deepcopy(ours)
    old, theirs_old, before = tensors_of(ours), tensors_of(theirs), tensors_of(copy.deepcopy(theirs))
    chosen = {id(x) for n, x in old.items() if mark and x.dtype == torch.float32 and MARKED[which](n)}
    marked = [n for n, x in old.items() if id(x) in chosen]
    for name in marked:
        mark(old[name])
        if back and hasattr(old[name], "keep_in_fp32"):
            old[name].keep_in_fp32 = False
    marked = [n for n in marked if getattr(old[n], "keep_in_fp32", True)]
    ours = reread(ours) if whole else ours
    old = tensors_of(ours)
    learning = [n for n, x in old.items() if x.requires_grad and n not in marked]
    for each, name in itertools.product((old, theirs_old), learning):
        each[name].grad = each[name].detach() / 2 if each[name].element_size() > 1 else each[name].detach().clone()
    bf16 = half == "bfloat16"
    ours.train(bf16).child.train(not bf16)
    Float16Module(config_of(half), ours)
    assert (ours.training, ours.child.training) == (bf16, not bf16), "training or evaluation has changed"
    new, theirs_new = tensors_of(ours), tensors_of(theirs.bfloat16() if bf16 else theirs.half())
    stays = {name: before[name] for name in marked}
    theirs_new, theirs_old = theirs_new | stays, theirs_old | stays
    assert [*new, *ours.state_dict()] == [*theirs_new, *theirs.state_dict()], "other names, or another order"
    wrong = [n for n, x in theirs_new.items() if bytes_of(new[n]) != bytes_of(x)]
    for attribute in (lambda x: x.dtype, lambda x: x.stride(), lambda x: x.requires_grad):
        wrong += [n for n, x in theirs_new.items() if attribute(new[n]) != attribute(x)]
    wrong += [n for n, x in theirs_new.items() if (new[n] is old[n]) != (x is theirs_old[n])]
    for name in learning:
        found, exact = new[name].grad, theirs_new[name].grad
        right = found is not None and found.dtype == exact.dtype and bytes_of(found) == bytes_of(exact)
        wrong += [] if right else [f"{name}: its gradient"]
    assert not wrong, f"not as PyTorch casts it: {sorted(set(wrong))}"


@pytest.mark.control
@every_half
def test_every_type_is_cast_as_by_pytorch(half):
    assert_cast_as_by_pytorch(half)


@pytest.mark.control
@pytest.mark.parametrize("way", ["whole", "back", "its own", "the child's"])
@every_half
def test_what_is_marked_stays_in_fp32(half, way):
    if not hasattr(module, "mark_keep_in_fp32"):
        pytest.skip("this tree has no mark")
    which = way if way in MARKED else "all"
    assert_cast_as_by_pytorch(half, module.mark_keep_in_fp32, which, whole=way == "whole", back=way == "back")


# The optimizer.


class OnHost(torch.overrides.TorchFunctionMode):
    """Lets CPU tensors say that they are on a GPU, which the optimizer asks for."""

    def __torch_function__(self, function, _types, given=(), named=None):
        named = dict(named or {})
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        result = function(*given, **named)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) and "Tensor" in result else result


class Shards:
    """A model whose parameters are DTensors, as PyTorch's FSDP2 makes them: a matrix and a vector, cast to bf16."""

    def __init__(self, mesh):
        config = config_of("bfloat16")
        self.mixer = module.MegatronModule(config)
        self.mixer.tp_group = group()
        for name, shape in (("matrix", (HIDDEN, TOKENS)), ("vector", (HIDDEN,))):
            self.mixer.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
        self.wrapped = Float16Module(config, self.mixer)
        for name, x in list(self.mixer.named_parameters()):
            shards = torch.nn.Parameter(distribute_tensor(x.detach(), mesh, [Shard(0)]))
            shards.is_torch_fsdp2_param = True  # as Megatron's own wrapper of FSDP2 says it
            self.mixer.register_parameter(name, shards)


class Optimizer:
    """The real optimizer for bf16 over a mixer's parameters, by default in two groups as for weight decay.

    With a loss scale of a 16-bit type the parameters have that type. Of what is frozen, and of what is put back in fp32
    with no mark, either every second parameter is, or the others. Beside it there can be another optimizer, made later
    over the same parameters. A plain one is SGD, which keeps nothing.
    """

    def __init__(
        self, grouping="matrices_first", *, scale=None, frozen=None, unmarked=None, shards=None, beside=False,
        plain=False,
    ):  # fmt: skip
        half, rows = scale or "bfloat16", {}
        self.mixer = Shards(shards) if shards else Mixer(USUAL | {"half": half, "groups": 1 + (half == "float16")})
        for n, x in enumerate(self.mixer.mixer.parameters()):
            rows.setdefault(GROUPINGS[grouping](n, x), []).append(x)
            x.requires_grad_(n % 2 != frozen)
            x.data = x.data.float() if n % 2 == unmarked else x.data
        self.given = [[*rows[key]] for key in sorted(rows)]  # the optimizer puts its copies into Adam's own lists
        halves = {"bf16": half == "bfloat16", "fp16": half == "float16"}
        config = optimizer.OptimizerConfig(clip_grad=CLIP, log_num_zeros_in_grad=True, lr=RATE, **halves)

        def made():
            groups = [{"params": [*rows[key]], "wd_mult": float(key)} for key in sorted(rows)]
            adam = (torch.optim.SGD if plain else torch.optim.Adam)(groups, lr=RATE)
            with OnHost():
                given = adam, config, SCALERS[scale]() if scale else None, lambda *_: None
                return optimizer.Float16OptimizerWithFloat16Params(*given)

        self.optimizer = made()
        self.optimizer.grad_stats_parallel_group, self.optimizer.tp_group = None, group()
        mains = [(name, x, getattr(x, "main_param", x)) for name, x in self.mixer.mixer.named_parameters()]
        self.mains = {name: main if isinstance(main, torch.Tensor) else x for name, x, main in mains}  # the fp32 values
        self.beside = made() if beside else None

    def trained(self):
        """Return the parameters that are not frozen, by name."""
        return [(name, x) for name, x in self.mixer.mixer.named_parameters() if x.requires_grad]

    def model(self, prefix="", **options):
        """Return the model's sharded state."""
        return self.mixer.wrapped.sharded_state_dict(prefix, metadata={"dp_cp_group": group()}, **options)

    def sharded(self, model, *, loading=False):
        """Return the optimizer's sharded state, for such a one of the model."""
        with OnHost():
            return self.optimizer.sharded_state_dict(model, is_loading=loading)

    def step(self, *, without=()):
        """Give gradients of 1 and -1, whose every step is as large as the learning rate, and make one step.

        Without are the numbers of the parameters that get none.
        """
        for n, x in enumerate(self.mixer.mixer.parameters()):
            if n not in without:
                x.main_grad = torch.full_like(x.detach(), 1.0 - 2 * (n % 2), dtype=torch.float32)
        with OnHost():
            self.optimizer.prepare_grads()
            self.optimizer.step_with_ready_grads()

    def whole_step(self, gradients, places):
        """Make a step as a training does, from gradients in float64 by name; return what the optimizer says of it.

        DDP keeps them in main_grad, a buffer; without it they are added to the parameters' own. Places says which of
        both each parameter has.
        """
        with OnHost():
            self.optimizer.zero_grad()
            scale = self.optimizer.get_loss_scale().double()
            for name, x in self.mixer.mixer.named_parameters():
                scaled = (gradients[name] * scale).to(x.dtype if places[name] == "grad" else torch.float32)
                if places[name] == "main_grad":
                    x.main_grad = x.main_grad.copy_(scaled) if hasattr(x, "main_grad") else scaled
                else:
                    x.grad = scaled if x.grad is None else x.grad + scaled
            return self.optimizer.step()


@pytest.mark.defect
def test_optimizer_begins_with_the_fp32_values():
    """As they were made, and from a checkpoint of the model in fp32."""
    trained = Optimizer()
    errors = {n: off(trained.mains[n].detach().double(), trained.mixer.made[n]) for n in ("A_log", "D")}
    loaded = trained.mixer.load(torch.float32)
    with OnHost():
        trained.optimizer.reload_model_params()
    errors |= {f"{n}, loaded": off(trained.mains[n].detach().double(), x) for n, x in loaded.items()}
    assert_off(errors, 0.0)


@pytest.mark.defect
def test_the_forward_sees_every_step(figure):
    trained = Optimizer()
    before = trained.mixer.run("training")
    for _ in range(STEPS):
        trained.step()
    given, moved = trained.mixer.run("training"), {}
    for name in ("A_log", "D"):
        moved[name] = trained.mixer.made[name] - STEPS * RATE * trained.mains[name].grad.sign().double()
    figure("moved", (given["A"] != before["A"]).sum().item(), f"of {HEADS} rates that {STEPS} steps of {RATE} changed")
    assert_off({"A": off(given["A"], -moved["A_log"].exp()), "D": off(given["D"], moved["D"])}, UPDATED)


@pytest.fixture
def one_rank():
    """Initialise torch.distributed with PyTorch's fake process group of one rank, which leaves tensors as they are."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield torch.distributed
    torch.distributed.destroy_process_group()


@pytest.mark.control
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("place", PLACES)
@every_half
def test_steps_with_a_loss_scale_are_unscaled_clipped_and_left_out(half, place):
    """Whole steps are those of Adam in float64, with gradients that are clipped by their norm.

    Gradients are small integers, which scaled by a power of 2 are exact in 16 bits, and differ from step to step. Each
    parameter in turn has an inf or a nan before that, and these steps are left out. Where half of the parameters are
    outside DDP, as those of a head beside the model, their gradients are their own.
    """
    trained, wrong = Optimizer(scale=half), []
    named = dict(trained.mixer.mixer.named_parameters())
    places = {name: PLACES[place](n) for n, name in enumerate(named)}
    leaves = {name: trained.mains[name].detach().double().clone().requires_grad_() for name in named}
    adam = torch.optim.Adam(leaves.values(), lr=RATE)

    def integers():
        return {name: torch.randint(-4, 5, x.shape).double() for name, x in leaves.items()}

    for n, name in enumerate(named):
        gradients = integers()
        gradients[name].view(-1)[-1] = (math.inf, math.nan, -math.inf)[n % 3]
        assert not trained.whole_step(gradients, places)[0], f"{name}: a step with {gradients[name].view(-1)[-1]}"
    for n in range(STEPS):
        gradients = integers()
        made, norm, zeros = trained.whole_step(gradients, places)
        assert made, f"step {n} is left out"
        flat = torch.cat([x.flatten() for x in gradients.values()])
        assert norm == pytest.approx(flat.norm().item(), rel=SUMMED), f"norm of step {n}"
        assert zeros == (flat == 0).sum(), f"zeros of step {n}"
        for name, x in leaves.items():
            x.grad = gradients[name] * min(1.0, CLIP / (flat.norm().item() + 1e-6))
        adam.step()
    for name, x in named.items():
        main = trained.mains[name]
        wrong += [] if far(main, leaves[name].detach(), RATE) <= STEPPED else [name]
        wrong += [] if torch.equal(x, main.to(x.dtype)) else [f"{name}: the model's"]
        for key in ("exp_avg", "exp_avg_sq"):
            found, exact = trained.optimizer.optimizer.state[main].get(key), adam.state[leaves[name]][key]
            wrong += [] if found is not None and far(found, exact) <= SUMMED else [f"{name}: {key}"]
    assert not wrong, f"other than Adam in float64: {wrong}"


# What the optimizer writes and reads.


def local(x):
    """Return a tensor, or what a DTensor has of it on this rank."""
    return x.to_local() if hasattr(x, "to_local") else x


def replica(model):
    """Return a model's sharded state as the entries of another replica."""
    for entry in model.values():
        entry.replica_id = (0, 0, 1)
    return model


def placed(entry):
    """Return of which whole an entry of a sharded state is which part, by which rank it is written, and under what."""
    if not hasattr(entry, "key"):
        return "no entry"
    parts = tree_leaves(entry.build()) if hasattr(entry, "build") else [entry]
    names = [field.name for field in dataclasses.fields(parts[0]) if field.name not in {"data", "dtype", "key"}]
    return str([(x.key.removeprefix(entry.key), *(getattr(x, name) for name in names)) for x in parts])


def described(state):
    """Return what each entry of a sharded state is called, whose values it holds, and where they lie."""
    return {
        (getattr(x, "key", "no name"), id(x.data if hasattr(x, "key") else x), placed(x)) for x in tree_leaves(state)
    }


def rows_of(state):
    """Return the entries of a sharded state: fp32 values, and the moments of each parameter."""
    moments = [[*row.values()] for row in state["optimizer"]["state"].values() if isinstance(row, dict)]
    return [*state["fp32_from_fp16_params"], *moments]


def misplaced(trained, hidden=None, model=None, *, loading=False, bare=()):
    """Return the entries of the optimizer's sharded state that do not name the parameter to which a tensor belongs.

    Nor its part in the whole, as the given state of the model has it, which stays as it is. The model's entry of a
    hidden parameter holds a copy, which says of what, as one of a parameter in fp8 does. Bare are the names of
    parameters that have no moments.
    """
    model = trained.model() if model is None else model
    of, right, adam = {id(x.data): x for x in tree_leaves(model)}, set(), trained.optimizer.optimizer.state
    for name, x in trained.trained():
        main, entry = trained.mains[name], of[id(local(x))]
        values = {key: adam[main][key] for key in ("exp_avg", "exp_avg_sq")} if name not in bare else {}
        values |= {"fp32_param": main} if main is not x else {}
        right |= {(f"optimizer.state.{k}.{entry.key}", id(local(y)), placed(entry)) for k, y in values.items()}
    for entry in [entry for entry in tree_leaves(model) if entry.data is hidden]:
        entry.data = hidden.detach().clone()
        entry.data._gtp_dequant_src = hidden  # noqa: SLF001 - the link by which upstream finds it
    given = described(model)
    found = described(rows_of(trained.sharded(model, loading=loading)))
    return sorted({key for key, *_ in found ^ right} | {f"the model's {key}" for key, *_ in described(model) ^ given})


def misread(trained, other):
    """Return the names of the parameters whose fp32 values, moments or step differ where another optimizer loads them.

    Both have the same parameters in the same groups; the other has made another number of steps.
    """
    ours = trained.sharded(trained.model())
    theirs = other.sharded(other.model(), loading=True)
    values = {x.key: x.data.clone() for row in rows_of(ours) for x in row}
    theirs["optimizer"]["state"]["common_step"] = ours["optimizer"]["state"]["common_step"].clone()

    def filled(x):
        if hasattr(x, "key"):
            return values.get(x.key, x.data)  # what is of no parameter stays as it is
        return x.unwrap() if hasattr(x, "unwrap") else x

    with OnHost():
        other.optimizer.load_state_dict(tree_map(filled, theirs))
    return different(trained, other)


def same(found, exact):
    """Return whether two lists hold tensors, or DTensors, of the same types and values."""
    pairs = [(local(a), local(b)) for a, b in zip(found, exact, strict=False)]
    return len(found) == len(exact) and all(a.dtype == b.dtype and a.equal(b) for a, b in pairs)


def different(trained, other):
    """Return the names of the parameters whose fp32 values, moments or step two optimizers have differently."""
    wrong = []
    for name, x in trained.trained():
        ours, theirs = (each.optimizer.optimizer.state[each.mains[name]] for each in (trained, other))
        right = trained.mains[name] is x or same([trained.mains[name]], [other.mains[name]])
        right = right and ours.keys() == theirs.keys() and same([*ours.values()], [theirs[key] for key in ours])
        wrong += [] if right else [name]
    return wrong


def renumbered(trained, other):
    """Return what is not at its place in the optimizer's plain state, and what differs where another one loads it.

    Adam numbers parameters as they were given to it, and the fp32 copies are listed in that order in each group: by
    this alone a plain checkpoint, of a release as well, says what is whose.
    """
    state, adam = trained.optimizer.state_dict(), trained.optimizer.optimizer.state
    names, wrong = {id(x): name for name, x in trained.mixer.mixer.named_parameters()}, []
    for n, x in enumerate(x for row in trained.given for x in row):
        found, right = state["optimizer"]["state"].get(n, {}), adam.get(trained.mains[names[id(x)]], {})
        if found.keys() != right.keys() or not same([found[key] for key in right], [*right.values()]):
            wrong += [f"state {n} is not of {names[id(x)]}"]
    kept = {id(x) for row in trained.given for x in row if trained.mains[names[id(x)]] is x}
    copies = state["fp32_from_fp16_params"]
    wrong += [] if len(copies) == len(trained.given) else ["number of groups"]
    for n, (row, listed) in enumerate(zip(trained.given, copies, strict=False)):
        right = [trained.mains[names[id(x)]] for x in row if id(x) not in kept and x.requires_grad]
        found = [x for x in listed if id(x) not in kept]  # to list what is in fp32 itself is no mistake
        wrong += [] if same(found, right) else [f"copies of group {n}"]
    with OnHost():
        other.optimizer.load_state_dict(copy.deepcopy(state))
    return wrong + different(trained, other)


def assert_placed(trained, *arguments, what="entries", **options):
    """Assert that nothing is misplaced."""
    wrong = misplaced(trained, *arguments, **options)
    assert not wrong, f"{what} that are wrong: {wrong}"


every_grouping = pytest.mark.parametrize("grouping", GROUPINGS)
BESIDE = {  # every second parameter is frozen, or in fp32 without a mark; another optimizer has the same parameters
    "alone": {},
    "frozen-odd": {"frozen": 1},
    "unmarked-odd": {"unmarked": 1},
    "another": {"beside": True},
}


@every_grouping
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(x, id=name, marks=pytest.mark.defect if {"frozen", "unmarked"} & {*x} else pytest.mark.control)
        for name, x in BESIDE.items()
    ],
)
def test_saved_states_name_their_parameters_and_are_read_back(grouping, options):
    """Sharded and plain, by another optimizer over such parameters."""
    trained, other = (Optimizer(grouping, **options) for _ in range(2))
    for each in (trained, other, other):
        each.step()
    assert_placed(trained)
    wrong = misread(trained, other)
    assert not wrong, f"read back with other values: {wrong}"
    other.step()
    wrong = renumbered(trained, other)
    assert not wrong, f"plain state: {wrong}"


@pytest.mark.control
@every_grouping
def test_saved_states_are_right_where_the_backfill_alone_can_match(grouping):
    """The backfill for generalized tensor parallelism, of each of the 16-bit parameters in turn."""
    if not (hasattr(optimizer, "_backfill_gtp_sharded_param_map") and hasattr(gtp_api, "is_gtp_param")):
        pytest.skip("this tree has no backfill")
    trained = Optimizer(grouping)
    trained.step()
    for name, x in trained.mixer.mixer.named_parameters():
        if trained.mains[name] is not x:
            with mock.patch.object(gtp_api, "is_gtp_param", lambda other, x=x: other is x):
                assert_placed(trained, x, what=f"{name}: entries")


@pytest.mark.control
@every_grouping
def test_saved_states_are_right_where_parameters_have_no_moments(grouping):
    """Before a step, without a gradient, and with a plain SGD."""
    names = [*Optimizer(grouping).mains]
    rows = {"before a step": (None, names), "SGD": ((), names), "no gradient": ([*range(len(names))], names)}
    rows |= {f"no gradient of {name}": ([n], [name]) for n, name in enumerate(names)}
    rows["no gradient of every second"] = ([*range(0, len(names), 2)], names[::2])
    for row, (without, bare) in rows.items():
        trained = Optimizer(grouping, plain=row == "SGD")
        if without is not None:
            trained.step(without=without)
        assert_placed(trained, bare=bare, what=f"{row}: entries")


@pytest.mark.control
def test_saved_states_of_dtensors_are_right(one_rank):
    """Upstream finds them by their local tensors, which PyTorch 2.8 gives out as themselves, and 2.13 as new ones."""
    mesh = one_rank.init_device_mesh("cpu", (1,))
    with mock.patch.object(DTensor, "to_local", lambda x: x._local_tensor):  # noqa: SLF001 - as in PyTorch 2.8
        trained = Optimizer("one_group", shards=mesh)
        trained.step()
        assert_placed(trained)


@pytest.mark.control
def test_a_plain_state_is_written_with_no_tensor_more_after_a_sharded_one():
    """What a tensor bears as an attribute is written with it, so that the copies could take the model along."""
    trained, counts = Optimizer(), []
    trained.step()
    for _ in range(2):
        file = io.BytesIO()
        torch.save(trained.optimizer.state_dict(), file)
        counts.append(sum("/data/" in name for name in zipfile.ZipFile(file).namelist()))
        trained.sharded(trained.model())
    assert counts[0] == counts[1] > 0


@pytest.mark.control
def test_each_call_follows_the_models_state_that_it_is_given():
    """A model may be written under other keys or as another part than it was read.

    States of earlier calls, which may be on their way to a file, stay as they are.
    """
    trained = Optimizer()
    trained.step()
    first = trained.sharded(trained.model())
    before = described(first)
    for (way, give), loading in itertools.product(GIVEN.items(), (True, False)):
        assert_placed(trained, model=give(trained), loading=loading, what=f"{way}: entries")
    changed = sorted({key for key, *_ in described(first) ^ before})
    assert not changed, f"the first state has changed: {changed}"


def differing(a, b, where="", depth=9):
    """Return where two nested values differ: tensors by type, values and attributes, which may refer to each other."""
    if type(a) is not type(b) or not depth:
        return [where] if depth else []
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{where}: {key}" for key in sorted(map(str, a.keys() ^ b.keys()))]
        return [each for key in a for each in differing(a[key], b[key], f"{where}.{key}", depth - 1)]
    if isinstance(a, (list, tuple)):
        rows = [differing(*pair, f"{where}.{n}", depth - 1) for n, pair in enumerate(zip(a, b, strict=False))]
        return [where] * (len(a) != len(b)) + [each for row in rows for each in row]
    if hasattr(a, "tolist"):  # a tensor or an array
        wrong = [where] * ((a.dtype, a.tolist()) != (b.dtype, b.tolist()))
        return wrong + differing(getattr(a, "__dict__", {}), getattr(b, "__dict__", {}), where, depth - 1)
    return [] if a == b else [where]


def written_by(stage):
    """Return the shards that a rank gives to a checkpoint, and the rest, of which only the first rank's is written.

    The rank has one of two layers, in which all values are other ones.
    """
    trained = Optimizer()
    trained.step()
    moments = tree_leaves([*trained.optimizer.optimizer.state.values()])
    for x in [*trained.mains.values(), *trained.mixer.original.values(), *moments]:
        x.data.add_(stage if x.dim() else 0)  # the number of steps is the same
    state = trained.sharded(trained.model(sharded_offsets=((0, stage, 2),)))
    return save_preprocess(state, validate_access_integrity=False)


@pytest.mark.control
def test_nothing_that_differs_between_ranks_is_written_of_one_alone():
    """Upstream writes what is not sharded once ("We save the common state dict only on rank 0"), for every rank."""
    (ours, common), (theirs, other) = (written_by(stage) for stage in (0, 1))
    differ = differing(common, other)
    assert not differ, f"differs in what is written once: {differ}"
    shards = [{(x.key, tuple(x.global_offset)) for x in tree_leaves(each)} for each in (ours, theirs)]
    assert all(shards), "no shards"
    assert not shards[0] & shards[1], f"written by both: {sorted(shards[0] & shards[1])}"


@pytest.mark.control
def test_model_and_optimizer_copied_in_one_call_are_a_pair():
    """What is written and read of them, and their steps.

    (The copy's parameters have no attributes, as PyTorch copies parameters; main_param is one of them.)
    """
    trained = Optimizer()
    trained.step()
    copied = copy.deepcopy(trained)
    assert_placed(copied)
    copied.step()
    names, moved = {name for name, _ in trained.trained()}, set(different(trained, copied))
    assert moved == names, f"stepped with the copy, or not at all: {names - moved}"
    trained.step()
    wrong = different(trained, copied)
    assert not wrong, f"another step: {wrong}"
    given = dict(copied.mixer.mixer.named_parameters())
    wrong = [name for name, x in trained.trained() if not same([x], [given[name]])]
    assert not wrong, f"the model's: {wrong}"
    other = Optimizer()
    other.step()
    for one, two in ((copied, other), (other, copied)):
        wrong = misread(one, two)
        assert not wrong, f"read by {'the copy' if two is copied else 'another'}: {wrong}"
        other.step()


@pytest.mark.control
def test_a_model_under_an_optimizer_is_written_and_read_whole():
    """The mixer, with all that its parameters bear. Float16Module, which wraps it, has a function that pickle refuses.

    What is read is wrapped again.
    """
    trained = Optimizer()
    trained.mixer.train().sum().backward()
    trained.step()
    assert_placed(trained)
    read = reread(trained.mixer.mixer)
    states = [{n: (x, x.requires_grad) for n, x in each.named_parameters()} for each in (trained.mixer.mixer, read)]
    wrong = differing(*states)
    assert not wrong, f"differs from what was written: {wrong}"
    kinds = {name: x.dtype for name, x in read.named_parameters()}
    Float16Module(trained.mixer.config, read)
    wrong = [name for name, x in read.named_parameters() if x.dtype != kinds[name]]
    assert not wrong, f"cast again: {wrong}"


@pytest.mark.control
def test_a_deleted_model_and_its_optimizer_are_freed():
    def used():
        trained = Optimizer()
        trained.mixer.train().sum().backward()
        trained.step()
        misplaced(trained)  # a save
        buffers = dict(trained.mixer.mixer.named_buffers())
        return weak_storages([*trained.mains.values(), *buffers.values(), *trained.mixer.original.values()])

    kept = kept_alive(used(), 0.0)
    assert not kept, f"{kept} storages are not freed"
