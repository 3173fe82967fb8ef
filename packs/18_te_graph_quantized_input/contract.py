"""Transformer Engine's graphed callables give what the eager module gives, for quantized tensors as for plain ones.

Each call computes with its own values, and each backward with its own incoming gradients. What does not fit the sample
is refused. Inputs stay as they were, and are let go. The sample and its plain alias are not copied onto themselves.
Trained arguments get gradients, and no others do.

Not judged: capture_time_hooks, calibrating, groups of ranks, delayed gradients of weights, modules of upstream's own,
MXFP8 and NVFP4.

`traced` (cpu): graph.py and the tensor classes are real. The compiled extension is a stand-in that quantizes by PyTorch
operators, with one FP8 scale a tensor. The Python that only modules, operations, attention, ONNX and C++ wrappers need
is a stand-in, too. A CUDA graph is a list of the operators called during capture, and its replay calls them again on
the same tensors. A replay on another stream runs when that stream is waited for, and not before it has itself waited.
`executed`: CUDA graphs are real, and so is the extension where it can be imported.

TOLERANCE: values are +-s and +-s/2, with +-s in each block of 16, which each format holds up to the rounding of its
scale by 2**-24. Sums have up to 20480 terms, and are compared with the sum of their sizes. A stale value is wrong by
half or more.
"""

import contextlib
import enum
import functools
import importlib.util
import inspect
import itertools
import math
import os
import sys
import types
import unittest.mock
from typing import ClassVar

import pytest
import torch
from torch.utils._pytree import tree_leaves

from kit import current_target
from kit.autograd import kept_alive, weak_storages
from kit.capture import RecordedGraph, buffers, host_waits

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
DEVICE = current_target().device
TE = "transformer_engine.pytorch"
SHAPE = (2, 64, 160)  # three dimensions, rows and columns that no tile of 128 divides
DTYPES = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
FP8, FP8_MAX = torch.float8_e4m3fn, 448
KINDS = ("float8", "float8_columnwise", "float8_delayed", "blockwise", "identity")
CLASSES = ("Sequential", "BasicOperation", "OperationFuser", "TransformerEngineBaseModule", "LinearAttentionBase")
MOCKED = "onnx_extensions triton triton.pad ops ops.op ops.fuser module module.base attention "
MOCKED += "attention.linear_attention attention.linear_attention.base"
TOLERANCE = 2**-16
ROUNDS = ((1, 3.0), (2, 0.25), (3, 20.0))  # seed and size of the values of each call
CYCLES = 2**26  # for which a GPU is kept busy: some 35 ms


# What stands in for the compiled extension.


def quantize(x, quantizer, target=None, _noop=None):
    """Quantize a plain tensor by one scale, in the fields of the class; into a new tensor or a given one."""
    tensors = sys.modules[f"{TE}.tensor"]
    delayed = isinstance(quantizer, tensors.Float8Quantizer)
    scale = quantizer.scale if delayed else FP8_MAX / x.float().abs().amax().clamp(min=2**-100)
    data, inverse = (x.float() * scale).to(FP8).view(torch.uint8), (1 / scale).view(1)
    options = {"shape": x.shape, "dtype": x.dtype, "device": x.device, "quantizer": quantizer}
    options["fp8_dtype"] = quantizer.dtype
    if isinstance(quantizer, tensors.Float8BlockQuantizer):  # a scale for each tile of 128 by 128, in rows of 4
        rows, columns = -(-math.prod(x.shape[:-1]) // 128), -(-x.shape[-1] // 512) * 4
        options |= {"rowwise_data": data, "rowwise_scale_inv": inverse.expand(rows, columns).contiguous()}
        options |= {"columnwise_data": None, "columnwise_scale_inv": None, "is_2D_scaled": True}
        made = tensors.Float8BlockwiseQTensor(**options)
    else:
        turned = transpose(data, None) if quantizer.columnwise_usage else None
        made = tensors.Float8Tensor(data=data, fp8_scale_inv=inverse, data_transpose=turned, **options)
    for old, new in zip(buffers(target), buffers(made), strict=True) if target is not None else ():
        old.copy_(new)
    return made if target is None else target


def dequantize(x, dtype):
    """Return in plain form what a Float8Tensor stands for."""
    fields = x.get_metadata()
    values = fields["data"].view(FP8).float() * fields["fp8_scale_inv"]
    return values.to(sys.modules[f"{TE}.constants"].TE_DType_To_Torch[dtype])


def transpose(data, _dtype, out=None):
    """Return FP8 data with its last dimension first."""
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned)


