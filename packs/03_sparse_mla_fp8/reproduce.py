# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "annotated-types==0.7.0",
#   "apache-tvm-ffi==0.1.9",
#   "cloudpickle==3.1.2",
#   "einops==0.8.2",
#   "megatron-core==0.19.2",
#   "ml-dtypes==0.6.0",
#   "numpy==2.3.5",
#   "onnx==1.23.2",
#   "onnx-ir==1.1.0",
#   "onnxscript==0.7.2",
#   "packaging==26.3",
#   "protobuf==7.36.2",
#   "psutil==7.2.2",
#   "pydantic==2.12.5",
#   "pydantic-core==2.41.5",
#   "tilelang==0.1.8",
#   "torch==2.11.0",
#   "torch-c-dlpack-ext==0.1.5",
#   "tqdm==4.70.1",
#   "transformer-engine==2.12.0",
#   "transformer-engine-cu13==2.12.0",
#   "triton==3.6.0",
#   "typing-extensions==4.16.0",
#   "typing-inspection==0.4.2",
#   "z3-solver==4.15.4.0",
# ]
# ///
"""Megatron's fused sparse MLA does not see that its inputs are FP8 behind Transformer Engine's wrapper.

Symptom: fused_sparse_mla_absorbed hands the kernel bf16 copies, twice the bytes, of a query and key that are stored in
FP8, and tells nobody. SparseMLA.apply hands the kernel a NULL pointer for each wrapped tensor of batch 2 or more whose
length is a multiple of 256 (others are copied for padding first, and dequantized thereby).

Cause: the dispatcher looks at .dtype. A wrapper (Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor) reports the dtype
that it stands for, and pointer 0. Its contiguous(), view(), slices and to() are wrappers again; permute() and unsqueeze()
are plain tensors, dequantized on the way. fix.patch asks Megatron's own is_float8tensor: the forward kernel reads E4M3
with one scale per tensor as it is stored, everything else is dequantized with a warning.

Scope: what reaches the kernels behind Megatron's two entry points. A dispatch is right where no pointer is null, and the
kernel gets no more bytes than are stored or the caller is told by a warning or a log record of Megatron's.
`traced` (cpu): tilelang.jit is replaced, so that launches are recorded and no kernel runs. Transformer Engine's Python is
real; transformer_engine.pytorch is a bare package object, and its compiled part is a stub with the enum DType, dequantize
and a None for other names. Megatron is imported before it, and its fp8_utils are told of the class afterwards.
`executed`: everything is real, and outputs and gradients are compared with float64 on the quantized values. A launch with
a null pointer is recorded, and tried in a child. MXFP8 is judged on the CPU only: its tensors are sm_100's.

Upstream: https://github.com/NVIDIA/Megatron-LM, megatron/core/transformer/experimental_attention_variant/ops;
https://github.com/NVIDIA/TransformerEngine, transformer_engine/pytorch/quantized_tensor.py. By hand, with the packages
above on the path (build_transformer_engine.py makes what `executed` needs besides):

    tar xzf megatron_core-0.19.2.tar.gz
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py" --target cpu
    git -C megatron_core-0.19.2 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py" --target cpu
"""

# fmt: off
# --- protocol: begin (the same in every probe; the original is harness/protocol.py)
import argparse, ctypes, hashlib, json, sys
from pathlib import Path
class Probe:
    """Prints the lines that a runner reads, and draws the verdict from the checks among them."""
    def __init__(self):
        self.judged = {}  # (role, ok) -> the names of these checks
    def say(self, word, **fields):  # JSON has neither NaN nor infinity: they become strings
        print(word, json.dumps(json.loads(json.dumps(fields), parse_constant=str)), flush=True)
    def upstream(self, module):  # an accused module, as it was really loaded
        sha256 = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
        self.say("UPSTREAM", module=module.__name__, file=module.__file__, sha256=sha256)
    def check(self, name, role, ok, **values):  # ok is None where this cannot be judged here
        self.judged.setdefault((role, ok), []).append(name)
        self.say("CHECK", name=name, role=role, ok=ok, **values)
    def output(self, name, tensor, must_match=True):  # the runner compares the two lanes'
        data = tensor.detach().cpu().contiguous()
        sha256 = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        self.say("OUTPUT", name=name, dtype=str(data.dtype), shape=[*data.shape], sha256=sha256, must_match=must_match)
    def run(self, judge):  # judge(probe, target) loads upstream and makes the checks
        parser = argparse.ArgumentParser(description="Judge one bug; the last line is the verdict.")
        parser.add_argument("--target", help="cpu, sm_90a, ... (default: this host's GPU, else cpu)")
        target, reason = parser.parse_args().target, "no defect check could be judged here"
        try:
            if target is None:
                import torch
                arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
                target = "sm_{}{}".format(*arch) + "a" * (arch >= (9, 0)) if arch else "cpu"
            judge(self, target)
        except (ImportError, NotImplementedError) as error:  # a package or a mode cannot be had
            self.judged, reason = {}, f"{type(error).__name__}: {error}"
        except Exception:
            sys.excepthook(*sys.exc_info())
            sys.exit(125)
        ends = {("control", False): ("CONTROL_FAILED", 125), ("defect", False): ("BUG_REPRODUCED", 10),
                ("defect", True): ("FIX_VALIDATED", 0), None: ("UNSUPPORTED", 125)}
        key = next((key for key in ends if key in self.judged), None)
        self.say(ends[key][0], reason=", ".join(self.judged.get(key, [reason])))
        sys.exit(ends[key][1])
