"""Transformer Engine's graphed callables give what the eager module gives, for quantized tensors as for plain ones.

What is promised, with each class of quantized tensors that a release has (KINDS), and with plain tensors:

- Each call computes with the values that it was given: new ones, the same tensor filled anew (also within itself, and
  before its backward), the sample, its alias, its neighbour in storage, what a callable gave, another class, dtype or
  scale. Each backward computes with its own incoming gradients, plain or quantized.
- What does not fit the sample is refused. What is given stays as it was, and is let go; the sample and its plain alias
  are not copied onto themselves.
- Trained arguments get gradients, and no others do. Outputs and gradients are the caller's own.
- That holds by place, by name and in containers; for several callables, chains and microbatches; for training and
  inference; on another stream; in FP8 regions; in the mode that was not captured; and until reset().

Not judged: capture_time_hooks, calibrating, groups of ranks, delayed gradients of weights, modules of upstream's own.

`traced` (cpu): graph.py and the tensor classes are real. The compiled extension is a stand-in that quantizes and
dequantizes by PyTorch operators in each class's format, and so is the Python that only modules, operations, attention,
ONNX and C++ wrappers need. A CUDA graph is a list of the operators called during capture, and its replay calls them
again on the same tensors. What is replayed on another stream runs when that is waited for, and not at all before it has
waited itself. `executed`: CUDA graphs are real, and so is the extension where it can be imported.

Tolerances: values are +-s and +-s/2, with +-s in each block of 16, which each format holds up to the rounding of its
scale. 2**-16 for float32: the scale's rounding of 2**-24, and sums of up to 20480 terms, compared with the sum of their
sizes. 2**-7 for bf16, that rounds inputs, products and sums by 2**-9 each. What is stale is wrong by half and more.
"""

import contextlib
import enum
import functools
import importlib.util
import inspect
import math
import os
import sys
import types
import unittest.mock
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kit import current_target
from kit.autograd import kept_alive, weak_storages

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
DEVICE = current_target().device
TE = "transformer_engine.pytorch"
SHAPE = (2, 64, 160)  # three dimensions, rows and columns that no tile of 128 divides
TYPES = "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1"
DTYPES = {name: number for number, name in enumerate(TYPES.split()) if name not in ("kInt16", "kInt64", "kFloat8E8M0")}
FORMATS = {"kFloat8E4M3": (torch.float8_e4m3fn, 448), "kFloat8E5M2": (torch.float8_e5m2, 57344)}  # with the largest
KINDS = ("float8", "float8_columnwise", "float8_e5m2", "float8_delayed", "blockwise", "blockwise_1d", "mxfp8", "nvfp4")
KINDS += ("identity",)  # a wrapper of plain data, since 2.18
CLASSES = {"ops": "Sequential", "ops.op": "BasicOperation", "ops.fuser": "OperationFuser", "module": "Module"}
CLASSES |= {"module.base": "TransformerEngineBaseModule", "attention": "Attention"}
CLASSES |= {"attention.linear_attention": "Linear", "attention.linear_attention.base": "LinearAttentionBase"}
TOLERANCES = {"float32": 2**-16, "bfloat16": 2**-7}
ROUNDS = ((1, 3.0), (2, 0.25))  # seed and size of the values of each call
CYCLES = 2**26  # for which a GPU is kept busy: some 35 ms


# What stands in for the compiled extension.


def stored(quantizer):
    """Return the dtype and the largest value of a quantizer's FP8 format."""
    return FORMATS[sys.modules["transformer_engine_torch"].DType(int(quantizer.dtype)).name]


@functools.cache
def levels(device):
    """Return the sizes that E2M1 has, and the limits half way between them."""
    limits = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device), torch.tensor(limits, device=device)


def per_tensor(x, quantizer):
    """Return what a Float8Tensor stores: one scale, of the quantizer or of the values."""
    dtype, peak = stored(quantizer)
    given = type(quantizer).__name__ == "Float8Quantizer"
    scale = quantizer.scale if given else peak / x.float().abs().amax().clamp(min=2**-100)
    data = (x.float() * scale).to(dtype).view(torch.uint8)
    fields = {"data": data, "fp8_scale_inv": (1 / scale).view(1), "fp8_dtype": quantizer.dtype}
    return fields | {"data_transpose": data.movedim(-1, 0).contiguous() if quantizer.columnwise_usage else None}


def tiles(x, height, width):
    """Return x as rows of tiles [rows of tiles, height, columns of tiles, width], with zeros where it ends."""
    flat = x.reshape(-1, x.shape[-1])
    wide = torch.nn.functional.pad(flat, (0, -flat.shape[1] % width, 0, -flat.shape[0] % height))
    return wide.view(wide.shape[0] // height, height, wide.shape[1] // width, width)


def flattened(tiled, shape):
    """Undo tiles()."""
    rows = math.prod(shape[:-1])
    return tiled.reshape(tiled.shape[0] * tiled.shape[1], -1)[:rows, : shape[-1]].reshape(shape)


def per_tile(x, quantizer, height, width):
    """Return what a tensor with one FP8 scale a tile stores: powers of two for MXFP8."""
    dtype, peak = stored(quantizer)
    tiled = tiles(x.float(), height, width)
    scale = (tiled.abs().amax((1, 3)) / peak).clamp(min=2**-100)
    scale = scale.log2().ceil().exp2() if width == 32 else scale
    data = flattened((tiled / scale[:, None, :, None]).to(dtype).view(torch.uint8), x.shape)
    scale = (scale.log2() + 127).to(torch.uint8) if width == 32 else scale
    fields = {"rowwise_data": data, "rowwise_scale_inv": scale, "fp8_dtype": quantizer.dtype}
    return fields | {"columnwise_data": None, "columnwise_scale_inv": None}


def per_block_of_fp4(x, quantizer):
    """Return what an NVFP4Tensor stores: two values a byte, E4M3 scales of 16 values, and one size of all."""
    whole, tiled = x.float().abs().amax().clamp(min=2**-100), tiles(x.float(), 1, 16)
    scale = (tiled.abs().amax((1, 3)) / 6 / (whole / (6 * 448))).to(torch.float8_e4m3fn)
    scaled = tiled / (scale.float() * whole / (6 * 448)).clamp(min=2**-100)[:, None, :, None]
    codes = torch.bucketize(scaled.abs(), levels(x.device)[1]) + 8 * (scaled < 0)
    codes = flattened(codes.to(torch.uint8), x.shape)
    fields = {"rowwise_data": codes[..., ::2] + 16 * codes[..., 1::2], "rowwise_scale_inv": scale.view(torch.uint8)}
    fields |= {"columnwise_data": None, "columnwise_scale_inv": None, "fp4_dtype": quantizer.dtype}
    return fields | {"amax_rowwise": whole.view(1), "amax_columnwise": None, "with_gemm_swizzled_scales": False}


def quantize(x, quantizer, target=None, _noop=None):
    """Quantize a plain tensor by a quantizer, into a new tensor of its class or into the one given."""
    tensors, name = sys.modules[f"{TE}.tensor"], type(quantizer).__name__
    if name in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        made, fields = tensors.Float8Tensor, per_tensor(x, quantizer)
    elif name == "NVFP4Quantizer":
        made, fields = tensors.NVFP4Tensor, per_block_of_fp4(x, quantizer)
    elif name == "MXFP8Quantizer":
        made, fields = tensors.MXFP8Tensor, per_tile(x, quantizer, 1, 32) | {"with_gemm_swizzled_scales": False}
    else:
        square = quantizer.block_scaling_dim == 2
        made, fields = tensors.Float8BlockwiseQTensor, per_tile(x, quantizer, 128 if square else 1, 128)
        scale = fields["rowwise_scale_inv"] if square else fields["rowwise_scale_inv"].T
        padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4))
        fields |= {"is_2D_scaled": square, "rowwise_scale_inv": padded.contiguous()}
    if target is None:
        return made(shape=x.shape, dtype=x.dtype, device=x.device, quantizer=quantizer, **fields)
    names = {"data_transpose": "_transpose", "fp8_scale_inv": "_scale_inv"}
    for field, value in fields.items():
        if torch.is_tensor(value):
            getattr(target, names.get(field, f"_{field}")).copy_(value)
    return target


