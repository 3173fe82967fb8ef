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
length is a multiple of the bucket, 256 (others are copied for padding first, and dequantized thereby); tilelang 0.1.8
refuses it.

Cause: the dispatcher looks at .dtype. A wrapper reports the dtype that it stands for, and pointer 0. What contiguous(),
view() and to() give is wrapped again; permute() and unsqueeze() give plain tensors, dequantized on the way. ask.patch
dequantizes in one place, with a warning, and passes the gradient through. fix.patch also lets the forward kernel read
E4M3 with one scale per tensor as it is stored.

Scope: what reaches the kernels behind Megatron's two entry points, and what comes back. An operand is right where its
pointer is not null and it is no wider than what is stored, in the forward and in what is kept for backward, or the
caller is told by a warning or a log record of Megatron's; plain bf16 gives no such message.

The contract, of which CASES is a pairwise cover (one value of each factor):

    entry       fused_sparse_mla_absorbed, SparseMLA.apply with and without a batch dimension
    kind        how query and key are stored: each of Transformer Engine's classes, plain, and mixtures of them
    batch, lengths, bucket   (queries, keys), multiples or not of MCORE_DSA_TILELANG_SEQ_BUCKET or its default
    kernel      (heads, top-k, softmax scale); 5 heads are padded to 16, and a scale of None is the default
    magnitude   of query and key: scales that differ, keys that are tiny, and scales whose product is 0 in fp32
    indices     int32 with some -1 or rows of -1 alone, or int64 without
    frozen      which of query and key needs no gradient
    layout      dense, or strided below the wrapper

Besides: without gradients, in inference, in checkpoints, and with what is saved moved away; what forward read is
overwritten before backward, which leaves nothing behind; a second call finds other values in the same tensors, and one
of the same shape comes before the first one's backward; the caller's tensors stay as they are, and are not kept beside
a copy of them; warnings obey the caller's filters, and other ranks than the first are warned; the forward kernel's
options are given by position; Transformer Engine is not installed; scales have no dimension; query and key are faint,
but parallel, so that their logits are the largest that the scales allow, or such that bf16 has not their values. A
Float8Tensor that holds its transpose alone is not asked for: 2.12.0 does not dequantize it.

All stand for bf16, as the kernels' results are. Of a wrapper that stands for another dtype the dispatcher declines, and
SparseMLA.apply refuses, tells the caller, or gives that dtype.

`traced` (cpu): launches are recorded, and a plain stand-in in fp32, with operands and results of its dtypes, takes each
kernel's place: it is handed what the kernel would be, and refuses a null pointer as tilelang does, and the operands of
a kernel that was built with the same arguments for other dtypes or numbers of dimensions, or that are not compact: for
that Megatron normalizes the stride of a batch of one; that tilelang refuses such a stride, or a scale without a
dimension, was not seen on a GPU. It takes the scales of FP8 operands as one fp32 element each, query first, at the end.
Transformer Engine's Python is real; transformer_engine.pytorch is a bare package object, its compiled part a mock but
for the enum DType and dequantize, and torch.cuda.current_device() says cpu. Megatron is imported before it; its
fp8_utils are told of the class afterwards.
`executed`: everything is real but the wrappers' contents, which wrap() computes; what MXFP8 and NVFP4 store cannot be
dequantized before sm_100, and is judged on the CPU alone.

Tolerances: 2**-7 for outputs: bf16 rounds by 2**-9, and does so with query, key, probabilities and output. 2**-6 for
gradients: the probabilities' gradient is rounded too, and the output and the log of the sum come from rounded values.

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

import collections, enum, functools, gc, importlib.util, inspect, itertools, logging, math, types, typing
import unittest.mock, warnings