# --- protocol: end
# fmt: on

import enum, functools, importlib.util, logging, os, types, unittest.mock, warnings

OPS = "megatron.core.transformer.experimental_attention_variant.ops"
MODULES = "tilelang_dsa", "sparse_mla", "tilelang_sparse_mla_fwd"
SIZES = 2, 256, 512, 16, 128  # batch, queries, keys, heads, top-k; both lengths are multiples of Megatron's bucket, 256
D, DV, SCALE = 576, 512, 576**-0.5  # the only dimensions that the kernels are made for
KINDS = {name: (name, name) for name in ("bf16", "float8", "float8_e5m2", "blockwise", "mxfp8")}  # query and key
KINDS["mixed"] = "bf16", "float8"
DTYPES = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8}
ROUNDING = 2**-7  # bf16 rounds by 2**-9, and does so with query, key, probabilities and output
SLACK = 1.05  # of the stored bytes: scales come on top, one byte for 32 values at most, and padding of them
OPERANDS = "[dtype, bytes, null pointer] of each operand but the indices"


def values(tensor):
    """Return in float64 what a wrapper of any kind stands for, from its storage; or a plain tensor's values."""
    torch = sys.modules["torch"]
    if type(tensor) is torch.Tensor:
        return tensor.double()
    whole, rowwise = hasattr(tensor, "_scale_inv"), type(tensor).__name__ == "MXFP8Tensor"
    stored = torch.float8_e5m2 if tensor._fp8_dtype.name == "kFloat8E5M2" else torch.float8_e4m3fn
    data = (tensor._data if whole else tensor._rowwise_data).view(stored).double()
    if whole:
        return data * tensor._scale_inv.double()
    scale = tensor._rowwise_scale_inv.double()  # MXFP8: an exponent for 32 values of a row, else a factor for 128 x 128
    scale = torch.exp2(scale - 127) if rowwise else scale.repeat_interleave(128, 0)
    scale = scale.repeat_interleave(32 if rowwise else 128, 1)[: data.numel() // D, :D]
    return (data.view(-1, D) * scale).view(tensor.shape)


def wrap(tensors, kind, x):
    """Quantize a bf16 tensor [..., D] into a wrapper of a kind; only its class is Transformer Engine's."""
    torch, rows = sys.modules["torch"], x.numel() // D
    if kind == "bf16":
        return x
    name, stored, peak = "kFloat8E4M3", torch.float8_e4m3fn, 448
    if kind == "float8_e5m2":
        name, stored, peak = "kFloat8E5M2", torch.float8_e5m2, 57344
    height, width = {"mxfp8": (1, 32), "blockwise": (128, 128)}.get(kind, (rows, D))  # what shares a scale
    tall = torch.nn.functional.pad(x.float().view(rows, D), (0, -D % width, 0, -rows % height))
    tiles = tall.view(len(tall) // height, height, -1, width)
    scale = tiles.abs().amax((1, 3)) / peak
    scale = scale.log2().ceil().exp2() if kind == "mxfp8" else scale
    data = (tiles / scale[:, None, :, None]).reshape(tall.shape)[:rows, :D].to(stored).view(torch.uint8).view(x.shape)
    fields = {"shape": x.shape, "dtype": x.dtype, "device": x.device}
    fields["fp8_dtype"] = getattr(sys.modules["transformer_engine_torch"].DType, name)
    if kind.startswith("float8"):
        return tensors.Float8Tensor(**fields, data=data.contiguous(), fp8_scale_inv=scale.view(1))
    scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4), value=1)
    fields |= {"rowwise_data": data.contiguous(), "columnwise_data": None, "columnwise_scale_inv": None, "quantizer": None}
    if kind == "blockwise":
        return tensors.Float8BlockwiseQTensor(**fields, rowwise_scale_inv=scale, is_2D_scaled=True)
    scale = (scale.log2() + 127).to(torch.uint8)
    return tensors.MXFP8Tensor(**fields, rowwise_scale_inv=scale, with_gemm_swizzled_scales=False)


