# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "einops==0.8.1",
#   "megatron-core==0.19.2",
#   "numpy==2.3.5",
#   "packaging==26.3",
#   "torch==2.13.0",
#   "triton==3.6.0",
# ]
# ///
"""Float16Module rounds the parameters of Mamba mixers that the mixer says are kept in fp32.

Symptom: MambaMixer makes A_log and D in fp32, with "Keep A_log in fp32" and "Keep in fp32" beside them. In a bf16 or
fp16 model Float16Module casts them all the same. Each head's rate of decay, exp(A_log), is then wrong by up to 0.8 %
in bf16, with one sign for the whole sequence. The optimizer's fp32 copies start from the rounded values, and a step
that is smaller than half a unit of bf16 in the last place is not seen by the next forward. A checkpoint in fp32 is
rounded when it is loaded.

Cause: Float16Module calls module.bfloat16() or module.half(), which spare nothing.

Scope: what the real mixer hands to its kernels from inside the real Float16Module, in training, static prefill and
static decode; and what the real optimizer for bf16 makes of the parameters, and saves. Contract (rows: CASES):

    16-bit type             bf16, fp16
    D                       a value a head, or one a channel (D_has_hdim; decode does not take that)
    groups, norm            1 and 2; with the gated norm and without
    params_dtype            the 16-bit type, or fp32 (Float16Module then casts every other parameter)
    values                  as they are made; from a checkpoint in fp32; from one in 16 bits, which changes no type
                            (a control); moved with the module (a control)
    context parallelism     one rank, and the second of two
    settings                SETTINGS: uninitialised weights, other options, the second of two tensor-parallel ranks,
                            frozen layers; in a model of several, cast while it trains and in evaluation; a checkpoint
                            in fp32 before the cast, and after it. The meta device is none of them: the mixer itself
                            names the device of its parameters
    all else                is cast as module.bfloat16() or half() did, from every floating-point type, parameters and
                            their gradients, and buffers, frozen, tied, empty or in a child; complex and integer ones,
                            identities and attributes stay (controls); so do all fp32 ones that are marked, buffers too,
                            where the tree has mark_keep_in_fp32, also in a module that was written and read whole; not
                            those whose mark is taken back: main's attribute keep_in_fp32, set to False, nor their
                            namesakes in another module (controls). Training and evaluation stay (a control). What
                            becomes of a gradient that a marked parameter has at the cast is not judged
    arguments, results      those in fp32 get 16 bits on a pipeline's first stage, these fp32 on its last, also where
                            the model begins with a marked parameter (controls)
    loading                 leaves what is given as it is; a missing entry, and one more, are refused (controls)
    cast by PyTorch         a mixer in 16 bits throughout computes its rates in fp32; double() makes all float64, and
                            to(device, type) moves all (controls)
    static decode           rates that are kept from one to the next are up to date where they lie, after training,
                            loading and another cast, and no parameter has moved: what a CUDA graph reads (a control);
                            without mamba_ssm and causal_conv1d it gives 16 bits, near float64 (a control)
    state dicts             every way in which Float16Module hands its parameters out (WAYS): A_log and D in fp32
    optimizer               what it begins with, what the forward sees of five steps; whole steps with other gradients
                            each, without DDP, where no parameter has a main_grad, also with no gradient for half of
                            them, and with half of them outside DDP; with a loss scale, with DDP, without and for half:
                            unscaled, clipped, left out for inf and nan (controls); its state, sharded and plain, whose
                            numbers are those of the parameters as given, written, and read back by another optimizer,
                            also where a second one was made over the same parameters, and where model and optimizer
                            were copied in one call (controls), with the fp32 parameters before, between and behind the
                            others, and in groups of their own (GROUPINGS), and where only the backfill for generalized
                            tensor parallelism (GTP) can match one of the others; with frozen parameters in the groups,
                            and with fp32 ones that nobody marked; where parameters have no moments, and DTensors,
                            written (controls); under the keys and as the parts that the model's state has at each call
                            (GIVEN), with nothing written once for two pipeline ranks that differs between them
                            (controls); the plain state has no tensor more once a sharded one was made, and parameters
                            keep what they bear in a mixer that is written and read whole (controls)
    memory                  what is deleted, model and optimizer, is freed (a control)

dt_bias is a control: the mixer makes it in params_dtype, so nothing says that it is kept; a figure tells what its
rounding costs. Where the tree has a gated delta product, whose A_log bears the same comment, that is judged, too.
Gated delta nets make A_log in params_dtype and are left alone.

Stand-ins: no CUDA kernel runs. mamba_ssm's gated norm, its two scans and its decode step, and the causal convolution
are the formulas in PyTorch, in fp32, differentiable; the linear layers are torch's; process groups of one rank are an
object with a rank and a size, or PyTorch's fake one, for DTensors; their to_local is PyTorch 2.8's. `traced`: the
tensors which the mixer hands to its kernels are noted.

Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5929 gave main a mark for such parameters, and marked none of
Mamba's. For a checkout: PYTHONPATH=CHECKOUT uv run reproduce.py

Both sentinels without the runner, from a folder that holds the release's own megatron_core-0.19.2.tar.gz, with PACK set
to the absolute path of this file's folder and with torch, triton, numpy, einops and packaging installed:

    tar xzf megatron_core-0.19.2.tar.gz
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py"
    GIT_CEILING_DIRECTORIES="$PWD" git -C megatron_core-0.19.2 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py"
"""

