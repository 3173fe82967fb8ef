"""Fused sparse MLA of Megatron sees that its inputs are quantized behind Transformer Engine's wrapper.

Behind `fused_sparse_mla_absorbed` and `SparseMLA.apply`, no kernel gets a NULL pointer. A kernel reads, and backward
keeps, nothing wider than what is stored, unless a warning or a log record tells the caller. Plain bfloat16 causes no
message. Output, log-sum-exp and both backwards are right.

All inputs stand for bfloat16, as the results do. For a wrapper of another dtype, the dispatcher declines, and
SparseMLA.apply refuses, tells the caller, or returns that dtype. A Float8Tensor that holds its transpose alone is not
tested: 2.12.0 does not dequantize it.

On the CPU, launches are recorded and a float32 stand-in replaces each kernel. It refuses what tilelang refuses: a null
pointer, tensors that are not compact, and dtypes or ranks that differ from the same kernel's first launch. Two refusals
of tilelang were not seen: the stride of a batch of one, and a scale without a dimension. Transformer Engine's Python is
real; its compiled part is a mock except for DType and dequantize. MXFP8 and NVFP4 cannot be dequantized before sm_100,
so that they are judged on the CPU alone.

Tolerances: 2**-7 for outputs, since query, key, probabilities and output are rounded to bfloat16 (2**-9 each). 2**-6
for gradients: the gradient of the probabilities is rounded too, and output and log-sum-exp come from rounded values.
2**-8 for the part of that error in the gradient's own direction, where roundings of many values cancel.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import importlib
import importlib.util
import inspect
import itertools
import logging
import math
import os
import subprocess
import sys
import time
import types
import warnings
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kit import current_target
from kit.autograd import copies_of_saved, unless_refused
from kit.capture import host_waits, peak_memory
from kit.cuda_source import in_processes
from kit.errors import relative_error
from kit.sparse_attention import attend, counted, marked, name_of, share_compiled_kernels, stand_in

TARGET = current_target()
EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
OPS = "megatron.core.transformer.experimental_attention_variant.ops"
MODULES = f"{OPS}.tilelang_dsa", f"{OPS}.sparse_mla", f"{OPS}.tilelang_sparse_mla_fwd"
TE, BUCKET = "transformer_engine.pytorch", "MCORE_DSA_TILELANG_SEQ_BUCKET"
D, DV = 576, 512  # the only dimensions that the kernels are made for
IGNORED = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)  # by Python's default filters
SCALE = 0.04  # near D**-0.5, and not it
KERNEL = (16, 64, SCALE)  # heads, top-k, softmax scale; the script's, so that a GPU finds it compiled
DTYPES = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8}
DTYPES |= {"kFloat4E2M1": 10}
FORMATS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
KINDS = {one: (one, one) for one in ("bf16", "float8", "float8_e5m2", "blockwise", "mxfp8", "nvfp4")}
KINDS |= {"mixed": ("bf16", "float8"), "mixed_key": ("float8", "bf16")}  # query and key
KINDS |= {"mixed_formats": ("float8", "float8_e5m2"), "mixed_scaling": ("float8", "blockwise")}
CPU_ONLY = {"mxfp8", "nvfp4"}  # not dequantized before sm_100
DENSE = {"blockwise", *CPU_ONLY}  # contiguous() of these classes refuses strided data
BF16, FP16 = torch.bfloat16, torch.float16
ROUNDING, GRADIENT_ROUNDING, DIRECTED = 2**-7, 2**-6, 2**-8
LEADING = ("bf16", "float8", "float8_e5m2", "blockwise", "mxfp8", "mixed")  # kinds of the example that was reported
SIZES = (2, (256, 256), KERNEL)  # its batch, lengths and kernel: both lengths are multiples of the bucket


class Case(NamedTuple):
    """One call."""

    kind: str
    entry: str  # the dispatcher, or SparseMLA.apply with or without a batch dimension
    batch: int = 1
    lengths: tuple = (5, 30)  # queries, keys: multiples or not of the bucket
    kernel: tuple = KERNEL
    magnitude: tuple = (1.0, 0.3)  # of query and key
    indices: str = "some"  # int32 with some -1, or rows of -1 alone, or int64 without
    frozen: str = "none"  # what needs no gradient
    layout: str = "dense"  # or strided, below the wrapper
    bucket: int | None = 64  # MCORE_DSA_TILELANG_SEQ_BUCKET, or its default, 256


WIDE = KERNEL if TARGET.executed else (32, 192, 0.1)  # there every other kernel is compiled for a minute
FORMS = (  # of each kind; SparseMLA.apply takes int32
    ("dispatch", 3, (17, 70), WIDE, (0.05, 4.0), "rows", "none", "strided", None),
    ("apply", 3, (64, 64), WIDE, (0.05, 4.0), "some", "none"),
)
MORE_FORMS = (  # of a kind that is read as it is stored, of one that is not, and of bf16; 5 heads are padded to 16
    ("dispatch", 1, (64, 64), (5, 64, SCALE), (3.0, 1e-06), "int64", "key"),
    ("dispatch", 3, (64, 64), KERNEL, (1.0, 0.3), "some", "query"),
    ("apply", 1, (17, 70), KERNEL, (3.0, 1e-06), "rows", "key", "strided", None),
    ("apply_3d", 1, (64, 64), KERNEL, (1.0, 0.3), "some", "none"),
)
CASES = [Case(kind, *form) for kind in KINDS for form in FORMS]
CASES += [Case(kind, *form) for kind in ("bf16", "float8", "blockwise") for form in MORE_FORMS]


def example(kind, entry) -> Case:
    """Return the example that was reported; where no kernel runs its results are not judged, and one row is enough."""
    indices, frozen = ("some", "none") if TARGET.executed else ("one_row", "both")
    return Case(kind, entry, *SIZES, (1.0, 1.0), indices, frozen, bucket=None)


def reaches(case) -> bool:
    """Say whether release 0.19.2 hands a wrapper of SparseMLA.apply to the kernel: nothing copies it before."""
    return case.kind != "bf16" and case.entry == "apply" and case.batch > 1


# How tensors are stored


def storage(x):
    """Return the tensors that hold a tensor's values and scales: fields of a wrapper, or itself."""
    return [one for one in vars(x).values() if torch.is_tensor(one)] if type(x) is not torch.Tensor else [x]