OPS = "megatron.core.transformer.experimental_attention_variant.ops"
MODULES = f"{OPS}.tilelang_dsa", f"{OPS}.sparse_mla", f"{OPS}.tilelang_sparse_mla_fwd"
BUCKET = "MCORE_DSA_TILELANG_SEQ_BUCKET"
D, DV = 576, 512  # the only dimensions that the kernels are made for
UNSEEN = "not shown: "
IGNORED = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)  # by Python's default filters
SCALE = 0.0416  # near D**-0.5, and not it
TE = "transformer_engine.pytorch"
DTYPES = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8}
FORMATS = {"kFloat8E4M3": ("float8_e4m3fn", 448), "kFloat8E5M2": ("float8_e5m2", 57344)}  # dtype, largest value
KINDS = {one: (one, one) for one in ("bf16", "float8", "float8_e5m2", "blockwise", "blockwise_1d", "mxfp8", "nvfp4")}
KINDS |= {"mixed": ("bf16", "float8"), "mixed_key": ("float8", "bf16")}  # query and key
KINDS |= {"mixed_formats": ("float8", "float8_e5m2"), "mixed_scaling": ("float8", "blockwise")}
CPU_ONLY = {"mxfp8", "nvfp4"}  # not dequantized before sm_100
ROUNDING, GRADIENT_ROUNDING = 2**-7, 2**-6  # relative errors; the docstring has the reasons
LEADING = "bf16", "float8", "float8_e5m2", "blockwise", "mxfp8", "mixed"  # kinds of the example that was reported
FAINT = 0.003, 0.003  # a magnitude at which draw() makes query and key parallel
SIZES = 2, (256, 256), (16, 128, SCALE)  # its batch, lengths and kernel: both lengths are multiples of the bucket
FACTORS = {
    "kind": (
        "bf16",
        "float8",
        "float8_e5m2",
        "blockwise",
        "blockwise_1d",
        "mxfp8",
        "nvfp4",
        "mixed",
        "mixed_key",
        "mixed_formats",
        "mixed_scaling",
    ),
    "entry": ("dispatch", "apply", "apply_3d"),
    "batch": (1, 3),
    "lengths": ((64, 64), (5, 30), (17, 70)),
    "kernel": ((16, 128, 0.0416), (5, 128, 0.0416), (32, 192, 0.1)),
    "magnitude": ((1.0, 0.3), (0.05, 4.0), (3.0, 1e-06)),
    "indices": ("some -1", "rows of -1", "int64"),
    "frozen": ("none", "query", "key", "both"),
    "layout": ("dense", "strided"),
    "bucket": (None, 64),
}
# Without a batch dimension there is no batch; only the dispatcher pads heads and takes int64; classes that scale by
# blocks refuse contiguous() of strided data; and a third backward kernel would cost more to compile than it shows.
EXCLUDED = [
    ("entry", "apply_3d", "batch", 3),
    ("entry", "apply", "kernel", (5, 128, 0.0416)),
    ("entry", "apply", "indices", "int64"),
    ("entry", "apply_3d", "kernel", (5, 128, 0.0416)),
    ("entry", "apply_3d", "indices", "int64"),
    ("kind", "blockwise", "layout", "strided"),
    ("kind", "blockwise_1d", "layout", "strided"),
    ("kind", "mxfp8", "layout", "strided"),
    ("kind", "nvfp4", "layout", "strided"),
    ("kind", "mixed_scaling", "layout", "strided"),
    ("kernel", (32, 192, 0.1), "frozen", "none"),
    ("kernel", (32, 192, 0.1), "frozen", "query"),
    ("kernel", (32, 192, 0.1), "frozen", "key"),
]
CASES = [
    ("bf16", "apply", 3, (17, 70), (32, 192, 0.1), (0.05, 4.0), "rows of -1", "both", "dense", 64),
    ("bf16", "apply_3d", 1, (64, 64), (16, 128, 0.0416), (0.05, 4.0), "rows of -1", "query", "dense", None),
    ("bf16", "dispatch", 1, (64, 64), (16, 128, 0.0416), (3.0, 1e-06), "some -1", "none", "strided", None),
    ("bf16", "dispatch", 3, (5, 30), (5, 128, 0.0416), (1.0, 0.3), "int64", "key", "strided", None),
    ("float8", "apply", 1, (64, 64), (32, 192, 0.1), (0.05, 4.0), "some -1", "both", "dense", 64),
    ("float8", "apply_3d", 1, (5, 30), (16, 128, 0.0416), (3.0, 1e-06), "rows of -1", "key", "dense", None),
    ("float8", "dispatch", 3, (17, 70), (5, 128, 0.0416), (1.0, 0.3), "int64", "none", "strided", 64),
    ("float8", "dispatch", 1, (64, 64), (5, 128, 0.0416), (1.0, 0.3), "int64", "query", "strided", 64),
    ("float8_e5m2", "apply", 3, (5, 30), (32, 192, 0.1), (1.0, 0.3), "rows of -1", "both", "strided", None),
    ("float8_e5m2", "apply_3d", 1, (17, 70), (16, 128, 0.0416), (3.0, 1e-06), "some -1", "key", "strided", None),
    ("float8_e5m2", "dispatch", 1, (64, 64), (5, 128, 0.0416), (0.05, 4.0), "some -1", "none", "dense", 64),
    ("float8_e5m2", "dispatch", 1, (64, 64), (16, 128, 0.0416), (0.05, 4.0), "int64", "query", "strided", None),
    ("blockwise", "apply", 1, (64, 64), (16, 128, 0.0416), (3.0, 1e-06), "rows of -1", "none", "dense", 64),
    ("blockwise", "apply_3d", 1, (64, 64), (16, 128, 0.0416), (3.0, 1e-06), "some -1", "query", "dense", None),
    ("blockwise", "dispatch", 3, (17, 70), (32, 192, 0.1), (0.05, 4.0), "some -1", "both", "dense", None),
    ("blockwise", "dispatch", 1, (5, 30), (5, 128, 0.0416), (1.0, 0.3), "int64", "key", "dense", None),
    ("blockwise_1d", "apply", 3, (64, 64), (16, 128, 0.0416), (1.0, 0.3), "some -1", "query", "dense", 64),
    ("blockwise_1d", "apply_3d", 1, (5, 30), (32, 192, 0.1), (3.0, 1e-06), "some -1", "both", "dense", None),
    ("blockwise_1d", "dispatch", 1, (17, 70), (5, 128, 0.0416), (0.05, 4.0), "rows of -1", "key", "dense", None),
    ("blockwise_1d", "dispatch", 1, (17, 70), (5, 128, 0.0416), (1.0, 0.3), "int64", "none", "dense", 64),
    ("mxfp8", "apply", 3, (17, 70), (16, 128, 0.0416), (0.05, 4.0), "rows of -1", "key", "dense", 64),
    ("mxfp8", "apply_3d", 1, (5, 30), (16, 128, 0.0416), (0.05, 4.0), "some -1", "query", "dense", 64),
    ("mxfp8", "dispatch", 3, (17, 70), (5, 128, 0.0416), (3.0, 1e-06), "rows of -1", "both", "dense", None),
    ("mxfp8", "dispatch", 1, (64, 64), (32, 192, 0.1), (1.0, 0.3), "int64", "both", "dense", 64),
    ("mxfp8", "dispatch", 1, (17, 70), (5, 128, 0.0416), (0.05, 4.0), "rows of -1", "none", "dense", 64),
    ("nvfp4", "apply", 3, (17, 70), (16, 128, 0.0416), (0.05, 4.0), "some -1", "query", "dense", None),
    ("nvfp4", "apply_3d", 1, (64, 64), (32, 192, 0.1), (1.0, 0.3), "rows of -1", "both", "dense", 64),
    ("nvfp4", "dispatch", 3, (5, 30), (5, 128, 0.0416), (3.0, 1e-06), "int64", "key", "dense", None),
    ("nvfp4", "dispatch", 3, (5, 30), (5, 128, 0.0416), (1.0, 0.3), "int64", "none", "dense", 64),
    ("mixed", "apply", 1, (64, 64), (16, 128, 0.0416), (1.0, 0.3), "rows of -1", "query", "strided", None),
    ("mixed", "apply_3d", 1, (5, 30), (16, 128, 0.0416), (0.05, 4.0), "some -1", "none", "strided", 64),
    ("mixed", "dispatch", 1, (17, 70), (32, 192, 0.1), (3.0, 1e-06), "int64", "both", "dense", None),
    ("mixed", "dispatch", 3, (64, 64), (5, 128, 0.0416), (1.0, 0.3), "rows of -1", "key", "dense", None),
    ("mixed_key", "apply", 3, (17, 70), (16, 128, 0.0416), (0.05, 4.0), "some -1", "key", "strided", 64),
    ("mixed_key", "apply_3d", 1, (5, 30), (16, 128, 0.0416), (1.0, 0.3), "rows of -1", "query", "strided", 64),
    ("mixed_key", "apply_3d", 1, (5, 30), (32, 192, 0.1), (3.0, 1e-06), "some -1", "both", "strided", 64),
    ("mixed_key", "dispatch", 1, (64, 64), (16, 128, 0.0416), (3.0, 1e-06), "int64", "both", "dense", None),
    ("mixed_key", "dispatch", 1, (5, 30), (5, 128, 0.0416), (0.05, 4.0), "int64", "none", "strided", 64),
    ("mixed_formats", "apply", 3, (5, 30), (32, 192, 0.1), (3.0, 1e-06), "some -1", "both", "strided", None),
    ("mixed_formats", "apply_3d", 1, (17, 70), (16, 128, 0.0416), (1.0, 0.3), "rows of -1", "query", "strided", None),
    ("mixed_formats", "dispatch", 3, (64, 64), (5, 128, 0.0416), (0.05, 4.0), "int64", "key", "dense", 64),
    ("mixed_formats", "dispatch", 3, (64, 64), (5, 128, 0.0416), (1.0, 0.3), "int64", "none", "strided", None),
    ("mixed_scaling", "apply", 1, (64, 64), (32, 192, 0.1), (0.05, 4.0), "some -1", "both", "dense", 64),
    ("mixed_scaling", "apply_3d", 1, (17, 70), (16, 128, 0.0416), (1.0, 0.3), "rows of -1", "key", "dense", 64),
    ("mixed_scaling", "apply_3d", 1, (5, 30), (16, 128, 0.0416), (0.05, 4.0), "rows of -1", "none", "dense", 64),
    ("mixed_scaling", "dispatch", 3, (5, 30), (5, 128, 0.0416), (3.0, 1e-06), "int64", "query", "dense", None),
    # every way that FP8 is read as it is stored, besides
    ("float8", "dispatch", 3, (17, 70), (16, 128, 0.0416), (1.0, 0.3), "some -1", "none", "strided", None),
    ("float8", "dispatch", 1, (64, 64), (16, 128, 0.0416), (3.0, 1e-06), "int64", "query", "dense", 64),
    ("float8", "dispatch", 3, (5, 30), (16, 128, 0.0416), (0.05, 4.0), "rows of -1", "key", "strided", 64),
    ("float8", "dispatch", 3, (64, 64), (32, 192, 0.1), (1.0, 0.3), "int64", "both", "dense", 64),
    ("float8", "apply_3d", 1, (64, 64), (16, 128, 0.0416), (0.05, 4.0), "some -1", "none", "dense", None),
    ("float8", "apply", 3, (17, 70), (16, 128, 0.0416), (1.0, 0.3), "some -1", "none", "strided", 64),
]
Case = collections.namedtuple("Case", FACTORS)  # noqa: PYI024 - its fields are the factors


class Lab(typing.NamedTuple):
    """Everything that a check needs besides its case."""

    torch: types.ModuleType
    device: str
    real: bool  # whether the kernels run
    tensors: types.ModuleType
    dsa: types.ModuleType
    mla: types.ModuleType
    launches: list
    builds: list


class Outcome(typing.NamedTuple):
    """What a case gave: results, operands of the first kernel, what was kept, said, came back, and broke."""

    pair: list
    results: list
    operands: list
    kept: list
    told: list
    gradients: list
    broken: list


def storage(x):
    """Return the tensors that hold a tensor's values and scales: fields of a wrapper, or itself."""
    torch = sys.modules["torch"]
    return [one for one in vars(x).values() if torch.is_tensor(one)] if type(x) is not torch.Tensor else [x]


def width(x):
    """Return the bytes in which one value is stored, scales aside."""
    data = max(storage(x), key=lambda one: one.numel())
    return data.nbytes / x.numel()


def values(tensor):
    """Return in float64 what a wrapper of any kind stands for, from its storage; or a plain tensor's values."""
    torch, fields = sys.modules["torch"], vars(tensor)
    if type(tensor) is torch.Tensor:
        return tensor.double()
    if "_fp4_dtype" in fields:  # two values a byte, E4M3 scales of 16 values, and one scale of all
        nibbles = torch.stack([fields["_rowwise_data"] & 15, fields["_rowwise_data"] >> 4], -1).flatten(-2).long()
        scale = fields["_rowwise_scale_inv"].view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
        whole = fields["_amax_rowwise"].double() / (6 * 448)
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.double)
        return sizes[nibbles & 7] * (1 - 2 * (nibbles >> 3)) * scale.view(nibbles.shape) * whole
    stored = getattr(torch, FORMATS[fields["_fp8_dtype"].name][0])
    if "_scale_inv" in fields:
        return fields["_data"].view(stored).double() * fields["_scale_inv"].double()
    data, scale = fields["_rowwise_data"].view(stored).double().view(-1, D), fields["_rowwise_scale_inv"]
    if scale.dtype == torch.uint8:  # MXFP8 has exponents
        scale = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    elif fields["_is_2D_scaled"]:
        scale = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:  # one column for each row of the data
        scale = scale.double().T.repeat_interleave(128, 1)
    return (data * scale[: len(data), :D]).view(tensor.shape)


