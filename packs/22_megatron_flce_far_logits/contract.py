# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "numpy==2.3.5",
#   "packaging==26.3",
#   "torch==2.13.0",
#   "triton==3.6.0",
# ]
# ///
"""The linear cross entropy fusion's loss is -inf for a token whose logits all lie far below zero.

Symptom: with cross_entropy_fusion_impl="linear" a token whose logits are all below about -104 has the loss -inf, and
gradients of nan, where cross entropy is finite: 2.9957, log(20), for 20 logits of -150. From about -88 down the sum is
subnormal: the loss is inaccurate, and gradients can be nan. A nan does not stay in its token: the weight's gradient
sums over the tokens, and an ignored one counts there.

Cause: forward_dp_epilogue and forward_tp_epilogue, in megatron/core/fusions/linear_cross_entropy/blackwell/triton.py,
take the maximum over the splits of the vocabulary from 0 on, and load 0 for splits beyond the last. The main loop's
maxima are right: they start at -1e30. The epilogue scales their sums by exp(maximum of the split - maximum), which
underflows to 0 where the second is 0; the loss is maximum + log(sum) - logit, and backward divides by the sum.

Scope: the dev branch of Megatron-LM; no release and not main have "linear". What is real: linear_cross_entropy, its
autograd function, Platform, the host code of blackwell/entry.py, and the Triton kernels, under Triton's interpreter.
What stands in: the two kernels in the CuTe DSL, by torch with the semantics that their source has (FwdMainLoop: the
maximum of a split from -1e30 on, which passes over nan, the sum of exponentials below it, the label's logit;
BwdPartialDlogits: the gradient of a split's logits from the saved maximum and sum, rounded to the input's dtype); the
collectives of tensor-parallel ranks, which are threads that take turns; streams, is_cuda and the compute capability;
torch.mm with out_dtype; CPU's autocast for CUDA's. Nothing was run on a Blackwell GPU, and nothing is said about time.
Infinite losses are judged where the reference has none.

The contract: reductions none, sum and mean, with a gradient from above; labels ignored by -100, by a class, or all; a
mean of none is nan, as in torch; one token, odd numbers of them, batches; 1 to 131 splits, also more than the 64 of a
step; the default split; bf16 and fp16; logits below zero down to -2^96 (the main loop goes to -1e30), far above, mixed
over tokens, splits, steps and ranks; ranks and splits about -50 beside some about -300; one logit to 60 above up to
133,119 equal ones, which each add little and together percents; a split, a step or a rank whose logits are all -inf;
ranks 1, 2 and 4, sequence parallel or not; forward under autocast, as Megatron's schedules run it where enable_autocast
is set, whose loss is as exact; another batch of the same shape between forward and backward, as with microbatches in
flight; a split or a rank whose logits are all nan, where the loss is nan; an ignored token whose hidden state is nan or
infinite, which adds 0 to the loss; and the kernels by themselves on tensors with any strides, of 1 to 47 tokens (3001
where labels are counted) and 2 to 531 splits, where a sum of nan is no number afterwards either; backward twice through
one graph. No kernel, in any case, reads or writes outside of the tensor that an access is about, or needs what a mask
leaves out without another value; by themselves they are given larger memory with nan around. What the caller gives
stays as it is, the gradient from above included. Forward and backward read nothing on the host, which
would wait for the GPU and end the capture of a graph; their buffers are fp32 where the kernels read so, and lie on the
GPU, whatever PyTorch's default dtype and device are; and new memory may hold nan.
Where each token's maximum over the first 64 splits is not below zero, the bits are those of the tree without the
patch.

Inputs are multiples of 1/8 of which fp32 holds every sum: the logits are exact, in whatever order they are summed.
Tolerances: a loss 2^-19, for exponentials, a sum and a logarithm of some roundings of 2^-24 each, and a loss below 16;
and 2^-22 of the largest logit: the three sums of numbers of that size round by at most 2^-24 of it each. Gradients,
norm of the difference over norm, 2^-7: logits' gradient and result are rounded to bf16, by 2^-9 each; twice that, as
the terms of a sum cancel. The column of the weight's gradient that carries the level is judged apart.

Upstream: https://github.com/NVIDIA/Megatron-LM, branch dev; brought in by https://github.com/NVIDIA/Megatron-LM/pull/2256
https://github.com/verl-project/verl/pull/7439 is the same fault, and its fix, in the kernels that these come from.

Both sentinels without the runner, in an empty folder, with PACK set to the absolute path of this file's folder and with
torch, triton, numpy below 2.4 and packaging installed. The second line ends in BUG_REPRODUCED, the fourth in
FIX_VALIDATED:

    curl -sL https://github.com/NVIDIA/Megatron-LM/archive/d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1.tar.gz | tar xz
    PYTHONPATH=Megatron-LM-d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1 python "$PACK/reproduce.py" --target cpu
    GIT_CEILING_DIRECTORIES="$PWD" git -C Megatron-LM-d48bd6be0a* apply -p1 "$PACK/fix.patch"
    PYTHONPATH=Megatron-LM-d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1 python "$PACK/reproduce.py" --target cpu
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

import contextlib as contexts
import dataclasses
import functools
import importlib
import logging
import math
import threading
import types
from unittest import mock

BLACKWELL = "megatron.core.fusions.linear_cross_entropy.blackwell"
KERNELS = f"{BLACKWELL}.triton"
FLOOR = -1e30  # where the main loop's maximum starts, in each split
HIDDEN = 64  # the main loop takes multiples of 64 elements
COLUMNS = 2  # of the hidden size, that carry the level of the logits
WIDTH = 256  # classes in a split: the main loop's tile
BLOCK = 64  # splits in a step of the epilogues
PATIENCE = 60  # seconds that a rank waits for the others
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "_unique2", "unique_dim", "bincount")
READERS = ("cpu", "numpy", "tolist", "__array__")
MAKERS = ("arange", "empty", "empty_strided", "full", "linspace", "ones", "tensor", "zeros")  # on the default device
LOSS = 2.0**-19
LEVEL = 2.0**-22
GRADIENT = 2.0**-7
NONE, SUM, MEAN = range(3)  # reductions, as the kernels are told them


@dataclasses.dataclass(frozen=True)
class Case:
    """What a loss is given."""

    levels: tuple[float, ...] = (0.0,)  # what the logits lie about, in each of so many parts of the vocabulary
    classes: int = 600  # of all ranks
    shape: tuple[int, ...] = (37,)  # tokens, or sequence and batch
    signs: tuple[float, ...] = (1.0,)  # one token after the other has the levels times these
    ranks: int = 1
    reduction: str = "none"
    labels: str = "any"  # or some ignored, all ignored, first part, last part
    ignore_index: int = -100
    dtype: str = "bfloat16"
    width: int = WIDTH
    above: float = 1.0  # the gradient from above, or its factor
    spread: float = 1.0  # of the logits about their level: 0 makes them equal
    sequence_parallel: bool = False
    group: bool = False  # a group of one rank
    gradients: bool = True
    default: str = "float32"  # PyTorch's default dtype
    autocast: bool = False  # forward is under torch.autocast, to bf16
    in_flight: bool = False  # another batch's forward comes before backward
    twice: bool = False  # backward comes twice
    padding: float = 0.0  # added to the hidden states of ignored tokens: nan and infinity stay there


FAR = (-150.0,)
PEAK = (-133.0, *FAR * (66 * WIDTH - 1))  # one logit above 16,895: a split of these adds 1e-5, all of them 7e-4
# fmt: off
DEFECTS = {
    "example": Case(FAR, classes=20, shape=(1,), spread=0.0),
    "none": Case(FAR),
    "sum": Case(FAR, reduction="sum"),
    "mean": Case(FAR, reduction="mean", above=3.0),
    "default_split": Case(FAR, classes=7001, shape=(9, 2), width=3072),
    "float16": Case(FAR, dtype="float16", reduction="mean"),
    "two_dimensions": Case(FAR, shape=(5, 3), reduction="mean"),
    "batch_two": Case(FAR, shape=(17, 2), labels="some ignored"),
    "one_token": Case(FAR, shape=(1,), reduction="mean"),
    "tokens.16": Case(FAR, shape=(16,), reduction="sum"),
    "tokens.33": Case(FAR, shape=(33,), reduction="mean", labels="some ignored"),
    "subnormal.-100": Case((-100.0,), spread=0.0),
    "level.-112": Case((-112.0,)),
    "level.-512": Case((-512.0,), reduction="mean"),
    "level.-8192": Case((-8192.0,)),
    "level.-131072": Case((-131072.0,)),
    "level.-2^96": Case((-(2.0**96),), spread=0.0, shape=(17,)),
    "ignored.none": Case(FAR, labels="some ignored"),
    "ignored.mean": Case(FAR, labels="some ignored", reduction="mean"),
    "ignored.sum": Case(FAR, labels="some ignored", reduction="sum", above=-0.5),
    "ignored.class": Case(FAR, labels="some ignored", reduction="mean", ignore_index=4),
    "ignored.class_zero": Case(FAR, labels="some ignored", ignore_index=0),
    "ignored.all.gradients": Case(FAR, labels="all ignored", reduction="sum"),
    "splits.one": Case(FAR, classes=200),
    "splits.two": Case(FAR, classes=2 * WIDTH, reduction="mean"),
    "splits.64": Case(FAR, classes=64 * WIDTH, shape=(5,)),
    "splits.65": Case(FAR, classes=65 * WIDTH - 3, shape=(5,), reduction="mean"),
    "splits.131": Case(FAR, classes=131 * WIDTH - 100, shape=(3,)),
    "far_splits.falling": Case((-120.0, -300.0, -512.0)),
    "far_splits.rising": Case((-512.0, -300.0, -120.0), labels="first part"),
    "far_splits.last_label": Case((-128.0, -144.0, -512.0), labels="last part", reduction="mean"),
    "far_blocks.falling": Case((-120.0, -400.0), classes=128 * WIDTH, shape=(3,)),
    "far_blocks.rising": Case((-400.0, -120.0), classes=128 * WIDTH, shape=(3,)),
    "far_blocks.near": Case((-120.0, -124.0), classes=128 * WIDTH, shape=(3,), reduction="sum"),
    "mixed.tokens": Case(FAR, signs=(1.0, 0.0, -1.0), labels="some ignored"),
    "mixed.tokens.mean": Case(FAR, signs=(0.0, 0.0, 0.0, 1.0), reduction="mean"),
    "mixed.levels": Case((-128.0,), signs=(1.0, 0.5, 2.0, 0.0, -0.5, -2.0)),
    "empty_split": Case((-150.0, -float("inf"), -150.0), labels="first part", gradients=False, classes=768),
    "empty_split.first": Case((-float("inf"), -150.0), labels="last part", gradients=False, classes=512),
    "empty_block.first": Case((-float("inf"), -150.0), labels="last part", gradients=False, classes=128 * WIDTH,
                              shape=(3,)),
    "peak": Case(PEAK, classes=len(PEAK), shape=(1,), spread=0.0, gradients=False),
    "ranks.two.peak": Case(PEAK, ranks=2, classes=len(PEAK), shape=(1,), spread=0.0, gradients=False),
    "default.bfloat16": Case(FAR, shape=(5,), default="bfloat16"),
    "default.float64": Case(FAR, shape=(5,), default="float64", reduction="mean"),
    "ranks.two.default.bfloat16": Case(FAR, ranks=2, shape=(5,), default="bfloat16", reduction="sum"),
    "ranks.two.default.float64": Case(FAR, ranks=2, shape=(4, 1), default="float64", sequence_parallel=True),
    "autocast": Case(FAR, shape=(5,), autocast=True),
    "ranks.two.autocast": Case(FAR, ranks=2, classes=1200, shape=(5,), reduction="mean", autocast=True),
    "in_flight": Case(FAR, shape=(5,), in_flight=True),
    "ranks.two.in_flight": Case(FAR, ranks=2, shape=(5,), reduction="mean", in_flight=True),
    "twice": Case(FAR, shape=(5,), labels="some ignored", twice=True),
    "twice.mean": Case(FAR, shape=(4, 3), reduction="mean", labels="some ignored", twice=True),
    "ranks.two.twice": Case(FAR, ranks=2, shape=(5,), reduction="sum", labels="some ignored", twice=True),
    "padding.nan": Case(FAR, shape=(5,), labels="some ignored", gradients=False, padding=float("nan")),
    "ranks.two.padding.nan": Case(FAR, ranks=2, shape=(5,), reduction="mean", labels="some ignored", gradients=False,
                                  padding=float("nan")),
    "ranks.one": Case(FAR, group=True),
    "ranks.two": Case(FAR, ranks=2, classes=1200),
    "ranks.two.sum": Case(FAR, ranks=2, classes=1200, reduction="sum", labels="first part"),
    "ranks.two.mean": Case(FAR, ranks=2, classes=1200, reduction="mean", labels="some ignored"),
    "ranks.two.last": Case(FAR, ranks=2, classes=1200, reduction="mean", labels="last part", ignore_index=7),
    "ranks.two.sequence": Case(FAR, ranks=2, classes=1200, shape=(6, 3), sequence_parallel=True),
    "ranks.two.levels": Case((-120.0, -512.0), ranks=2, classes=1200, labels="last part"),
    "ranks.two.levels.rising": Case((-512.0, -120.0), ranks=2, classes=1200, labels="first part", reduction="sum"),
    "ranks.two.crossed": Case((-120.0, -300.0, -300.0, -120.0), ranks=2, classes=4 * WIDTH),
    "ranks.two.mixed": Case(FAR, ranks=2, classes=1200, signs=(1.0, 0.0, -1.0), labels="some ignored"),
    "ranks.two.deep": Case((-8192.0,), ranks=2, classes=1200),
    "ranks.two.deepest": Case((-(2.0**96),), ranks=2, classes=1200, spread=0.0, shape=(17,)),
    "ranks.two.subnormal": Case((-100.0,), ranks=2, classes=1200, spread=0.0),
    "ranks.two.block": Case((-400.0, -120.0), ranks=2, classes=130 * WIDTH, shape=(3,), labels="some ignored"),
    "ranks.two.blocks": Case((-120.0, -400.0, -128.0, -136.0), ranks=2, classes=2 * 65 * WIDTH, shape=(3,)),
    "ranks.two.blocks.rising": Case((-400.0, -120.0) * 2, ranks=2, classes=4 * 65 * WIDTH, shape=(3,)),
    "ranks.two.empty": Case((-float("inf"), -150.0), ranks=2, classes=1200, labels="last part", gradients=False),
    "ranks.four": Case((-131072.0,), ranks=4, classes=1100, shape=(8, 1), sequence_parallel=True),
    "ranks.four.levels": Case((-300.0, -120.0, -512.0, -144.0), ranks=4, classes=1100, reduction="mean"),
    "ranks.four.float16": Case(FAR, ranks=4, classes=1100, dtype="float16", labels="some ignored", reduction="mean"),
}
EXACT = {  # in each token the first 64 splits reach 0: the same bits with the patch as without
    "normal.none": Case(labels="some ignored"),
    "normal.sum": Case(reduction="sum", labels="some ignored"),
    "normal.mean": Case(reduction="mean", labels="some ignored", above=2.0),
    "normal.float16": Case(dtype="float16", shape=(9, 2)),
    "normal.default_split": Case(classes=7001, width=3072, shape=(5, 2)),
    "normal.splits.131": Case(classes=131 * WIDTH - 100, shape=(3,)),
    "normal.ranks.two": Case(ranks=2, classes=1200, labels="some ignored"),
    "normal.ranks.two.mean": Case(ranks=2, classes=1200, reduction="mean", labels="some ignored"),
    "normal.ranks.four": Case(ranks=4, classes=1100, shape=(8, 1), sequence_parallel=True, reduction="sum"),
    "zero": Case(spread=0.0),
    "zero.blocks": Case(spread=0.0, classes=130 * WIDTH, shape=(3,)),
    "zero.ranks.two.blocks": Case(spread=0.0, ranks=2, classes=4 * 65 * WIDTH, shape=(3,), reduction="mean"),
    "above": Case((150.0,), reduction="mean"),
    "above.far": Case((131072.0,)),
    "above.splits": Case((150.0, -300.0, 120.0)),
    "above.blocks": Case((120.0, 400.0), classes=128 * WIDTH, shape=(3,)),
    "above.ranks.two": Case((-400.0, 120.0), ranks=2, classes=1200),
    "above.default.bfloat16": Case((150.0,), shape=(5,), default="bfloat16", reduction="mean"),
    "above.default.float64": Case((150.0,), shape=(5,), default="float64"),
    "above.ranks.two.default.bfloat16": Case((150.0,), ranks=2, shape=(4, 1), default="bfloat16",
                                             sequence_parallel=True),
    "above.ranks.two.default.float64": Case((150.0,), ranks=2, shape=(5,), default="float64", reduction="sum"),
    "one_split_above": Case((-150.0, -150.0, 5.0), classes=768),
    "empty_split.normal": Case((0.0, -float("inf")), classes=512, labels="first part", gradients=False),
    "normal.autocast": Case(shape=(5,), reduction="sum", autocast=True),
    "normal.ranks.two.autocast": Case(ranks=2, classes=1200, shape=(5,), autocast=True),
    "normal.in_flight": Case(shape=(5,), reduction="mean", in_flight=True),
    "normal.ranks.two.in_flight": Case(ranks=2, shape=(4, 1), sequence_parallel=True, in_flight=True),
}
NEAR = {  # below 0, and no sum underflows: right, but not the same bits; and what is nan, or has nan beside it
    "below.-4": Case((-4.0,), spread=0.0, reduction="mean"),
    "below.-48": Case((-48.0,)),
    "below.-64.ranks.two": Case((-64.0,), ranks=2, classes=1200),
    "below.unlike": Case((-50.0, -300.0), shape=(5,)),
    "below.unlike.rising": Case((-300.0, -50.0), shape=(5,), reduction="mean"),
    "below.ranks.two.unlike": Case((-50.0, -300.0), ranks=2, shape=(5,), labels="some ignored"),
    "below.ranks.two.unlike.rising": Case((-300.0, -50.0), ranks=2, shape=(5,), reduction="mean"),
    "below.ranks.two.near": Case((-4.0, -300.0), ranks=2, shape=(5,), spread=0.0, labels="first part"),
    "below.blocks": Case((-16.0, 16.0), classes=128 * WIDTH, shape=(3,)),
    "ignored.all.mean": Case(reduction="mean", labels="all ignored", gradients=False),
    "nan_split": Case((0.0, float("nan")), classes=512, shape=(5,), labels="first part", gradients=False),
    "nan_split.far": Case((float("nan"), *FAR), classes=512, shape=(5,), labels="last part", gradients=False),
    "nan_block": Case((0.0, float("nan")), classes=128 * WIDTH, shape=(3,), labels="first part", gradients=False),
    "ranks.two.nan_split": Case((0.0, 0.0, float("nan"), 0.0), ranks=2, classes=4 * WIDTH, shape=(5,),
                                labels="first part", gradients=False),
    "ranks.two.nan_rank": Case((0.0, float("nan")), ranks=2, shape=(5,), reduction="mean", labels="first part",
                               gradients=False),
    "padding.nan.normal": Case(shape=(5,), reduction="mean", labels="some ignored", gradients=False,
                               padding=float("nan")),
    "padding.inf": Case(shape=(5,), reduction="sum", labels="some ignored", gradients=False, padding=float("inf")),
    "ranks.two.padding.nan.none": Case(ranks=2, shape=(5,), labels="some ignored", gradients=False,
                                       padding=float("nan")),
    "ranks.two.padding.nan.mean": Case(ranks=2, shape=(5,), reduction="mean", labels="some ignored", gradients=False,
                                       padding=float("nan")),
    "ranks.two.padding.inf": Case(ranks=2, shape=(4, 1), reduction="sum", labels="some ignored", gradients=False,
                                  padding=float("inf"), sequence_parallel=True),
}
# fmt: on


# What stands in for a Blackwell GPU and for the two kernels that are written in the CuTe DSL.


class Packed:
    """A tensor as the CuTe DSL is given it."""

    def __init__(self, tensor, assumed_align):
        self.tensor, self.assumed_align = tensor, assumed_align

    def mark_compact_shape_dynamic(self, mode, stride_order=None):
        """Return itself: what it says is for the compiler."""
        del mode, stride_order
        return self


def fp32_of(*packed):
    """Return tensors that a kernel copies with an atom for fp32: it takes no others."""
    for each in packed:
        if str(each.tensor.dtype) != "torch.float32":
            raise TypeError(f"the kernel copies fp32, and was given {each.tensor.dtype}")
    return [each.tensor for each in packed]


def products(hidden, rows):
    """Return logits in fp32, as a kernel does that autocast does not reach."""
    import torch

    with torch.autocast("cpu", enabled=False):
        return hidden.float() @ rows.float().t()


class ForwardMainLoop:
    """FwdMainLoop in torch: of each split the maximum, the sum of exponentials below it, and the label's logit."""

    def __init__(self, vocab_per_split):
        self.width = vocab_per_split

    def __call__(self, hidden, weight, labels, *given):
        *outputs, ignore_index, rank, _ = given
        labels, (label_logits, maximum, total) = labels.tensor, fp32_of(*outputs)
        logits = products(hidden.tensor, weight.tensor)
        classes = logits.shape[1]
        for split, part in enumerate(logits.split(self.width, dim=1)):
            largest = part.where(~part.isnan(), FLOOR).amax(dim=1).clamp(min=FLOOR)  # as the kernel's fmax
            maximum[:, split] = largest
            total[:, split] = (part - largest.unsqueeze(1)).exp().sum(dim=1)
            columns = labels - rank * classes - split * self.width
            here = (columns >= 0) & (columns < part.shape[1])
            found = part.gather(1, columns.clamp(0, part.shape[1] - 1).unsqueeze(1)).squeeze(1)
            found = found.where(labels != ignore_index, 0.0)
            label_logits.copy_(found.where(here, label_logits))