def width(x) -> float:
    """Return the bytes in which one value is stored, scales aside."""
    return max(one.nbytes for one in storage(x)) / x.numel()


def values(tensor):
    """Return in float64 what a wrapper of any kind stands for, from its storage; or a plain tensor's values."""
    fields = vars(tensor)
    if type(tensor) is torch.Tensor:
        return tensor.double()
    if "_fp4_dtype" in fields:  # two values a byte, E4M3 scales of 16 values, and one scale of all
        nibbles = torch.stack([fields["_rowwise_data"] & 15, fields["_rowwise_data"] >> 4], -1).flatten(-2).long()
        scale = fields["_rowwise_scale_inv"].view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
        whole = fields["_amax_rowwise"].double() / (6 * 448)
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.double)
        return sizes[nibbles & 7] * (1 - 2 * (nibbles >> 3)) * scale.view(nibbles.shape) * whole
    stored = FORMATS[fields["_fp8_dtype"].name]
    if "_scale_inv" in fields:
        return fields["_data"].view(stored).double() * fields["_scale_inv"].double()
    data, scale = fields["_rowwise_data"].view(stored).double().view(-1, D), fields["_rowwise_scale_inv"]
    if scale.dtype == torch.uint8:  # MXFP8 has exponents
        scale = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    else:
        scale = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (data * scale[: len(data), :D]).view(tensor.shape)