def make_empty(quantizer, shape, *, dtype, device=None, requires_grad=False, **_pinned):
    """Allocate a tensor of a quantizer's class."""
    return quantize(torch.zeros(tuple(shape), dtype=dtype, device=device), quantizer).requires_grad_(requires_grad)


def stand_in():
    """Put the stand-in in the extension's place, and mocks in that of what only wants it."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # the common part then does without the core library
    compiled = sys.modules["transformer_engine_torch"] = unittest.mock.MagicMock()
    compiled.DType = enum.IntEnum("DType", DTYPES)
    compiled.quantize, compiled.dequantize, compiled.fp8_transpose = quantize, dequantize, transpose
    compiled.get_cublasLt_version = lambda: 130000
    [folder] = importlib.util.find_spec("transformer_engine").submodule_search_locations
    for name, path in (("transformer_engine", folder), (TE, f"{folder}/pytorch")):
        sys.modules[name] = unittest.mock.MagicMock(__path__=[path], __spec__=None)
    for name in MOCKED.split():
        sys.modules[f"{TE}.{name}"] = unittest.mock.MagicMock(**{name: type(name, (), {}) for name in CLASSES})
    tensors = importlib.import_module(f"{TE}.tensor")
    for name in ("Float8Quantizer", "Float8CurrentScalingQuantizer", "Float8BlockQuantizer"):
        getattr(tensors, name).make_empty = make_empty


# What stands in for CUDA graphs where there is no GPU.


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
        for graph in Graph.captured:
            graph.steps.append(self)


class Graph(RecordedGraph):
    """A graph whose operators are called again when somebody waits for the stream of its replay."""

    captured: ClassVar = []  # the one that is being captured

    def replay(self):
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
        self.steps = []


def without_gpu():
    """Let torch.cuda record and replay on the CPU, for the rest of this process, where nothing is compiled."""
    dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")  # it takes seconds to import
    dynamo.disable = dynamo.assume_constant_result = lambda function, *_, **__: function
    copied, made, cuda = torch.Tensor.copy_, torch.empty, torch.cuda

    @contextlib.contextmanager
    def capture(graph, **_options):
        Graph.captured = [graph]
        with graph:
            yield
        Graph.captured = []

    def copy(tensor, *args, **options):
        stream = Stream.entered[-1]
        Stream.copies += stream is Stream.entered[0]
        return copied(tensor, *args, **options) if stream.is_there() else tensor

    def empty(*size, **options):
        return made(*size, **options | ({"device": "cpu"} if options.get("device") == "cuda" else {}))

    Stream.entered, torch.Tensor.copy_, torch.empty = [Stream()], copy, empty
    cuda.CUDAGraph, cuda.graph, cuda.Stream, cuda.Event = Graph, capture, Stream, Event
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
    return types.SimpleNamespace(tensors=tensors, graph=graph, dtypes=compiled.DType)


def needs(there, what):
    """Leave out what a release, or PyTorch, does not have."""
    if not there:
        pytest.skip(f"this release, or PyTorch, has no {what}")


def quantizer(kind):
    """Return what makes a tensor of a kind out of a plain one."""
    tensors, dtypes = te().tensors, te().dtypes
    needs(kind != "identity" or hasattr(tensors, "IdentityQuantizer"), "IdentityTensor")
    usage = {"rowwise": True, "columnwise": kind == "float8_columnwise"}
    form, device = dtypes.kFloat8E4M3, torch.device(DEVICE)
    makers = {
        "plain": lambda: lambda x: x,
        "float8_delayed": lambda: tensors.Float8Quantizer(
            torch.full((1,), 16.0, device=device), torch.zeros(1, device=device), form, **usage
        ),
        "blockwise": lambda: tensors.Float8BlockQuantizer(form, block_scaling_dim=2, **usage),
        "identity": lambda: tensors.IdentityQuantizer(**usage),
    }
    return makers.get(kind, lambda: tensors.Float8CurrentScalingQuantizer(form, device, **usage))()


class Weighted(torch.nn.Module):
    """Weights the n-th argument by n, and their sum by a parameter, which is 2."""

    def __init__(self, finish=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 2.0, device=DEVICE))
        self.finish = finish

    def forward(self, *args, **options):
        """Return the weighted sum, or what is made of it."""
        total = sum(x * n for n, x in enumerate(tree_leaves((args, options)), 1) if x is not None) * self.weight
        return self.finish(total) if self.finish else total


def draw(seed, size, shape=SHAPE):
    """Return a plain tensor of values +-size and +-size/2, with +-size at the first of every 16."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    half = 1 + torch.randint(0, 2, shape, generator=generator)
    half.view(-1)[::16] = 1
    return (size * sign / half).to(DEVICE)


