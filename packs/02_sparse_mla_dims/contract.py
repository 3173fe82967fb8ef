# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "apache-tvm-ffi==0.1.9",
#   "cloudpickle==3.1.2",
#   "megatron-core==0.19.2",
#   "ml-dtypes==0.6.0",
#   "numpy==2.3.5",
#   "psutil==7.2.2",
#   "tilelang==0.1.8",
#   "torch==2.11.0",
#   "torch-c-dlpack-ext==0.1.5",
#   "tqdm==4.70.1",
#   "triton==3.6.0",
#   "typing-extensions==4.16.0",
#   "z3-solver==4.15.4.0",
# ]
# ///
"""Megatron's fused sparse MLA answers None for every latent and RoPE dimension but DeepSeek V3.2's 512 + 64.

Symptom: with dsa_kernel_backend="tilelang" and, say, kv_lora_rank 64 and qk_pos_emb_head_dim 64, the dispatcher
fused_sparse_mla_absorbed returns None, and attention silently takes the unfused path, which holds [B, H, S, S] scores.

Cause: the kernels take their dimensions as arguments, but what calls them does not pass them on: the dispatcher
returns None unless they are 576 and 512, SparseMLA does not carry v_channels, the forward's interface asserts 576 (and
its kernel powers of two), and the backward's sets 512. fix.patch hands them through, and declines what cannot run.

The contract of the dispatcher and of both interfaces, of which CASES is a pairwise cover:

    kernel      (latent, RoPE, heads, top-k, softmax scale); 5 heads are padded to 16, 128 are two blocks of 64
    entry       fused_sparse_mla_absorbed, the hook before it, or the interfaces, with and without a batch dimension
    batch, lengths, bucket   (queries, keys), multiples or not of MCORE_DSA_TILELANG_SEQ_BUCKET or its default
    indices     int32 with some -1 or rows of -1 alone, or int64; no key twice
    layout, frozen, gradient   strided inputs, which of query and key needs no gradient, and a gradient that is strided
                or one number expanded; backward runs twice, with what it saved moved by hooks, and after the output was
                changed in place; no scale at all is 1 / sqrt(latent + RoPE)

Besides: calls without gradients, in inference and in checkpoints; no value that the host waits for; arguments left to
their defaults; what is declined (DECLINED, other operands), where a shape starts to fit into shared memory (ROOM), that
what a kernel raises reaches the caller, two groups of heads, two layers in one graph, the autograd function by itself,
blocks of as many heads as the environment asks for, no tilelang at all, and other tilelang releases (RELEASES).

Scope: dimension plumbing, compilation, launch, and gradients at the shapes below, with tilelang 0.1.8, which upstream's
lock file pins; not convergence. From 0.1.11 on the forward needs a barrier below 64 heads that tilelang does not put
there: such a shape is declined there, and nothing else is claimed of these releases. `traced`: a stand-in in fp32,
with the operands of each kernel, takes its place; it refuses shapes, types and layouts that the kernel does not take.
The builders run, with each pair of dimensions, as far as tilelang's program: what a program computes is not judged.
For ROOM tensors without storage say that they are on a device of that size. `compiled`: the kernels of the reported
shapes are lowered for the target. `executed`: all are compiled, launched and compared with float64 by the same cases,
and the memory of the path that a user gets is measured against that of the unfused one. Not a stub, but not executed
unless kernels are launched: the __init__ of megatron.core and megatron.core.transformer, which take seconds to import
all the rest. A lowered kernel is remembered in TILELANG_CACHE_DIR, as tilelang remembers a compiled one.

Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5049 brought the dispatcher; the kernels come from
https://github.com/tile-ai/tilelang/tree/main/examples/deepseek_v32. By hand, no GPU is needed:

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

import collections, concurrent.futures, contextlib, functools, importlib, importlib.util, itertools, math
import multiprocessing, re, types, typing, unittest.mock

VARIANT = "megatron.core.transformer.experimental_attention_variant"
FILES = {"forward": "tilelang_sparse_mla_fwd", "backward": "tilelang_sparse_mla_bwd", "function": "sparse_mla"}
FILES |= {"dispatcher": "tilelang_dsa", "utilities": "tilelang_utils"}
KERNELS = {"bwd": ("D", "D_tail"), "sparse_mla_fwd": ("dim", "tail_dim")}  # the jit functions, and their dimensions
KERNELS |= {"preprocess": ("D",), "postprocess": ("D", "D_tail")}
DEEPSEEK = (512, 64, 64)  # latent dimension, RoPE dimension, heads
SHAPES = (DEEPSEEK, (64, 64, 16), (192, 32, 64))  # the second and the third fall through to the unfused path
SCALE, TOP_K, LENGTH, LONG = 0.1, 128, 256, 4096
TOLERANCE = 0.01  # relative, Frobenius norm: P, dP and the results are rounded to bf16, 2**-9 each; a wrong row is 0.06
BUCKET, LOG2_E = "MCORE_DSA_TILELANG_SEQ_BUCKET", 1.44269504
BLOCK = "MCORE_DSA_TILELANG_BWD_MAX_BLOCK_H"
H200, BLACKWELL = 232448, 101376  # bytes of shared memory that a block can have there; the second: sm_120
FACTORS = {
    "kernel": (
        (512, 64, 64, 128, 0.1),
        (512, 64, 5, 64, 0.0417),
        (64, 64, 16, 128, 0.1),
        (192, 32, 64, 128, 0.1),
        (192, 32, 32, 192, 0.25),
        (448, 128, 16, 64, 0.0417),
        (512, 96, 5, 64, 0.0405),
        (64, 32, 128, 192, 0.125),
        (576, 64, 16, 64, 0.0395),
        (64, 96, 16, 64, 0.079),  # a RoPE dimension above the latent one
    ),
    "entry": ("dispatch", "hook", "interface", "interface_3d"),
    "batch": (1, 2),
    "lengths": ((4, 4), (3, 70), (6, 33)),
    "indices": ("some -1", "rows of -1", "int64"),
    "layout": ("dense", "strided"),
    "frozen": ("none", "query", "key", "both"),
    "gradient": ("strided", "expanded"),
    "bucket": (None, 16),
}
# The interfaces know no autograd, pad no heads, take int32 and contiguous tensors; without a batch dimension there is
# no batch; and where nothing needs a gradient none is given.
EXCLUDED = [
    ("entry", "interface_3d", "batch", 2),
    ("kernel", (512, 64, 5, 64, 0.0417), "entry", "interface"),
    ("kernel", (512, 96, 5, 64, 0.0405), "entry", "interface"),
    ("entry", "interface", "indices", "int64"),
    ("entry", "interface", "layout", "strided"),
    ("entry", "interface", "gradient", "expanded"),
    ("entry", "interface", "frozen", "query"),
    ("entry", "interface", "frozen", "key"),
    ("entry", "interface", "frozen", "both"),
    ("kernel", (512, 64, 5, 64, 0.0417), "entry", "interface_3d"),
    ("kernel", (512, 96, 5, 64, 0.0405), "entry", "interface_3d"),
    ("entry", "interface_3d", "indices", "int64"),
    ("entry", "interface_3d", "layout", "strided"),
    ("entry", "interface_3d", "gradient", "expanded"),
    ("entry", "interface_3d", "frozen", "query"),
    ("entry", "interface_3d", "frozen", "key"),
    ("entry", "interface_3d", "frozen", "both"),
    ("frozen", "both", "gradient", "expanded"),
]
CASES = [
    ((512, 64, 64, 128, 0.1), "dispatch", 2, (4, 4), "some -1", "strided", "both", "strided", None),
    ((512, 64, 64, 128, 0.1), "dispatch", 2, (3, 70), "int64", "strided", "key", "strided", None),
    ((512, 64, 64, 128, 0.1), "hook", 1, (3, 70), "rows of -1", "dense", "query", "expanded", 16),
    ((512, 64, 64, 128, 0.1), "interface", 2, (6, 33), "some -1", "dense", "none", "strided", None),
    ((512, 64, 64, 128, 0.1), "interface_3d", 1, (4, 4), "some -1", "dense", "none", "strided", None),
    ((512, 64, 5, 64, 0.0417), "dispatch", 2, (3, 70), "int64", "strided", "both", "strided", 16),
    ((512, 64, 5, 64, 0.0417), "hook", 1, (4, 4), "rows of -1", "dense", "key", "expanded", None),
    ((512, 64, 5, 64, 0.0417), "hook", 2, (4, 4), "int64", "strided", "query", "expanded", 16),
    ((512, 64, 5, 64, 0.0417), "hook", 2, (6, 33), "some -1", "strided", "none", "expanded", None),
    ((64, 64, 16, 128, 0.1), "dispatch", 2, (3, 70), "int64", "strided", "both", "strided", 16),
    ((64, 64, 16, 128, 0.1), "dispatch", 2, (6, 33), "rows of -1", "strided", "query", "expanded", 16),
    ((64, 64, 16, 128, 0.1), "hook", 2, (3, 70), "int64", "strided", "key", "expanded", 16),
    ((64, 64, 16, 128, 0.1), "interface", 1, (4, 4), "some -1", "dense", "none", "strided", None),
    ((64, 64, 16, 128, 0.1), "interface_3d", 1, (4, 4), "rows of -1", "dense", "none", "strided", None),
    ((192, 32, 64, 128, 0.1), "dispatch", 2, (3, 70), "rows of -1", "strided", "both", "strided", None),
    ((192, 32, 64, 128, 0.1), "dispatch", 2, (6, 33), "int64", "dense", "query", "expanded", None),
    ((192, 32, 64, 128, 0.1), "hook", 1, (4, 4), "some -1", "strided", "key", "expanded", None),
    ((192, 32, 64, 128, 0.1), "interface", 2, (3, 70), "rows of -1", "dense", "none", "strided", 16),
    ((192, 32, 64, 128, 0.1), "interface_3d", 1, (3, 70), "some -1", "dense", "none", "strided", None),
    ((192, 32, 32, 192, 0.25), "dispatch", 2, (4, 4), "some -1", "strided", "both", "strided", 16),
    ((192, 32, 32, 192, 0.25), "dispatch", 2, (4, 4), "rows of -1", "strided", "none", "expanded", 16),
    ((192, 32, 32, 192, 0.25), "hook", 2, (3, 70), "int64", "strided", "key", "expanded", 16),
    ((192, 32, 32, 192, 0.25), "hook", 2, (6, 33), "int64", "strided", "query", "strided", 16),
    ((192, 32, 32, 192, 0.25), "interface", 2, (4, 4), "rows of -1", "dense", "none", "strided", None),
    ((192, 32, 32, 192, 0.25), "interface_3d", 1, (3, 70), "some -1", "dense", "none", "strided", None),
    ((448, 128, 16, 64, 0.0417), "dispatch", 2, (3, 70), "int64", "strided", "both", "strided", 16),
    ((448, 128, 16, 64, 0.0417), "dispatch", 2, (6, 33), "int64", "strided", "key", "strided", None),
    ((448, 128, 16, 64, 0.0417), "hook", 2, (4, 4), "some -1", "strided", "query", "expanded", None),
    ((448, 128, 16, 64, 0.0417), "interface", 2, (3, 70), "some -1", "dense", "none", "strided", 16),
    ((448, 128, 16, 64, 0.0417), "interface_3d", 1, (6, 33), "rows of -1", "dense", "none", "strided", 16),
    ((512, 96, 5, 64, 0.0405), "dispatch", 2, (4, 4), "some -1", "dense", "query", "expanded", 16),
    ((512, 96, 5, 64, 0.0405), "dispatch", 2, (4, 4), "int64", "strided", "none", "expanded", 16),
    ((512, 96, 5, 64, 0.0405), "dispatch", 2, (3, 70), "rows of -1", "strided", "key", "expanded", 16),
    ((512, 96, 5, 64, 0.0405), "hook", 1, (6, 33), "int64", "strided", "both", "strided", None),
    ((64, 32, 128, 192, 0.125), "dispatch", 1, (4, 4), "int64", "strided", "query", "strided", None),
    ((64, 32, 128, 192, 0.125), "dispatch", 2, (3, 70), "rows of -1", "dense", "both", "strided", 16),
    ((64, 32, 128, 192, 0.125), "hook", 2, (6, 33), "some -1", "strided", "key", "expanded", 16),
    ((64, 32, 128, 192, 0.125), "interface", 2, (3, 70), "some -1", "dense", "none", "strided", 16),
    ((64, 32, 128, 192, 0.125), "interface_3d", 1, (4, 4), "rows of -1", "dense", "none", "strided", None),
    ((576, 64, 16, 64, 0.0395), "dispatch", 2, (3, 70), "some -1", "dense", "key", "strided", None),
    ((576, 64, 16, 64, 0.0395), "dispatch", 2, (3, 70), "rows of -1", "strided", "both", "strided", None),
    ((576, 64, 16, 64, 0.0395), "hook", 1, (4, 4), "int64", "strided", "none", "expanded", 16),
    ((576, 64, 16, 64, 0.0395), "hook", 2, (6, 33), "rows of -1", "strided", "query", "strided", None),
    ((576, 64, 16, 64, 0.0395), "interface", 2, (6, 33), "some -1", "dense", "none", "strided", None),
    ((576, 64, 16, 64, 0.0395), "interface_3d", 1, (6, 33), "some -1", "dense", "none", "strided", 16),
    ((64, 96, 16, 64, 0.079), "dispatch", 2, (3, 70), "int64", "strided", "both", "strided", 16),
    ((64, 96, 16, 64, 0.079), "dispatch", 2, (6, 33), "some -1", "strided", "query", "expanded", None),
    ((64, 96, 16, 64, 0.079), "hook", 1, (4, 4), "rows of -1", "dense", "key", "expanded", None),
    ((64, 96, 16, 64, 0.079), "interface", 2, (3, 70), "some -1", "dense", "none", "strided", 16),
    ((64, 96, 16, 64, 0.079), "interface_3d", 1, (6, 33), "rows of -1", "dense", "none", "strided", None),
]
Case = collections.namedtuple("Case", FACTORS)  # noqa: PYI024 - its fields are the factors
# Shapes that cannot be had: tilelang 0.1.8 does not lower one of the kernels with these heads (data/dims.md), the
# latent or the RoPE dimension is none, or the heads would need padding that the kernels do not have.
DECLINED = {
    "96+32": (96, 32, 16),
    "64+48": (64, 48, 64),
    "64+16": (64, 16, 16),
    "80+64": (80, 64, 16),
    "128+80": (128, 80, 64),
    "32+32": (32, 32, 16),
    "160+64": (160, 64, 16),
    "48+16": (48, 16, 64),
    "64+0": (64, 0, 16),
    "512+0": (512, 0, 64),
    "0+64": (0, 64, 16),
    "negative RoPE": (192, -64, 16),
    "negative latent": (-64, 128, 16),
    "24 heads": (64, 64, 24),
    "48 heads": (64, 64, 48),
    "96 heads": (192, 32, 96),
    "192 heads": (64, 64, 192),
}
REFUSED = ("96+32", "64+48", "64+0", "64+16")  # 512+0 and the like have the width of a shape that the release takes
# Where a shape starts to fit: entry, latent, RoPE, heads, groups, bytes that a block can have, and whether it fits.
# 40960, 96256, 118784 and 231424 bytes are what ptxas says of these forward kernels (data/dims.md), 128 heads being
# two blocks of 64; on an H200 the launch of 512+96 and 576+64 fails with 64 heads and works with 16. The forward takes
# other heads, too, and rounds a block of them up: lowered with a top-k of 64, 512+96 takes 233472 bytes with 40 heads
# as with 64, and 256+64 takes 103424 with 20 as with 32.
ROOM = (
    ("dispatch", 512, 64, 64, 1, H200, True),
    ("dispatch", 512, 64, 64, 1, 231424, True),
    ("dispatch", 512, 64, 64, 1, BLACKWELL, False),
    ("dispatch", 512, 96, 64, 1, H200, False),
    ("dispatch", 576, 64, 64, 1, H200, False),
    ("dispatch", 576, 64, 128, 1, H200, False),
    ("dispatch", 512, 96, 16, 1, H200, True),
    ("dispatch", 576, 64, 16, 1, H200, True),
    ("dispatch", 64, 64, 16, 1, 40960, True),
    ("dispatch", 64, 64, 16, 1, 40959, False),
    ("dispatch", 64, 64, 5, 1, 40960, True),
    ("dispatch", 192, 32, 64, 1, 96256, True),
    ("dispatch", 192, 32, 64, 1, 96255, False),
    ("dispatch", 192, 32, 128, 1, 96256, True),
    ("dispatch", 320, 32, 32, 1, 118784, True),
    ("dispatch", 320, 32, 32, 1, 118783, False),
    ("forward", 64, 64, 32, 2, 40960, True),
    ("backward", 64, 64, 32, 2, 40960, True),
    ("forward", 192, 32, 64, 1, 96255, False),
    ("backward", 192, 32, 64, 1, 96255, False),
    ("forward", 512, 96, 40, 1, H200, False),
    ("forward", 256, 64, 20, 1, BLACKWELL, False),
    ("forward", 64, 64, 5, 1, 40959, False),
    ("forward_3d", 192, 32, 64, 1, 96256, True),
    ("forward_3d", 192, 32, 64, 1, 96255, False),
    ("backward_3d", 192, 32, 64, 1, 96256, True),
    ("backward_3d", 192, 32, 64, 1, 96255, False),
)


RELEASES = (  # tilelang's, a shape, the check's role, and whether the shape is right there as it is
    ("0.1.9", (64, 64, 16), "defect", True),
    ("0.1.9.post1", (64, 64, 16), "defect", True),
    ("0.1.11rc1", (64, 64, 16), "control", False),
    ("0.1.11", (64, 64, 16), "control", False),
    ("0.1.15", (192, 32, 32), "control", False),
    ("0.1.15", (192, 32, 5), "control", False),
    ("0.1.15", (512, 96, 16), "control", False),  # the same places and barriers as 64+64, which is wrong
    ("0.1.11", (512, 32, 32), "control", False),
    ("0.1.13", (448, 128, 16), "control", False),
    ("0.1.15", (576, 64, 16), "control", False),
    ("0.1.15", (192, 32, 64), "defect", True),
    ("0.1.15", (64, 32, 128), "defect", True),
    ("0.1.15", (512, 64, 16), "control", True),
)


class Asked(Exception):  # noqa: N818 - not an error: it says that a kernel was asked for
    """Raised in a kernel's place, where only whether it is asked for counts."""


