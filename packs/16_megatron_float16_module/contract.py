"""A_log and D of Mamba mixers stay in fp32 inside Float16Module, as the mixer's comments say.

In a bf16 or fp16 model, kernels, optimizer and checkpoints have the rate of decay of each head, exp(A_log), that was
made or loaded. All else is cast as by module.bfloat16() or half(). Where the tree has mark_keep_in_fp32, marked
parameters stay in fp32. The optimizer steps fp32 parameters between 16-bit ones, and saves each state under its name.

The mixer, Float16Module and the optimizer are real, and all tensors are on the CPU. Stand-ins replace the kernels: they
note their inputs, and are linear in A, D and dt_bias. Linear layers are torch's. Process groups state a rank and a
size, or are PyTorch's fake group.

Not judged: GPUs; mamba_ssm's kernels and its gated norm; dynamic batching; several ranks; speed; loss; the gradient
that a marked parameter has at the cast; gated delta nets, which make A_log in params_dtype. So do mixers with dt_bias:
a figure tells what its rounding costs. A gated delta product is judged where the tree has one.

Tolerances: a kept A_log is exact. The exponential of fp32 errs by at most two units in the last place (EXACT). What is
left of a state is exp(-x) for x = rate * time. An error of the rate changes it by that error times x * exp(-x), which
is at most 1 / e (DECAY). Adam's steps in fp32 round values below 4 by 2^-23.
"""

import contextlib
import copy
import functools
import importlib
import importlib.util
import io
import itertools
import math
import sys
import types
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from kit.autograd import kept_alive, weak_storages

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
NOTED = {"rates": []}  # of the last call of a kernel, and the last two A of decode steps


def kernel(x, A, D, dt_bias):
    """Note in float64 what a kernel is given; x is [..., heads, channels]."""
    NOTED.update({name: value.detach().double() for name, value in {"A": A, "D": D, "dt_bias": dt_bias}.items()})
    return (x.float() * (A[:, None] + D.view(len(A), -1) + dt_bias[:, None])).to(x.dtype)


def scan(x, _dt, A, B, *_, D, dt_bias, return_final_states=False, **_options):
    """Stand for mamba_chunk_scan_combined."""
    result = kernel(x, A, D, dt_bias)
    return (result, x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1])) if return_final_states else result


def whole_scan(zxbcdt, _weight, _bias, dt_bias, A, D, *, headdim, **_):
    """Stand for mamba_split_conv1d_scan_combined."""
    width = len(A) * (headdim or D.shape[-1])
    return kernel(zxbcdt[..., :width].unflatten(-1, (len(A), -1)), A, D, dt_bias).flatten(-2)


def decode_step(_state, x, _dt, A, _b, _c, D, *, dt_bias, **_):
    """Stand for selective_state_update, whose A, D and dt_bias are repeated for each channel."""
    NOTED["rates"] = [*NOTED["rates"][-1:], A]
    return kernel(x, A[:, 0, 0], D[:, 0], dt_bias[:, 0])


