# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "annotated-types==0.7.0",
#   "numpy==2.3.5",
#   "packaging==26.3",
#   "pydantic==2.12.5",
#   "pydantic-core==2.41.5",
#   "torch==2.13.0",
#   "transformer-engine==2.20.2",
#   "triton==3.6.0",
#   "typing-extensions==4.16.0",
#   "typing-inspection==0.4.2",
# ]
# ///
"""Transformer Engine's graphed callables compute with the first call's values of quantized inputs and gradients.

Symptom: of a callable from make_graphed_callables, captured with a quantized tensor, every replay gives what the
captured values give. Captured with 1.0 and called with 3.0, x * 2 gives 2.0. No error, no warning; a plain tensor is
right. The same holds for gradients that come back quantized to a quantized output.

Cause: the graph's static tensor is copied to where static.data_ptr() != given.data_ptr(). A quantized tensor keeps its
data in inner tensors, and its own data_ptr() is 0, as is that of every other: none is ever copied.

Scope: make_graphed_callables with each class of quantized tensors that a release has (KINDS), and with plain ones, that
are right already and have to remain so. A float8 tensor stands for the classes in what follows:

    given      new, without the transpose that the sample has, the same filled anew, also within itself and before its
               backward, the sample or its alias (never copied onto itself), its neighbour in storage, that of another
               argument, what a callable gave; columns of a larger one, parameters; of another class, dtype or scale; of
               one row (plain), of another shape: refused. It stays as it was, and is let go
    arguments  by place, by name, in containers; with numbers and None (inference); one left out: refused
    learning   sample and argument trained or frozen, unused; gradients of several outputs, some None or frozen, twice
    gradients  plain and quantized, of the caller's own, cloned for parameters (clone_param_grads_on_return) or not
    capture    training, inference; num_warmup_iters, pool, retain_graph_in_backward, allow_unused_input, warm-up hooks,
               enabled; several callables, chains, _order, _num_layers_per_chunk, _reuse_graph_input_output_buffers
    call       cuda_graph_stream, cuda_graph_event; in FP8 regions: is_first_microbatch (cache_quantized_params), the
               update of backward's scales; in the mode that was not captured, also between a call and its backward;
               without an operator whose answer the host waits for; after reset(), which frees what was captured

Not judged: capture_time_hooks, calibrating, groups of ranks, delayed gradients of weights, modules of upstream's own.

`traced` (cpu): graph.py and the tensor classes are real. The compiled extension is a stand-in that quantizes and
dequantizes by PyTorch operators in each class's format, and allocates (make_empty); so is the Python that only the
modules, operations, attention, ONNX and C++ wrappers need, of which graph.py asks for classes. A CUDA graph is a list
of the operators called during capture, and its replay calls them again on the same tensors; what is replayed on another
stream runs when that is waited for, and not at all before it has waited itself.
`executed`: CUDA graphs are real. So is the extension where it can be imported, else the same stand-in, and the log says
so. With the real one, classes that this GPU cannot quantize to are not judged.

Tolerances: values are +-s and +-s/2, with +-s in each block of 16, which each format holds up to the rounding of its
scale. 2**-16 for float32: the scale's rounding of 2**-24, and sums of up to 20480 terms, compared with the sum of their
sizes. 2**-7 for bf16, that rounds inputs, products and sums by 2**-9 each. What is stale is wrong by half and more.

Upstream: https://github.com/NVIDIA/TransformerEngine, transformer_engine/pytorch/graph.py. By hand:

    unzip -q transformer_engine-2.20.2-py3-none-any.whl -d transformer_engine-2.20.2
    PYTHONPATH=transformer_engine-2.20.2 python "$PACK/reproduce.py" --target cpu
    git -C transformer_engine-2.20.2 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=transformer_engine-2.20.2 python "$PACK/reproduce.py" --target cpu
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

import enum, functools, gc, importlib.util, inspect, math, types, typing, unittest.mock

TE = "transformer_engine.pytorch"
SHAPE = (2, 64, 160)  # three dimensions, rows and columns that no tile of 128 divides
TYPES = "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1"
DTYPES = {name: number for number, name in enumerate(TYPES.split()) if name not in ("kInt16", "kInt64", "kFloat8E8M0")}
FORMATS = {"kFloat8E4M3": ("float8_e4m3fn", 448), "kFloat8E5M2": ("float8_e5m2", 57344)}  # dtype, largest value
KINDS = "float8", "float8_columnwise", "float8_e5m2", "float8_delayed", "blockwise", "blockwise_1d", "mxfp8", "nvfp4"
KINDS += ("identity",)  # a wrapper of plain data, since 2.18
STUBBED = {"ops": "Sequential", "ops.op": "BasicOperation", "ops.fuser": "OperationFuser", "module": "Module"}
STUBBED |= {"module.base": "TransformerEngineBaseModule", "attention": "Attention"}
STUBBED |= {"attention.linear_attention": "Linear", "attention.linear_attention.base": "LinearAttentionBase"}
TOLERANCES = {"float32": 2**-16, "bfloat16": 2**-7}  # relative errors; the docstring has the reasons


class Lab(typing.NamedTuple):
    """Everything that a check needs besides its case."""

    torch: types.ModuleType
    device: str
    te: types.ModuleType  # transformer_engine_torch, or what stands in for it
    tensors: types.ModuleType
    graph: types.ModuleType


# What stands in for the compiled extension.


def stored(quantizer):
    """Return the dtype and the largest value of a quantizer's FP8 format."""
    name, peak = FORMATS[sys.modules["transformer_engine_torch"].DType(int(quantizer.dtype)).name]
    return getattr(sys.modules["torch"], name), peak


@functools.cache
def levels(device):
    """Return the sizes that E2M1 has, and the limits half way between them."""
    torch = sys.modules["torch"]
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device), torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], device=device
    )


def per_tensor(x, quantizer):
    """Return what a Float8Tensor stores: one scale, of the quantizer or of the values."""
    dtype, peak = stored(quantizer)
    given = type(quantizer).__name__ == "Float8Quantizer"
    scale = quantizer.scale if given else peak / x.float().abs().amax().clamp(min=2**-100)
    data = (x.float() * scale).to(dtype).view(sys.modules["torch"].uint8)
    fields = {"data": data, "fp8_scale_inv": (1 / scale).view(1), "fp8_dtype": quantizer.dtype}
    return fields | {"data_transpose": data.movedim(-1, 0).contiguous() if quantizer.columnwise_usage else None}


