# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "numpy==2.3.5",
#   "packaging==26.3",
#   "torch==2.13.0",
# ]
# ///
"""On Hopper the linear cross entropy fusion of Megatron-LM raises: its platform knows Blackwell alone.

Symptom: with cross_entropy_loss_fusion=True and cross_entropy_fusion_impl="linear" GPTModel is built, and its first
forward with labels ends in `ValueError: Unsupported architecture: 9`; so does LinearCrossEntropyModule by itself.

Cause: Platform of megatron/core/fusions/fused_linear_cross_entropy.py takes compute capability 10 and refuses the rest.

Scope: the dev branch of Megatron-LM; no release and not main have "linear". What is judged is that a loss of this
interface can be had on Hopper, and that it is right: losses and all gradients, over tensor-parallel ranks. Nothing is
said about Blackwell's kernels, other than that Blackwell still gets them and no other GPU does, and nothing about time.

The contract, of which CASES has a covering set, as the docstrings of LinearCrossEntropy and the kernels for Blackwell
have it. It is a vocabulary-parallel cross entropy's in general: measure_implementations.py holds others against it.

    tensor parallel ranks      1, 2 and 4; sequence parallel or not, where each rank gives its part of the tokens; those
                               of a group need not follow one another in the world: 0 and 2, 1 and 3. Without a group
                               it is one rank, sequence parallel or not, whether torch.distributed has a default group
                               or is not set up
    vocabulary                 smaller and larger than a split, no multiple of one; padded: the rows of the padding are
                               classes, as for "native", which no label names; of 140000 classes, and 75000 a rank
    labels                     on any rank, on the first or last rank alone, ignored (-100, or a class), all ignored
    ignored hidden states      inf or nan too, as of padding: a loss is replaced by 0, as by Blackwell's kernels and
                               torch, not multiplied. Gradients are not judged there: the weight's has 0 times nan
    denominator of the mean    tokens that are not ignored, of all ranks: also when one has 8 times as many as another;
                               257 in bf16 and 2049 in fp16, which have no such numbers. Of none it is nan: Blackwell's
                               kernels and torch divide 0 by 0. Its gradients are 0 (in torch) or nan (there, by their
                               code), and nothing else
    nan and infinite numbers   in the hidden state of a token that counts, or in the weight: losses and gradients that
                               float64 has not finite are not, on any rank; one token's change no other token's
    reduction                  none, sum and mean; any other name, or None, is refused by a ValueError that names it, as
                               by Blackwell's entry; a gradient from above that differs for each token, or is expanded
    gradient from above        fp32, as the loss: neither it, nor it over the number of tokens, is rounded to bf16
    dtype                      fp32, bf16, fp16: the loss is fp32, logits are not rounded, gradients in their input's
    logits                     finite, of any size: the maximum is one over all ranks; all of a token's far below zero
                               or far above it, those of a rank or of a split far from another's; ten thousands.
                               Gradients are as exact about a level of 131072 as about 0: a softmax is of differences
    accumulators               the sum over splits is rounded once
    autocast                   bf16 inputs come to the same under torch.autocast, which enable_autocast enters
    tokens                     [sequence, batch, hidden] or [tokens, hidden]; one token, one a rank, odd numbers;
                               more tokens, or a larger hidden size, than any one tile: 65537 tokens, a size of 8193
    memory                     no tensor, and not all that live together, of the size of half of the logits
    what is frozen             a weight or hidden states without a gradient: the other still has its own
    where it lies              all that is given lies within a larger storage, as a weight in a flat buffer of DDP's
    calls                      a second call, and a second backward, come to the same, in tensors of their own; inputs
                               and the gradient from above stay as they are, and so does what DDP keeps on a weight:
                               gradients are returned, and its hook adds them to main_grad
    in flight                  other losses and gradients, computed between any two operators of one, as on a second
                               stream, change nothing; with sequence parallelism between forward and backward. Nor does
                               one that was begun before and goes back first, as microbatches do
    changed in place           the loss, by its caller before backward (loss *= mask): its gradients follow. Hidden
                               states, weight or labels: PyTorch's error that a saved tensor was modified, or no
                               difference
    settings of the process    as they were, after forward, backward and a refusal, whichever way they are set: those of
                               matrix products (TF32, reductions in half precision) and cudnn, determinism, default
                               dtype, random numbers, the environment. Under another default dtype losses and gradients
                               are the same, in inference mode losses
    second-order gradients     right, or refused by an error of PyTorch's, as a product into out= is: never left out
    deterministic algorithms   torch.use_deterministic_algorithms(True), which fills new memory with nan, raises nothing
    what outlives a loss       nothing of it, and no input, without a collection of cycles: after a backward or without
                               one. A loss that is held after its backward keeps no input and no gradient
    size of a split            whatever LCE_FWD_VOCAB_SPLIT_SIZE and LCE_BWD_VOCAB_SPLIT_SIZE say, which Blackwell's
                               entry reads and which need not agree: they may be ignored, not half followed
    waits                      none of the host for the GPU, forward or backward: "full_iteration" captures both
    compute capability         of the current device, whatever GPUs are beside it: 9 gets a loss; 10.x gets Blackwell's
                               kernels; 7, 8, 11 and 12 are refused by a ValueError with the number, at every call, as
                               without the patch and in #3345: of those nothing was measured

Logits far below zero are judged by the docstring of LinearCrossEntropy, which says cross_entropy. Blackwell's kernels
are no measure there: their epilogues, and those of #3345, take the maximum from zero on, so that the sum of a token
whose logits all lie below about -104 underflows, and its loss is -inf. A loss that is finite though a logit is infinite
is not judged: finite inputs make none short of an overflow. Nor is a current device that changes after the first loss,
as the release asks once; nor a loss where TF32 or the like is allowed; nor in which dtype the ranks' parts of the
hidden states' gradient are summed: Blackwell's kernels sum them in fp32, Megatron's own linear layers in bf16. Nor are
fp32 inputs under autocast, which is there to round them: Blackwell's kernels take none.

How it is run: this process starts one rank for each GPU (on the CPU: four), which talk through NCCL (gloo, on the
loopback device). Groups of 1, 2 and 4 of them are the tensor-parallel ranks of a case; the groups of a size run it side
by side, and the last one is judged: its ranks are others in the world. So do the groups of 0 and 2, and of 1 and
3, of four. What takes more ranks than there are is not judged. A rank writes to a log of its own. One that dies, does
not end in time, or comes to other checks than the rest of its group is an error that names it, with its last lines; no
rank outlives this process. Losses that differ between ranks are a wrong result, of the check. The sha256 of each rank's
results is printed.

What is real and what stands in. On a GPU of compute capability 9 all is real, but for three checks that ask what
other GPUs get, and a Hopper beside them: there the answers about devices stand in. On the CPU, for the module that asks
for the device alone: torch.cuda.is_available is True, get_device_capability is (9, 0), current_device is 0 of 1,
nvtx.range does nothing; torch.mm and its like, which take out_dtype on a GPU only, compute in that dtype on the CPU,
where autocast leaves them alone as it does on a GPU; torch.autocast of any device is the CPU's; and for GPTModel
torch.cuda.current_device is the CPU. What waits is known there by the names of operators, and on a GPU by PyTorch's
warnings: a copy to the host is seen on a GPU alone. So the CPU says nothing about code that wants a GPU: kernels for
Hopper are wrong there by that alone. Nor does it of what a switch of TF32 does: that it is kept is seen there, too.

Errors are norms of the difference over norms of the reference, which is computed in float64 from the same rounded
inputs. Tolerances: losses 2^-17, 64 roundings of fp32, for fp32 products and sums. Gradients in fp32 2^-16, where the
error of a difference of losses comes on top; in bf16 2^-8 besides: one rounding of the logits' gradient and one of the
result, each of at most 2^-8 of a number, and below 2^-9 in the norm of many. In fp16 it is the same: its roundings are
smaller, but for the smallest numbers. Where logits lie about a level, a loss is a difference of numbers of that size,
of which each of at most four roundings is 2^-24 of them: 2^-22 of the level besides, as a loss is more than 1 there.
Not so gradients: the logits are 64ths below 2^18, which fp32 has, as it has their differences from the maximum. The
column of the hidden states' gradient that is the level times a sum of zero is left out: it is nothing but rounding.

In bf16 these roundings hide one more, of a factor of the logits' gradient: the gradient from above, or the softmax. So
in the cases "unrounded" bf16 holds every number that enters a product, and every gradient: exact() chooses them, and
the tolerance is that of fp32. What makes the logits' gradient is less than 2^-18 off in fp32: eight roundings, of
numbers up to five times as large, as the label's is a difference. That is rounded to the right number, as half a step
of bf16 is 2^-9 of it or more. Sums are exact in fp32, in any order: a weight's gradient has one term, a hidden state's
are of at most 12 bits, and those of a rank are in bf16 again. A number that is one step off, in one token, is above
2^-13 of the weight's gradient.

Upstream: https://github.com/NVIDIA/Megatron-LM, branch dev, megatron/core/fusions/fused_linear_cross_entropy.py
https://github.com/NVIDIA/Megatron-LM/pull/3345 has kernels for Hopper, and is open.

Both sentinels without the runner, in an empty folder, with PACK set to the absolute path of this file's folder and with
torch, numpy and packaging installed. The second line ends in BUG_REPRODUCED, the fourth in FIX_VALIDATED:

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

import ctypes.util
import dataclasses
import datetime as dt
import faulthandler
import fnmatch as patterns
import functools
import gc
import importlib
import multiprocessing
import signal
import tempfile
import time
import types
import warnings

FLOAT32_LOSS = 2.0**-17
FLOAT32_GRADIENT = 2.0**-16
FLOAT32_LEVEL = 2.0**-22
BFLOAT16 = 2.0**-8
IGNORED = -100
BLACKWELL = ((10, 0), (10, 1), (10, 3))  # compute capabilities
OTHERS = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (11, 0), (12, 0), (12, 1))
HOPPER_BESIDE = (  # the compute capabilities of a host's GPUs, and which one is the current device: a Hopper
    (((8, 0), (9, 0), (12, 0)), 1),
    (((10, 0), (9, 0), (8, 9)), 1),
    (((9, 0), (10, 0)), 0),
    (((7, 5), (10, 3), (9, 0)), 2),
)
SECONDS = {"cpu": 90, "gpu": 200}  # for all ranks together: they take a tenth of that
CPU_RANKS = 4
FUSIONS = "megatron.core.fusions.linear_cross_entropy"


@dataclasses.dataclass(frozen=True)
class Case:
    """What a loss is given."""

    ranks: int = 1
    shape: tuple[int, ...] = (5, 2)  # sequence and batch, or tokens alone
    classes: int = 24  # padded, of all ranks
    labelled: int = 0  # the classes below this have labels; 0: all
    hidden: int = 16
    dtype: str = "float32"
    labels: str = "any"  # or some, all or uneven ignored; first rank, last rank
    ignore_index: int = IGNORED
    reduction: str = "none"
    above: str = "random"  # or ones, expanded
    scale: float = 1.0  # of the logits
    bias: float = 0.0  # a vector that all rows of the weight share, that much of it
    levels: tuple[float, ...] = ()  # what all logits lie about, in each of so many equal parts of the vocabulary
    mixed: bool = False  # every other token has the levels with the other sign
    sequence_parallel: bool = False
    spread: bool = False  # ranks that do not follow one another: every other one of four
    spoilt: bool = False  # the hidden states of ignored tokens are nan or infinite
    autocast: bool = False  # to bf16, in forward
    exact: bool = False  # numbers of which bf16 holds all gradients; hidden is the tokens and the classes
    frozen: str = ""  # hidden or weight
    entry: str = "module"  # or function, or native: what is called
    broken: tuple[str, float] | None = None  # in one token's hidden state, or one class's weight, stands that number

    @property
    def world(self):
        """Return how many ranks the world needs."""
        return 2 * self.ranks if self.spread else self.ranks

    @property
    def group(self):
        """Name the groups of ranks."""
        return "spread" if self.spread else self.ranks


# fmt: off
CASES = {
    "plain": Case(),
    "plain.two": Case(ranks=2, shape=(7, 3)),
    "plain.four": Case(ranks=4, shape=(3, 2), classes=40),
    "bfloat16": Case(dtype="bfloat16", shape=(33, 2), hidden=64, classes=1000),
    "bfloat16.two": Case(ranks=2, dtype="bfloat16", shape=(17, 2), hidden=64, classes=1000, labels="some ignored"),
    "bfloat16.four": Case(ranks=4, dtype="bfloat16", shape=(16, 2), hidden=64, classes=1000, sequence_parallel=True),
    "sequence_parallel.two": Case(ranks=2, shape=(6, 3), sequence_parallel=True, labels="some ignored"),
    "sequence_parallel.four": Case(ranks=4, shape=(8, 1), classes=48, sequence_parallel=True),
    "sequence_parallel.one": Case(sequence_parallel=True),
    "spread.two": Case(ranks=2, shape=(7, 3), spread=True),
    "spread.two.sequence_parallel": Case(2, (8,), spread=True, sequence_parallel=True, entry="function"),
    "padded.two": Case(ranks=2, classes=64, labelled=37, shape=(9, 2)),
    "padded.four": Case(ranks=4, classes=64, labelled=37, labels="some ignored", dtype="bfloat16"),
    "ignored": Case(labels="some ignored", shape=(11, 2)),
    "ignored.all": Case(ranks=2, labels="all ignored"),
    "ignored.class.two": Case(ranks=2, ignore_index=4, shape=(40,), entry="function", reduction="mean"),
    "ignored.class.zero": Case(ignore_index=0, shape=(20, 3)),
    "ignored.unlabelled_class_zero": Case(labels="some ignored", labelled=2, shape=(20, 3)),
    "first_rank.two": Case(ranks=2, labels="first rank", shape=(6, 2)),
    "last_rank.four": Case(ranks=4, labels="last rank", shape=(6, 2), classes=32),
    "mean": Case(reduction="mean", labels="some ignored", shape=(9, 2)),
    "mean.two.uneven": Case(ranks=2, reduction="mean", labels="uneven", shape=(18, 1), sequence_parallel=True),
    "mean.four.uneven": Case(ranks=4, reduction="mean", labels="uneven", shape=(36, 2), sequence_parallel=True),
    "mean.bfloat16.four": Case(4, reduction="mean", labels="uneven", shape=(36,), dtype="bfloat16", entry="function"),
    "mean.float16": Case(shape=(2049,), classes=4, hidden=4, dtype="float16", reduction="mean", entry="function"),
    "mean.of_none": Case(reduction="mean", labels="all ignored"),
    "mean.of_none.two": Case(ranks=2, reduction="mean", labels="all ignored", sequence_parallel=True, shape=(4, 3)),
    "sum": Case(reduction="sum", labels="some ignored"),
    "sum.two": Case(ranks=2, reduction="sum", labels="uneven", shape=(18, 2), entry="function"),
    "function.flat": Case(entry="function", shape=(13,)),
    "function.flat.four": Case(ranks=4, entry="function", shape=(12,), sequence_parallel=True, labels="some ignored"),
    "function.without_group": Case(entry="function, no group", shape=(13,), reduction="mean", labels="some ignored"),
    "function.without_group.sequence_parallel": Case(entry="function, no group", shape=(13,), sequence_parallel=True),
    "expanded": Case(entry="function", above="expanded", shape=(7,)),
    "ones.two": Case(ranks=2, above="ones", dtype="bfloat16", shape=(5, 3), hidden=64, classes=1000),
    "many_tokens": Case(entry="function", shape=(65537,), classes=4, hidden=4, above="ones"),
    "wide": Case(entry="function", shape=(3,), hidden=8193),
    "one_token": Case(shape=(1, 1)),
    "one_token.two": Case(ranks=2, shape=(1, 1), reduction="mean"),
    "one_token.each_of_four": Case(ranks=4, shape=(4, 1), sequence_parallel=True),
    "one_class.each_of_four": Case(ranks=4, classes=4, shape=(5, 2)),
    "large_logits.two": Case(ranks=2, scale=60.0, shape=(12, 2), hidden=8),
    "large_logits.bfloat16": Case(scale=60.0, shape=(12, 2), dtype="bfloat16"),
    "large_logits.bfloat16.four": Case(ranks=4, scale=60.0, shape=(12, 2), dtype="bfloat16", labels="first rank"),
    "large_logits.tens_of_thousands": Case(scale=3e4, shape=(9, 2), hidden=8),
    "large_logits.tens_of_thousands.four": Case(ranks=4, scale=3e4, shape=(9, 2), hidden=8, classes=44),
    "far_below": Case(levels=(-208.0,), shape=(9, 2)),
    "far_below.two": Case(ranks=2, levels=(-131072.0,), labels="some ignored", reduction="mean"),
    "far_below.hundred_thousand": Case(levels=(-131072.0,), shape=(9, 2)),
    "far_above.hundred_thousand.four": Case(ranks=4, levels=(131072.0,), mixed=True, shape=(8, 2)),
    "far_below.four": Case(ranks=4, levels=(-112.0,), shape=(8, 1), sequence_parallel=True, entry="function"),
    "far_below.bfloat16": Case(levels=(-208.0,), dtype="bfloat16", shape=(7, 3), classes=1000),
    "far_below.bfloat16.four": Case(ranks=4, levels=(-416.0,), dtype="bfloat16", shape=(7, 3)),
    "far_above": Case(levels=(208.0,), shape=(9, 2)),
    "far_above.bfloat16.two": Case(ranks=2, levels=(208.0,), dtype="bfloat16", shape=(7, 3)),
    "far_mixed": Case(levels=(-144.0,), mixed=True, reduction="sum"),
    "far_mixed.bfloat16.two": Case(ranks=2, levels=(-144.0,), mixed=True, dtype="bfloat16"),
    "far_shards.two": Case(ranks=2, levels=(-120.0, -240.0), shape=(9, 2)),
    "far_shards.two.last": Case(ranks=2, levels=(-240.0, -120.0), shape=(9, 2), labels="first rank"),
    "far_shards.four": Case(ranks=4, levels=(0.0, -320.0, -112.0, -208.0), mixed=True, shape=(9, 2)),
    "far_shards.bfloat16.four": Case(ranks=4, levels=(-320.0, -208.0, -304.0, -416.0), dtype="bfloat16"),
    "far_splits": Case(classes=9216, levels=(-208.0, -416.0, -112.0), mixed=True, shape=(3, 2), hidden=8),
    "far_splits.two": Case(ranks=2, classes=12288, levels=(-128.0, -112.0, -320.0, -112.0), shape=(3, 2), hidden=8),
    "splits": Case(classes=7001, shape=(9, 2), hidden=8),
    "splits.two": Case(ranks=2, classes=13000, shape=(4, 3), hidden=8, labels="some ignored", sequence_parallel=True),
    "splits.exact": Case(classes=3072, shape=(7, 1), hidden=8),
    "splits.bfloat16": Case(classes=40000, bias=3.0, shape=(3, 2), hidden=8, dtype="bfloat16", above="ones"),
    "unrounded": Case(1, (12, 2), 8, 5, 32, "bfloat16", exact=True),
    "unrounded.function": Case(1, (24,), 8, 5, 32, "bfloat16", "some ignored", exact=True, entry="function"),
    "unrounded.mean": Case(1, (49, 7), 8, 3, 351, "bfloat16", "some ignored", reduction="mean", exact=True),  # of 257
    "unrounded.sum.two": Case(2, (24,), 16, 3, 40, "bfloat16", reduction="sum", exact=True, entry="function"),
    "unrounded.two": Case(2, (24, 1), 16, 3, 40, "bfloat16", exact=True, sequence_parallel=True),
    "autocast": Case(dtype="bfloat16", shape=(9, 2), hidden=64, classes=1000, autocast=True),
    "autocast.two": Case(2, (12,), 1000, 0, 64, "bfloat16", reduction="mean", entry="function", autocast=True),
    "many_classes": Case(entry="function", classes=140000, hidden=4, shape=(9,)),
    "many_classes.two": Case(ranks=2, classes=150000, hidden=4, shape=(5, 2)),
    "frozen.weight": Case(frozen="weight"),
    "frozen.hidden.two": Case(ranks=2, frozen="hidden"),
}
# fmt: on
NEIGHBOURS = {  # "native", which makes logits: it counts every label, and rounds in bf16
    "native": Case(entry="native", shape=(7, 3)),
    "native.two": Case(ranks=2, entry="native", shape=(7, 3), labels="first rank"),
    "native.two.sequence_parallel": Case(ranks=2, entry="native", shape=(6, 2), sequence_parallel=True),
    "native.two.spread": Case(ranks=2, entry="native", shape=(7, 3), spread=True),
    "native.four": Case(ranks=4, entry="native", classes=64, labelled=37, shape=(9, 2)),
}
FORWARD = {
    "two": Case(ranks=2, shape=(7, 2)),
    "spoilt": Case(shape=(13, 2), labels="some ignored", spoilt=True),
    "spoilt.mean.two": Case(2, (26,), labels="some ignored", spoilt=True, reduction="mean", entry="function"),
}
WAITS = {
    "one": Case(classes=7001, shape=(9,), hidden=8, labels="some ignored", reduction="mean", entry="function"),
    "two": Case(2, (4, 2), 13000, hidden=8, labels="some ignored", sequence_parallel=True, entry="function"),
}
FUNCTION = Case(entry="function", shape=(13,), labels="some ignored")
DETERMINISTIC = {
    "bfloat16": Case(dtype="bfloat16", shape=(9, 2), hidden=64, classes=1000),
    "mean.two": Case(2, (12,), 7000, reduction="mean", labels="some ignored", entry="function", sequence_parallel=True),
}
HALVED = {
    "none": FUNCTION,
    "mean": dataclasses.replace(FUNCTION, reduction="mean"),
    "two": Case(2, (12,), sequence_parallel=True, entry="function"),
}
CHANGED = {"none": FUNCTION, "mean.two": Case(2, (12,), reduction="mean", sequence_parallel=True, entry="function")}
FREED = {"none": FUNCTION, "mean": HALVED["mean"]}  # of one rank: a collective may hold a tensor for a moment
IN_FLIGHT = {"one": FUNCTION, "two": CHANGED["mean.two"]}
UNGROUPED = {name: CASES[f"function.{name}"] for name in ("without_group", "without_group.sequence_parallel")}
SPLIT_SIZES = {"LCE_FWD_VOCAB_SPLIT_SIZE": (1024, 2048), "LCE_BWD_VOCAB_SPLIT_SIZE": (2048, 1024)}
SPLIT = Case(entry="function", classes=5001, shape=(9,), hidden=8)
BROKEN = tuple((name, float(text)) for name in ("hidden", "weight") for text in ("nan", "inf", "-inf"))
NOT_FINITE = {
    "none": FUNCTION,
    "mean": HALVED["mean"],
    "sum.two": Case(2, (12,), reduction="sum", labels="some ignored", entry="function"),
    "bfloat16": Case(dtype="bfloat16", shape=(9, 2), hidden=8, classes=1000),
    "bfloat16.two": Case(2, (12,), 7000, 0, 8, "bfloat16", reduction="mean", sequence_parallel=True, entry="function"),
}
SETTINGS = {"one": FUNCTION, "two": CHANGED["mean.two"]}
SWITCHES = (  # of torch.backends; on the CPU they do nothing, but are kept as on a GPU
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cudnn.allow_tf32",
    "cudnn.benchmark",
    "cudnn.deterministic",
)
MODES = {"none": FUNCTION, "mean.two": CHANGED["mean.two"]}
INVALID = {"function": FUNCTION, "module": Case(), "function.two": CHANGED["mean.two"]}
NO_REDUCTIONS = ("Mean", "avg", "batchmean", "", None)
IN_PLACE = "modified by an inplace operation"  # what PyTorch says of a saved tensor that was changed
SECOND_ORDER = ("automatic differentiation", "once_differentiable", "is not implemented", IN_PLACE)
REFUSED = (  # what PyTorch says of a loss or a gradient that has another shape or dtype, or that is none
    "returned an in",
    "does not require grad",
    "to not have been used in the graph",
    "is invalid for input of size",
    "Mismatch in shape",
)
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount")
MEMORY = Case(shape=(1024, 2), classes=24576, hidden=8, dtype="bfloat16", reduction="mean", labels="some ignored")
SLAB_PART = 0.5  # of the elements, or in fp32 the bytes, of all logits


# What is measured.


class Upstream:
    """What the probe uses of the tree that is on the path."""

    def __init__(self, torch, device):
        core = importlib.import_module
        self.torch, self.device = torch, device
        self.fused = core("megatron.core.fusions.fused_linear_cross_entropy")
        self.module = core("megatron.core.transformer.linear_cross_entropy")
        self.native = core("megatron.core.tensor_parallel.cross_entropy")
        self.layers = core("megatron.core.tensor_parallel.layers")
        self.random = core("megatron.core.tensor_parallel.random")
        self.gpt = core("megatron.core.models.gpt.gpt_model")
        self.block = core("megatron.core.transformer.transformer_block")
        self.layer = core("megatron.core.transformer.transformer_layer")
        self.spec = core("megatron.core.transformer.spec_utils").ModuleSpec
        self.config = core("megatron.core.transformer.transformer_config").TransformerConfig
        self.local = core("megatron.core.models.gpt.gpt_layer_specs").get_gpt_layer_local_submodules()
        self.backend = core("megatron.core.models.backends").LocalSpecProvider()
        self.mtp = core("megatron.core.transformer.multi_token_prediction")
        self.identity = core("megatron.core.transformer.identity_op").IdentityOp
        self.causal = core("megatron.core.transformer.enums").AttnMaskType.causal
        self.state = core("megatron.core.parallel_state")
        self.groups = {}

    def modules(self):
        """Return the modules that the runner has to find in its tree."""
        return (self.fused, self.module, self.native, self.layers, self.gpt)

    def dtype(self, case):
        """Return the dtype of a case."""
        return getattr(self.torch, case.dtype)

    def given(self, case):
        """Return whole hidden states and weight, labels and the gradient from above: on the CPU, the same anywhere."""
        torch, random = self.torch, self.torch.Generator().manual_seed(5)
        dtype, labelled = self.dtype(case), case.labelled or case.classes
        hidden = torch.randn(*case.shape, case.hidden, generator=random)
        weight = torch.randn(case.classes, case.hidden, generator=random) * (case.scale / case.hidden**0.5)
        weight = weight + case.bias * torch.randn(case.hidden, generator=random).sign()
        if case.levels:
            hidden, weight = about(torch, case, hidden, weight)
        labels = torch.randint(labelled, case.shape, generator=random)
        flat, count = labels.view(-1), labels.numel()
        part = case.classes // case.ranks
        if case.labels == "first rank":
            flat %= part
        elif case.labels == "last rank":
            flat.copy_(case.classes - 1 - flat % part)
        elif case.labels == "some ignored":
            flat[1::4] = case.ignore_index
        elif case.labels == "all ignored":
            flat.fill_(case.ignore_index)
        elif case.labels == "uneven":  # the first part has 8 for each one that any other has
            size = count // case.ranks
            kept = [number < size or number % size == 0 for number in range(count)]
            kept = [keep and not (number < size and number % 9 == 8) for number, keep in enumerate(kept)]
            flat[~torch.tensor(kept)] = case.ignore_index
        above = torch.randn((count,) if case.reduction == "none" else (), generator=random)
        if case.above != "random":
            above = torch.ones_like(above)
        not_numbers(torch, case, hidden, weight, flat)
        if case.exact:
            hidden, weight, above = exact(torch, case, flat)
        return hidden.to(dtype), weight.to(dtype), labels, above

    def configure(self, case, **named):
        """Return the configuration of a layer."""
        return self.config(
            num_layers=1,
            hidden_size=case.hidden,
            num_attention_heads=case.ranks,
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=self.dtype(case),
            tensor_model_parallel_size=case.ranks,
            sequence_parallel=case.sequence_parallel and case.ranks > 1,
            cross_entropy_loss_fusion=case.entry != "native",
            cross_entropy_fusion_impl="linear",
            **named,
        )

    def build(self, case, kind):
        """Return an output layer of that class."""
        return kind(
            case.hidden,
            case.classes,
            config=self.configure(case),
            init_method=lambda tensor: tensor,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            tp_group=self.groups[case.group],
        ).to(self.device)

    def losses(self, case, hidden, weight, labels):
        """Call what a case is about: labels are [sequence, batch] or [tokens], and losses are flat, or one."""
        group = self.groups[case.group]
        if case.entry == "module":
            layer = self.build(case, self.module.LinearCrossEntropyModule)
            found = layer(
                hidden,
                weight=weight,
                output_cross_entropy_loss=True,
                labels=labels.t().contiguous(),  # [batch, sequence], as a model has them
                reduction=case.reduction,
                ignore_index=case.ignore_index,
            )
            return found.t().reshape(-1) if case.reduction == "none" else found
        if case.entry == "native":
            logits, _ = self.build(case, self.layers.ColumnParallelLinear)(hidden, weight=weight)
            return self.native.vocab_parallel_cross_entropy(logits, labels, tp_group=group).reshape(-1)
        named = {} if case.entry == "function, no group" else {"tp_group": group}
        return self.fused.linear_cross_entropy(
            hidden,
            weight,
            labels,
            reduction=case.reduction,
            ignore_index=case.ignore_index,
            sequence_parallel=case.sequence_parallel,
            **named,
        )

    def parts(self, case):
        """Return what this rank gives: its hidden states, its rows of the weight, labels and gradient from above."""
        hidden, weight, labels, above = (each.to(self.device) for each in self.given(case))
        rank = self.torch.distributed.get_rank(self.groups[case.group]) if case.ranks > 1 else 0
        if case.sequence_parallel:
            hidden = hidden.chunk(case.ranks)[rank]
        hidden, weight, labels, above = map(within, (hidden, weight.chunk(case.ranks)[rank], labels, above))
        hidden.requires_grad_(case.frozen != "hidden")
        weight.requires_grad_(case.frozen != "weight")
        if case.above == "expanded":
            above = self.torch.ones((), device=self.device).expand(above.shape)
        return hidden, weight, labels, above


def not_numbers(torch, case, hidden, weight, labels):
    """Put nan or an infinite number where a case wants it."""
    kept = labels != case.ignore_index
    if case.spoilt:
        bad = torch.tensor((float("nan"), float("inf"), -float("inf")))
        spoilt = (~kept).nonzero()[:, 0]
        hidden.view(-1, case.hidden)[spoilt] = bad[torch.arange(len(spoilt)) % 3].unsqueeze(-1)
    if case.broken:
        name, value = case.broken
        if name == "hidden":  # the last token that counts
            hidden.view(-1, case.hidden)[kept.nonzero()[-1], 0] = value
        else:  # a class of the last rank, in the midst of a split
            weight[case.classes * 3 // 4, 0] = value


def within(tensor):
    """Return a copy that lies within a larger storage, of 64 elements more before it and behind it."""
    room = tensor.new_ones(tensor.numel() + 128)  # 1 is a class, too: who reads a label here is wrong, and no worse
    return room[64:-64].view(tensor.shape).copy_(tensor)


def about(torch, case, hidden, weight):
    """Return hidden states and weight whose logits lie about the levels: in eighths, so that fp32 has the logits."""
    hidden, weight = ((8 * each).round() / 8 for each in (hidden, weight))
    weight[:, -1] = torch.tensor(case.levels).repeat_interleave(case.classes // len(case.levels))
    hidden[..., -1] = 1.0
    if case.mixed:
        hidden.flatten(0, -2)[1::2, -1] = -1.0
    return hidden, weight


def exact(torch, case, labels):
    """Return hidden states, weight and a gradient from above in fp32, of which bf16 holds the logits' gradient.

    As many classes as have labels are alive, spread over all of them: the logits of a token are 0 for its label, -below
    for the 2 or 4 others alive, and far below for the rest. The gradient of these others, `wanted`, has 8 bits, and the
    label's is -2 or -4 times that: bf16 has both. It has none of their factors: the gradient from above is wanted times
    others + exp(below), the softmax its inverse. Every token has a column of its own of the hidden states, and every
    class another one: the weight's gradient is the logits', and the hidden states' is that times a power of two.
    What is wanted is in the upper half between two powers of two: there a step is the smallest part of a number, and an
    error of a factor the most of a step.
    """
    number, others, spread = torch.arange(labels.numel()), case.labelled - 1, case.classes // case.labelled
    kept = labels != case.ignore_index
    labels[kept] *= spread
    wanted = (-1.0) ** number * (192 + (54 + 5 * number) % 64).double() / 128
    below = torch.tensor((2.0, 1.0, -0.5), dtype=torch.double)[number % 3]
    if case.reduction != "none":
        wanted, below = wanted[:1], below[:1]  # one gradient for all tokens
    weight = torch.full((case.classes, case.hidden), -256.0)
    weight[: case.labelled * spread : spread, : len(number)] = -below.float()
    weight[labels[kept], number[kept]] = 0.0
    weight[:, len(number) :] = torch.eye(case.classes)
    hidden = torch.eye(len(number), case.hidden).view(*case.shape, case.hidden)
    above = wanted * (others + below.exp())
    if case.reduction != "none":
        above = above[0] * (kept.sum() if case.reduction == "mean" else 1)
    return hidden, weight, above.float()


def same(one, other):
    """Return whether two tensors have the same values: a nan is a nan."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def apart(one, other):
    """Return whether two tensors share no memory."""
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def loss(upstream, case):
    """Compute losses and gradients, the latter twice, and all of it a second time."""
    hidden, weight, labels, above = upstream.parts(case)
    wanted = [each for each in (hidden, weight) if each.requires_grad]
    before = [each.detach().clone() for each in (hidden, weight, labels, above)]
    # As Megatron's DDP has it: its hook adds the gradient that is returned to main_grad, and nobody else does.
    noted = {"main_grad": upstream.torch.ones_like(before[1], dtype=upstream.torch.float32)}
    noted["grad_added_to_main_grad"] = False
    vars(weight).update(noted)
    with reductions(upstream.torch.distributed) as forward:
        enter = upstream.torch.autocast(upstream.device.type, upstream.torch.bfloat16, enabled=case.autocast)
        with enter:
            found = upstream.losses(case, hidden, weight, labels)
    given = above.reshape(found.shape)
    with reductions(upstream.torch.distributed) as backward:
        once = upstream.torch.autograd.grad(found, wanted, given, retain_graph=case.entry != "native")
    record = recorded(case, found, once)
    if case.entry != "native":  # which overwrites what it saved
        twice = upstream.torch.autograd.grad(found, wanted, given)
        with enter:
            again = upstream.losses(case, hidden, weight, labels)
        pairs = [(again, found), *zip(once, twice, strict=True)]
        record["again"] = all(same(x, y) and apart(x, y) for x, y in pairs)
    record["kept"] = all(x.equal(y) for x, y in zip(before, (hidden, weight, labels, above), strict=True))
    record["kept"] &= vars(weight).keys() == noted.keys() and bool((noted["main_grad"] == 1).all())
    record["kept"] &= all(vars(weight).get(name) is each for name, each in noted.items())
    record["said"] = {"shard": list(weight.shape), "forward": forward, "backward": backward}
    if case.entry != "native":
        record["said"]["kernel"] = upstream.fused.Platform().forward_func.__module__
    return record