class Linear(torch.nn.Linear):
    """Stands for Megatron's parallel linear layers: the first is cut by its outputs, the second by its inputs."""

    def __init__(self, inputs, outputs, *, config, input_is_parallel=False, **_):
        ranks = config.tensor_model_parallel_size
        inputs, outputs = (inputs // ranks, outputs) if input_is_parallel else (inputs, outputs // ranks)
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def forward(self, x):
        return super().forward(x), None


# Upstream imports these compiled packages. Their norm with a gate is made and not called.
compiled = mock.MagicMock(mamba_chunk_scan_combined=scan, mamba_split_conv1d_scan_combined=whole_scan)
packages = "mamba_ssm mamba_ssm.ops mamba_ssm.ops.triton mamba_ssm.ops.triton.layernorm_gated fla fla.modules fla.ops"
packages += " mamba_ssm.ops.triton.ssd_combined fla.modules.l2norm fla.ops.gated_delta_product"
sys.modules |= dict.fromkeys(packages.split(), compiled)
torch.cuda.current_device = lambda: torch.device("cpu")
torch.compile = lambda function, **_: function  # Megatron's fused functions: to import their compiler takes seconds

from megatron.core import utils
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
mamba_mixer.causal_conv1d_fn, mamba_mixer.causal_conv1d_update = lambda x, **_: x, lambda x, *_, **_options: x
mamba_mixer.selective_state_update = decode_step

HEADS, CHANNELS, STATE, HIDDEN, TOKENS, BATCH = 6, 4, 5, 16, 12, 2
MANY = 128  # heads of the mixer whose decay is measured
LENGTHS = [2**n for n in range(18)]  # up to 131072 tokens
RATE, STEPS = 1e-4, 5  # of the optimizer
EXACT = 2 * 2**-23
DECAY = EXACT / math.e
UPDATED = STEPS * 2**-22 + EXACT
STEPPED = 2**-4  # of a step of RATE: the values are below 16, whose fp32 has 2**-20; a step that was not made is 1
SCALE = 2.0**12  # of the loss
CLIP = 1.0  # of the gradients, whose norm is above 10
SUMMED = 2**-16  # of a norm or a moment in fp32, which some hundred roundings by 2**-24 have made

KEPT = ("A_log", "D")
# Options of the configuration and arguments of the mixer. With tensor parallelism it is the second rank's.
LAYERS = {
    "usual": ({}, {}),
    "a D for each channel": ({}, {"D_has_hdim": True}),
    "parameters in fp32": ({"params_dtype": torch.float32}, {}),
    "not initialised": ({"perform_initialization": False}, {}),
    "tensor parallel": ({"tensor_model_parallel_size": 2, "mamba_num_groups": 2}, {}),
    "in evaluation": ({}, {}),
}
PATHS = ("training", "prefill", "decode")
every_half = pytest.mark.parametrize("half", ["bfloat16", "float16"])
every_path = pytest.mark.parametrize(
    ("layer", "path"),  # decode takes no D for each channel
    [pair for pair in itertools.product(LAYERS, PATHS) if pair != ("a D for each channel", "decode")],
)


def group(size=1, rank=0):
    """Stand for a process group of which only size and rank are read."""
    return types.SimpleNamespace(size=functools.partial(int, size), rank=functools.partial(int, rank))


def groups_of(tp=None):
    """Return process groups, of one rank each where nothing else is given."""
    return ProcessGroupCollection(tp=tp or group(), cp=group(), pp=group())


def config_of(half, **options):
    """Return a configuration for parameters in 16 bits; half names their type."""
    fixed = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "params_dtype": getattr(torch, half)}
    mamba = {"mamba_num_heads": HEADS, "mamba_head_dim": CHANNELS, "mamba_state_dim": STATE, "mamba_num_groups": 1}
    return TransformerConfig(**fixed | mamba | options, bf16=half == "bfloat16", fp16=half == "float16")


class Mixer:
    """A real mixer in a real Float16Module, and its parameters in float64 as they were before that."""

    def __init__(self, half="bfloat16", layer="usual", *, heads=HEADS):
        self.half, (options, arguments) = getattr(torch, half), LAYERS[layer]
        self.config = config_of(half, **{"mamba_num_heads": heads} | options)
        ranks = self.config.tensor_model_parallel_size
        torch.manual_seed(heads)
        self.mixer = mamba_mixer.MambaMixer(
            self.config, mamba_mixer.MambaMixerSubmodules(in_proj=Linear, out_proj=Linear), HIDDEN, rmsnorm=False,
            layer_number=1, pg_collection=groups_of(group(ranks, ranks - 1)), **arguments,
        )  # fmt: skip
        if layer == "not initialised":
            self.mixer.A_log.data.uniform_()
        self.mixer.train(layer != "in evaluation")
        self.original = dict(self.mixer.named_parameters())
        self.attributes = {name: dict(vars(x)) for name, x in self.original.items()}
        self.made = {name: x.detach().double() for name, x in self.original.items()}
        self.wrapped = Float16Module(self.config, self.mixer)

    def load(self, dtype):
        """Load a read-only checkpoint whose A_log and D are of this dtype, and none without; return both in float64."""
        state = {name: x.detach().clone() for name, x in self.wrapped.state_dict().items()}
        state["A_log"] = (torch.rand(state["A_log"].shape) * 4 - 1).to(dtype)
        state["D"] = (1 + torch.randn(state["D"].shape) / 4).to(dtype)
        with pytest.raises(RuntimeError, match="A_log"):
            self.wrapped.load_state_dict({})
        self.wrapped.load_state_dict(types.MappingProxyType(state))
        return {name: state[name].double() for name in KEPT}

    def train(self):
        """Go forward; return the result."""
        return self.wrapped.train()(torch.randn(TOKENS, BATCH, HIDDEN))[0]

    def learn(self):
        """Go forward and back, and make a step of gradient descent."""
        self.train().sum().backward()
        torch.optim.SGD(self.mixer.parameters(), lr=2.0**-10).step()

    def infer(self, *, decode, batch=BATCH):
        """Run the prompt, and as many tokens after it, one by one."""
        context = StaticInferenceContext(max_batch_size=batch, max_sequence_length=TOKENS + decode)
        context.seqlen_offset = 0
        self.wrapped.eval()
        with torch.no_grad(), InferenceMode.active():
            self.wrapped(torch.randn(TOKENS, batch, HIDDEN), inference_context=context)
            for token in range(decode):
                context.sequence_len_offset = context.seqlen_offset = TOKENS + token
                self.wrapped(torch.randn(1, batch, HIDDEN), inference_context=context)
        self.wrapped.train()

    def run(self, path):
        """Run a path; return what its kernel has noted."""
        NOTED.pop("A", None)
        if path == "training":
            self.train()
        else:
            self.infer(decode=int(path == "decode"))
        return dict(NOTED)