def dequantize(x, dtype):
    """Return in plain form what a quantized tensor stands for."""
    shape, fields = tuple(x.shape), vars(x)
    dtype = sys.modules[f"{TE}.constants"].TE_DType_To_Torch[dtype]
    if "_fp4_dtype" in fields:
        data = fields["_rowwise_data"].long()
        codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
        values = levels(data.device)[0][codes & 7] * (1 - 2 * (codes >> 3))
        scale = fields["_rowwise_scale_inv"].view(torch.float8_e4m3fn).float() * fields["_amax_rowwise"] / (6 * 448)
        return flattened(tiles(values, 1, 16) * scale[:, None, :, None], shape).to(dtype)
    form = FORMATS[sys.modules["transformer_engine_torch"].DType(int(fields["_fp8_dtype"])).name][0]
    if "_scale_inv" in fields:
        return (fields["_data"].view(form).float() * fields["_scale_inv"]).to(dtype)
    scale = torch.exp2(fields["_rowwise_scale_inv"].float() - 127)  # MXFP8's
    values = tiles(fields["_rowwise_data"].view(form).float(), 1, 32)
    return flattened(values * scale[:, None, :, None], shape).to(dtype)


def transpose(data, _dtype, out=None):
    """Return FP8 data with its last dimension first."""
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned)


def make_empty(quantizer, shape, *, dtype, device=None, requires_grad=False, **_pinned):
    """Allocate a tensor of a quantizer's class."""
    return quantize(torch.zeros(tuple(shape), dtype=dtype, device=device), quantizer).requires_grad_(requires_grad)


def stand_in():
    """Put the stand-in in the extension's place, and bare modules in that of what only wants it."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # the common part then does without the core library
    compiled = sys.modules["transformer_engine_torch"] = unittest.mock.MagicMock()
    compiled.DType = enum.IntEnum("DType", DTYPES)
    compiled.quantize, compiled.dequantize, compiled.fp8_transpose = quantize, dequantize, transpose
    compiled.get_cublasLt_version = lambda: 130000
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None:
        raise NotImplementedError("no transformer_engine on the path")
    folders = spec.submodule_search_locations
    packages = {"transformer_engine": [*folders], TE: [f"{folder}/pytorch" for folder in folders]}
    for name, path in (packages | {f"{TE}.{name}": [] for name in CLASSES}).items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = path
    for name, needed in CLASSES.items():
        setattr(sys.modules[f"{TE}.{name}"], needed, type(needed, (), {}))
    for name in ("onnx_extensions", "triton", "triton.pad"):
        sys.modules[f"{TE}.{name}"] = unittest.mock.MagicMock()
    tensors = importlib.import_module(f"{TE}.tensor")
    if DEVICE == "cpu":  # these two would go to the GPU
        types_of = importlib.import_module(f"{TE}.constants").TE_DType
        for name in ("MXFP8", "NVFP4"):
            storage = importlib.import_module(f"{TE}.tensor.storage.{name.lower()}_tensor_storage")
            function = getattr(storage, f"_From{name}Func")
            function.forward = staticmethod(lambda _context, x, dtype: dequantize(x, types_of[dtype]))
    for name in dir(tensors):
        if name.endswith("Quantizer") and name not in ("Quantizer", "IdentityQuantizer", "HybridQuantizer"):
            getattr(tensors, name).make_empty = make_empty


# What stands in for CUDA graphs where there is no GPU.


def buffers(given):
    """Return the tensors that hold what an operator gave: those inside of a quantized tensor."""
    found = [x for x in tree_leaves(given) if torch.is_tensor(x)]
    inner = [[x] if type(x) is torch.Tensor else filter(torch.is_tensor, vars(x).values()) for x in found]
    return [x for some in inner for x in some]


class Stream:
    """A stream: what it replays runs when somebody waits for it; what it does without waiting itself is lost.

    Such a replay, or copy, came before the copies that it should have waited for, and changed nothing.
    """

    entered: ClassVar = []  # the main stream, then those that were entered
    copies = 0  # that the main stream made

    def __init__(self):
        self.steps, self.waited = [], Stream.copies  # waited: for how many copies of the main stream

    def __enter__(self):
        self.entered.append(self)

    def __exit__(self, *_error):
        self.entered.pop()

    def wait_stream(self, other):
        other.synchronize()
        self.waited = Stream.copies

    def wait_event(self, event):
        while event.stream and event in event.stream.steps:
            event.stream.steps.pop(0)()

    def is_there(self):
        """Return whether all that the main stream copied is there."""
        return self is self.entered[0] or self.waited == Stream.copies

    def synchronize(self):
        while self.steps:
            self.steps.pop(0)()

    def query(self):
        return not self.steps


class Event:
    """An event that a graph records: a place among its operators."""

    def __init__(self, *, external):
        self.external, self.stream = external, None

    def __call__(self):
        """Do nothing, at its place among the operators of a graph."""

    def record(self):
        for tape in Tape.captured:
            tape.steps.append(self)


class Tape:
    """A graph: the operators called during capture, with the tensors that they were given and that they gave."""

    captured: ClassVar = []  # the one that is being captured

    def __init__(self):
        self.steps = None

    def replay(self):
        """Call the operators again, and write what they give over what they gave."""
        if self.steps is None:
            raise RuntimeError("a graph is replayed that was not captured, or was reset")
        stream = Stream.entered[-1]
        if stream.is_there():
            stream.steps += self.steps
        stream.waited = None
        for event in self.steps:
            if isinstance(event, Event):
                event.stream = stream
        if stream is Stream.entered[0]:
            stream.synchronize()

    def reset(self):
        self.steps = None


def play(function, args, options, given):
    """Call an operator again, and write what it gives over what it gave."""
    with torch.no_grad(), _disable_current_modes():
        for old, new in zip(buffers(given), buffers(function(*args, **options)), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


class Watch(TorchDispatchMode):
    """Notes every operator, of quantized tensors as a whole."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, classes, args=(), kwargs=None):
        given = function(*args, **(kwargs or {}))
        self.note(function, args, kwargs or {}, given)
        return given