# fmt: off
# --- protocol: begin (the same in every probe; the original is harness/protocol.py)
import argparse, contextlib, ctypes, fnmatch, hashlib, json, os, sys, traceback
from pathlib import Path
class Probe:  # prints the lines that a runner reads, and draws the verdict from the checks among them
    def __init__(self):
        self.judged, self.tested, self.only = {}, [], None  # judged: (role, ok) -> the names of these checks
    def say(self, word, **fields):  # JSON has neither NaN nor infinity: they become strings
        print(word, json.dumps(json.loads(json.dumps(fields), parse_constant=str)), flush=True)
    def upstream(self, module):  # a module under test, as it was really loaded
        name, file, package = module.__name__, Path(module.__file__), module.__name__.partition(".")[0]
        self.tested.append(next((str(folder) for folder in file.parents if folder.name == package), str(file)))
        self.say("UPSTREAM", module=name, file=str(file), sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    def check(self, name, role, ok, **values):  # ok is None where this cannot be judged here
        self.judged.setdefault((role, ok), []).append(name)
        self.say("CHECK", name=name, role=role, ok=ok, **values)
    def judge(self, name, role, measure, *given):  # measure(*given) returns ok, and by name what it measured
        try:
            wanted = fnmatch.fnmatchcase(name, self.only or "*")
            ok, values = measure(*given) if wanted else (None, {"reason": "--only leaves it out"})
        except Exception as error:  # code under test that raises is wrong; a fault of the probe or the host is not
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            host = isinstance(error, (ImportError, MemoryError, OSError)) or "out of memory" in str(error)
            refused = "returned an in" in str(error)  # autograd says: an invalid gradient, an incorrect number of them
            if host or not (refused or any(file.startswith(tuple(self.tested)) for file in files)):
                raise
            traceback.print_exc()
            ok, values = False, {"reason": f"it raised {type(error).__name__}: {error}"[:400]}
        self.check(name, role, ok, **values)
    def output(self, name, tensor, must_match=True):  # the runner compares the two lanes'
        data = tensor.detach().cpu().contiguous()
        sha256 = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        self.say("OUTPUT", name=name, dtype=str(data.dtype), shape=[*data.shape], sha256=sha256, must_match=must_match)
    @contextlib.contextmanager
    def alone(self):  # around launches that are timed: no other lane of the runner uses this GPU meanwhile
        gate = Path(os.environ.get("REPRODUCER_GPU_GATE", os.devnull))  # a named pipe, where lanes share a GPU
        try:
            yield gate.read_text()  # ends when the other lanes are off it
        finally:
            gate.read_text()  # ends when they may use it again
    def run(self, judge):  # judge(probe, target) loads upstream and makes the checks
        parser = argparse.ArgumentParser(description="Judge one bug; the last line is the verdict.")
        parser.add_argument("--target", help="cpu, sm_90a, ... (default: this host's GPU, else cpu)")
        parser.add_argument("--only", metavar="CHECK", help="run this check alone (a name or a glob): no verdict")
        target, self.only = vars(parser.parse_args()).values()
        reason = f"only {self.only} was run" if self.only else "no defect check could be judged here"
        try:
            if target is None:
                import torch
                arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
                target = "sm_{}{}".format(*arch) + "a" * (arch >= (9, 0)) if arch else "cpu"
            judge(self, target)
        except (ImportError, NotImplementedError) as error:  # a package or a mode cannot be had
            self.judged, reason = {}, f"{type(error).__name__}: {error}"
        except Exception:
            traceback.print_exc()
            sys.exit(125)
        ends = {("control", False): ("CONTROL_FAILED", 125), ("defect", False): ("BUG_REPRODUCED", 10),
                ("defect", True): ("FIX_VALIDATED", 0), None: ("UNSUPPORTED", 125)}
        key = next((key for key in ends if key in self.judged and not self.only), None)
        self.say(ends[key][0], reason=", ".join(self.judged.get(key, [reason])))
        sys.exit(ends[key][1])
# --- protocol: end
# fmt: on

import copy, dataclasses, functools, gc, importlib.util, io, itertools, math, pickle, types, zipfile
from unittest import mock

# One row: the 16-bit type, a D for each channel, groups, gated norm, the type in which parameters are made.
CASES = (
    ("bfloat16", False, 1, True, "bfloat16"),
    ("bfloat16", True, 2, False, "float32"),
    ("bfloat16", False, 2, False, "float32"),
    ("float16", False, 2, True, "float16"),
    ("float16", True, 1, True, "float32"),
    ("float16", True, 1, False, "float16"),
)
# One row: options of the configuration and arguments of the mixer, for one layer of a model. With tensor parallelism it
# is the second rank's, with half of the heads.
SETTINGS = {
    "from a checkpoint": ({"perform_initialization": False}, {}),
    "initialised on the CPU": ({"use_cpu_initialization": True}, {"conv_init": 0.5}),
    "heads by width": ({"mamba_num_heads": None}, {"expand": 3}),
    "two kernels": ({"use_mamba_mem_eff_path": False}, {"rmsnorm": False}),
    "states in fp32": ({"mamba_training_ssm_states_dtype": "float32"}, {"chunk_size": 4}),
    "a later layer": ({"num_layers": 9}, {"layer_number": 7, "pp_layer_offset": 4, "name": "layers.6.mixer"}),
    "no number": ({}, {"layer_number": None, "D_has_hdim": True}),
    "one rate": ({}, {"A_init_range": (3, 3), "dt_min": 0.01, "dt_max": 0.02, "dt_init_floor": 0.015}),
    "tensor parallel": ({"tensor_model_parallel_size": 2}, {}),
    "from a checkpoint, a D for each channel": ({"perform_initialization": False}, {"D_has_hdim": True}),
}
# How the state of a Float16Module is asked for.
WAYS = {
    "state_dict": lambda module: module.state_dict(),
    "state_dict, prefixed variables": lambda module: module.state_dict(prefix="a.", keep_vars=True),
    "state_dict into another": lambda module: module.state_dict(destination={}, prefix="a."),
    "to be saved": lambda module: module.state_dict_for_save_checkpoint(),
    "to be saved, prefixed variables": lambda module: module.state_dict_for_save_checkpoint("a.", keep_vars=True),
    "sharded": lambda module: module.sharded_state_dict("a.", metadata={"dp_cp_group": group()}),
}
# By what the optimizer groups the n-th parameter x.
GROUPINGS = {
    "matrices first": lambda _, x: x.dim() < 2,
    "matrices last": lambda _, x: x.dim() > 1,
    "one group": lambda *_: 0,
    "a group each": lambda n, _: n,
}
# By the 16-bit type: the row of CASES, and the loss scale of a training.
SCALES = {
    "bfloat16": (CASES[0], lambda scalers: scalers.ConstantGradScaler(2.0**12)),
    "float16": (CASES[3], lambda scalers: scalers.DynamicGradScaler(2.0**12, 1.0, 2.0, 0.5, 2, 1)),
}
# Where the n-th parameter has its gradient in a step: in the buffer of DDP, in its own, or nowhere.
PLACES = {
    "main_grad": lambda _n, _step: "main_grad",
    "grad": lambda _n, _step: "grad",
    "grad, or none": lambda n, step: "grad" if (n + step) % 2 else None,
    "even ones in main_grad": lambda n, _step: "grad" if n % 2 else "main_grad",
    "odd ones in main_grad": lambda n, _step: "main_grad" if n % 2 else "grad",
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
    "loaded": lambda mixer: mixer.load(mixer.up.torch.float32),
    "loaded in 16 bits": lambda mixer: mixer.load(getattr(mixer.up.torch, mixer.half)),
    "trained": lambda mixer: mixer.learn(),
    "wrapped again": lambda mixer: mixer.up.module.Float16Module(mixer.config, mixer.mixer),
    "loaded once more": lambda mixer: mixer.load(mixer.up.torch.float32),
}
# By what a mixer says that a parameter is split over tensor-parallel ranks: all are, but those of the linear layers,
# which say it themselves. Of what does not say it, the first rank's gradient alone counts in the norm.
PARALLEL = {"tensor_model_parallel": True, "partition_dim": 0}
# Which of the fp32 tensors of a module are marked, by name; a child has tensors of the same names, one of them tied.
MARKED = {
    "all": lambda _: True,
    "its own": lambda name: not name.startswith("child."),
    "the child's": lambda name: name.startswith("child."),
    "parameters": lambda name: "buffer" not in name,
    "buffers": lambda name: "buffer" in name,
}
# Stages of a pipeline: its ranks, the rank, the parts of the model that a rank has in turn, and which of them this is.
STAGES = (
    (1, 0, None, None), (2, 0, None, None), (2, 1, None, None), (3, 1, None, None), (1, 0, 1, 0),
    (2, 0, 2, 0), (2, 0, 2, 1), (2, 1, 2, 0), (2, 1, 2, 1),
)  # fmt: skip
# How a state is given to be loaded.
GIVEN_STATES = {"as it was made": lambda x: x, "a plain dictionary": dict, "read-only": types.MappingProxyType}
FROZEN = ("no number", "two kernels")  # of SETTINGS: with a D for each channel, and without
HEADS, CHANNELS, STATE, HIDDEN, TOKENS, BATCH = 6, 4, 5, 16, 12, 2
TYPES = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64", "int64", "bool")
MANY = 128  # heads of the mixer whose decay is measured
LENGTHS = [2**n for n in range(18)]  # up to 131072 tokens
RATE, STEPS = 1e-4, 5  # of the optimizer
# A kept A_log is exact; the exponential of fp32 errs by two units in the last place at most.
EXACT = 2 * 2**-23
# What is left of a state is exp(-x) for x = rate * time, so that an error e of the rate changes it by e * x * exp(-x),
# which is e / exp(1) at most.
DECAY = EXACT / math.e
# Of fp32 in a recurrence: errors of TOKENS * BATCH * CHANNELS * STATE terms grow like the root of their number; 8 is
# room for the exponentials.
GRADIENT = 8 * 2**-23 * math.sqrt(TOKENS * BATCH * CHANNELS * STATE)
# Adam in fp32: a step rounds the value, which is below 4, by 2**-23 at most, and the exponential follows.
UPDATED = STEPS * 2**-22 + EXACT
STEPPED = 2**-4  # of a step of RATE: the values are below 16, whose fp32 has 2**-20; a step that was not made is 1
DECODED = 4  # units in the last place of 16 bits, of the largest value: one was measured
CLIP = 1.0  # of the gradients, whose norm is above 10
SUMMED = 2**-16  # of a norm or a moment in fp32, which some hundred roundings by 2**-24 have made


def recurrence(torch, x, dt, rates, b, c, skip):  # noqa: PLR0913, PLR0917
    """Run Mamba-2's recurrence; x is [batch, tokens, heads, channels], dt the step after softplus."""
    heads = x.shape[2]
    b, c = (each.repeat_interleave(heads // each.shape[2], 2) for each in (b, c))
    state, found = 0, []
    for n in range(x.shape[1]):
        left = (dt[:, n] * rates).exp()[..., None, None]
        state = state * left + (dt[:, n, :, None] * x[:, n])[..., None] * b[:, n, :, None]
        found.append((state * c[:, n, :, None]).sum(-1))
    return torch.stack(found, 1) + x * skip.view(heads, -1)


class Kernels:
    """Stand for the kernels, and note what they are given.

    Attributes:
        given: the rates, D and dt_bias of the last call, in float64.
        rates: those of the last two decodes, the tensors themselves.
        run: what the last scan computed from, in float64, and the gradient of its result.

    """

    def __init__(self, torch):
        self.torch, self.given, self.rates, self.run = torch, {}, [], {}

    def note(self, rates, skip, bias):
        """Note one value a head of A and dt_bias, and all of D."""
        self.given = {"A": rates, "D": skip, "dt_bias": bias}
        self.given = {name: x.detach().double().flatten() for name, x in self.given.items()}

    def convolve(self, x, weight, bias, **_):
        """Convolve [batch, channels, tokens] with what came before, and apply SiLU."""
        silu, size = self.torch.nn.functional.silu, weight.shape[-1]
        padded = self.torch.nn.functional.pad(x, (size - 1, 0))
        found = self.torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight))
        return silu(found)

    def scan(self, x, dt, A, B, C, *_, D, z=None, dt_bias, return_final_states=False, state_dtype=None, **_options):  # noqa: ARG002, PLR0913
        """Stand for mamba_chunk_scan_combined."""
        self.note(A, D, dt_bias)
        step = self.torch.nn.functional.softplus(dt.float() + dt_bias)
        inputs = [x.float(), step, B.float(), C.float()]
        found = recurrence(self.torch, *inputs[:2], A, *inputs[2:], D.float())
        self.run = {"inputs": [each.detach().double() for each in inputs]}
        if found.requires_grad:
            found.register_hook(lambda gradient: self.run.update(gradient=gradient.double()))
        found = found if z is None else found * self.torch.nn.functional.silu(z.float())
        state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[-1])
        return (found.to(x.dtype), state) if return_final_states else found.to(x.dtype)

    def whole(self, zxbcdt, weight, bias, dt_bias, A, D, chunk_size, *, ngroups, headdim, state_dtype=None, **_):  # noqa: ARG002, PLR0913, PLR0917
        """Stand for mamba_split_conv1d_scan_combined."""
        heads, width = len(A), len(A) * (headdim or D.shape[-1])
        state = (zxbcdt.shape[-1] - 2 * width - heads) // (2 * ngroups)
        z, xbc, dt = zxbcdt.split([width, width + 2 * ngroups * state, heads], -1)
        xbc = self.convolve(xbc.transpose(1, 2), weight, bias).transpose(1, 2)
        x, b, c = xbc.split([width, ngroups * state, ngroups * state], -1)
        x, b, c = x.unflatten(-1, (heads, -1)), b.unflatten(-1, (ngroups, -1)), c.unflatten(-1, (ngroups, -1))
        return self.scan(x, dt, A, b, c, chunk_size, D=D, dt_bias=dt_bias, z=z.unflatten(-1, (heads, -1))).flatten(-2)

    def decode(self, _state, x, _dt, A, _b, _c, D, *, dt_bias, **_):
        """Stand for selective_state_update, whose A, D and dt_bias are repeated for each channel."""
        self.rates = [*self.rates[-1:], A]
        self.note(A[:, 0, 0], D[:, 0], dt_bias[:, 0])
        return self.torch.zeros_like(x)


def findable(made):
    """Let pickle find a class that a function has made, by its name in this file."""
    made.__qualname__ = made.__name__
    globals()[made.__name__] = made
    return made


def gated_norm(torch):
    """Make a class for mamba_ssm's RMSNorm with a gate."""

    class Norm(torch.nn.Module):
        def __init__(self, size, *, eps, group_size, dtype, **_):
            super().__init__()
            self.weight, self.eps, self.group = torch.nn.Parameter(torch.ones(size, dtype=dtype)), eps, group_size

        def forward(self, x, z=None):
            gated = x.float() if z is None else x.float() * torch.nn.functional.silu(z.float())
            grouped = gated.unflatten(-1, (-1, self.group))
            normal = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
            return (normal.flatten(-2) * self.weight).to(x.dtype)

    return findable(Norm)