def wrap_fp4(tensors, x, fields):
    """Quantize a bf16 tensor [..., D] into an NVFP4Tensor."""
    torch = sys.modules["torch"]
    whole, blocks = x.float().abs().amax(), x.float().view(-1, D // 16, 16)
    scale = (blocks.abs().amax(-1) / 6 / (whole / (6 * 448))).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * whole / (6 * 448))[..., None]
    limits = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])  # half way between the values that E2M1 has
    codes = (torch.bucketize(scaled.abs(), limits) + 8 * (scaled < 0)).to(torch.uint8).view(-1, 2)
    fields |= {"rowwise_data": (codes[:, 0] + 16 * codes[:, 1]).view(*x.shape[:-1], D // 2), "columnwise_data": None}
    fields |= {"rowwise_scale_inv": scale.view(torch.uint8), "columnwise_scale_inv": None, "quantizer": None}
    fields |= {"amax_rowwise": whole.view(1), "amax_columnwise": None, "with_gemm_swizzled_scales": False}
    return tensors.NVFP4Tensor(**fields, fp4_dtype=sys.modules["transformer_engine_torch"].DType.kFloat4E2M1)


def strided(x):
    """Return the same values, but for the last two dimensions not beside each other in memory."""
    return sys.modules["torch"].cat([x, x], -2)[..., : x.shape[-2], :]


def wrap(tensors, kind, x, *, apart=False, nominal=None):
    """Quantize a bf16 tensor [..., D] into a wrapper of a kind; only its class is Transformer Engine's.

    The scales of blocks are padded as Transformer Engine's quantizers do, where one value a block is not all of them.
    """
    torch, rows, name = sys.modules["torch"], x.numel() // D, "kFloat8E5M2" if "e5m2" in kind else "kFloat8E4M3"
    if kind == "bf16":
        return strided(x) if apart else x
    fields = {"shape": x.shape, "dtype": nominal or x.dtype, "device": x.device}
    if kind == "nvfp4":
        return wrap_fp4(tensors, x, fields)
    stored, peak = FORMATS[name]
    height, across = {"mxfp8": (1, 32), "blockwise": (128, 128), "blockwise_1d": (1, 128)}.get(kind, (rows, D))
    tall = torch.nn.functional.pad(x.float().view(rows, D), (0, -D % across, 0, -rows % height))
    tiles = tall.view(len(tall) // height, height, -1, across)
    scale = tiles.abs().amax((1, 3)) / peak
    scale = scale.log2().ceil().exp2() if kind == "mxfp8" else scale
    data = (tiles / scale[:, None, :, None]).reshape(tall.shape)[:rows, :D].to(getattr(torch, stored)).view(torch.uint8)
    data, dtypes = data.reshape(x.shape).contiguous(), sys.modules["transformer_engine_torch"].DType.__members__
    fields["fp8_dtype"] = dtypes[name]
    if kind.startswith("float8"):
        return tensors.Float8Tensor(**fields, data=strided(data) if apart else data, fp8_scale_inv=scale.view(1))
    fields |= {"rowwise_data": data, "columnwise_data": None, "columnwise_scale_inv": None, "quantizer": None}
    if kind == "blockwise":
        scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4))
        return tensors.Float8BlockwiseQTensor(**fields, rowwise_scale_inv=scale, is_2D_scaled=True)
    if kind == "blockwise_1d":
        scale = torch.nn.functional.pad(scale.T, (0, -rows % 4)).contiguous()
        return tensors.Float8BlockwiseQTensor(**fields, rowwise_scale_inv=scale, is_2D_scaled=False)
    fields["rowwise_scale_inv"] = (scale.log2() + 127).to(torch.uint8)
    return tensors.MXFP8Tensor(**fields, with_gemm_swizzled_scales=False)


def named(indices, keys):
    """Return how often each of the keys is named by the indices [b, s, k], if not -1: [b, s, t]."""
    valid = (indices >= 0).float()
    return valid.new_zeros(*indices.shape[:2], keys).scatter_add(2, indices.clamp(min=0).long(), valid)


def attention(torch, query, key, counts, scale):
    """Attend by the formula, with query [b, s, h, D] and key [b, t, D], in their precision.

    Returns the output [b, s, h, DV] and the log2 of the sum [b, s, h], both 0 where there is no key.
    """
    scale = D**-0.5 if scale is None else scale
    alive = (counts.sum(-1) > 0)[:, :, None, None]
    scores = torch.einsum("bshd,btd->bsht", query, key) * scale + counts.to(query.dtype).log()[:, :, None]
    scores = torch.where(alive, scores, 0)
    output = torch.einsum("bsht,btd->bshd", scores.softmax(-1), key[..., :DV])
    return torch.where(alive, output, 0), torch.where(alive[..., 0], scores.logsumexp(-1) / math.log(2), 0)


def distance(x, y):
    """Return the norm of the difference over the norm of the second; infinity for nan, which max() would lose."""
    error = float((x.detach().double() - y).norm() / y.norm().clamp(min=sys.float_info.min))
    return math.inf if math.isnan(error) else error


# What stands in for the kernels where none can run. Operands and results are as theirs, and so is fp32.


def used(indices):
    """Return how many rows and keys there are, without those that only pad."""
    return int((indices >= 0).any(-1).any(0).nonzero().max()) + 1, int(indices.max()) + 1


def forward_kernel(torch, sizes, query, key, indices, *scales):
    """Return output and log2 of the sum, for query [b, s, h, D], key [b, t, 1, D] and indices [b, s, 1, k]."""
    rows, keys = used(indices)
    q, k = query[:, :rows].float(), key[:, :keys, 0].float()
    if scales:
        q, k = q * scales[0], k * scales[1]
    counts = named(indices[:, :rows, 0], keys)
    output = torch.zeros(*query.shape[:3], sizes["dim"], dtype=torch.bfloat16)
    sums = torch.zeros(query.shape[:3])
    output[:, :rows], sums[:, :rows] = attention(torch, q, k, counts, sizes["sm_scale"])
    return output, sums


def backward_kernel(torch, sizes, *operands):
    """Return the query's gradient, and add the key's to the last operand."""
    query, key, upstream, indices, sums, delta, key_gradient = operands
    rows, keys = used(indices)
    q, k, given = query[:, :rows].float(), key[:, :keys, 0].float(), upstream[:, :rows].float()
    counts = named(indices[:, :rows, 0], keys)[:, :, None]
    scores = torch.einsum("bshd,btd->bsht", q, k) * sizes["sm_scale"] / math.log(2)
    once = torch.exp2(scores - sums[:, :rows, :, None])
    toward = torch.einsum("bshd,btd->bsht", given, k[..., :DV]) - delta[:, :rows, :, None]
    of_scores = (once * toward * sizes["sm_scale"]).bfloat16() * counts
    key_gradient[:, :keys, 0] += torch.einsum("bsht,bshd->btd", of_scores, q)
    key_gradient[:, :keys, 0, :DV] += torch.einsum("bsht,bshd->btd", once.bfloat16() * counts, given)
    gradient = torch.zeros_like(query)
    gradient[:, :rows] = torch.einsum("bsht,btd->bshd", of_scores, k)
    return gradient


STAND_INS = {
    "sparse_mla_fwd": forward_kernel,
    "bwd": backward_kernel,
    "preprocess": lambda _torch, _sizes, output, upstream: (output.float() * upstream.float()).sum(-1),
    "postprocess": lambda _torch, _sizes, gradient: gradient.bfloat16(),
}


def recording(jit, launches, builds):
    """Stand before tilelang.jit, or in its place where it is None: note what is built, and what each is handed.

    In its place it refuses what tilelang refuses: a null pointer, the stride of a batch of one that is not what it
    would be in a larger one, and operands of other dtypes or numbers of dimensions than those with which the kernel
    that these arguments build was launched first, for it has one signature.
    """
    signatures = {}

    def launch(kernel, name, sizes, *given):
        launches.append([(str(x.dtype), x.nbytes, x.dtype.itemsize, not x.data_ptr()) for x in given])
        dtypes = [(one[0], x.ndim) for one, x in zip(launches[-1], given, strict=True)]
        if jit is None and any(null for *_, null in launches[-1]):
            raise RuntimeError(f"kernel {name}: data pointer expected non-NULL, but got NULL")
        if jit is None and any(x.stride() != x.new_empty(x.shape, device="meta").stride() for x in given):
            raise RuntimeError(f"kernel {name}: strides expected compact, but got {[x.stride() for x in given]}")
        if jit is None and (first := signatures.setdefault(f"{name} {sizes}", dtypes)) != dtypes:
            raise RuntimeError(f"kernel {name}: operands expected {first}, but got {dtypes}")
        return kernel(*given)

    def decorate(*args, **options):
        def wrapped(function):
            make = jit(*args, **options)(function) if jit else None

            def build(*sizes, **named):
                builds.append((function.__name__, sizes, named))
                bound = inspect.signature(function).bind(*sizes, **named)
                bound.apply_defaults()
                made = make(*sizes, **named) if jit else None
                stand_in = functools.partial(STAND_INS.get(function.__name__, print), sys.modules["torch"])
                sizes = dict(bound.arguments)
                return functools.partial(launch, made or quiet(stand_in, sizes), function.__name__, sizes)

            return build

        return jit(*args) if jit and args and callable(args[0]) else wrapped  # bare, or with options

    return decorate


def quiet(stand_in, sizes):
    """Return a stand-in that is no part of what is observed: without gradients, and out of sight of a dispatch mode."""
    torch = sys.modules["torch"]

    def kernel(*operands):
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():  # noqa: SLF001
            return stand_in(sizes, *operands)

    return kernel


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
        torch = importlib.import_module("torch")
        torch.cuda.current_device = lambda: torch.device("cpu")  # where its classes put what they make
    return importlib.import_module(f"{TE}.tensor")


def load(launches, builds=None, *, stub):
    """Import all that is judged, with every kernel's build and launch on record."""
    builds = [] if builds is None else builds
    if stub:
        jit = recording(None, launches, builds)
        sys.modules |= {"tilelang": unittest.mock.MagicMock(jit=jit), "transformer_engine": None}
        utilities = importlib.import_module("megatron.core.fp8_utils")
        del sys.modules["transformer_engine"]
        tensors = wrappers(stub=True)
        utilities.FP8_TENSOR_CLASS, utilities.HAVE_TE_FP8_TENSOR_CLASS = tensors.QuantizedTensor, True
    else:
        tilelang, tensors = importlib.import_module("tilelang"), wrappers(stub=False)
        tilelang.jit = recording(tilelang.jit, launches, builds)
    return tensors, *map(importlib.import_module, MODULES)


@contextlib.contextmanager
def listening():
    """Collect what Megatron says, by warning or log record; yields a list that is filled at the end.

    What Python shows nobody, unless he asks for it, begins with UNSEEN.
    """
    told, handling = [], unittest.mock.patch.object(logging.Logger, "handle")
    with warnings.catch_warnings(record=True, action="always") as caught, handling as logged:
        yield told
    records = [call.args[0] for call in logged.call_args_list]
    said = [(one.pathname, one.levelno >= logging.WARNING, one.getMessage()) for one in records]
    said += [(one.filename, not issubclass(one.category, IGNORED), str(one.message)) for one in caught]
    told += [text if shown else UNSEEN + text for file, shown, text in said if f"{os.sep}megatron{os.sep}" in file]


def is_told(told):
    """Return whether a caller sees anything of what was said."""
    return any(not text.startswith(UNSEEN) for text in told)


def draw(lab, case):
    """Return query and key, plain and [b, s, h, D], and indices [b, s, k], all by a seed that is the case itself."""
    torch, (heads, top, _), (queries, keys) = lab.torch, case.kernel, case.lengths
    random = torch.Generator().manual_seed(sum(map(ord, repr(case))))
    sizes = zip((queries, keys), (heads, 1), case.magnitude, strict=True)
    pair = [torch.randn(case.batch, s, h, D, generator=random).mul(by).bfloat16().to(lab.device) for s, h, by in sizes]
    if case.magnitude == FAINT:  # each key lies along every query, or, one in four, against it
        along = torch.randn(D, generator=random).sign().mul(FAINT[0]).bfloat16().to(lab.device)
        sides = torch.rand(pair[1].shape[:-1], generator=random).sub(0.25).sign().bfloat16().to(lab.device)
        pair = [along.expand_as(pair[0]).contiguous(), sides[..., None] * along]
    indices = torch.randint(keys, (case.batch, queries, top), generator=random, dtype=torch.int32)
    if case.indices == "one row":  # for the example where no kernel runs, and its results are not judged
        indices[:, 1:] = -1
    if "-1" in case.indices:
        indices[torch.rand(indices.shape, generator=random) < 0.125] = -1
    if "rows" in case.indices:
        indices[:, ::3] = -1
    return pair, (indices.long() if case.indices == "int64" else indices).to(lab.device)


def enter(lab, case, pair, indices):
    """Call the entry point of a case; return its results [b, s, h, ...]: none where it declines."""
    scale = case.kernel[2]
    if case.entry == "dispatch":
        result = lab.dsa.fused_sparse_mla_absorbed(*pair, indices, scale, DV)
        return [] if result is None else [result.transpose(0, 1)]
    if case.entry == "apply":
        return list(lab.mla.SparseMLA.apply(*pair, indices.unsqueeze(2), scale))
    return [one.unsqueeze(0) for one in lab.mla.SparseMLA.apply(*pair, indices[0].unsqueeze(1), scale)]


def leaves(lab, case, plain):
    """Return query and key as the entry point takes them, stored as the case says, and requiring gradients."""
    made = []
    for name, kind, x in zip(("query", "key"), KINDS[case.kind], plain, strict=True):
        laid = {"dispatch": x.transpose(0, 1).contiguous(), "apply": x, "apply_3d": x[0]}[case.entry]
        one = wrap(lab.tensors, kind, laid, apart=case.layout == "strided").detach()
        made.append(one.requires_grad_(case.frozen not in (name, "both")))
    return made


def upstream_gradient(torch, result):
    """Return a gradient of an output, other for each element, and not contiguous."""
    random = torch.Generator(result.device).manual_seed(9)
    given = torch.randn(*result.shape[::-1], generator=random, device=result.device)
    return given.bfloat16().permute(*reversed(range(result.ndim)))


def sizes_in_memory(tensors):
    """Return the bytes of the memory behind each tensor of a list, of which none is a wrapper."""
    return [x.untyped_storage().nbytes() for x in tensors]


def gradients_of(torch, result, pair):
    """Return the gradients of those of a pair that require them: None for one that is none; None where refused."""
    wanted = [x for x in pair if x.requires_grad]
    if not result.requires_grad:
        return [None] * len(wanted)
    given = upstream_gradient(torch, result)
    try:
        return torch.autograd.grad(result, wanted, given, retain_graph=True, allow_unused=True)
    except RuntimeError as error:  # autograd's own, which has several texts for it: no line of upstream is in it
        if "inplace" in str(error):
            return None
        if "returned an invalid gradient" not in str(error):
            raise
        traceback.print_exc()
        return [None] * len(wanted)  # which is no gradient for judge_result


def run(lab, case, pair=None):
    """Run a case forward, and twice backward; return the Outcome. What the code under test raises is not caught."""
    torch, (plain, indices), kept, held, broken = lab.torch, draw(lab, case), [], [], []
    pair, bucket = pair or leaves(lab, case, plain), {} if case.bucket is None else {BUCKET: str(case.bucket)}
    mine = [x.detach() for one in pair for x in storage(one)]
    before, sizes = [x.clone() for x in mine], sizes_in_memory(mine)

    def keep(x):
        kept.append((x.numel(), width(x), x.is_floating_point()))
        held.extend((one, *sizes_in_memory([one])) for one in storage(x))
        return x

    lab.launches.clear()
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with unittest.mock.patch.dict(os.environ, bucket), listening() as told, hooks:
        results, gradients = enter(lab, case, pair, indices), []
        turns = 2 if case.frozen == "none" else 1  # the second shows that nothing was used up
        for _ in range(turns if results and any(x.requires_grad for x in pair) else 0):
            gradients.append(gradients_of(torch, results[0], pair))
            if any(sizes_in_memory([one]) != [size] for one, size in held):
                broken.append("backward freed what was saved for it")
                break  # what reads it again reads no memory
    if sizes_in_memory(mine) != sizes:
        broken.append("the caller's memory was freed")
    elif not all(map(torch.equal, mine, before)):
        broken.append("the caller's tensors were altered")
    return Outcome(pair, results, lab.launches[0] if lab.launches else [], kept, told, gradients, broken)


def judge_handed(attempt, case):
    """Judge the pointers and widths of what the kernel reads and backward keeps, and what the caller is told."""
    outcome = attempt(case)
    widths = [width(x) for x in outcome.pair]
    known = {"torch.bfloat16", "torch.float32", "torch.int32", "torch.float8_e4m3fn", "torch.float8_e5m2"}
    sound = len(outcome.operands) > 2 and all(one[0] in known and not one[3] for one in outcome.operands)
    read = all(size <= stored for (_, _, size, _), stored in zip(outcome.operands, widths, strict=False))
    wide = [(count, size) for count, size, floating in outcome.kept if floating and count >= D]
    kept = all(size <= max(widths) for _, size in wide)
    enough = sum(count for count, _ in wide) >= sum(x.numel() for x in outcome.pair) or case.frozen == "both"
    quantized = case.kind != "bf16"
    ok = sound and enough and (is_told(outcome.told) or (read and kept) if quantized else not outcome.told)
    measured = {"case": case, "operands": outcome.operands, "stored": widths, "kept": wide, "told": outcome.told}
    return ok, {"measured": measured, "unit": "operand: [dtype, bytes, bytes of an element, null]; bytes of an element"}


def expected(lab, case):
    """Return output, log of the sum and the wanted gradients by the formula, in float64, on the quantized values."""
    torch, (plain, indices) = lab.torch, draw(lab, case)
    pair = leaves(lab, case, plain)
    exact = [values(x.detach()) for x in pair]
    exact = {"dispatch": [x.transpose(0, 1) for x in exact], "apply_3d": [x[None] for x in exact]}.get(
        case.entry, exact
    )
    exact = [x.contiguous().requires_grad_(one.requires_grad) for x, one in zip(exact, pair, strict=True)]
    counts = named(indices, case.lengths[1])
    output, sums = attention(torch, exact[0], exact[1][:, :, 0], counts, case.kernel[2])
    wanted = [x for x in exact if x.requires_grad]
    given = upstream_gradient(torch, output).double()
    found = torch.autograd.grad(output, wanted, given) if wanted else ()
    found = [{"dispatch": x.transpose(0, 1), "apply_3d": x.squeeze(0)}.get(case.entry, x) for x in found]
    return output.detach(), sums.detach(), found


def judge_result(lab, attempt, case):
    """Judge output, log of the sum, and both backwards, against the formula."""
    outcome, (output, sums, wanted) = attempt(case), expected(lab, case)
    if not outcome.results or outcome.broken:
        return False, {"reason": ", ".join(outcome.broken) or "the call was declined"}

    def error(found, wanted, dtype, rounding):
        plain = type(found) is lab.torch.Tensor and found.dtype == dtype and found.shape == wanted.shape
        return distance(found, wanted) / rounding if plain else math.inf

    errors = {"output": error(outcome.results[0], output, lab.torch.bfloat16, ROUNDING)}
    if len(outcome.results) > 1:
        errors["sum"] = error(outcome.results[1], sums, lab.torch.float32, ROUNDING)
    for turn, found in enumerate(outcome.gradients):
        for index, (x, y) in enumerate(zip(found or [None] * len(wanted), wanted, strict=True)):
            errors[f"gradient {index}, backward {turn}"] = error(x, y, lab.torch.bfloat16, GRADIENT_ROUNDING)
    ok = all(one <= 1 for one in errors.values())  # a nan is not
    return ok, {"measured": errors, "tolerance": 1, "unit": "of the error that rounding explains"}


def judge_example(probe, attempt, case):
    """Judge what the reported example hands to the kernel, and say how many bytes that is."""
    ok, measured = judge_handed(attempt, case)
    read = sum(size for dtype, size, *_ in attempt(case).operands if dtype != "torch.int32")
    stored = sum(x.numel() * width(x) for x in attempt(case).pair)
    probe.say("FIGURE", name=f"{case.kind}_{case.entry}_bytes_over_storage", value=read / stored, unit="1")
    return ok, measured


def judge_example_result(probe, lab, attempt, case):
    """Judge the results of the reported example, where kernels run, and give those of bf16 for comparison."""
    ok, measured = judge_result(lab, attempt, case)
    outcome, fixed = attempt(case), case.kind == "bf16"
    for name, x in zip(("output", "sum"), outcome.results, strict=False):
        probe.output(f"{case.kind}.{case.entry}.{name}", x, must_match=fixed)
    if ok:
        (query, _), (again, _) = outcome.gradients
        repeats = fixed and lab.torch.equal(query, again)
        probe.output(f"{case.kind}.{case.entry}.query_gradient", query, must_match=repeats)
    return ok, measured


def judge_way_out(lab, kind):
    """Judge what Megatron relies on: that it can tell a wrapper, and that two ways lead out of one."""
    x = wrap(lab.tensors, kind, draw(lab, example(kind, "apply"))[0][1])
    detected = importlib.import_module("megatron.core.fp8_utils").is_float8tensor(x)
    plainly = x.permute(1, 0, 2, 3).transpose(0, 1), x.dequantize()
    found = [detected, *(type(y) is lab.torch.Tensor and distance(y, values(x)) <= ROUNDING for y in plainly)]
    return all(found), {"measured": found, "unit": "detected, permute, dequantize"}


def judge_declined(lab, kind):
    """Judge that the dispatcher declines what the kernels cannot do, before it touches or says anything."""
    torch, case = lab.torch, Case("bf16", "dispatch", 2, (8, 16), (16, 64, SCALE), (1, 1), "some -1", "both", "", None)
    (query, key), indices = draw(lab, case)
    query, key = (x.transpose(0, 1).contiguous() for x in (query, key))
    outer = {"nominal": torch.float16} if kind != "bf16" else {}
    wrapped = functools.partial(wrap, lab.tensors, kind)
    plain = (lambda x: x.half()) if kind == "bf16" else functools.partial(wrapped, **outer)
    arguments = {
        "dtype": (plain(query), plain(key), indices, SCALE, DV),
        "key of another dtype": (wrapped(query), plain(key), indices, SCALE, DV),
        "two key heads": (wrapped(query), wrapped(key.expand(-1, -1, 2, -1).contiguous()), indices, SCALE, DV),
        "24 heads": (wrapped(query.repeat(1, 1, 2, 1)[:, :, :24].contiguous()), wrapped(key), indices, SCALE, DV),
        "batches": (wrapped(query), wrapped(key[:, :1].contiguous()), indices, SCALE, DV),
        "rows": (wrapped(query), wrapped(key), indices[:, 1:], SCALE, DV),
        "top-k": (wrapped(query), wrapped(key), indices[..., 1:], SCALE, DV),
        "values": (wrapped(query), wrapped(key), indices, SCALE, 256),
        "no batch": (wrapped(query)[0], wrapped(key), indices, SCALE, DV),
    }
    lab.launches.clear()
    with listening() as told:
        declined = {name: lab.dsa.fused_sparse_mla_absorbed(*given) is None for name, given in arguments.items()}
    ok = all(declined.values()) and not lab.launches and not told
    return ok, {"measured": {"declined": declined, "launches": len(lab.launches), "told": told}}


@contextlib.contextmanager
def waiting(lab):
    """Collect the operators that wait for the device: by what PyTorch warns of on a GPU, else by their names."""
    torch, waits = lab.torch, []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # noqa: SLF001
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):  # noqa: SLF001
                waits.append(str(function))
            return function(*args, **(kwargs or {}))

    if not lab.real:
        with Watch():
            yield waits
        return
    with warnings.catch_warnings(record=True, action="always") as caught:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits += [text for one in caught if "called a synchronizing" in (text := str(one.message))]