def wrap(kind, plain, *, grad=False):
    """Return the values in a new tensor of a kind."""
    with torch.no_grad():
        return quantizer(kind)(plain.clone()).requires_grad_(grad)


def sample(kind, seed=0, *, grad=False):
    """Return what a callable is captured with."""
    return wrap(kind, draw(seed, 1.0), grad=grad)


def capture(*samples, finish=None, training=True, options=None, **more):
    """Return a module and its graphed callable."""
    module = Weighted(finish).train(training)
    if options is not None:
        more["sample_kwargs"] = options
    return module, te().graph.make_graphed_callables(module, samples, **more)


def close(name, got, expected, size=None):
    """Check the largest difference over the largest size."""
    assert got is not None, f"no {name}"
    with torch.no_grad():
        got = (got.dequantize() if hasattr(got, "dequantize") and type(got) is not type(expected) else got).double()
        error = float((got - expected).abs().max() / (expected.abs().max() if size is None else size))
    assert error <= TOLERANCE, f"{name}: relative error {error:.2e}"


def check_weight(weight, total, upstream, name="weight"):
    """Check the gradient of a weight that a total was multiplied by."""
    products = total.double() * upstream.double()
    close(f"gradient of {name}", weight, products.sum(), products.abs().sum())


def check_calls(call, make, *, factor=2, rounds=ROUNDS, shape=SHAPE):
    """Check what a callable gives for other tensors, which are made of plain ones."""
    for seed, size in rounds:
        plain = draw(seed, size, shape)
        close(f"call {seed}", call(make(plain)), factor * plain.double())


def check_training(
    module, call, kind, *, back="plain", size_back=None, between=None, frozen=None,
    as_argument=torch.Tensor.requires_grad_,
):  # fmt: skip
    """Check outputs and gradients of three calls with other tensors of a kind, and with gradients of a kind.

    Where `frozen` is given, either the tensor or the sample is frozen, and no gradient is due; True: the tensor.
    """
    for seed, size in ROUNDS:
        plain, upstream = draw(seed, size), draw(10 + seed, size_back or size)
        x = wrap(kind, plain) if frozen else as_argument(wrap(kind, plain))
        module.weight.grad = None
        got = call(x)
        close(f"output {seed}", got, 2 * plain.double())
        if between:
            between()
        got.backward(wrap(back, upstream))
        check_weight(module.weight.grad, plain, upstream)
        if frozen is None:
            close(f"gradient of input {seed}", x.grad, 2 * upstream.double())
        else:
            assert x.grad is None, "what is frozen has a gradient"


def parametrize(names, values, role=None):
    """Parametrise; without a role, a plain value is a control and any other a defect."""

    def marked(value):
        words = value if isinstance(value, tuple) else (value,)
        default = pytest.mark.control if "plain" in words else pytest.mark.defect
        return pytest.param(*words, marks=role or default)

    return pytest.mark.parametrize(names, [marked(value) for value in values])


control, defect = pytest.mark.control, pytest.mark.defect
of_each_kind = parametrize("kind", ("plain", *KINDS))
of_both = parametrize("kind", ("plain", "float8"))


@of_each_kind
def test_call_computes_with_its_own_values(kind):
    _, call = capture(sample(kind))
    check_calls(call, functools.partial(wrap, kind))