def recorded(case, found, gradients):
    """Return what is judged of a loss and its gradients."""
    record = {"loss": found.detach(), "dtypes": [str(each.dtype) for each in (found, *gradients)]}
    names = [name for name in ("hidden", "weight") if case.frozen != name]
    return record | {f"towards_{name}": each for name, each in zip(names, gradients, strict=True)}


def computed(upstream, case, parts):
    """Compute a loss and both of its gradients, of what a rank gives."""
    hidden, weight, labels, above = parts
    found = upstream.losses(case, hidden, weight, labels)
    return found, upstream.torch.autograd.grad(found, (hidden, weight), above.reshape(found.shape))


@contextlib.contextmanager
def reductions(distributed):
    """List the reductions that are made meanwhile: of what kind, and of how many elements."""
    seen, function = [], distributed.all_reduce

    def all_reduce(tensor, op=distributed.ReduceOp.SUM, **named):
        seen.append(f"{str(op).rpartition('.')[2]} of {tensor.numel()} {str(tensor.dtype).rpartition('.')[2]}")
        return function(tensor, op=op, **named)

    distributed.all_reduce = all_reduce
    try:
        yield seen
    finally:
        distributed.all_reduce = function


def no_grad(upstream, case):
    """Compute losses without autograd."""
    hidden, weight, labels, _ = upstream.parts(case)
    with upstream.torch.no_grad():
        return {"loss": upstream.losses(case, hidden, weight, labels)}