def tiles(x, height, width):
    """Return x as rows of tiles [rows of tiles, height, columns of tiles, width], with zeros where it ends."""
    torch = sys.modules["torch"]
    flat = x.reshape(-1, x.shape[-1])
    wide = torch.nn.functional.pad(flat, (0, -flat.shape[1] % width, 0, -flat.shape[0] % height))
    return wide.view(wide.shape[0] // height, height, wide.shape[1] // width, width)


def flattened(tiled, shape):
    """Undo tiles()."""
    rows = math.prod(shape[:-1])
    return tiled.reshape(tiled.shape[0] * tiled.shape[1], -1)[:rows, : shape[-1]].reshape(shape)


def per_tile(x, quantizer, height, width):
    """Return what a tensor with one FP8 scale a tile stores: powers of two for MXFP8."""
    torch = sys.modules["torch"]
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
    torch = sys.modules["torch"]
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
        padded = sys.modules["torch"].nn.functional.pad(scale, (0, -scale.shape[1] % 4))
        fields |= {"is_2D_scaled": square, "rowwise_scale_inv": padded.contiguous()}
    if target is None:
        return made(shape=x.shape, dtype=x.dtype, device=x.device, quantizer=quantizer, **fields)
    torch, names = sys.modules["torch"], {"data_transpose": "_transpose", "fp8_scale_inv": "_scale_inv"}
    for field, value in fields.items():
        if torch.is_tensor(value):
            getattr(target, names.get(field, f"_{field}")).copy_(value)
    return target


def dequantize(x, dtype):
    """Return in plain form what a quantized tensor stands for."""
    torch, shape, fields = sys.modules["torch"], tuple(x.shape), vars(x)
    dtype = sys.modules[f"{TE}.constants"].TE_DType_To_Torch[dtype]
    if "_fp4_dtype" in fields:
        data = fields["_rowwise_data"].long()
        codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
        values = levels(data.device)[0][codes & 7] * (1 - 2 * (codes >> 3))
        scale = fields["_rowwise_scale_inv"].view(torch.float8_e4m3fn).float() * fields["_amax_rowwise"] / (6 * 448)
        return flattened(tiles(values, 1, 16) * scale[:, None, :, None], shape).to(dtype)
    number = int(fields["_fp8_dtype"])
    form = getattr(torch, FORMATS[sys.modules["transformer_engine_torch"].DType(number).name][0])
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
    torch = sys.modules["torch"]
    made = quantize(torch.zeros(tuple(shape), dtype=dtype, device=device), quantizer)
    return made.requires_grad_(requires_grad)


def stand_in(device):
    """Put the stand-in in the extension's place, and bare modules in that of what only wants it."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # the common part then does without the core library
    compiled = sys.modules["transformer_engine_torch"] = unittest.mock.MagicMock()
    compiled.DType = enum.IntEnum("DType", DTYPES)
    compiled.quantize, compiled.dequantize, compiled.fp8_transpose = quantize, dequantize, transpose
    compiled.get_cublasLt_version = lambda: 130000
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None:
        raise NotImplementedError("no transformer_engine on the path")
    for name, below in (("transformer_engine", ""), (TE, "/pytorch")):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [f"{folder}{below}" for folder in spec.submodule_search_locations]
    for name, needed in STUBBED.items():
        module = sys.modules[f"{TE}.{name}"] = types.ModuleType(f"{TE}.{name}")
        module.__path__ = []
        setattr(module, needed, type(needed, (), {}))
    for name in ("onnx_extensions", "triton", "triton.pad"):
        sys.modules[f"{TE}.{name}"] = unittest.mock.MagicMock()
    tensors = importlib.import_module(f"{TE}.tensor")
    if device == "cpu":  # these two would go to the GPU
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
    torch = sys.modules["torch"]
    found = [x for x in torch.utils._pytree.tree_leaves(given) if torch.is_tensor(x)]  # noqa: SLF001
    inner = [[x] if type(x) is torch.Tensor else filter(torch.is_tensor, vars(x).values()) for x in found]
    return [x for some in inner for x in some]


class Stream:
    """A stream: what it replays runs when somebody waits for it; what it does without waiting itself is lost.

    Such a replay, or copy, came before the copies that it should have waited for, and changed nothing.
    """

    entered: typing.ClassVar = []  # the main stream, then those that were entered
    copies: typing.ClassVar = 0  # that the main stream made

    def __init__(self):
        """Begin with nothing to do."""
        self.steps, self.waited = [], Stream.copies  # waited: for how many copies of the main stream

    def __enter__(self):
        """Become the current stream."""
        self.entered.append(self)

    def __exit__(self, *_error):
        """Make the one before it current again."""
        self.entered.pop()

    def wait_stream(self, other):
        """Wait for all that another stream has to do."""
        other.synchronize()
        self.waited = Stream.copies

    def wait_event(self, event):
        """Wait for what an event's stream has to do before it."""
        while event.stream and event in event.stream.steps:
            event.stream.steps.pop(0)()

    def is_there(self):
        """Return whether all that the main stream copied is there."""
        return self is self.entered[0] or self.waited == Stream.copies

    def synchronize(self):
        """Do all that is left."""
        while self.steps:
            self.steps.pop(0)()

    def query(self):
        """Return whether nothing is left."""
        return not self.steps


class Event:
    """An event that a graph records."""

    def __init__(self, *, external):
        """Begin without a stream."""
        self.external, self.stream = external, None

    def __call__(self):
        """Do nothing, at its place among the operators of a graph."""

    def record(self):
        """Take this place in the graph that is captured."""
        for tape in Tape.captured:
            tape.steps.append(self)


class Tape:
    """A graph: the operators called during capture, with the tensors that they were given and that they gave."""

    captured: typing.ClassVar = []  # the one that is being captured

    def __init__(self):
        """Begin without a graph."""
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
        """Forget the operators."""
        self.steps = None


def play(function, args, options, given):
    """Call an operator again, and write what it gives over what it gave."""
    torch = sys.modules["torch"]
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():  # noqa: SLF001
        for old, new in zip(buffers(given), buffers(function(*args, **options)), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


def without_gpu(torch):
    """Let torch.cuda record and replay on the CPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        """Note every call, of quantized tensors as a whole."""

        def __init__(self, tape):
            super().__init__()
            self.tape = tape

        def __torch_dispatch__(self, function, classes, args=(), kwargs=None):
            given = function(*args, **(kwargs or {}))
            self.tape.steps.append(functools.partial(play, function, args, kwargs or {}, given))
            return given

    @contextlib.contextmanager
    def capture(tape, **_options):
        tape.steps, Tape.captured = [], [tape]
        with Recorder(tape):
            yield
        Tape.captured = []

    def copy(given, *args, **options):
        stream = Stream.entered[-1]
        Stream.copies += stream is Stream.entered[0]
        return copied(given, *args, **options) if stream.is_there() else given

    def empty(*size, **options):
        return made(*size, **options | ({"device": "cpu"} if options.get("device") == "cuda" else {}))

    cuda, Stream.entered = torch.cuda, [Stream()]
    copied, made, torch.Tensor.copy_, torch.empty = torch.Tensor.copy_, torch.empty, copy, empty
    cuda.CUDAGraph, cuda.graph, cuda.Stream, cuda.Event = Tape, capture, Stream, Event
    cuda.current_stream, cuda.stream, cuda.synchronize = lambda: Stream.entered[-1], lambda stream: stream, lambda: None
    cuda._sleep = lambda _cycles: torch.zeros(1)  # noqa: SLF001 - any operator
    cuda.get_rng_state, cuda.set_rng_state = lambda: None, lambda _state: None
    cuda.current_device, cuda.get_device_capability = lambda: torch.device("cpu"), lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)
    torch._C._graph_pool_handle = lambda: (0, 0)  # noqa: SLF001


# What is judged.


def load(torch, device):
    """Import the graph module and the tensors, on top of the compiled extension or of its stand-in."""
    if device == "cpu":
        without_gpu(torch)
    try:
        real = device != "cpu" and importlib.import_module(TE)
    except (ImportError, RuntimeError, OSError, AssertionError) as error:  # it has many ways to miss its libraries
        print(f"the compiled extension is not here: {error}", file=sys.stderr)
        real = False
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
    if not real:
        stand_in(device)
    modules = [importlib.import_module(f"{TE}.{name}") for name in ("tensor", "graph")]
    return Lab(torch, device, sys.modules["transformer_engine_torch"], *modules)


def quantizer(lab, kind):
    """Return the quantizer of a kind; None for the plain one."""
    torch, tensors, dtypes = lab.torch, lab.tensors, lab.te.DType
    usage = {"rowwise": True, "columnwise": kind == "float8_columnwise"}
    form, device = dtypes.kFloat8E5M2 if kind == "float8_e5m2" else dtypes.kFloat8E4M3, torch.device(lab.device)
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


@functools.cache
def module_class(torch):
    """Return the class of the modules that are graphed: a weighted sum of all that is given."""

    class Weighted(torch.nn.Module):
        """Weight the n-th argument by n, and the sum by a parameter."""

        def __init__(self, device, finish=None):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((1,), 2.0, device=device))
            self.finish = finish

        def forward(self, *args, unused=None, **options):
            """Return the weighted sum, or what is made of it."""
            del unused
            places = enumerate(torch.utils._pytree.tree_leaves((args, options)), 1)  # noqa: SLF001
            total = sum(x * place for place, x in places if x is not None) * self.weight
            return self.finish(total) if self.finish else total

    return Weighted


def draw(lab, seed, size, shape=SHAPE, dtype="float32"):
    """Return a plain tensor of values +-size and +-size/2, with +-size at the first of every 16."""
    generator = lab.torch.Generator().manual_seed(seed)
    sign = lab.torch.randint(0, 2, shape, generator=generator) * 2 - 1
    half = 1 + lab.torch.randint(0, 2, shape, generator=generator)
    half.view(-1)[::16] = 1
    return (size * sign / half).to(lab.device, getattr(lab.torch, dtype))


def wrap(lab, kind, plain, *, grad=False):
    """Return the values in a new tensor of a kind."""
    made = quantizer(lab, kind)
    with lab.torch.no_grad():
        x = made(plain.clone()) if made else plain.clone()
    return x.requires_grad_(grad)


def capture(lab, samples, *, finish=None, training=True, options=None, **more):
    """Return a module and its graphed callable."""
    module = module_class(lab.torch)(lab.device, finish).train(training)
    if options is not None:
        more["sample_kwargs"] = options
    return module, lab.graph.make_graphed_callables(module, samples, **more)


def error(got, expected, size=None):
    """Return the largest difference over the largest size; of a gradient that there is not, infinity."""
    if got is None:
        return math.inf
    with sys.modules["torch"].no_grad():
        got = (got.dequantize() if hasattr(got, "dequantize") and type(got) is not type(expected) else got).double()
        return float((got - expected).abs().max() / (expected.abs().max() if size is None else size))


def verdict(errors, dtype="float32"):
    """Judge named relative errors; NaN is wrong."""
    ok = all(one <= TOLERANCES[dtype] for one in errors.values())
    return ok, {"measured": errors, "tolerance": TOLERANCES[dtype], "unit": "relative error"}


def judge_forward(lab, kind, shape=SHAPE, dtype="float32", training=True):
    """Call with three other tensors."""
    _, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0, shape, dtype)),), training=training)
    errors = {}
    with lab.torch.set_grad_enabled(training):
        for seed, size in ((1, 3.0), (2, 0.25), (3, 20.0)):
            plain = draw(lab, seed, size, shape, dtype)
            errors[f"call {seed}"] = error(call(wrap(lab, kind, plain)), 2 * plain.double())
    return verdict(errors, dtype)


def gradient_errors(module, x, plain, upstream, number):
    """Return, by name, the errors of the gradients of the input and of the weight after a backward pass."""
    products = plain.double() * upstream.double()
    return {
        f"input {number}": error(x.grad, 2 * upstream.double()),
        f"weight {number}": error(module.weight.grad, products.sum(), products.abs().sum()),
    }


def judge_backward(lab, kind):
    """Compare the gradients of the input and of the weight, whose gradient is the input's product with another."""
    module, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0), grad=True),))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain, upstream = draw(lab, seed, size), draw(lab, 10 + seed, 2.0)
        x, module.weight.grad = wrap(lab, kind, plain, grad=True), None
        call(x).backward(upstream)
        errors |= gradient_errors(module, x, plain, upstream, seed)
    return verdict(errors)