def wrap_fp4(tensors, x, fields):
    """Fill an NVFP4Tensor with random values that are as large as those of a bfloat16 tensor [..., D]."""
    random = torch.Generator().manual_seed(x.numel())  # query and key differ
    data = torch.randint(256, (*x.shape[:-1], D // 2), generator=random, dtype=torch.uint8)
    scale = torch.rand(x.numel() // D, D // 16, generator=random) + 0.5
    fields |= {"rowwise_data": data, "columnwise_data": None, "columnwise_scale_inv": None, "quantizer": None}
    fields |= {"rowwise_scale_inv": scale.to(torch.float8_e4m3fn).view(torch.uint8), "amax_columnwise": None}
    fields |= {"amax_rowwise": (x.float().abs().mean() * 6 * 448 / 3).view(1), "with_gemm_swizzled_scales": False}
    return tensors.NVFP4Tensor(**fields, fp4_dtype=sys.modules["transformer_engine_torch"].DType.kFloat4E2M1)


def strided(x):
    """Return the same values, but for the last two dimensions not beside each other in memory."""
    return torch.cat([x, x], -2)[..., : x.shape[-2], :]


def wrap(tensors, kind, x, *, apart=False, nominal=None):
    """Quantize a bfloat16 tensor [..., D] into a wrapper of a kind; only its class is Transformer Engine's.

    The scales of blocks are padded as Transformer Engine's quantizers do, where one value a block is not all of them.
    """
    if kind == "bf16":
        return strided(x) if apart else x
    rows, name = x.numel() // D, "kFloat8E5M2" if "e5m2" in kind else "kFloat8E4M3"
    fields = {"shape": x.shape, "dtype": nominal or x.dtype, "device": x.device}
    if kind == "nvfp4":
        return wrap_fp4(tensors, x, fields)
    height, across = {"mxfp8": (1, 32), "blockwise": (128, 128)}.get(kind, (rows, D))
    tall = torch.nn.functional.pad(x.float().view(rows, D), (0, -D % across, 0, -rows % height))
    tiles = tall.view(len(tall) // height, height, -1, across)
    scale = tiles.abs().amax((1, 3)) / torch.finfo(FORMATS[name]).max
    scale = scale.log2().ceil().exp2() if kind == "mxfp8" else scale
    data = (tiles / scale[:, None, :, None]).reshape(tall.shape)[:rows, :D].to(FORMATS[name]).view(torch.uint8)
    data = data.reshape(x.shape).contiguous()
    fields["fp8_dtype"] = sys.modules["transformer_engine_torch"].DType.__members__[name]
    if kind.startswith("float8"):
        return tensors.Float8Tensor(**fields, data=strided(data) if apart else data, fp8_scale_inv=scale.view(1))
    fields |= {"rowwise_data": data, "columnwise_data": None, "columnwise_scale_inv": None, "quantizer": None}
    if kind == "mxfp8":
        scale = (scale.log2() + 127).to(torch.uint8)
        return tensors.MXFP8Tensor(**fields, rowwise_scale_inv=scale, with_gemm_swizzled_scales=False)
    scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4))
    return tensors.Float8BlockwiseQTensor(**fields, rowwise_scale_inv=scale, is_2D_scaled=True)


# Upstream, with every build and launch of a kernel on record


def recording(jit, launches, builds):
    """Stand before tilelang.jit, or in its place where it is None, and refuse there what tilelang refuses."""
    signatures = {}

    def launch(kernel, name, sizes, *given):
        launches.append([(x.is_floating_point(), x.nbytes, x.dtype.itemsize, not x.data_ptr()) for x in given])
        if jit is None:
            if any(null for *_, null in launches[-1]):
                raise RuntimeError(f"kernel {name}: data pointer expected non-NULL, but got NULL")
            if any(x.stride() != x.new_empty(x.shape, device="meta").stride() for x in given):
                raise RuntimeError(f"kernel {name}: strides expected compact, but got {[x.stride() for x in given]}")
            dtypes = [(x.dtype, x.ndim) for x in given]
            if (first := signatures.setdefault(f"{name} {sizes}", dtypes)) != dtypes:
                raise RuntimeError(f"kernel {name}: operands expected {first}, but got {dtypes}")
        return kernel(*given)

    def decorate(*args, **options):
        def wrapped(function):
            make = jit(*args, **options)(function) if jit else None

            def build(*sizes, **named):
                builds.append((function.__name__, sizes, named))
                bound = inspect.signature(function).bind(*sizes, **named)
                bound.apply_defaults()
                given = function.__name__, dict(bound.arguments)
                kernel = make(*sizes, **named) if jit else functools.partial(stand_in, *given)
                return functools.partial(launch, kernel, *given)

            return build

        return jit(*args) if jit and args and callable(args[0]) else wrapped  # bare, or with options

    return decorate


def wrappers():
    """Import Transformer Engine's tensor classes, on top of its compiled part or, without a GPU, of a mock of it."""
    if TARGET.executed:
        try:
            importlib.import_module(TE)
        except (RuntimeError, AssertionError) as error:  # it has many ways to miss its libraries
            pytest.skip(f"{error} (build_transformer_engine.py makes what it needs)")
    elif spec := importlib.util.find_spec("transformer_engine"):
        os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its common part then does without the core library
        compiled = sys.modules["transformer_engine_torch"] = mock.MagicMock()
        compiled.DType = enum.IntEnum("DType", DTYPES)
        compiled.dequantize = lambda x, to: values(x).to(sys.modules[f"{TE}.constants"].TE_DType_To_Torch[to])
        package = sys.modules.setdefault(TE, types.ModuleType(TE))
        package.__path__ = [f"{folder}/pytorch" for folder in spec.submodule_search_locations]
        torch.cuda.current_device = lambda: torch.device("cpu")  # where its classes put what they make
    return importlib.import_module(f"{TE}.tensor")


def load():
    """Import upstream's modules; Megatron comes first where Transformer Engine's compiled part is a mock."""
    torch.set_num_threads(1)  # what runs on the CPU is small, and other lanes want the other cores
    launches, builds = [], []
    if TARGET.executed:
        tilelang, tensors = importlib.import_module("tilelang"), wrappers()
        share_compiled_kernels()
        tilelang.jit = recording(tilelang.jit, launches, builds)
    else:
        jit = recording(None, launches, builds)
        sys.modules |= {"tilelang": mock.MagicMock(jit=jit), "transformer_engine": None}
        utilities = importlib.import_module("megatron.core.fp8_utils")
        del sys.modules["transformer_engine"]
        tensors = wrappers()
        utilities.FP8_TENSOR_CLASS, utilities.HAVE_TE_FP8_TENSOR_CLASS = tensors.QuantizedTensor, True
    dsa, mla, interface = map(importlib.import_module, MODULES)
    modules = {"tensors": tensors, "dsa": dsa, "mla": mla, "interface": interface}
    return types.SimpleNamespace(**modules, launches=launches, builds=builds)


@pytest.fixture(scope="module")
def lab():
    """Give upstream's modules; on a GPU, first compile at once what the script has not compiled."""
    found = load()
    if TARGET.executed:
        torch.cuda.init()  # so that the processes are spawned
        in_processes(run_ahead, [(number,) for number in range(len(AHEAD))])
    return found


def run_ahead(number):
    """Run a case in a process of its own: tilelang keeps the kernels on disk. What fails here will fail again."""
    with contextlib.suppress(Exception):
        run(load(), AHEAD[number])


@contextlib.contextmanager
def listening(bucket=None):
    """Collect what a caller sees of Megatron's warnings and log records, and set the bucket; filled at the end."""
    told, handling = [], mock.patch.object(logging.Logger, "handle")
    setting = mock.patch.dict(os.environ, {} if bucket is None else {BUCKET: str(bucket)})
    with warnings.catch_warnings(record=True, action="always") as caught, handling as logged, setting:
        yield told
    records = [call.args[0] for call in logged.call_args_list if call.args[0].levelno >= logging.WARNING]
    said = [(one.pathname, one.getMessage()) for one in records]
    said += [(one.filename, str(one.message)) for one in caught if not issubclass(one.category, IGNORED)]
    told += [text for file, text in said if f"{os.sep}megatron{os.sep}" in file]


# A case: its inputs, a call, and the reference


def draw(case):
    """Return query and key, plain and [b, s, h, D], and indices [b, s, k], all by a seed that is the case itself."""
    (heads, top, _), (queries, keys) = case.kernel, case.lengths
    random = torch.Generator().manual_seed(sum(map(ord, repr(tuple(case)))))
    sizes = zip((queries, keys), (heads, 1), case.magnitude, strict=True)
    pair = [torch.randn(case.batch, s, h, D, generator=random).mul(by).bfloat16() for s, h, by in sizes]
    indices = torch.randint(keys, (case.batch, queries, top), generator=random, dtype=torch.int32)
    if case.indices == "one_row":
        indices[:, 1:] = -1
    if case.indices != "int64":
        indices[torch.rand(indices.shape, generator=random) < 0.125] = -1
    if case.indices == "rows":
        indices[:, ::3] = -1
    indices = indices.long() if case.indices == "int64" else indices
    return [x.to(TARGET.device) for x in pair], indices.to(TARGET.device)


def laid_out(case, x):
    """Return a tensor [b, s, h, D] as the entry point takes it."""
    return {"dispatch": x.transpose(0, 1).contiguous(), "apply": x, "apply_3d": x[0]}[case.entry]


def unlaid(case, x):
    """Return a tensor of the entry point's layout as [b, s, h, D]."""
    return {"dispatch": x.transpose(0, 1), "apply": x, "apply_3d": x[None]}[case.entry]


def leaves(lab, case, plain=None):
    """Return query and key as the entry point takes them, stored as the case says, and requiring gradients."""
    made = []
    for name, kind, x in zip(("query", "key"), KINDS[case.kind], plain or draw(case)[0], strict=True):
        apart = case.layout == "strided" and kind not in DENSE
        one = wrap(lab.tensors, kind, laid_out(case, x), apart=apart).detach()
        made.append(one.requires_grad_(case.frozen not in (name, "both")))
    return made


def enter(lab, case, pair, indices):
    """Call the entry point of a case; return its results [b, s, h, ...]."""
    scale = case.kernel[2]
    if case.entry == "dispatch":
        result = lab.dsa.fused_sparse_mla_absorbed(*pair, indices, scale, DV)
        assert result is not None, "the call was declined"
        return [result.transpose(0, 1)]
    if case.entry == "apply":
        return list(lab.mla.SparseMLA.apply(*pair, indices.unsqueeze(2), scale))
    return [one.unsqueeze(0) for one in lab.mla.SparseMLA.apply(*pair, indices[0].unsqueeze(1), scale)]


def upstream_gradient(result):
    """Return a gradient of an output, other for each element, and not contiguous."""
    random = torch.Generator(result.device).manual_seed(9)
    given = torch.randn(*result.shape[::-1], generator=random, device=result.device)
    return given.bfloat16().permute(*reversed(range(result.ndim)))


def gradients_of(result, pair):
    """Return the gradients of those of a pair that require them: None for one that is none; None where refused."""
    wanted = [x for x in pair if x.requires_grad]
    if not result.requires_grad:
        return [None] * len(wanted)
    given = upstream_gradient(result)
    options = {"retain_graph": True, "allow_unused": True}
    return unless_refused(lambda: torch.autograd.grad(result, wanted, given, **options), "inplace")


def expected(case, pair):
    """Return output, log-sum-exp and the wanted gradients by the formula, in float64, on the quantized values."""
    indices = draw(case)[1]
    exact = [unlaid(case, values(x.detach())).contiguous().requires_grad_(x.requires_grad) for x in pair]
    output, sums = attend(exact[0], exact[1][:, :, 0], counted(indices, case.lengths[1]), case.kernel[2], DV)
    wanted = [x for x in exact if x.requires_grad]
    found = torch.autograd.grad(output, wanted, upstream_gradient(output).double()) if wanted else ()
    return output.detach(), sums.detach(), [laid_out(case, x) for x in found]


def assert_right(case, pair, results, gradients=()):
    """Assert that output, log-sum-exp and the gradients of each backward are plain, and as near as rounding allows."""
    output, sums, wanted = expected(case, pair)
    judged = {"output": (results[0], output, BF16, ROUNDING)}
    if len(results) > 1:
        judged["sum"] = results[1], sums, torch.float32, ROUNDING
    for turn, found in enumerate(gradients):
        for n, (x, exact) in enumerate(zip(found or [None] * len(wanted), wanted, strict=True)):
            judged[f"backward {turn}, gradient {n}"] = x, exact, BF16, GRADIENT_ROUNDING
    errors = {}
    for name, (x, exact, dtype, rounding) in judged.items():
        plain = type(x) is torch.Tensor and x.dtype == dtype and x.shape == exact.shape
        errors[name] = relative_error(x, exact) / rounding if plain else math.inf
        if plain and name.startswith("backward"):  # a scale that is rounded makes every element larger, or smaller
            share = ((x.double() - exact) * exact).sum() / exact.square().sum().clamp(min=1e-99)
            errors[f"{name}, in its own direction"] = abs(float(share)) / DIRECTED
    wrong = {name: error for name, error in errors.items() if not error <= 1}  # a nan is wrong, too
    assert not wrong, f"multiples of the error that rounding explains: {wrong}"


def freed(tensors) -> bool:
    """Say whether the memory of a tensor is gone."""
    return any(x.numel() and not x.untyped_storage().nbytes() for x in tensors)


def run(lab, case, pair=None):
    """Run a case forward, and twice backward; what the code under test raises is not caught.

    Return results, operands of the first kernel, what was kept, said, came back, and broke.
    """
    pair, kept, held, broken, gradients = pair or leaves(lab, case), [], [], [], []
    mine = [x.detach() for one in pair for x in storage(one)]
    before = [x.clone() for x in mine]

    def keep(x):
        kept.append((x.numel(), width(x), x.is_floating_point()))
        held.extend(storage(x))
        return x

    lab.launches.clear()
    with listening(case.bucket) as told, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        results = enter(lab, case, pair, draw(case)[1])
        turns = 2 if case.frozen == "none" else 1  # the second shows that nothing was used up
        for _ in range(turns if any(x.requires_grad for x in pair) else 0):
            gradients.append(gradients_of(results[0], pair))
            if freed(held):
                broken.append("backward freed what was saved for it")
                break  # what reads it again reads no memory
    if freed(mine):
        broken.append("the caller's memory was freed")
    elif not all(map(torch.equal, mine, before)):
        broken.append("the caller's tensors were altered")
    ended = {"kept": kept, "told": told, "gradients": gradients, "broken": broken}
    return types.SimpleNamespace(case=case, pair=pair, results=results, operands=(lab.launches or [[]])[0], **ended)


def assert_handed(outcome):
    """Assert that the kernel reads no NULL and nothing wider than what is stored, and so is what backward keeps."""
    widths = [width(x) for x in outcome.pair]
    assert len(outcome.operands) > 2, "no kernel is launched"
    assert not any(null for *_, null in outcome.operands), f"the kernel is handed NULL among {outcome.operands}"
    wide = [(count, size) for count, size, floating in outcome.kept if floating and count >= D]
    saved = sum(count for count, _ in wide)
    assert outcome.case.frozen == "both" or saved >= sum(x.numel() for x in outcome.pair), f"{saved} values are saved"
    if outcome.case.kind == "bf16":
        assert not outcome.told, f"the caller is told {outcome.told}"
    elif not outcome.told:
        read = [size for _, _, size, _ in outcome.operands[:2]]
        fits = all(size <= stored for size, stored in zip(read, widths, strict=True))
        assert fits, f"{read} bytes a value are read, {widths} are stored, and nobody is told"
        assert all(size <= max(widths) for _, size in wide), f"{wide} is kept, {widths} are stored, and nobody is told"


def assert_results(outcome):
    """Assert that output, log-sum-exp and both backwards are right."""
    assert not outcome.broken, ", ".join(outcome.broken)
    assert_right(outcome.case, outcome.pair, outcome.results, outcome.gradients)


@pytest.fixture(scope="module")
def outcome(lab, request):
    """Run a case once for the tests that judge it."""
    if TARGET.executed and CPU_ONLY & {*KINDS[request.param.kind]}:
        pytest.skip("it cannot be dequantized before sm_100")
    return run(lab, request.param)


EXAMPLES = [example(kind, entry) for kind in LEADING for entry in ("dispatch", "apply")]
#: The product of two scales is 0 in float32, and the logit of a key that is left out is -inf; and the default scale.
SPECIAL = [Case(kind, "dispatch", magnitude=(1e-21, 1e-21), frozen="both", bucket=None) for kind in ("bf16", "float8")]
SPECIAL += [Case("float8", "dispatch", kernel=(16, 64, None), frozen="both", bucket=None)]
if TARGET.executed:  # a block of the forward kernel has at most 64 heads
    SPECIAL.append(Case("float8", "dispatch", 3, (5, 30), (128, 192, 0.1), (1.0, 0.3), "rows", "both", "dense", None))
AHEAD = [example("bf16", "dispatch"), *SPECIAL[2:]]  # the others have the script's kernels, or these


@pytest.mark.parametrize(
    "outcome",
    [marked(one, name=name_of(one), control=one.kind == "bf16") for one in EXAMPLES + CASES],
    indirect=True,
)
def test_kernel_reads_what_is_stored_or_the_caller_is_told(outcome, figure):
    if outcome.case in EXAMPLES:
        read = sum(size for floating, size, *_ in outcome.operands if floating)
        stored = sum(x.numel() * width(x) for x in outcome.pair)
        figure(f"{outcome.case.kind}_{outcome.case.entry}_bytes_over_storage", read / stored)
    assert_handed(outcome)


@pytest.mark.parametrize(
    "outcome",
    [
        marked(one, name=name_of(one), control=not reaches(one))
        for one in (EXAMPLES if TARGET.executed else []) + CASES + SPECIAL
    ],
    indirect=True,
)
def test_output_and_gradients_are_right(outcome, output):
    assert_results(outcome)
    if outcome.case in EXAMPLES and outcome.case.kind == "bf16":  # the same in both trees
        for part, x in zip(("output", "sum"), outcome.results, strict=False):
            output(f"bf16.{outcome.case.entry}.{part}", x)
        (query, _), (again, _) = outcome.gradients
        output(f"bf16.{outcome.case.entry}.query_gradient", query, must_match=torch.equal(query, again))


def pairs(*rows):
    """Parametrise a test by kind and entry."""
    return pytest.mark.parametrize(("kind", "entry"), rows, ids=map("-".join, rows))


READ = [("bf16", "dispatch"), *itertools.product(("float8", "blockwise"), ("dispatch", "apply_3d"))]


@pytest.mark.control
@pytest.mark.parametrize("kind", ["bf16", "float8"])
@pytest.mark.parametrize(
    ("dtypes", "heads", "top"),
    [((FP16, FP16), 16, 64), ((BF16, FP16), 16, 64), ((BF16, BF16), 24, 64), ((BF16, BF16), 16, 63)],
)
def test_dispatcher_declines_before_it_touches_or_says_anything(lab, kind, dtypes, heads, top):
    case = Case("bf16", "dispatch", 2, (8, 16), (heads, top, SCALE))
    plain, indices = draw(case)
    pair = [laid_out(case, x) for x in plain]
    if kind == "bf16":
        pair = [x.to(dtype) for x, dtype in zip(pair, dtypes, strict=True)]
    else:
        pair = [wrap(lab.tensors, kind, x, nominal=dtype) for x, dtype in zip(pair, dtypes, strict=True)]
    lab.launches.clear()
    with listening() as told:
        assert lab.dsa.fused_sparse_mla_absorbed(*pair, indices, SCALE, DV) is None
    assert not lab.launches
    assert not told


# What backward finds, what is kept, and what is let go


@pytest.mark.parametrize("operand", [0, 1], ids=["query", "key"])
@pytest.mark.parametrize(
    ("kind", "entry"),
    [  # what the release keeps of a wrapper tells autograd of no change
        marked(kind, entry, name=f"{kind}-{entry}", control=kind == "bf16" or entry == "dispatch")
        for kind in ("bf16", "float8", "blockwise")
        for entry in ("dispatch", "apply_3d")
    ],
)
def test_overwritten_operand_is_refused_or_right_by_its_values_before(lab, kind, entry, operand):
    case = Case(kind, entry, lengths=(64, 64), magnitude=(1, 1))
    for place in range(len(storage(leaves(lab, case)[operand]))):
        pair = leaves(lab, case)
        with listening(case.bucket):
            results = enter(lab, case, pair, draw(case)[1])
            tensor = storage(pair[operand])[place]
            with torch.no_grad():
                tensor.mul_(2) if tensor.is_floating_point() else tensor.bitwise_xor_(128)  # 128 is E4M3's sign
            found = gradients_of(results[0], pair)
        assert_right(case, leaves(lab, case), results, [found] if found else [])


@pytest.mark.control
@pairs(*READ)
def test_each_call_has_its_own_values_and_neither_waits_nor_builds(lab, kind, entry):
    """A second call comes before the first's backward; a third finds the second's values in the first's tensors.

    Autograd is told nothing of that: Transformer Engine's kernels, which quantize in place, tell it nothing.
    """
    first = Case(kind, entry, 2 if entry == "dispatch" else 1, lengths=(64, 64), magnitude=(1, 1))
    second = first._replace(magnitude=(2.5, 0.7))
    pair, others = (leaves(lab, case) for case in (first, second))
    given, overwritten = ([one for x in both for one in storage(x)] for both in (leaves(lab, second), pair))
    with listening(64):
        result = enter(lab, first, pair, draw(first)[1])[0]
    lab.builds.clear()
    indices = draw(second)[1]
    with listening(64), host_waits(TARGET.device) as waits:
        enter(lab, second, others, indices)
    assert not lab.builds, f"{len(lab.builds)} kernels are built anew"
    assert kind == "blockwise" or not waits, f"the host waits for {waits}"
    assert_results(run(lab, second, others))
    assert_right(first, pair, [result], [gradients_of(result, pair)])
    for old, new in zip(overwritten, given, strict=True):
        old.data.copy_(new)
    assert_results(run(lab, second, pair))


def large(least, besides) -> dict:
    """Return the bytes of tensors since gc.freeze() by their places: of so many bytes and more, but for some places."""
    gc.collect()
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    held = {one.data_ptr(): one.nbytes for x in found for one in storage(x) if one.nbytes >= least}
    return {place: size for place, size in held.items() if place not in besides}


@pytest.mark.control
@pytest.mark.parametrize(
    ("kind", "entry", "batch"), [(*one, 1) for one in READ] + [(*one, 3) for one in READ if one[1] == "dispatch"]
)
def test_query_and_key_are_kept_once_and_backward_leaves_nothing_behind(lab, request, kind, entry, batch):
    """One batch needs no copy as wide. Of three the dispatcher makes one, and the caller, whose is no leaf, lets go."""
    case = Case(kind, entry, batch, (17, 70))
    plain, indices = draw(case)
    plain, least = [laid_out(case, x).requires_grad_() for x in plain], plain[1].numel()

    class Quantize(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return wrap(lab.tensors, kind, x.clone())

        @staticmethod
        def backward(_, gradient):
            return gradient

    with listening(64), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        enter(lab, case, leaves(lab, case), indices)  # the kernels are made by the first call
        gc.collect()
        gc.freeze()
        request.addfinalizer(gc.unfreeze)
        before = {x.data_ptr() for x in plain}
        pair = [Quantize.apply(x) for x in plain]
        own = large(least, before)
        results = enter(lab, case, pair, indices)
        before.add(results[0].data_ptr())
        if batch > 1:
            del pair
            kept = large(least, before)
            assert len(kept) == 2, f"{len(kept)} tensors of a key's size or more are kept for query and key"
        else:
            kept = large(least, before)
            copies = [size for place, size in kept.items() if place not in own and size in own.values()]
            assert not copies, f"copies of {copies} bytes are kept beside tensors of these sizes"
        found = gradients_of(results[0], plain)
        assert None not in found, "a gradient is missing"
        left = large(least, {*before, *kept, *(x.data_ptr() for x in found)})
    assert not left, f"{len(left)} tensors of a key's size or more are left behind"


@pytest.mark.control
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "reentrant_checkpoint", "checkpoint", "moved"])
@pairs(*READ)
def test_every_mode_of_autograd_gives_the_same(lab, kind, entry, mode):
    """A checkpoint that is not reentrant gives back what was saved once a backward; a hook may move it."""
    case, trains = Case(kind, entry), mode not in {"no_grad", "inference_mode"}
    indices = draw(case)[1]

    def call(*pair):
        return enter(lab, case, pair, indices)[0]

    ways = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "moved": copies_of_saved(at_each_use=True),
    }
    with listening(64):
        with ways.get(mode, contextlib.nullcontext()):
            pair = leaves(lab, case)
            again = {"use_reentrant": mode.startswith("reentrant")}
            result = checkpoint(call, *pair, **again) if "checkpoint" in mode else call(*pair)
        if trains:
            result.backward(upstream_gradient(result))
    assert_right(case, leaves(lab, case), [result], [[x.grad for x in pair]] if trains else [])