def linear(torch):
    """Make a class for Megatron's parallel linear layers: the first is cut by its outputs, the second by its inputs."""

    class Linear(torch.nn.Module):
        def __init__(self, inputs, outputs, *, config, input_is_parallel=False, **_):
            super().__init__()
            ranks = config.tensor_model_parallel_size
            inputs, outputs = (inputs // ranks, outputs) if input_is_parallel else (inputs, outputs // ranks)
            self.weight = torch.nn.Parameter(torch.randn(outputs, inputs, dtype=config.params_dtype) / 4)
            self.register_parameter("bias", None)

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight), None

    return findable(Linear)


def group(size=1, rank=0):
    """Stand for a process group of which only size and rank are read."""
    return types.SimpleNamespace(size=functools.partial(int, size), rank=functools.partial(int, rank))


class Mixer:
    """A real mixer in a real Float16Module, and its parameters in float64 as they were before that."""

    def __init__(self, up, case, *, heads=HEADS, context=(1, 0)):
        torch, self.up = up.torch, up
        self.half, hdim, groups, norm, params = case
        self.config = up.config(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, params_dtype=getattr(torch, params),
            bf16=self.half == "bfloat16", fp16=self.half == "float16", mamba_num_heads=heads,
            mamba_head_dim=CHANNELS, mamba_state_dim=STATE, mamba_num_groups=groups,
        )  # fmt: skip
        torch.manual_seed(heads)
        self.mixer = up.mixer.MambaMixer(
            self.config, up.mixer.MambaMixerSubmodules(in_proj=up.linear, out_proj=up.linear), HIDDEN, rmsnorm=norm,
            D_has_hdim=hdim, layer_number=1, pg_collection=up.groups(tp=group(), cp=group(*context), pp=group()),
        )  # fmt: skip
        self.mixer.register_buffer("floats", torch.randn(3))
        self.mixer.register_buffer("integers", torch.arange(3))
        self.original = dict(self.mixer.named_parameters())
        self.attributes = {name: dict(vars(x)) for name, x in self.original.items()}
        self.made = {name: x.detach().double() for name, x in self.original.items()}
        self.wrapped = up.module.Float16Module(self.config, self.mixer)

    def load(self, dtype):
        """Load a checkpoint in which A_log and D are of this dtype; return both in float64."""
        torch = self.up.torch
        state = {name: x.detach().clone() for name, x in self.wrapped.state_dict().items()}
        state["A_log"] = (torch.rand(state["A_log"].shape) * 4 - 1).to(dtype)
        state["D"] = (1 + torch.randn(state["D"].shape) / 4).to(dtype)
        self.wrapped.load_state_dict(state)
        return {name: state[name].double() for name in ("A_log", "D")}

    def train(self):
        """Go forward; return the result."""
        return self.wrapped(self.up.torch.randn(TOKENS, BATCH, HIDDEN))[0]

    def learn(self):
        """Go forward and back, and make a step of gradient descent."""
        self.train().sum().backward()
        self.up.torch.optim.SGD(self.mixer.parameters(), lr=2.0**-10).step()

    def infer(self, *, decode):
        """Run the prompt, and as many tokens after it, one by one."""
        context = self.up.context(max_batch_size=BATCH, max_sequence_length=TOKENS + decode)
        context.seqlen_offset = 0
        self.wrapped.eval()
        with self.up.torch.no_grad(), self.up.inference.active():
            self.wrapped(self.up.torch.randn(TOKENS, BATCH, HIDDEN), inference_context=context)
            for token in range(decode):
                context.sequence_len_offset = context.seqlen_offset = TOKENS + token
                self.wrapped(self.up.torch.randn(1, BATCH, HIDDEN), inference_context=context)
        self.wrapped.train()

    def run(self, path):
        """Run a path; return what its kernel was given."""
        self.up.kernels.given = {}
        if path == "training":
            self.train()
        else:
            self.infer(decode=int(path == "decode"))
        return self.up.kernels.given


def off(found, wanted):
    """Return the largest relative error; infinity for a NaN, which the largest of several errors would lose."""
    return ((found - wanted).abs() / wanted.abs()).max().nan_to_num(nan=math.inf).item()


def kept(up, case, path):
    """Judge what a kernel is given: as the mixer was made, and from a checkpoint in fp32."""
    mixer, errors = Mixer(up, case), {}
    for name in ("made", "loaded"):
        wanted = mixer.made if name == "made" else mixer.load(up.torch.float32)
        given = mixer.run(path)
        errors |= {f"{name} A": off(given["A"], -wanted["A_log"].exp()), f"{name} D": off(given["D"], wanted["D"])}
    return max(errors.values()) <= EXACT, {"measured": errors, "tolerance": EXACT, "unit": "relative error"}


def older(up, case, path):
    """Judge what a kernel is given from a checkpoint in the 16-bit type, and dt_bias, which is made in params_dtype.

    A checkpoint gives values, and no types: what is trained on has the precision that it had. Then the mixer is cast
    by PyTorch, which spares nothing: the rates are computed in fp32 all the same.
    """
    mixer = Mixer(up, case)
    half, types = getattr(up.torch, mixer.half), {name: x.dtype for name, x in mixer.mixer.named_parameters()}
    wanted = mixer.load(half)
    changed, errors = [name for name, x in mixer.mixer.named_parameters() if x.dtype != types[name]], {}
    for step in ("loaded", "cast by PyTorch"):
        given = mixer.run(path)
        errors[f"{step}: A"] = off(given["A"], -wanted["A_log"].exp())
        errors[f"{step}: D"] = off(given["D"], wanted["D"])
        errors[f"{step}: dt_bias"] = off(given["dt_bias"], mixer.made["dt_bias"].to(half).double())
        mixer.mixer.to(half)
    errors["parameters of another type"] = len(changed)
    return max(errors.values()) <= EXACT, {"measured": errors, "tolerance": EXACT, "unit": "relative error"}


def decodes_in_place(up, half):
    """Judge that rates which are kept from one decode to the next are brought up to date where they lie.

    A CUDA graph that has captured a decode reads the storages which it was given then. For it upstream keeps the rates
    in a cache that is written in its place ("its address [...] stays valid across every graph capture and replay,
    including across RL train/eval cycles") and expanded with strides of 0, by which the kernel takes its fast path.
    Rates that are computed anew for every token need not stay: a graph computes them, too, from parameters that have
    not moved. No graph is captured.
    """
    mixer, errors = Mixer(up, SCALES[half][0]), {}
    mixer.infer(decode=3)  # of which the last two are noted: the first may compute what it then keeps
    rates, again = up.kernels.rates
    kept = rates.data_ptr() == again.data_ptr()  # both are alive, so that others would lie elsewhere
    old = {name: x.detach() for name, x in mixer.mixer.named_parameters()}
    for step, change in CHANGES.items():
        change(mixer)
        mixer.run("decode")
        right = -mixer.mixer.A_log.detach().double().exp()
        errors[f"{step}: first A"] = off(rates[:, 0, 0].double(), right) if kept else 0.0
        errors[f"{step}: A"] = off(up.kernels.rates[-1].double(), right[:, None, None])
        errors[f"{step}: strides"] = sum(up.kernels.rates[-1].stride()[1:])
        found = dict(mixer.mixer.named_parameters())
        errors[f"{step}: moved"] = sum(found[name].data_ptr() != x.data_ptr() for name, x in old.items())
    wrong = {name: error for name, error in errors.items() if not error <= EXACT}
    return not wrong, {"measured": wrong, "tolerance": EXACT, "unit": "relative error, stride or number, if more"}


def gradients(up, case):
    """Judge the gradients of A_log and D against float64, given the scan's inputs and its gradient."""
    torch, mixer = up.torch, Mixer(up, case)
    wanted = mixer.load(torch.float32)
    found = mixer.train()
    (found * torch.randn(found.shape)).sum().backward()
    run = up.kernels.run
    leaves = [wanted[name].clone().requires_grad_() for name in ("A_log", "D")]
    x, step, b, c = run["inputs"]
    reference = recurrence(torch, x, step, -leaves[0].exp(), b, c, leaves[1])
    right = torch.autograd.grad(reference, leaves, run["gradient"])
    pairs = zip((mixer.mixer.A_log, mixer.mixer.D), right, strict=True)
    errors = [((x.grad.double() - y).norm() / y.norm()).nan_to_num(nan=math.inf).item() for x, y in pairs]
    return max(errors) <= GRADIENT, {"measured": errors, "tolerance": GRADIENT, "unit": "relative error in the norm"}


def decay(probe, up, half):
    """Judge what is left of a state after many tokens, with the step sizes with which training begins."""
    mixer = Mixer(up, (half, False, 1, True, half), heads=MANY)
    given = mixer.run("training")
    steps = up.torch.nn.functional.softplus(given["dt_bias"])
    times = steps * up.torch.tensor(LENGTHS, dtype=up.torch.float64)[:, None]
    right = -mixer.made["A_log"].exp()
    error = ((given["A"] * times).exp() - (right * times).exp()).abs().max().item()
    wrong = ((given["A"] / right - 1).abs() > EXACT).sum().item()
    probe.say("FIGURE", name=f"{half}.heads", value=wrong, unit=f"of {MANY} heads decay at another rate")
    probe.say("FIGURE", name=f"{half}.rate", value=100 * off(given["A"], right), unit="% of a head's rate of decay")
    probe.say("FIGURE", name=f"{half}.left", value=100 * error, unit="% of a state, over all heads and lengths")
    return error <= DECAY, {"measured": error, "tolerance": DECAY, "unit": "of a state"}


def rounded_bias(probe, torch, half):
    """Measure what it costs that dt_bias is made in 16 bits: the mixer's formula in float64, rounded at the end."""
    steps = (torch.linspace(math.log(0.001), math.log(0.1), 100_000, dtype=torch.float64)).exp()
    bias = steps + (-(-steps).expm1()).log()
    found = torch.nn.functional.softplus(bias.to(getattr(torch, half)).double())
    probe.say("FIGURE", name=f"{half}.dt_bias", value=100 * off(found, steps), unit="% of a step, by rounding dt_bias")