@pytest.mark.parametrize("parameter", [False, True], ids=["tensor", "parameter"])
@of_each_kind
def test_backward_computes_with_the_values_of_its_call(kind, parameter):
    """Tensors and parameters are arguments."""
    as_argument = torch.nn.Parameter if parameter else torch.Tensor.requires_grad_
    module, call = capture(as_argument(sample(kind)))
    check_training(module, call, kind, size_back=2.0, as_argument=as_argument)


PLACES = ("plain", "float8", "blockwise", "float8", "plain")  # by place, by place, in a container, by name, by name


@of_both
def test_arguments_by_place_by_name_and_in_containers_and_what_is_no_tensor(kind):
    def arguments(plains):
        first, two, three, four, five = (wrap(kind, x) for kind, x in zip(PLACES, plains, strict=True))
        by_name = {"first": four, "number": float("2.5"), "nothing": None, "last": five}  # objects of each call's own
        return (first, two, {"inner": [three]}), by_name

    plains = [draw(seed, 1.0) for seed in range(5)]
    samples, options = arguments(plains)
    _, call = capture(*samples, training=False, options=options)
    for place in [place for place, word in enumerate(PLACES) if (word == "plain") == (kind == "plain")]:
        plains[place] = draw(10 + place, 3.0 + place)
        positional, options = arguments(plains)
        with torch.no_grad():
            got = call(*positional, **dict(reversed(options.items())))
        terms = zip((1, 2, 3, 4, 7), plains, strict=True)  # the number is the fifth
        close(f"argument {place}", got, 2 * (5 * 2.5 + sum(n * x.double() for n, x in terms)))


@parametrize(("kind", "back"), itertools.product(("plain", "float8", "blockwise"), repeat=2))
def test_incoming_gradient_of_an_output(kind, back):
    module, call = capture(sample("plain", grad=True), finish=quantizer(kind))
    check_training(module, call, "plain", back=back)


@parametrize(("kind", "other"), itertools.permutations(("plain", "float8", "float8_columnwise", "blockwise"), 2))
def test_tensor_of_another_class_than_the_sample(kind, other):
    _, call = capture(sample(kind))
    check_calls(call, functools.partial(wrap, other))


@parametrize("other", ("plain", "float8", "float8_columnwise"))
def test_columns_that_a_float8_sample_keeps_turned(other):
    """Judge the data with its last dimension first, which the product of a weight's gradient reads.

    A tensor that is given may have none: the static one makes it.
    """
    static = sample("float8_columnwise")

    def columns(total):
        fields = static.get_metadata()
        values = fields["data_transpose"].view(FP8).to(total.dtype).movedim(0, -1)
        return total + values * fields["fp8_scale_inv"]

    _, call = capture(static, finish=columns)
    check_calls(call, functools.partial(wrap, other), factor=2 + 1)


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


@control
def test_neighbour_of_the_sample_in_storage():
    storage = torch.zeros(2, *SHAPE, device=DEVICE)
    _, call = capture(storage[0].copy_(sample("plain")))
    check_calls(call, storage[1].copy_)


@control
def test_values_that_the_nominal_dtype_of_a_quantized_tensor_lacks():
    more = 1 + 2.0**-10

    def make(plain):
        x = wrap("float8", plain.bfloat16())
        return changed(x, fp8_scale_inv=more * x.get_metadata()["fp8_scale_inv"])

    _, call = capture(sample("plain"))
    check_calls(call, make, factor=2 * more)


@of_both
def test_columns_of_a_larger_tensor_and_an_expanded_gradient(kind):
    columns = SHAPE[-1]
    wide = (*SHAPE[:-1], 2 * columns)
    module, call = capture(wrap(kind, draw(0, 1.0, wide))[..., :columns])
    for seed, size in ROUNDS:
        plain = draw(seed, size, wide)
        plain, x = plain[..., columns:], wrap(kind, plain)[..., columns:]
        if seed == 1:
            x = wrap(kind, plain.contiguous())
        got, module.weight.grad = call(x), None
        close(f"call {seed}", got, 2 * plain.double())
        got.sum().backward()
        check_weight(module.weight.grad, plain, torch.ones_like(plain))