# What a caller is told


@pytest.mark.defect
@pairs(*itertools.product(("float8", "blockwise", "mixed_formats"), ("dispatch", "apply")))
@pytest.mark.parametrize("rank", range(3))
def test_every_rank_is_told(lab, kind, entry, rank):
    """With pipeline parallelism no rank has every layer."""
    answers = {"is_initialized": lambda: True, "get_rank": lambda *_: rank, "get_world_size": lambda *_: 3}
    with mock.patch.multiple(torch.distributed, **answers):
        assert_handed(run(lab, example(kind, entry)._replace(indices="one_row", frozen="both")))


@pytest.mark.control
@pairs(("blockwise", "dispatch"), ("mixed_formats", "apply_3d"))
def test_filters_of_the_caller_decide_what_becomes_of_a_warning(lab, kind, entry):
    case, found = Case(kind, entry, lengths=(64, 64), magnitude=(1, 1), frozen="both"), {}
    for action in ("always", "ignore", "error"):
        pair, setting = leaves(lab, case), mock.patch.dict(os.environ, {BUCKET: "64"})
        with setting, warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings(action, module=r"megatron\.")
            try:
                enter(lab, case, pair, draw(case)[1])
                found[action] = [str(one.message) for one in caught if f"{os.sep}megatron{os.sep}" in one.filename]
            except Warning as error:
                found[action] = f"raises {type(error).__name__}"
    assert found["ignore"] == [], found
    assert isinstance(found["error"], str) if found["always"] else found["error"] == [], found