def context_parallel(up):
    """Judge the parameters of the second of two context-parallel ranks."""
    errors = []
    for half, hdim in (("bfloat16", True), ("float16", False)):
        mixer = Mixer(up, (half, hdim, 2, True, half), context=(2, 1))
        wanted = mixer.load(up.torch.float32)
        pairs = ((mixer.mixer.cp.get_A_log(), wanted["A_log"]), (mixer.mixer.cp.get_D(), wanted["D"]))
        errors += [off(x.detach().double(), y[len(y) // 2 :]) for x, y in pairs]
    return not any(errors), {"measured": errors, "tolerance": 0, "unit": "relative error"}


def settings(up, half, training):
    """Judge what the kernels of a model's layers are given, each made with other settings, from a checkpoint in fp32.

    The checkpoint is loaded before the model is cast, and another after that. The cast is in training or in evaluation.
    """
    torch, dtype = up.torch, getattr(up.torch, half)
    halves = {"bf16": half == "bfloat16", "fp16": half == "float16"}
    common = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "params_dtype": dtype} | halves
    common |= {"mamba_num_heads": HEADS, "mamba_head_dim": CHANNELS, "mamba_state_dim": STATE, "mamba_num_groups": 2}
    parts = up.mixer.MambaMixerSubmodules(in_proj=up.linear, out_proj=up.linear)
    torch.manual_seed(HEADS)
    layers, errors = torch.nn.ModuleDict(), {}
    for name, (options, arguments) in SETTINGS.items():
        options = {key: getattr(torch, x) if isinstance(x, str) else x for key, x in options.items()}  # noqa: PLW2901
        config = up.config(**(common | options))
        ranks = config.tensor_model_parallel_size
        groups = up.groups(tp=group(ranks, ranks - 1), cp=group(), pp=group())
        arguments = {"layer_number": 1, "pg_collection": groups} | arguments  # noqa: PLW2901
        layers[name] = up.mixer.MambaMixer(config, parts, HIDDEN, **arguments).requires_grad_(name not in FROZEN)
    for step in ("before", "after"):
        state = {name: torch.ones_like(x, dtype=torch.float32) / 3 for name, x in layers.state_dict().items()}
        for name in [name for name in state if name.endswith((".A_log", ".D"))]:
            state[name] += torch.rand(state[name].shape)
        layers.load_state_dict(state)
        if step == "before":
            up.module.Float16Module(up.config(**common), layers.train(training))
            layers.train()
        for name, layer in layers.items():
            up.kernels.given = {}
            layer(torch.randn(TOKENS, BATCH, HIDDEN).to(dtype))
            given = up.kernels.given
            errors[f"{name}, {step}: A"] = off(given["A"], -state[f"{name}.A_log"].double().exp())
            errors[f"{name}, {step}: D"] = off(given["D"], state[f"{name}.D"].double())
    wrong = {name: error for name, error in errors.items() if not error <= EXACT}
    return not wrong, {"measured": wrong, "tolerance": EXACT, "unit": "relative error, where it is more"}


def cast(up, case):
    """Judge everything that is to be cast, and what is not: integers, identities, attributes and gradients."""
    mixer = Mixer(up, case)
    half = getattr(up.torch, mixer.half)
    found = dict(mixer.mixer.named_parameters())
    wrong = [name for name, x in found.items() if name not in {"A_log", "D"} and x.dtype != half]
    wrong += [name for name, x in found.items() if x is not mixer.original[name] or not x.requires_grad]
    wrong += [n for n, x in found.items() if not mixer.attributes[n].items() <= vars(x).items()]
    wrong += [n for n, x in found.items() if n not in {"A_log", "D"} and off(x.double(), mixer.made[n].to(half)) != 0]
    split = ((x, [getattr(found[x], name, None) for name in PARALLEL]) for x in found if "_proj" not in x)
    wrong += [f"{name}: {values}, of {[*PARALLEL]}" for name, values in split if values != [*PARALLEL.values()]]
    wrong += ["conv1d_bias"] * (not 0.25 < mixer.made["conv1d_bias"].abs().max() <= 0.5)  # 1 / sqrt(4), of its width
    wrong += ["floats"] * (mixer.mixer.floats.dtype != half) + ["integers"] * (mixer.mixer.integers[2].item() != 2)
    wrong += ["integers' type"] * (mixer.mixer.integers.dtype != up.torch.int64)
    wrong += ["module"] * (mixer.wrapped.module is not mixer.mixer) + ["result"] * (
        mixer.train().dtype != up.torch.float32
    )
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "what is wrong"}


def handed_out(up, case):
    """Judge the parameters in the state dicts of the wrapped mixer: the two in fp32, the others in 16 bits."""
    mixer, wrong = Mixer(up, case), []
    types = {n: up.torch.float32 if n in {"A_log", "D"} else getattr(up.torch, mixer.half) for n in mixer.made}
    for way, give in WAYS.items():
        state = {key.removeprefix("a."): getattr(x, "data", x) for key, x in give(mixer.wrapped).items()}
        for name, dtype in types.items():
            found, wanted = state.get(name), mixer.made[name].to(dtype)
            right = found is not None and found.dtype == dtype and up.torch.equal(found, wanted)
            wrong += [] if right else [f"{way}: {name}"]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "what is missing, of another type or value"}


def moved(up, case):
    """Judge that what is done to every tensor of a module, such as a move to a device, is done to these, too.

    This host has one device: all is multiplied by 2 in its place. Then all is made float64, and last it is moved to the
    meta device and cast in one call.
    """
    mixer = Mixer(up, case)
    wanted = {name: x.detach() * 2 for name, x in mixer.mixer.state_dict().items()}
    mixer.wrapped._apply(lambda tensor: tensor * 2)  # noqa: SLF001 - what cuda() and to() call
    found = mixer.mixer.state_dict()
    wrong = [name for name, x in wanted.items() if not up.torch.equal(found[name], x)]
    doubled = mixer.wrapped.double().state_dict()
    narrow = [name for name, x in doubled.items() if x.is_floating_point() and x.dtype != up.torch.float64]
    away = mixer.wrapped.to("meta", getattr(up.torch, mixer.half)).state_dict()
    wrong += [f"{name}: not float64" for name in narrow]
    wrong += [f"{name}: not on the device" for name, x in away.items() if x.device.type != "meta"]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "what was left where it was"}


def of_all_types(torch):
    """Make a module with a parameter and a buffer of each type, also in a child, where they are frozen and empty."""
    module, random = torch.nn.Module(), torch.Generator().manual_seed(16)
    values = torch.randn(3, 4, dtype=torch.float64, generator=random).mT * 1e4  # their strides are not the usual ones
    module.child = torch.nn.Module()
    for each, made in ((module, values), (module.child, values), (module.child, values[:0])):
        for name in TYPES:
            dtype, size = getattr(torch, name), f"{name}_{made.numel()}"
            learns = each is module and (dtype.is_floating_point or dtype.is_complex)
            each.register_parameter(f"{size}_parameter", torch.nn.Parameter(made.to(dtype), requires_grad=learns))
            each.register_buffer(f"{size}_buffer", made.to(dtype), persistent=each is module)
    module.child.register_parameter("tied", module.float32_12_parameter)
    return module


def reread(torch, module):
    """Return a module that was written whole, and read, or None where what it bears cannot be written."""
    file = io.BytesIO()
    try:
        torch.save(module, file)
    except (pickle.PicklingError, AttributeError, RecursionError, TypeError):
        return None
    file.seek(0)
    return torch.load(file, weights_only=False)


def cast_types(up, half, mark=None, *, which="all", whole=False, back=False):  # noqa: PLR0913
    """Judge that a module is cast as PyTorch casts it: names, values, types, strides, modes, and what stays itself.

    With a mark, which fp32 tensors are given (MARKED), these alone stay as they are, also where the module is written
    and read before the cast: what a tensor bears as an attribute is kept then. (A deep copy of a parameter has no
    attributes.) Where it is taken back, all is cast: the mark of main is an attribute, which is then False.
    """
    ours = of_all_types(up.torch)
    theirs = copy.deepcopy(ours)

    def data(tensor):
        return tensor.detach().contiguous().clone().untyped_storage().tolist()

    def tensors(module):
        return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])

    old, theirs_old, before = tensors(ours), tensors(theirs), tensors(copy.deepcopy(theirs))
    chosen = {id(x) for n, x in old.items() if mark and x.dtype == up.torch.float32 and MARKED[which](n)}
    marked = [n for n, x in old.items() if id(x) in chosen]
    for name in marked:
        mark(old[name])
        if back and hasattr(old[name], "keep_in_fp32"):
            old[name].keep_in_fp32 = False
    marked = [n for n in marked if getattr(old[n], "keep_in_fp32", True)]
    ours = reread(up.torch, ours) if whole else ours
    if ours is None:
        return False, {"measured": "the marked module cannot be saved"}
    old = tensors(ours)
    learning = [n for n, x in old.items() if x.requires_grad and n not in marked]
    for each, name in ((each, name) for each in (old, theirs_old) for name in learning):
        each[name].grad = each[name].detach() / 2 if each[name].element_size() > 1 else each[name].detach().clone()
    halves = {"bf16": half == "bfloat16", "fp16": half == "float16"}
    config = up.config(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, **halves)
    ours.train(halves["bf16"]).child.train(halves["fp16"])
    up.module.Float16Module(config, ours)
    modes = (ours.training, ours.child.training)
    new, theirs_new = tensors(ours), tensors(theirs.bfloat16() if halves["bf16"] else theirs.half())
    stays = {name: before[name] for name in marked}
    theirs_new, theirs_old = theirs_new | stays, theirs_old | stays
    if [*new, *ours.state_dict()] != [*theirs_new, *theirs.state_dict()]:
        return False, {"measured": [*new, *ours.state_dict()], "tolerance": [], "unit": "names, or their order"}
    wrong = [] if modes == (halves["bf16"], halves["fp16"]) else ["training or evaluation"]
    wrong += [n for n, x in theirs_new.items() if data(new[n]) != data(x)]
    wrong += [n for n, x in theirs_new.items() if (new[n].dtype, new[n].stride()) != (x.dtype, x.stride())]
    wrong += [n for n, x in theirs_new.items() if new[n].requires_grad != x.requires_grad]
    wrong += [n for n, x in theirs_new.items() if (new[n] is old[n]) != (x is theirs_old[n])]
    for name in learning:
        found, wanted = new[name].grad, theirs_new[name].grad
        right = found is not None and found.dtype == wanted.dtype and data(found) == data(wanted)
        wrong += [] if right else [f"{name}: its gradient"]
    return not wrong, {"measured": sorted(set(wrong)), "tolerance": [], "unit": "what is not as PyTorch casts it"}