@pytest.mark.parametrize("shape", [(1, *SHAPE[1:]), SHAPE[-1:], (1,)], ids=len)
@control
def test_plain_tensor_of_fewer_rows_is_repeated(shape):
    _, call = capture(sample("plain"))
    plain = draw(1, 3.0, shape)
    close("output", call(plain), 2 * plain.double().expand(SHAPE))


@control
def test_plain_tensor_without_elements():
    _, call = capture(draw(0, 1.0, (1, 5))[:, :0], draw(0, 1.0, (1, 1)))  # its pointer is 0, too
    got = call(draw(1, 3.0, (1, 5))[:, :0], draw(1, 3.0, (1, 1)))
    assert got.shape == (1, 0), f"shape {[*got.shape]}"


@of_both
def test_frozen_tensor_where_the_sample_was_trained_and_the_reverse(kind):
    for frozen in (True, False):
        module, call = capture(sample(kind, grad=frozen))
        check_training(module, call, kind, size_back=2.0, frozen=frozen)


@of_both
def test_several_outputs_of_which_some_are_none_or_frozen(kind):
    made, scales = quantizer(kind), {"one": 1, "frozen": 3, "other": 5}

    def finish(total):
        return {"one": made(total), "nothing": None, "frozen": 3 * total.detach(), "other": made(5 * total)}

    module, call = capture(sample("plain", grad=True), finish=finish)
    for seed, used in enumerate((("one", "other"), ("other", "frozen"), ("one",)), 1):
        plain, upstreams = draw(seed, 0.5 + seed), [draw(10 * seed + place, 2.0) for place in range(len(used))]
        x, module.weight.grad = plain.clone().requires_grad_(), None
        got = call(x)
        for name, scale in scales.items():
            close(f"{name} {seed}", got[name], 2 * scale * plain.double())
        assert got["nothing"] is None
        torch.autograd.backward([got[name] for name in used], [wrap(kind, x) for x in upstreams])
        upstream = sum(x.double() * scales[name] * (name != "frozen") for name, x in zip(used, upstreams, strict=True))
        close(f"gradient of input {seed}", x.grad, 2 * upstream)
        check_weight(module.weight.grad, plain, upstream)


@of_both
def test_same_tensors_filled_anew(kind):
    """Give the same tensors each time, as arguments and as a gradient, and fill the arguments before backward.

    Of a quantized tensor, its data and scale are filled, as quantize_() does: its version stays as it was.
    """

    def fill(x, values):
        new = wrap(kind if x is not first else "plain", values)
        with torch.no_grad():
            for old, filled in zip(buffers(x), buffers(new), strict=True):
                assert old.shape == filled.shape, f"the caller's tensor of {[*filled.shape]} has become {[*old.shape]}"
                old.copy_(filled)

    samples, made = (sample("plain", grad=True), sample(kind)), quantizer(kind)

    class ReadAgain(torch.autograd.Function):
        """Multiplies by the second argument, which backward reads again."""

        @staticmethod
        def forward(_context, total):
            return total * (samples[1] * 1)

        @staticmethod
        def backward(_context, upstream):
            return upstream * (samples[1] * 1)

    module, call = capture(*samples, finish=lambda total: made(ReadAgain.apply(total)))
    first, second, back = draw(1, 1.0).requires_grad_(), sample(kind, 1), sample(kind, 1)
    for seed, size in ((2, 3.0), (3, 0.25), (4, 20.0)):
        plain, upstream = draw(seed, size), draw(10 + seed, size)
        for x, values in ((first, plain), (second, plain), (back, upstream)):
            fill(x, values)
        got = call(first, second)
        close(f"output {seed}", got, 2 * 3 * plain.double() ** 2)
        for x in (first, second):  # they are the caller's again
            fill(x, draw(20 + seed, 50.0))
        grad, weight = torch.autograd.grad(got, (first, module.weight), back)
        close(f"gradient of input {seed}", grad, 2 * plain.double() * upstream.double())
        check_weight(weight, 3 * plain.double() ** 2, upstream)