def off(value, exact):
    """Return the largest relative error, or NaN."""
    return ((value.flatten() - exact.flatten()).abs() / exact.flatten().abs()).max().item()


def assert_rates(noted, exact):
    """Assert the rates and D that a kernel has noted, by A_log and D in float64."""
    assert off(noted["A"], -exact["A_log"].exp()) <= EXACT, "A"
    assert off(noted["D"], exact["D"]) == 0, "D"


@pytest.mark.defect
@every_path
@every_half
def test_kernels_are_given_the_rates_that_were_made_or_loaded_in_fp32(half, layer, path):
    mixer = Mixer(half, layer)
    assert_rates(mixer.run(path), mixer.made)
    exact = mixer.load(torch.float32)
    assert_rates(mixer.run(path), exact)


@pytest.mark.control
@pytest.mark.parametrize("path", PATHS)
@every_half
def test_a_checkpoint_in_16_bits_gives_values_and_no_types(half, path):
    """Then PyTorch casts the mixer, and spares nothing: the rates are computed in fp32 all the same."""
    mixer = Mixer(half)
    kinds = {name: x.dtype for name, x in mixer.mixer.named_parameters()}
    exact = mixer.load(mixer.half)
    assert {name: x.dtype for name, x in mixer.mixer.named_parameters()} == kinds
    assert_rates(mixer.run(path), exact)
    mixer.mixer.to(mixer.half)
    noted = mixer.run(path)
    assert_rates(noted, exact)
    assert off(noted["dt_bias"], mixer.made["dt_bias"].to(mixer.half).double()) == 0


@pytest.mark.control
@pytest.mark.parametrize("layer", LAYERS)
@every_half
def test_all_else_is_cast_and_stays_itself(half, layer):
    """PyTorch's own cast spares nothing afterwards."""
    mixer = Mixer(half, layer)
    assert mixer.wrapped.module is mixer.mixer
    for name, x in mixer.mixer.named_parameters():
        assert x is mixer.original[name], name
        assert x.requires_grad, name
        assert mixer.attributes[name].items() <= vars(x).items(), name
        if "_proj" not in name:  # else the gradient counts as a copy of the first rank's
            assert getattr(x, "tensor_model_parallel", False), name
            assert getattr(x, "partition_dim", None) == 0, name
        assert name in KEPT or x.dtype == mixer.half, name
        assert name in KEPT or x.equal(mixer.made[name].to(mixer.half)), name
    assert {x.dtype for x in mixer.wrapped.double().state_dict().values()} == {torch.float64}