def without_gpu():
    """Let torch.cuda record and replay on the CPU, for the rest of this process."""
    copied, made, cuda = torch.Tensor.copy_, torch.empty, torch.cuda

    @contextlib.contextmanager
    def capture(tape, **_options):
        tape.steps, Tape.captured = [], [tape]
        with Watch(lambda *operator: tape.steps.append(functools.partial(play, *operator))):
            yield
        Tape.captured = []

    def copy(given, *args, **options):
        stream = Stream.entered[-1]
        Stream.copies += stream is Stream.entered[0]
        return copied(given, *args, **options) if stream.is_there() else given

    def empty(*size, **options):
        return made(*size, **options | ({"device": "cpu"} if options.get("device") == "cuda" else {}))

    Stream.entered, torch.Tensor.copy_, torch.empty = [Stream()], copy, empty
    cuda.CUDAGraph, cuda.graph, cuda.Stream, cuda.Event = Tape, capture, Stream, Event
    cuda.current_stream, cuda.stream, cuda.synchronize = lambda: Stream.entered[-1], lambda stream: stream, lambda: None
    cuda._sleep = lambda _cycles: torch.zeros(1)  # noqa: SLF001 - any operator
    cuda.get_rng_state, cuda.set_rng_state = lambda: None, lambda _state: None
    cuda.current_device, cuda.get_device_capability = lambda: torch.device("cpu"), lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)
    torch._C._graph_pool_handle = lambda: (0, 0)  # noqa: SLF001


# What is judged.


@functools.cache
def te():
    """Import the graph module and the tensors, on top of the compiled extension or of its stand-in."""
    if DEVICE == "cpu":
        without_gpu()
    try:
        real = DEVICE != "cpu" and importlib.import_module(TE)
    except (ImportError, RuntimeError, OSError, AssertionError) as error:  # it has many ways to miss its libraries
        print(f"the compiled extension is not here: {error}", file=sys.stderr)
        real = False
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
    if not real:
        stand_in()
    tensors, graph = (importlib.import_module(f"{TE}.{name}") for name in ("tensor", "graph"))
    compiled = sys.modules["transformer_engine_torch"]
    return types.SimpleNamespace(real=bool(real), tensors=tensors, graph=graph, dtypes=compiled.DType)


def quantizer(kind):
    """Return the quantizer of a kind; None for the plain one."""
    tensors, dtypes = te().tensors, te().dtypes
    if kind == "identity" and not hasattr(tensors, "IdentityQuantizer"):
        pytest.skip("this release has no IdentityTensor")
    if kind in ("mxfp8", "nvfp4") and te().real and torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("the compiled extension needs sm_100 to quantize to it")
    usage = {"rowwise": True, "columnwise": kind == "float8_columnwise"}
    form, device = dtypes.kFloat8E5M2 if kind == "float8_e5m2" else dtypes.kFloat8E4M3, torch.device(DEVICE)
    makers = {
        "plain": lambda: None,
        "float8_delayed": lambda: tensors.Float8Quantizer(
            torch.full((1,), 16.0, device=device), torch.zeros(1, device=device), form, **usage
        ),
        "blockwise": lambda: tensors.Float8BlockQuantizer(form, block_scaling_dim=2, **usage),
        "blockwise_1d": lambda: tensors.Float8BlockQuantizer(form, block_scaling_dim=1, **usage),
        "mxfp8": lambda: tensors.MXFP8Quantizer(form, **usage),
        "nvfp4": lambda: tensors.NVFP4Quantizer(dtypes.kFloat4E2M1, **usage),
        "identity": lambda: tensors.IdentityQuantizer(**usage),
    }
    return makers.get(kind, lambda: tensors.Float8CurrentScalingQuantizer(form, device, **usage))()


class Weighted(torch.nn.Module):
    """Weights the n-th argument by n, and their sum by a parameter, which is 2."""

    def __init__(self, finish=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 2.0, device=DEVICE))
        self.finish = finish

    def forward(self, *args, unused=None, **options):
        """Return the weighted sum, or what is made of it."""
        del unused
        total = sum(x * n for n, x in enumerate(tree_leaves((args, options)), 1) if x is not None) * self.weight
        return self.finish(total) if self.finish else total


def draw(seed, size, shape=SHAPE, dtype="float32"):
    """Return a plain tensor of values +-size and +-size/2, with +-size at the first of every 16."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    half = 1 + torch.randint(0, 2, shape, generator=generator)
    half.view(-1)[::16] = 1
    return (size * sign / half).to(DEVICE, getattr(torch, dtype))


def wrap(kind, plain, *, grad=False):
    """Return the values in a new tensor of a kind."""
    made = quantizer(kind)
    with torch.no_grad():
        x = made(plain.clone()) if made else plain.clone()
    return x.requires_grad_(grad)


def sample(kind, seed=0, *, grad=False):
    """Return what a callable is captured with."""
    return wrap(kind, draw(seed, 1.0), grad=grad)


def capture(*samples, finish=None, training=True, options=None, **more):
    """Return a module and its graphed callable."""
    module = Weighted(finish).train(training)
    if options is not None:
        more["sample_kwargs"] = options
    return module, te().graph.make_graphed_callables(module, samples, **more)


def close(name, got, expected, size=None, dtype="float32"):
    """Check the largest difference over the largest size."""
    assert got is not None, f"no {name}"
    with torch.no_grad():
        got = (got.dequantize() if hasattr(got, "dequantize") and type(got) is not type(expected) else got).double()
        error = float((got - expected).abs().max() / (expected.abs().max() if size is None else size))
    assert error <= TOLERANCES[dtype], f"{name}: relative error {error:.2e}, tolerance {TOLERANCES[dtype]:.2e}"


def go_back(module, got, given, upstream):
    """Go backward; return the gradients of what was given, and of the module's weight."""
    module.weight.grad = None
    torch.autograd.backward((got,), (upstream,))
    return [x.grad for x in given], module.weight.grad