PLACES = "plain", "float8", "blockwise", "float8", "plain"  # positional, positional, in a container, by name, by name


def judge_arguments(lab, places):
    """Change one argument at a time, among plain and quantized ones, in containers and by name."""

    def call_with(call, plains):
        one, two, three, four, five = (wrap(lab, kind, x) for kind, x in zip(PLACES, plains, strict=True))
        return call(one, two, {"inner": [three]}, last=five, first=four)

    plains = [draw(lab, seed, 1.0) for seed in range(5)]
    one, two, three, four, five = (wrap(lab, kind, x) for kind, x in zip(PLACES, plains, strict=True))
    samples = (one, two, {"inner": [three]})
    _, call = capture(lab, samples, options={"first": four, "last": five})
    errors = {}
    for place in places:
        plains[place] = draw(lab, 10 + place, 3.0 + place)
        errors[f"argument {place}"] = error(
            call_with(call, plains), 2 * sum(n * x.double() for n, x in enumerate(plains, 1))
        )
    return verdict(errors)


def judge_gradient(lab, kind, given):
    """Give a quantized output a gradient, twice."""
    sample = draw(lab, 0, 1.0).requires_grad_()
    module, call = capture(lab, (sample,), finish=quantizer(lab, kind))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain, upstream = draw(lab, seed, size), draw(lab, 10 + seed, size)
        x, module.weight.grad = plain.clone().requires_grad_(), None
        got = call(x)
        errors[f"output {seed}"] = error(got, 2 * plain.double())
        lab.torch.autograd.backward((got,), (wrap(lab, given, upstream),))
        errors |= gradient_errors(module, x, plain, upstream, seed)
    return verdict(errors)


def judge_callables(lab, kind):
    """Graph two modules in one call."""
    make = module_class(lab.torch)
    samples = tuple((wrap(lab, kind, draw(lab, seed, 1.0)),) for seed in range(2))
    calls = lab.graph.make_graphed_callables((make(lab.device), make(lab.device)), samples)
    errors = {}
    for seed, call in enumerate(calls, 2):
        plain = draw(lab, seed, 3.0)
        errors[f"callable {seed}"] = error(call(wrap(lab, kind, plain)), 2 * plain.double())
    return verdict(errors)


def judge_microbatches(lab, kind, order, reuse):
    """Graph one module for two microbatches in a pipeline's order."""
    module = module_class(lab.torch)(lab.device)
    samples = tuple((wrap(lab, kind, draw(lab, seed, 1.0), grad=True),) for seed in range(2))
    calls = lab.graph.make_graphed_callables(
        (module,), samples, _order=order, _reuse_graph_input_output_buffers=reuse, allow_unused_input=True
    )
    errors, waiting = {}, []
    for step, chunk in enumerate(order):
        if chunk > 0:
            plain = draw(lab, 10 + step, 3.0 + step)
            x = wrap(lab, kind, plain, grad=True)
            waiting.append((plain, x, calls[sum(one > 0 for one in order[:step])](x)))
            errors[f"output {step}"] = error(waiting[-1][2], 2 * plain.double())
        else:
            plain, x, got = waiting.pop(0)
            upstream, module.weight.grad = draw(lab, 20 + step, 2.0), None
            got.backward(upstream)
            errors |= gradient_errors(module, x, plain, upstream, step)
    return verdict(errors)


def judge_crossed(lab, kind, given):
    """Capture with one kind, and call with another."""
    _, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0)),))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain = draw(lab, seed, size)
        errors[f"call {seed}"] = error(call(wrap(lab, given, plain)), 2 * plain.double())
    return verdict(errors)


def judge_columns(lab, given):
    """Capture what also reads the data that a float8 tensor keeps with its last dimension first, and call with a kind.

    The matrix product of a weight's gradient reads it. A tensor that is given may have none: the static one makes it.
    """
    sample = wrap(lab, "float8_columnwise", draw(lab, 0, 1.0))
    form, _ = stored(quantizer(lab, "float8_columnwise"))

    def columns(total):
        fields = sample.get_metadata()
        values = fields["data_transpose"].view(form).to(total.dtype).movedim(0, -1)
        return total + values * fields["fp8_scale_inv"]

    _, call = capture(lab, (sample,), finish=columns)
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain = draw(lab, seed, size)
        errors[f"call {seed}"] = error(call(wrap(lab, given, plain)), (2 + 1) * plain.double())
    return verdict(errors)


def judge_scale(lab):
    """Give values that the sample's own scale cannot hold, with a scale that can."""
    _, call = capture(lab, (wrap(lab, "float8_delayed", draw(lab, 0, 1.0)),))
    errors = {}
    for seed, scale in ((1, 0.25), (2, 2.0**9)):
        plain = draw(lab, seed, 256 / scale)
        made = quantizer(lab, "float8_delayed")
        made.scale = lab.torch.full((1,), scale, device=lab.device)
        errors[f"scale {scale}"] = error(call(made(plain)), 2 * plain.double())
    return verdict(errors)