@pytest.mark.defect
@every_half
def test_what_is_left_of_a_state_after_many_tokens(half, figure):
    """With the step sizes with which training begins. Figures: the rates, and what rounding dt_bias costs."""
    mixer = Mixer(half, heads=MANY)
    noted, right = mixer.run("training"), -mixer.made["A_log"].exp()
    softplus = torch.nn.functional.softplus
    times = softplus(noted["dt_bias"]) * torch.tensor(LENGTHS, dtype=torch.float64)[:, None]
    error = ((noted["A"] * times).exp() - (right * times).exp()).abs().max().item()
    wrong = ((noted["A"] / right - 1).abs() > EXACT).sum().item()
    figure(f"{half}.heads", wrong, f"of {MANY} heads decay at another rate")
    figure(f"{half}.rate", 100 * off(noted["A"], right), "% of a head's rate of decay")
    figure(f"{half}.left", 100 * error, "% of a state, over all heads and lengths")
    steps = torch.linspace(math.log(0.001), math.log(0.1), 100_000, dtype=torch.float64).exp()
    bias = steps + (-(-steps).expm1()).log()  # the mixer's formula
    rounded = softplus(bias.to(getattr(torch, half)).double())
    figure(f"{half}.dt_bias", 100 * off(rounded, steps), "% of a step, by rounding dt_bias")
    assert error <= DECAY, f"what is left is off by {error:.2e} of a state, tolerance {DECAY:.2e}"


@pytest.mark.defect
def test_gated_delta_product_keeps_A_log_in_fp32():  # noqa: N802
    if gated_delta_product is None:
        pytest.skip("this tree has no gated delta product")
    config = config_of("bfloat16", mamba_num_groups=2)
    parts = gated_delta_product.GatedDeltaProductMixerSubmodules(in_proj=Linear, out_proj=Linear)
    mixer = gated_delta_product.GatedDeltaProductMixer(
        config, parts, HIDDEN, A_init_range=(1, 16), layer_number=1, pg_collection=groups_of()
    )
    exact = mixer.A_log.detach().double()
    Float16Module(config, mixer)
    assert mixer.cp.get_A_log().detach().double().equal(exact)


@pytest.mark.control
@every_half
def test_rates_kept_between_decodes_are_brought_up_to_date_where_they_lie(half):
    """A CUDA graph that has captured a decode reads the storages which it was given then.

    Rates that are computed anew for every token need not stay: a graph computes them, too.
    """
    mixer = Mixer(half)
    mixer.infer(decode=3)  # of which the last two are noted: the first may compute what it then keeps
    rates, again = NOTED["rates"]
    kept = rates.data_ptr() == again.data_ptr()  # both are alive, so that others would lie elsewhere
    places = {name: x.data_ptr() for name, x in mixer.mixer.named_parameters()}
    changes = {
        "loaded": lambda: mixer.load(torch.float32),
        "loaded in 16 bits": lambda: mixer.load(mixer.half),
        "trained": mixer.learn,
        "wrapped again": lambda: Float16Module(mixer.config, mixer.mixer),
    }
    for name, change in changes.items():
        change()
        noted = mixer.run("decode")
        right = -mixer.mixer.A_log.detach().double().exp()
        assert off(noted["A"], right) <= EXACT, name
        assert not kept or off(rates[:, 0, 0].double(), right) <= EXACT, f"{name}: the storage of before"
        assert {name: x.data_ptr() for name, x in mixer.mixer.named_parameters()} == places, f"{name}: moved"


@pytest.mark.control
@pytest.mark.parametrize("layer", ["usual", "tensor parallel"])
@every_half
def test_decode_without_compiled_packages_gives_16_bits(half, layer):
    """Upstream computes it in PyTorch then, for a batch of one; the linear layer after it takes 16 bits alone."""
    absent = {"selective_state_update": None, "causal_conv1d_update": None}
    with mock.patch.multiple(mamba_mixer, **absent):
        Mixer(half, layer).infer(decode=1, batch=1)


@pytest.mark.control
@every_half
def test_inputs_become_16_bits_and_results_fp32_also_where_the_first_parameter_is_marked(half):
    model, seen = torch.nn.Identity(), []
    model.first, model.pg_collection = torch.nn.Parameter(torch.ones(2)), groups_of()
    getattr(module, "mark_keep_in_fp32", id)(model.first)  # where the tree has a mark
    model.register_forward_hook(lambda _model, inputs, _result: seen.append(inputs[0].dtype))
    result = Float16Module(config_of(half), model)(torch.ones(2))
    assert (seen, result.dtype) == ([getattr(torch, half)], torch.float32)