def check_weight(weight, total, upstream, name="weight"):
    """Check the gradient of a weight that a total was multiplied by."""
    products = total.double() * upstream.double()
    close(f"gradient of {name}", weight, products.sum(), products.abs().sum())


def check_calls(call, kind, *, factor=2, rounds=ROUNDS, shape=SHAPE, values="float32", dtype="float32"):
    """Check what a callable gives for other tensors of a kind."""
    for seed, size in rounds:
        plain = draw(seed, size, shape, values)
        close(f"call {seed}", call(wrap(kind, plain)), factor * plain.double(), dtype=dtype)


def check_training(module, call, kind, *, back="plain", size_back=None, between=None):
    """Check outputs and gradients of two calls with other tensors of a kind, and with gradients of a kind."""
    for seed, size in ROUNDS:
        plain, upstream = draw(seed, size), draw(10 + seed, size_back or size)
        x = wrap(kind, plain, grad=True)
        got = call(x)
        close(f"output {seed}", got, 2 * plain.double())
        if between:
            between()
        (grad,), weight = go_back(module, got, (x,), wrap(back, upstream))
        close(f"gradient of input {seed}", grad, 2 * upstream.double())
        check_weight(weight, plain, upstream)


def each(names, values, role=None):
    """Parametrise; without a role, a plain value is a control and any other a defect."""

    def marked(value):
        words = value if isinstance(value, tuple) else (value,)
        default = pytest.mark.control if "plain" in words else pytest.mark.defect
        return pytest.param(*words, marks=role or default)

    return pytest.mark.parametrize(names, [marked(value) for value in values])


control, defect = pytest.mark.control, pytest.mark.defect
of_each_kind = each("kind", ("plain", *KINDS))
of_both = each("kind", ("plain", "float8"))


@each("kind", ("plain", *KINDS))
def test_call_computes_with_its_own_values(kind):
    _, call = capture(sample(kind))
    check_calls(call, kind, rounds=(*ROUNDS, (3, 20.0)))


@of_both
def test_call_in_inference(kind):
    _, call = capture(sample(kind), training=False)
    with torch.no_grad():
        check_calls(call, kind, rounds=(*ROUNDS, (3, 20.0)))


@pytest.mark.parametrize(("shape", "dtype"), [((3, 5), "float32"), (SHAPE, "bfloat16")], ids=["odd", "bf16"])
@of_both
def test_call_of_another_shape_or_dtype(kind, shape, dtype):
    _, call = capture(wrap(kind, draw(0, 1.0, shape, dtype)))
    check_calls(call, kind, rounds=(*ROUNDS, (3, 20.0)), shape=shape, values=dtype, dtype=dtype)


@of_each_kind
def test_backward_computes_with_the_values_of_its_call(kind):
    module, call = capture(sample(kind, grad=True))
    check_training(module, call, kind, size_back=2.0)


PLACES = ("plain", "float8", "blockwise", "float8", "plain")  # by place, by place, in a container, by name, by name


@of_both
def test_arguments_by_place_by_name_and_in_containers(kind):
    def arguments(plains):
        one, two, three, four, five = (wrap(kind, x) for kind, x in zip(PLACES, plains, strict=True))
        return (one, two, {"inner": [three]}), {"first": four, "last": five}

    plains = [draw(seed, 1.0) for seed in range(5)]
    samples, options = arguments(plains)
    _, call = capture(*samples, options=options)
    for place in [place for place, word in enumerate(PLACES) if (word == "plain") == (kind == "plain")]:
        plains[place] = draw(10 + place, 3.0 + place)
        (one, two, three), options = arguments(plains)
        got = call(one, two, three, last=options["last"], first=options["first"])
        close(f"argument {place}", got, 2 * sum(n * x.double() for n, x in enumerate(plains, 1)))


@each(("kind", "back"), [(x, y) for x in ("plain", "float8", "blockwise") for y in ("plain", "float8", "blockwise")])
def test_incoming_gradient_of_an_output(kind, back):
    module, call = capture(sample("plain", grad=True), finish=quantizer(kind))
    check_training(module, call, "plain", back=back)


@each(
    ("kind", "given"),
    [
        *((x, y) for x in ("plain", "float8", "blockwise") for y in ("plain", "float8", "blockwise") if x != y),
        ("float8_columnwise", "float8"),
        ("float8", "float8_columnwise"),
    ],
)
def test_tensor_of_another_class_than_the_sample(kind, given):
    _, call = capture(sample(kind))
    check_calls(call, given)


@each("given", ("plain", "float8", "float8_columnwise"))
def test_columns_that_a_float8_sample_keeps_turned(given):
    """Judge the data with its last dimension first, which the product of a weight's gradient reads.

    A tensor that is given may have none: the static one makes it.
    """
    static = sample("float8_columnwise")
    form, _ = stored(quantizer("float8_columnwise"))

    def columns(total):
        fields = static.get_metadata()
        values = fields["data_transpose"].view(form).to(total.dtype).movedim(0, -1)
        return total + values * fields["fp8_scale_inv"]

    _, call = capture(static, finish=columns)
    check_calls(call, given, factor=2 + 1)


@of_both
def test_two_callables_at_once(kind):
    calls = te().graph.make_graphed_callables((Weighted(), Weighted()), tuple((sample(kind, x),) for x in range(2)))
    for seed, call in enumerate(calls, 2):
        check_calls(call, kind, rounds=[(seed, 3.0)])


@pytest.mark.parametrize(("order", "reuse"), [([1, 1, -1, -1], False), ([1, -1, 1, -1], True)], ids=["all", "reused"])
@of_both
def test_microbatches_in_the_order_of_a_pipeline(kind, order, reuse):
    module, samples = Weighted(), tuple((sample(kind, seed, grad=True),) for seed in range(2))
    options = {"_order": order, "_reuse_graph_input_output_buffers": reuse, "allow_unused_input": True}
    calls, waiting = iter(te().graph.make_graphed_callables((module,), samples, **options)), []
    for step, chunk in enumerate(order):
        if chunk > 0:
            plain = draw(10 + step, 3.0 + step)
            x = wrap(kind, plain, grad=True)
            waiting.append((plain, x, next(calls)(x)))
            close(f"output {step}", waiting[-1][2], 2 * plain.double())
        else:
            plain, x, got = waiting.pop(0)
            upstream = draw(20 + step, 2.0)
            (grad,), weight = go_back(module, got, (x,), upstream)
            close(f"gradient of input {step}", grad, 2 * upstream.double())
            check_weight(weight, plain, upstream)


@defect
def test_values_that_the_scale_of_the_sample_cannot_hold():
    _, call = capture(sample("float8_delayed"))
    for seed, scale in ((1, 0.25), (2, 2.0**9)):
        plain, made = draw(seed, 256 / scale), quantizer("float8_delayed")
        made.scale = torch.full((1,), scale, device=DEVICE)
        close(f"scale {scale}", call(made(plain)), 2 * plain.double())