@of_both
def test_one_tensor_as_two_arguments_and_the_sample_of_another_argument(kind):
    samples = [sample(kind, seed) for seed in range(2)]
    _, call = capture(*samples)
    first, second, third = (draw(seed, size) for seed, size in ((2, 3.0), (3, 0.25), (4, 20.0)))
    x, y, z = (wrap(kind, plain) for plain in (first, second, third))
    first, second, third = first.double(), second.double(), third.double()
    close("apart", call(x, y), 2 * (first + 2 * second))
    close("second as first", call(samples[1], z), 2 * (second + 2 * third))
    close("second itself", call(y, samples[1]), 2 * (second + 2 * third))
    close("both", call(x, x), 2 * (first + 2 * first))


ORDERED = {"_order": [1, 2, -2, -1], "_num_layers_per_chunk": [1, 1]}


@pytest.mark.parametrize("options", [{}, ORDERED], ids=["plain-chain", "in-order"])
@of_both
def test_callable_takes_what_another_gives(kind, options):
    modules = Weighted(quantizer(kind)), Weighted()
    samples = (sample("plain", grad=True),), (sample(kind, 1, grad=True),)
    giver, taker = te().graph.make_graphed_callables(modules, samples, **options)
    for seed, size in ((2, 3.0), (3, 0.25)):
        plain, upstream = draw(seed, size), draw(10 + seed, 2.0)
        x = plain.clone().requires_grad_()
        got = taker(giver(x))
        close(f"output {seed}", got, 4 * plain.double())
        grad, first, second = torch.autograd.grad(got, (x, modules[0].weight, modules[1].weight), upstream)
        close(f"gradient of input {seed}", grad, 4 * upstream.double())
        check_weight(first, 2 * plain, upstream, "first weight")
        check_weight(second, 2 * plain, upstream, "second weight")


@of_both
def test_what_does_not_fit_the_sample_is_refused(kind):
    _, call = capture(sample(kind))
    for shape in ((2, 64, 16), (3, 64, 160)):
        with pytest.raises((RuntimeError, ValueError)):
            call(wrap(kind, draw(1, 3.0, shape)))


@of_both
def test_call_in_the_mode_that_was_not_captured(kind):
    module, call = capture(sample(kind, grad=True))

    def eager():  # between a captured call and its backward
        module.eval()
        for shape in (SHAPE, (3, 5)):
            check_calls(call, functools.partial(wrap, kind), rounds=[(20, 5.0)], shape=shape)
        module.train()

    check_training(module, call, kind, size_back=2.0, between=eager)


@parametrize("kind", ("plain", "float8"), control)
def test_host_waits_for_no_value_of_a_tensor(kind):
    _, call = capture(sample(kind, grad=True), finish=quantizer(kind))
    argument, upstream = wrap(kind, draw(1, 3.0), grad=True), wrap(kind, draw(11, 2.0))
    for _ in range(2):
        with host_waits("cpu") as operators:  # those of a replay on a GPU are not seen, and need no host
            call(argument).backward(upstream)
        assert not operators, f"the host waits for the answers of {operators}"


@parametrize("kind", ("plain", "float8"), control)
def test_nothing_of_an_argument_or_a_gradient_is_kept(kind):
    _, call = capture(sample(kind), finish=quantizer(kind))
    for seed, size in ROUNDS[:2]:
        x, back = wrap(kind, draw(seed, size)), wrap(kind, draw(10 + seed, size))
        argument, gradient = weak_storages(buffers(x)), weak_storages(buffers(back))
        got = call(x)
        del x
        assert kept_alive(argument) == 0, "the argument is kept"
        got.backward(back)
        del back
        assert kept_alive(gradient) == 0, "the gradient is kept"


@parametrize("kind", ("plain", "float8"), control)
def test_reset_frees_what_the_graph_read(kind):
    needs("release_static_state" in inspect.getsource(te().graph), "reset() that frees more than the graphs")
    static = sample(kind, grad=True)
    _, call = capture(static)
    call(wrap(kind, draw(1, 3.0), grad=True)).backward(draw(2, 2.0))
    storages = weak_storages(buffers(static))
    call.reset()
    del static
    assert kept_alive(storages) == 0, "reset() keeps tensors"