def judge_scales(lab):
    """Judge that two pairs with other scales share a kernel, and that nothing waits for the device to know them."""
    first = Case("float8", "dispatch", 1, (8, 16), (16, 128, SCALE), (1, 1), "some -1", "both", "dense", None)
    built, waited = [], []
    for case in (first, first._replace(magnitude=(2.5, 0.7)), first._replace(magnitude=(0.1, 9))):
        plain, indices = draw(lab, case)
        pair = leaves(lab, case, plain)
        lab.builds.clear()
        with waiting(lab) as waits:
            enter(lab, case, pair, indices)
        built.append(len(lab.builds))
        waited += waits
    return not any(built[1:]) and not waited, {"measured": {"built": built, "waits": waited}}


def judge_overwritten(lab, kind, entry):
    """Judge backward where a tensor that forward read was overwritten: it is refused, or right by the values before."""
    case = Case(kind, entry, 1, (64, 64), (16, 128, SCALE), (1, 1), "some -1", "none", "dense", 64)
    (plain, _), (*_, wanted), found = draw(lab, case), expected(lab, case), {}
    for operand, name in enumerate(("query", "key")):
        for place in range(len(storage(leaves(lab, case, plain)[operand]))):
            gradients = overwriting(lab, case, operand, place)
            errors = gradients and [
                math.inf if x is None else distance(x, y) for x, y in zip(gradients, wanted, strict=True)
            ]
            found[f"{name} {place}"] = max(errors) / GRADIENT_ROUNDING if errors else "refused"
    ok = all(one == "refused" or one <= 1 for one in found.values())
    return ok, {"measured": found, "tolerance": 1, "unit": "of the error that rounding explains"}