def changed(x, **fields):
    """Return a float8 tensor that differs from another in these fields; older releases name the device among them."""
    return type(x)(**{"shape": x.shape, "dtype": x.dtype, "device": x.device} | x.get_metadata() | fields)


@defect
def test_data_of_the_sample_with_another_scale():
    plain = draw(0, 1.0)
    static = wrap("float8", plain)
    size = static.get_metadata()["fp8_scale_inv"].clone()
    _, call = capture(static)
    for scale in (3.0, 0.25):
        close(f"scale {scale}", call(changed(static, fp8_scale_inv=scale * size)), 2 * scale * plain.double())


@of_both
def test_neighbour_of_the_sample_in_storage(kind):
    storage = torch.zeros(2, *SHAPE, device=DEVICE, dtype=torch.uint8 if kind == "float8" else None)

    def placed(x, place):
        if kind == "plain":
            return storage[place].copy_(x)
        return changed(x, data=storage[place].copy_(x.get_metadata()["data"]))

    _, call = capture(placed(sample(kind), 0))
    for seed, size in ROUNDS:
        plain = draw(seed, size)
        close(f"call {seed}", call(placed(wrap(kind, plain), 1)), 2 * plain.double())


@of_both
def test_values_of_another_dtype(kind):
    _, call = capture(sample(kind))
    check_calls(call, kind, values="bfloat16")


@control
def test_values_that_the_nominal_dtype_of_a_quantized_tensor_lacks():
    _, call = capture(sample("plain"))
    for seed, size in ROUNDS:
        plain, more = draw(seed, size), 1 + 2.0**-10
        x = wrap("float8", plain.bfloat16())
        x = changed(x, fp8_scale_inv=more * x.get_metadata()["fp8_scale_inv"])
        close(f"call {seed}", call(x), 2 * more * plain.double())


@of_both
def test_columns_of_a_larger_tensor_and_an_expanded_gradient(kind):
    columns = SHAPE[-1]
    wide = (*SHAPE[:-1], 2 * columns)
    module, call = capture(wrap(kind, draw(0, 1.0, wide))[..., :columns])
    for seed, size in (*ROUNDS, (3, 20.0)):
        plain = draw(seed, size, wide)
        plain, x = plain[..., columns:], wrap(kind, plain)[..., columns:]
        if seed == 1:
            x = wrap(kind, plain.contiguous())
        got, module.weight.grad = call(x), None
        close(f"call {seed}", got, 2 * plain.double())
        got.sum().backward()
        check_weight(module.weight.grad, plain, torch.ones_like(plain))


@control
def test_plain_tensor_of_fewer_rows_is_repeated():
    module, call = capture(sample("plain", grad=True))
    for seed, shape in enumerate(((1, *SHAPE[1:]), SHAPE[-1:], ()), 1):
        plain, upstream = draw(seed, 3.0)[0, 0, 0], draw(10 + seed, 2.0)
        plain = draw(seed, 3.0, shape) if shape else plain
        x = plain.clone().requires_grad_()
        got, back = call(x), upstream.double()
        close(f"output {seed}", got, 2 * plain.double().expand(SHAPE))
        (grad,), weight = go_back(module, got, (x,), upstream)
        close(f"gradient {seed}", grad, 2 * back.sum_to_size(shape), 2 * back.abs().sum_to_size(shape).max())
        check_weight(weight, plain, upstream)


@control
def test_plain_tensor_without_elements():
    _, call = capture(draw(0, 1.0, (1, 5))[:, :0], draw(0, 1.0, (1, 1)))  # its pointer is 0, too
    got = call(draw(1, 3.0, (1, 5))[:, :0], draw(1, 3.0, (1, 1)))
    assert got.shape == (1, 0), f"shape {[*got.shape]}"


@of_both
def test_frozen_tensor_where_the_sample_was_trained_and_the_reverse(kind):
    for trained, given in ((True, False), (False, True)):
        module, call = capture(sample(kind, grad=trained))
        for seed, size in ROUNDS:
            plain, upstream = draw(seed, size), draw(10 + seed, 2.0)
            x = wrap(kind, plain, grad=given)
            got = call(x)
            close(f"output {trained} {given} {seed}", got, 2 * plain.double())
            (grad,), weight = go_back(module, got, (x,), upstream)
            check_weight(weight, plain, upstream)
            assert grad is None, "what is frozen has a gradient"


LEARNING = (False, True, False, True)  # of the arguments: by place, by place, by name, by name


@of_both
def test_each_trained_and_used_argument_gets_its_own_gradient(kind):
    def arguments(plains):
        one, two, three, four = (wrap(kind, x, grad=y) for x, y in zip(plains[:4], LEARNING, strict=True))
        return (one, two), {"first": three, "last": four, "unused": wrap(kind, plains[4], grad=True)}

    samples, options = arguments([draw(seed, 1.0) for seed in range(5)])
    module, call = capture(*samples, options=options, allow_unused_input=True)
    for seed, size in ROUNDS:
        plains, upstream = [draw(10 * seed + place, size) for place in range(5)], draw(9 + seed, 2.0)
        samples, options = arguments(plains)
        got = call(*samples, **options)
        total = sum(n * x.double() for n, x in enumerate(plains[:4], 1))
        close(f"output {seed}", got, 2 * total)
        grads, weight = go_back(module, got, (*samples, *options.values()), upstream)
        check_weight(weight, total, upstream)
        for place, (grad, learns) in enumerate(zip(grads, (*LEARNING, False), strict=True)):
            if learns:
                close(f"gradient of {place} {seed}", grad, 2 * (place + 1) * upstream.double())
            assert learns or grad is None, f"argument {place} has a gradient"


@of_both
def test_several_outputs_of_which_some_are_none_or_frozen(kind):
    made, scales = quantizer(kind) or (lambda x: x), {"one": 1, "frozen": 3, "other": 5}

    def finish(total):
        return {"one": made(total), "nothing": None, "frozen": 3 * total.detach(), "other": made(5 * total)}

    module, call = capture(sample("plain", grad=True), finish=finish)
    for seed, given in enumerate((("one", "other"), ("other", "frozen"), ("one",)), 1):
        plain, upstreams = draw(seed, 0.5 + seed), [draw(10 * seed + place, 2.0) for place in range(len(given))]
        x, module.weight.grad = plain.clone().requires_grad_(), None
        got = call(x)
        for name, scale in scales.items():
            close(f"{name} {seed}", got[name], 2 * scale * plain.double())
        assert got["nothing"] is None
        torch.autograd.backward([got[name] for name in given], [wrap(kind, x) for x in upstreams])
        upstream = sum(x.double() * scales[name] * (name != "frozen") for name, x in zip(given, upstreams, strict=True))
        close(f"gradient of input {seed}", x.grad, 2 * upstream)
        check_weight(module.weight.grad, plain, upstream)