def marked(up, half):
    """Judge the cast of a module whose fp32 tensors are marked, where the tree has a mark."""
    if not hasattr(up.module, "mark_keep_in_fp32"):
        return None, {"reason": "this tree has no mark"}
    for ways in ({"whole": True}, {"back": True}, *({"which": which} for which in MARKED)):
        ok, values = cast_types(up, half, up.module.mark_keep_in_fp32, **ways)
        if not ok:
            break
    return ok, values


def converted(up, half):
    """Judge what Float16Module makes of a model's arguments and results, on each stage of a pipeline.

    On the first stage fp32 tensors among the positional arguments become 16-bit ones, also in lists and tuples; on the
    last, 16-bit results become fp32, if fp32_output is not False. All else stays. The model begins with a parameter
    that is marked, where the tree has a mark, or has none.
    """
    torch, dtype, wrong = up.torch, getattr(up.torch, half), []
    halves = {"bf16": half == "bfloat16", "fp16": half == "float16"}
    tensors = [(torch.arange(6) / 3).to(getattr(torch, name)) for name in ("float32", "float64", half, "int64", "bool")]
    nested = (tensors[0], [tensors, (None, 2.5)], torch.nn.Parameter(tensors[0]), "text")

    class Model(torch.nn.Module):
        def forward(self, *given, **named):
            self.given = given, named
            return nested

        def set_input_tensor(self, tensor):
            self.set = tensor

    def shown(x, change):
        """Return a nested value with its tensors' values and types, where a type is changed to another."""
        if isinstance(x, (list, tuple)):
            return type(x)(shown(each, change) for each in x)
        if not hasattr(x, "dtype"):
            return x
        wanted = change.get(x.dtype, x.dtype)
        return x.detach().to(wanted).tolist(), wanted

    for stage, marks in itertools.product(STAGES, (True, False)):
        ranks, rank, parts, part = stage
        config = up.config(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, **halves)
        config.virtual_pipeline_model_parallel_size = parts
        model = Model()
        model.vp_stage, model.pg_collection = part, up.groups(pp=group(ranks, rank))
        if marks:
            model.first, model.second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
            getattr(up.module, "mark_keep_in_fp32", id)(model.first)
        wrapped = up.module.Float16Module(config, model)
        stages = mock.patch.object(torch.distributed, "is_initialized", return_value=True)  # else all is one stage
        narrow = {torch.float32: dtype} if not rank and not part else {}
        widen = {dtype: torch.float32} if rank == ranks - 1 and part in {None, (parts or 1) - 1} else {}
        for options in ({}, {"fp32_output": True}, {"fp32_output": False}):
            with stages:
                found = shown(wrapped(*nested, named=tensors[0], **options), {})
            wanted = shown(nested, {} if options.get("fp32_output") is False else widen)
            wrong += [] if found == wanted else [f"{stage}, {marks}: results, {options}"]
            given, named = model.given
            wrong += [] if shown(given, {}) == shown(nested, narrow) else [f"{stage}, {marks}: arguments"]
            wrong += [] if [*named] == ["named"] and named["named"] is tensors[0] else [f"{stage}, {marks}: named ones"]
        wrapped.set_input_tensor(tensors[0])
        wrong += [] if model.set is tensors[0] else [f"{stage}, {marks}: set_input_tensor"]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "what is of another type or value"}


def unlike(mixer, state):
    """Return the names of a mixer's tensors that have other values than a state gives them."""
    found = mixer.mixer.state_dict()
    return [name for name, x in found.items() if name in state and not x.equal(state[name].to(x.dtype))]


def loads(up, half):
    """Judge that a state is read as it is, and stays so; and that what lacks an entry, or has one more, is refused."""
    torch, wrong = up.torch, []
    mixer = Mixer(up, SCALES[half][0])
    for dtype, (way, give) in itertools.product((half, "float32", "float64"), GIVEN_STATES.items()):
        state = mixer.wrapped.state_dict()
        for name in [name for name, x in state.items() if x.is_floating_point()]:
            state[name] = torch.randn(state[name].shape).to(getattr(torch, dtype))
        before = {name: (x, x.dtype, x.clone()) for name, x in state.items()}
        mixer.wrapped.load_state_dict(give(state))
        place = f"{dtype}, {way}"
        wrong += [] if [*state] == [*before] else [f"{place}: the names"]
        same = [state[n] is x and x.dtype == kind and x.equal(y) for n, (x, kind, y) in before.items() if n in state]
        wrong += [] if all(same) else [f"{place}: what was given has changed"]
        wrong += [f"{place}: {name}" for name in unlike(mixer, {name: x for name, (*_, x) in before.items()})]
    for strict, (what, change) in itertools.product((True, False), (("A_log", dict.pop), ("more", dict.setdefault))):
        state = {name: x + 1 for name, x in mixer.wrapped.state_dict().items()}
        change(state, what, torch.ones(1))
        try:
            mixer.wrapped.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            wrong += [] if strict and what in str(error) else [f"{what}, {strict}: {error}"]
        else:
            wrong += [f"{what}: not refused"] * strict
            wrong += [f"{what}, {strict}: {name}" for name in unlike(mixer, state)]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "what is wrong"}


def decodes_without_kernels(up, half):
    """Judge static decode where mamba_ssm and causal_conv1d are not installed: upstream then computes it in PyTorch.

    The result has the 16-bit type, as the linear layer behind it takes it; it and the state are near float64's.
    """
    torch, errors, wrong = up.torch, {}, []
    half_type, roundings = getattr(torch, half), DECODED * torch.finfo(getattr(torch, half)).eps
    for groups, kept_in in itertools.product((1, 2), (half, "float32")):
        mixer = Mixer(up, (half, False, groups, False, half))  # the gated norm is mamba_ssm's
        wanted, module = mixer.load(torch.float32), mixer.mixer
        decode = getattr(module, "ssm_decode", None) or module._ssm_decode  # noqa: SLF001 - its name until 0.19
        state = torch.randn(BATCH, HEADS, CHANNELS, STATE).to(getattr(torch, kept_in))
        convolved = torch.randn(BATCH, *module.conv1d_weight[:, 0].shape).to(half_type)
        for token in range(2):
            given = torch.randn(BATCH, 1, module.in_proj.weight.shape[0]).to(half_type)
            right, after = decoded(torch, mixer, wanted, [x.double() for x in (given, convolved, state)])
            absent = {"selective_state_update": None, "causal_conv1d_update": None}
            with mock.patch.multiple(up.mixer, **absent), torch.no_grad():
                found = decode(given, conv_state=convolved, ssm_state=state)
            name = f"{groups} group(s), state in {kept_in}, token {token}"
            wrong += [] if found.dtype == half_type and found.shape == right.shape else [f"{name}: {found.dtype}"]
            errors[name] = far(found, right, right.abs().max())
            errors[f"{name}: state"] = far(state, after, after.abs().max())
    wrong += [f"{name}: {error}" for name, error in errors.items() if not error <= roundings]
    measured = wrong or max(errors.values())
    return not wrong, {"measured": measured, "tolerance": roundings, "unit": "of the largest value"}