class Lab(typing.NamedTuple):
    """Everything that a check needs besides its case."""

    torch: types.ModuleType
    modules: types.SimpleNamespace
    device: str
    real: bool  # whether the kernels run
    asked: dict  # by (latent, RoPE, heads, top-k, scale) and kernel: what the builders were called with


def load(*, executed):
    """Import the real modules, and tilelang first: Megatron swallows what goes wrong there."""
    try:
        found = {name: importlib.import_module(name) for name in ("torch", "tilelang", "tilelang.language")}
    except OSError as error:  # one of its libraries cannot be loaded
        raise ImportError(str(error)) from error
    for name in () if executed else ("megatron.core", "megatron.core.transformer"):
        sys.modules.setdefault(name, importlib.util.module_from_spec(importlib.util.find_spec(name)))
    importlib.import_module("megatron.core.parallel_state")  # before megatron.core.utils, which imports it in a circle
    found |= {key: importlib.import_module(f"{VARIANT}.ops.{name}") for key, name in FILES.items()}
    found["hook"] = importlib.import_module(f"{VARIANT}.dsa_tilelang_kernels")
    return types.SimpleNamespace(**found)


def example(torch, shape, device, length, *, own=False):
    """Make query, key [S, B, heads, dims], top-k indices [B, S, K] (of the past, or rows of each query's own), dO."""
    dim, tail, heads = shape
    random, keys = torch.Generator(device).manual_seed(7), length * TOP_K if own else length
    sizes = ((length, 1, heads, dim + tail), (keys, 1, 1, dim + tail), (length, 1, heads, dim))
    query, key, d_out = (torch.randn(*size, generator=random, device=device).bfloat16() for size in sizes)
    if own:
        return query, key, torch.randperm(keys, generator=random, device=device).view(1, length, TOP_K), d_out
    weights = torch.rand(length, max(length, TOP_K), generator=random, device=device).tril().topk(TOP_K)
    return query, key, weights.indices.masked_fill(weights.values == 0, -1)[None], d_out