def gradients(module, got, given, upstream):
    """Go backward, and return the gradients of what was given and of the module's weight."""
    module.weight.grad = None
    got.backward(upstream)
    return [x.grad for x in given], module.weight.grad


def judge_learning(lab, kind):
    """Give a frozen tensor where the sample was trained, and a trained one where it was frozen."""
    errors = {}
    for sample, given in ((True, False), (False, True)):
        module, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0), grad=sample),))
        for seed, size in ((1, 3.0), (2, 0.25)):
            plain, upstream = draw(lab, seed, size), draw(lab, 10 + seed, 2.0)
            x, name = wrap(lab, kind, plain, grad=given), f"{sample} {given} {seed}"
            got = call(x)
            errors[f"output {name}"] = error(got, 2 * plain.double())
            (grad,), weight = gradients(module, got, (x,), upstream)
            products = plain.double() * upstream.double()
            errors[f"weight {name}"] = error(weight, products.sum(), products.abs().sum())
            errors[f"no input {name}"] = float(grad is not None)
    return verdict(errors)


LEARNING = False, True, False, True  # of the arguments: positional, positional, by name, by name


def judge_mixed(lab, kind):
    """Give frozen, trained and unused arguments: each trained and used one, and no other, gets its own gradient."""
    plains = [draw(lab, seed, 1.0) for seed in range(5)]

    def arguments():
        one, two, three, four = (wrap(lab, kind, x, grad=y) for x, y in zip(plains[:4], LEARNING, strict=True))
        return (one, two), {"first": three, "last": four, "unused": wrap(lab, kind, plains[4], grad=True)}

    samples, options = arguments()
    module, call = capture(lab, samples, options=options, allow_unused_input=True)
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plains = [draw(lab, 10 * seed + place, size) for place in range(5)]
        upstream, (samples, options) = draw(lab, 9 + seed, 2.0), arguments()
        got = call(*samples, **options)
        total = sum(n * x.double() for n, x in enumerate(plains[:4], 1))
        errors[f"output {seed}"] = error(got, 2 * total)
        grads, weight = gradients(module, got, (*samples, *options.values()), upstream)
        products = total * upstream.double()
        errors[f"weight {seed}"] = error(weight, products.sum(), products.abs().sum())
        for place, grad in enumerate(grads):
            if place < len(LEARNING) and LEARNING[place]:
                errors[f"input {place} {seed}"] = error(grad, 2 * (place + 1) * upstream.double())
            else:
                errors[f"no input {place} {seed}"] = float(grad is not None)
    return verdict(errors)


def judge_outputs(lab, kind):
    """Return several outputs, one of them frozen and one None, and give gradients to some."""
    made = quantizer(lab, kind) or (lambda x: x)
    scales = {"one": 1, "frozen": 3, "other": 5}

    def finish(total):
        return {"one": made(total), "nothing": None, "frozen": 3 * total.detach(), "other": made(5 * total)}

    module, call = capture(lab, (draw(lab, 0, 1.0).requires_grad_(),), finish=finish)
    errors = {}
    for seed, given in enumerate((("one", "other"), ("other", "frozen"), ("one",)), 1):
        plain, upstreams = (
            draw(lab, seed, 0.5 + seed),
            [draw(lab, 10 * seed + place, 2.0) for place in range(len(given))],
        )
        x, module.weight.grad = plain.clone().requires_grad_(), None
        got = call(x)
        for name, scale in scales.items():
            errors[f"{name} {seed}"] = error(got[name], 2 * scale * plain.double())
        errors[f"nothing {seed}"] = float(got["nothing"] is not None)
        lab.torch.autograd.backward([got[name] for name in given], [wrap(lab, kind, x) for x in upstreams])
        upstream = sum(x.double() * scales[name] * (name != "frozen") for name, x in zip(given, upstreams, strict=True))
        errors[f"input {seed}"] = error(x.grad, 2 * upstream)
        products = plain.double() * upstream
        errors[f"weight {seed}"] = error(module.weight.grad, products.sum(), products.abs().sum())
    return verdict(errors)


def judge_refilled(lab, kind, *, within=False):
    """Give the same tensors each time, filled anew, as arguments and as a gradient; and the arguments before backward.

    What is filled within a quantized tensor is its data and scale, as quantize_() does: its version stays as it was.
    """

    def fill(x, values):
        new = wrap(lab, kind if x is not one else "plain", values)
        with lab.torch.no_grad():
            for old, filled in zip(*map(buffers, (x, new)), strict=True) if within else [(x, values)]:
                old.copy_(filled)

    samples = draw(lab, 0, 1.0).requires_grad_(), wrap(lab, kind, draw(lab, 0, 1.0))
    made = quantizer(lab, kind) or (lambda x: x)

    class ReadAgain(lab.torch.autograd.Function):
        """Multiply by the second argument, which backward reads again."""

        @staticmethod
        def forward(_context, total):
            return total * (samples[1] * 1)

        @staticmethod
        def backward(_context, upstream):
            return upstream * (samples[1] * 1)

    module, call = capture(lab, samples, finish=lambda total: made(ReadAgain.apply(total)))
    one, two, back = draw(lab, 1, 1.0).requires_grad_(), *(wrap(lab, kind, draw(lab, 1, 1.0)) for _ in range(2))
    errors = {}
    for seed, size in ((2, 3.0), (3, 0.25), (4, 20.0)):
        plain, upstream = draw(lab, seed, size), draw(lab, 10 + seed, size)
        for x, values in ((one, plain), (two, plain), (back, upstream)):
            fill(x, values)
        got = call(one, two)
        errors[f"output {seed}"] = error(got, 2 * 3 * plain.double() ** 2)
        for x in (one, two):  # they are the caller's again
            fill(x, draw(lab, 20 + seed, 50.0))
        grad, weight = lab.torch.autograd.grad(got, (one, module.weight), back)
        errors[f"input {seed}"] = error(grad, 2 * plain.double() * upstream.double())
        products = 3 * plain.double() ** 2 * upstream.double()
        errors[f"weight {seed}"] = error(weight, products.sum(), products.abs().sum())
    return verdict(errors)


def judge_own(lab, kind):
    """See that outputs and gradients are the caller's own: what he sets on one is not seen at the next."""
    module, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0), grad=True),), finish=quantizer(lab, kind))
    errors, found = {}, []
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain, upstream = draw(lab, seed, size), draw(lab, 10 + seed, 2.0)
        x = wrap(lab, kind, plain, grad=True)
        with lab.torch.no_grad():
            frozen = call(x)
        got = call(x)
        errors[f"output {seed}"] = error(got, 2 * plain.double())
        grad, weight = lab.torch.autograd.grad(got, (x, module.weight), wrap(lab, kind, upstream))
        errors[f"input {seed}"] = error(grad, 2 * upstream.double())
        errors[f"flags {seed}"] = float(frozen.requires_grad or grad.requires_grad or not got.requires_grad)
        frozen.requires_grad_()
        grad.requires_grad_()
        products = plain.double() * upstream.double()
        found.append((got, frozen, grad, weight, products))
    names = "output", "frozen", "input"
    errors |= {f"same {name}": float(one is two) for name, one, two in zip(names, *found, strict=False)}
    for number, (*_, weight, products) in enumerate(found, 1):  # the first is not overwritten by the second
        errors[f"weight {number}"] = error(weight, products.sum(), products.abs().sum())
    return verdict(errors)


