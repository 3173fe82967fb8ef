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

Scope: make_graphed_callables with each class of quantized tensors that a release has (KINDS), as arguments, keyword
arguments or in containers, in training and inference, alone and in several callables and microbatches; outputs and
gradients. What is right already has to remain so: plain tensors, the sample itself when it was filled in place,
aliases of it, mixtures of plain and quantized tensors and of classes, and that nothing is copied onto itself.

`traced` (cpu): graph.py and the tensor classes are real. The compiled extension is a stand-in that quantizes and
dequantizes by PyTorch operators in each class's format, and allocates (make_empty); so is the Python that only the
modules, operations, attention, ONNX and C++ wrappers need, of which graph.py asks for classes. A CUDA graph is a list
of the operators called during capture, and its replay calls them again on the same tensors.
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

import enum, functools, importlib.util, math, types, typing, unittest.mock

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
    scale = quantizer.scale if type(quantizer).__name__ == "Float8Quantizer" else peak / x.float().abs().amax().clamp(min=2**-100)  # noqa: E501 - one value  # fmt: skip
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
    torch, shape = sys.modules["torch"], tuple(x.shape)
    dtype = sys.modules[f"{TE}.constants"].TE_DType_To_Torch[dtype]
    name = type(x).__name__.removesuffix("Storage")
    if name == "NVFP4Tensor":
        data = x._rowwise_data.long()  # noqa: SLF001 - what it stores
        codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
        values, (height, width) = levels(data.device)[0][codes & 7] * (1 - 2 * (codes >> 3)), (1, 16)
        scale = x._rowwise_scale_inv.view(torch.float8_e4m3fn).float() * x._amax_rowwise / (6 * 448)  # noqa: SLF001 - what it stores
        return flattened(tiles(values, height, width) * scale[:, None, :, None], shape).to(dtype)
    form = getattr(torch, FORMATS[sys.modules["transformer_engine_torch"].DType(int(x._fp8_dtype)).name][0])  # noqa: SLF001 - what it stores
    if name == "Float8Tensor":
        return (x._data.view(form).float() * x._scale_inv).to(dtype)  # noqa: SLF001 - what it stores
    scale = torch.exp2(x._rowwise_scale_inv.float() - 127)  # MXFP8's  # noqa: SLF001 - what it stores
    return flattened(tiles(x._rowwise_data.view(form).float(), 1, 32) * scale[:, None, :, None], shape).to(dtype)  # noqa: SLF001 - what it stores


def transpose(data, _dtype, out=None):
    """Return FP8 data with its last dimension first."""
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned)


def make_empty(quantizer, shape, *, dtype, device=None, requires_grad=False, pin_memory=False):  # noqa: PLR0913 - as it is called
    """Allocate a tensor of a quantizer's class."""
    del pin_memory
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