def decoded(torch, mixer, wanted, before):
    """Return the result of one token's decode and the state behind it, in float64, from what was there before.

    Before are the projected input, [batch, 1, all], the convolution's state, [batch, channels, width], and the state,
    [batch, heads, channels of a head, size].
    """
    silu, module, (given, conv, state) = torch.nn.functional.silu, mixer.mixer, before
    heads, groups = len(wanted["A_log"]), mixer.config.mamba_num_groups
    width = heads * CHANNELS
    z, xbc, dt = given[:, 0].split([width, width + 2 * groups * STATE, heads], -1)
    conv = torch.cat([conv[..., 1:], xbc[..., None]], -1)
    xbc = silu((conv * module.conv1d_weight.detach().double()[:, 0]).sum(-1) + module.conv1d_bias.detach().double())
    x, b, c = xbc.split([width, groups * STATE, groups * STATE], -1)
    x = x.unflatten(-1, (heads, CHANNELS))
    b, c = (each.unflatten(-1, (groups, STATE)).repeat_interleave(heads // groups, 1) for each in (b, c))
    dt = torch.nn.functional.softplus(dt + module.dt_bias.detach().double())
    left = (-dt * wanted["A_log"].exp())[..., None, None].exp()
    state = state * left + (dt[..., None] * x)[..., None] * b[:, :, None]
    y = (state * c[:, :, None]).sum(-1) + wanted["D"][:, None] * x
    return (y.flatten(1) * silu(z))[:, None], state


def refused(up):
    """Judge that a configuration with neither type is refused."""
    config = up.config(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1)
    try:
        up.module.Float16Module(config, up.torch.nn.Linear(2, 2))
    except Exception as error:
        return "should be True" in str(error), {"measured": str(error)}
    return False, {"measured": "no exception"}


def on_host(torch):
    """Make a context in which CPU tensors say that they are on a GPU, which the optimizer asks for."""

    class OnHost(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, _types, given=(), named=None):
            named = dict(named or {})
            if named.get("device") == "cuda":
                named["device"] = "cpu"
            found = function(*given, **named)
            return found.replace("torch.", "torch.cuda.") if isinstance(found, str) and "Tensor" in found else found

    return OnHost()


class Shards:
    """A model whose parameters are DTensors, as PyTorch's FSDP2 makes them: a matrix and a vector, cast to bf16."""

    def __init__(self, up, mesh):
        from torch.distributed.tensor import Shard, distribute_tensor

        config = up.config(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, bf16=True)
        self.mixer = up.module.MegatronModule(config)
        self.mixer.tp_group = group()
        for name, shape in (("matrix", (HIDDEN, TOKENS)), ("vector", (HIDDEN,))):
            self.mixer.register_parameter(name, up.torch.nn.Parameter(up.torch.randn(shape)))
        self.wrapped = up.module.Float16Module(config, self.mixer)
        for name, x in list(self.mixer.named_parameters()):
            shards = up.torch.nn.Parameter(distribute_tensor(x.detach(), mesh, [Shard(0)]))
            shards.is_torch_fsdp2_param = True  # as Megatron's own wrapper of FSDP2 says it
            self.mixer.register_parameter(name, shards)


class Optimizer:
    """The real optimizer for bf16 over a mixer's parameters, by default in two groups as for weight decay.

    Of what is frozen, and of what is put back in fp32 with no mark, either every second parameter is, or the others.
    Beside it there can be another one, made later over the same parameters. A plain one is SGD, which keeps nothing.
    """

    def __init__(  # noqa: PLR0913
        self,
        up,
        grouping="matrices first",
        *,
        scale=None,
        frozen=None,
        unmarked=None,
        shards=None,
        beside=False,
        plain=False,
    ):
        case, scaler = SCALES[scale] if scale else (CASES[0], None)
        self.up, self.mixer, rows = up, Shards(up, shards) if shards else Mixer(up, case), {}
        for n, x in enumerate(self.mixer.mixer.parameters()):
            rows.setdefault(GROUPINGS[grouping](n, x), []).append(x)
            x.requires_grad_(n % 2 != frozen)
            x.data = x.data.float() if n % 2 == unmarked else x.data
        self.given = [[*rows[key]] for key in sorted(rows)]  # the optimizer puts its copies into Adam's own lists
        halves = {"bf16": case[0] == "bfloat16", "fp16": case[0] == "float16"}
        config = up.optimizer.OptimizerConfig(clip_grad=CLIP, log_num_zeros_in_grad=True, lr=RATE, **halves)

        def made():
            groups = [{"params": [*rows[key]], "wd_mult": float(key)} for key in sorted(rows)]
            adam = (up.torch.optim.SGD if plain else up.torch.optim.Adam)(groups, lr=RATE)
            with on_host(up.torch):
                given = adam, config, scaler(up.scalers) if scaler else None, lambda *_: None
                return up.optimizer.Float16OptimizerWithFloat16Params(*given)

        self.optimizer = made()
        self.optimizer.grad_stats_parallel_group, self.optimizer.tp_group = None, group()
        mains = [(name, x, getattr(x, "main_param", x)) for name, x in self.mixer.mixer.named_parameters()]
        self.mains = {name: main if isinstance(main, up.torch.Tensor) else x for name, x, main in mains}
        self.beside = made() if beside else None

    def main(self, name):
        """Return the fp32 values that the optimizer keeps of a parameter."""
        return self.mains[name]

    def trained(self):
        """Return the parameters that are not frozen, by name."""
        return [(name, x) for name, x in self.mixer.mixer.named_parameters() if x.requires_grad]

    def model(self, prefix="", **options):
        """Return the model's sharded state."""
        return self.mixer.wrapped.sharded_state_dict(prefix, metadata={"dp_cp_group": group()}, **options)

    def sharded(self, model, *, loading=False):
        """Return the optimizer's sharded state, for such a one of the model."""
        with on_host(self.up.torch):
            return self.optimizer.sharded_state_dict(model, is_loading=loading)

    def step(self, *, without=()):
        """Give gradients of 1 and -1, whose every step is as large as the learning rate, and make one step.

        Without are the numbers of the parameters that get none.
        """
        for n, x in enumerate(self.mixer.mixer.parameters()):
            if n in without:
                continue
            x.main_grad = self.up.torch.full_like(x.detach(), 1.0 - 2 * (n % 2), dtype=self.up.torch.float32)
        with on_host(self.up.torch):
            self.optimizer.prepare_grads()
            self.optimizer.step_with_ready_grads()

    def whole_step(self, gradients, where):
        """Make a step as a training does, from gradients in float64 by name; return what the optimizer says of it.

        DDP keeps them in main_grad, a buffer; without it they are added to the parameters' own. Where says which of
        both each parameter has; those that have neither have no gradient.
        """
        torch = self.up.torch
        with on_host(torch):
            self.optimizer.zero_grad()
            scale = self.optimizer.get_loss_scale().double()
            for name, x in self.mixer.mixer.named_parameters():
                if where[name] is None:
                    continue
                scaled = (gradients[name] * scale).to(x.dtype if where[name] == "grad" else torch.float32)
                if where[name] == "main_grad":
                    x.main_grad = x.main_grad.copy_(scaled) if hasattr(x, "main_grad") else scaled
                else:
                    x.grad = scaled if x.grad is None else x.grad + scaled
            return self.optimizer.step()


def master(up):
    """Judge the fp32 values with which the optimizer begins: as made, and from a checkpoint of the model in fp32."""
    trained = Optimizer(up)
    errors = {n: off(trained.main(n).detach().double(), trained.mixer.made[n]) for n in ("A_log", "D")}
    loaded = trained.mixer.load(up.torch.float32)
    with on_host(up.torch):
        trained.optimizer.reload_model_params()
    errors |= {f"{n}, loaded": off(trained.main(n).detach().double(), x) for n, x in loaded.items()}
    return not any(errors.values()), {"measured": errors, "tolerance": 0, "unit": "relative error"}


def updates(probe, up):
    """Judge what the forward sees of some steps of Adam."""
    trained = Optimizer(up)
    before = trained.mixer.run("training")
    for _ in range(STEPS):
        trained.step()
    given = trained.mixer.run("training")
    sign = trained.main("A_log").grad.sign().double()
    skip = trained.main("D").grad.sign().double()
    moved = (given["A"] != before["A"]).sum().item()
    probe.say("FIGURE", name="moved", value=moved, unit=f"of {HEADS} rates that {STEPS} steps of {RATE} changed")
    errors = {"A": off(given["A"], -(trained.mixer.made["A_log"] - STEPS * RATE * sign).exp())}
    errors["D"] = off(given["D"], trained.mixer.made["D"] - STEPS * RATE * skip)
    return max(errors.values()) <= UPDATED, {"measured": errors, "tolerance": UPDATED, "unit": "relative error"}


@contextlib.contextmanager
def one_rank(torch):
    """Initialise torch.distributed with PyTorch's fake process group, of one rank, which leaves tensors as they are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield torch.distributed
    finally:
        torch.distributed.destroy_process_group()


def far(found, wanted, scale):
    """Return the largest error, in a scale."""
    return ((found.detach().double() - wanted).abs().max() / scale).item()


def followed(trained, place):
    """Return where whole steps differ from those of Adam in float64, with gradients that are clipped by their norm.

    Gradients are small integers, which scaled by a power of 2 are exact in 16 bits, and differ from step to step. With
    a loss scale each parameter in turn has an inf or a nan before that, and these steps are left out.
    """
    torch, wrong = trained.up.torch, []
    named = dict(trained.mixer.mixer.named_parameters())
    leaves = {name: trained.main(name).detach().double().clone().requires_grad_() for name in named}
    adam = torch.optim.Adam(leaves.values(), lr=RATE)

    def integers():
        return {name: torch.randint(-4, 5, x.shape).double() for name, x in leaves.items()}

    def where(step):
        return {name: PLACES[place](n, step) for n, name in enumerate(named)}

    for n, name in enumerate(named if trained.optimizer.grad_scaler else ()):
        gradients = integers()
        gradients[name].view(-1)[-1] = (math.inf, math.nan, -math.inf)[n % 3]
        made = trained.whole_step(gradients, where(n + 1))[0]  # in which the n-th parameter has a gradient
        wrong += [f"{name}: a step with {gradients[name].view(-1)[-1]}"] * bool(made)
    for n in range(STEPS):
        gradients, places = integers(), where(n)
        made, norm, zeros = trained.whole_step(gradients, places)
        flat = torch.cat([x.flatten() for name, x in gradients.items() if places[name]])
        for name, x in leaves.items():
            x.grad = gradients[name] * min(1.0, CLIP / (flat.norm().item() + 1e-6)) if places[name] else None
        adam.step()
        wrong += [] if made else [f"step {n} is left out"]
        wrong += [] if made and abs(norm / flat.norm().item() - 1) <= SUMMED else [f"norm of step {n}: {norm}"]
        wrong += [] if made and zeros == (flat == 0).sum() else [f"zeros of step {n}: {zeros}"]
    for name, x in named.items():
        main = trained.main(name)
        wrong += [] if far(main, leaves[name].detach(), RATE) <= STEPPED else [name]
        wrong += [] if torch.equal(x, main.to(x.dtype)) else [f"{name}: the model's"]
        for key in ("exp_avg", "exp_avg_sq"):
            found, wanted = trained.optimizer.optimizer.state[main].get(key), adam.state[leaves[name]][key]
            right = found is not None and far(found, wanted, wanted.abs().max()) <= SUMMED
            wrong += [] if right else [f"{name}: {key}"]
    return wrong


def own_gradients(up):
    """Judge whole steps without DDP: the gradients are those that each parameter has itself, in each step.

    So they are where in each step half of the parameters have none, as those of a layer that was skipped; and where
    half of the parameters are outside DDP, as those of a head beside the model.
    """
    wrong = []
    with one_rank(up.torch):
        for place in [place for place in PLACES if place != "main_grad"]:
            wrong += [f"{place}: {each}" for each in followed(Optimizer(up), place)]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "what differs from Adam in float64"}


def scaled(up, half):
    """Judge whole steps with a loss scale: in all places, and with DDP also where fp32 parameters have no mark."""
    rows, wrong = [*((place, None) for place in PLACES), ("main_grad", 0), ("main_grad", 1)], []
    with one_rank(up.torch):
        for place, unmarked in rows:
            found = followed(Optimizer(up, scale=half, unmarked=unmarked), place)
            wrong += [f"{place}, {unmarked}: {each}" for each in found]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "what differs from Adam in float64"}


def local(x):
    """Return a tensor, or what a DTensor has of it on this rank."""
    return x.to_local() if hasattr(x, "to_local") else x


def leaves(x):
    """Return what lies in nested dictionaries and lists."""
    x = [*x.values()] if isinstance(x, dict) else x
    return [y for each in x for y in leaves(each)] if isinstance(x, list) else [x]


def replica(model):
    """Return a model's sharded state as the entries of another replica."""
    for entry in model.values():
        entry.replica_id = (0, 0, 1)
    return model


def placed(entry):
    """Return of which whole an entry of a sharded state is which part, by which rank it is written, and under what."""
    if not hasattr(entry, "key"):
        return "no entry"
    parts = leaves(entry.build()) if hasattr(entry, "build") else [entry]
    names = [field.name for field in dataclasses.fields(parts[0]) if field.name not in {"data", "dtype", "key"}]
    return str([(x.key.removeprefix(entry.key), *(getattr(x, name) for name in names)) for x in parts])


def described(state):
    """Return what each entry of a sharded state is called, whose values it holds, and where they lie."""
    return {(getattr(x, "key", "no name"), id(x.data if hasattr(x, "key") else x), placed(x)) for x in leaves(state)}


def misplaced(trained, hidden=None, model=None, *, loading=False, bare=()):
    """Return the entries of the optimizer's sharded state that do not name the parameter to which a tensor belongs.

    Nor its part in the whole, as the given state of the model has it, which stays as it is. The model's entry of a
    hidden parameter holds a copy, which says of what, as one of a parameter in fp8 does. Bare are the names of
    parameters that have no moments.
    """
    model = trained.model() if model is None else model
    of, wanted, adam = {id(x.data): x for x in leaves(model)}, set(), trained.optimizer.optimizer.state
    for name, x in trained.trained():
        main, entry = trained.main(name), of[id(local(x))]
        values = {key: adam[main][key] for key in ("exp_avg", "exp_avg_sq")} if name not in bare else {}
        values |= {"fp32_param": main} if main is not x else {}
        wanted |= {(f"optimizer.state.{k}.{entry.key}", id(local(y)), placed(entry)) for k, y in values.items()}
    for entry in [entry for entry in leaves(model) if entry.data is hidden]:
        entry.data = hidden.detach().clone()
        entry.data._gtp_dequant_src = hidden  # noqa: SLF001 - the link by which upstream finds it
    given = described(model)
    state = trained.sharded(model, loading=loading)
    rows = [row for row in state["optimizer"]["state"].values() if isinstance(row, dict)]
    found = described(state["fp32_from_fp16_params"]) | described(rows)
    return sorted({key for key, *_ in found ^ wanted} | {f"the model's {key}" for key, *_ in described(model) ^ given})


def filled(entry, values):
    """Return a sharded state in whose place of every key there is the value that was saved under it."""
    if isinstance(entry, dict):
        return {key: filled(x, values) for key, x in entry.items()}
    if isinstance(entry, list):
        return [filled(x, values) for x in entry]
    if hasattr(entry, "key"):
        return values.get(entry.key, entry.data)  # what is of no parameter stays as it is
    return entry.unwrap() if hasattr(entry, "unwrap") else entry


def misread(trained, other):
    """Return the names of the parameters whose fp32 values, moments or step differ where another optimizer loads them.

    Both have the same parameters in the same groups; the other has made another number of steps.
    """
    torch, states = trained.up.torch, []
    for each, loads in ((trained, False), (other, True)):
        states.append(each.sharded(each.model(), loading=loads))
    rows = [*states[0]["fp32_from_fp16_params"]]
    rows += [row.values() for row in states[0]["optimizer"]["state"].values() if isinstance(row, dict)]
    values = {x.key: x.data.clone() for row in rows for x in row}
    states[1]["optimizer"]["state"]["common_step"] = states[0]["optimizer"]["state"]["common_step"].clone()
    with on_host(torch):
        other.optimizer.load_state_dict(filled(states[1], values))
    return different(trained, other)


def same(found, wanted):
    """Return whether two lists hold tensors, or DTensors, of the same types and values."""
    pairs = [(local(a), local(b)) for a, b in zip(found, wanted, strict=False)]
    return len(found) == len(wanted) and all(a.dtype == b.dtype and a.equal(b) for a, b in pairs)


def renumbered(trained, other):
    """Return what is not at its place in the optimizer's plain state, and what differs where another one loads it.

    Adam numbers parameters as they were given to it, and the fp32 copies are listed in that order in each group: by
    this alone a plain checkpoint, of a release as well, says what is whose.
    """
    state, adam = trained.optimizer.state_dict(), trained.optimizer.optimizer.state
    names = {id(x): name for name, x in trained.mixer.mixer.named_parameters()}
    given, wrong = [x for row in trained.given for x in row], []
    for n, x in enumerate(given):
        found, wanted = state["optimizer"]["state"].get(n, {}), adam.get(trained.main(names[id(x)]), {})
        right = found.keys() == wanted.keys() and same([found[key] for key in wanted], [*wanted.values()])
        wrong += [] if right else [f"state {n} is not of {names[id(x)]}"]
    kept = {id(x) for x in given if trained.main(names[id(x)]) is x}
    copies = state["fp32_from_fp16_params"]
    wrong += [] if len(copies) == len(trained.given) else ["number of groups"]
    for n, (row, found) in enumerate(zip(trained.given, copies, strict=False)):
        wanted = [trained.main(names[id(x)]) for x in row if id(x) not in kept and x.requires_grad]
        found = [x for x in found if id(x) not in kept]  # noqa: PLW2901 - to list what is in fp32 itself is no mistake
        wrong += [] if same(found, wanted) else [f"copies of group {n}"]
    with on_host(trained.up.torch):
        other.optimizer.load_state_dict(copy.deepcopy(state))
    return wrong + different(trained, other)


def different(trained, other):
    """Return the names of the parameters whose fp32 values, moments or step two optimizers have differently."""
    wrong = []
    for name, x in trained.trained():
        ours, theirs = (each.optimizer.optimizer.state[each.main(name)] for each in (trained, other))
        right = trained.main(name) is x or same([trained.main(name)], [other.main(name)])
        right = right and ours.keys() == theirs.keys() and same([*ours.values()], [theirs[key] for key in ours])
        wrong += [] if right else [name]
    return wrong


def saved(up, grouping, **options):
    """Judge that the optimizer's sharded state names the parameter to which each tensor belongs, and is read back."""
    trained, other = (Optimizer(up, grouping, **options) for _ in range(2))
    for each in (trained, other, other):
        each.step()
    wrong = misplaced(trained)
    wrong += misread(trained, other) if not wrong else []
    other.step()
    wrong += [f"plain: {each}" for each in renumbered(trained, other)]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "entries that are wrong, or parameters"}


def saved_without(up):
    """Judge the same where parameters have no moments: before a step, without a gradient, and with a plain SGD."""
    wrong = []
    for grouping in GROUPINGS:
        names = [*Optimizer(up, grouping).mains]
        rows = {"before a step": (None, names), "SGD": ((), names), "no gradient": ([*range(len(names))], names)}
        rows |= {f"no gradient of {name}": ([n], [name]) for n, name in enumerate(names)}
        rows["no gradient of every second"] = ([*range(0, len(names), 2)], names[::2])
        for row, (without, bare) in rows.items():
            trained = Optimizer(up, grouping, plain=row == "SGD")
            if without is not None:
                trained.step(without=without)
            wrong += [f"{grouping}, {row}: {each}" for each in misplaced(trained, bare=bare)]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "entries that are wrong"}