def judge_not_cloned(lab, kind, *, by_option):
    """Have no gradient cloned, by the option or by a parameter's mark: each pass gives what lies in the graph."""
    module, sample = module_class(lab.torch)(lab.device), wrap(lab, kind, draw(lab, 0, 1.0), grad=True)
    module.weight.skip_backward_post_hook = not by_option
    call = lab.graph.make_graphed_callables(module, (sample,), clone_param_grads_on_return=not by_option)
    errors, places = {}, set()
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain, upstream = draw(lab, seed, size), draw(lab, 10 + seed, 2.0)
        x = wrap(lab, kind, plain, grad=True)
        grad, weight = lab.torch.autograd.grad(call(x), (x, module.weight), upstream)
        products = plain.double() * upstream.double()
        errors[f"input {seed}"] = error(grad, 2 * upstream.double())
        errors[f"weight {seed}"] = error(weight, products.sum(), products.abs().sum())
        places.add((grad.data_ptr(), weight.data_ptr()))
    errors["clones"] = float(len(places) - 1)
    return verdict(errors)


def judge_not_tensors(lab, kind):
    """Give a number and None by name, which a graph in inference may have: each call's are objects of their own."""

    def options(plain):
        return {"number": float("2.5"), "nothing": None, "values": wrap(lab, kind, plain)}

    sample = wrap(lab, kind, draw(lab, 0, 1.0))
    _, call = capture(lab, (sample,), training=False, options=options(draw(lab, 1, 1.0)))
    errors = {}
    for seed, size in ((2, 3.0), (4, 0.25)):
        one, two = draw(lab, seed, size), draw(lab, seed + 1, size)
        with lab.torch.no_grad():
            got = call(wrap(lab, kind, one), **options(two))
        errors[f"call {seed}"] = error(got, 2 * (one.double() + 2 * 2.5 + 4 * two.double()))
    return verdict(errors)


def judge_shared(lab, kind):
    """Give one tensor as two arguments, and the sample of one argument as the other."""
    samples = tuple(wrap(lab, kind, draw(lab, seed, 1.0)) for seed in range(2))
    _, call = capture(lab, samples)
    one, two, three = (draw(lab, seed, size) for seed, size in ((2, 3.0), (3, 0.25), (4, 20.0)))
    x, y, z = (wrap(lab, kind, plain) for plain in (one, two, three))
    one, two, three = one.double(), two.double(), three.double()
    errors = {"apart": error(call(x, y), 2 * (one + 2 * two))}
    errors["second as first"] = error(call(samples[1], z), 2 * (two + 2 * three))
    errors["second itself"] = error(call(y, samples[1]), 2 * (two + 2 * three))
    errors["both"] = error(call(x, x), 2 * (one + 2 * one))
    return verdict(errors)


def changed(x, **fields):
    """Return a float8 tensor that differs from another in these fields; older releases name the device among them."""
    return type(x)(**{"shape": x.shape, "dtype": x.dtype, "device": x.device} | x.get_metadata() | fields)


def judge_neighbour(lab, kind):
    """Give what lies in the sample's storage, behind it."""
    storage = lab.torch.zeros(2, *SHAPE, device=lab.device, dtype=lab.torch.uint8 if kind == "float8" else None)
    first = wrap(lab, kind, draw(lab, 0, 1.0))

    def placed(x, place):
        if kind == "plain":
            return storage[place].copy_(x)
        return changed(x, data=storage[place].copy_(x.get_metadata()["data"]))

    _, call = capture(lab, (placed(first, 0),))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain = draw(lab, seed, size)
        errors[f"call {seed}"] = error(call(placed(wrap(lab, kind, plain), 1)), 2 * plain.double())
    return verdict(errors)


def judge_rescaled(lab):
    """Give the sample's own data with another scale."""
    plain = draw(lab, 0, 1.0)
    sample = wrap(lab, "float8", plain)
    size = sample.get_metadata()["fp8_scale_inv"].clone()
    _, call = capture(lab, (sample,))
    errors = {}
    for scale in (3.0, 0.25):
        given = changed(sample, fp8_scale_inv=scale * size)
        errors[f"scale {scale}"] = error(call(given), 2 * scale * plain.double())
    return verdict(errors)


def judge_dtype(lab, kind):
    """Capture in one dtype, and call in another, whose values the first one holds."""
    _, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0)),))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain = draw(lab, seed, size, SHAPE, "bfloat16")
        errors[f"call {seed}"] = error(call(wrap(lab, kind, plain)), 2 * plain.double())
    return verdict(errors)


def judge_nominal(lab):
    """Give a plain float32 sample's place to values that bf16, which the quantized tensor calls its dtype, lacks."""
    _, call = capture(lab, (draw(lab, 0, 1.0),))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain, more = draw(lab, seed, size), 1 + 2.0**-10
        x = wrap(lab, "float8", plain.bfloat16())
        x = changed(x, fp8_scale_inv=more * x.get_metadata()["fp8_scale_inv"])
        errors[f"call {seed}"] = error(call(x), 2 * more * plain.double())
    return verdict(errors)


def judge_strided(lab, kind):
    """Capture with columns of a larger tensor, call with such and with others, and give an expanded gradient."""
    columns = SHAPE[-1]
    wide = (*SHAPE[:-1], 2 * columns)
    module, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0, wide))[..., :columns],))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25), (3, 20.0)):
        plain = draw(lab, seed, size, wide)
        plain, x = plain[..., columns:], wrap(lab, kind, plain)[..., columns:]
        if seed == 1:
            x = wrap(lab, kind, plain.contiguous())
        got, module.weight.grad = call(x), None
        errors[f"call {seed}"] = error(got, 2 * plain.double())
        got.sum().backward()
        errors[f"weight {seed}"] = error(module.weight.grad, plain.double().sum(), plain.double().abs().sum())
    return verdict(errors)


def judge_parameters(lab, kind):
    """Give parameters where the samples were parameters, frozen and trained: a weight may be an argument."""

    def parameter(plain, *, grad):
        return lab.torch.nn.Parameter(wrap(lab, kind, plain), requires_grad=grad)

    samples = (parameter(draw(lab, seed, 1.0), grad=bool(seed)) for seed in range(2))
    module, call = capture(lab, tuple(samples))
    errors = {}
    for seed, size in ((2, 3.0), (4, 0.25)):
        plains, upstream = [draw(lab, seed + more, size) for more in range(2)], draw(lab, 10 + seed, 2.0)
        given = [parameter(plain, grad=bool(place)) for place, plain in enumerate(plains)]
        got, total = call(*given), plains[0].double() + 2 * plains[1].double()
        errors[f"output {seed}"] = error(got, 2 * total)
        (frozen, trained), weight = gradients(module, got, given, upstream)
        products = total * upstream.double()
        errors[f"weight {seed}"] = error(weight, products.sum(), products.abs().sum())
        errors[f"trained {seed}"] = error(trained, 4 * upstream.double())
        errors[f"no frozen {seed}"] = float(frozen is not None)
    return verdict(errors)


def judge_broadcast(lab):
    """Give plain tensors of one row, and of one value, where the sample has many: each is repeated."""
    sample = draw(lab, 0, 1.0).requires_grad_()
    module, call = capture(lab, (sample,))
    errors = {}
    for seed, shape in enumerate(((1, *SHAPE[1:]), SHAPE[-1:], ()), 1):
        plain, upstream = draw(lab, seed, 3.0, SHAPE)[tuple(slice(0, 1) for _ in SHAPE)], draw(lab, 10 + seed, 2.0)
        plain = draw(lab, seed, 3.0, shape) if shape else plain.reshape(())
        x, module.weight.grad = plain.clone().requires_grad_(), None
        got = call(x)
        errors[f"output {seed}"] = error(got, 2 * plain.double().expand(SHAPE))
        got.backward(upstream)
        back = upstream.double()
        errors[f"input {seed}"] = error(x.grad, 2 * back.sum_to_size(shape), 2 * back.abs().sum_to_size(shape).max())
        products = plain.double() * back
        errors[f"weight {seed}"] = error(module.weight.grad, products.sum(), products.abs().sum())
    return verdict(errors)