class BackwardPartialLogits:
    """BwdPartialDlogits in torch: the gradient of one split's logits, from the maximum and the sum that were saved."""

    def __init__(self, reduction, vocab_per_split):
        self.reduction, self.width = reduction, vocab_per_split

    def __call__(self, split, hidden, weight, labels, *given):
        above, maximum, total, towards_logits, valid, ignore_index, rank, _ = given
        labels, (above, maximum, total) = labels.tensor, fp32_of(above, maximum, total)
        if self.reduction == 2:
            above = above / ctypes.c_int64.from_address(valid).value
        above = above.expand(labels.shape) * (labels != ignore_index)
        rows = weight.tensor[split * self.width : (split + 1) * self.width]
        exponentials = (products(hidden.tensor, rows) - maximum.unsqueeze(1)).exp()
        gradient = exponentials * (above * total.reciprocal()).unsqueeze(1)
        columns = labels - rank * weight.tensor.shape[0] - split * self.width
        here = (columns >= 0) & (columns < rows.shape[0]) & (labels != ignore_index)
        gradient.scatter_add_(
            1, columns.clamp(0, rows.shape[0] - 1).unsqueeze(1), (-above).where(here, 0.0).unsqueeze(1)
        )
        towards_logits.tensor[:, : rows.shape[0]] = gradient.to(towards_logits.tensor.dtype)