def no_distributed(upstream, case):
    """Compute losses and gradients where torch.distributed is not set up: who gives no group need not have one."""
    group = upstream.torch.distributed.group
    default, group.WORLD = group.WORLD, None
    try:
        return loss(upstream, case)
    finally:
        group.WORLD = default


def deterministic(upstream, case):
    """Compute losses and gradients where what is not deterministic raises."""
    upstream.torch.use_deterministic_algorithms(True)
    try:
        return loss(upstream, case)
    finally:
        upstream.torch.use_deterministic_algorithms(False)


def halved(upstream, case):
    """Halve a loss in place, and give twice the gradient from above: both are exact, and gradients are the same."""
    hidden, weight, labels, above = upstream.parts(case)
    found = upstream.losses(case, hidden, weight, labels)
    try:
        found.mul_(0.5)
    except RuntimeError as error:  # the loss is upstream's: so is what PyTorch refuses of it
        return {"error": f"it raised {type(error).__name__}: {error}"[:400], "upstream": True}
    given = 2 * above.reshape(found.shape)
    return recorded(case, 2 * found, upstream.torch.autograd.grad(found, (hidden, weight), given))


def changed(upstream, case):
    """Change each input in place between forward and backward: that is refused, or gradients stay as they were."""
    right, gradients = {}, upstream.torch.autograd.grad
    for index, name in enumerate(("hidden", "weight", "labels")):
        hidden, weight, labels, above = given = upstream.parts(case)
        found = upstream.losses(case, hidden, weight, labels)
        above = above.reshape(found.shape)
        before = gradients(found, (hidden, weight), above, retain_graph=True)
        with upstream.torch.no_grad():
            given[index].mul_(0)
        try:
            after = gradients(found, (hidden, weight), above)
        except RuntimeError as error:
            if IN_PLACE not in str(error):
                raise
            right[name] = "refused"
        else:
            right[name] = all(same(x, y) for x, y in zip(before, after, strict=True))
    return {"right": right}