# The cast of any module.

TYPES = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64", "int64", "bool")
MARKS = {  # the names of the fp32 tensors that are marked; a child has tensors of the same names, one of them tied
    "nothing": lambda _: False,
    "its own": lambda name: not name.startswith("child."),
    "the child's": lambda name: name.startswith("child."),
    "all, taken back": lambda _: True,
}


def of_all_types():
    """Make a module with a parameter and a buffer of each type, also in a child, where they are frozen and empty."""
    made, random = torch.nn.Module(), torch.Generator().manual_seed(16)
    values = torch.randn(3, 4, dtype=torch.float64, generator=random).mT * 1e4  # their strides are not the usual ones
    made.child = torch.nn.Module().eval()
    for owner, numbers in ((made, values), (made.child, values), (made.child, values[:0])):
        for name in TYPES:
            dtype, size = getattr(torch, name), f"{name}_{numbers.numel()}"
            learns = owner is made and (dtype.is_floating_point or dtype.is_complex)
            owner.register_parameter(f"{size}_parameter", torch.nn.Parameter(numbers.to(dtype), requires_grad=learns))
            owner.register_buffer(f"{size}_buffer", numbers.to(dtype), persistent=owner is made)
    made.child.register_parameter("tied", made.float32_12_parameter)
    return made


def tensors_of(value):
    """Return parameters and buffers by name, tied ones under each."""
    return dict([*value.named_parameters(remove_duplicate=False), *value.named_buffers(remove_duplicate=False)])


def shown(x):
    """Return all of a tensor that a cast may change: its gradient as well."""
    if x is None:
        return None
    values = x.detach().contiguous().clone().untyped_storage().tolist()
    return x.dtype, x.stride(), x.requires_grad, values, shown(x.grad)


@pytest.mark.control
@pytest.mark.parametrize("marks", MARKS)
@every_half
def test_all_but_what_is_marked_is_cast_as_by_pytorch(half, marks):
    """The mark is an attribute, which is taken back by setting it to False."""
    mark = getattr(module, "mark_keep_in_fp32", None)
    if mark is None and marks != "nothing":
        pytest.skip("this tree has no mark")
    ours, theirs = of_all_types(), of_all_types()
    before = tensors_of(ours)
    for x in [x for name, x in before.items() if x.dtype == torch.float32 and MARKS[marks](name)]:
        mark(x)
        if marks == "all, taken back":
            x.keep_in_fp32 = False
    # A tied parameter that is marked under one name is marked under both.
    kept = {name: shown(x) for name, x in before.items() if getattr(x, "keep_in_fp32", False)}
    trained = [x for y in (ours, theirs) for n, x in tensors_of(y).items() if x.requires_grad and n not in kept]
    for x in trained:
        x.grad = x.detach() / 2 if x.element_size() > 1 else x.detach().clone()
    Float16Module(config_of(half), ours)
    after, expected = tensors_of(ours), tensors_of(theirs.bfloat16() if half == "bfloat16" else theirs.half())
    assert [ours.training, ours.child.training] == [True, False]
    assert [*after, *ours.state_dict()] == [*expected, *theirs.state_dict()], "other names, or another order"
    for name, x in expected.items():
        assert shown(after[name]) == (kept[name] if name in kept else shown(x)), name
        assert after[name] is before[name] or not isinstance(x, torch.nn.Parameter), name


# The optimizer.


class OnHost(torch.overrides.TorchFunctionMode):
    """Lets CPU tensors say that they are on a GPU, which the optimizer asks for."""

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        result = function(*args, **{k: "cpu" if v == "cuda" else v for k, v in (kwargs or {}).items()})
        return result.replace("torch.", "torch.cuda.") if function is torch.Tensor.type else result


@pytest.fixture(autouse=True)
def on_host():
    with OnHost():
        yield


# In its groups, fp32 parameters stand before or between the others, or alone.
every_grouping = pytest.mark.parametrize("grouping", ["matrices_first", "one_group", "a_group_each"])