class Stream:
    """A CUDA stream, or an event, of a host without a GPU: all is done in order."""

    cuda_stream = 0

    def __init__(self, device=None):
        self.device = device

    def record_event(self, event):
        """Do nothing."""

    def wait_event(self, event):
        """Do nothing."""


class Team:
    """Tensor-parallel ranks that are threads: one runs at a time, and they meet at each collective."""

    def __init__(self, size):
        self.size, self.slots, self.turn = size, [None] * size, threading.Lock()
        self.barrier = threading.Barrier(size)

    def meet(self):
        """Let the others run until all are here."""
        self.turn.release()
        try:
            self.barrier.wait(PATIENCE)
        finally:
            self.turn.acquire()

    def gather(self, rank, tensor):
        """Return a copy of the tensors of all ranks."""
        self.slots[rank] = tensor
        self.meet()
        found = [each.clone() for each in self.slots]
        self.meet()
        return found


@dataclasses.dataclass(frozen=True)
class Member:
    """A process group, as one of its ranks holds it."""

    team: Team
    rank: int


def all_reduce(tensor, op, group):
    """Reduce over the ranks of a team, in the order of the ranks."""
    import torch

    combine = torch.maximum if op == torch.distributed.ReduceOp.MAX else torch.add
    tensor.copy_(functools.reduce(combine, group.team.gather(group.rank, tensor)))