@pytest.mark.parametrize("within", [False, True], ids=["as-a-whole", "within"])
@of_both
def test_same_tensors_filled_anew(kind, within):
    """Give the same tensors each time, as arguments and as a gradient, and fill the arguments before backward.

    What is filled within a quantized tensor is its data and scale, as quantize_() does: its version stays as it was.
    """

    def fill(x, values):
        new = wrap(kind if x is not one else "plain", values)
        with torch.no_grad():
            for old, filled in zip(*map(buffers, (x, new)), strict=True) if within else [(x, values)]:
                old.copy_(filled)

    samples, made = (sample("plain", grad=True), sample(kind)), quantizer(kind) or (lambda x: x)

    class ReadAgain(torch.autograd.Function):
        """Multiplies by the second argument, which backward reads again."""

        @staticmethod
        def forward(_context, total):
            return total * (samples[1] * 1)

        @staticmethod
        def backward(_context, upstream):
            return upstream * (samples[1] * 1)

    module, call = capture(*samples, finish=lambda total: made(ReadAgain.apply(total)))
    one, two, back = draw(1, 1.0).requires_grad_(), sample(kind, 1), sample(kind, 1)
    for seed, size in ((2, 3.0), (3, 0.25), (4, 20.0)):
        plain, upstream = draw(seed, size), draw(10 + seed, size)
        for x, values in ((one, plain), (two, plain), (back, upstream)):
            fill(x, values)
        got = call(one, two)
        close(f"output {seed}", got, 2 * 3 * plain.double() ** 2)
        for x in (one, two):  # they are the caller's again
            fill(x, draw(20 + seed, 50.0))
        grad, weight = torch.autograd.grad(got, (one, module.weight), back)
        close(f"gradient of input {seed}", grad, 2 * plain.double() * upstream.double())
        check_weight(weight, 3 * plain.double() ** 2, upstream)


@of_both
def test_number_and_none_by_name_in_inference(kind):
    def options(plain):
        return {"number": float("2.5"), "nothing": None, "values": wrap(kind, plain)}  # objects of each call's own

    _, call = capture(sample(kind), training=False, options=options(draw(1, 1.0)))
    for seed, size in ((2, 3.0), (4, 0.25)):
        one, two = draw(seed, size), draw(seed + 1, size)
        with torch.no_grad():
            got = call(wrap(kind, one), **options(two))
        close(f"call {seed}", got, 2 * (one.double() + 2 * 2.5 + 4 * two.double()))


@of_both
def test_one_tensor_as_two_arguments_and_the_sample_of_another_argument(kind):
    samples = [sample(kind, seed) for seed in range(2)]
    _, call = capture(*samples)
    one, two, three = (draw(seed, size) for seed, size in ((2, 3.0), (3, 0.25), (4, 20.0)))
    x, y, z = (wrap(kind, plain) for plain in (one, two, three))
    one, two, three = one.double(), two.double(), three.double()
    close("apart", call(x, y), 2 * (one + 2 * two))
    close("second as first", call(samples[1], z), 2 * (two + 2 * three))
    close("second itself", call(y, samples[1]), 2 * (two + 2 * three))
    close("both", call(x, x), 2 * (one + 2 * one))


@of_both
def test_parameters_as_arguments(kind):
    def parameters(plains):  # a frozen and a trained one
        return [torch.nn.Parameter(wrap(kind, x), requires_grad=bool(place)) for place, x in enumerate(plains)]

    module, call = capture(*parameters([draw(seed, 1.0) for seed in range(2)]))
    for seed, size in ((2, 3.0), (4, 0.25)):
        plains, upstream = [draw(seed + more, size) for more in range(2)], draw(10 + seed, 2.0)
        given = parameters(plains)
        got, total = call(*given), plains[0].double() + 2 * plains[1].double()
        close(f"output {seed}", got, 2 * total)
        (frozen, trained), weight = go_back(module, got, given, upstream)
        check_weight(weight, total, upstream)
        close(f"gradient of the trained one {seed}", trained, 4 * upstream.double())
        assert frozen is None, "the frozen one has a gradient"


ORDERED = {"_order": [1, 2, -2, -1], "_num_layers_per_chunk": [1, 1]}


@pytest.mark.parametrize("options", [{}, ORDERED], ids=["plain-chain", "in-order"])
@of_both
def test_callable_takes_what_another_gives(kind, options):
    modules = Weighted(quantizer(kind)), Weighted()
    samples = (sample("plain", grad=True),), (sample(kind, 1, grad=True),)
    one, two = te().graph.make_graphed_callables(modules, samples, **options)
    for seed, size in ((2, 3.0), (3, 0.25)):
        plain, upstream = draw(seed, size), draw(10 + seed, 2.0)
        x = plain.clone().requires_grad_()
        got = two(one(x))
        close(f"output {seed}", got, 4 * plain.double())
        grad, first, second = torch.autograd.grad(got, (x, modules[0].weight, modules[1].weight), upstream)
        close(f"gradient of input {seed}", grad, 4 * upstream.double())
        check_weight(first, 2 * plain, upstream, "first weight")
        check_weight(second, 2 * plain, upstream, "second weight")


@of_both
def test_callable_takes_what_it_gave(kind):
    _, call = capture(sample(kind), finish=quantizer(kind), training=False)
    with torch.no_grad():
        check_calls(lambda x: call(call(x)), kind, factor=4)


@pytest.mark.parametrize("passes", [1, 2], ids=["once", "retained"])
@of_both
def test_options_of_the_capture(kind, passes):
    options = {"num_warmup_iters": 4, "retain_graph_in_backward": True}
    if passes == 1:
        options = {"num_warmup_iters": 1, "pool": te().graph.graph_pool_handle(), "enabled": True}
    hooks, known = [], inspect.signature(te().graph.make_graphed_callables).parameters
    hooked = [when for when in ("pre", "post") if f"{when}_warmup_hook" in known]  # releases before 2.14 have none
    options |= {f"{when}_warmup_hook": functools.partial(hooks.append, when) for when in hooked}
    module, call = capture(sample(kind, grad=True), **options)
    assert hooks == hooked
    for seed, size in ROUNDS:
        plain = draw(seed, size)
        x = wrap(kind, plain, grad=True)
        got = call(x)
        close(f"output {seed}", got, 2 * plain.double())
        for number in range(passes):
            upstream = draw(10 * seed + number, 2.0)
            grad, weight = torch.autograd.grad(got, (x, module.weight), upstream, retain_graph=True)
            close(f"gradient of input {seed} {number}", grad, 2 * upstream.double())
            check_weight(weight, plain, upstream)
        module.eval()
        close(f"eager {seed}", call(x), 2 * plain.double())
        module.train()