@pytest.mark.control
@pytest.mark.parametrize("dtypes", list(itertools.product((BF16, FP16, torch.float32), repeat=2)), ids=str)
def test_wrapper_of_another_dtype_is_not_taken_for_bfloat16_in_silence(lab, dtypes):
    case = Case("float8", "apply", 2, (8, 16), magnitude=(1, 1), indices="int64", frozen="both")
    plain, indices = draw(case)  # lengths that are multiples of the bucket, so that the release hands wrappers over
    pair = [wrap(lab.tensors, "float8", x, nominal=one) for x, one in zip(plain, dtypes, strict=True)]
    with listening(8) as told:
        try:
            result = lab.mla.SparseMLA.apply(*pair, indices.int().unsqueeze(2), SCALE)[0].dtype
        except (ImportError, MemoryError, OSError):
            raise
        except Exception:  # of whatever kind: tilelang's at its pointers or dtypes, or upstream's own
            return
    assert told or {result} == {*dtypes}, f"the result is {result}, and nobody is told"


# How the kernels are built and called


@pytest.mark.control
@pytest.mark.parametrize("entry", ["dispatch", "apply_3d"])
def test_scales_without_a_dimension_are_right(lab, entry):
    case = Case("float8", entry, bucket=None)
    run(lab, case)  # scales that have one
    pair = []
    for x in leaves(lab, case):
        fields = x.get_metadata() | {"fp8_scale_inv": vars(x)["_scale_inv"].view(())}
        pair.append(type(x)(shape=x.shape, dtype=x.dtype, **fields).requires_grad_())
    assert_results(run(lab, case, pair))