def saved_beside(up):
    """Judge the same of an optimizer beside which another one was made, over the same parameters."""
    return saved(up, "matrices first", beside=True)


def tensors_written(torch, state):
    """Return how many tensors a file has to which a state is written."""
    file = io.BytesIO()
    torch.save(state, file)
    return sum("/data/" in name for name in zipfile.ZipFile(file).namelist())


def saved_alone(up):
    """Judge that the optimizer's plain state is written with as many tensors after a sharded one was made as before.

    What a tensor bears as an attribute is written with it, so that the copies could take the model along.
    """
    trained = Optimizer(up)
    trained.step()
    before = tensors_written(up.torch, trained.optimizer.state_dict())
    trained.sharded(trained.model())
    after = tensors_written(up.torch, trained.optimizer.state_dict())
    more = after - before if before else math.inf  # a state of a step has tensors
    return more == 0, {"measured": more, "tolerance": 0, "unit": "tensors more in the file"}


def saved_as_given(up):
    """Judge that each call follows the model's state that it is given, whatever earlier ones were given.

    A model may be written under other keys or as another part than it was read. States of earlier calls, which may be
    on their way to a file, stay as they are.
    """
    trained = Optimizer(up)
    trained.step()
    first, wrong = trained.sharded(trained.model()), []
    before = described(first)
    for way, give in GIVEN.items():
        for loading in (True, False):
            wrong += [f"{way}: {each}" for each in misplaced(trained, model=give(trained), loading=loading)]
    wrong += [f"the first state: {key}" for key in sorted({key for key, *_ in described(first) ^ before})]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "entries that are wrong"}


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


def written_by(up, stage):
    """Return what a rank gives to a checkpoint, of which only the first rank's is written, and its shards.

    The rank has one of two layers, in which all values are other ones.
    """
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    trained = Optimizer(up)
    trained.step()
    moments = leaves([[*row.values()] for row in trained.optimizer.optimizer.state.values()])
    for x in [*trained.mains.values(), *trained.mixer.original.values(), *moments]:
        x.data.add_(stage if x.dim() else 0)  # the number of steps is the same
    state = trained.sharded(trained.model(sharded_offsets=((0, stage, 2),)))
    return save_preprocess(state, validate_access_integrity=False)


def saved_in_common(up):
    """Judge that nothing which differs between ranks is written of one rank alone.

    Upstream writes what is not sharded once ("We save the common state dict only on rank 0"), and every rank reads it.
    """
    (ours, common), (theirs, other) = (written_by(up, stage) for stage in (0, 1))
    shards = [{(x.key, tuple(x.global_offset)) for x in leaves(each)} for each in (ours, theirs)]
    wrong = [f"in common{each}" for each in differing(common, other)]
    wrong += [f"written by both: {key}" for key, _ in sorted(shards[0] & shards[1])]
    wrong += [] if all(shards) else ["no shards"]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "what differs, or is written twice"}


def copied_together(up):
    """Judge a model and an optimizer that were copied in one call: what is written and read of them, and their steps.

    (The copy's parameters have no attributes, as PyTorch copies parameters; main_param is one of them.)
    """
    trained = Optimizer(up)
    trained.step()
    copied = copy.deepcopy(trained, {id(up): up})
    wrong = [f"written: {each}" for each in misplaced(copied)]
    copied.step()
    names, moved = {name for name, _ in trained.trained()}, set(different(trained, copied))
    wrong += [f"stepped with the copy, or not at all: {name}" for name in sorted(names - moved)]
    trained.step()
    wrong += [f"another step: {name}" for name in different(trained, copied)]
    given = dict(copied.mixer.mixer.named_parameters())
    wrong += [f"the model's: {name}" for name, x in trained.trained() if not same([x], [given[name]])]
    other = Optimizer(up)
    other.step()
    for one, two in ((copied, other), (other, copied)) if not wrong else ():
        wrong += [f"read by {'the copy' if two is copied else 'another'}: {each}" for each in misread(one, two)]
        other.step()
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "entries that are wrong, or parameters"}