def judge_chain(lab, kind, more):
    """Graph two modules, of which the second takes what the first gives, and go back through both."""
    make, made = module_class(lab.torch), quantizer(lab, kind)
    modules = make(lab.device, made), make(lab.device)
    samples = (draw(lab, 0, 1.0).requires_grad_(),), (wrap(lab, kind, draw(lab, 1, 1.0), grad=True),)
    one, two = lab.graph.make_graphed_callables(modules, samples, **more)
    errors = {}
    for seed, size in ((2, 3.0), (3, 0.25)):
        plain, upstream = draw(lab, seed, size), draw(lab, 10 + seed, 2.0)
        x = plain.clone().requires_grad_()
        got = two(one(x))
        errors[f"output {seed}"] = error(got, 4 * plain.double())
        grads = lab.torch.autograd.grad(got, (x, modules[0].weight, modules[1].weight), upstream)
        errors[f"input {seed}"] = error(grads[0], 4 * upstream.double())
        products = 2 * plain.double() * upstream.double()
        for name, grad in (("first weight", grads[1]), ("second weight", grads[2])):
            errors[f"{name} {seed}"] = error(grad, products.sum(), products.abs().sum())
    return verdict(errors)


def judge_again(lab, kind):
    """Give a callable what it gave."""
    _, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0)),), finish=quantizer(lab, kind), training=False)
    errors = {}
    with lab.torch.no_grad():
        for seed, size in ((1, 3.0), (2, 0.25)):
            plain = draw(lab, seed, size)
            errors[f"call {seed}"] = error(call(call(wrap(lab, kind, plain))), 4 * plain.double())
    return verdict(errors)


def judge_capture(lab, kind, passes, more):
    """Capture with other options, go back as often as they allow, and call the module in the other mode, too."""
    hooks = []
    hooked = {f"{when}_warmup_hook": functools.partial(hooks.append, when) for when in ("pre", "post")}
    known = inspect.signature(lab.graph.make_graphed_callables).parameters
    hooked = {name: hook for name, hook in hooked.items() if name in known}  # releases before 2.14 have none
    module, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0), grad=True),), **hooked, **more)
    errors = {"hooks": float(hooks != [name.partition("_")[0] for name in hooked])}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain = draw(lab, seed, size)
        x = wrap(lab, kind, plain, grad=True)
        got = call(x)
        errors[f"output {seed}"] = error(got, 2 * plain.double())
        for number in range(passes):
            upstream = draw(lab, 10 * seed + number, 2.0)
            grads = lab.torch.autograd.grad(got, (x, module.weight), upstream, retain_graph=True)
            products = plain.double() * upstream.double()
            errors[f"input {seed} {number}"] = error(grads[0], 2 * upstream.double())
            errors[f"weight {seed} {number}"] = error(grads[1], products.sum(), products.abs().sum())
        module.eval()
        errors[f"eager {seed}"] = error(call(x), 2 * plain.double())
        module.train()
    return verdict(errors)


def refused(kinds, function, *given, **options):
    """Return whether a call raises one of these."""
    try:
        function(*given, **options)
    except kinds:
        return True
    return False


def judge_other_shape(lab, kind):
    """Give what does not fit the sample: it is refused, not passed over."""
    _, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0)),))
    shapes = (2, 64, 16), (3, 64, 160)
    found = [refused((RuntimeError, ValueError), call, wrap(lab, kind, draw(lab, 1, 3.0, shape))) for shape in shapes]
    return all(found), {"measured": found, "tolerance": [True, True], "unit": "refused"}


def judge_missing(lab):
    """Leave out a keyword argument of the capture, and the flag that caching asks for."""
    x = draw(lab, 0, 1.0)
    _, named = capture(lab, (x,), options={"other": x.clone()})
    _, cached = capture(lab, (x,), cache_quantized_params=True)
    found = [refused(TypeError, named, x), refused(ValueError, cached, x)]
    return all(found), {"measured": found, "tolerance": [True, True], "unit": "refused"}


def judge_other_mode(lab, kind):
    """Call the module in the mode that was not captured, between a captured call and its backward pass."""
    module, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0), grad=True),))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain, upstream = draw(lab, seed, size), draw(lab, 10 + seed, 2.0)
        x, module.weight.grad = wrap(lab, kind, plain, grad=True), None
        got = call(x)
        module.eval()
        for shape in (SHAPE, (3, 5)):
            other = draw(lab, 20 + seed, 5.0, shape)
            errors[f"eager {seed} {shape}"] = error(call(wrap(lab, kind, other)), 2 * other.double())
        module.train()
        got.backward(upstream)
        errors |= gradient_errors(module, x, plain, upstream, seed)
    return verdict(errors)


def judge_waits(lab, kind):
    """See that a call and its backward pass ask the host for no value of a tensor."""
    aten = lab.torch.ops.aten
    answered = aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default  # noqa: SLF001
    _, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0), grad=True),), finish=quantizer(lab, kind))
    given = [wrap(lab, kind, draw(lab, seed, 3.0), grad=True) for seed in (1, 2)]
    upstream = [wrap(lab, kind, draw(lab, 10 + seed, 2.0)) for seed in (1, 2)]
    waits = []
    for x, back in zip(given, upstream, strict=True):
        got, seen = operators(lab, call, x)
        seen += operators(lab, got.backward, back)[1]
        waits += [str(one) for one in seen if one in answered]
    return not waits, {"measured": waits, "unit": "operators whose answer the host waits for"}


def judge_freed(lab, kind):
    """See that reset() frees what the graph read, when nobody else has it."""
    weak = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
    sample = wrap(lab, kind, draw(lab, 0, 1.0), grad=True)
    _, call = capture(lab, (sample,))
    call(wrap(lab, kind, draw(lab, 1, 3.0), grad=True)).backward(draw(lab, 2, 2.0))
    watched = [weak(x.untyped_storage()) for x in buffers(sample)]
    call.reset()
    del sample
    gc.collect()
    kept = sum(not one.expired() for one in watched)
    return not kept, {"measured": kept, "tolerance": 0, "unit": f"of {len(watched)} tensors kept after reset()"}


def judge_reset(lab):
    """Reset a callable between a call and its backward pass: nothing of it can be replayed."""
    _, call = capture(lab, (draw(lab, 0, 1.0).requires_grad_(),))
    got = call(draw(lab, 1, 3.0).requires_grad_())
    call.reset()
    found = [refused(RuntimeError, got.backward, draw(lab, 2, 2.0)), refused(RuntimeError, call, draw(lab, 1, 3.0))]
    return all(found), {"measured": found, "tolerance": [True, True], "unit": "refused"}


CYCLES = 2**26  # for which a GPU is kept busy: some 35 ms


def judge_stream(lab, kind, *, event):
    """Replay on another stream, where either one is late: each waits for the other, or for the graph's event alone."""
    cuda, sample = lab.torch.cuda, wrap(lab, kind, draw(lab, 0, 1.0), grad=True)
    side, main = cuda.Stream(), cuda.current_stream()
    options = {"cuda_graph_stream": side}
    if event:
        options["cuda_graph_event"] = cuda.Event(external=True)

    def mark(result):
        if event:  # the graph goes on for long after what it gives is there
            options["cuda_graph_event"].record()
            cuda._sleep(CYCLES)  # noqa: SLF001 - nothing else is as long
        return result

    sample.register_post_accumulate_grad_hook(lambda _: mark(None))
    _, call = capture(lab, (sample,), finish=mark, num_warmup_iters=1)
    errors, running = {}, {"forward": 0, "backward": 0}

    copy = lab.torch.Tensor.copy_

    def slow_copy(tensor, *given):
        """Copy when the stream has been busy for a while: who does not wait for the copy is there before it."""
        cuda._sleep(CYCLES)  # noqa: SLF001
        return copy(tensor, *given)

    def delayed(late, name, new, old, function, *given, **more):
        """Fill a tensor and call, while a stream is busy; copy what is given, and see whether the graph is at work."""
        cuda.synchronize()
        with cuda.stream(late):
            cuda._sleep(4 * CYCLES)  # noqa: SLF001 - for longer than any copy takes
        with lab.torch.no_grad():
            for one, other in zip(*map(buffers, (old, new)), strict=True):  # who does not wait for it reads the old one
                one.copy_(other)
        with unittest.mock.patch.object(lab.torch.Tensor, "copy_", slow_copy):
            given = function(*given, **more)
        seen = (given[0] if name == "backward" else given).detach().clone()
        main.synchronize()
        running[name] += not side.query()
        side.synchronize()
        return given, seen

    for seed, late in enumerate((main, side), 1):
        plain, upstream = draw(lab, seed, 2.0 + seed), draw(lab, 10 + seed, 2.0)
        x, filled, back = wrap(lab, kind, draw(lab, 20, 1.0), grad=True), wrap(lab, kind, plain), draw(lab, 21, 1.0)
        got, seen = delayed(late, "forward", filled, x, call, x, **options)
        errors[f"output {seed}"] = error(seen, 2 * plain.double())
        _, seen = delayed(late, "backward", upstream, back, lab.torch.autograd.grad, got, x, back)
        errors[f"input {seed}"] = error(seen, 2 * upstream.double())
    errors |= {f"not on {name}": float(bool(number) != event) for name, number in running.items()}
    return verdict(errors)