class Optimizer:
    """The real optimizer for 16 bits over a model's parameters, by default in two groups as for weight decay.

    With a loss scale of a 16-bit type the model has that type. `odd` is done to every second parameter before that.
    """

    def __init__(self, grouping="matrices_first", *, scale=None, odd=id, model=None):
        half = scale or "bfloat16"
        self.mixer = model or Mixer(half)
        self.named = dict(self.mixer.mixer.named_parameters())
        for x in [*self.named.values()][1::2]:
            odd(x)
        matrices = [name for name, x in self.named.items() if x.dim() > 1]
        self.groups = [matrices, [name for name in self.named if name not in matrices]]  # of names
        if grouping != "matrices_first":
            self.groups = [[*self.named]] if grouping == "one_group" else [[name] for name in self.named]
        halves = {"bf16": half == "bfloat16", "fp16": half == "float16"}
        config = optimizer.OptimizerConfig(clip_grad=CLIP, lr=RATE, **halves)
        params = [[self.named[name] for name in names] for names in self.groups]
        adam = torch.optim.Adam([{"params": row, "wd_mult": float(n)} for n, row in enumerate(params)], lr=RATE)
        scaler = grad_scaler.ConstantGradScaler(SCALE) if scale else None
        self.optimizer = optimizer.Float16OptimizerWithFloat16Params(adam, config, scaler, lambda *_: None)
        self.optimizer.grad_stats_parallel_group, self.optimizer.tp_group = None, group()
        # The fp32 values. Another optimizer over the same parameters may change the attribute later.
        self.mains = {
            name: main if isinstance(main := getattr(x, "main_param", x), torch.Tensor) else x
            for name, x in self.named.items()
        }

    def model(self, prefix="", **options):
        """Return the model's sharded state."""
        return self.mixer.wrapped.sharded_state_dict(prefix, metadata={"dp_cp_group": group()}, **options)

    def moments(self, name):
        """Return what Adam keeps of a parameter, without the number of steps."""
        state = self.optimizer.optimizer.state.get(self.mains[name], {})
        return {key: value for key, value in state.items() if key != "step" and torch.is_tensor(value)}

    def is_copied(self, name):
        """Whether the fp32 value is not the model's own."""
        return self.mains[name] is not self.named[name]

    def step(self, *, without=()):
        """Give scaled gradients of 1 and -1, whose step is as large as the learning rate; make a step without clipping.

        Without are the numbers of the parameters that get none.
        """
        for n, x in enumerate(self.named.values()):
            if n not in without:
                x.main_grad = torch.full_like(x.detach(), 1.0 - 2 * (n % 2), dtype=torch.float32)
        self.optimizer.prepare_grads()
        self.optimizer.step_with_ready_grads()
        return self


@pytest.mark.defect
def test_the_forward_sees_every_step(figure):
    trained = Optimizer()
    before = trained.mixer.run("training")
    for _ in range(STEPS):
        trained.step()
    noted, moved = trained.mixer.run("training"), {}
    for name in KEPT:
        moved[name] = trained.mixer.made[name] - STEPS * RATE * trained.mains[name].grad.sign().double()
    figure("moved", (noted["A"] != before["A"]).sum().item(), f"of {HEADS} rates that {STEPS} steps of {RATE} changed")
    assert off(noted["A"], -moved["A_log"].exp()) <= UPDATED
    assert off(noted["D"], moved["D"]) <= UPDATED