@parametrize("kind", ("plain", "float8"), control)
def test_gradients_are_the_callers_own(kind):
    """What is set on one is not seen at the next."""
    _, call = capture(sample(kind, grad=True))
    grads = []
    for seed in (1, 2):
        x = wrap(kind, draw(seed, 3.0), grad=True)
        grads += torch.autograd.grad(call(x), x, draw(10 + seed, 2.0))
        assert not grads[-1].requires_grad
        grads[-1].requires_grad_()
    assert grads[0] is not grads[1]


@pytest.mark.parametrize("event", [False, True], ids=["stream", "event"])
@of_both
def test_replay_on_another_stream(kind, event):
    """Judge a replay where either stream is late: each waits for the other, or for the graph's event alone."""
    source = inspect.getsource(te().graph)
    needs("cuda_graph_event" in source if event else "cuda_graph_stream" in source, "such option")
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

    def slow_copy(tensor, *args):
        cuda._sleep(CYCLES)  # noqa: SLF001 - who does not wait for the copy is there before it
        return copy_(tensor, *args)

    def delayed(late, new, old, function, *values, **more):
        """Fill a tensor and call, while a stream is busy; say what that gives, and whether the graph is at work."""
        cuda.synchronize()
        with cuda.stream(late):
            cuda._sleep(4 * CYCLES)  # noqa: SLF001 - for longer than any copy takes
        with torch.no_grad():
            for target, source in zip(buffers(old), buffers(new), strict=True):
                target.copy_(source)  # who does not wait for it reads the old one
        with unittest.mock.patch.object(torch.Tensor, "copy_", slow_copy):
            values = function(*values, **more)
        seen = (values[0] if isinstance(values, tuple) else values).detach().clone()
        main.synchronize()
        running = not side.query()
        side.synchronize()
        return values, seen, running

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
def test_later_microbatches_compute_with_their_own_values(kind):
    needs(hasattr(te().graph, "autocast"), "autocast")  # since then the option has this name
    _, call = capture(sample(kind), cache_quantized_params=True)
    for seed, first in enumerate((False, True, False), 1):
        plain = draw(seed, 1.0 + seed)
        close(f"call {seed}", call(wrap(kind, plain), is_first_microbatch=first), 2 * plain.double())


@control
def test_first_callable_of_an_fp8_region_updates_the_scales_of_backward():
    needs(hasattr(te().graph, "autocast"), "autocast")
    manager = te().graph.FP8GlobalStateManager
    _, call = capture(sample("plain", grad=True))
    manager.reset()
    with te().graph.autocast(enabled=True):
        got = call(draw(1, 3.0).requires_grad_())
    manager.reset()
    with unittest.mock.patch.object(manager, "reduce_and_update_fp8_tensors") as update:
        got.backward(draw(4, 2.0))
    update.assert_called_once_with(forward=False)


@pytest.mark.parametrize("alias", [False, True], ids=["itself", "alias"])
@parametrize("kind", ("plain", *KINDS), control)
def test_sample_is_in_its_place_already(kind, alias):
    learning = ((False, False), (True, not alias), (False, alias))  # of the sample, and of what is given
    for trained, learns in learning if kind in ("plain", "float8") else learning[:1]:
        static = sample(kind, grad=trained)
        _, call = capture(static)
        for seed, size in ROUNDS:
            plain = draw(seed, size)
            with torch.no_grad():
                static.copy_(wrap(kind, plain))
            with RecordedGraph() as operators:
                got = call(static.detach().requires_grad_(learns) if alias else static)
            close(f"call {seed}", got, 2 * plain.double())
            close(f"sample {seed}", static, plain.double())
            copies = [step.args[0] for step in operators.steps].count(torch.ops.aten.copy_.default)
            if not alias or kind == "plain":  # no pointer tells that a wrapper is an alias
                assert copies == 0, f"it is copied {copies} times"


@parametrize(
    ("kind", "other"),
    [*((kind, kind) for kind in ("plain", *KINDS)), ("float8", "float8_columnwise"), ("float8_columnwise", "float8")],
    control,
)
def test_what_is_given_stays_as_it_was(kind, other):
    _, call = capture(sample(kind))
    for seed, size in ROUNDS:
        plain = draw(seed, size)
        x = wrap(other, plain)
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
    assert abs(got - 1) <= TOLERANCE, f"{got} times what x * 2 should be"