def all_gather_into_tensor(output, tensor, group):
    """Join the tensors of the ranks of a team."""
    import torch

    output.copy_(torch.cat(group.team.gather(group.rank, tensor)))


def is_masked(torch, given):
    """Return whether an index is a mask, which has to be counted: unless it takes one number, which fills it."""
    masks = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in given[1])
    return masks and not (len(given) > 2 and given[2].numel() == 1)


def is_host(*given):
    """Return whether a device is asked for by the name of the host, and not as that of another tensor."""
    return any(isinstance(each, str) and each == "cpu" for each in given)


@contexts.contextmanager
def apart(torch):
    """Keep host and GPU apart in this thread, though here both are the host.

    No operator may need a value on the host. What is made without a device does not lie where the other tensors do: it
    has no memory at all. A tensor without dimensions is left where it is: PyTorch's operators take it from the host.
    """

    class Operators(importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode):
        def __torch_dispatch__(self, operator, _types, given=(), named=None):
            name = operator.overloadpacket.__name__
            if name in WAITING or (name in ("index", "index_put", "index_put_") and is_masked(torch, given)):
                raise RuntimeError(f"the host waits for the GPU: {operator}")
            return operator(*given, **(named or {}))

    class Functions(importlib.import_module("torch.overrides").TorchFunctionMode):
        def __torch_function__(self, function, _types, given=(), named=None):
            named = named or {}
            if function in readers or (function is torch.Tensor.to and is_host(*given[1:], *named.values())):
                raise RuntimeError(f"the host waits for the GPU: {function}")
            found = function(*given, **named)
            if function in makers and named.get("device") is None and "out" not in named and found.dim():
                return found.to("meta")
            return found

    makers = [getattr(torch, name) for name in MAKERS]
    readers = [getattr(torch.Tensor, name) for name in READERS]
    functions = Functions()

    def follow(loss):
        """Keep them apart inside backward, too, where PyTorch turns off the modes that functions are seen by."""

        def enter(_):
            functions.__enter__()

        def leave(*_):
            functions.__exit__(None, None, None)

        nodes = [loss.grad_fn]
        for node in nodes:
            node.register_prehook(enter)
            node.register_hook(leave)
            nodes += [each for each, _ in node.next_functions if each is not None and each.next_functions]

    with Operators(), functions:
        yield follow


@contexts.contextmanager
def defaults(torch, dtype):
    """Set PyTorch's default dtype, and let new memory hold nan, as it does with deterministic algorithms."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
        torch.set_default_dtype(before)


def stand_ins(torch, choosing=False):
    """Return the stand-ins as a context: for a GPU and for other ranks; `choosing` a Blackwell GPU's kernels, too."""
    mm = torch.mm

    def mm_out_dtype(left, right, out_dtype=None):
        return mm(left.to(out_dtype or left.dtype), right.to(out_dtype or right.dtype))

    cuda = {
        "current_stream": Stream,
        "stream": lambda _: contexts.nullcontext(),
        "Stream": Stream,
        "Event": Stream,
    }
    blackwell = {  # not while kernels run: Triton would look for that GPU's driver
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (10, 0),
    }
    ranks = {
        "get_rank": lambda group: group.rank,
        "get_world_size": lambda group: group.team.size,
        "all_reduce": all_reduce,
        "all_gather_into_tensor": all_gather_into_tensor,
    }
    stack = contexts.ExitStack()
    stack.enter_context(mock.patch.multiple(torch.cuda, **cuda, **(blackwell if choosing else {})))
    stack.enter_context(mock.patch.multiple(torch.distributed, **ranks))
    stack.enter_context(mock.patch.object(torch.cuda.nvtx, "range", contexts.nullcontext))
    stack.enter_context(mock.patch.object(torch, "mm", mm_out_dtype))
    stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", True, create=True))
    return stack