def overwriting(lab, case, operand, place):
    """Return the gradients after a tensor of an operand was overwritten behind forward; None where that is refused."""
    torch, (plain, indices) = lab.torch, draw(lab, case)
    pair = leaves(lab, case, plain)
    with unittest.mock.patch.dict(os.environ, {BUCKET: str(case.bucket)}), listening():
        if not (results := enter(lab, case, pair, indices)):
            return [None, None]  # the call was declined: there are no gradients, which is wrong, and not "refused"
        tensor = storage(pair[operand])[place]
        with torch.no_grad():
            tensor.mul_(2) if tensor.is_floating_point() else tensor.bitwise_xor_(128)  # 128 is E4M3's sign
        return gradients_of(torch, results[0], pair)


def judge_in_flight(lab, kind, entry):
    """Judge both backwards of two calls of one shape, as two layers make them: forward, forward, backward, backward."""
    batch = 2 if entry == "dispatch" else 1
    first = Case(kind, entry, batch, (17, 70), (16, 128, SCALE), (1.0, 0.3), "some -1", "none", "dense", 64)
    made, errors = [], {}
    with unittest.mock.patch.dict(os.environ, {BUCKET: "64"}), listening():
        for case in (first, first._replace(magnitude=(0.5, 2.0))):
            plain, indices = draw(lab, case)
            pair = leaves(lab, case, plain)
            if not (results := enter(lab, case, pair, indices)):
                return False, {"reason": "the call was declined"}
            made.append((case, pair, results[0]))
        for turn, (case, pair, result) in enumerate(made):
            found, (output, _, wanted) = gradients_of(lab.torch, result, pair) or (None, None), expected(lab, case)
            errors[f"output {turn}"] = distance(result, output) / ROUNDING
            for index, (x, y) in enumerate(zip(found, wanted, strict=True)):
                error = math.inf if x is None else distance(x, y) / GRADIENT_ROUNDING
                errors[f"gradient {index} of call {turn}"] = error
    ok = all(one <= 1 for one in errors.values())
    return ok, {"measured": errors, "tolerance": 1, "unit": "of the error that rounding explains"}