@pytest.mark.control
@pytest.mark.parametrize("size", [0.003, 1.7, 3.5])
@pytest.mark.parametrize("entry", ["dispatch", "apply_3d"])
def test_one_key_along_all_queries_has_its_share(lab, entry, size):
    """The others lie against them. All values are one size, between two of bfloat16, which cannot tell such logits.

    Of the small size the shares are nearly equal; of the others one key has all, in backward, too.
    """
    case = Case("float8", entry, magnitude=(size, size), frozen="query", bucket=None)
    query, key = draw(case)[0]
    sides = torch.full_like(key, -size)
    sides[:, 0] = size
    pair = leaves(lab, case, [torch.full_like(query, size), sides])
    for x in pair:
        vars(x)["_scale_inv"].mul_(1 + 0.75 * 2**-8)
    assert_results(run(lab, case, pair))


@pytest.mark.control
def test_interface_takes_its_options_by_position(lab):
    case = Case("bf16", "apply", 2, (64, 64), frozen="both")
    (query, key), indices = draw(case)
    options = SCALE, DV, 64, 2, 256  # the block of keys, the stages and the threads are the defaults
    with listening(64):
        results = lab.interface.sparse_mla_fwd_interface(query, key, indices.unsqueeze(2), *options)
    assert_right(case, [query, key], results)