@pytest.fixture
def one_rank():
    """Initialise torch.distributed with PyTorch's fake process group of one rank, which leaves tensors as they are."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield torch.distributed
    torch.distributed.destroy_process_group()


@pytest.mark.control
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("places", [["main_grad"] * 2, ["grad"] * 2, ["grad", "main_grad"]], ids="-".join)
@every_half
def test_steps_with_a_loss_scale_are_unscaled_clipped_and_left_out(half, places):
    """Whole steps are those of Adam in float64, with gradients that are clipped by their norm.

    Gradients are small integers, which scaled by a power of 2 are exact in 16 bits, and differ from step to step. Each
    parameter in turn has an inf before that, and these steps are left out. Where half of the parameters are outside
    DDP, as those of a head beside the model, their gradients are their own.
    """
    trained = Optimizer(scale=half)
    places = dict(zip(trained.named, itertools.cycle(places), strict=False))
    leaves = {name: x.detach().double().clone().requires_grad_() for name, x in trained.mains.items()}
    adam = torch.optim.Adam(leaves.values(), lr=RATE)
    for infinite, n in itertools.product([*leaves, None], range(STEPS)):
        gradients = {name: torch.randint(-4, 5, x.shape).double() for name, x in leaves.items()}
        if infinite is not None:
            gradients[infinite].view(-1)[n] = math.inf
        trained.optimizer.zero_grad()
        for name, x in trained.named.items():
            scaled = gradients[name] * SCALE
            if places[name] == "main_grad":
                x.main_grad = scaled.float()  # where DDP keeps it
            else:
                x.grad = scaled.to(x.dtype) + (0 if x.grad is None else x.grad)
        made, norm, _ = trained.optimizer.step()
        assert made == (infinite is None), f"a step with an inf in {infinite}"
        if made:
            right = math.sqrt(sum(x.square().sum() for x in gradients.values()))
            assert norm == pytest.approx(right, rel=SUMMED), "the norm"
            for name, x in leaves.items():
                x.grad = gradients[name] * min(1.0, CLIP / (right + 1e-6))
            adam.step()
    for name, x in trained.named.items():
        main, exact = trained.mains[name], leaves[name]
        assert (main.detach() - exact.detach()).abs().max() <= STEPPED * RATE, name
        assert x.equal(main.to(x.dtype)), f"{name}: the model's"


# What the optimizer writes and reads.


def place(x):
    """Return where a tensor lies, or a DTensor's part on this rank, or what an entry of a sharded state holds."""
    x = x.data.to_local() if isinstance(x.data, DTensor) else x.data
    return x.data_ptr() if isinstance(x, torch.Tensor) else "no tensor"


def part(entry):
    """Return of which whole an entry of a sharded state is which part, or those that a factory makes."""
    parts = tree_leaves(entry.build()) if hasattr(entry, "build") else [entry]
    return str([(x.global_shape, x.global_offset, x.replica_id) for x in parts])


def assert_saved(trained, model=None):
    """Assert that each tensor of the optimizer's sharded state stands under the name of its parameter, as its part.

    Nothing else may stand there: what is not sharded is written by the first rank alone ("We save the common state
    dict only on rank 0"). The model's entry of a parameter in fp8 holds a copy, and says of what.
    """
    model = trained.model() if model is None else model
    entries = {place(getattr(x.data, "_gtp_dequant_src", x)): x for x in tree_leaves(model)}
    expected = set()
    for name, x in trained.named.items():
        main, entry = trained.mains[name], entries[place(x)]
        values = trained.moments(name) | ({"fp32_param": main} if trained.is_copied(name) else {})
        expected |= {(f"optimizer.state.{key}.{entry.key}", place(y), part(entry)) for key, y in values.items()}
    state = trained.optimizer.sharded_state_dict(model)
    leaves = tree_leaves(state)
    saved = {(x.key, place(x), part(x)) for x in leaves if hasattr(x, "key") and hasattr(x, "replica_id")}
    assert saved == expected, f"wrong entries: {sorted({key for key, *_ in saved ^ expected})}"
    assert not [x for x in leaves if torch.is_tensor(x) and x.numel() > 1], "tensors that are not sharded"
    copies = [sum(map(trained.is_copied, names)) for names in trained.groups]
    assert [len(row) for row in state["fp32_from_fp16_params"]] == copies, "fp32 copies of each group"
    # Upstream reads a plain state by the order of the parameters, also one of an earlier release.
    for group_of_adam, names in zip(trained.optimizer.optimizer.param_groups, trained.groups, strict=True):
        assert [place(x) for x in group_of_adam["params"]] == [place(trained.mains[name]) for name in names], "order"