def judge_kept(lab, kind):
    """Judge that neither query nor key is kept twice for backward: as the caller gave it, and as a copy of it.

    The dispatcher makes batch the first dimension, for which three batches are copied, and dequantizes what no kernel
    reads. What the caller gave is no leaf of the graph, so that nobody else keeps it.
    """
    torch, saved = lab.torch, []
    weak = torch.multiprocessing.reductions.StorageWeakRef
    case = Case(kind, "dispatch", 3, (17, 70), (16, 128, SCALE), (1.0, 0.3), "some -1", "none", "dense", 64)

    class Quantize(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return wrap(lab.tensors, kind, x.clone())

        @staticmethod
        def backward(_, gradient):
            return gradient

    plain, indices = draw(lab, case)
    pair = [Quantize.apply(x.transpose(0, 1).contiguous().requires_grad_()) for x in plain]
    data = [max(storage(x), key=lambda one: one.numel()) for x in pair]
    watched = [(x.numel(), weak(x.untyped_storage())) for x in data]

    def keep(x):
        saved.extend((one.numel(), weak(one.untyped_storage())) for one in storage(x))
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with unittest.mock.patch.dict(os.environ, {BUCKET: "64"}), listening(), hooks:
        results = enter(lab, case, pair, indices)
    del pair, data
    gc.collect()
    kept = []
    for name, (count, own) in zip(("query", "key"), watched, strict=True):
        copied = any(number == count and one != own and not one.expired() for number, one in saved)
        kept += [name] if copied and not own.expired() else []
    return bool(results) and not kept, {"measured": kept, "unit": "of the caller's tensors, kept besides a copy"}


def judge_not_copied(lab, kind, entry):
    """Judge that of one batch, which needs no other layout, what is as wide as it was given is kept where it lies."""
    torch, saved = lab.torch, []
    case = Case(kind, entry, 1, (17, 70), (16, 128, SCALE), (1.0, 0.3), "some -1", "none", "dense", 64)
    plain, indices = draw(lab, case)
    pair = leaves(lab, case, plain)
    given = [max(storage(x), key=lambda one: one.numel()) for x in pair]

    def keep(x):
        saved.extend((one.nbytes, one.data_ptr()) for one in storage(x))
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with unittest.mock.patch.dict(os.environ, {BUCKET: "64"}), listening(), hooks:
        results = enter(lab, case, pair, indices)
    copied = [
        name
        for name, x in zip(("query", "key"), given, strict=True)
        if any(size == x.nbytes and place != x.data_ptr() for size, place in saved)
    ]
    return bool(results) and not copied, {"measured": copied, "unit": "copied, though it is kept as it was given"}


def large(lab, least):
    """Return the places of the tensors that somebody holds, of so many bytes and more."""
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # some modules warn of what they are asked for
        found = [x for x in gc.get_objects() if issubclass(type(x), lab.torch.Tensor)]
    return {one.data_ptr() for x in found for one in storage(x) if one.nbytes >= least}


def judge_let_go(lab, kind, entry):
    """Judge that backward leaves nothing behind, where the output and its graph are held on."""
    case = Case(kind, entry, 1, (5, 30), (16, 128, SCALE), (1.0, 0.3), "some -1", "none", "dense", 64)
    plain, indices = draw(lab, case)
    pair = leaves(lab, case, plain)
    with unittest.mock.patch.dict(os.environ, {BUCKET: "64"}), listening():
        if not (results := enter(lab, case, pair, indices)):
            return False, {"reason": "the call was declined"}
        before = large(lab, plain[1].numel())
        if None in (gradients_of(lab.torch, results[0], pair) or [None]):
            return False, {"reason": "there is a gradient missing"}
        left = len(large(lab, plain[1].numel()) - before)
    return not left, {"measured": left, "tolerance": 0, "unit": "tensors of a key's size or more, left behind"}


def judge_modes(lab, kind, entry):
    """Judge calls without gradients, in inference, in both kinds of checkpoint, and with what is saved moved away.

    A checkpoint of the newer kind, and a hook that moves tensors, give back what was saved once for each backward.
    """
    torch, checkpoint = lab.torch, importlib.import_module("torch.utils.checkpoint").checkpoint
    case = Case(kind, entry, 1, (5, 30), (16, 128, SCALE), (1.0, 0.3), "some -1", "none", "dense", 64)
    (plain, indices), (output, _, wanted), errors, packed = draw(lab, case), expected(lab, case), {}, []

    def call(*pair):
        return (enter(lab, case, pair, indices) or [None])[0]

    def compare(name, result, pair, given=None):
        errors[name] = math.inf if result is None else distance(result, output) / ROUNDING
        if result is not None and given is not None:
            result.backward(given)
            for operand, (x, y) in enumerate(zip(pair, wanted, strict=True)):
                error = math.inf if x.grad is None else distance(x.grad, y) / GRADIENT_ROUNDING
                errors[f"{name}, gradient {operand}"] = error

    def pack(x):
        packed.append([x, 0])
        return len(packed) - 1

    def unpack(place):
        packed[place][1] += 1
        return packed[place][0].clone()

    with unittest.mock.patch.dict(os.environ, {BUCKET: "64"}), listening():
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                compare(mode.__name__, call(*leaves(lab, case, plain)), ())
        given = upstream_gradient(torch, output)
        for reentrant in (True, False):
            pair = leaves(lab, case, plain)
            compare(f"checkpoint, reentrant {reentrant}", checkpoint(call, *pair, use_reentrant=reentrant), pair, given)
        pair = leaves(lab, case, plain)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = call(*pair)
        compare("moved", result, pair, given)
    often = max((times for _, times in packed), default=0)
    ok = often <= 1 and all(one <= 1 for one in errors.values())
    measured = {"errors": errors, "given back": often}
    return ok, {"measured": measured, "tolerance": 1, "unit": "of the error that rounding explains; times a backward"}


def judge_steep(lab, kind, entry):
    """Judge the gradient of a key that has all the probability, by logits that bf16 cannot tell from others.

    All values of query and key are one size, which lies between two of bf16; the other keys lie against the queries.
    Whatever is rounded, the probabilities of backward have to be those of its own logits.
    """
    torch = lab.torch
    case = Case(kind, entry, 1, (5, 30), (16, 128, SCALE), (1.0, 1.0), "int64", "query", "dense", None)
    indices, errors = draw(lab, case)[1], {}
    if entry == "apply_3d":
        indices = indices.int()
    indices[..., 0] = 0
    ones = torch.ones(1, 5, 16, D, dtype=torch.bfloat16, device=lab.device)
    sides = torch.full((1, 30, 1, 1), -1, dtype=torch.bfloat16, device=lab.device)
    sides[:, 0] = 1
    for size in (1.7, 3.5):
        query, key = leaves(lab, case, [ones * size, sides * size * ones[:, :1, :1]])
        for x in storage(query.detach()) + storage(key.detach()):
            if x.numel() == 1:  # the scales
                x.mul_(1 + 0.75 * 2**-8)
        exact = [values(x.detach()) for x in (query, key)]
        exact = [{"dispatch": x.transpose(0, 1), "apply_3d": x[None]}.get(entry, x).contiguous() for x in exact]
        exact[1].requires_grad_()
        with listening():
            results = enter(lab, case, [query, key], indices)
        if not results:
            return False, {"reason": "the call was declined"}
        output, _ = attention(torch, exact[0], exact[1][:, :, 0], named(indices, 30), SCALE)
        given = torch.ones_like(results[0])
        (found,) = torch.autograd.grad(results[0], key, given)
        (wanted,) = torch.autograd.grad(output, exact[1], given.double())
        wanted = {"dispatch": wanted.transpose(0, 1), "apply_3d": wanted.squeeze(0)}.get(entry, wanted)
        errors[f"output {size}"] = distance(results[0], output) / ROUNDING
        errors[f"key {size}"] = distance(found, wanted) / GRADIENT_ROUNDING
    ok = all(one <= 1 for one in errors.values())
    return ok, {"measured": errors, "tolerance": 1, "unit": "of the error that rounding explains"}


def judge_told_by_rank(lab, kind, entry):
    """Judge that every rank of three is told: with pipeline parallelism none of them has every layer."""
    case, found = example(kind, entry)._replace(indices="one row"), {}
    for rank in range(3):
        answers = {
            "is_initialized": lambda: True,
            "get_rank": lambda *_, rank=rank: rank,
            "get_world_size": lambda *_: 3,
        }
        with unittest.mock.patch.multiple(lab.torch.distributed, **answers):
            ok, measured = judge_handed(functools.partial(run, lab), case)
        found[rank] = ok, measured["measured"]["told"]
    return all(ok for ok, _ in found.values()), {"measured": found, "unit": "right, and what a rank is told"}


def judge_one_element(lab, entry):
    """Judge scales that are one element without a dimension, after a call whose scales have one."""
    case = Case("float8", entry, 1, (5, 30), (16, 128, SCALE), (1.0, 0.3), "some -1", "none", "dense", None)
    run(lab, case)
    pair = leaves(lab, case, draw(lab, case)[0])
    with lab.torch.no_grad():
        pair = [
            type(x)(
                shape=x.shape, dtype=x.dtype, **x.get_metadata() | {"fp8_scale_inv": vars(x)["_scale_inv"].view(())}
            )
            for x in pair
        ]
    pair = [x.requires_grad_() for x in pair]
    return judge_result(lab, functools.partial(run, lab, pair=pair), case)


def judge_filters(lab, kind, entry):
    """Judge that the caller's filters decide what becomes of a warning: it is shown, is not, or is an error."""
    case = Case(kind, entry, 1, (64, 64), (16, 128, SCALE), (1, 1), "some -1", "both", "dense", 64)
    (plain, indices), found = draw(lab, case), {}
    for action in ("always", "ignore", "error"):
        pair = leaves(lab, case, plain)
        with unittest.mock.patch.dict(os.environ, {BUCKET: "64"}), warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings(action, module=r"megatron\.")
            try:
                enter(lab, case, pair, indices)
                found[action] = [str(one.message) for one in caught if f"{os.sep}megatron{os.sep}" in one.filename]
            except Warning as error:
                found[action] = f"raises {type(error).__name__}"
    raised = isinstance(found["error"], str)
    ok = found["ignore"] == [] and (raised if found["always"] else found["error"] == [])
    return ok, {"measured": found, "unit": "what is shown, by the filter's action"}


def judge_by_position(lab):
    """Judge the forward kernel with every option of the release by position, on plain bf16."""
    interface = importlib.import_module(MODULES[2])
    case = Case("bf16", "apply", 2, (64, 64), (16, 128, SCALE), (1.0, 0.3), "some -1", "both", "dense", 64)
    (query, key), indices = draw(lab, case)
    output, sums, _ = expected(lab, case)
    options = SCALE, DV, 64, 2, 256  # the block of keys, the stages and the threads are the defaults
    with unittest.mock.patch.dict(os.environ, {BUCKET: "64"}):
        found = interface.sparse_mla_fwd_interface(query, key, indices.unsqueeze(2), *options)
    errors = {
        name: distance(x, y) / ROUNDING for name, x, y in zip(("output", "sum"), found, (output, sums), strict=True)
    }
    ok = all(one <= 1 for one in errors.values())
    return ok, {"measured": errors, "tolerance": 1, "unit": "of the error that rounding explains"}


def judge_refilled(lab, kind, entry):
    """Judge a second call on the same tensors, after other values were put into what stores them.

    Autograd is told nothing of it, for Transformer Engine's kernels, which quantize in place, tell it nothing.
    """
    first = Case(kind, entry, 1, (64, 64), (16, 128, SCALE), (1, 1), "some -1", "none", "dense", 64)
    second = first._replace(magnitude=(2.5, 0.7))
    pair, others = (leaves(lab, case, draw(lab, case)[0]) for case in (first, second))
    if broken := run(lab, first, pair).broken:
        return False, {"reason": ", ".join(broken)}
    for old, new in zip(pair, others, strict=True):
        for x, y in zip(storage(old), storage(new), strict=True):
            x.data.copy_(y)
    return judge_result(lab, functools.partial(run, lab, pair=pair), second)


@contextlib.contextmanager
def uninstalled():
    """Have Megatron's modules, which are imported anew, find no Transformer Engine."""
    prefixes = "transformer_engine", "megatron.core.fp8_utils", f"{OPS}."
    left_out = {name: module for name, module in sys.modules.items() if name.startswith(prefixes)}
    with unittest.mock.patch.dict(sys.modules):
        for name in left_out:
            del sys.modules[name]
        sys.modules |= dict.fromkeys(("transformer_engine", "transformer_engine_torch"))
        yield
    for name, module in left_out.items():  # a package names its modules, too
        package, _, child = name.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], child, module)