def second_order(upstream, case):
    """Differentiate the sum of losses and of the square of their gradient."""
    torch, (hidden, weight, labels, above) = upstream.torch, upstream.parts(case)

    def penalized(hidden, weight, function):
        found = function(hidden, weight)
        (gradient,) = torch.autograd.grad(found, hidden, above.to(found.dtype), create_graph=True)
        return torch.autograd.grad((found * above).sum() + gradient.square().sum(), (hidden, weight))

    def eager(hidden, weight):
        return torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="none")

    try:
        found = penalized(hidden, weight, lambda *given: upstream.losses(case, *given, labels))
    except RuntimeError as error:
        if not any(text in str(error) for text in SECOND_ORDER):
            raise
        return {"right": {"refused": True}}
    wanted = penalized(*(each.detach().double().requires_grad_() for each in (hidden, weight)), eager)
    limit = 2 * FLOAT32_GRADIENT  # the rounding of two gradients
    right = [norm_error(x, y) <= limit for x, y in zip(found, wanted, strict=True)]
    return {"right": dict(zip(("hidden", "weight"), right, strict=True))}


def expired(storages):
    """Whether storages are freed; on a GPU the thread that ran the backward may be some time behind the caller."""
    until = time.monotonic() + 10
    while not all(each.expired() for each in storages) and time.monotonic() < until:
        time.sleep(0.01)
    return all(each.expired() for each in storages)