def written_whole(up):
    """Judge that a model is written and read whole when an optimizer has its parameters, with all that these bear.

    It is the mixer: Float16Module, which wraps it, has a function that pickle refuses. What is read is wrapped again.
    """
    trained = Optimizer(up)
    trained.mixer.train().sum().backward()
    trained.step()
    wrong = misplaced(trained)
    read = reread(up.torch, trained.mixer.mixer)
    if read is None:
        return False, {"measured": "the model cannot be saved"}
    states = [{n: (x, x.requires_grad) for n, x in each.named_parameters()} for each in (trained.mixer.mixer, read)]
    wrong += differing(*states)
    types = {name: x.dtype for name, x in read.named_parameters()}
    up.module.Float16Module(trained.mixer.config, read)
    wrong += [f"cast again: {name}" for name, x in read.named_parameters() if x.dtype != types[name]]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "what differs from what was written"}


def saved_by_halves(up, what):
    """Judge the same in every grouping, with every second parameter frozen or in fp32 unmarked, or with the others."""
    wrong = []
    for grouping in GROUPINGS:
        for half in (0, 1):
            ok, values = saved(up, grouping, **{what: half})
            wrong += [] if ok else [f"{grouping}, {half}: {each}" for each in values["measured"]]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "entries that are wrong, or parameters"}


def saved_shards(up):
    """Judge what is written of parameters that are DTensors, on a mesh of one rank.

    Upstream finds them by their local tensors, which PyTorch 2.8 gives out as themselves, and 2.13 as new parameters.
    """
    from torch.distributed.tensor import DTensor

    with one_rank(up.torch) as distributed:
        mesh = distributed.init_device_mesh("cpu", (1,))
        with mock.patch.object(DTensor, "to_local", lambda x: x._local_tensor):  # noqa: SLF001 - as in PyTorch 2.8
            trained = Optimizer(up, "one group", shards=mesh)
            trained.step()
            wrong = misplaced(trained)
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "entries that are wrong"}


def backfilled(up, grouping):
    """Judge the same where the optimizer's backfill alone can match one of the 16-bit parameters, each in turn."""
    if not (hasattr(up.optimizer, "_backfill_gtp_sharded_param_map") and hasattr(up.gtp, "is_gtp_param")):
        return None, {"reason": "this tree has no backfill"}
    trained, wrong = Optimizer(up, grouping), []
    trained.step()
    for name, x in trained.mixer.mixer.named_parameters():
        if trained.main(name) is not x:
            with mock.patch.object(up.gtp, "is_gtp_param", lambda other, x=x: other is x):
                wrong += [f"{name}: {key}" for key in misplaced(trained, x)]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "entries that are wrong"}


def in_use(up):
    """Return weak references to the storages of a model and its optimizer, by name, after a step and a save."""
    from torch.multiprocessing.reductions import StorageWeakRef

    trained = Optimizer(up)
    trained.mixer.train().sum().backward()
    trained.step()
    misplaced(trained)
    tensors = {f"{name}'s fp32 copy": trained.main(name) for name in trained.mixer.original}
    tensors |= {**dict(trained.mixer.mixer.named_buffers()), **trained.mixer.original}
    return {name: StorageWeakRef(x.untyped_storage()) for name, x in tensors.items()}


def freed(up):
    """Judge that a model and its optimizer are freed when they are deleted."""
    used = in_use(up)
    gc.collect()
    wrong = [name for name, storage in used.items() if not storage.expired()]
    return not wrong, {"measured": wrong, "tolerance": [], "unit": "what is not freed"}


def product(up):
    """Judge A_log of a gated delta product, where the tree has one."""
    if up.product is None:
        return None, {"reason": "this tree has no gated delta product"}
    config = up.config(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, params_dtype=up.torch.bfloat16, bf16=True,
        mamba_num_heads=HEADS, mamba_head_dim=CHANNELS, mamba_state_dim=STATE, mamba_num_groups=2,
    )  # fmt: skip
    parts = up.product.GatedDeltaProductMixerSubmodules(in_proj=up.linear, out_proj=up.linear)
    groups = up.groups(tp=group(), cp=group(), pp=group())
    mixer = up.product.GatedDeltaProductMixer(
        config, parts, HIDDEN, A_init_range=(1, 16), layer_number=1, pg_collection=groups
    )
    wanted = mixer.A_log.detach().double()
    up.module.Float16Module(config, mixer)
    error = off(mixer.cp.get_A_log().detach().double(), wanted)
    return error == 0, {"measured": error, "tolerance": 0, "unit": "relative error"}


def stand_in(torch, kernels):
    """Put stand-ins where upstream imports compiled packages from."""
    parts = {"layernorm_gated": {"RMSNorm": gated_norm(torch)}}
    scans = {"mamba_chunk_scan_combined": kernels.scan, "mamba_split_conv1d_scan_combined": kernels.whole}
    parts["ssd_combined"] = scans
    names = ["mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", *(f"mamba_ssm.ops.triton.{x}" for x in parts)]
    names += ["fla", "fla.modules", "fla.modules.l2norm", "fla.ops", "fla.ops.gated_delta_product"]
    parts |= {"l2norm": {"l2_norm": None}, "gated_delta_product": {"chunk_gated_delta_product": None}}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(parts.get(name.rpartition(".")[2], {}))


def load(probe, torch):
    """Load the release that is on the path; return what the checks use."""
    kernels = Kernels(torch)
    stand_in(torch, kernels)
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core.inference.contexts.static_context import StaticInferenceContext
    from megatron.core.inference.utils import InferenceMode
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, grad_scaler, optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.transformer import module
    from megatron.core.transformer.transformer_config import TransformerConfig

    name = "megatron.core.tensor_parallel.gtp_api"
    gtp = importlib.import_module(name) if importlib.util.find_spec(name) else None
    name = "megatron.core.ssm.gated_delta_product"
    product = importlib.import_module(name) if importlib.util.find_spec(name) else None
    for each in (module, mamba_mixer, mamba_context_parallel, optimizer, product):
        if each:
            probe.upstream(each)
    for each in (clip_grads, optimizer):  # what they use where neither Transformer Engine nor Apex is installed
        each.multi_tensor_applier = utils.local_multi_tensor_applier
        each.l2_norm_impl = utils.local_multi_tensor_l2_norm
        each.multi_tensor_scale_impl = utils.local_multi_tensor_scale
        each.multi_tensor_scale_tensor_impl = None
    tracker = types.SimpleNamespace(fork=contextlib.nullcontext)
    for each in filter(None, (mamba_mixer, product)):
        each.get_cuda_rng_tracker = lambda: tracker
    if product:
        product.check_fla_sequence_packing_support = lambda: (True, None)
    mamba_mixer.causal_conv1d_fn = kernels.convolve
    mamba_mixer.causal_conv1d_update = lambda x, *_, **_options: x
    mamba_mixer.selective_state_update = kernels.decode
    return types.SimpleNamespace(
        torch=torch, kernels=kernels, module=module, mixer=mamba_mixer, optimizer=optimizer, product=product,
        scalers=grad_scaler, config=TransformerConfig, gtp=gtp, groups=ProcessGroupCollection, linear=linear(torch),
        inference=InferenceMode, context=StaticInferenceContext,
    )  # fmt: skip


def judge(probe, target):
    """Judge the release that is on the path."""
    if target != "cpu":
        raise NotImplementedError("only what the mixer hands to its kernels is judged, on the CPU: --target cpu")
    import torch

    probe.say("TARGET", target=target, evidence="traced", device="cpu")
    up = load(probe, torch)
    for number, case in enumerate(CASES):
        for path in ("training", "prefill", "decode")[: 2 if case[1] else 3]:
            probe.judge(f"case{number}.{path}", "defect", kept, up, case, path)
            probe.judge(f"case{number}.{path}.older", "control", older, up, case, path)
        probe.judge(f"case{number}.gradients", "defect", gradients, up, case)
        probe.judge(f"case{number}.cast", "control", cast, up, case)
        probe.judge(f"case{number}.moved", "control", moved, up, case)
        probe.judge(f"case{number}.handed_out", "defect", handed_out, up, case)
    for half in ("bfloat16", "float16"):
        probe.judge(f"decay.{half}", "defect", decay, probe, up, half)
        rounded_bias(probe, torch, half)
        for way, training in (("training", True), ("evaluation", False)):
            probe.judge(f"settings.{half}.{way}", "defect", settings, up, half, training)
        probe.judge(f"decode.in_place.{half}", "control", decodes_in_place, up, half)
        probe.judge(f"decode.without_kernels.{half}", "control", decodes_without_kernels, up, half)
        probe.judge(f"converted.{half}", "control", converted, up, half)
        probe.judge(f"loads.{half}", "control", loads, up, half)
        probe.judge(f"types.{half}", "control", cast_types, up, half)
        probe.judge(f"marked.{half}", "control", marked, up, half)
    probe.judge("context_parallel", "defect", context_parallel, up)
    probe.judge("refused", "control", refused, up)
    probe.judge("optimizer.begins", "defect", master, up)
    probe.judge("optimizer.updates", "defect", updates, probe, up)
    probe.judge("optimizer.own_gradients", "control", own_gradients, up)
    for half in SCALES:
        probe.judge(f"optimizer.scaled.{half}", "control", scaled, up, half)
    for grouping in GROUPINGS:
        name = grouping.replace(" ", "_")
        probe.judge(f"optimizer.saved.{name}", "control", saved, up, grouping)
        probe.judge(f"optimizer.backfilled.{name}", "control", backfilled, up, grouping)
    probe.judge("optimizer.frozen", "defect", saved_by_halves, up, "frozen")
    probe.judge("optimizer.unmarked", "defect", saved_by_halves, up, "unmarked")
    probe.judge("optimizer.saved.shards", "control", saved_shards, up)
    probe.judge("optimizer.saved.without_moments", "control", saved_without, up)
    probe.judge("optimizer.saved.beside_another", "control", saved_beside, up)
    probe.judge("optimizer.saved.alone", "control", saved_alone, up)
    probe.judge("optimizer.saved.as_given", "control", saved_as_given, up)
    probe.judge("optimizer.saved.in_common", "control", saved_in_common, up)
    probe.judge("optimizer.copied_together", "control", copied_together, up)
    probe.judge("optimizer.model_written_whole", "control", written_whole, up)
    probe.judge("freed", "control", freed, up)
    probe.judge("gated_delta_product", "defect", product, up)


if __name__ == "__main__":
    Probe().run(judge)