def differentiate(torch, out, wanted, d_out, *, again=False):
    """Return the gradients of out; nan, which no check takes, for those that there are not."""
    none = [torch.full_like(x, math.nan) for x in wanted]
    if not out.requires_grad:
        return none
    try:
        found = torch.autograd.grad(out, wanted, d_out, retain_graph=again, allow_unused=True)
    except RuntimeError as error:  # autograd refuses what a backward returns: nothing of upstream's is in its traceback
        if "out of memory" in str(error):
            raise
        traceback.print_exc()
        return none
    return [one if x is None else x for x, one in zip(found, none, strict=True)]


def gradients(torch, attend, inputs):
    """Return out, dQ and dKV through the user's door or another one; None where it answers None."""
    query, key, indices, d_out = (x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
    out = attend(query, key, indices, SCALE, d_out.shape[-1])
    return None if out is None else (out.detach(), *differentiate(torch, out, (query, key), d_out))


def scores_of(query, key, indices, scale):
    """Return the chosen rows [B, S, K, dims], the scores [B, S, H, K], and which of them count [B, S, 1, K]."""
    batches = sys.modules["torch"].arange(len(indices), device=indices.device)[:, None, None]
    chosen = key[:, :, 0].transpose(0, 1)[batches, indices.clamp(0)]
    return chosen, query.transpose(0, 1) @ chosen.mT * scale, indices[:, :, None] >= 0


def reference(query, key, indices, scale, dim):
    """Attend to the chosen rows; in float64 where the inputs are. A row without any gives zeros."""
    chosen, scores, valid = scores_of(query, key, indices.to(query.device).long(), scale)
    weights = scores.masked_fill(~valid, -1e30).softmax(-1) * valid  # finite: its gradient is no nan
    return (weights @ chosen[..., :dim]).transpose(0, 1)


def draw(lab, case):
    """Make query, key [S, B, heads, dims], distinct top-k indices [B, S, K], and dO, each as its factor says."""
    torch, (latent, rope, heads, top_k, _) = lab.torch, case.kernel
    (length, keys), random = case.lengths, torch.Generator().manual_seed(11 + case.batch)
    apart = 2 if case.layout == "strided" else 1
    query = torch.randn(case.batch, length, heads, apart * (latent + rope), generator=random).bfloat16()
    key = torch.randn(keys, case.batch, apart, latent + rope, generator=random).bfloat16()
    d_out = torch.randn(latent, heads, case.batch, length, generator=random).bfloat16().permute(3, 2, 1, 0)
    if case.gradient == "expanded":
        d_out = torch.tensor(0.75, dtype=torch.bfloat16).expand(d_out.shape)
    order = torch.rand(case.batch, length, keys, generator=random).argsort(-1)[..., :top_k]
    indices = torch.nn.functional.pad(order, (0, top_k - order.shape[-1]), value=-1)
    indices = indices.flip(-1) if case.indices == "rows of -1" else indices  # -1 comes first, too
    if case.indices != "int64":
        indices[torch.rand(indices.shape, generator=random) < 0.2] = -1
        indices = indices.int()
    if case.indices == "rows of -1":
        indices[-1, 1::3] = -1
    query = query[..., ::apart].transpose(0, 1)
    query = query if case.layout == "strided" else query.contiguous()
    return [x.to(lab.device) for x in (query, key[:, :, :1], indices, d_out)]


def demand(kernel, **wanted):
    """Raise where an operand has not the shape, type or layout that a kernel takes."""
    for name, (tensor, shape, dtype) in wanted.items():
        shown = f"{name} {list(tensor.shape)} {tensor.dtype} {tensor.is_contiguous()}"
        if tuple(tensor.shape) != tuple(shape) or str(tensor.dtype) != f"torch.{dtype}" or not tensor.is_contiguous():
            raise ValueError(f"{kernel} takes contiguous {dtype} {list(shape)}, not {shown}")


def rows(indices):
    """Yield for each batch and group the queries that have keys, which keys these are, and the mask of the others."""
    for batch, group in itertools.product(range(indices.shape[0]), range(indices.shape[2])):
        found = (indices[batch, :, group] >= 0).any(-1).nonzero()[:, 0]
        if len(found):
            named = indices[batch, found, group].long()
            yield batch, group, found, named.clamp(0), (named < 0)[:, None]


def stand_in_forward(torch, given, operands):
    """Do what the forward kernel does, in fp32; the log of the sum is one to base 2."""
    (query, key, indices), heads, dim, groups = operands, given["heads"], given["dim"], given["kv_group"]
    size, width, share = query.shape[:2], dim + given["tail_dim"], heads // groups
    if share < 16 or share & (share - 1) or given["topk"] % given["block_I"]:
        raise ValueError(f"the forward kernel has no bounds for {share} heads or {given['topk']} keys")
    operands = {
        "query": (query, (*size, heads, width), "bfloat16"),
        "indices": (indices, (*size, groups, given["topk"]), "int32"),
    }
    demand("the forward kernel", **operands, key=(key, (*key.shape[:2], groups, width), "bfloat16"))
    scale = (width**-0.5 if given["sm_scale"] is None else given["sm_scale"]) * LOG2_E
    out, sums = query.new_zeros(*size, heads, dim), query.new_zeros(*size, heads, dtype=torch.float32)
    for batch, group, found, named, masked in rows(indices):
        chosen, part = key[batch, :, group].float()[named], slice(group * share, (group + 1) * share)
        scores = (query[batch, found, part].float() @ chosen.mT * scale).masked_fill(masked, -math.inf)
        sums[batch, found, part] = scores.mul(1 / LOG2_E).logsumexp(-1) * LOG2_E
        out[batch, found, part] = ((scores / LOG2_E).softmax(-1) @ chosen[..., :dim]).bfloat16()
    return out, sums


def stand_in_backward(torch, given, operands):
    """Do what the backward kernel does, in fp32: return dQ, and add to d_key."""
    (query, key, d_out, indices, sums, delta, d_key), heads, dim, groups = (
        operands,
        given["H"],
        given["D"],
        given["kv_group"],
    )
    size, width, share = query.shape[:2], dim + given["D_tail"], heads // groups
    operands = {"query": (query, (*size, heads, width), "bfloat16"), "d_out": (d_out, (*size, heads, dim), "bfloat16")}
    operands |= {
        "indices": (indices, (*size, groups, given["topk"]), "int32"),
        "sums": (sums, (*size, heads), "float32"),
    }
    operands |= {"delta": (delta, (*size, heads), "float32"), "d_key": (d_key, key.shape, "float32")}
    demand("the backward kernel", **operands, key=(key, (*key.shape[:2], groups, width), "bfloat16"))
    scale, d_query = width**-0.5 if given["sm_scale"] is None else given["sm_scale"], torch.zeros_like(query)
    for batch, group, found, named, masked in rows(indices):
        chosen, part = key[batch, :, group].float()[named], slice(group * share, (group + 1) * share)
        queries, given_out = query[batch, found, part].float(), d_out[batch, found, part].float()
        weights = (queries @ chosen.mT * scale * LOG2_E - sums[batch, found, part, None]).exp2().masked_fill(masked, 0)
        d_scores = weights * (given_out @ chosen[..., :dim].mT - delta[batch, found, part, None]) * scale
        d_query[batch, found, part] = (d_scores @ chosen).bfloat16()
        d_chosen = d_scores.mT @ queries
        d_chosen[..., :dim] += weights.mT @ given_out
        d_key[batch, :, group].index_add_(0, named.flatten(), d_chosen.flatten(0, 1))
    return d_query


def stand_in(key, torch, given, *operands):
    """Do what a kernel does, after it was asked for with the arguments given."""
    if key in ("sparse_mla_fwd", "bwd"):
        return {"bwd": stand_in_backward, "sparse_mla_fwd": stand_in_forward}[key](torch, given, operands)
    if key == "postprocess":
        (d_key,) = operands
        shape = (*d_key.shape[:2], given["kv_group"], given["D"] + given["D_tail"])
        demand("the last kernel", d_key=(d_key, shape, "float32"))
        return d_key.bfloat16()
    out, d_out = operands
    shape = (*out.shape[:2], given["H"], given["D"])
    demand("the first kernel", out=(out, shape, "bfloat16"), d_out=(d_out, shape, "bfloat16"))
    return (out.float() * d_out.float()).sum(-1)


@contextlib.contextmanager
def kernels(lab, note, launch):
    """Put stand-ins in the kernels' place: note(key, arguments) is told of each, launch(key, torch, ...) runs it."""

    def build(key, signature, *args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        note(key, dict(bound.arguments))
        bound.apply_defaults()
        return functools.partial(launch, key, lab.torch, dict(bound.arguments))

    with contextlib.ExitStack() as stack:
        for module in (lab.modules.forward, lab.modules.backward):
            found = (key for key in KERNELS if hasattr(module, key))
            stand_ins = {key: functools.partial(build, key, getattr(module, key).signature) for key in found}
            stack.enter_context(unittest.mock.patch.multiple(module, **stand_ins))
            for cache in [one for one in vars(module).values() if isinstance(one, collections.OrderedDict)]:
                stack.enter_context(unittest.mock.patch.dict(cache, clear=True))  # what was there is put back
        yield


def enter(lab, case, query, key, indices):
    """Call the dispatcher, or the hook in front of it, which takes how many of a query's keys count, too."""
    scale, latent = case.kernel[4], case.kernel[0]
    if case.entry == "dispatch":
        return lab.modules.dispatcher.fused_sparse_mla_absorbed(query, key, indices, scale, latent)
    counts = lab.torch.full(indices.shape[:2], indices.shape[-1], device=indices.device)
    hook = lab.modules.hook.run_fused_absorbed_sparse_attention
    return hook(query, key, indices, scale, latent, topk_length=counts)


def run_interfaces(lab, case, inputs):
    """Call the interfaces of forward and backward; return out, dQ, dKV as the dispatcher's, and the log of the sum."""
    forward, backward, (latent, *_, scale) = lab.modules.forward, lab.modules.backward, case.kernel
    query, key, d_out = (inputs[place].transpose(0, 1).contiguous() for place in (0, 1, 3))
    operands = query, key, inputs[2][:, :, None].contiguous(), d_out
    flat = case.entry == "interface_3d"
    query, key, indices, d_out = (x[0].contiguous() for x in operands) if flat else operands
    out, sums = forward.sparse_mla_fwd_interface(query, key, indices, sm_scale=scale, d_v=latent)
    extra = (None, backward.sparse_mla_delta(out, d_out)) if case.bucket else (out, None)
    found = backward.sparse_mla_bwd(query, key, extra[0], d_out, indices, sums, sm_scale=scale, delta=extra[1])
    found = [x[None] if flat else x for x in (out, *found, sums)]
    return [x.transpose(0, 1) for x in found], []


def run_door(lab, case, inputs):
    """Call the dispatcher, and backward twice; return out and gradients, or None, and how much was kept."""
    kept, (query, key, indices, d_out) = [], inputs
    pair = [
        x.detach().requires_grad_(case.frozen not in (name, "both")) for name, x in (("query", query), ("key", key))
    ]

    def keep(x):
        kept.append(x.numel() if x.is_floating_point() else 0)
        return x.clone()  # as a hook that moves it elsewhere gives it back

    with lab.torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x.clone()):
        if (out := enter(lab, case, *pair, indices)) is None:
            return None, kept
    wanted, found = [x for x in pair if x.requires_grad], []
    for _ in range(2 if wanted else 0):  # the second shows that nothing was used up
        found += differentiate(lab.torch, out, wanted, d_out, again=True)
    return [out.detach(), *found], kept


def exactly(lab, case, inputs):
    """Return in float64 out, then the wanted gradients, or both and the log of the sum for the interfaces."""
    query, key, indices, d_out = (x.double() if x.is_floating_point() else x.long() for x in inputs)
    both = case.entry.startswith("interface")
    pair = [x.requires_grad_(both or case.frozen not in (name, "both")) for name, x in (("query", query), ("key", key))]
    out = reference(*pair, indices, case.kernel[4], case.kernel[0])
    wanted = [x for x in pair if x.requires_grad]
    found = [out.detach(), *(lab.torch.autograd.grad(out, wanted, d_out) if wanted else ())]
    if not both:
        return [found[0], *found[1:], *found[1:]]
    _, scores, valid = scores_of(*(x.detach() for x in pair), indices, case.kernel[4])
    sums = scores.masked_fill(~valid, -math.inf).logsumexp(-1) * LOG2_E
    return [*found, sums.masked_fill(~valid.any(-1), 0).transpose(0, 1)]


def distance(found, wanted):
    """Return the relative error of a result in the Frobenius norm; what should be 0 has to be."""
    size = float(wanted.norm())
    return float((found.double() - wanted).norm()) / (size or 1.0)


def judge_case(lab, case):
    """Judge one case of the contract: out, gradients and, of the interfaces, the log of the sum against float64."""
    torch, inputs, both = lab.torch, draw(lab, case), case.entry.startswith("interface")
    setting = {} if case.bucket is None else {BUCKET: str(case.bucket)}
    place = lab.asked.setdefault(case.kernel, {})
    stubs = contextlib.nullcontext() if lab.real else kernels(lab, place.__setitem__, stand_in)
    with unittest.mock.patch.dict(os.environ, setting), stubs:
        found, kept = (run_interfaces if both else run_door)(lab, case, inputs)
    if found is None:
        return False, {"measured": {"case": case}, "reason": "the dispatcher answers None"}
    wanted, latent, errors = exactly(lab, case, inputs), case.kernel[0], {}
    for index, (x, y) in enumerate(zip(found, wanted, strict=True)):
        plain = x.shape == y.shape and x.dtype == (torch.float32 if both and index == 3 else torch.bfloat16)
        parts = {"": slice(None, latent), " RoPE": slice(latent, None)} if index and x.ndim == 4 else {"": slice(None)}
        for part, columns in parts.items():
            errors[f"{index}{part}"] = distance(x[..., columns], y[..., columns]) if plain else math.inf
    enough = both or case.frozen == "both" or sum(kept) >= inputs[0].numel() + inputs[1].numel()
    ok = enough and all(error <= TOLERANCE for error in errors.values())  # a nan is not
    measured = {"case": case, "errors": errors, "saved": sum(kept)}
    return ok, {"measured": measured, "tolerance": TOLERANCE, "unit": "relative error; elements saved"}


def judge_reach(lab, shape):
    """Judge which kernels the dispatcher asks for, and with which dimensions, at a shape that was reported."""
    latent, rope, heads = shape
    lengths = (4, 4) if heads > 16 else (3, 70)
    case = Case((*shape, TOP_K, SCALE), "dispatch", 2, lengths, "some -1", "strided", "none", "strided", None)
    place = lab.asked.setdefault(case.kernel, {})
    with kernels(lab, place.__setitem__, stand_in):
        got, _ = run_door(lab, case, draw(lab, case))
    found = got and {"out": [*got[0].shape]} | {key: [place[key][x] for x in KERNELS[key]] for key in place}
    wanted = {"out": [lengths[0], 2, heads, latent]}
    wanted |= {key: [latent, rope][: len(KERNELS[key])] for key in KERNELS}
    return found == wanted, {"measured": found, "unit": "dimensions asked for"}


def tensors(torch, shape, device="cpu", batch=1):
    """Make empty inputs of the dispatcher: 256 queries and keys, which no bucket makes longer, and 64 indices each."""
    latent, rope, heads = shape
    query, key = (
        torch.zeros(LENGTH, batch, count, latent + rope, dtype=torch.bfloat16, device=device) for count in (heads, 1)
    )
    return query, key, torch.zeros(batch, LENGTH, 64, dtype=torch.int32, device=device)


def refuse(*_):
    """Stand for a kernel where asking for it is all that counts."""
    raise Asked


def answer(lab, *given):
    """Say what the dispatcher does: answers None, asks for a kernel, or gives something without one."""
    with kernels(lab, refuse, refuse):
        try:
            return "declined" if lab.modules.dispatcher.fused_sparse_mla_absorbed(*given) is None else "answered"
        except Asked:
            return "asked"


def judge_declined(lab, shape):
    """Judge that the dispatcher answers None for a shape, asks for no kernel and raises nothing."""
    found = answer(lab, *tensors(lab.torch, shape), SCALE, shape[0])
    return found == "declined", {"measured": found}


def judge_operands(lab):
    """Judge that the dispatcher answers None for tensors that the kernels do not take, whatever the dimensions."""
    query, key, indices = tensors(lab.torch, (64, 64, 16), batch=2)
    given = {
        "half": (query.half(), key.half(), indices),
        "float query": (query.float(), key, indices),
        "float key": (query, key.float(), indices),
        "two key heads": (query, key.expand(-1, -1, 2, -1), indices),
        "batches": (query, key[:, :1], indices),
        "batches of indices": (query, key, indices[:1]),
        "rows": (query, key, indices[:, 1:]),
        "top-k 63": (query, key, indices[..., 1:]),
        "top-k 96": (query, key, lab.torch.cat([indices, indices[..., :32]], -1)),
        "widths": (query, key[..., :96], indices),
        "no batch": (query[:, 0], key, indices),
        "no heads": (query[:, :, :0], key, indices),
    }
    found = {name: answer(lab, *one, SCALE, 64) for name, one in given.items()}
    return {*found.values()} == {"declined"}, {"measured": found}


def interface(lab, entry, shape, groups, device="cpu"):
    """Call an interface of the kernels with tensors of a shape, and return what it does."""
    torch, (latent, rope, heads), size = lab.torch, shape, (LENGTH,) if entry.endswith("_3d") else (1, LENGTH)
    query, key, d_out = (
        torch.zeros(*size, count, width, dtype=torch.bfloat16, device=device)
        for count, width in ((heads, latent + rope), (groups, latent + rope), (heads, latent))
    )
    indices = torch.zeros(*size, groups, 64, dtype=torch.int32, device=device)
    row = torch.zeros(*size, heads, device=device)
    with kernels(lab, refuse, refuse):
        try:
            if entry.startswith("forward"):
                lab.modules.forward.sparse_mla_fwd_interface(query, key, indices, SCALE, latent)
            else:
                lab.modules.backward.sparse_mla_bwd(query, key, None, d_out, indices, row, SCALE, row)
        except Asked:
            return "asked"
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:  # what it is there to raise
            return f"refused: {error}"[:200]
    return "answered"


def judge_refused(lab, shape):
    """Judge that both interfaces raise for a shape, before they ask for a kernel."""
    found = {entry: interface(lab, entry, shape, 1) for entry in ("forward", "backward")}
    return all(one.startswith("refused") for one in found.values()), {"measured": found, "unit": "said"}


def judge_room(lab, entry, *rest):
    """Judge whether a shape gets to the kernels on a device with so much shared memory: its tensors have no storage."""
    *shape, groups, limit, fits = rest
    fake = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode
    device = types.SimpleNamespace(shared_memory_per_block_optin=limit, major=9, minor=0, name="a device")
    with unittest.mock.patch.object(lab.torch.cuda, "get_device_properties", return_value=device), fake():
        if entry == "dispatch":
            found = answer(lab, *tensors(lab.torch, shape, "cuda"), SCALE, shape[0])
        else:
            found = interface(lab, entry, shape, groups, "cuda")
    return found.startswith("asked" if fits else ("declined", "refused")), {"measured": {"does": found, "fits": fits}}


def judge_raises(lab, shape, key):
    """Judge that what a kernel raises reaches the caller: swallowed, it would be a silent fall-back again."""

    class Broken(Exception):  # noqa: N818 - of no kind that somebody would expect
        pass

    def launch(name, *given):
        if name == key:
            raise Broken
        return stand_in(name, *given)

    case = Case((*shape, 64, SCALE), "dispatch", 1, (3, 70), "int64", "dense", "none", "strided", 16)
    with kernels(lab, lambda *_: None, launch):
        try:
            found, _ = run_door(lab, case, draw(lab, case))
        except Broken:
            return True, {"measured": "raised"}
    return False, {"measured": "declined" if found is None else "answered"}


def judge_groups(lab):
    """Judge forward and backward with two groups of heads, each with keys of its own, by their interfaces."""
    torch, latent, heads = lab.torch, 64, 32
    case = Case((latent, 64, heads // 2, 64, 0.11), "interface", 2, (3, 70), "some -1", "dense", "none", "strided", 16)
    first = draw(lab, case)
    parts = [first, [first[0].flip(0), first[1].flip(0), first[2], first[3].flip(0)]]
    exact = [exactly(lab, case, one) for one in parts]
    query, d_out = (torch.cat([one[place] for one in parts], 2).transpose(0, 1).contiguous() for place in (0, 3))
    key = torch.cat([one[1] for one in parts], 2).transpose(0, 1).contiguous()
    indices = torch.stack([one[2] for one in parts], 2).contiguous()
    with kernels(lab, lambda *_: None, stand_in):
        out, sums = lab.modules.forward.sparse_mla_fwd_interface(query, key, indices, sm_scale=0.11, d_v=latent)
        d_query, d_key = lab.modules.backward.sparse_mla_bwd(query, key, out, d_out, indices, sums, sm_scale=0.11)
    found = [x.transpose(0, 1) for x in (out, d_query, d_key)]
    errors = [distance(x, torch.cat([one[place] for one in exact], 2)) for place, x in enumerate(found)]
    return all(error <= TOLERANCE for error in errors), {"measured": errors, "tolerance": TOLERANCE}


def judge_usual_scale(lab):
    """Judge calls without a scale: it is 1 / sqrt(latent + RoPE) then, forward and backward."""
    measured, rest = {}, (1, (3, 70), "some -1", "dense", "none", "strided", None)
    for shape, entry in itertools.product((DEEPSEEK, SHAPES[1]), ("dispatch", "interface")):
        case = Case((*shape, 64, sum(shape[:2]) ** -0.5), entry, *rest)
        inputs, run = draw(lab, case), run_door if entry == "dispatch" else run_interfaces
        with kernels(lab, lambda *_: None, stand_in):
            found, _ = run(lab, case._replace(kernel=(*shape, 64, None)), inputs)
        errors = [distance(x, y) for x, y in zip(found or [], exactly(lab, case, inputs), strict=False)]
        measured["{}+{} {}".format(*shape[:2], entry)] = errors
    ok = all(len(errors) > 2 and all(error <= TOLERANCE for error in errors) for errors in measured.values())
    return ok, {"measured": measured, "tolerance": TOLERANCE}


def judge_overwritten(lab, shape):
    """Judge backward after the output was changed in place: right by the values before, or refused by PyTorch."""
    case = Case((*shape, 64, SCALE), "dispatch", 1, (3, 70), "int64", "dense", "none", "strided", 16)
    query, key, indices, d_out = draw(lab, case)
    pair = [x.detach().requires_grad_() for x in (query, key)]
    with kernels(lab, lambda *_: None, stand_in):
        if (out := enter(lab, case, *pair, indices)) is None:
            return False, {"reason": "the dispatcher answers None"}
        with lab.torch.no_grad():
            out.mul_(-2)
        try:
            found = lab.torch.autograd.grad(out, pair, d_out)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return True, {"measured": "refused"}
    errors = [distance(x, y) for x, y in zip(found, exactly(lab, case, draw(lab, case))[1:], strict=False)]
    return all(error <= TOLERANCE for error in errors), {"measured": errors, "tolerance": TOLERANCE}


def judge_cached(lab):
    """Judge two shapes of one width, one after the other: a kernel is found again by both of its dimensions."""
    errors = []
    with kernels(lab, lambda *_: None, stand_in):
        for latent, rope in ((512, 64), (448, 128)):
            kernel = (latent, rope, 16, 64, 0.0417)
            case = Case(kernel, "dispatch", 1, (3, 70), "int64", "dense", "none", "strided", None)
            inputs = draw(lab, case)
            found, wanted = run_door(lab, case, inputs)[0] or [], exactly(lab, case, inputs)
            errors.append([distance(x, y) for x, y in zip(found, wanted, strict=False)])
    ok = all(one and all(error <= TOLERANCE for error in one) for one in errors)  # a nan is not
    return ok, {"measured": errors, "tolerance": TOLERANCE}


def judge_layers(lab):
    """Judge two layers in one graph: forward both, then backward both, the last one first."""
    shapes = ((*DEEPSEEK[:2], 0.0417), (448, 128, 0.1))  # of one width: nothing but its latent dimension tells a layer
    rest = "dispatch", 1, (3, 70), "int64", "dense", "none", "strided", None
    cases = [Case((latent, rope, 16, 64, scale), *rest) for latent, rope, scale in shapes]
    layers, errors = [], []
    with kernels(lab, lambda *_: None, stand_in):
        for case in cases:
            query, key, indices, d_out = draw(lab, case)
            pair = [x.detach().requires_grad_() for x in (query, key)]
            layers.append((enter(lab, case, *pair, indices), pair, d_out))
        if any(out is None for out, *_ in layers):
            return False, {"reason": "the dispatcher answers None"}
        for case, (out, pair, d_out) in reversed([*zip(cases, layers, strict=True)]):
            wanted = exactly(lab, case, draw(lab, case))
            found = [out.detach(), *differentiate(lab.torch, out, pair, d_out)]
            errors.append([distance(x, y) for x, y in zip(found, wanted[:3], strict=True)])
    ok = all(error <= TOLERANCE for one in errors for error in one)  # a nan is not
    return ok, {"measured": errors, "tolerance": TOLERANCE}


def judge_program(lab, kernel):
    """Judge that tilelang makes a program of each kernel, with what the builder is called with; it lowers none."""
    asked = {}
    case = Case(kernel, "dispatch", 1, (4, 4), "int64", "dense", "none", "strided", 16)
    with kernels(lab, asked.__setitem__, stand_in):
        run_door(lab, case, draw(lab, case))
    places = {key: getattr(lab.modules.forward, key, None) or getattr(lab.modules.backward, key) for key in asked}
    made = [key for key, function in places.items() if function.get_tir(**asked[key]) is not None]
    return {*made} == {*KERNELS}, {"measured": made, "unit": "programs made"}


def judge_missing(lab):
    """Judge that both interfaces say so where tilelang is not installed, before anything needs it."""
    found, missing = {}, {"HAVE_TILELANG": False, "tilelang": None}
    for entry in ("forward", "backward"):
        with unittest.mock.patch.multiple(lab.modules.utilities, **missing):
            try:
                found[entry] = interface(lab, entry, SHAPES[1], 1)
            except ImportError as error:
                found[entry] = f"missing: {error}"
    return all(one.startswith("missing: TileLang") for one in found.values()), {"measured": found, "unit": "said"}


def judge_default(lab, rope):
    """Judge that SparseMLA.apply takes four arguments, and the forward's interface three: 512 values then."""
    case = Case((DEEPSEEK[0], rope, 64, 64, SCALE), "dispatch", 2, (3, 70), "int64", "dense", "both", "strided", 16)
    query, key, indices, _ = draw(lab, case)
    given = [x.transpose(0, 1).contiguous() for x in (query, key)]
    given.append(indices[:, :, None].int().contiguous())
    with kernels(lab, lambda *_: None, stand_in):
        try:
            found = lab.modules.function.SparseMLA.apply(*given, SCALE)[0]
        except TypeError as error:  # an argument is missing: the call does not get as far as upstream's own lines
            return False, {"reason": f"it raised {error}"}
        other = lab.modules.forward.sparse_mla_fwd_interface(*given, sm_scale=SCALE)[0]
    exact = exactly(lab, case, [query, key, indices, query[..., : DEEPSEEK[0]]])[0]
    found = [x.transpose(0, 1) for x in (found, other)]
    errors = [distance(x, exact) if x.shape == exact.shape else math.inf for x in found]
    return all(error <= TOLERANCE for error in errors), {"measured": errors, "tolerance": TOLERANCE}


def judge_modes(lab, shape):
    """Judge a call without gradients, in inference, and in both kinds of checkpoint, which calls again in backward."""
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    case = Case((*shape, 64, SCALE), "dispatch", 2, (3, 70), "some -1", "dense", "none", "strided", 16)
    query, key, indices, d_out = draw(lab, case)
    wanted, errors = exactly(lab, case, draw(lab, case))[:3], {}

    def attend(*pair):
        return enter(lab, case, *pair, indices)

    with kernels(lab, lambda *_: None, stand_in):
        for mode in (lab.torch.no_grad, lab.torch.inference_mode):
            with mode():
                errors[mode.__name__] = [attend(query, key)]
        for reentrant in (True, False):
            pair = [x.detach().requires_grad_() for x in (query, key)]
            out = checkpoint(attend, *pair, use_reentrant=reentrant)
            if out is not None:
                out.backward(d_out)
                errors[f"checkpoint, reentrant {reentrant}"] = [out.detach(), *(x.grad for x in pair)]
    for name, found in errors.items():
        fits = [x is not None and x.shape == y.shape for x, y in zip(found, wanted, strict=False)]
        errors[name] = [distance(x, y) if ok else math.inf for x, y, ok in zip(found, wanted, fits, strict=False)]
    ok = len(errors) == 4 and all(error <= TOLERANCE for one in errors.values() for error in one)
    return ok, {"measured": errors, "tolerance": TOLERANCE}


def judge_waits(lab, shape):
    """Judge that neither pass asks the host for a value, or moves one of its own to the device.

    The kernels give zeros here: what runs besides them would run between them on a GPU, where such an answer or a copy
    from pageable memory makes the host wait, and a CUDA graph cannot capture it.
    """
    torch, seen = lab.torch, []
    case = Case((*shape, 64, SCALE), "dispatch", 1, (3, 70), "int64", "dense", "none", "strided", 16)
    query, key, indices, d_out = draw(lab, case)
    aten = torch.ops.aten
    waits = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default}  # noqa: SLF001
    waits |= {aten.lift_fresh.default, aten.masked_select.default}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # noqa: SLF001
        def __torch_dispatch__(self, function, classes, args=(), kwargs=None):
            seen.extend([str(function)] * (function in waits))
            return function(*args, **(kwargs or {}))

    def launch(name, _torch, given, *operands):
        first = operands[0]
        if name == "sparse_mla_fwd":
            return first.new_zeros(*first.shape[:3], given["dim"]), first.new_zeros(
                *first.shape[:3], dtype=torch.float32
            )
        if name == "preprocess":
            return first.new_zeros(first.shape[:3], dtype=torch.float32)
        return first.bfloat16() if name == "postprocess" else torch.zeros_like(first)

    pair = [x.detach().requires_grad_() for x in (query, key)]
    with kernels(lab, lambda *_: None, launch), Watch():
        out = enter(lab, case, *pair, indices)
        if out is not None:
            out.backward(d_out)
    return out is not None and not seen, {"measured": {"waits": seen, "answers": out is not None}}


def judge_function(lab, *, batched):
    """Judge SparseMLA.apply by itself, with and without a batch dimension: all results, and dO as it was.

    What the dispatcher gives it is laid out anew. Here dO is contiguous: it is the caller's own tensor.
    """
    case = Case((*DEEPSEEK, 64, SCALE), "dispatch", 1, (3, 70), "rows of -1", "dense", "none", "strided", 16)
    query, key, indices, d_out = draw(lab, case)
    given = [x.transpose(0, 1).contiguous() for x in (query, key, d_out)]
    given = [x if batched else x[0].contiguous() for x in (*given, indices[:, :, None].contiguous())]
    pair, d_out, before = [x.requires_grad_() for x in given[:2]], given[2], given[2].clone()
    with kernels(lab, lambda *_: None, stand_in):
        try:
            out = lab.modules.function.SparseMLA.apply(*pair, given[3], SCALE)[0]
        except TypeError as error:  # an argument is missing: the call does not get as far as upstream's own lines
            return False, {"reason": f"it raised {error}"}
        found = [out.detach(), *lab.torch.autograd.grad(out, pair, d_out)]
    wanted = exactly(lab, case, draw(lab, case))[:3]
    found = [x.transpose(0, 1) if batched else x[:, None] for x in found]
    errors = [distance(x, y) if x.shape == y.shape else math.inf for x, y in zip(found, wanted, strict=True)]
    kept = lab.torch.equal(d_out, before)
    ok = kept and all(error <= TOLERANCE for error in errors)  # a nan is not
    return ok, {"measured": {"errors": errors, "dO is as it was": kept}, "tolerance": TOLERANCE}


def judge_block(lab):
    """Judge that the backward's kernel has blocks of as many heads as the environment asks for, or 32."""
    found, rest = {}, ("dispatch", 1, (3, 70), "int64", "dense", "none", "strided", 16)
    for value in (None, 16, 64):
        asked = {}
        setting = {} if value is None else {BLOCK: str(value)}
        case = Case((*DEEPSEEK, 64, SCALE), *rest)
        with unittest.mock.patch.dict(os.environ, setting), kernels(lab, asked.__setitem__, stand_in):
            run_door(lab, case, draw(lab, case))
        found[str(value)] = asked["bwd"].get("max_block_h", 32) if "bwd" in asked else None
    return found == {"None": 32, "16": 16, "64": 64}, {"measured": found, "unit": "heads"}


def judge_release(lab, version, shape, *, safe):
    """Judge what is asked for where tilelang says it is another release.

    From 0.1.11 on, S_shared of the forward shares its place with the workspace of the row sums, and below 64 heads
    there is no barrier between the two: wrong numbers at small dimensions (data/versions.md). So such a shape is
    declined there, or the kernel waits.
    """
    asked = {}

    def note(key, arguments):
        asked[key] = arguments
        raise Asked

    named = unittest.mock.patch.object(lab.modules.tilelang, "__version__", version)
    with named, kernels(lab, note, refuse), contextlib.suppress(Asked):
        lab.modules.dispatcher.fused_sparse_mla_absorbed(*tensors(lab.torch, shape), SCALE, shape[0])
    if safe or not asked:
        return bool(asked) == safe, {"measured": "asked" if asked else "declined"}
    waits = "storage_sync" in str(lab.modules.forward.sparse_mla_fwd.get_tir(**asked["sparse_mla_fwd"]))
    return waits, {"measured": "it waits" if waits else "it does not wait"}


def judge_release_interfaces(lab, version, heads):
    """Judge that the interfaces ask for kernels where tilelang says it is another release, with and without a batch."""
    with unittest.mock.patch.object(lab.modules.tilelang, "__version__", version):
        entries = "forward", "forward_3d", "backward", "backward_3d"
        found = {entry: interface(lab, entry, (192, 32, heads), 1) for entry in entries}
    return {*found.values()} == {"asked"}, {"measured": found}


def build(key, arguments, target, executed):
    """In a process of its own: lower a kernel, or compile it into tilelang's cache. Return its source, and why not."""
    modules = load(executed=executed)
    tilelang, module = modules.tilelang, modules.forward if hasattr(modules.forward, key) else modules.backward
    function, arch = getattr(module, key), tilelang.tvm.target.Target({"kind": "cuda", "arch": target}, host="c")
    if executed:
        return attempt(lambda: function(**arguments).get_kernel_source())
    identity = repr((tilelang.__version__, Path(module.__file__).read_text(), arguments, target)).encode()
    known = Path(tilelang.env.TILELANG_CACHE_DIR, f"source-{hashlib.sha256(identity).hexdigest()}.json")
    if not known.exists():
        configs = {getattr(option, "value", option): value for option, value in (function.pass_configs or {}).items()}
        with tilelang.tvm.transform.PassContext(opt_level=3, config=configs), arch:
            lower = functools.partial(tilelang.lower, target=arch, enable_device_compile=False)
            found = attempt(lambda: lower(function.get_tir(**arguments)).kernel_source)
        known.parent.mkdir(parents=True, exist_ok=True)
        (partial := known.with_suffix(f".{os.getpid()}")).write_text(json.dumps(found))
        partial.replace(known)
    return json.loads(known.read_text())


def attempt(call):
    """Return what building a kernel gives, and an empty reason; or None, and what it raises: a failed check."""
    try:
        return call(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {['', *str(error).strip().splitlines()][-1]}"


def judge_builds(probe, lab, target, *, executed):
    """Build what the dispatcher asked for; the control's source has to be the same in both lanes."""
    reported = [(*shape, TOP_K, SCALE) for shape in SHAPES]
    wanted = [
        one for one in reported if one[:3] != DEEPSEEK or target == "sm_90a"
    ]  # only lowering depends on the target
    wanted = [*lab.asked] if executed else wanted
    tasks = [
        (one, key)
        for key in KERNELS
        for one in wanted
        if key in lab.asked[one] and (executed or key in ("bwd", "sparse_mla_fwd"))
    ]
    context = multiprocessing.get_context(
        "spawn" if lab.torch.cuda.is_initialized() else "fork"
    )  # CUDA survives no fork
    processes = int(os.environ.get("REPRODUCER_PROCESSES") or os.cpu_count())  # the runner shares the cores out
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = [pool.submit(build, key, lab.asked[one][key], target, executed) for one, key in tasks]
    for (one, key), future in zip(tasks, futures, strict=True):
        (source, reason), control = future.result(), one[:2] == DEEPSEEK[:2]
        name = "{}+{}.".format(*one[:2]) + ("" if one in reported else f"{one[2]}.") + key
        measured = reason or len(source or "")
        probe.check(
            f"builds.{name}", "control" if control else "defect", bool(source), measured=measured, unit="bytes of CUDA"
        )
        if one == reported[0] and source:
            probe.output(f"source.{name}", lab.torch.frombuffer(bytearray(source.encode()), dtype=lab.torch.uint8))


def judge_errors(lab, attend, inputs, keep=None):
    """Judge out, dQ and dKV of a path at a reported shape against float64; give them to keep, if that is asked."""
    torch = lab.torch
    if (got := gradients(torch, attend, inputs)) is None:
        return False, {"reason": "the dispatcher answers None"}
    exact = gradients(torch, reference, [x.double() if x.is_floating_point() else x for x in inputs])
    if keep is not None:
        keep |= dict(zip(("out", "dq", "dkv"), got, strict=True))
    errors = {key: distance(x, y) for key, x, y in zip(("out", "dq", "dkv"), got, exact, strict=True)}
    ok = all(error <= TOLERANCE for error in errors.values())
    return ok, {"measured": errors, "tolerance": TOLERANCE, "unit": "relative error"}


def judge_peak(probe, lab, door, unfused):
    """Judge the memory of the path that a user gets against one [B, H, S, S] matrix of fp32."""
    torch, long = lab.torch, example(lab.torch, SHAPES[1], "cuda", LONG)

    def peak(attend):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients(torch, attend, long)
        return torch.cuda.max_memory_allocated() - before

    matrix = 4 * SHAPES[1][2] * LONG**2
    mine = peak(lambda *args: unfused(*args) if (out := door(*args)) is None else out)  # what dsa.py gives its user
    theirs = peak(unfused)
    probe.say("FIGURE", name="peak_over_unfused", value=mine / theirs, unit="1")
    if mine < min(matrix, theirs):
        probe.say("MEMORY_SAVE_VERIFIED", length=LONG, heads=SHAPES[1][2], fused=mine, unfused=theirs)
    return mine < matrix, {"measured": mine, "tolerance": matrix, "unit": "bytes"}


def judge_runs(probe, lab):
    """Launch the kernels through the user's door: numbers against float64, and the memory of the path that he gets."""
    torch, door = lab.torch, lab.modules.dispatcher.fused_sparse_mla_absorbed
    unfused = importlib.import_module(f"{VARIANT}.dsa")._unfused_absorbed_dsa_fn  # noqa: SLF001 - the path fallen back to
    for shape in SHAPES:
        role, inputs = "control" if shape == DEEPSEEK else "defect", example(torch, shape, "cuda", LENGTH)
        probe.judge("right.{}+{}".format(*shape), role, judge_errors, lab, door, inputs)
        probe.judge("unfused.{}+{}".format(*shape), "control", judge_errors, lab, unfused, inputs)
    own, kept = example(torch, DEEPSEEK, "cuda", LENGTH, own=True), {}
    probe.judge("own.512+64", "control", judge_errors, lab, door, own, kept)
    if kept:  # no row of dKV gets more than two sums: any order is one
        given = own[0].transpose(0, 1), own[1].transpose(0, 1), own[2][:, :, None].int()
        with contextlib.suppress(TypeError):  # default.512+64 says so
            kept["lse"] = lab.modules.function.SparseMLA.apply(*given, SCALE)[1]
    for name, tensor in kept.items():
        probe.output(f"{name}.512+64", tensor)
    judge_cases(probe, lab)
    for shape in ((512, 96, 64), (576, 64, 64)):  # this device has too little for them
        inputs = (*tensors(torch, shape, "cuda"), SCALE, shape[0])
        fits = torch.cuda.get_device_properties(0).shared_memory_per_block_optin > H200
        ok = None if fits else answer(lab, *inputs) == "declined"
        probe.check("declines.{}+{} here".format(*shape), "control", ok, reason="it may fit here" if fits else "")
    probe.judge("peak.64+64", "defect", judge_peak, probe, lab, door, unfused)


def judge_cases(probe, lab):
    """Judge the contract, with the kernels or with what stands in for them."""
    for index, case in enumerate(itertools.starmap(Case, CASES)):
        name = "case_{:02}.{}+{}.{}.{}".format(index, *case.kernel[:2], case.entry, "runs" if lab.real else "plain")
        probe.judge(name, "control" if case.kernel[:2] == DEEPSEEK[:2] else "defect", judge_case, lab, case)


def judge_calls(probe, lab):
    """Judge how an answer is got: without gradients, in checkpoints, and without the host waiting."""
    for shape in SHAPES:
        name, role = "{}+{}".format(*shape[:2]), "control" if shape == DEEPSEEK else "defect"
        probe.judge(f"modes.{name}", role, judge_modes, lab, shape)
        probe.judge(f"waits.{name}", role, judge_waits, lab, shape)


def judge_guard(probe, lab):
    """Judge which shapes get to the kernels, and what becomes of an error there."""
    for name, shape in DECLINED.items():
        probe.judge(f"declines.{name}", "control", judge_declined, lab, shape)
    probe.judge("declines.operands", "control", judge_operands, lab)
    for name in REFUSED:
        probe.judge(f"refuses.{name}", "control", judge_refused, lab, DECLINED[name])
    for one in ROOM:
        entry, latent, rope, heads, _, limit, fits = one
        role = "control" if fits == (one[1:3] == DEEPSEEK[:2]) else "defect"  # the release asks for DEEPSEEK alone
        probe.judge(f"room.{latent}+{rope}.{heads}.{limit}.{entry}", role, judge_room, lab, *one)
    for shape, role in ((DEEPSEEK, "control"), (SHAPES[1], "defect")):
        for key in ("sparse_mla_fwd", "bwd"):
            probe.judge("raises.{}+{}.{}".format(*shape[:2], key), role, judge_raises, lab, shape, key)
        probe.judge("overwritten.{}+{}".format(*shape[:2]), role, judge_overwritten, lab, shape)
    probe.judge("usual_scale", "defect", judge_usual_scale, lab)
    probe.judge("groups.64+64", "defect", judge_groups, lab)
    probe.judge("cached.448+128", "defect", judge_cached, lab)
    probe.judge("layers.512+64.448+128", "defect", judge_layers, lab)
    for name, batched in {"batched": True, "unbatched": False}.items():
        probe.judge(f"function.512+64.{name}", "control", functools.partial(judge_function, batched=batched), lab)
    probe.judge("block.512+64", "control", judge_block, lab)
    for rope, role in ((DEEPSEEK[1], "control"), (32, "defect"), (128, "defect")):
        probe.judge(f"default.512+{rope}", role, judge_default, lab, rope)
    probe.judge("without_tilelang.64+64", "control", judge_missing, lab)
    for version, shape, role, safe in RELEASES:
        name = "release.{}.{}+{}.{}".format(version, *shape)
        probe.judge(name, role, functools.partial(judge_release, safe=safe), lab, version, shape)
    for version, heads in (("0.1.9", 32), ("0.1.15", 64)):
        name = f"release.{version}.192+32.{heads}.interfaces"
        probe.judge(name, "defect", judge_release_interfaces, lab, version, heads)


def judge(probe, target):
    """Ask the dispatcher; build what it asks for where the target is a GPU, and run it where this host has it."""
    if not re.fullmatch(r"cpu|sm_\d+a?", target):
        raise NotImplementedError(f"no target {target}; name cpu, or an architecture such as sm_90a")
    torch = importlib.import_module("torch")
    here = torch.cuda.is_available() and target != "cpu"
    executed = here and target.rstrip("a") == "sm_{}{}".format(*torch.cuda.get_device_capability())
    lab = Lab(torch, load(executed=executed), "cpu", False, {})
    evidence = "executed" if executed else "traced" if target == "cpu" else "compiled"
    probe.say("TARGET", target=target, evidence=evidence, device=torch.cuda.get_device_name() if executed else "none")
    for key in FILES:
        probe.upstream(getattr(lab.modules, key))
    torch.set_num_threads(1)  # what runs on the CPU is small, and other lanes want the other cores
    for shape in SHAPES:
        role = "control" if shape == DEEPSEEK else "defect"
        probe.judge("reaches.{}+{}".format(*shape), role, judge_reach, lab, shape)
    fused = sum("bwd" in lab.asked.get((*shape, TOP_K, SCALE), {}) for shape in SHAPES[1:])
    probe.say("FIGURE", name="other_dimensions_fused", value=fused, unit="of 2")
    judge_cases(probe, lab)
    judge_calls(probe, lab)
    judge_guard(probe, lab)
    if target == "cpu":  # on the other targets they are lowered
        for kernel in {one[:2]: one for one in FACTORS["kernel"]}.values():
            role = "control" if kernel[:2] == DEEPSEEK[:2] else "defect"
            probe.judge("program.{}+{}".format(*kernel[:2]), role, judge_program, lab, kernel)
    elif not probe.only:
        judge_builds(probe, lab, target, executed=executed)
    if executed:
        judge_runs(probe, lab._replace(device="cuda", real=True))


if __name__ == "__main__":
    Probe().run(judge)