def freed(upstream, case):
    """Drop a loss without a backward, and after one; return whether all is freed by then that was made for it."""
    weak = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
    right = {}
    gc.disable()
    try:
        for name in ("no backward", "backward"):
            hidden, weight, labels, above = upstream.parts(case)
            given = [hidden.clone(), weight.clone(), labels.clone()]  # a graph keeps its leaves, not these
            found = upstream.losses(case, *given)
            kept, mine = [weak(each.untyped_storage()) for each in given], weak(found.untyped_storage())
            if name == "backward":
                made = upstream.torch.autograd.grad(found, given[:2], above.reshape(found.shape))
                kept += [weak(each.untyped_storage()) for each in made]
                del given, made
                right["loss held after backward"] = expired(kept)
            given = found = None
            right[name] = expired([mine, *kept])
    finally:
        gc.enable()
    return {"right": right}


def in_flight(upstream, case):
    """Compute a loss and gradients, and others of the same shapes whole between any two operators of these.

    One more loss is begun before, and goes back first: its bits are those that it has alone. Several ranks compute the
    others between forward and backward alone: their operators need not be the same, and their reductions have to meet.
    """
    torch, (hidden, weight, labels, above) = upstream.torch, upstream.parts(case)
    cuda = upstream.device.type == "cuda"
    other = [-hidden.detach(), weight.detach()]  # of both with the other sign logits are the same
    aside = torch.cuda.stream(torch.cuda.Stream()) if cuda else contextlib.nullcontext()
    wait = torch.cuda.synchronize if cuda else lambda: None  # the order is the host's, on two streams

    def gradients(found, hidden, weight):
        return torch.autograd.grad(found, (hidden, weight), above.reshape(found.shape))

    def whole():
        inputs = [each.clone().requires_grad_() for each in other]
        gradients(upstream.losses(case, *inputs, labels), *inputs)

    class Between(importlib.import_module("torch.overrides").TorchFunctionMode):
        def __torch_function__(self, function, _types, given=(), named=None):
            made = function(*given, **(named or {}))
            if function.__name__ != "__get__":  # a shape, a dtype
                wait()
                with aside, torch.enable_grad():
                    whole()
                wait()
            return made

    first = [each.clone().requires_grad_() for each in (hidden.detach() / 2, weight.detach())]
    begun = upstream.losses(case, *first, labels)
    alone = [each.detach().clone() for each in (begun, *gradients(begun, *first))]
    begun = upstream.losses(case, *first, labels)
    between = Between() if case.ranks == 1 else contextlib.nullcontext()
    with between:
        found = upstream.losses(case, hidden, weight, labels)
    whole()
    # Autograd leaves modes behind: this one is entered again in the thread that runs the backward, around it alone.
    found.grad_fn.register_prehook(lambda _: between.__enter__() and None)
    found.grad_fn.register_hook(lambda *_: between.__exit__(None, None, None))
    made = [begun, *gradients(begun, *first)]
    again = all(same(x, y) for x, y in zip(alone, made, strict=True))
    return recorded(case, found, gradients(found, hidden, weight)) | {"again": again}


def split_sizes(upstream, case):
    """Compute losses and gradients where the environment sets the sizes of splits, when modules are loaded."""
    seen, records = upstream.fused.torch, []
    try:
        for values in zip(*SPLIT_SIZES.values(), strict=True):
            with environment(zip(SPLIT_SIZES, map(str, values), strict=True)):
                load_again(upstream, seen)
                records.append(loss(upstream, case))
    finally:
        load_again(upstream, seen)
    return {"each": records}


@contextlib.contextmanager
def environment(values):
    """Set variables of the environment meanwhile."""
    values = dict(values)
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


def load_again(upstream, seen):
    """Load the fusion's modules again; the one that asks for the device sees the torch it saw."""
    for name in [name for name in sys.modules if name.startswith(FUSIONS)]:
        del sys.modules[name]
    importlib.reload(upstream.fused)
    upstream.fused.torch = seen


def waits(upstream, case):
    """Follow a loss and its backward; return what lets the host wait for the GPU."""
    parts = upstream.parts(case)
    computed(upstream, case, parts)  # what is set up once may wait
    with waiting(upstream) as seen:
        computed(upstream, case, parts)
    return {"waits": seen}


@contextlib.contextmanager
def waiting(upstream):
    """Collect what waits for the GPU: by what PyTorch warns of on one, else by the names of operators."""
    torch, seen = upstream.torch, []

    class Watch(importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode):
        def __torch_dispatch__(self, operator, _types, given=(), named=None):
            name = operator.overloadpacket.__name__
            if name in WAITING or (name in ("index", "index_put", "index_put_") and is_masked(torch, given)):
                seen.append(name)
            return operator(*given, **(named or {}))

    if upstream.device.type == "cpu":
        with Watch():
            yield seen
        return
    with warnings.catch_warnings(record=True, action="always") as caught:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
    seen += [text for one in caught if "called a synchronizing" in (text := str(one.message))]


def is_masked(torch, given):
    """Return whether an index is a mask, which has to be counted: unless it takes one number, which fills it."""
    masks = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in given[1])
    return masks and not (len(given) > 2 and given[2].numel() == 1)


def memory(upstream, case):
    """Follow all that a loss and its backward make: the largest tensor, and the most bytes that live together."""
    torch = upstream.torch
    hidden, weight, labels, above = upstream.parts(case)
    seen = follow(
        torch, (hidden, weight, labels), lambda: upstream.losses(case, hidden, weight, labels).backward(above)
    )
    if upstream.device.type == "cuda":  # what libraries keep for themselves has been allocated by now
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        upstream.losses(case, hidden, weight, labels).backward(above)
        seen["together"] = max(seen["together"], torch.cuda.max_memory_allocated() - before)
    return seen


def follow(torch, given, function):
    """Call a function; return the most elements of a tensor that it makes, and the most bytes beside what is given."""
    mode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
    weak = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
    seen = {"largest": 0, "together": 0}
    alive = {each.untyped_storage()._cdata: (weak(each.untyped_storage()), 0) for each in given}  # noqa: SLF001

    class Watch(mode):
        def __torch_dispatch__(self, operator, _types, given=(), named=None):
            made = operator(*given, **(named or {}))
            for each in made if isinstance(made, (tuple, list)) else [made]:
                if isinstance(each, torch.Tensor):
                    storage = each.untyped_storage()
                    seen["largest"] = max(seen["largest"], each.numel())
                    alive.setdefault(storage._cdata, (weak(storage), storage.nbytes()))  # noqa: SLF001
            for key in [key for key, (reference, _) in alive.items() if reference.expired()]:
                del alive[key]
            seen["together"] = max(seen["together"], sum(size for _, size in alive.values()))
            return made

    with Watch():
        function()
    return seen


@contextlib.contextmanager
def another_gpu(upstream, capabilities, current):
    """Let the platform, loaded anew, see GPUs of these compute capabilities, and which one is the current device.

    A launcher's LOCAL_RANK names another one, as it does where a process sees fewer GPUs than its host has. There is a
    stand-in for Blackwell's kernels.
    """
    name, seen = f"{FUSIONS}.blackwell", upstream.fused.torch
    entry = types.ModuleType(f"{name}.entry")
    entry.forward, entry.backward = object(), object()
    with environment({"LOCAL_RANK": str((current + 1) % len(capabilities))}):
        load_again(upstream, seen_from(upstream, capabilities, current))
        try:
            sys.modules[entry.__name__] = importlib.import_module(name).entry = entry
            yield entry
        finally:
            load_again(upstream, seen)


def blackwell(upstream, _case):
    """Ask the platform what GPUs of compute capability 10 compute with, beside others."""
    same = {}
    for capability in BLACKWELL:
        with another_gpu(upstream, ((9, 0), capability, (8, 0)), 1) as entry:
            found = upstream.fused.Platform()
            right = found.forward_func is entry.forward and found.backward_func is entry.backward
        same["{}.{}".format(*capability)] = right
    return {"right": same}


def others(upstream, case):
    """Ask twice for the platform and for a loss: whether the GPUs that nothing is there for are refused, and named.

    The first GPU of such a host is a Hopper, its last one a Blackwell.
    """
    hidden, weight, labels, _ = upstream.parts(case)
    refused = {}
    for capability in OTHERS:
        with another_gpu(upstream, ((9, 0), capability, (10, 0)), 1):
            calls = [upstream.fused.Platform, lambda: upstream.losses(case, hidden, weight, labels)] * 2
            told = [refusal(call) for call in calls]
        refused["{}.{}".format(*capability)] = all(str(capability[0]) in each for each in told)
    return {"right": refused}


def hopper_beside(upstream, case):
    """Compute losses and gradients on hosts of unlike GPUs, of which the current device is a Hopper."""
    records = []
    for capabilities, current in HOPPER_BESIDE:
        parts = upstream.parts(case)
        with another_gpu(upstream, capabilities, current):
            records.append(recorded(case, *computed(upstream, case, parts)))
    return {"each": records}


def not_finite(upstream, case):
    """Compute losses and gradients where a number of the hidden states, or of the weight, is nan or infinite."""
    parts = [upstream.parts(dataclasses.replace(case, broken=broken)) for broken in BROKEN]
    return {"each": [recorded(case, *computed(upstream, case, each)) for each in parts]}


def switch(torch, name):
    """Return the object that has a switch of torch.backends, and what it is called there."""
    *path, last = name.split(".")
    return functools.reduce(getattr, path, torch.backends), last