class Tape:
    """A graph: the operators called during capture, with the tensors that they were given and that they gave."""

    def __init__(self):
        """Begin with nothing."""
        self.calls = []

    def replay(self):
        """Call the operators again, and write what they give over what they gave."""
        torch = sys.modules["torch"]
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():  # noqa: SLF001
            for function, args, options, given in self.calls:
                for old, new in zip(buffers(given), buffers(function(*args, **options)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def reset(self):
        """Forget the operators."""
        self.calls.clear()


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
            self.tape.calls.append((function, args, kwargs or {}, given))
            return given

    @contextlib.contextmanager
    def capture(tape, **_options):
        with Recorder(tape):
            yield

    cuda, stream = torch.cuda, types.SimpleNamespace()
    cuda.CUDAGraph, cuda.graph, cuda.Stream, cuda.current_stream = Tape, capture, lambda: stream, lambda: stream
    cuda.stream, cuda.synchronize = contextlib.nullcontext, lambda: None
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


def quantizer(lab, kind):  # noqa: PLR0911 - one for each class
    """Return the quantizer of a kind; None where the release has none, or the kind is plain."""
    torch, tensors, dtypes = lab.torch, lab.tensors, lab.te.DType
    usage = {"rowwise": True, "columnwise": kind == "float8_columnwise"}
    form = dtypes.kFloat8E5M2 if kind == "float8_e5m2" else dtypes.kFloat8E4M3
    if kind == "plain":
        return None
    if kind == "float8_delayed":
        scale, amax = torch.full((1,), 16.0, device=lab.device), torch.zeros(1, device=lab.device)
        return tensors.Float8Quantizer(scale, amax, form, **usage)
    if kind.startswith("float8"):
        return tensors.Float8CurrentScalingQuantizer(form, torch.device(lab.device), **usage)
    if kind.startswith("blockwise"):
        return tensors.Float8BlockQuantizer(form, block_scaling_dim=1 if kind == "blockwise_1d" else 2, **usage)
    if kind == "mxfp8":
        return tensors.MXFP8Quantizer(form, **usage)
    if kind == "nvfp4":
        return tensors.NVFP4Quantizer(dtypes.kFloat4E2M1, **usage)
    return tensors.IdentityQuantizer(**usage)


@functools.cache
def module_class(torch):
    """Return the class of the modules that are graphed: a weighted sum of all tensors given, quantized where asked."""

    class Weighted(torch.nn.Module):
        """Weight the n-th tensor by n, and the sum by a parameter."""

        def __init__(self, device, quantizer=None):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((1,), 2.0, device=device))
            self.quantizer = quantizer

        def forward(self, *args, **options):
            """Return the weighted sum."""
            places = enumerate(torch.utils._pytree.tree_leaves((args, options)), 1)  # noqa: SLF001
            total = sum(x * place for place, x in places) * self.weight
            return self.quantizer(total) if self.quantizer else total

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


def capture(lab, samples, *, output=None, training=True, options=None, **more):
    """Return a module and its graphed callable."""
    module = module_class(lab.torch)(lab.device, output).train(training)
    if options is not None:
        more["sample_kwargs"] = options
    return module, lab.graph.make_graphed_callables(module, samples, **more)


def error(got, expected, size=None):
    """Return the largest difference over the largest size."""
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


def judge_backward(lab, kind):
    """Compare the gradients of the input and of the weight, whose gradient is the input's product with another."""
    module, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0), grad=True),))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain, upstream = draw(lab, seed, size), draw(lab, 10 + seed, 2.0)
        x, module.weight.grad = wrap(lab, kind, plain, grad=True), None
        call(x).backward(upstream)
        products = plain.double() * upstream.double()
        errors[f"input {seed}"] = error(x.grad, 2 * upstream.double())
        errors[f"weight {seed}"] = error(module.weight.grad, products.sum(), products.abs().sum())
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
    module, call = capture(lab, (sample,), output=quantizer(lab, kind))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain, upstream = draw(lab, seed, size), draw(lab, 10 + seed, size)
        x, module.weight.grad = plain.clone().requires_grad_(), None
        got = call(x)
        errors[f"output {seed}"] = error(got, 2 * plain.double())
        lab.torch.autograd.backward((got,), (wrap(lab, given, upstream),))
        products = plain.double() * upstream.double()
        errors[f"input {seed}"] = error(x.grad, 2 * upstream.double())
        errors[f"weight {seed}"] = error(module.weight.grad, products.sum(), products.abs().sum())
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
            products = plain.double() * upstream.double()
            errors[f"input {step}"] = error(x.grad, 2 * upstream.double())
            errors[f"weight {step}"] = error(module.weight.grad, products.sum(), products.abs().sum())
    return verdict(errors)


def judge_crossed(lab, kind, given):
    """Capture with one kind, and call with another."""
    _, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0)),))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain = draw(lab, seed, size)
        errors[f"call {seed}"] = error(call(wrap(lab, given, plain)), 2 * plain.double())
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


def copies(lab, call, *given):
    """Return what a call gives, and how often it copies into a tensor."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Counter(TorchDispatchMode):
        """Count copies, also of quantized tensors as a whole."""

        def __torch_dispatch__(self, function, classes, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Counter():
        got = call(*given)
    return got, seen.count(lab.torch.ops.aten.copy_.default)


def judge_filled(lab, kind, *, alias):
    """Fill the sample in place, and call with it or with an alias of it: it is already where the graph reads it."""
    sample = wrap(lab, kind, draw(lab, 0, 1.0))
    _, call = capture(lab, (sample,))
    errors, counted = {}, 0
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain = draw(lab, seed, size)
        sample.copy_(wrap(lab, kind, plain))
        got, count = copies(lab, call, sample.detach() if alias else sample)
        errors[f"call {seed}"], counted = error(got, 2 * plain.double()), counted + count
        errors[f"sample {seed}"] = error(sample, plain.double())
    ok, values = verdict(errors)
    free = alias and kind != "plain"  # no pointer tells that a wrapper is an alias
    values["measured"]["copies"] = counted
    return ok and (free or not counted), values


def judge_kept(lab, kind):
    """See that a call leaves what it is given as it was."""
    _, call = capture(lab, (wrap(lab, kind, draw(lab, 0, 1.0)),))
    errors = {}
    for seed, size in ((1, 3.0), (2, 0.25)):
        plain = draw(lab, seed, size)
        x = wrap(lab, kind, plain)
        call(x)
        errors[f"given {seed}"] = error(x, plain.double())
    return verdict(errors)


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
    probe.judge("other_scale", "defect", judge_scale, lab)
    probe.judge("empty", "control", judge_empty, lab)


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
    if not probe.only:
        figure(probe, lab)


if __name__ == "__main__":
    Probe().run(judge)