@of_both
def test_what_does_not_fit_the_sample_is_refused(kind):
    _, call = capture(sample(kind))
    for shape in ((2, 64, 16), (3, 64, 160)):
        with pytest.raises((RuntimeError, ValueError)):
            call(wrap(kind, draw(1, 3.0, shape)))


@control
def test_missing_keyword_argument_is_refused():
    x = draw(0, 1.0)
    _, named = capture(x, options={"other": x.clone()})
    _, cached = capture(x, cache_quantized_params=True)
    with pytest.raises(TypeError):
        named(x)
    with pytest.raises(ValueError):  # noqa: PT011 - the flag that caching asks for; the text is upstream's to change
        cached(x)


@of_both
def test_call_in_the_mode_that_was_not_captured(kind):
    module, call = capture(sample(kind, grad=True))

    def eager():  # between a captured call and its backward
        module.eval()
        for shape in (SHAPE, (3, 5)):
            check_calls(call, kind, rounds=[(20, 5.0)], shape=shape)
        module.train()

    check_training(module, call, kind, size_back=2.0, between=eager)


def operators(call, *given):
    """Return what a call gives, and the operators that it calls, also of quantized tensors as a whole."""
    seen = []
    with Watch(lambda function, *_: seen.append(function)):
        return call(*given), seen


@each("kind", ("plain", "float8"), control)
def test_host_waits_for_no_value_of_a_tensor(kind):
    aten = torch.ops.aten
    answered = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default}  # noqa: SLF001
    _, call = capture(sample(kind, grad=True), finish=quantizer(kind))
    given, upstream = wrap(kind, draw(1, 3.0), grad=True), wrap(kind, draw(11, 2.0))
    for _ in range(2):
        got, seen = operators(call, given)
        waits = answered.intersection(seen + operators(got.backward, upstream)[1])
        assert not waits, f"the host waits for the answers of {waits}"


@each("kind", ("plain", "float8"), control)
def test_nothing_of_an_argument_or_a_gradient_is_kept(kind):
    _, call = capture(sample(kind), finish=quantizer(kind))
    for seed, size in ROUNDS:
        x, back = wrap(kind, draw(seed, size)), wrap(kind, draw(10 + seed, size))
        argument, gradient = weak_storages(buffers(x)), weak_storages(buffers(back))
        got = call(x)
        del x
        assert kept_alive(argument) == 0, "the argument is kept"
        got.backward(back)
        del back
        assert kept_alive(gradient) == 0, "the gradient is kept"


@each("kind", ("plain", "float8"), control)
def test_reset_frees_what_the_graph_read(kind):
    if "release_static_state" not in inspect.getsource(te().graph):
        pytest.skip("this release's reset() frees the graphs alone")
    static = sample(kind, grad=True)
    _, call = capture(static)
    call(wrap(kind, draw(1, 3.0), grad=True)).backward(draw(2, 2.0))
    storages = weak_storages(buffers(static))
    call.reset()
    del static
    assert kept_alive(storages) == 0, "reset() keeps tensors"


@control
def test_nothing_is_replayed_after_reset():
    _, call = capture(sample("plain", grad=True))
    got = call(draw(1, 3.0).requires_grad_())
    call.reset()
    with pytest.raises(RuntimeError):
        got.backward(draw(2, 2.0))
    with pytest.raises(RuntimeError):
        call(draw(1, 3.0))


def needs(there, what):
    """Leave out what a release, or PyTorch, does not have."""
    if not there:
        pytest.skip(f"this release, or PyTorch, has no {what}")


def needs_cloning():
    """Leave out a release that has no choice of cloning gradients."""
    option = "clone_param_grads_on_return"
    needs(option in inspect.signature(te().graph.make_graphed_callables).parameters, option)


@of_both
def test_outputs_and_gradients_are_the_callers_own(kind):
    needs_cloning()
    module, call = capture(sample(kind, grad=True), finish=quantizer(kind))
    found = []
    for seed, size in ROUNDS:
        plain, upstream = draw(seed, size), draw(10 + seed, 2.0)
        x = wrap(kind, plain, grad=True)
        with torch.no_grad():
            frozen = call(x)
        got = call(x)
        close(f"output {seed}", got, 2 * plain.double())
        grad, weight = torch.autograd.grad(got, (x, module.weight), wrap(kind, upstream))
        close(f"gradient of input {seed}", grad, 2 * upstream.double())
        assert (frozen.requires_grad, grad.requires_grad, got.requires_grad) == (False, False, True)
        frozen.requires_grad_()  # what is set on one is not seen at the next
        grad.requires_grad_()
        found.append((got, frozen, grad, weight, plain, upstream))
    assert all(one is not two for one, two in zip(*(each[:3] for each in found), strict=True))
    for *_, weight, plain, upstream in found:  # the first is not overwritten by the second
        check_weight(weight, plain, upstream)


@pytest.mark.parametrize("by_option", [True, False], ids=["by-option", "by-parameter"])
@of_both
def test_gradients_that_are_not_cloned(kind, by_option):
    needs_cloning()
    module, static, places = Weighted(), sample(kind, grad=True), set()
    module.weight.skip_backward_post_hook = not by_option
    call = te().graph.make_graphed_callables(module, (static,), clone_param_grads_on_return=not by_option)
    for seed, size in ROUNDS:
        plain, upstream = draw(seed, size), draw(10 + seed, 2.0)
        x = wrap(kind, plain, grad=True)
        grad, weight = torch.autograd.grad(call(x), (x, module.weight), upstream)
        close(f"gradient of input {seed}", grad, 2 * upstream.double())
        check_weight(weight, plain, upstream)
        places.add((grad.data_ptr(), weight.data_ptr()))
    assert len(places) == 1, "each backward gives what lies in the graph"