def settings_now(upstream):
    """Return what the process has set, by name."""
    torch = upstream.torch
    read = {name: functools.partial(getattr, *switch(torch, name)) for name in SWITCHES}
    read |= {
        "float32 products": torch.get_float32_matmul_precision,
        "float32 products on a GPU": lambda: getattr(torch.backends.cuda.matmul, "fp32_precision", None),
        "BLAS library": torch.backends.cuda.preferred_blas_library,
        "default dtype": torch.get_default_dtype,
        "deterministic": torch.get_deterministic_debug_mode,
        "memory is filled": lambda: torch.utils.deterministic.fill_uninitialized_memory,
        "gradients": torch.is_grad_enabled,
        "autocast": lambda: torch.is_autocast_enabled(upstream.device.type),
        "threads": torch.get_num_threads,
        "random numbers": lambda: torch.get_rng_state().tolist(),
        "environment": lambda: dict(os.environ),
    }
    if upstream.device.type == "cuda":
        read["random numbers of the GPU"] = lambda: torch.cuda.get_rng_state().tolist()
        read["GPU"] = torch.cuda.current_device
        read["stream"] = torch.cuda.current_stream
    return {name: readable(function) for name, function in read.items()}


def readable(function):
    """Return a setting; PyTorch refuses to tell some that were set in two ways, which is a change as well."""
    try:
        return function()
    except RuntimeError as error:
        return str(error)


@contextlib.contextmanager
def settings_otherwise(torch):
    """Turn every switch, and what else has two ways, the other way meanwhile."""
    owners = [switch(torch, name) for name in SWITCHES]
    before = [getattr(owner, name) for owner, name in owners]
    try:
        for (owner, name), value in zip(owners, before, strict=True):
            setattr(owner, name, not value)
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        for (owner, name), value in zip(owners, before, strict=True):
            setattr(owner, name, value)


def settings(upstream, case):
    """Compute a loss and gradients, and be refused one: what the process has set is as it was, after each of these."""
    right, refused = {}, dataclasses.replace(case, reduction="avg")
    hidden, weight, labels, above = upstream.parts(case)
    for way, entered in (("usual", contextlib.nullcontext()), ("other", settings_otherwise(upstream.torch))):
        with entered:
            before, after = settings_now(upstream), {}
            found = upstream.losses(case, hidden, weight, labels)
            after["forward"] = settings_now(upstream)
            upstream.torch.autograd.grad(found, (hidden, weight), above.reshape(found.shape))
            after["backward"] = settings_now(upstream)
            refusal(functools.partial(upstream.losses, refused, hidden, weight, labels))
            after["refusal"] = settings_now(upstream)
        for when, now in after.items():
            right[f"{way}, {when}"] = now == before
            right |= {f"{way}, {when}: {name}": False for name in before if now[name] != before[name]}
    return {"right": right}


def modes(upstream, case):
    """Compute losses and gradients where other dtypes are the default, and losses in inference mode: as usual."""
    torch, parts = upstream.torch, upstream.parts(case)

    def again():
        loss, gradients = computed(upstream, case, parts)
        return (loss.detach(), *gradients)

    def alike(found):
        return all(same(x, y) and x.dtype == y.dtype for x, y in zip(usual, found, strict=False))

    usual, right = again(), {}
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            right[str(dtype)] = alike(again())
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        right["inference"] = alike([upstream.losses(case, *parts[:3])])
    return {"right": right}


def invalid(upstream, case):
    """Ask for a loss of each reduction, and for reductions that there are not: those are refused, and named."""
    hidden, weight, labels, _ = upstream.parts(case)

    def ask(reduction):
        return upstream.losses(dataclasses.replace(case, reduction=reduction), hidden, weight, labels)

    right = {reduction: ask(reduction).numel() == count for reduction, count in (("none", labels.numel()), ("mean", 1))}
    told = {str(reduction): refusal(functools.partial(ask, reduction)) for reduction in NO_REDUCTIONS}
    return {"right": right | {repr(name): bool(text) and name in text for name, text in told.items()}}


def refusal(call):
    """Return with what a GPU is refused: nothing where it is not."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


# GPTModel, as small as reaches its output layer: an MLP layer of 16 hidden units, without a final norm.


@dataclasses.dataclass(frozen=True)
class Model:
    """How a GPTModel is built and what it is given."""

    ranks: int = 2
    tied: bool = False
    depths: int = 0
    fusion: bool = True
    labels: bool = True
    spread: bool = False

    @property
    def world(self):
        """Return how many ranks the world needs."""
        return self.ranks


MODELS = {"gpt": Model(), "gpt.tied": Model(tied=True), "gpt.mtp": Model(depths=1)}
WITHOUT = {"gpt.unfused": Model(fusion=False), "gpt.unfused.mtp": Model(fusion=False, depths=1)}


def layer_spec(upstream):
    """Return the specification of a layer that has an MLP alone."""
    submodules = upstream.layer.TransformerLayerSubmodules(
        self_attention=upstream.spec(module=upstream.identity, params={"attn_mask_type": upstream.causal}),
        pre_mlp_layernorm=upstream.local.pre_mlp_layernorm,
        mlp=upstream.local.mlp,
        mlp_bda=upstream.local.mlp_bda,
    )
    return upstream.spec(module=upstream.layer.TransformerLayer, submodules=submodules)


def mtp_spec(upstream, depths):
    """Return the specification of a multi-token prediction block, or None."""
    if not depths:
        return None
    norm = upstream.backend.layer_norm()
    inner = upstream.mtp.MultiTokenPredictionLayerSubmodules(
        enorm=norm,
        hnorm=norm,
        eh_proj=upstream.backend.column_parallel_linear(),
        mtp_model_layer=layer_spec(upstream),
        layer_norm=norm,
    )
    specs = [upstream.spec(module=upstream.mtp.MultiTokenPredictionLayer, submodules=inner)] * depths
    block = upstream.mtp.MultiTokenPredictionBlockSubmodules(layer_specs=specs)
    return upstream.spec(module=upstream.mtp.MultiTokenPredictionBlock, submodules=block).submodules


def step(upstream, model, state=None):
    """Go through a model and back; return losses or logits, gradients, and what entered its output layer."""
    torch = upstream.torch
    torch.manual_seed(11)
    if upstream.device.type == "cuda":
        upstream.random.model_parallel_cuda_manual_seed(11)
    config = upstream.config(
        num_layers=1,
        hidden_size=16,
        ffn_hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.7,
        use_cpu_initialization=True,
        tensor_model_parallel_size=model.ranks,
        mtp_num_layers=model.depths or None,
        cross_entropy_loss_fusion=model.fusion,
        cross_entropy_fusion_impl="linear",
    )
    block = upstream.block.TransformerBlockSubmodules(layer_specs=[layer_spec(upstream)], layer_norm=None)
    named = {"share_embeddings_and_output_weights": model.tied, "position_embedding_type": "none"}
    built = upstream.gpt.GPTModel(config, block, 44, 16, mtp_block_spec=mtp_spec(upstream, model.depths), **named)
    built.to(upstream.device).eval()  # not in training mode: MTP's losses are not logged, over all ranks
    if state is not None:
        built.load_state_dict(state)
    entered = []

    def enter(_, given, named):
        entered.append((given[0] if given else named["input_"]).detach().clone())

    built.output_layer.register_forward_pre_hook(enter, with_kwargs=True)
    random = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(44, (2, 7), generator=random).to(upstream.device) for _ in range(2))
    positions = torch.arange(7, device=upstream.device).expand_as(ids)
    found = built(ids, positions, None, labels=labels if model.labels else None)
    found.sum().backward()
    weight = built.shared_embedding_or_output_weight() if model.tied else built.output_layer.weight
    return {
        "found": found.detach(),
        "hidden": entered[-1],
        "weight": weight.detach(),
        "labels": labels,
        "gradients": {name: each.grad for name, each in built.named_parameters() if each.grad is not None},
        "state": {name: each for name, each in built.state_dict().items() if isinstance(each, torch.Tensor)},
    }


def train(upstream, model):
    """Go through a model, and with the fusion also through the same one without."""
    mine = step(upstream, model)
    if not model.fusion or not model.labels:
        return {"mine": mine}
    return {"mine": mine, "unfused": step(upstream, dataclasses.replace(model, fusion=False), mine["state"])}


# The stand-ins.


class View:
    """A module with some of its names replaced."""

    def __init__(self, module, **replaced):
        self.__dict__ |= {"_module": module, **replaced}

    def __getattr__(self, name):
        return getattr(self._module, name)


def seen_from(upstream, capabilities, current=0):
    """Return torch, as it answers on a host whose GPUs have these compute capabilities."""

    def capability(device=None):
        index = device
        if device is not None and not isinstance(device, int):
            device = upstream.torch.device(device)
            index = None if device == upstream.device else device.index  # where tensors lie is the current device
        return capabilities[current if index is None else index]

    def properties(device=None):
        return types.SimpleNamespace(**dict(zip(("major", "minor"), capability(device), strict=True)))

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: len(capabilities),
        "current_device": lambda: current,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "nvtx": types.SimpleNamespace(range=lambda _: contextlib.nullcontext()),
    }
    return View(upstream.torch, cuda=View(upstream.torch.cuda, **answers))


def stand_in(upstream):
    """Let one module see a GPU of compute capability 9, and let the CPU compute what takes out_dtype."""
    torch = upstream.torch
    upstream.fused.torch = seen_from(upstream, ((9, 0),))
    torch.cuda.current_device = lambda: "cpu"
    for name in ("mm", "addmm", "bmm", "baddbmm"):
        setattr(torch, name, functools.partial(widened, torch, getattr(torch, name)))
    of_cpu = functools.partial(autocast_of_cpu, torch.autocast)
    torch.autocast = torch.amp.autocast = of_cpu


def autocast_of_cpu(autocast, _device, *given, **named):
    """Return the autocast of the CPU, whatever device is meant."""
    return autocast("cpu", *given, **named)


def widened(torch, function, *given, out_dtype=None, **named):
    """Compute a product in the dtype that is asked for: that one autocast leaves alone on a GPU, and here."""
    if out_dtype is None:
        return function(*given, **named)
    with torch.autocast("cpu", enabled=False):
        return function(*(each.to(out_dtype) for each in given), **named)


# The ranks.


def attempt(function, tested):
    """Return what a measurement returned, or how it failed and whether the code under test did."""
    try:
        return function()
    except Exception as error:  # the process that judges reports it
        traceback.print_exc()
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        refused = any(text in str(error) for text in REFUSED)  # by PyTorch, of what the code under test has returned
        upstream = refused or any(file.startswith(tuple(tested)) for file in files)
        return {"error": f"it raised {type(error).__name__}: {error}"[:400], "upstream": upstream}


def to_cpu(found):
    """Return what was found with its tensors on the CPU."""
    if isinstance(found, dict):
        return {key: to_cpu(each) for key, each in found.items()}
    if isinstance(found, list):
        return [to_cpu(each) for each in found]
    return found.cpu().contiguous() if hasattr(found, "cpu") else found


def speak(work, rank, count, folder):
    """Be one rank: run every check whose group it is in, and write down what was found."""
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)  # standard output is the judge's, and what is wrong is looked for here
    os.dup2(log, 2)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the judge
    stack = Path(f"{folder}/stack{rank}").open("w")  # noqa: SIM115 - where it hangs: written while this process lives
    faulthandler.dump_traceback_later(work.seconds - 30, file=stack)
    import torch

    torch.set_num_threads(1)
    device = torch.device("cpu" if work.target == "cpu" else f"cuda:{rank}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed = torch.distributed
    if device.type == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it deterministic algorithms refuse every product
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    store = distributed.FileStore(f"{folder}/store", count)
    limit = dt.timedelta(seconds=work.seconds + 60)  # a rank that waits for another hangs: this process says so
    distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
    upstream = Upstream(torch, device)
    upstream.state.initialize_model_parallel(min(2, count), create_gloo_process_groups=False)
    if device.type == "cpu":
        stand_in(upstream)
    for size in (1, 2, 4):
        members = [list(range(start, start + size)) for start in range(0, count - size + 1, size)]
        made = [distributed.new_group(ranks) for ranks in members]  # every rank makes every group
        if made:
            upstream.groups[size] = made[rank // size]
    if count == 4:
        upstream.groups["spread"] = [distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    found, raised = {}, Path(f"{folder}/raised{rank}").open("w")  # noqa: SIM115 - as above
    for name, function, case in work.checks:
        print("check", name, flush=True)
        if case.world <= count:  # every group runs it: one that talks to the world meets the others
            found[name] = to_cpu(attempt(functools.partial(function, upstream, case), work.tested))
            if found[name].get("upstream"):
                print(json.dumps([name, found[name]["error"]]), file=raised, flush=True)
    fusions = {name: each.__file__ for name, each in sys.modules.items() if name.startswith(FUSIONS)}
    torch.save({"checks": found, "modules": fusions}, f"{folder}/{rank}")
    print("done", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def last_lines(folder, rank):
    """Return the end of a rank's log, and where it was if it hung."""
    log, stack = (Path(f"{folder}/{name}{rank}") for name in ("log", "stack"))
    said = log.read_text(errors="replace")[-1500:] if log.exists() else ""
    return said + (stack.read_text(errors="replace")[:700] if stack.exists() else "")