def stand_in_packages():
    """Put modules in the place of cuda.bindings and the CuTe DSL, with what the module uses of them."""
    made = {name: types.ModuleType(name) for name in ("cuda", "cuda.bindings", "cuda.bindings.driver")}
    made |= {name: types.ModuleType(name) for name in ("cutlass", "cutlass.cute", "cutlass.cute.runtime")}
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    made["cuda.bindings.driver"].CUstream = int
    made["cutlass"].Int64 = int
    cute, runtime = made["cutlass.cute"], made["cutlass.cute.runtime"]
    cute.kernel, cute.AddressSpace = object, types.SimpleNamespace(gmem=None)
    cute.compile = lambda kernel, *_: kernel
    runtime.from_dlpack = Packed
    runtime.make_ptr = lambda _dtype, address, *_, **__: address
    sys.modules.update(made)


def complete_interpreter():
    """Let maximum and minimum pass over nan, as on a GPU: Triton's interpreter does so from release 3.9 on."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        setattr(InterpreterBuilder, name, lambda builder, x, y, f=function: builder.binary_op(x, y, f))


class Upstream:
    """What the probe uses of the tree that is on the path."""

    def __init__(self, torch):
        self.torch = torch
        stand_in_packages()
        complete_interpreter()
        logging.disable(logging.WARNING)  # that the CuTe DSL is not there
        self.fused = importlib.import_module("megatron.core.fusions.fused_linear_cross_entropy")
        with stand_ins(torch, choosing=True):
            vars(self.fused)["_get_platform"]()
        self.entry = importlib.import_module(f"{BLACKWELL}.entry")
        self.kernels = importlib.import_module(KERNELS)
        counter = self.kernels.get_num_valid_tokens
        counter.configs = counter.configs[:1]  # to time both takes a GPU
        self.entry.fwd_mainloop.FwdMainLoop = ForwardMainLoop
        self.entry.bwd_partial_dlogits.BwdPartialDlogits = BackwardPartialLogits

    def modules(self):
        """Return the modules that the runner has to find in its tree."""
        return (self.fused, self.entry, self.kernels)

    def split(self, width):
        """Set the classes in a split, as LCE_FWD_VOCAB_SPLIT_SIZE and LCE_BWD_VOCAB_SPLIT_SIZE do."""
        for name in ("_get_fwd_config", "_get_bwd_config"):
            config = vars(self.entry)[name]
            config.cache_clear()  # kernels are kept by the number of classes, whatever a split has
            vars(config())["_vocab_per_split"] = width


# What is measured.


def given(torch, case):
    """Return hidden states, the whole weight, and labels: all logits are numbers that fp32 holds."""
    random = torch.Generator().manual_seed(3)
    dtype = getattr(torch, case.dtype)
    hidden = torch.randint(-16, 17, (*case.shape, HIDDEN), generator=random).float() / 8 * case.spread
    weight = torch.randint(-4, 5, (case.classes, HIDDEN), generator=random).float() / 8
    count = hidden.numel() // HIDDEN
    signs = torch.tensor(case.signs, dtype=torch.float32).repeat(count)[:count].view(case.shape)
    hidden[..., 0], hidden[..., 1] = signs, 0.0
    parts = torch.arange(case.classes) * len(case.levels) // case.classes
    weight[:, 0] = torch.tensor(case.levels, dtype=torch.float32)[parts]
    labels = torch.randint(case.classes, case.shape, generator=random)
    flat, part = labels.view(-1), -(-case.classes // len(case.levels) // max(case.ranks, 2))
    if case.labels == "first part":
        flat %= part
    elif case.labels == "last part":
        flat.copy_(case.classes - 1 - flat % part)
    elif case.labels == "some ignored":
        flat[1::3] = case.ignore_index
    elif case.labels == "all ignored":
        flat.fill_(case.ignore_index)
    if case.padding:
        hidden[labels == case.ignore_index] += case.padding
    return hidden.to(dtype), weight.to(dtype), labels


def above(torch, case):
    """Return the gradient from above, in fp32."""
    if case.reduction != "none":
        return torch.tensor(case.above, dtype=torch.float32)
    count = functools.reduce(int.__mul__, case.shape)
    return torch.randn(count, generator=torch.Generator().manual_seed(9), dtype=torch.float32) * case.above


def forward(upstream, case, member, *tensors):
    """Compute the loss, under autocast where the case says so: on this host it is the CPU's."""
    with upstream.torch.autocast("cpu", upstream.torch.bfloat16, enabled=case.autocast):
        return upstream.fused.linear_cross_entropy(
            *tensors, member, case.reduction, case.ignore_index, case.sequence_parallel
        )


def same(one, other):
    """Return whether two tensors hold the same numbers; a nan is one."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def on_rank(upstream, case, member, found):
    """Compute the loss and its gradients on one rank, and name the caller's tensors that are no longer as they were."""
    torch = upstream.torch
    hidden, weight, labels = given(torch, case)
    rank, size = (member.rank, member.team.size) if member else (0, 1)
    weight = weight.chunk(size)[rank].contiguous().requires_grad_(case.gradients)
    if case.sequence_parallel:
        hidden = hidden.chunk(size)[rank].contiguous()
    hidden.requires_grad_(case.gradients)
    gradient = above(torch, case)
    mine = {"hidden": hidden, "weight": weight, "labels": labels, "gradient": gradient}
    before = {name: tensor.detach().clone() for name, tensor in mine.items()}
    with apart(torch) as follow:
        loss = forward(upstream, case, member, hidden, weight, labels)
        if case.in_flight:
            another = hidden.detach().neg().requires_grad_(case.gradients)
            forward(upstream, case, member, another, weight, labels)
        if case.gradients:
            follow(loss)
            loss.backward(gradient, retain_graph=case.twice)
        if case.twice:
            loss.backward(gradient)
            hidden.grad /= 2  # exact, as the sum of two like numbers was
            weight.grad /= 2
    found[rank] = {"loss": loss.detach(), "towards_hidden": hidden.grad, "towards_weight": weight.grad}
    found[rank]["altered"] = [name for name, tensor in mine.items() if not same(tensor.detach(), before[name])]


def run_rank(upstream, case, member, found, errors):
    """Run one rank in its thread, and set the others free where it fails."""
    with member.team.turn:
        try:
            on_rank(upstream, case, member, found)
        except threading.BrokenBarrierError:
            pass  # another one failed
        except Exception as error:
            errors.append(error)
            member.team.barrier.abort()