def judge_uninstalled(lab, entry):
    """Judge plain bf16 where Transformer Engine, which Megatron can do without, is not installed."""
    case = Case("bf16", entry, 1, (64, 64), (16, 128, SCALE), (1, 1), "some -1", "both", "dense", 64)
    with uninstalled():
        try:
            dsa, mla, _ = map(importlib.import_module, MODULES)
            outcome = run(lab._replace(dsa=dsa, mla=mla), case)
        except ImportError as error:
            return False, {"reason": f"it raised {type(error).__name__}: {error}"[:400]}
    if outcome.told:
        return False, {"reason": f"it says {outcome.told}"[:400]}
    return judge_result(lab, lambda _: outcome, case)


def judge_other_dtypes(lab):
    """Judge that SparseMLA.apply does not take a wrapper that stands for another dtype for one of bf16, in silence.

    It refuses, or says something, or what comes back has the dtype that both stand for. The lengths are multiples of
    the bucket, so that the release hands the wrappers over, and the kernel refuses their pointers.
    """
    torch, found = lab.torch, {}
    plain, indices = draw(lab, Case("float8", "apply", 2, (8, 16), (16, 128, SCALE), (1, 1), "", "both", "", 8))
    for dtypes in itertools.product((torch.bfloat16, torch.float16, torch.float32), repeat=2):
        if {*dtypes} == {torch.bfloat16}:
            continue
        pair = [wrap(lab.tensors, "float8", x, nominal=one) for x, one in zip(plain, dtypes, strict=True)]
        result, does = None, "gives "
        with unittest.mock.patch.dict(os.environ, {BUCKET: "8"}), listening() as told:
            try:
                result = lab.mla.SparseMLA.apply(*pair, indices.unsqueeze(2), SCALE)[0].dtype
            except (ImportError, MemoryError, OSError):
                raise
            except Exception as error:  # of whatever kind: tilelang's at its pointers or dtypes, or upstream's own
                if not any(frame.filename == lab.mla.__file__ for frame in traceback.extract_tb(error.__traceback__)):
                    raise  # a fault of this probe refuses nothing
                does = f"raises {type(error).__name__}"
        right = is_told(told) or does.startswith("raises") or {result} == {*dtypes}
        found[", ".join(map(str, dtypes))] = right, "says so" if is_told(told) else f"{does}{result or ''}"
    return all(right for right, _ in found.values()), {"measured": found, "unit": "right, and what it does"}