UNINSTALLED = f"""
import sys, unittest.mock
sys.modules |= dict.fromkeys(("transformer_engine", "transformer_engine_torch"))
sys.modules["tilelang"] = unittest.mock.MagicMock()
import torch
from {OPS} import sparse_mla, tilelang_dsa
q, k = (torch.zeros(1, 256, heads, {D}).bfloat16() for heads in (16, 1))
indices = torch.zeros_like(q[..., :64], dtype=torch.int32)
kernel = lambda q, *_, **__: (q[..., :{DV}], q[..., 0].float())
with unittest.mock.patch.object(sparse_mla, "sparse_mla_fwd_interface", kernel):
    sparse_mla.SparseMLA.apply(q, k, indices[:, :, :1], {SCALE})
    transposed = q.transpose(0, 1), k.transpose(0, 1), indices[:, :, 0]
    assert tilelang_dsa.fused_sparse_mla_absorbed(*transposed, {SCALE}, {DV}) is not None, "the call is declined"
"""

if not TARGET.executed:  # which imports all of Megatron once more, and shows the same

    @pytest.mark.control
    def test_plain_bfloat16_needs_no_transformer_engine():
        ended = subprocess.run([sys.executable, "-P", "-c", UNINSTALLED], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]

else:

    def allocated():
        """Return the bytes on the GPU once they stand still: the thread that ran a backward lets go of some late."""
        gc.collect()
        before, now = -1, torch.cuda.memory_allocated()
        while before != now:
            time.sleep(0.2)
            before, now = now, torch.cuda.memory_allocated()
        return now

    @pytest.mark.control
    def test_float8_call_lets_its_memory_go(lab, figure):
        """The figure: what its backward needs, with what is kept for it, in bytes over those stored."""
        case = example("float8", "dispatch")
        pair, indices = leaves(lab, case), draw(case)[1]
        with listening():
            results = enter(lab, case, pair, indices)  # the first call makes the kernels
            given = upstream_gradient(results[0])  # before the start: its block may be larger than it is
            torch.autograd.grad(results, pair, given)
            del results
            start = allocated()
            results = enter(lab, case, pair, indices)
            kept = torch.cuda.memory_allocated() - start
            peak = kept + peak_memory(lambda: torch.autograd.grad(results, pair, given))
            del results
        figure("float8_backward_peak_over_storage", peak / sum(x.numel() * width(x) for x in pair))
        left = allocated() - start
        assert left <= 0, f"{left} bytes are left"
