# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "annotated-types==0.7.0",
#   "megatron-core==0.19.2",
#   "numpy==2.3.5",
#   "packaging==26.3",
#   "pydantic==2.12.5",
#   "pydantic-core==2.41.5",
#   "torch==2.13.0",
#   "transformer-engine==2.12.0",
#   "triton==3.6.0",
#   "typing-extensions==4.16.0",
#   "typing-inspection==0.4.2",
# ]
# ///
"""Megatron's fused sparse MLA does not see that its inputs are FP8 behind Transformer Engine's wrapper.

Symptom: fused_sparse_mla_absorbed hands the kernel bf16 copies, twice the bytes, of a query and key that are stored in
FP8, and tells nobody. SparseMLA.apply hands the kernel a NULL pointer for each wrapped tensor of batch 2 or more whose
length is a multiple of 256 (others are copied for padding first, and dequantized thereby); tilelang 0.1.8 refuses it.

Cause: the dispatcher looks at .dtype. A wrapper (Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor) reports the dtype
that it stands for, and pointer 0. What contiguous(), view() and to() give is wrapped again; permute() and unsqueeze()
give plain tensors, dequantized on the way. fix.patch asks Megatron's own is_float8tensor: the forward kernel reads E4M3
with one scale per tensor as it is stored, everything else is dequantized with a warning.

Scope: what reaches the kernels behind Megatron's two entry points. A dispatch is right where no pointer is null,
FP8 operands have the format that is stored, and the kernel gets no more bytes than are stored, or the caller is told by
a warning or a log record of Megatron's.
`traced` (cpu): launches are recorded, no kernel runs: tilelang is a mock but for its jit. Transformer Engine's Python
is real; transformer_engine.pytorch is a bare package object, and its compiled part a mock but for the enum DType and
dequantize. Megatron is imported before it, and its fp8_utils are told of the class afterwards. `executed`: everything
is real, and outputs and gradients are compared with float64 on the quantized values.

Tolerances: 2**-7 for bf16, which rounds by 2**-9, and does so with query, key, probabilities and output; for FP8, and
for gradients, what E4M3 itself costs here: the reference on quantized values against that before, both in float64. 5 %
of bytes on top of the stored ones are scales: one byte for 32 values at most.

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
MODULES = f"{OPS}.tilelang_dsa", f"{OPS}.sparse_mla", f"{OPS}.tilelang_sparse_mla_fwd"
SIZES = 2, 256, 512, 16, 128  # batch, queries, keys, heads, top-k; both lengths are multiples of Megatron's bucket, 256
D, DV, SCALE = 576, 512, 576**-0.5  # the only dimensions that the kernels are made for
TE = "transformer_engine.pytorch"
KINDS = {name: (name, name) for name in ("bf16", "float8", "float8_e5m2", "blockwise", "mxfp8")}  # query and key
KINDS["mixed"] = "bf16", "float8"
DTYPES = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8}
FORMATS = {"kFloat8E4M3": ("float8_e4m3fn", 448), "kFloat8E5M2": ("float8_e5m2", 57344)}  # dtype, largest value
ROUNDING, SLACK = 2**-7, 1.05  # relative errors, and bytes over stored ones; the docstring has the reasons


def values(tensor):
    """Return in float64 what a wrapper of any kind stands for, from its storage; or a plain tensor's values."""
    torch, fields = sys.modules["torch"], vars(tensor)
    if type(tensor) is torch.Tensor:
        return tensor.double()
    stored = getattr(torch, FORMATS[fields["_fp8_dtype"].name][0])
    if "_scale_inv" in fields:
        return fields["_data"].view(stored).double() * fields["_scale_inv"].double()
    data, scale = fields["_rowwise_data"].view(stored).double().view(-1, D), fields["_rowwise_scale_inv"]
    height, width = (1, 32) if scale.dtype == torch.uint8 else (128, 128)
    scale = scale.double() if width == 128 else torch.exp2(scale.double() - 127)  # MXFP8 has exponents
    return (data * scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[: len(data), :D]).view(tensor.shape)