def judge_caching(lab, kind):
    """See that the first callable of an FP8 region, and no other, says whether weights are quantized again."""
    manager = lab.graph.FP8GlobalStateManager

    def finish(total):
        flag = manager.get_skip_fp8_weight_update_tensor()
        return total if flag is None else total * (1 + flag)

    manager.reset()
    errors = {}
    try:
        sample = wrap(lab, kind, draw(lab, 0, 1.0))
        _, call = capture(lab, (sample,), finish=finish, cache_quantized_params=True)
        for seed, first in enumerate((False, True, False), 1):
            plain = draw(lab, seed, 1.0 + seed)
            expected = (2 if first else 4) * plain.double()
            with lab.graph.autocast(enabled=True):
                errors[f"first {seed}"] = error(call(wrap(lab, kind, plain), is_first_microbatch=first), expected)
                got = call(wrap(lab, kind, 2 * plain), is_first_microbatch=not first)
                errors[f"second {seed}"] = error(got, 2 * expected)
        plain = draw(lab, 4, 3.0)
        got = call(wrap(lab, kind, plain), is_first_microbatch=True)
        errors["outside"] = error(got, 4 * plain.double())
    finally:
        manager.reset()
    return verdict(errors)


def judge_scaling(lab):
    """See that the first callable of an FP8 region, and no other, updates the scales of backward when it went back."""
    manager, seen = lab.graph.FP8GlobalStateManager, []
    marks = {"scaling_fwd": 1.0, "scaling_bwd": 2.0}

    def largest(history):
        seen.append(float(history[0]))
        return history[0].clone()

    recipe = lab.graph.DelayedScaling(
        amax_compute_algo=largest, scaling_factor_compute_algo=lambda _amax, scale, _peak, _recipe: scale
    )
    meta = {"recipe": recipe, "fp8_group": None}
    for name, mark in marks.items():
        history = lab.torch.full((1, 1), mark, device=lab.device)
        meta[name] = types.SimpleNamespace(amax_history=history, scale=lab.torch.ones(1, device=lab.device))
    manager.reset()
    _, call = capture(lab, (draw(lab, 0, 1.0).requires_grad_(),))
    steps = []
    try:
        manager.add_fp8_tensors_to_global_buffer(meta)
        for region in (True, False):
            with lab.graph.autocast(enabled=True, recipe=recipe) if region else contextlib.nullcontext():
                one, two = (call(draw(lab, seed, 3.0).requires_grad_()) for seed in range(1, 3))
            for got in (one, two):
                for name, mark in marks.items():
                    meta[name].amax_history.fill_(mark)
                seen.clear()
                got.backward(draw(lab, 3, 2.0))
                steps.append([*seen])
    finally:
        manager.reset()
    expected = [[marks["scaling_bwd"]], [], [], []]
    return steps == expected, {"measured": steps, "tolerance": expected, "unit": "largest values of updated scales"}


def operators(lab, call, *given):
    """Return what a call gives, and the operators that it calls, also of quantized tensors as a whole."""
    seen = []

    class Watch(lab.torch.utils._python_dispatch.TorchDispatchMode):  # noqa: SLF001
        def __torch_dispatch__(self, function, classes, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        got = call(*given)
    return got, seen


def copies(lab, call, *given):
    """Return what a call gives, and how often it copies into a tensor."""
    got, seen = operators(lab, call, *given)
    return got, seen.count(lab.torch.ops.aten.copy_.default)


def judge_filled(lab, kind, *, alias):
    """Fill the sample in place, and call with it or with an alias of it: it is already where the graph reads it."""
    errors, counted = {}, 0
    learning = (False, False), (True, not alias), (False, alias)  # of the sample, and of what is given
    for trained, given in learning if kind in ("plain", "float8") else learning[:1]:
        sample = wrap(lab, kind, draw(lab, 0, 1.0), grad=trained)
        _, call = capture(lab, (sample,))
        for seed, size in ((1, 3.0), (2, 0.25)):
            plain, name = draw(lab, seed, size), f"{trained} {given} {seed}"
            with lab.torch.no_grad():
                sample.copy_(wrap(lab, kind, plain))
            x = sample.detach().requires_grad_(given) if alias else sample
            got, count = copies(lab, call, x)
            errors[f"call {name}"], counted = error(got, 2 * plain.double()), counted + count
            errors[f"sample {name}"] = error(sample, plain.double())
    ok, values = verdict(errors)
    free = alias and kind != "plain"  # no pointer tells that a wrapper is an alias
    values["measured"]["copies"] = counted
    return ok and (free or not counted), values


def judge_kept(lab, kind, given=None):
    """See that a call leaves what it is given as it was: its values, and all that a quantized tensor keeps."""
    _, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0)),))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain = draw(lab, seed, size)
        x = wrap(lab, given or kind, plain)
        before = {name: value.clone() if lab.torch.is_tensor(value) else value for name, value in vars(x).items()}
        call(x)
        errors[f"given {seed}"] = error(x, plain.double())
        errors[f"fields {seed}"] = float(before.keys() != vars(x).keys())
        for name, value in before.items():
            now = vars(x).get(name)
            same = (
                lab.torch.is_tensor(now) and lab.torch.equal(value, now) if lab.torch.is_tensor(value) else value == now
            )
            errors[f"{name} {seed}"] = float(not same)
    return verdict(errors)


def judge_let_go(lab, kind):
    """See that a call keeps nothing of its argument for backward, nor backward of its gradient."""
    weak = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
    _, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0)),), finish=quantizer(lab, kind))
    kept = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        x, back = wrap(lab, kind, draw(lab, seed, size)), wrap(lab, kind, draw(lab, 10 + seed, size))
        watched = [[weak(each.untyped_storage()) for each in buffers(one)] for one in (x, back)]
        got = call(x)
        del x
        gc.collect()
        kept[f"argument {seed}"] = sum(not one.expired() for one in watched[0])
        got.backward(back)
        del back
        gc.collect()
        kept[f"gradient {seed}"] = sum(not one.expired() for one in watched[1])
    return not any(kept.values()), {"measured": kept, "tolerance": 0, "unit": "tensors kept"}


def judge_empty(lab):
    """Call with a plain tensor without elements, whose pointer is 0 too, beside one with some."""
    _, call = capture(lab, (draw(lab, 0, 1.0, (1, 5))[:, :0], draw(lab, 0, 1.0, (1, 1))))
    plain = draw(lab, 1, 3.0, (1, 1))
    got = call(draw(lab, 1, 3.0, (1, 5))[:, :0], plain)
    return got.shape == (1, 0), {"measured": [*got.shape], "tolerance": [1, 0], "unit": "elements"}