def dequantize(tensor, dtype):
    """Stand in for the function of this name in Transformer Engine's compiled part."""
    return values(tensor).to(sys.modules["transformer_engine.pytorch.constants"].TE_DType_To_Torch[dtype])


def recording(jit, launches):
    """Stand before tilelang.jit, or in its place where it is None: note what each kernel is handed."""

    def launch(kernel, *operands):
        launches.append([(str(x.dtype), x.nbytes, not x.data_ptr()) for x in operands])
        shape = operands[0].shape[:3]
        return kernel(*operands) if kernel else [operands[-1].float().new_zeros(one) for one in ((*shape, DV), shape)]

    def decorate(*args, **options):
        def wrapped(function):
            build = jit(*args, **options)(function) if jit else lambda *_, **__: None
            return lambda *sizes, **named: functools.partial(launch, build(*sizes, **named))

        return wrapped(args[0]) if args and callable(args[0]) else wrapped

    return decorate


def wrappers(*, stub):
    """Import Transformer Engine's tensor classes, on top of its compiled part or of a stub of it."""
    if not stub:
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (RuntimeError, OSError, AssertionError) as error:  # it has many ways to miss its libraries
            hint = "compiled parts are missing, see build_transformer_engine.py"
            raise NotImplementedError(f"{hint}: {type(error).__name__}: {str(error)[:200]}") from None
    elif spec := importlib.util.find_spec("transformer_engine"):
        os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its common part then does without the core library
        compiled = sys.modules["transformer_engine_torch"] = unittest.mock.MagicMock(dequantize=dequantize)
        compiled.DType = enum.IntEnum("DType", {**DTYPES, "kFloat4E2M1": 10})
        package = sys.modules.setdefault("transformer_engine.pytorch", types.ModuleType("transformer_engine.pytorch"))
        package.__path__ = [os.path.join(folder, "pytorch") for folder in spec.submodule_search_locations]
    return importlib.import_module("transformer_engine.pytorch.tensor")


def load(launches, *, stub):
    """Import all that is judged, with every kernel launch on record."""
    if stub:
        sys.modules |= {"tilelang": unittest.mock.MagicMock(jit=recording(None, launches)), "transformer_engine": None}
        utilities = importlib.import_module("megatron.core.fp8_utils")
        del sys.modules["transformer_engine"]
        tensors = wrappers(stub=True)
        utilities.FP8_TENSOR_CLASS, utilities.HAVE_TE_FP8_TENSOR_CLASS = tensors.QuantizedTensor, True
    else:
        tilelang, tensors = importlib.import_module("tilelang"), wrappers(stub=False)
        tilelang.jit = recording(tilelang.jit, launches)
    return tensors, *(importlib.import_module(f"{OPS}.{name}") for name in MODULES)


def observe(launches, call):
    """Return what a call returns or raises, the operands of its first kernel, and what Megatron says meanwhile."""
    launches.clear()
    handler = unittest.mock.MagicMock(level=0)
    logging.getLogger().addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call()
        except Exception as error:  # whatever it is, it is what the caller gets
            result = error
    logging.getLogger().removeHandler(handler)
    told = [str(one.message) for one in caught if f"{os.sep}megatron{os.sep}" in one.filename]
    records = [call.args[0] for call in handler.handle.call_args_list]
    told += [one.getMessage() for one in records if one.name.startswith("megatron")]
    return result, [one for operands in launches[:1] for one in operands if one[0] != "torch.int32"], told


def reference(torch, query, key, indices):
    """Attend in float64, by the formula, over the keys that the indices [b, s, k] name, if not -1."""
    chosen = torch.stack([key[index.clamp(min=0).long(), one, 0] for one, index in enumerate(indices)])
    scores = torch.einsum("sbhd,bskd->sbhk", query, chosen) * SCALE
    scores = scores.masked_fill((indices < 0).transpose(0, 1)[:, :, None], -torch.inf)
    return torch.einsum("sbhk,bskd->sbhd", scores.softmax(-1), chosen[..., :DV])


def distance(x, y):
    """Return the norm of the difference over the norm of the second."""
    return float((x.double() - y).norm() / y.norm())


def gradients(torch, function, query, key):
    """Return the output, and the gradients of a weighted sum of it."""
    query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
    output = function(query, key)
    weight = torch.linspace(-1, 1, DV, device=output.device)
    return output.detach(), *torch.autograd.grad((output * weight).sum(), (query, key))