def weigh(probe, lab):
    """Say what float8 tensors of the example's size need, in bytes over those stored; after the kernels are made."""
    torch, case = lab.torch, example("float8", "dispatch")._replace(frozen="none")
    plain, indices = draw(lab, case)
    pair = leaves(lab, case, plain)
    given, stored = upstream_gradient(torch, plain[0][..., :DV]), sum(x.numel() * width(x) for x in pair)

    def peak():
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start

    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if not (results := enter(lab, case, pair, indices)):
        return  # the call was declined, and the checks say so
    (result,) = results
    found = {"forward_peak": peak(), "kept": torch.cuda.memory_allocated() - start - result.nbytes}
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(result, pair, given)
    found["backward_peak"] = peak()
    del gradients
    for name, size in found.items():
        probe.say("FIGURE", name=f"float8_{name}_over_storage", value=size / stored, unit="1")


def example(kind, entry, frozen="both"):
    """Return the example that was reported, for a kind and an entry point."""
    return Case(kind, entry, *SIZES, (1.0, 1.0), "some -1", frozen, "dense", None)


def reaches(case):
    """Tell whether release 0.19.2 hands a wrapper of SparseMLA.apply to the kernel: not copied for padding."""
    unit = case.bucket or 256
    whole = [not length % unit for length in case.lengths]
    wrapped = [kind != "bf16" for kind in KINDS[case.kind]]
    return case.entry == "apply" and case.batch > 1 and any(map(min, whole, wrapped))


def judge_kind(probe, lab, attempt, kind):
    """Judge the reported example for one kind of query and key."""
    control = kind == "bf16"
    if not control:
        probe.judge(f"{kind}.wrapper", "control", judge_way_out, lab, KINDS[kind][1])
    for entry in ("dispatch", "apply"):
        case = example(kind, entry, "none" if lab.real else "both")
        case = case if lab.real else case._replace(indices="one row")
        role = "control" if control else "defect"
        probe.judge(f"{kind}.{entry}", role, judge_example, probe, attempt, case)
        if lab.real:
            role = "defect" if reaches(case) else "control"
            probe.judge(f"{kind}.{entry}.values", role, judge_example_result, probe, lab, attempt, case)


def judge_case(probe, lab, attempt, name, case):
    """Judge one case of the contract, unless this device cannot dequantize what it stores."""
    role = "control" if case.kind == "bf16" else "defect", "defect" if reaches(case) else "control"
    if lab.real and CPU_ONLY & {*KINDS[case.kind]}:
        for one, part in zip(role, ("handed", "result"), strict=True):
            probe.check(f"{name}.{part}", one, None, reason="it cannot be dequantized before sm_100")
        return
    probe.judge(f"{name}.handed", role[0], judge_handed, attempt, case)
    probe.judge(f"{name}.result", role[1], judge_result, lab, attempt, case)


def judge_besides(probe, lab):
    """Judge what is asked of no case alone."""
    for kind in ("bf16", "float8"):
        probe.judge(f"{kind}.declined", "control", judge_declined, lab, kind)
    for kind, entry in itertools.product(("bf16", "float8", "blockwise"), ("dispatch", "apply_3d")):
        # What the release keeps of a wrapper tells autograd of no change.
        role = "defect" if (kind != "bf16" and entry == "apply_3d") else "control"
        probe.judge(f"{kind}.{entry}.overwritten", role, judge_overwritten, lab, kind, entry)
    for kind, entry in (("blockwise", "dispatch"), ("float8", "apply_3d")):  # copied, and read as it is stored
        probe.judge(f"{kind}.{entry}.refilled", "control", judge_refilled, lab, kind, entry)
    for entry in ("dispatch", "apply_3d"):
        probe.judge(f"bf16.{entry}.uninstalled", "control", judge_uninstalled, lab, entry)
    read = ("bf16", "dispatch"), ("float8", "dispatch"), ("float8", "apply_3d"), ("blockwise", "dispatch")
    for kind, entry in read:
        probe.judge(f"{kind}.{entry}.in_flight", "control", judge_in_flight, lab, kind, entry)
    for kind in ("bf16", "float8", "blockwise"):
        probe.judge(f"{kind}.dispatch.kept", "control", judge_kept, lab, kind)
    for kind, entry in (("blockwise", "dispatch"), ("mixed_formats", "apply_3d")):
        probe.judge(f"{kind}.{entry}.filters", "control", judge_filters, lab, kind, entry)
    probe.judge("bf16.by_position", "control", judge_by_position, lab)
    probe.judge("float8.scales", "control", judge_scales, lab)
    probe.judge("float8.other_dtypes", "control", judge_other_dtypes, lab)


def judge_holding(probe, lab):
    """Judge what is kept, let go and given back, how often, and who is told."""
    read = ("bf16", "dispatch"), ("float8", "dispatch"), ("float8", "apply_3d"), ("blockwise", "apply_3d")
    for kind, entry in read:
        probe.judge(f"{kind}.{entry}.not_copied", "control", judge_not_copied, lab, kind, entry)
        probe.judge(f"{kind}.{entry}.let_go", "control", judge_let_go, lab, kind, entry)
        probe.judge(f"{kind}.{entry}.modes", "control", judge_modes, lab, kind, entry)
    for entry in ("dispatch", "apply_3d"):
        probe.judge(f"float8.{entry}.steep", "control", judge_steep, lab, "float8", entry)
        probe.judge(f"float8.{entry}.one_element", "control", judge_one_element, lab, entry)
    for kind, entry in itertools.product(("float8", "blockwise", "mixed_formats"), ("dispatch", "apply")):
        probe.judge(f"{kind}.{entry}.second_rank", "defect", judge_told_by_rank, lab, kind, entry)


def judge(probe, target):
    """Judge every kind of input on one target."""
    import torch

    device, evidence, name = "cpu", "traced", "none"
    if execute := target != "cpu":
        if not torch.cuda.is_available() or target != "sm_{}{}a".format(*torch.cuda.get_device_capability()):
            raise NotImplementedError(f"no {target} GPU here; --target cpu needs none")
        device, evidence, name = "cuda", "executed", torch.cuda.get_device_name()
    launches, builds = [], []
    tensors, *modules = load(launches, builds, stub=not execute)
    probe.say("TARGET", target=target, evidence=evidence, device=name)
    list(map(probe.upstream, modules))
    lab = Lab(torch, device, execute, tensors, *modules[:2], launches, builds)
    attempt = functools.lru_cache(maxsize=1)(functools.partial(run, lab))
    for kind in LEADING:
        if execute and kind in CPU_ONLY:
            probe.check(f"{kind}.dispatch", "defect", None, reason="it cannot be dequantized before sm_100")
        else:
            judge_kind(probe, lab, attempt, kind)
    judge_besides(probe, lab)
    judge_holding(probe, lab)
    for index, case in enumerate(itertools.starmap(Case, CASES)):
        judge_case(probe, lab, attempt, f"case_{index:02}.{case.kind}.{case.entry}", case)
    for kind in ("bf16", "float8"):  # a block of the forward kernel has at most 64 heads
        case = Case(kind, "dispatch", 3, (5, 30), (128, 192, 0.1), (1.0, 0.3), "rows of -1", "both", "dense", None)
        if execute:
            probe.judge(f"{kind}.two_blocks", "control", judge_result, lab, attempt, case)
        else:
            probe.check(f"{kind}.two_blocks", "control", None, reason="what blocks do with heads is the kernel's own")
        # The product of the two scales is 0 in fp32, and the logit of a key that is left out is -inf.
        case = Case(kind, "dispatch", 1, (5, 30), (16, 128, SCALE), (1e-21, 1e-21), "some -1", "both", "dense", None)
        probe.judge(f"{kind}.underflow", "control", judge_result, lab, attempt, case)
    case = Case("float8", "apply_3d", 1, (5, 30), (16, 128, SCALE), FAINT, "some -1", "none", "dense", None)
    probe.judge("float8.faint", "control", judge_result, lab, attempt, case)
    case = Case("float8", "dispatch", 1, (5, 30), (16, 128, None), (1.0, 0.3), "some -1", "both", "dense", None)
    probe.judge("float8.default_scale", "control", judge_result, lab, attempt, case)
    if execute and not probe.only:
        weigh(probe, lab)


if __name__ == "__main__":
    Probe().run(judge)