def supported(lab, kind):
    """Return why a kind cannot be judged here, or nothing."""
    if kind == "identity" and not hasattr(lab.tensors, "IdentityQuantizer"):
        return "this release has no IdentityTensor"
    stood_in = isinstance(lab.te, unittest.mock.MagicMock)
    if kind in ("mxfp8", "nvfp4") and not stood_in and lab.torch.cuda.get_device_capability() < (10, 0):
        return "the compiled extension needs sm_100 to quantize to it"
    return None


def judge_kind(probe, lab, kind):
    """Judge everything that is asked of each kind."""
    role = "control" if kind == "plain" else "defect"
    functions = {"forward": (role, judge_forward), "backward": (role, judge_backward)}
    functions |= {
        "sample": ("control", functools.partial(judge_filled, alias=False)),
        "alias": ("control", functools.partial(judge_filled, alias=True)),
        "kept": ("control", judge_kept),
    }
    reason = supported(lab, kind)
    for name, (role, function) in functions.items():
        if reason:
            probe.check(f"{name}.{kind}", role, None, reason=reason)
        else:
            probe.judge(f"{name}.{kind}", role, function, lab, kind)


def judge_options(probe, lab):
    """Judge the other ways to call and to graph."""
    for kind, role in (("plain", "control"), ("float8", "defect")):
        probe.judge(f"inference.{kind}", role, judge_forward, lab, kind, SHAPE, "float32", False)
        probe.judge(f"odd.{kind}", role, judge_forward, lab, kind, (3, 5))
        probe.judge(f"bfloat16.{kind}", role, judge_forward, lab, kind, SHAPE, "bfloat16")
        probe.judge(f"callables.{kind}", role, judge_callables, lab, kind)
        probe.judge(f"microbatches.{kind}", role, judge_microbatches, lab, kind, [1, 1, -1, -1], False)
        probe.judge(f"reused.{kind}", role, judge_microbatches, lab, kind, [1, -1, 1, -1], True)
        places = [place for place, one in enumerate(PLACES) if (one == "plain") == (kind == "plain")]
        probe.judge(f"arguments.{kind}", role, judge_arguments, lab, places)
    for kind in ("plain", "float8", "blockwise"):
        for given in ("plain", "float8", "blockwise"):
            role = "control" if "plain" in (kind, given) else "defect"
            probe.judge(f"gradient.{kind}.{given}", role, judge_gradient, lab, kind, given)
            if kind != given:
                probe.judge(f"crossed.{kind}.{given}", role, judge_crossed, lab, kind, given)
    probe.judge("crossed.columnwise.float8", "defect", judge_crossed, lab, "float8_columnwise", "float8")
    probe.judge("crossed.float8.columnwise", "defect", judge_crossed, lab, "float8", "float8_columnwise")
    for given, role in (("plain", "control"), ("float8", "defect"), ("float8_columnwise", "defect")):
        probe.judge(f"columns.{given}", role, judge_columns, lab, given)
    probe.judge("other_scale", "defect", judge_scale, lab)
    probe.judge("rescaled", "defect", judge_rescaled, lab)
    probe.judge("empty", "control", judge_empty, lab)
    probe.judge("nominal", "control", judge_nominal, lab)
    probe.judge("broadcast", "control", judge_broadcast, lab)
    probe.judge("kept.columnwise_given", "control", judge_kept, lab, "float8", "float8_columnwise")
    probe.judge("kept.columnwise_sample", "control", judge_kept, lab, "float8_columnwise", "float8")


def judge_contract(probe, lab):
    """Judge what else a graphed callable promises."""
    once, twice = {"num_warmup_iters": 1}, {"num_warmup_iters": 4, "retain_graph_in_backward": True}
    once |= {"pool": lab.graph.graph_pool_handle(), "enabled": True}
    in_order = {"_order": [1, 2, -2, -1], "_num_layers_per_chunk": [1, 1]}
    functions = {
        "learning": (judge_learning,),
        "mixed": (judge_mixed,),
        "outputs": (judge_outputs,),
        "refilled": (judge_refilled,),
        "refilled_within": (functools.partial(judge_refilled, within=True),),
        "not_tensors": (judge_not_tensors,),
        "shared": (judge_shared,),
        "neighbour": (judge_neighbour,),
        "other_dtype": (judge_dtype,),
        "strided": (judge_strided,),
        "parameters": (judge_parameters,),
        "chain": (judge_chain, {}),
        "chain_in_order": (judge_chain, in_order),
        "again": (judge_again,),
        "captured_once": (judge_capture, 1, once),
        "captured_twice": (judge_capture, 2, twice),
        "other_shape": (judge_other_shape,),
        "other_mode": (judge_other_mode,),
    }
    for kind, role in (("plain", "control"), ("float8", "defect")):
        for name, (function, *given) in functions.items():
            probe.judge(f"{name}.{kind}", role, function, lab, kind, *given)
        judge_newer(probe, lab, kind, role)
        probe.judge(f"waits.{kind}", "control", judge_waits, lab, kind)
        probe.judge(f"let_go.{kind}", "control", judge_let_go, lab, kind)
        if "release_static_state" in inspect.getsource(lab.graph):
            probe.judge(f"freed.{kind}", "control", judge_freed, lab, kind)
        else:
            probe.check(f"freed.{kind}", "control", None, reason="this release's reset() frees the graphs alone")
    probe.judge("missing", "control", judge_missing, lab)
    probe.judge("reset", "control", judge_reset, lab)
    probe.judge("scaling", "control", judge_scaling, lab)


def judge_newer(probe, lab, kind, role):
    """Judge what not every release has."""
    cloned = "clone_param_grads_on_return" in inspect.signature(lab.graph.make_graphed_callables).parameters
    source, events = inspect.getsource(lab.graph), inspect.signature(lab.torch.cuda.Event).parameters
    functions = {
        "own": (cloned, judge_own, {}),
        "not_cloned": (cloned, judge_not_cloned, {"by_option": True}),
        "not_cloned_parameter": (cloned, judge_not_cloned, {"by_option": False}),
        "stream": ("cuda_graph_stream" in source, judge_stream, {"event": False}),
        "event": ("cuda_graph_event" in source and "external" in events, judge_stream, {"event": True}),
        "caching": (hasattr(lab.graph, "autocast"), judge_caching, {}),
    }
    for name, (has, function, options) in functions.items():
        if has:
            probe.judge(f"{name}.{kind}", role, functools.partial(function, **options), lab, kind)
        else:
            probe.check(f"{name}.{kind}", role, None, reason="this release, or PyTorch, has no such option")


def figure(probe, lab):
    """Capture x * 2 with 1.0, call it with 3.0, and say what that gives over 6.0."""
    for kind in ("plain", "float8"):
        _, call = capture(lab, (wrap(lab, kind, lab.torch.full(SHAPE, 1.0, device=lab.device)),))
        got = call(wrap(lab, kind, lab.torch.full(SHAPE, 3.0, device=lab.device)))
        name = "second_call_over_expected" + "_plain" * (kind == "plain")
        probe.say("FIGURE", name=name, value=round(float(got.detach().mean()) / 6, 6), unit="1", spread=None)


def judge(probe, target):
    """Judge every kind of input on one target."""
    import torch

    device, evidence, name = "cpu", "traced", "none"
    if target != "cpu":
        if not torch.cuda.is_available() or target != "sm_{}{}a".format(*torch.cuda.get_device_capability()):
            raise NotImplementedError(f"no {target} GPU here; --target cpu needs none")
        device, evidence, name = "cuda", "executed", torch.cuda.get_device_name()
    lab = load(torch, device)
    probe.say("TARGET", target=target, evidence=evidence, device=name)
    list(map(probe.upstream, [lab.graph, sys.modules[f"{TE}.quantized_tensor"]]))
    for kind in ("plain", *KINDS):
        judge_kind(probe, lab, kind)
    judge_options(probe, lab)
    judge_contract(probe, lab)
    if not probe.only:
        figure(probe, lab)


if __name__ == "__main__":
    Probe().run(judge)