def judge_kind(probe, parts, kind, plain, indices, cost):
    """Hand a query and key of one kind to both entry points; `cost` is None where no kernel runs."""
    torch, launches, tensors, dsa, mla = parts
    pair = [wrap(tensors, name, x) for name, x in zip(KINDS[kind], plain, strict=True)]
    batched = [wrap(tensors, name, x.transpose(0, 1).contiguous()) for name, x in zip(KINDS[kind], plain, strict=True)]
    if kind != "bf16":  # what Megatron relies on: that it can tell a wrapper, and that these two ways lead out of one
        found, wrapped = {}, pair[1]
        for way, y in ("permute", wrapped.permute(1, 0, 2, 3).transpose(0, 1)), ("dequantize", wrapped.dequantize()):
            found[way] = type(y) is torch.Tensor and y.data_ptr() != 0 and distance(y, values(wrapped)) <= ROUNDING
        found["is_float8tensor"] = importlib.import_module("megatron.core.fp8_utils").is_float8tensor(wrapped)
        probe.check(f"{kind}.wrapper", "control", all(found.values()), measured=found, tolerance=ROUNDING)
    stored = sum(x.numel() * (2 if type(x) is torch.Tensor else 1) for x in pair)
    calls = {"dispatch": lambda *x: dsa.fused_sparse_mla_absorbed(*x, indices, SCALE, DV)}
    calls["apply"] = lambda *_: mla.SparseMLA.apply(*batched, indices.unsqueeze(2), SCALE)[0].transpose(0, 1)
    tolerance = ROUNDING if cost is None or kind == "bf16" else max(ROUNDING, cost)
    for name, call in calls.items():
        result, operands, told = observe(launches, functools.partial(call, *pair))
        read, null = sum(size for _, size, _ in operands), any(missing for _, _, missing in operands)
        measured = {"operands": operands, "stored_bytes": stored, "told": told}
        ok = bool(operands) and not null and (read <= SLACK * stored or bool(told))
        if isinstance(result, Exception):  # right where the result would be wrong; the dispatcher's never was
            measured["error"], ok = f"{type(result).__name__}: {str(result)[:200]}", name == "apply" and not null
        probe.check(f"{kind}.{name}", "control" if kind == "bf16" else "defect", ok, measured=measured, unit=OPERANDS)
        if name == "dispatch":
            probe.say("FIGURE", name=f"{kind}_bytes_over_storage", value=read / stored, unit="1")
        if cost is not None and torch.is_tensor(result):
            error = distance(result, reference(torch, *map(values, pair), indices))
            probe.check(f"{kind}.{name}.values", "control", error <= tolerance, measured=error, tolerance=tolerance)
    if cost is not None and kind in ("bf16", "float8"):
        got, again = (gradients(torch, calls["dispatch"], *pair) for _ in range(2))
        wanted = gradients(torch, lambda *x: reference(torch, *x, indices), *map(values, pair))
        for name, x, y, z in zip(("output", "query_gradient", "key_gradient"), got, again, wanted, strict=True):
            error = distance(x, z)
            probe.check(f"{kind}.{name}", "control", error <= tolerance, measured=error, tolerance=tolerance)
            probe.output(f"{kind}.{name}", x, must_match=kind == "bf16" and torch.equal(x, y))


def judge(probe, target):
    """Judge every kind of input on one target."""
    import torch

    execute, device = target != "cpu", "cpu" if target == "cpu" else "cuda"
    if execute and not (torch.cuda.is_available() and target == "sm_{}{}a".format(*torch.cuda.get_device_capability())):
        raise NotImplementedError(f"no {target} GPU here; --target cpu needs none")
    launches = []
    tensors, *modules = load(launches, stub=not execute)
    evidence, name = ("executed", torch.cuda.get_device_name()) if execute else ("traced", "none")
    probe.say("TARGET", target=target, evidence=evidence, device=name)
    for module in modules:
        probe.upstream(module)
    batch, queries, keys, heads, top = SIZES
    random = torch.Generator(device).manual_seed(3)
    plain = [(queries, batch, heads, D), (keys, batch, 1, D)]
    plain = [torch.randn(shape, generator=random, device=device).bfloat16() for shape in plain]
    indices = torch.randint(keys, (batch, queries, top), generator=random, device=device, dtype=torch.int32)
    indices[..., -top // 8 :] = -1
    cost = None
    if execute:  # what FP8 itself costs: quantized values against those before, both in float64
        pair = (values(wrap(tensors, "float8", x)) for x in plain)
        cost = distance(reference(torch, *pair, indices), reference(torch, *map(values, plain), indices))
        probe.say("FIGURE", name="cost_of_float8", value=cost, unit="relative")
    for kind in KINDS:
        if execute and kind == "mxfp8":
            probe.check("mxfp8.dispatch", "defect", None, reason="MXFP8 tensors are made for sm_100 and later")
        else:
            judge_kind(probe, (torch, launches, tensors, *modules[:2]), kind, plain, indices, cost)


if __name__ == "__main__":
    Probe().run(judge)