EVERY = range(100)
CASES = {
    "stepped": lambda grouping: Optimizer(grouping).step(),
    "no gradient": lambda grouping: Optimizer(grouping).step(without=EVERY),
    "no gradient of even ones": lambda grouping: Optimizer(grouping).step(without=EVERY[::2]),
    "copied with its model": lambda grouping: copy.deepcopy(Optimizer(grouping).step()),
    "frozen": lambda grouping: Optimizer(grouping, odd=lambda x: x.requires_grad_(False)).step(),
    "fp32": lambda grouping: Optimizer(grouping, odd=lambda x: setattr(x, "data", x.data.float())).step(),
}
ROLES = {"frozen": pytest.mark.defect, "fp32": pytest.mark.defect}  # every second one is, the latter without a mark


@pytest.mark.parametrize("case", [pytest.param(case, marks=ROLES.get(case, pytest.mark.control)) for case in CASES])
@every_grouping
def test_saved_states_name_their_parameters(grouping, case):
    assert_saved(CASES[case](grouping))


@pytest.mark.control
@every_grouping
def test_saved_states_are_right_where_the_backfill_alone_can_match(grouping):
    """The backfill for generalized tensor parallelism, of each of the 16-bit parameters in turn."""
    if not (hasattr(optimizer, "_backfill_gtp_sharded_param_map") and hasattr(gtp_api, "is_gtp_param")):
        pytest.skip("this tree has no backfill")
    trained = Optimizer(grouping).step()
    for name in filter(trained.is_copied, trained.named):
        hidden, model = trained.named[name], trained.model()
        [entry] = [entry for entry in tree_leaves(model) if entry.data is hidden]
        entry.data = hidden.detach().clone()  # as of a parameter in fp8
        entry.data._gtp_dequant_src = hidden  # noqa: SLF001 - the link by which upstream finds it
        with mock.patch.object(gtp_api, "is_gtp_param", lambda other, hidden=hidden: other is hidden):
            assert_saved(trained, model)


@pytest.mark.control
def test_saved_states_of_dtensors_are_right(one_rank):
    """Upstream finds them by their local tensors, which PyTorch 2.8 gives out as themselves, and 2.13 as new ones."""
    mesh, model = one_rank.init_device_mesh("cpu", (1,)), module.MegatronModule(config_of("bfloat16"))
    model.tp_group = group()
    for name, shape in (("matrix", (HIDDEN, TOKENS)), ("vector", (HIDDEN,))):
        shards = torch.nn.Parameter(distribute_tensor(torch.randn(shape).bfloat16(), mesh, [Shard(0)]))
        shards.is_torch_fsdp2_param = True  # as Megatron's own wrapper of FSDP2 says it
        model.register_parameter(name, shards)
    with mock.patch.object(DTensor, "to_local", lambda x: x._local_tensor):  # noqa: SLF001 - as in PyTorch 2.8
        assert_saved(Optimizer(model=types.SimpleNamespace(mixer=model, wrapped=model)).step())


@pytest.mark.control
def test_each_call_follows_the_models_state_that_it_is_given():
    """A model may be written under other keys, as another part or by another rank than it was read."""
    trained = Optimizer().step()
    replica = trained.model()
    for entry in replica.values():
        entry.replica_id = (0, 0, 1)
    for model in (trained.model(), trained.model("a."), trained.model(sharded_offsets=((0, 1, 3),)), replica):
        assert_saved(trained, model)


@pytest.mark.control
@every_grouping
def test_a_model_under_an_optimizer_is_written_and_read_whole(grouping):
    """The mixer, with all that its parameters bear; Float16Module has a function that pickle refuses."""
    trained = Optimizer(grouping).step()
    assert_saved(trained)
    file = io.BytesIO()
    torch.save(trained.mixer.mixer, file)
    file.seek(0)
    read = dict(torch.load(file, weights_only=False).named_parameters())
    for name, x in trained.named.items():
        assert vars(read[name]).keys() == vars(x).keys(), name
        assert (read[name].dtype, read[name].requires_grad) == (x.dtype, x.requires_grad), name
        assert read[name].equal(x), name


@pytest.mark.control
def test_a_deleted_model_and_its_optimizer_are_freed():
    def used():
        trained = Optimizer()
        trained.mixer.learn()
        assert_saved(trained.step())
        return weak_storages([*trained.mains.values(), *trained.named.values()])

    kept = kept_alive(used(), 0.0)
    assert not kept, f"{kept} storages are not freed"