def losses(upstream, case):
    """Return what each rank of a case computes."""
    upstream.split(case.width)
    found, errors = [None] * case.ranks, []
    with stand_ins(upstream.torch), defaults(upstream.torch, case.default):
        if case.ranks == 1:
            on_rank(upstream, case, Member(Team(1), 0) if case.group else None, found)
            return found
        team = Team(case.ranks)
        members = [Member(team, rank) for rank in range(case.ranks)]
        threads = [threading.Thread(target=run_rank, args=(upstream, case, each, found, errors)) for each in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    if None in found:
        raise RuntimeError("a rank did not meet the others")
    return found


def reference(torch, case):
    """Return losses and gradients in float64, and how far a loss may be from them."""
    hidden, weight, labels = given(torch, case)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = (hidden @ weight.t()).flatten(0, -2)
    flat = labels.view(-1)
    loss = torch.nn.functional.cross_entropy(logits, flat, reduction=case.reduction, ignore_index=case.ignore_index)
    near = LOSS + LEVEL * logits.detach().abs().nan_to_num(posinf=0.0).amax(dim=1)
    near = near.where(flat != case.ignore_index, 0.0)
    if case.reduction != "none":
        near = near.sum() / (1 if case.reduction == "sum" else max(1, int((flat != case.ignore_index).sum())))
    if case.gradients:
        loss.backward(above(torch, case).double())
    return loss.detach(), hidden.grad, weight.grad, near


def furthest(found, wanted, near):
    """Return the largest error of a loss, in what it may be off; nan where both are nan is none, and infinite else."""
    error = (found.double() - wanted).abs() / near.clamp(min=LOSS)
    return float(error.where(~(found.isnan() & wanted.isnan()), 0.0).max().nan_to_num(nan=math.inf))


def norm_error(found, wanted):
    """Return the norm of the difference, over that of the reference where it is not 0; infinity for a nan."""
    return float(((found.double() - wanted).norm() / (wanted.norm() or 1.0)).nan_to_num(nan=math.inf))


def gradient_errors(torch, found, towards_hidden, towards_weight):
    """Return the errors of the gradients, the column of the level apart: it is larger than all others together."""
    each_hidden = [each["towards_hidden"] for each in found]
    each_weight = torch.cat([each["towards_weight"] for each in found])
    if each_hidden[0].shape != towards_hidden.shape:  # sequence parallel: each rank has its part
        each_hidden = [torch.cat(each_hidden)]
    rest = slice(COLUMNS, None)
    return {
        "towards_hidden": max(norm_error(each[..., rest], towards_hidden[..., rest]) for each in each_hidden),
        "towards_weight": norm_error(each_weight[:, rest], towards_weight[:, rest]),
        "towards_weight.level": norm_error(each_weight[:, 0], towards_weight[:, 0]),
    }


def judge_case(upstream, case, kept):
    """Judge the losses and gradients of a case by float64, that the caller's tensors are as they were, and accesses."""
    torch, watch = upstream.torch, Watch(upstream.torch)
    with watch.on():
        found = losses(upstream, case)
    kept.extend(found)
    loss, towards_hidden, towards_weight, near = reference(torch, case)
    measured = {"loss": max(furthest(each["loss"], loss, near) for each in found)}
    tolerance = {"loss": 1.0}
    if case.gradients:
        errors = gradient_errors(torch, found, towards_hidden, towards_weight)
        measured |= errors
        tolerance |= dict.fromkeys(errors, GRADIENT)
    altered = sorted({name for each in found for name in each["altered"]})
    ok = all(measured[name] <= tolerance[name] for name in measured) and not altered and not sum(watch.outside)
    measured |= {"altered": altered, "accessed_outside": sum(watch.outside)}
    tolerance |= {"altered": [], "accessed_outside": 0}
    first = {"first_loss": float(found[0]["loss"].view(-1)[0]), "wanted": float(loss.view(-1)[0])}
    return ok, {"measured": measured | first, "tolerance": tolerance, "unit": "of what it may be off; of the norm"}


MARGIN = 64  # rows: more than a block of tokens, or of splits
HUGE = 2**40  # neither a label nor a number of tokens


class Guarded:
    """Copies of tensors within larger memory, which is full of nan or of HUGE: neither to be read nor to be written."""

    def __init__(self, torch):
        self.torch, self.kept = torch, []

    def put(self, tensor, first, second=1, written=False):
        """Return a view of the same numbers with these steps between them; one that is not `written` stays as it is."""
        shape = tensor.shape if tensor.dim() == 2 else (*tensor.shape, 1)
        columns = (shape[1] + (MARGIN if tensor.dim() == 2 else 0)) * second
        fill = math.nan if tensor.is_floating_point() else HUGE
        memory = self.torch.full(((2 * MARGIN + shape[0]) * first, columns), fill, dtype=tensor.dtype)
        view = memory[MARGIN * first : (MARGIN + shape[0]) * first : first, : shape[1] * second : second]
        view.copy_(tensor.view(shape) if tensor.dim() == 1 else tensor)
        self.kept.append((memory, memory.clone(), view, written))
        return view if tensor.dim() == 2 else view[:, 0]

    def transposed(self, tensor):
        """Return a view of the same numbers, a column after the other in memory, with room behind each."""
        return self.put(tensor.t(), 1).t()

    def untouched(self):
        """Return whether all is as it was but for the views that are written."""
        for _, before, view, written in self.kept:
            if written:
                before.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(view)
        return all(same(memory, before) for memory, before, *_ in self.kept)


def statistics(logits, width):
    """Return what the main loop gives for each split: the maximum, and the sum of exponentials below it."""
    parts = logits.unflatten(1, (-1, width))
    maximum = parts.amax(dim=2)
    total = (parts - maximum.unsqueeze(2)).exp().sum(dim=2)
    return maximum, total


def tokens_of(level, splits, count=21):
    """Return the logits of so many tokens, and labels of which a third is ignored, but not that of a single one."""
    import torch

    random = torch.Generator().manual_seed(11)
    logits = torch.randint(-24, 25, (count, splits * 8), generator=random) / 8 + level
    labels = torch.randint(logits.shape[1], (count,), generator=random)
    labels[0 if count > 1 else 1 :: 3] = -100
    return logits, labels


def peaks(level, column):
    """Return 21 tokens that have one logit above 133,119 equal ones, and labels of which a third is ignored.

    The 16 tokens of the first program have it 24 above: a split of the others adds 4e-8, less than fp32 resolves
    beside 1, and all 130 of them 5e-6, more than a loss may be off. The other tokens have other distances.
    """
    import torch

    logits = torch.full((21, 130 * 1024), level)
    logits[:, column] += torch.tensor([24.0] * 16 + [4.0, 8.0, 13.0, 17.0, 60.0])
    labels = torch.randint(logits.shape[1], (21,), generator=torch.Generator().manual_seed(12))
    labels[::3] = -100
    return logits, labels


class Watch:
    """Of each access of a kernel, notes how many elements lie outside of the tensor that it is about, and prevents it.

    It is about the tensor of that launch that has most of them. What is written elsewhere would end this process, and
    only later. What a mask leaves out, and no other value is given for, is undefined: here it is nan, or the largest.
    """

    def __init__(self, torch):
        self.torch, self.numpy = torch, importlib.import_module("numpy")
        self.interpreter = importlib.import_module("triton.runtime.interpreter")
        names = ("_interpreter", "_implicit_cvt", "_get_np_dtype")
        self.raw, self.convert, self.dtype_of = (vars(self.interpreter)[name] for name in names)
        self.outside, self.places = [], []

    def take(self, argument):
        """Hand an argument to a kernel, and keep where a tensor's elements lie."""
        numpy, found, tensor = self.numpy, self.convert(argument), getattr(argument, "base", argument)
        if isinstance(tensor, self.torch.Tensor) and tensor.numel():
            places = numpy.array([tensor.data_ptr()], dtype=numpy.uint64)
            for size, step in zip(tensor.shape, tensor.stride(), strict=True):
                steps = numpy.arange(size, dtype=numpy.int64) * step * tensor.element_size()
                places = numpy.add.outer(places, steps.astype(numpy.uint64)).ravel()
            self.places.append((tensor.element_size(), numpy.sort(places)))
        return found

    def inside(self, pointers, mask, size):
        """Return the mask without what lies outside."""
        best, least = mask & False, int(mask.sum())
        for places in (each for element, each in self.places if least and element == size):
            found = mask & (places[places.searchsorted(pointers).clip(max=places.size - 1)] == pointers)
            strays = int((mask & ~found).sum())
            best, least = (found, strays) if strays < least else (best, least)
        self.outside.append(least)
        return best

    def load(self, pointers, mask, other, dtype):
        """Load what lies inside."""
        return self.raw.load(pointers, self.inside(pointers, mask, self.numpy.dtype(dtype).itemsize), other, dtype)

    def store(self, pointers, value, mask):
        """Store what lies inside."""
        return self.raw.store(pointers, value, self.inside(pointers, mask, value.dtype.itemsize))

    def atomic_rmw(self, operation, pointers, value, mask, order):
        """Change what lies inside."""
        mask = self.inside(pointers, mask, value.dtype.itemsize)
        return self.raw.atomic_rmw(operation, pointers, value, mask, order)

    def atomic_cas(self, pointers, wanted, value, order):
        """Exchange what lies inside, if all of it does: there is no mask."""
        every = self.inside(pointers, self.numpy.ones_like(pointers, dtype=bool), value.dtype.itemsize).all()
        return self.raw.atomic_cas(pointers, wanted, value, order) if every else wanted

    def undefined(self, pointers):
        """Return what stands for elements that a mask leaves out."""
        numpy, dtype = self.numpy, self.numpy.dtype(self.dtype_of(pointers.get_element_ty()))
        most = math.nan if dtype.kind == "f" else numpy.iinfo(dtype).max if dtype.kind in "iu" else 1
        return self.interpreter.TensorHandle(numpy.full(pointers.data.shape, most, dtype), pointers.get_element_ty())

    @contexts.contextmanager
    def on(self):
        """Watch the kernels that are launched."""
        builder, executor = self.interpreter.InterpreterBuilder, self.interpreter.GridExecutor
        launch, masked_load = executor.__call__, builder.create_masked_load

        def launching(this, *given, **named):
            self.places.clear()
            return launch(this, *given, **named)

        def loading(this, pointers, mask, other, *given):
            return masked_load(this, pointers, mask, self.undefined(pointers) if other is None else other, *given)

        with (
            mock.patch.multiple(self.interpreter, _interpreter=self, _implicit_cvt=self.take),
            mock.patch.object(executor, "__call__", launching),
            mock.patch.object(builder, "create_masked_load", loading),
        ):
            yield


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the kernels of a launch are given: `tokens` makes logits and labels, and with `spoiled` a sum is nan.

    Such a sum of one split is what a weight of nan gives: so a third of the rows has a loss of nan.
    """

    tokens: functools.partial
    width: int = 8
    spoiled: bool = False
    reduction: int = NONE

    def rows(self):
        """Return the rows that have a loss of nan."""
        return slice(1 if self.spoiled else None, None if self.spoiled else 0, 3)


def given_to_launch(guarded, logits, labels, reduction):
    """Return the labels' logits, labels, their number for a mean, and the sum, as the last kernel is given them."""
    torch = guarded.torch
    label_logits = logits.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    valid = int((labels != -100).sum()) if reduction == MEAN else HUGE
    return (
        guarded.put(label_logits, 2, written=True),
        guarded.put(labels, 4),
        guarded.put(torch.tensor([valid]), 3),
        guarded.put(torch.zeros(1), 3, written=reduction != NONE),
    )


def launch_dp(upstream, how):
    """Launch the epilogue without tensor parallelism on tensors that are not contiguous."""
    torch, (logits, labels), reduction = upstream.torch, how.tokens(), how.reduction
    count, splits, guarded = logits.shape[0], logits.shape[1] // how.width, Guarded(torch)
    maximum, total = statistics(logits, how.width)
    total[how.rows(), -1] = float("nan")
    maximum, total = guarded.transposed(maximum), guarded.put(total, 3, 2)
    loss, labels, valid, scalar = given_to_launch(guarded, logits, labels, reduction)
    found_max, found_sum = (guarded.put(torch.zeros(count), step, written=True) for step in (3, 5))
    upstream.kernels.forward_dp_epilogue[lambda meta: (-(-count // meta["BLOCK_SIZE_M"]),)](
        count, splits, -100, labels, labels.stride(0), valid, maximum, *maximum.stride(), total, *total.stride(),
        found_max, found_max.stride(0), found_sum, found_sum.stride(0), loss, loss.stride(0), scalar,
        REDUCTION=reduction,
    )  # fmt: skip
    return loss if reduction == NONE else scalar, found_max, found_sum, guarded.untouched()


def launch_tp(upstream, how):
    """Launch the epilogues of two tensor-parallel ranks on tensors that are not contiguous; return the first's."""
    torch, (logits, labels), reduction = upstream.torch, how.tokens(), how.reduction
    count, splits, guarded = logits.shape[0], logits.shape[1] // how.width // 2, Guarded(torch)
    ranks = [statistics(part, how.width) for part in logits.chunk(2, dim=1)]
    ranks[1][1][how.rows(), -1] = float("nan")
    reduced = guarded.transposed(torch.maximum(ranks[0][0], ranks[1][0]))
    found_max, sums = guarded.put(torch.zeros(count), 3, written=True), []
    for rank in ranks:
        maximum, total = guarded.put(rank[0], 2, 3), guarded.put(rank[1], 3, 2)
        found_sum = guarded.put(torch.zeros(count), 5, written=True)
        upstream.kernels.forward_tp_epilogue[lambda meta: (-(-count // meta["BLOCK_SIZE_M"]),)](
            count, splits, reduced, *reduced.stride(), maximum, *maximum.stride(), total, *total.stride(),
            found_max, found_max.stride(0), found_sum, found_sum.stride(0),
        )  # fmt: skip
        sums.append(found_sum)
    loss, labels, valid, scalar = given_to_launch(guarded, logits, labels, reduction)
    kept_max, kept_sum = guarded.put(found_max, 2), guarded.put(sums[0] + sums[1], 3)
    upstream.kernels.forward_tp_epilogue_update_logprobs[lambda meta: (-(-count // meta["BLOCK_SIZE_M"]),)](
        count, -100, valid, labels, labels.stride(0), loss, loss.stride(0), kept_max, kept_max.stride(0),
        kept_sum, kept_sum.stride(0), scalar, REDUCTION=reduction,
    )  # fmt: skip
    return loss if reduction == NONE else scalar, kept_max, kept_sum, guarded.untouched()


def inside_kernel(measure, *given):
    """Return what is measured; what is raised inside a kernel is its fault, though no frame has upstream's file."""
    try:
        return measure(*given)
    except importlib.import_module("triton.runtime.errors").InterpreterError as error:
        traceback.print_exc()
        return False, {"reason": f"it raised {type(error).__name__}: {error}"[:400]}


def judge_launch(upstream, launch, how):
    """Judge the losses of a launch by float64, what it accesses, and that backward gets the sum above the maximum."""
    (logits, labels), watch, torch = how.tokens(), Watch(upstream.torch), upstream.torch
    with watch.on():
        loss, maximum, total, written = launch(upstream, how)
    sums, counts = logits.double().logsumexp(dim=1), labels != -100
    sums[how.rows()] = float("nan")
    wanted = sums - logits.double().gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    near = LOSS + LEVEL * logits.abs().amax(dim=1)
    wanted, near_loss = wanted.where(counts, 0.0), near
    if how.reduction != NONE:
        number = int(counts.sum()) if how.reduction == MEAN else 1
        wanted, near_loss = wanted.sum(0, True) / number, (near * counts).sum(0, True) / number
    measured = {
        "loss": furthest(loss, wanted, near_loss),
        "saved": furthest(maximum.double() + total.double().log(), sums, near),
        "sum": furthest(total.double().log(), sums - maximum.double(), torch.full_like(near, LOSS)),
    }
    ok = all(each <= 1.0 for each in measured.values()) and written and bool(watch.outside) and not sum(watch.outside)
    told = {"first_loss": float(loss[-1]), "wanted": float(wanted[-1]), "nothing_else_written": written}
    told["accessed_outside"] = sum(watch.outside)
    return ok, {"measured": measured | told, "tolerance": 1.0, "unit": "of what it may be off"}


def judge_count(upstream):
    """Judge the number of labels that are not ignored, of tokens that are no multiple of a block and that are."""
    torch, watch, measured, wanted, written = upstream.torch, Watch(upstream.torch), {}, {}, True
    for count in (1, 21, 1024, 1025, 3001):
        for ignored in (-100, 4):
            labels, guarded = torch.arange(count) % 7, Guarded(torch)
            labels[::3] = ignored
            found = guarded.put(torch.full((1,), HUGE), 2, written=True)
            strided, name = guarded.put(labels, 3), f"{count}, {ignored}"
            with watch.on():
                upstream.kernels.get_num_valid_tokens[(1,)](count, ignored, strided, strided.stride(0), found)
            measured[name], wanted[name] = int(found), int((labels != ignored).sum())
            written = written and guarded.untouched()
    ok = measured == wanted and written and bool(watch.outside) and not sum(watch.outside)
    told = {"nothing_else_written": written, "accessed_outside": sum(watch.outside)}
    return ok, {"measured": measured | told, "tolerance": wanted, "unit": "tokens"}


LAUNCHES = (("dp", launch_dp, 1), ("tp", launch_tp, 2))  # and how many ranks it has


def judge_launches(probe, upstream, name, launch, ranks):
    """Judge the kernels of one of the launches on tokens far below zero, and on others."""

    def judge_one(suffix, role, tokens, **how):
        probe.judge(f"{name}.{suffix}", role, inside_kernel, judge_launch, upstream, launch, Launch(tokens, **how))

    def both(suffix, splits, *count, **how):
        judge_one(suffix, "defect", functools.partial(tokens_of, -150.0, ranks * splits, *count), **how)
        judge_one(f"{suffix}.normal", "control", functools.partial(tokens_of, 0.0, ranks * splits, *count), **how)

    for splits in (3, 67, 531):  # a vocabulary of 271,872 in splits of 512
        both(f"{splits}", splits)
    for count, splits in ((1, 2), (16, 65), (47, 5)):
        both(f"tokens.{count}", splits, count)
    both("sum", 3, 37, reduction=SUM)
    both("mean", 3, 37, reduction=MEAN)
    judge_one("far_below", "defect", functools.partial(tokens_of, -131072.0, ranks * 67))
    judge_one("far_above", "control", functools.partial(tokens_of, 131072.0, ranks * 67))
    judge_one("nan", "control", functools.partial(tokens_of, 0.0, ranks * 67), spoiled=True)
    judge_one("peak.first", "defect", functools.partial(peaks, -150.0, 0), width=1024)
    judge_one("peak.last", "control", functools.partial(peaks, 0.0, -1), width=1024)


def say_outputs(probe, name, found):
    """Say what every rank computed: the bits have to be those of the other lane."""
    for rank, each in enumerate(found):
        for key in ("loss", "towards_hidden", "towards_weight"):
            if each[key] is not None:
                probe.output(f"{name}.{key}.{rank}", each[key])


def judge(probe, target):
    """Judge the tree that is on the path."""
    if target != "cpu":
        raise NotImplementedError("the main loop is a stand-in on every GPU, too: only target cpu is judged")
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)  # sums in one order
    probe.say("TARGET", target=target, evidence="interpreted", device="cpu")
    upstream = Upstream(torch)
    for module in upstream.modules():
        probe.upstream(module)
    kept = {name: [] for name in (*DEFECTS, *EXACT)}
    example, *others = DEFECTS
    probe.judge(f"loss.{example}", "defect", judge_case, upstream, DEFECTS[example], kept[example])
    probe.judge("kernels.count", "control", inside_kernel, judge_count, upstream)
    for name, launch, ranks in LAUNCHES:
        judge_launches(probe, upstream, f"kernels.{name}", launch, ranks)
    for name in others:
        probe.judge(f"loss.{name}", "defect", judge_case, upstream, DEFECTS[name], kept[name])
    wrong = sum(any(not each["loss"].isfinite().all() for each in kept[name]) for name in DEFECTS)
    for name, case in EXACT.items():
        probe.judge(f"loss.{name}", "control", judge_case, upstream, case, kept[name])
        say_outputs(probe, name, kept[name])
    for name, case in NEAR.items():
        probe.judge(f"loss.{name}", "control", judge_case, upstream, case, [])
    probe.say("FIGURE", name="checks_with_an_infinite_loss", value=wrong, unit="1", spread=None)


if __name__ == "__main__":
    Probe().run(judge)