def wrap(tensors, kind, x):
    """Quantize a bf16 tensor [..., D] into a wrapper of a kind; only its class is Transformer Engine's."""
    torch, rows, name = sys.modules["torch"], x.numel() // D, "kFloat8E5M2" if "e5m2" in kind else "kFloat8E4M3"
    if kind == "bf16":
        return x
    stored, peak = FORMATS[name]
    height, width = {"mxfp8": (1, 32), "blockwise": (128, 128)}.get(kind, (rows, D))  # what shares a scale
    tall = torch.nn.functional.pad(x.float().view(rows, D), (0, -D % width, 0, -rows % height))
    tiles = tall.view(len(tall) // height, height, -1, width)
    scale = tiles.abs().amax((1, 3)) / peak
    scale = scale.log2().ceil().exp2() if kind == "mxfp8" else scale
    data = (tiles / scale[:, None, :, None]).reshape(tall.shape)[:rows, :D].to(getattr(torch, stored)).view(torch.uint8)
    data, dtypes = data.reshape(x.shape).contiguous(), sys.modules["transformer_engine_torch"].DType.__members__
    fields = {"shape": x.shape, "dtype": x.dtype, "device": x.device, "fp8_dtype": dtypes[name]}
    if kind.startswith("float8"):
        return tensors.Float8Tensor(**fields, data=data, fp8_scale_inv=scale.view(1))
    fields |= {"rowwise_data": data, "columnwise_data": None, "columnwise_scale_inv": None, "quantizer": None}
    if kind == "blockwise":
        return tensors.Float8BlockwiseQTensor(**fields, rowwise_scale_inv=scale, is_2D_scaled=True)
    fields["rowwise_scale_inv"] = (scale.log2() + 127).to(torch.uint8)
    return tensors.MXFP8Tensor(**fields, with_gemm_swizzled_scales=False)


def recording(jit, launches):
    """Stand before tilelang.jit, or in its place where it is None: note what each kernel is handed."""

    def launch(kernel, *given):
        launches.append([(str(x.dtype), x.nbytes, not x.data_ptr()) for x in given])
        return kernel(*given) if kernel else [given[-1].new_zeros(given[0].shape[:n])[..., :DV] for n in (4, 3)]

    def decorate(*args, **options):
        def wrapped(function):
            build = jit(*args, **options)(function) if jit else unittest.mock.Mock(return_value=None)
            return lambda *sizes, **named: functools.partial(launch, build(*sizes, **named))

        return jit(*args) if jit and args and callable(args[0]) else wrapped  # bare, or with options

    return decorate


def wrappers(*, stub):
    """Import Transformer Engine's tensor classes, on top of its compiled part or of a stub of it."""
    if not stub:
        try:
            importlib.import_module(TE)
        except (RuntimeError, OSError, AssertionError) as error:  # it has many ways to miss its libraries
            raise NotImplementedError(f"{error} (build_transformer_engine.py makes what it needs)") from None
    elif spec := importlib.util.find_spec("transformer_engine"):
        os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its common part then does without the core library
        compiled = sys.modules["transformer_engine_torch"] = unittest.mock.MagicMock()
        compiled.DType = enum.IntEnum("DType", {**DTYPES, "kFloat4E2M1": 10})
        compiled.dequantize = lambda x, to: values(x).to(sys.modules[f"{TE}.constants"].TE_DType_To_Torch[to])
        package = sys.modules.setdefault(TE, types.ModuleType(TE))
        package.__path__ = [f"{folder}/pytorch" for folder in spec.submodule_search_locations]
    return importlib.import_module(f"{TE}.tensor")


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
    return tensors, *map(importlib.import_module, MODULES)


def observe(launches, call):
    """Return what a call returns or raises, the operands of its first kernel, and what Megatron says meanwhile."""
    launches.clear()
    handling = unittest.mock.patch.object(logging.Logger, "handle")
    with warnings.catch_warnings(record=True, action="always") as caught, handling as logged:
        try:
            result = call()
        except Exception as error:
            result = error
    said = [(one.pathname, one.getMessage()) for one in (call.args[0] for call in logged.call_args_list)]
    said += [(one.filename, str(one.message)) for one in caught]
    told = [text for file, text in said if f"{os.sep}megatron{os.sep}" in file]
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
    """Return the gradients of a weighted sum of the output."""
    query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
    weighted = function(query, key) * torch.linspace(-1, 1, DV, device=key.device)
    return torch.autograd.grad(weighted.sum(), (query, key))


def judge_kind(probe, parts, kind, plain, cost):
    """Hand a query and key of one kind to both entry points; the cost of FP8 is None where no kernel runs."""
    (torch, launches, tensors, dsa, mla), (*plain, indices) = parts, plain
    pair = [wrap(tensors, name, x) for name, x in zip(KINDS[kind], plain, strict=True)]
    batched = [wrap(tensors, name, x.transpose(0, 1).contiguous()) for name, x in zip(KINDS[kind], plain, strict=True)]
    if kind != "bf16":  # what Megatron relies on: that it can tell a wrapper, and that these two ways lead out of one
        detected = importlib.import_module("megatron.core.fp8_utils").is_float8tensor(pair[1])
        plainly = pair[1].permute(1, 0, 2, 3).transpose(0, 1), pair[1].dequantize()
        found = [detected, *(type(y) is torch.Tensor and distance(y, values(pair[1])) <= ROUNDING for y in plainly)]
        probe.check(f"{kind}.wrapper", "control", all(found), measured=found, unit="detected, permute, dequantize")
    stored = sum(x.numel() * (2 if type(x) is torch.Tensor else 1) for x in pair)
    calls = {"dispatch": lambda x=pair[0], y=pair[1]: dsa.fused_sparse_mla_absorbed(x, y, indices, SCALE, DV)}
    calls["apply"] = lambda: mla.SparseMLA.apply(*batched, indices.unsqueeze(2), SCALE)[0].transpose(0, 1)
    for name, call in calls.items():
        result, operands, told = observe(launches, call)
        read, null = sum(size for _, size, _ in operands), any(missing for _, _, missing in operands)
        measured, unit = {"operands": operands, "stored_bytes": stored, "told": told}, "operand: [dtype, bytes, null]"
        known = {"torch.bfloat16", "torch.float32", "torch.float8_" + ("e5m2" if "e5m2" in kind else "e4m3fn")}
        ok = bool(operands and not null and (read <= SLACK * stored or told)) and {x[0] for x in operands} <= known
        if isinstance(result, Exception):  # right where the result would be wrong; the dispatcher's never was
            measured["error"], ok = str(result)[:200], name == "apply" and not null
        probe.check(f"{kind}.{name}", "control" if kind == "bf16" else "defect", ok, measured=measured, unit=unit)
        probe.say("FIGURE", name=f"{kind}_{name}_bytes_over_storage", value=read / stored, unit="1")
        if cost and torch.is_tensor(result):
            exact = map(values, pair) if name == "dispatch" else (values(x).transpose(0, 1) for x in batched)
            error, tolerance = distance(result, reference(torch, *exact, indices)), ROUNDING if kind == "bf16" else cost
            probe.check(f"{kind}.{name}.values", "control", error <= tolerance, measured=error, tolerance=tolerance)
            probe.output(f"{kind}.{name}", result, must_match=kind == "bf16")
    if cost and kind in ("bf16", "float8"):
        got, again = (gradients(torch, calls["dispatch"], *pair) for _ in range(2))
        wanted = gradients(torch, lambda *x: reference(torch, *x, indices), *map(values, pair))
        for name, x, y, z in zip(("query_gradient", "key_gradient"), got, again, wanted, strict=True):
            error = distance(x, z)
            probe.check(f"{kind}.{name}", "control", error <= cost, measured=error, tolerance=cost, unit="relative")
            probe.output(f"{kind}.{name}", x, must_match=kind == "bf16" and torch.equal(x, y))


def judge(probe, target):
    """Judge every kind of input on one target."""
    import torch

    device, evidence, name = "cpu", "traced", "none"
    if execute := target != "cpu":
        if not torch.cuda.is_available() or target != "sm_{}{}a".format(*torch.cuda.get_device_capability()):
            raise NotImplementedError(f"no {target} GPU here; --target cpu needs none")
        device, evidence, name = "cuda", "executed", torch.cuda.get_device_name()
    launches, (batch, queries, keys, heads, top), cost = [], SIZES, None
    tensors, *modules = load(launches, stub=not execute)
    probe.say("TARGET", target=target, evidence=evidence, device=name)
    list(map(probe.upstream, modules))
    torch.manual_seed(3)
    plain = [torch.randn(shape).bfloat16().to(device) for shape in ((queries, batch, heads, D), (keys, batch, 1, D))]
    indices = torch.randint(-keys // 8, keys, (batch, queries, top), dtype=torch.int32, device=device).clamp(min=-1)
    if execute:  # what FP8 itself costs: quantized values against those before, both in float64
        pair = (values(wrap(tensors, "float8", x)) for x in plain)
        cost = distance(reference(torch, *pair, indices), reference(torch, *map(values, plain), indices))
        probe.say("FIGURE", name="cost_of_float8", value=cost, unit="relative")
        probe.check("mxfp8.dispatch", "defect", None, reason="an MXFP8 tensor cannot be dequantized before sm_100")
    for kind in [one for one in KINDS if not execute or one != "mxfp8"]:
        judge_kind(probe, (torch, launches, tensors, *modules[:2]), kind, (*plain, indices), cost)


if __name__ == "__main__":
    Probe().run(judge)