@pytest.mark.parametrize("event", [False, True], ids=["stream", "event"])
@of_both
def test_replay_on_another_stream(kind, event):
    """Judge a replay where either stream is late: each waits for the other, or for the graph's event alone."""
    source = inspect.getsource(te().graph)
    needs("cuda_graph_stream" in source, "cuda_graph_stream")
    needs(not event or "cuda_graph_event" in source, "cuda_graph_event")
    needs(not event or "external" in inspect.signature(torch.cuda.Event).parameters, "external events")
    cuda, static, copy_ = torch.cuda, sample(kind, grad=True), torch.Tensor.copy_
    side, main = cuda.Stream(), cuda.current_stream()
    options = {"cuda_graph_stream": side} | ({"cuda_graph_event": cuda.Event(external=True)} if event else {})

    def mark(result):
        if event:  # the graph goes on for long after what it gives is there
            options["cuda_graph_event"].record()
            cuda._sleep(CYCLES)  # noqa: SLF001 - nothing else is as long
        return result

    static.register_post_accumulate_grad_hook(lambda _: mark(None))
    _, call = capture(static, finish=mark, num_warmup_iters=1)

    def slow_copy(tensor, *given):
        cuda._sleep(CYCLES)  # noqa: SLF001 - who does not wait for the copy is there before it
        return copy_(tensor, *given)

    def delayed(late, new, old, function, *given, **more):
        """Fill a tensor and call, while a stream is busy; say what that gives, and whether the graph is at work."""
        cuda.synchronize()
        with cuda.stream(late):
            cuda._sleep(4 * CYCLES)  # noqa: SLF001 - for longer than any copy takes
        with torch.no_grad():
            for one, other in zip(*map(buffers, (old, new)), strict=True):  # who does not wait for it reads the old one
                one.copy_(other)
        with unittest.mock.patch.object(torch.Tensor, "copy_", slow_copy):
            given = function(*given, **more)
        seen = (given[0] if isinstance(given, tuple) else given).detach().clone()
        main.synchronize()
        running = not side.query()
        side.synchronize()
        return given, seen, running

    running = []
    for seed, late in enumerate((main, side), 1):
        plain, upstream = draw(seed, 2.0 + seed), draw(10 + seed, 2.0)
        x, filled, back = wrap(kind, draw(20, 1.0), grad=True), wrap(kind, plain), draw(21, 1.0)
        got, seen, forward = delayed(late, filled, x, call, x, **options)
        close(f"output {seed}", seen, 2 * plain.double())
        _, seen, backward = delayed(late, upstream, back, torch.autograd.grad, got, x, back)
        close(f"gradient of input {seed}", seen, 2 * upstream.double())
        running.append((forward, backward))
    for name, some in zip(("forward", "backward"), map(any, zip(*running, strict=True)), strict=True):
        assert some == event, f"{name} waits for {'the whole graph' if event else 'less than the graph'}"


@of_both
def test_first_callable_of_an_fp8_region_says_whether_weights_are_quantized_again(kind):
    needs(hasattr(te().graph, "autocast"), "autocast")
    manager = te().graph.FP8GlobalStateManager

    def finish(total):
        flag = manager.get_skip_fp8_weight_update_tensor()
        return total if flag is None else total * (1 + flag)

    manager.reset()
    try:
        _, call = capture(sample(kind), finish=finish, cache_quantized_params=True)
        for seed, first in enumerate((False, True, False), 1):
            plain = draw(seed, 1.0 + seed)
            expected = (2 if first else 4) * plain.double()
            with te().graph.autocast(enabled=True):
                close(f"first {seed}", call(wrap(kind, plain), is_first_microbatch=first), expected)
                close(f"second {seed}", call(wrap(kind, 2 * plain), is_first_microbatch=not first), 2 * expected)
        plain = draw(4, 3.0)
        close("outside", call(wrap(kind, plain), is_first_microbatch=True), 4 * plain.double())
    finally:
        manager.reset()


@control
def test_first_callable_of_an_fp8_region_updates_the_scales_of_backward():
    graph, seen, steps, marks = te().graph, [], [], {"scaling_fwd": 1.0, "scaling_bwd": 2.0}
    manager = graph.FP8GlobalStateManager

    def largest(history):
        seen.append(float(history[0]))
        return history[0].clone()

    recipe = graph.DelayedScaling(
        amax_compute_algo=largest, scaling_factor_compute_algo=lambda _amax, scale, _peak, _recipe: scale
    )
    meta = {"recipe": recipe, "fp8_group": None}
    for name, mark in marks.items():
        history = torch.full((1, 1), mark, device=DEVICE)
        meta[name] = types.SimpleNamespace(amax_history=history, scale=torch.ones(1, device=DEVICE))
    manager.reset()
    _, call = capture(sample("plain", grad=True))
    try:
        manager.add_fp8_tensors_to_global_buffer(meta)
        for region in (True, False):
            with graph.autocast(enabled=True, recipe=recipe) if region else contextlib.nullcontext():
                both = [call(draw(seed, 3.0).requires_grad_()) for seed in (1, 2)]
            for got in both:
                for name, mark in marks.items():
                    meta[name].amax_history.fill_(mark)
                seen.clear()
                got.backward(draw(3, 2.0))
                steps.append([*seen])
    finally:
        manager.reset()
    assert steps == [[marks["scaling_bwd"]], [], [], []], f"largest values of updated scales: {steps}"


@pytest.mark.parametrize("alias", [False, True], ids=["itself", "alias"])
@each("kind", ("plain", *KINDS), control)
def test_sample_is_in_its_place_already(kind, alias):
    learning = ((False, False), (True, not alias), (False, alias))  # of the sample, and of what is given
    for trained, given in learning if kind in ("plain", "float8") else learning[:1]:
        static = sample(kind, grad=trained)
        _, call = capture(static)
        for seed, size in ROUNDS:
            plain = draw(seed, size)
            with torch.no_grad():
                static.copy_(wrap(kind, plain))
            got, seen = operators(call, static.detach().requires_grad_(given) if alias else static)
            close(f"call {seed}", got, 2 * plain.double())
            close(f"sample {seed}", static, plain.double())
            copies = seen.count(torch.ops.aten.copy_.default)
            if not alias or kind == "plain":  # no pointer tells that a wrapper is an alias
                assert copies == 0, f"it is copied {copies} times"


@each(
    ("kind", "given"),
    [*((kind, kind) for kind in ("plain", *KINDS)), ("float8", "float8_columnwise"), ("float8_columnwise", "float8")],
    control,
)
def test_what_is_given_stays_as_it_was(kind, given):
    _, call = capture(sample(kind))
    for seed, size in ROUNDS:
        plain = draw(seed, size)
        x = wrap(given, plain)
        before = {name: value.clone() if torch.is_tensor(value) else value for name, value in vars(x).items()}
        call(x)
        close(f"values {seed}", x, plain.double())
        assert before.keys() == vars(x).keys()
        for name, value in before.items():
            now = vars(x)[name]
            same = torch.is_tensor(now) and torch.equal(value, now) if torch.is_tensor(value) else value == now
            assert same, f"{name} was changed"


@of_both
def test_three_after_a_capture_with_one(kind, figure):
    _, call = capture(wrap(kind, torch.full(SHAPE, 1.0, device=DEVICE)))
    got = float(call(wrap(kind, torch.full(SHAPE, 3.0, device=DEVICE))).detach().mean()) / 6
    figure("second_call_over_expected" + "_plain" * (kind == "plain"), round(got, 6))
    assert abs(got - 1) <= TOLERANCES["float32"], f"{got} times what x * 2 should be"