def ranks(work, count, folder):
    """Run all checks on so many ranks; return what each of them found, and the fusions' modules that they loaded."""
    import torch

    # The CPU's ranks share what this process has imported; a GPU's cannot be forked from one that has seen it.
    context = multiprocessing.get_context("fork" if work.target == "cpu" else "spawn")
    processes = [context.Process(target=speak, args=(work, rank, count, folder), daemon=True) for rank in range(count)]
    until = time.monotonic() + work.seconds
    try:
        for process in processes:
            process.start()
        while any(process.exitcode is None for process in processes) and time.monotonic() < until:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.01)
        bad = {rank: each.exitcode for rank, each in enumerate(processes) if each.exitcode != 0}
        bad |= {rank: 0 for rank in range(count) if rank not in bad and not Path(f"{folder}/{rank}").exists()}
        died = {rank: code for rank, code in bad.items() if code is not None} or bad
        if died:
            told = [
                f"rank {rank} {end(code)}; its last lines:\n{last_lines(folder, rank)}" for rank, code in died.items()
            ]
            raise RuntimeError("\n".join(told))
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    written = [torch.load(f"{folder}/{rank}") for rank in range(count)]
    found = [each["checks"] for each in written]
    same_checks(work, found, folder)
    return found, dict(item for each in written for item in each["modules"].items())


def of_group(found, case):
    """Return what the ranks found whose group judged a case: those of the last one of its size."""
    return found[1::2] if case.spread else found[-case.ranks :]


def end(code):
    """Say how a rank ended."""
    return "did not end in time" if code is None else f"died with exit status {code}, or left no results"


def same_checks(work, found, folder):
    """Raise where a rank did not do what the others of its group did, or failed alone."""
    for name, _, case in work.checks:
        mine = of_group(found, case)
        states = ["error" in each[name] if name in each else None for each in mine]
        for rank, state in zip(of_group(range(len(found)), case), states, strict=True):
            if state is None or state != states[0]:
                raise RuntimeError(
                    f"rank {rank} disagrees on {name}: {states}; its last lines:\n{last_lines(folder, rank)}"
                )


def raised_by_some(work, count, folder):
    """Return the first check in which the code under test raised on some ranks and not on all, with what it raised.

    From there on the ranks are not at the same check: one may wait for ever for another. None where there is no such
    check: then it is not known whose fault it is that a rank did not end.
    """
    files = [Path(f"{folder}/raised{rank}") for rank in range(count)]
    raised = [dict(json.loads(line) for line in file.read_text().splitlines()) for file in files if file.exists()]
    for name, _, _ in work.checks:
        said = [each[name] for each in raised if name in each]
        if said and len(said) < count:
            return name, f"{said[0]} (on {len(said)} of {count} ranks)"
    return None


# What the judge makes of it. Each function gets the list of what the ranks of the group found.


def norm_error(found, wanted):
    """Return the norm of the difference over the norm of what is wanted: infinite where nothing of that shape is.

    Also where a number is missing, or stands where nan is wanted: the largest of several errors is never nan.
    """
    if found is None or found.shape != wanted.shape or not bool((found.isnan() == wanted.isnan()).all()):
        return float("inf")
    found, wanted = (
        each.double().nan_to_num(nan=0.0, posinf=float("inf"), neginf=-float("inf")) for each in (found, wanted)
    )
    error = float((found - wanted).norm() / (wanted.norm() if bool(wanted.count_nonzero()) else 1.0))
    return min(float("inf"), error)  # in this order a nan is infinite


def reference(given, case):
    """Return the losses, or one, and the gradients of hidden states and weight, in float64."""
    import torch

    hidden, weight, labels, above = given
    rows, weight, labels = hidden.flatten(0, -2).double(), weight.double(), labels.flatten()
    kept = labels != (case.ignore_index if case.entry != "native" else IGNORED)
    index = labels.where(kept, 0).unsqueeze(-1)
    scores = rows @ weight.t()
    losses = (scores.logsumexp(-1) - scores.gather(-1, index).squeeze(-1)).where(kept, 0.0)
    count = kept.sum() if case.reduction == "mean" else 1
    towards = scores.softmax(-1).scatter_add(-1, index, torch.full_like(index, -1.0, dtype=torch.double))
    towards = towards * (above.double() / count).where(kept, 0.0).unsqueeze(-1)
    losses = losses if case.reduction == "none" else losses.sum() / count
    return losses, (towards @ weight).view(hidden.shape), towards.t() @ rows


def joined(found, key, split):
    """Return one tensor of all ranks' parts, or the first rank's."""
    import torch

    return torch.cat([each[key] for each in found]) if split else found[0][key]


def gradients(found, name, case):
    """Return the whole gradient: joined of all ranks' parts, or each rank's."""
    if name == "weight" or case.sequence_parallel:
        return [joined(found, f"towards_{name}", True)]
    return [each[f"towards_{name}"] for each in found]


def judged_part(gradient, name, case):
    """Return what is judged of a gradient."""
    if case.reduction == "mean" and case.labels == "all ignored":
        return gradient.where(~gradient.isnan(), 0.0)  # of a mean of none: 0 or nan
    if case.levels and name == "hidden":
        return gradient[..., :-1]  # the last column is a level times a sum that is zero: nothing but rounding
    return gradient


def judge_loss(found, upstream, case):
    """Judge the losses of every rank, and the gradients."""
    losses, towards_hidden, towards_weight = reference(upstream.given(case), case)
    rounding = BFLOAT16 if case.dtype != "float32" and not case.exact else 0.0
    level = FLOAT32_LEVEL * max(map(abs, case.levels), default=0.0)
    limits, errors = {"loss": FLOAT32_LOSS + level}, {"loss": max(norm_error(each["loss"], losses) for each in found)}
    for name, wanted in (("hidden", towards_hidden), ("weight", towards_weight)):
        if case.frozen == name or "dtypes" not in found[0]:
            continue
        right_part = judged_part(wanted, name, case)
        parts = [judged_part(each, name, case) for each in gradients(found, name, case)]
        errors[name] = max(norm_error(each, right_part) for each in parts)
        limits[name] = FLOAT32_GRADIENT + rounding
    dtypes = ["torch.float32"] + [f"torch.{case.dtype}"] * (len(errors) - 1)
    right = {
        "dtypes": all(each.get("dtypes", dtypes) == dtypes for each in found),
        "ranks_agree": all(same(each["loss"], found[0]["loss"]) for each in found),
        "again": all(each.get("again", True) for each in found),
        "inputs_kept": all(each.get("kept", True) for each in found),
    }
    ok = all(errors[key] <= limits[key] for key in errors) and all(right.values())
    told = {"classes": case.classes, "labelled": case.labelled or case.classes} | found[0].get("said", {})
    measured = errors | right | told | {"sha256": hashes(found)}
    return ok, {"measured": measured, "tolerance": limits, "unit": "relative error"}


def hashes(found):
    """Return the sha256 of what each rank found, shortened."""
    import torch

    told = []
    for each in found:
        digest = hashlib.sha256()
        for key in sorted(each):
            if isinstance(each[key], torch.Tensor):
                digest.update(ctypes.string_at(each[key].data_ptr(), each[key].nbytes))
        told.append(digest.hexdigest()[:16])
    return told


def judge_memory(found, _upstream, case):
    """Judge that neither a tensor nor all that live together come near the logits."""
    slab = case.shape[0] * case.shape[1] * case.classes // case.ranks
    measured = {"largest": found[0]["largest"] / slab, "together": found[0]["together"] / (4 * slab)}
    ok = all(each <= SLAB_PART for each in measured.values())
    return ok, {"measured": measured, "tolerance": SLAB_PART, "unit": "of all logits in fp32"}


def judge_waits(found, _upstream, _case):
    """Judge that nothing waits for the GPU."""
    return not any(each["waits"] for each in found), {"measured": [each["waits"] for each in found]}


def judge_right(found, _upstream, _case):
    """Judge what every rank has compared by itself."""
    return all(all(each["right"].values()) for each in found), {"measured": found[0]["right"]}


def judge_each(found, upstream, case):
    """Judge several losses of one check."""
    told = [judge_loss(records, upstream, case) for records in zip(*(each["each"] for each in found), strict=True)]
    values = told[0][1] | {"measured": [values["measured"] for _, values in told]}
    return all(ok for ok, _ in told), values


def judge_not_finite(found, upstream, case):
    """Judge that what is not finite by float64 is not, and that a token's numbers change no other token's.

    Of a weight that is infinite a token's loss may be finite, and is not judged then; nor is the gradient of the hidden
    states of ignored tokens.
    """
    rounding = BFLOAT16 if case.dtype != "float32" else 0.0
    right = {}
    for broken, *records in zip(BROKEN, *(each["each"] for each in found), strict=True):
        mine = dataclasses.replace(case, broken=broken)
        given = upstream.given(mine)
        losses, towards_hidden, towards_weight = reference(given, mine)
        counted = given[2].flatten() != case.ignore_index
        told = [(each["loss"], losses, FLOAT32_LOSS) for each in records]
        told += [
            (rows(each)[counted], rows(towards_hidden)[counted], FLOAT32_GRADIENT + rounding)
            for each in gradients(records, "hidden", case)
        ]
        told += [(each, towards_weight, None) for each in gradients(records, "weight", case)]
        name, value = broken
        right[f"{value} in {name}"] = all(
            shows(x, y) and (limit is None or name != "hidden" or finite_error(x, y) <= limit) for x, y, limit in told
        )
    return all(right.values()), {"measured": right}


def rows(tensor):
    """Return a tensor of one row for each token."""
    return tensor.flatten(0, -2)


def shows(found, wanted):
    """Return whether nothing is finite where it should not be; it is a fault of the probe where all should be."""
    if bool(wanted.isfinite().all()):
        raise RuntimeError("the reference has lost what is not finite")
    return found.shape == wanted.shape and not bool((found.isfinite() & ~wanted.isfinite()).any())


def finite_error(found, wanted):
    """Return the error of what should be finite."""
    kept = wanted.isfinite()
    return norm_error(found[kept], wanted[kept])


def judge_train(found, _upstream, model):
    """Judge losses by float64 at the output layer, or logits; and with the fusion all gradients by those without."""
    import torch

    mine = [each["mine"] for each in found]
    weight, hidden = torch.cat([each["weight"] for each in mine]).double(), mine[0]["hidden"].double()
    scores = (hidden @ weight.t()).transpose(0, 1)
    if model.labels:
        wanted = scores.logsumexp(-1) - scores.gather(-1, mine[0]["labels"].unsqueeze(-1)).squeeze(-1)
        errors = {"loss": max(norm_error(each["found"], wanted) for each in mine)}
    else:
        errors = {"logits": norm_error(torch.cat([each["found"] for each in mine], -1), scores)}
    limits = dict.fromkeys(errors, FLOAT32_LOSS)
    if "unfused" in found[0]:
        errors["gradients"] = max(map(furthest, found))
        limits["gradients"] = FLOAT32_GRADIENT
    ok = all(errors[key] <= limits[key] for key in errors)
    return ok, {"measured": errors, "tolerance": limits, "unit": "relative error"}


def furthest(each):
    """Return how far the gradients with and without the fusion are apart: infinite where one is missing."""
    mine, other = each["mine"]["gradients"], each["unfused"]["gradients"]
    if sorted(mine) != sorted(other):
        return float("inf")
    largest = max(float(tensor.norm()) for tensor in other.values())
    # A gradient that is nothing but rounding has no direction.
    kept = [name for name in mine if float(other[name].norm()) > largest * 2.0**-12]
    return max(norm_error(mine[name], other[name]) for name in kept)


def checks(size):
    """Return each check: name, role, what is measured on which case, how that is judged; GPTModel on `size` ranks."""
    found = [(f"loss.{name}", "defect", loss, case, judge_loss) for name, case in CASES.items()]
    found += [(f"no_grad.{name}", "defect", no_grad, case, judge_loss) for name, case in FORWARD.items()]
    found += [
        (f"deterministic.{name}", "defect", deterministic, case, judge_loss) for name, case in DETERMINISTIC.items()
    ]
    found += [(f"halved.{name}", "defect", halved, case, judge_loss) for name, case in HALVED.items()]
    found += [(f"changed.{name}", "defect", changed, case, judge_right) for name, case in CHANGED.items()]
    found += [(f"freed.{name}", "defect", freed, case, judge_right) for name, case in FREED.items()]
    found.append(("second_order", "defect", second_order, Case(entry="function", shape=(13,)), judge_right))
    found += [(f"in_flight.{name}", "defect", in_flight, case, judge_loss) for name, case in IN_FLIGHT.items()]
    found += [
        (f"no_distributed.{name}", "defect", no_distributed, case, judge_loss) for name, case in UNGROUPED.items()
    ]
    found.append(("split_sizes", "defect", split_sizes, SPLIT, judge_each))
    found.append(("hopper_beside_others", "defect", hopper_beside, UNGROUPED["without_group"], judge_each))
    found += [(f"not_finite.{name}", "defect", not_finite, case, judge_not_finite) for name, case in NOT_FINITE.items()]
    found += [(f"modes.{name}", "defect", modes, case, judge_right) for name, case in MODES.items()]
    found += [(f"settings.{name}", "defect", settings, case, judge_right) for name, case in SETTINGS.items()]
    found += [(f"invalid.{name}", "defect", invalid, case, judge_right) for name, case in INVALID.items()]
    found += [(f"waits.{name}", "defect", waits, case, judge_waits) for name, case in WAITS.items()]
    found.append(("memory", "defect", memory, MEMORY, judge_memory))
    found += [(name, "control", loss, case, judge_loss) for name, case in NEIGHBOURS.items()]
    found.append(("blackwell", "control", blackwell, Case(), judge_right))
    found.append(("others_refused", "control", others, UNGROUPED["without_group"], judge_right))
    models = [(name, "defect", model) for name, model in MODELS.items()]
    models += [(name, "control", model) for name, model in WITHOUT.items()]
    models.append(("gpt.logits", "control", Model(labels=False)))
    sized = [(name, role, dataclasses.replace(model, ranks=size)) for name, role, model in models]
    return found + [(name, role, train, model, judge_train) for name, role, model in sized]


def judge_one(probe, check, found, upstream):
    """Judge one check by what the ranks found; what a rank could not do is wrong, or a fault of this probe."""
    name, role, _, case, function = check

    def measure():
        for each in found:
            if "error" in each and not each["upstream"]:
                raise RuntimeError(each["error"])
            if "error" in each:
                return False, {"reason": each["error"]}
        return function(found, upstream, case)

    probe.judge(name, role, measure)


def judge_parted(probe, every, failed, reason):
    """Fail the check that made the ranks part; behind it no other can be judged."""
    for name, role, *_ in every:
        mine = name == failed
        probe.check(name, role, False if mine else None, reason=reason if mine else f"{failed} raised on some ranks")


def say_outputs(probe, name, found):
    """Say what a control came to on every rank: its bits are those of the other lane."""
    for rank, each in enumerate(found):
        for key in ("loss", "towards_hidden", "towards_weight"):
            if key in each:
                probe.output(f"{name}.{key}.{rank}", each[key])


def judge(probe, target):
    """Judge the tree that is on the path."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # inductor takes a minute for what eager mode computes at once
    import torch

    count = CPU_RANKS
    if target != "cpu":
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
            raise NotImplementedError("the claim is about GPUs of compute capability 9: this is none")
        count = max(size for size in (1, 2, 4) if size <= torch.cuda.device_count())
    torch.set_num_threads(1)  # the ranks are forked
    device = "cpu" if target == "cpu" else torch.cuda.get_device_name()
    probe.say("TARGET", target=target, evidence="traced" if target == "cpu" else "executed", device=device)
    upstream = Upstream(torch, torch.device("cpu"))
    for module in upstream.modules():
        probe.upstream(module)
    every = checks(min(2, count))
    asked = [check for check in every if patterns.fnmatchcase(check[0], probe.only or "*") and check[3].world <= count]
    seconds = SECONDS["cpu" if target == "cpu" else "gpu"]
    given = [(name, function, case) for name, _, function, case, _ in asked]
    work = types.SimpleNamespace(target=target, checks=given, tested=probe.tested, seconds=seconds)
    with tempfile.TemporaryDirectory() as folder:
        try:
            results, modules = ranks(work, count, folder)
        except RuntimeError:
            parted = raised_by_some(work, count, folder)
            if parted is None:
                raise
            traceback.print_exc()
            judge_parted(probe, every, *parted)
            return
    for name, file in sorted(modules.items()):  # what the ranks loaded besides
        probe.upstream(types.SimpleNamespace(__name__=name, __file__=file))
    for check in every:
        name, role, _, case, _ = check
        if check not in asked:
            reason = "--only leaves it out" if case.world <= count else f"it takes {case.world} GPUs"
            probe.check(name, role, None, reason=reason)
            continue
        found = [each[name] for each in of_group(results, case)]
        judge_one(probe, check, found, upstream)
        if role == "control":
            say_outputs(probe, name, found)
    raised = [name for name, role, _, _, _ in asked if role == "defect" and "error" in results[-1][name]]
    probe.say("FIGURE", name="defect_checks_that_raise", value=len(raised), unit="1", spread=None)


if __name__ == "__main__":
    Probe().run(judge)
