# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "megatron-core==0.19.2",
#   "numpy==2.3.5",
#   "packaging==26.3",
#   "torch==2.13.0",
# ]
# ///
"""Megatron's fused vocab-parallel cross entropy rounds the logits' gradient to bfloat16, whatever the logits' dtype.

Symptom: with cross_entropy_loss_fusion and its "native" implementation, fp32, fp64 and fp16 logits get a gradient that
is as coarse as bfloat16, without a warning. The gradient's dtype is the logits', because autograd casts it back, so
that nothing shows; and the loss is exact. The error goes on into the gradients of the hidden states and of the output
weights.

Cause: calculate_gradients in megatron/core/fusions/fused_cross_entropy.py ends in `grad_input.to(torch.bfloat16)`. The
unfused vocab_parallel_cross_entropy, which shares the arithmetic, returns float32 and has no such error.

Scope: models whose output layer makes fp16 or fp32 logits and takes their gradient as it is: fp16 and fp32 training. An
output layer that rounds the gradient to bfloat16 itself, as that of a bf16 model with logit_dtype=torch.float32 does
(https://github.com/NVIDIA/Megatron-LM/pull/6252), gets the same bits with and without the patch: the OUTPUT lines that
end in `as_bfloat16`. Nothing is said about a training run, a GPU, or the implementations "te" and "linear".

The contract of fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group), of which FACTORS has the
values and CASES a pairwise covering set. A case of bf16 logits is a control, one of another dtype a defect check; each
has its twin through the unfused function, a control:

    logits [sequence, batch, vocabulary / ranks]    fp32, fp16, bf16, fp64; a leaf, or made by a linear layer; also
        large, shifted by 100, and -inf for classes that are masked out; contiguous, or a slice of more classes, of a
        longer sequence, of a larger batch; up to 8209 tokens, or classes of a rank: a prime that no block divides; and
        65521 and 131101 classes, whose numbers do not fit into 15 and 16 bits; on one rank also tokens in one dimension
        to four
    target [sequence, batch] int64                  any class; all on one rank; some of no rank (-100, or too large);
        contiguous, or a slice; [batch, sequence] is refused, where these are not equal; on one rank also expanded, or
        int32, where transposed ones may be refused, and its logit up to 1e30 (fp16: 1.2e5), or infinitely far, below
        the largest
    tp_group                                        1, 2 and 4 ranks, beside others of the same size; also {0, 2} and
        {1, 3}, as initialize_model_parallel makes them with order="dp-tp"
    the gradient that comes from above              1, one number expanded, any weights, a loss mask, a loss scale; of
        any strides: transposed, one row for all, every second of a batch; or none at all, for which the logits' is 0
    entry                                           the function, and LanguageModule.compute_language_model_loss
    what comes back                                 fp32 losses [sequence, batch], which the caller may change in
        place; a gradient of the logits' dtype, also when targets, or logits that are not fp32, change after forward
    what was given                                  targets and the gradient from above stay as they are, in shape,
        strides, values and version; so do the logits, but for the values and the version of fp32 ones; nothing of
        their size is kept after backward, and forward keeps neither their object nor what it saved on an object; a loss
        that is dropped leaves nothing, with Python's collector of cycles off; after a change in place of fp32 logits or
        of what is saved, backward raises or is right

The function has no label smoothing. Besides: what backward itself returns, how many copies of the gradient are made and
how many bytes are held for it, and how it lies in memory; how often and with how many bytes ranks talk; what is
made or waited for on the host; logits that nobody keeps, or that a checkpoint computes again, and saved tensors that
come back as copies; a second backward, which autograd refuses; logits that another term uses, too; losses of several
dtypes whose backwards come later; the derivative by the loss's weights; no_grad, inference_mode, and logits
that need no gradient; arguments by name; autocast to another dtype; a loss scale beyond fp16; and the functions
compiled by jit_fuser. Second derivatives by the logits are not: both functions take the softmax for a constant.
fp32 logits are overwritten by forward in both implementations (https://github.com/NVIDIA/Megatron-LM/pull/1594).

How it is run: this process imports Megatron and forks four ranks that talk through gloo on the loopback device. Each
group of 1, 2 and 4 of them runs what is for so many ranks, with other numbers; what the last group comes to is judged,
whose ranks are others in the world. A rank writes to a log of its own. One that dies, does not end in time, or raises
where the others do not is an error that names it, with its last lines; no rank outlives this process. jit_fuser is off
there, as Megatron's disable_jit_fuser does it, since inductor compiles for a minute; a fifth process has it on, with
torch.compile's backend aot_eager: traced and functionalized, not lowered. Nothing is stubbed.

Errors are norms of the difference over norms of the reference: softmax minus one-hot, times the gradient from above, in
float64 on the same logits. Tolerances: 2^-17, which is 64 roundings of float32, for exp, two sums of 131101 terms at
most, which PyTorch adds up in parts, a division and a product; and for fp16 and bf16 the unit roundoff of the dtype
besides, since every element is rounded once. On one and two ranks, where a sum has one order, the gradient is that of
the unfused function bit for bit.
The gradients of hidden states and weights are sums of at most 1024 products, where much can cancel: 2^-15.

Upstream: https://github.com/NVIDIA/Megatron-LM, megatron/core/fusions/fused_cross_entropy.py; no unit test of the
release calls this function. A later commit, which was not to be had, makes the same cast (REPORT.md).

Both sentinels without the runner, from a folder that holds the release's own megatron_core-0.19.2.tar.gz, with PACK set
to the absolute path of this file's folder and with torch, numpy and packaging installed. The second line ends in
BUG_REPRODUCED, the fourth in FIX_VALIDATED:

    tar xzf megatron_core-0.19.2.tar.gz
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py" --target cpu
    GIT_CEILING_DIRECTORIES="$PWD" git -C megatron_core-0.19.2 apply -p1 "$PACK/fix.patch"
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

import copy
import datetime as dt
import faulthandler
import functools
import gc
import importlib
import inspect
import math
import multiprocessing.connection
import signal
import tempfile
import time
import types
import weakref

FACTORS = {
    "dtype": ("float32", "float16", "bfloat16", "float64"),
    "ranks": (1, 2, 4),
    "shape": ((5, 2, 7), (1, 1, 3), (3, 2, 16), (13, 1, 33)),  # sequence, batch, vocabulary of each rank
    "targets": ("any", "one rank", "some of no rank"),
    "gradient": ("ones", "mean", "weights", "loss mask", "loss scale"),
    "values": ("normal", "large", "shifted", "masked"),
    "producer": ("linear", "leaf"),
    "entry": ("function", "model"),
}
# fmt: off
CASES = [
    ("bfloat16", 4, (1, 1, 3), "one rank", "weights", "large", "linear", "model"),
    ("float32", 2, (1, 1, 3), "any", "ones", "shifted", "leaf", "function"),
    ("bfloat16", 1, (3, 2, 16), "some of no rank", "mean", "normal", "leaf", "model"),
    ("float16", 2, (13, 1, 33), "some of no rank", "loss scale", "masked", "linear", "model"),
    ("float16", 4, (5, 2, 7), "any", "loss mask", "normal", "linear", "function"),
    ("float64", 1, (13, 1, 33), "one rank", "mean", "large", "leaf", "function"),
    ("float64", 4, (3, 2, 16), "some of no rank", "ones", "shifted", "linear", "model"),
    ("float32", 2, (5, 2, 7), "some of no rank", "loss mask", "large", "leaf", "function"),
    ("float16", 1, (3, 2, 16), "one rank", "weights", "masked", "leaf", "function"),
    ("float64", 1, (5, 2, 7), "any", "loss scale", "shifted", "linear", "function"),
    ("bfloat16", 1, (13, 1, 33), "any", "loss mask", "shifted", "linear", "model"),
    ("float32", 2, (3, 2, 16), "one rank", "loss scale", "normal", "leaf", "function"),
    ("float32", 4, (5, 2, 7), "one rank", "mean", "masked", "linear", "model"),
    ("float64", 1, (1, 1, 3), "one rank", "loss mask", "masked", "linear", "model"),
    ("bfloat16", 2, (5, 2, 7), "any", "weights", "masked", "leaf", "model"),
    ("float16", 2, (1, 1, 3), "some of no rank", "mean", "shifted", "leaf", "model"),
    ("float32", 4, (13, 1, 33), "some of no rank", "weights", "normal", "leaf", "model"),
    ("bfloat16", 4, (1, 1, 3), "one rank", "loss scale", "large", "leaf", "function"),
    ("float16", 2, (3, 2, 16), "any", "ones", "large", "linear", "model"),
    ("float64", 1, (13, 1, 33), "one rank", "ones", "normal", "linear", "model"),
    ("bfloat16", 1, (5, 2, 7), "one rank", "ones", "masked", "leaf", "model"),
    ("float64", 2, (3, 2, 16), "one rank", "weights", "shifted", "linear", "function"),
    ("float16", 2, (1, 1, 3), "any", "mean", "normal", "linear", "function"),
    ("float32", 1, (3, 2, 16), "some of no rank", "loss mask", "masked", "linear", "model"),
]
# fmt: on
EXAMPLES = [  # dtype, ranks, and how many times larger than the rest what all output weights have in common is
    ("float32", 1, 0.0),
    ("float32", 2, 0.0),
    ("float32", 4, 0.0),
    ("float32", 1, 4.0),
    ("float16", 1, 0.0),
    ("bfloat16", 1, 0.0),
]
DTYPES = ("float32", "float16", "bfloat16", "float64")
MANY = 8209  # a prime, so that no block of tokens or of classes divides it, and beyond the usual sizes of blocks
LARGE = {  # ranks, shape; "wider" has classes beyond 2^15, "widest" beyond 2^16
    "long": (1, (MANY, 1, 3)),
    "wide": (2, (3, 1, MANY)),
    "wider": (1, (5, 1, 65521)),
    "widest": (1, (5, 1, 131101)),
}
SHAPES = ((10,), (2, 2, 3), (3, 3, 3), (2, 1, 2, 2), (2, 0))  # of labels: one dimension to four; and no label
DISTANCES = (0.0, 1.0, 20.0, 86.0, 88.0, 95.0, 103.0, 104.0, 110.0, 300.0, 4e4, 1.2e5, 1e6, 1e30, math.inf)
HIDDEN = 6
FLOAT32 = 2.0**-17
PRODUCTS = 2.0**-15
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
IN_PLACE = "modified by an inplace operation"  # what PyTorch says of a saved tensor that was changed
TALKING = {"c10d", "c10d_functional", "_c10d_functional"}  # the namespaces of PyTorch's collectives
REDUCED = 2  # calls of a forward: the largest logits; and the targets' logits and the sums, which go together
RANKS = 4
SIZES = (1, 2, 4)  # of tensor-parallel groups whose ranks follow one another in the world
APART = "apart"  # groups of two whose ranks do not, as initialize_model_parallel makes with order="dp-tp"
SECONDS = 120  # for all ranks together; they take two
LAST = 30  # lines of a rank that are shown


class Case:
    """One value of each factor: the whole inputs, a rank's part of them, and the reference."""

    def __init__(self, torch, *values, hidden=HIDDEN, common=0.0, replica=0):
        self.torch, self.factors = torch, dict(zip(FACTORS, values, strict=True))
        self.replica = functools.partial(Case, torch, *values, hidden=hidden, common=common)
        self.dtype, (length, batch, part) = getattr(torch, self["dtype"]), self["shape"]
        self.classes = part * self["ranks"]
        random = torch.Generator().manual_seed(19 + replica)
        normal = functools.partial(torch.randn, generator=random)
        self.hidden = normal(length, batch, hidden).to(self.dtype)
        # What all output weights have in common cancels in the gradient of the hidden states.
        self.weight = (normal(self.classes, hidden) + common * normal(hidden)).to(self.dtype)
        self.offset = self.shift(normal(self.classes))
        self.targets = self.choose(torch.randint(self.classes, (length, batch), generator=random))
        self.above = self.weigh(normal(length, batch))

    def __getitem__(self, name):
        """Return the value of a factor."""
        return self.factors[name]

    def shift(self, normal):
        """Return what is added to the logits of each class."""
        if self["values"] == "shifted":
            return normal.new_full((self.classes,), 100.0).to(self.dtype)
        if self["values"] == "masked":  # as for classes that pad the vocabulary
            return normal.zero_().index_fill_(0, self.torch.arange(1, self.classes, 3), -math.inf).to(self.dtype)
        return normal.zero_().to(self.dtype)

    def choose(self, targets):
        """Return the targets: never a class that is masked out."""
        if self["targets"] == "one rank":
            targets = targets % self["shape"][2] + self.classes - self["shape"][2]
        targets = targets - (targets % 3 == 1).long() if self["values"] == "masked" else targets
        if self["targets"] == "some of no rank":
            targets.view(-1)[::4] = -100
            targets.view(-1)[3::4] = self.classes
        return targets

    def weigh(self, normal):
        """Return the gradient of the losses that comes from above, in float32."""
        ones = self.torch.ones_like(normal)
        return {
            "ones": ones,
            "mean": self.torch.tensor(1 / normal.numel()).expand(normal.shape),
            "weights": normal,
            "loss mask": (self.torch.arange(normal.numel()).view(normal.shape) % 3 != 1).float() / normal.numel(),
            "loss scale": ones * 1024,
        }[self["gradient"]]

    def leaves(self, rank):
        """Return hidden states, the rank's part of the weights, and its logits, ready for autograd."""
        rows = slice(rank * self["shape"][2], (rank + 1) * self["shape"][2])
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight[rows].clone().requires_grad_()
        factor = 6.0 if self["values"] == "large" else 1.0
        logits = hidden @ weight.t() * factor + self.offset[rows]
        if self["producer"] == "leaf":
            logits = logits.detach().requires_grad_()
        return hidden, weight, logits

    def reference(self, logits):
        """Return losses and gradient in float64 for the whole logits; both functions compute in float32 on them."""
        wide = logits.float().double()
        mine = (self.targets >= 0) & (self.targets < self.classes)
        index = self.targets.where(mine, 0).unsqueeze(-1)
        # A target of no rank counts as if its logit were the largest, and is no class in the gradient.
        chosen = wide.gather(-1, index).squeeze(-1).where(mine, wide.amax(-1))
        gradient = wide.softmax(-1).scatter_add(-1, index, -mine.double().unsqueeze(-1))
        return wide.logsumexp(-1) - chosen, gradient * self.above.double().unsqueeze(-1)

    def tolerance(self):
        """Return how far the gradient may be from the reference."""
        return FLOAT32 + UNIT_ROUNDOFF.get(self["dtype"], 0.0)

    def role(self):
        """Return what a case's check is: what is right in the release is a control."""
        return "control" if self["dtype"] == "bfloat16" else "defect"


class WrongShapeError(Exception):
    """The release returned losses of another shape than the targets: it is at fault, though it did not raise."""


class Doors:
    """The entries of the release, called alike."""

    def __init__(self, fused, unfused, module, state):
        self.fused_module, self.unfused_module, self.language, self.state = fused, unfused, module, state
        self.replica = 0  # of the data-parallel ones, counted from the one that is judged
        self.handed = []  # to the release: names, tensors, layouts, and the values and versions that they are to keep

    def loss(self, logits, targets, group, *, fused=True, entry="function"):
        """Return the losses of a rank's logits; the release gets a copy of the targets."""
        self.state._TENSOR_MODEL_PARALLEL_GROUP = group  # noqa: SLF001 - where older releases look for it
        kept = None if logits.dtype == self.torch.float32 else version(logits)  # forward may overwrite fp32 ones
        self.handed.append(("the logits", logits, layout(logits), None, kept))
        labels = self.hand("the targets", targets.t() if entry == "model" else targets)
        if entry == "model":
            config = types.SimpleNamespace(cross_entropy_loss_fusion=fused, cross_entropy_fusion_impl="native")
            groups = types.SimpleNamespace(tp=group)
            model = types.SimpleNamespace(config=config, pg_collection=groups, tp_group=group)
            model.model_comm_pgs = groups  # the name in 0.14.0
            loss = self.language.LanguageModule.compute_language_model_loss(model, labels, logits)
        else:
            module = self.fused_module if fused else self.unfused_module
            function = getattr(module, "fused_" * fused + "vocab_parallel_cross_entropy")
            named = {"tp_group": group} if "tp_group" in inspect.signature(function).parameters else {}
            loss = function(logits, labels, **named)
        shape, wanted = getattr(loss, "shape", None), targets.t().shape if entry == "model" else targets.shape
        if shape != wanted:
            raise WrongShapeError(f"losses of shape {shape}, not {wanted}")
        return loss.t() if entry == "model" else loss

    def step(self, case, rank, group, *, fused=True):
        """Go forward and backward; return the logits as they were, the losses, and the gradients."""
        hidden, weight, logits = case.leaves(rank)
        given = logits.detach().clone()
        loss = self.loss(logits, case.targets, group, fused=fused, entry=case["entry"])
        leaves = (logits,) if case["producer"] == "leaf" else (logits, hidden, weight)
        gradients = self.gradients_of(loss, leaves, case.above)
        return {"logits": given, "loss": loss.detach(), "gradients": gradients}

    def gradients_of(self, loss, leaves, above, **named):
        """Return the gradients of the leaves: zeros where there is none, which is wrong almost everywhere."""
        if not loss.requires_grad:
            return [self.torch.zeros_like(leaf) for leaf in leaves]
        if above is not None and not above.requires_grad:
            above = self.hand("the gradient from above", above)
        found = self.torch.autograd.grad(loss, leaves, above, allow_unused=True, **named)
        return [self.torch.zeros_like(leaf) if x is None else x for x, leaf in zip(found, leaves, strict=True)]

    def hand(self, name, tensor):
        """Return a copy for the release, of the same strides: it has no business to change what is the caller's."""
        given = copy.deepcopy(tensor.detach())
        self.handed.append((name, given, layout(given), tensor.detach().clone(), version(given)))
        return given

    def altered(self):
        """Name what the release was given and has changed since the last time that this was asked."""
        handed, self.handed = self.handed, []
        moved = [name for name, given, before, *_ in handed if layout(given) != before]
        moved += [f"the version of {name}" for name, given, *_, kept in handed if kept not in (None, version(given))]
        return moved + [name for name, given, _, values, _ in handed if values is not None and not given.equal(values)]

    def forget(self, *tensors):
        """Ask no more of these that they stay as they are, and keep none of them alive."""
        self.handed = [each for each in self.handed if all(each[1] is not x for x in tensors)]


def layout(tensor):
    """Return how the elements of a tensor lie in memory."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def version(tensor):
    """Return how often a tensor counts as changed in place; autograd refuses a saved one whose number has changed."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - PyTorch's documented name


def norm_error(found, wanted):
    """Return the norm of the difference over the norm of what is wanted; infinity for nan, which max() would lose."""
    wanted = wanted.double()
    error = float((found.double() - wanted).norm() / wanted.norm())
    return math.inf if math.isnan(error) else error


# What the ranks measure. Each function runs on every rank of its group.


def both(doors, case, rank, group):
    """Go through the fused function twice and through the unfused one once."""
    case, names = case.replica(replica=doors.replica), ("fused", "again", "unfused")
    return {name: doors.step(case, rank, group, fused=name != "unfused") for name in names}


def small(torch, dtype, replica=0):
    """Return the case of one rank that the checks of one dtype use."""
    return Case(torch, dtype, 1, (5, 2, 7), "any", "weights", "normal", "linear", "function", replica=replica)


def started(doors, dtype, rank, group):
    """Return a small case, its logits and its losses."""
    case = small(doors.torch, dtype, doors.replica)
    logits = case.leaves(rank)[2]
    return case, logits, doors.loss(logits, case.targets, group)


def returned(doors, dtype, rank, group):
    """Return the dtype that backward itself returns, before autograd casts it to that of the logits."""
    above = []
    _, logits, loss = started(doors, dtype, rank, group)
    function_node(loss).register_prehook(lambda given: above.extend(copy.deepcopy(given)))
    doors.gradients_of(loss, [logits], small(doors.torch, dtype, doors.replica).above)
    node = function_node(started(doors, dtype, rank, group)[2])
    return {"dtype": str(getattr(node.apply(*above)[0], "dtype", None)).removeprefix("torch.")}


def function_node(loss):
    """Return the node of the autograd function written in Python: the losses may be made from what it returns."""
    import torch

    nodes = [loss.grad_fn]
    while not isinstance(nodes[-1], torch.autograd.function.BackwardCFunction):
        nodes += [each for each, _ in nodes.pop().next_functions if each is not None]
    return nodes[-1]


def copies(doors, dtype, rank, group):
    """Count the bytes of new tensors of the logits' size that are made in backward, autograd's own among them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    case, logits, loss = started(doors, dtype, rank, group)
    made = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            old = {x.untyped_storage().data_ptr() for x in args if isinstance(x, case.torch.Tensor)}
            if isinstance(found, case.torch.Tensor) and found.numel() == logits.numel():
                made.append(0 if found.untyped_storage().data_ptr() in old else found.nbytes)
            return found

    with Mode():
        doors.gradients_of(loss, [logits], case.above)
    return {"bytes": sum(made), "limit": logits.nbytes}


def held(doors, dtype, rank, group):
    """Count the bytes that forward holds for backward."""
    case, saved = small(doors.torch, dtype, doors.replica), []
    logits = case.leaves(rank)[2]
    with case.torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
        doors.loss(logits, case.targets, group)
    return {"bytes": sum(saved), "limit": logits.numel() * 4 + case.targets.numel() * 9}


def second(doors, dtype, rank, group):
    """Go backward a second time; return what came of it, and the first gradient before and after."""
    case, logits, loss = started(doors, dtype, rank, group)
    (first,) = doors.gradients_of(loss, [logits], case.above, retain_graph=True)
    before, refused = first.clone(), ""
    try:
        doors.gradients_of(loss, [logits], case.above)
    except RuntimeError as error:
        refused = str(error)
    return {"refused": IN_PLACE in refused, "same": case.torch.equal(first, before)}


def kept(doors, dtype, rank, group):
    """Say whether forward and backward leave the logits as they were."""
    case, logits, loss = started(doors, dtype, rank, group)
    before = case.leaves(rank)[2]
    doors.gradients_of(loss, [logits], case.above)
    return {"same": case.torch.equal(before, logits)}


def shared(doors, dtype, rank, group):
    """Use the logits in a second term, whose gradient is 0.25 everywhere, and double the sum in place in a hook."""
    case = small(doors.torch, dtype, doors.replica)
    given, logits = case.leaves(rank)[2].detach(), case.leaves(rank)[2]
    logits.register_hook(lambda x: x.mul_(2))
    term = (logits * 0.25).sum()  # before forward overwrites fp32 logits
    loss = doors.loss(logits, case.targets, group)
    (gradient,) = doors.gradients_of((loss * case.above).sum() + term, [logits], None)
    return {"logits": given, "gradient": gradient}


def along(case, logits):
    """Return a direction among the gradients of these logits: one that their dtype can hold."""
    return case.torch.arange(logits.numel()).sin().view_as(logits).to(logits.dtype)


def weighted(doors, dtype, rank, group):
    """Return how the logits' gradient, along one direction, depends on the gradient that comes from above."""
    case = small(doors.torch, dtype, doors.replica)
    logits, above = case.leaves(rank)[2], doors.hand("the gradient from above", case.above).requires_grad_()
    given = logits.detach().clone()
    (gradient,) = doors.gradients_of(doors.loss(logits, case.targets, group), [logits], above, create_graph=True)
    (derivative,) = doors.gradients_of(gradient, [above], along(case, given))
    return {"logits": given, "derivative": derivative}


def interleaved(doors, dtypes, rank, group):
    """Go forward with each dtype, then backward with each; name the gradients that differ from one at a time."""
    pairs = [started(doors, dtype, rank, group) for dtype in dtypes]
    found = [doors.gradients_of(loss, [logits], case.above)[0] for case, logits, loss in pairs]
    alone = [doors.step(case, rank, group)["gradients"][0] for case, _, _ in pairs]
    differ = [dtype for dtype, x, y in zip(dtypes, found, alone, strict=True) if not doors.torch.equal(x, y)]
    return {"differ": ", ".join(differ)}


def evaluated(doors, dtype, rank, group):
    """Return the losses where no gradient is asked for: under no_grad, of logits without one, in inference_mode."""
    case, found = small(doors.torch, dtype, doors.replica), {}
    torch, given = case.torch, case.leaves(rank)[2].detach().clone()
    for name, mode in (("leaf", torch.no_grad), ("no leaf", torch.no_grad), ("inference", torch.inference_mode)):
        logits = case.leaves(rank)[2]
        with mode():
            found[name] = doors.loss(logits if name == "leaf" else logits.detach(), case.targets, group).clone()
    return {"logits": given, "losses": found | {"grad mode": doors.loss(given.clone(), case.targets, group)}}


def by_name(doors, dtype, rank, group):
    """Go forward and backward with arguments by name; return whether this gives the bits that it gives by position."""
    case, logits, loss = started(doors, dtype, rank, group)
    wanted = (loss.detach(), *doors.gradients_of(loss, [logits], case.above))
    logits, function = case.leaves(rank)[2], doors.fused_module.fused_vocab_parallel_cross_entropy
    named = {"tp_group": group} if "tp_group" in inspect.signature(function).parameters else {}
    try:
        loss = function(vocab_parallel_logits=logits, target=case.targets.clone(), **named)
    except TypeError as error:  # of the call itself, which is here
        return {"same": False, "refused": str(error)}
    found = (loss.detach(), *doors.gradients_of(loss, [logits], case.above))
    return {"same": all(map(case.torch.equal, found, wanted))}


def layouts(doors, dtype, rank, group):
    """Go backward with gradients from above of several strides, or with none; name those that give other bits."""
    case = small(doors.torch, dtype, doors.replica)
    above = case.above
    given = {
        "transposed": above.t().contiguous().t(),
        "one row": above[:1].expand(above.shape),
        "one column": above[:, :1].expand(above.shape),
        "every second": above.repeat_interleave(2, 1)[:, ::2],
    }
    differ = []
    for name, strided in given.items():
        found = []
        for each in (strided, strided.clone(memory_format=case.torch.contiguous_format)):
            _, logits, loss = started(doors, dtype, rank, group)
            found += doors.gradients_of(loss, [logits], each)
        differ += [] if case.torch.equal(*found) else [name]
    differ += ["undefined"] if undefined(doors, dtype, rank, group).any() else []
    return {"differ": ", ".join(differ)}


def undefined(doors, dtype, rank, group):
    """Return the gradient where none comes from above: autograd then hands over zeros, or None to who asks for it."""

    class Stop(doors.torch.autograd.Function):
        forward, backward = staticmethod(lambda _, loss: loss.clone()), staticmethod(lambda *_: None)

    case, logits, loss = started(doors, dtype, rank, group)
    return doors.gradients_of(Stop.apply(loss), [logits], case.above)[0]


def sliced(doors, dtype, rank, group):
    """Go forward and backward with logits and targets that are slices; return what came of each slice."""
    case = small(doors.torch, dtype, doors.replica)
    given, found = case.leaves(rank)[2].detach(), {}
    length, batch, classes = given.shape
    for name, shape, at in (
        ("of padded classes", (length, batch, classes + 2), (slice(None), slice(None), slice(classes))),
        ("of a longer sequence", (length + 1, batch, classes), (slice(1, None),)),
        ("every second of a batch", (length, 2 * batch, classes), (slice(None), slice(1, None, 2))),
    ):
        larger = given.new_full(shape, 9.0)
        larger[at] = given
        leaf = larger.clone().requires_grad_()
        labels = case.targets.repeat_interleave(2, 1)[:, ::2]
        loss = doors.loss(leaf[at], labels, group)
        (gradient,) = doors.gradients_of(loss, [leaf], case.above)
        beside, rest = gradient.clone(), leaf.detach() != larger
        beside[at], rest[at] = 0, False
        stray = int(beside.count_nonzero()) + int(rest.sum())
        found[name] = {"loss": loss.detach(), "gradient": gradient[at], "stray": stray}
    return {"logits": given, "slices": found}


def loss_changed(doors, dtype, rank, group):
    """Mask and divide the losses in place; return whether this gives the bits that it gives out of place."""
    case, logits, loss = started(doors, dtype, rank, group)
    mask = (case.torch.arange(loss.numel()).view_as(loss) % 3 != 1).float()
    wanted = loss * mask / 3
    (gradient,) = doors.gradients_of(wanted, [logits], case.above)
    _, logits, loss = started(doors, dtype, rank, group)
    loss.mul_(mask).div_(3)
    return loss.equal(wanted) and doors.gradients_of(loss, [logits], case.above)[0].equal(gradient)


def targets_changed(doors, dtype, rank, group):
    """Change the targets in place after forward; return whether the gradient is that of forward's."""
    case, logits = small(doors.torch, dtype, doors.replica), small(doors.torch, dtype, doors.replica).leaves(rank)[2]
    loss = doors.loss(logits, case.targets, group)
    _, targets, *_ = doors.handed.pop()  # what the release was given, which is to change here
    targets.add_(1).remainder_(case.classes)
    return doors.gradients_of(loss, [logits], case.above)[0].equal(doors.step(case, rank, group)["gradients"][0])


def logits_changed(doors, dtype, rank, group):
    """Clear the logits after forward, which made fp32 ones of its own; return whether the gradient is the same."""
    case, logits, loss = started(doors, dtype, rank, group)
    doors.forget(logits)
    logits.detach().zero_()
    return doors.gradients_of(loss, [logits], case.above)[0].equal(doors.step(case, rank, group)["gradients"][0])


def changed(doors, dtype, rank, group):
    """Let the caller change in place what is his between forward and backward; name what he may not change."""
    differ = []
    for change in (loss_changed, targets_changed, *(() if dtype == "float32" else (logits_changed,))):
        try:
            same = change(doors, dtype, rank, group)
        except RuntimeError as error:
            if "inplace" not in str(error):  # PyTorch raises, and not always below the code under test
                raise
            traceback.print_exc()
            same = False
        differ += [] if same else [change.__name__]
    return {"differ": ", ".join(differ)}


def released(doors, dtype, rank, group):
    """Go forward and backward and keep the losses alone; count the bytes as large as the logits that live on.

    A caller keeps the losses of many steps to report them. Copies made on the way are counted, too.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    case, made = small(doors.torch, dtype, doors.replica), {}
    logits = case.leaves(rank)[2]

    def note(_, found):
        for each in tensors_in(found):
            storage = each.untyped_storage()
            if storage.nbytes() >= 2 * case.classes * case.targets.numel():  # the smallest gradient
                made[StorageWeakRef(storage)] = storage.nbytes()

    with watching(note):
        loss = doors.loss(logits, case.targets, group)
        gradients = doors.gradients_of(loss, [logits], case.above)
    doors.handed.clear()
    del logits, gradients
    living = {reference.cdata: count for reference, count in made.items() if not reference.expired()}
    return {"bytes": sum(living.values()), "limit": 0, "losses": loss.numel(), "made": len(made)}


def tensors_in(given):
    """Return the tensors anywhere in what an operator is given or returns."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]


@contextlib.contextmanager
def watching(note):
    """Call `note` with each operator and its arguments and result, those of backward among them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            note((function, args), found)
            return found

    with Mode():
        yield


def compact(doors, dtype, rank, group):
    """Return how the gradient lies in memory that a hook on the logits of a linear layer sees: by itself, and dense.

    Else the products that take it copy it, or it holds memory that nobody reads.
    """
    case, logits, loss = started(doors, dtype, rank, group)
    seen = []
    logits.register_hook(lambda x: seen.append((x.is_contiguous(), x.untyped_storage().nbytes())))
    doors.gradients_of(loss, [logits], case.above)
    return {"same": seen == [(True, logits.nbytes)], "contiguous, bytes": str(seen)}


def of_temporary(doors, case, rank, group, run=lambda function: function()):
    """Compute losses of logits that nobody keeps, and let `run` do it; return the logits as they were, their gradient.

    A hook catches the gradient, since there are no logits to ask it for: so it is in a model, whose output layer makes
    them and whose backward asks for the weights' gradients.
    """
    hidden, weight, given = case.leaves(rank)
    given, caught = given.detach().clone(), []

    def losses():
        logits = hidden @ weight.t() + case.offset[: case.classes]
        logits.register_hook(caught.append)
        loss = doors.loss(logits, case.targets, group)
        doors.forget(logits)
        return loss

    loss = run(losses)
    doors.gradients_of(loss, [hidden, weight], case.above)
    return {"logits": given, "gradient": caught[0] if caught else case.torch.zeros_like(given)}


def temporary(doors, dtype, rank, group):
    """Go backward when the logits are gone: nothing about them can be looked up any more."""
    return of_temporary(doors, small(doors.torch, dtype, doors.replica), rank, group)


def unpacked(doors, dtype, rank, group):
    """Go backward with copies of what forward saved, as offloading makes them: what was tied to the objects is gone."""

    def run(function):
        hooks = doors.torch.autograd.graph.saved_tensors_hooks
        with hooks(lambda x: x.detach().clone(), lambda x: x.clone()):
            return function()

    return of_temporary(doors, small(doors.torch, dtype, doors.replica), rank, group, run)


def recomputed(doors, dtype, rank, group):
    """Go backward through a checkpoint, which computes again what forward saved."""
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return of_temporary(doors, small(doors.torch, dtype, doors.replica), rank, group, run)


def collectives(doors, case, rank, group):
    """Count the collectives of a forward and a backward, and the bytes that they are given.

    One of the largest logits and one of the rest, three numbers of float32 a token: the fusion is there for that, and
    whoever asks for it gets it for every dtype.
    """
    called = []

    def note(call, _):
        if call[0].namespace in TALKING and "wait" not in call[0].name():
            called.append(sum(each.nbytes for each in tensors_in(call[1])))

    with watching(note):
        doors.step(case.replica(replica=doors.replica), rank, group)
    limit = {"calls": REDUCED, "bytes": 3 * 4 * case.targets.numel()}
    return {"calls": len(called), "bytes": sum(called), "limit": limit}


def on_device(doors, dtype, rank, group):
    """Go forward and backward on tensors without memory; name what needs a number of theirs, or is made elsewhere.

    On a GPU the host would wait for the one and copy the other, which are refused while a CUDA graph is captured. A
    number without dimensions may come from the host.
    """
    case, made = small(doors.torch, dtype, doors.replica), []
    logits, labels, above = (x.detach().to("meta") for x in (case.leaves(rank)[2], case.targets, case.above))
    logits.requires_grad_()
    function = doors.fused_module.fused_vocab_parallel_cross_entropy
    named = {"tp_group": group} if "tp_group" in inspect.signature(function).parameters else {}

    def note(call, found):
        made.extend(call[0].name() for each in tensors_in(found) if each.dim() and not each.is_meta)

    try:
        with watching(note):
            function(logits, labels, **named).backward(above)
    except (RuntimeError, NotImplementedError) as error:  # PyTorch raises it, and not the code under test
        traceback.print_exc()
        return {"same": False, "refused": str(error)[:200]}
    wanted = (logits.dtype, logits.shape)
    return {"same": not made and (logits.grad.dtype, logits.grad.shape) == wanted, "made elsewhere": ", ".join(made)}


def read(doors, dtype, rank, group):
    """Let a term of the caller's save the logits before forward; return whether it can go backward after that.

    Logits that are not fp32 are only read, and so may not count as changed.
    """
    case = small(doors.torch, dtype, doors.replica)
    logits = case.leaves(rank)[2]
    term = logits.square().sum()
    loss = doors.loss(logits, case.targets, group)
    (wanted,) = doors.gradients_of(loss, [logits], case.above)
    try:
        (gradient,) = case.torch.autograd.grad(term, [logits])
    except RuntimeError as error:
        if IN_PLACE not in str(error):
            raise
        return {"same": False, "refused": str(error)[:200]}
    return {"same": gradient.equal(2 * logits) and wanted.shape == gradient.shape}


def mismatched(doors, dtype, rank, group):
    """Give targets [batch, sequence], which would be the targets of other tokens; return whether that is refused."""
    case = small(doors.torch, dtype, doors.replica)
    try:
        doors.loss(case.leaves(rank)[2], case.targets.t().contiguous(), group)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return {"refused": True}
    return {"refused": False}


def autocast(doors, dtype, rank, group):
    """Go forward and backward while autocast asks for a dtype that the logits do not have."""
    case = small(doors.torch, dtype, doors.replica)
    logits = case.leaves(rank)[2]
    given = logits.detach().clone()
    other = case.torch.float16 if dtype == "bfloat16" else case.torch.bfloat16
    with case.torch.autocast("cpu", other):
        (gradient,) = doors.gradients_of(doors.loss(logits, case.targets, group), [logits], case.above)
    return {"logits": given, "gradient": gradient}


def overflowing(doors, scale, rank, group):
    """Go backward in fp16 with a loss scale that is beyond its range."""
    case, logits, loss = started(doors, "float16", rank, group)
    given = logits.detach().clone()
    (gradient,) = doors.gradients_of(loss, [logits], case.torch.full(loss.shape, scale))
    return {"logits": given, "gradient": gradient}


class Distant(Case):
    """Labels whose logits lie this far below the largest of their rows, where an exponential of them is 0."""

    def __init__(self, torch, dtype, replica=0):
        widest = 1.2e5 if dtype == "float16" else 1e30  # which reach from its largest number to the smallest
        distances = [each for each in DISTANCES if each <= widest] + [math.inf]
        super().__init__(
            torch, dtype, 1, (len(distances), 1, 5), "any", "weights", "normal", "leaf", "function", replica=replica
        )
        self.replica = functools.partial(Distant, torch, dtype)
        rows = torch.arange(len(distances)).unsqueeze(1)
        self.targets = (3 * rows + replica) % self.classes
        place = (torch.arange(self.classes) - self.targets) % self.classes / (self.classes - 1)  # 0: the label
        far = torch.tensor(distances, dtype=torch.float64).unsqueeze(1)
        finite = far.where(far.isfinite(), 1.0)
        self.rows = ((place - 0.5) * finite).masked_fill(far.isinf() & (place == 0), -math.inf).to(self.dtype)

    def leaves(self, rank):
        """Return the rank's logits, after nothing that makes them."""
        part = self["shape"][2]
        return None, None, self.rows[:, rank * part : (rank + 1) * part].unsqueeze(1).clone().requires_grad_()


def distant(doors, case, rank, group):
    """Go forward and backward with labels far below the largest logit."""
    return doors.step(case.replica(replica=doors.replica), rank, group)


def reshaped(doors, case, rank, group):
    """Go forward and backward with tokens in one dimension to four; name those whose bits are not those of two."""
    case, differ = case.replica(replica=doors.replica), []
    given = case.leaves(rank)[2].detach().flatten(0, 1)
    flat, above = case.targets.flatten(), case.above.flatten()
    for shape in SHAPES:
        count, found = math.prod(shape), []
        for each in (shape, (1, count)):
            cut = [x.repeat(3, *[1] * (x.dim() - 1))[:count].reshape(*each, *x.shape[1:]) for x in (given, flat, above)]
            logits = cut[0].clone().requires_grad_()
            loss = doors.loss(logits, cut[1], group)
            found.append((loss.detach().flatten(), *(x.flatten() for x in doors.gradients_of(loss, [logits], cut[2]))))
        differ += [] if all(map(case.torch.equal, *found)) else [str(shape)]
    return {"differ": ", ".join(differ)}


def labelled(doors, case, rank, group):
    """Go forward and backward with labels of several strides and of int32; name those that give other bits.

    Transposed ones may be refused, as the release does, whose copy of them keeps their strides.
    """
    torch, case = doors.torch, case.replica(replica=doors.replica)
    labels, (length, batch) = case.targets, case.targets.shape
    wide = torch.full((length + 2, 3 * batch + 1), -1)
    wide[1:-1, 1:-batch:2] = labels
    given = {
        "transposed": labels.t().contiguous().t(),
        "a slice of columns": torch.cat((labels[:, :1] * 0 - 1, labels, labels), 1)[:, 1 : batch + 1],
        "every second of a batch": wide[1:-1, 1:-batch:2],
        "every second of a sequence": labels.repeat_interleave(2, 0)[1::2],
        "one row": labels[:1].expand(length, batch),
        "one column": labels[:, :1].expand(length, batch),
        "one label": labels[:1, :1].expand(length, batch),
        "int32": labels.int(),
        "int32, transposed": labels.int().t().contiguous().t(),
    }
    differ = []
    for name, strided in given.items():
        found = []
        for each in (strided, strided.long().clone(memory_format=torch.contiguous_format)):
            logits = case.leaves(rank)[2]
            try:
                loss = doors.loss(logits, each, group)
            except RuntimeError as error:
                if "transposed" not in name or "view" not in str(error):
                    raise
                break
            found.append((loss.detach(), *doors.gradients_of(loss, [logits], case.above)))
        differ += [] if not found or all(map(torch.equal, *found)) else [name]
    return {"differ": ", ".join(differ)}


def unnoticed(doors, dtype, rank, group):
    """Change in place what backward needs; name each change after which it neither raises nor is right.

    What forward saved counts, and fp32 logits, in whose memory that lies; and what another term saved of fp32 logits
    before forward overwrote them.
    """
    case, torch = small(doors.torch, dtype, doors.replica), doors.torch
    (wanted,) = doors.step(case, rank, group)["gradients"][:1]
    changes = {
        "cleared": lambda logits, _: logits.detach().zero_(),
        "divided": lambda logits, _: logits.detach().div_(2.0),
        "one row": lambda logits, _: logits.detach()[1].add_(1.0),
        "clamped without gradients": lambda logits, _: logits.detach().clamp_(0.1, 0.2),
    }
    saved = function_node(started(doors, dtype, rank, group)[2]).saved_tensors
    for number in range(len(saved)):
        changes[f"saved {number}"] = lambda _, loss, at=number: function_node(loss).saved_tensors[at].logical_not_()
    differ = []
    for name, change in changes.items():
        _, logits, loss = started(doors, dtype, rank, group)
        doors.forget(logits)
        change(logits, loss)
        backward = functools.partial(doors.gradients_of, loss, [logits], case.above)
        differ += [] if raises_or_is(torch, backward, wanted) else [name]
    logits = case.leaves(rank)[2]
    term, right = logits.square().sum(), 2 * logits.detach()
    doors.loss(logits, case.targets, group)
    backward = functools.partial(torch.autograd.grad, term, [logits])
    differ += [] if raises_or_is(torch, backward, right) else ["another term"]
    return {"differ": ", ".join(differ)}


def raises_or_is(torch, backward, wanted):
    """Return whether a backward is refused because of a change in place, or gives what is wanted."""
    try:
        (found,) = backward()
    except RuntimeError as error:
        if IN_PLACE not in str(error):
            raise
        return True
    return torch.equal(found, wanted)


class Witness:
    """Something that the graph behind the logits refers to."""


def dropped(doors, case, rank, group):
    """Drop losses without a backward, after one and after one that keeps the graph; name what then lives on.

    Python's collector of cycles is off, as --manual-gc switches it off: what waits for it holds a GPU's memory.
    """
    case, left = case.replica(replica=doors.replica), []
    gc.disable()
    try:
        for how in ("without backward", "evaluated", "after backward", "after backward that keeps the graph"):
            left += [f"{name} {how}" for name in left_of(doors, case, (rank, group), how)]
    finally:
        gc.enable()
    return {"differ": ", ".join(left)}


def left_of(doors, case, at, how):
    """Name what is alive after a loss was dropped, of which its numbers alone are kept."""
    from torch.multiprocessing.reductions import StorageWeakRef

    torch, made, (rank, group) = doors.torch, {}, at

    class Behind(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            ctx.witness = Witness()
            watched["the graph of the model"] = weakref.ref(ctx.witness)
            return logits.clone()

        backward = staticmethod(lambda _, above: above)

    def note(_, found):
        for each in tensors_in(found):
            made[StorageWeakRef(each.untyped_storage())] = each.shape

    def run():
        logits = Behind.apply(leaf)
        watched["the logits"] = weakref.ref(logits)
        loss = doors.loss(logits, case.targets, group)
        watched["the losses"] = weakref.ref(loss)
        if loss.requires_grad:
            watched["forward's node"] = weakref.ref(function_node(loss))
        if how.startswith("after"):
            doors.gradients_of(loss, [leaf], case.above, retain_graph="keeps" in how)
        return loss.detach().clone()

    watched, leaf = {}, case.leaves(rank)[2].detach().requires_grad_()
    with watching(note), torch.set_grad_enabled(how != "evaluated"):
        numbers = run()
    doors.handed.clear()
    living = [name for name, reference in watched.items() if reference() is not None]
    mine = {StorageWeakRef(each.untyped_storage()).cdata for each in (numbers, leaf, case.targets, case.above)}
    kept = [list(shape) for each, shape in made.items() if each.cdata not in mine and not each.expired()]
    return living + [f"tensors {kept}"] * bool(kept)


# The ranks.


def attempt(function, tested):
    """Return what a measurement returned, or how it failed and whether the code under test did."""
    try:
        return function()
    except Exception as error:  # the process that judges reports it
        traceback.print_exc()
        distributed = importlib.import_module("torch.distributed")
        host = isinstance(error, (ImportError, MemoryError, OSError, distributed.DistError))
        host = host or "out of memory" in str(error)
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        fault = isinstance(error, WrongShapeError) or any(file.startswith(tuple(tested)) for file in files)
        told = f"it raised {type(error).__name__}: {error}"[:400]
        return {"error": told, "upstream": fault and not host, "traceback": traceback.format_exc()}


def speak(work, rank, folder):
    """Be one rank: run every job, and write down what was found."""
    log = os.open(f"{folder}/{work.count}.log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)  # standard output is the judge's, and what is wrong is looked for here
    os.dup2(log, 2)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the judge
    faulthandler.dump_traceback_later(work.seconds - 10, file=log)  # where it hangs
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    doors, distributed = work.doors, work.doors.torch.distributed
    store = distributed.FileStore(f"{folder}/{work.count}.store", work.count)
    limit = dt.timedelta(seconds=work.seconds + 60)  # after the judge, who says that a rank hangs: no wrong result
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=work.count, timeout=limit)
    kinds = [size for size in SIZES if size <= work.count] + [APART] * (work.count == RANKS)
    groups = {kind: own_group(distributed, members(kind, work.count), rank) for kind in kinds}
    jit = importlib.import_module("megatron.core.jit")
    jit.jit_fuser = work.fuser
    importlib.reload(doors.fused_module)
    doors.language.fused_vocab_parallel_cross_entropy = doors.fused_module.fused_vocab_parallel_cross_entropy
    found = {}
    for name, kind, function, given in work.jobs:
        print("job", name, flush=True)
        beside = members(kind, work.count)
        mine = next(number for number, group in enumerate(beside) if rank in group)
        doors.replica = len(beside) - 1 - mine
        measure = functools.partial(function, doors, given, beside[mine].index(rank), groups[kind])
        measured = attempt(measure, work.tested)
        altered = doors.altered()  # no error: ranks may differ in it
        measured |= {"altered": ", ".join(sorted({*altered}))} if altered else {}
        found[name] = measured if "error" in measured or doors.replica == 0 else {}
    doors.torch.save(found, f"{folder}/{work.count}.{rank}.unfinished")
    Path(f"{folder}/{work.count}.{rank}.unfinished").rename(f"{folder}/{work.count}.{rank}")
    print("done", flush=True)
    distributed.barrier()


def members(kind, count):
    """Return the ranks of each group of this kind: APART, or so many that follow one another."""
    if kind == APART:
        return [list(range(start, count, count // 2)) for start in range(count // 2)]
    return [list(range(start, start + kind)) for start in range(0, count, kind)]


def own_group(distributed, beside, rank):
    """Return the group that a rank is in; every rank makes every group."""
    made = [distributed.new_group(each) for each in beside]
    return next(group for group, each in zip(made, beside, strict=True) if rank in each)


def ranks(works, folder):
    """Run each world's ranks, and return what each found; or raise with the ranks that died or hang."""
    import torch

    context = multiprocessing.get_context("fork")  # Megatron is imported once, and no thread has computed yet
    places = [(work, rank) for work in works for rank in range(work.count)]
    processes = [context.Process(target=speak, args=(*place, folder), daemon=True) for place in places]
    until = time.monotonic() + works[0].seconds
    try:
        for process in processes:
            process.start()
        running, bad = processes, {}
        while running and not bad and time.monotonic() < until:
            ends = [process.sentinel for process in running]
            multiprocessing.connection.wait(ends, max(0.0, until - time.monotonic()))
            bad = bad_ends([process.exitcode for process in processes], places, folder)
            running = [process for process in running if process.exitcode is None]
        hang = {at: f"hangs after {works[0].seconds} s" for at, process in enumerate(processes) if process in running}
        refuse(bad or hang, places, folder)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    written = [torch.load(f"{folder}/{work.count}.{rank}", weights_only=True) for work, rank in places]
    for work in works:
        own = [at for at, (other, _) in enumerate(places) if other is work]
        for name, *_ in work.jobs:
            states = [name in written[at] and "error" in written[at][name] for at in own]
            usual = max((True, False), key=states.count)
            told = f"disagrees: {name} raised on ranks {states}"
            refuse({at: told for at, state in zip(own, states, strict=True) if state != usual}, places, folder)
    return {work.count: [written[at] for at, (other, _) in enumerate(places) if other is work] for work in works}


def bad_ends(statuses, places, folder):
    """Return what is wrong with which rank that has ended: asked often, it names the first, and none that it ends."""
    bad = {}
    for at, (status, (work, rank)) in enumerate(zip(statuses, places, strict=True)):
        if status:
            bad[at] = f"died: exit status {status}"
        elif status == 0 and not Path(f"{folder}/{work.count}.{rank}").exists():
            bad[at] = "ended without results"
    return bad


def refuse(bad, places, folder):
    """Raise with what is wrong with which rank, in the first line, and with their last lines."""
    named = {at: f"rank {places[at][1]} of {places[at][0].count}" for at in bad}
    told = ["; ".join(f"{named[at]} {what}" for at, what in bad.items())]
    for at in bad:
        log = Path(f"{folder}/{places[at][0].count}.log{places[at][1]}")
        lines = log.read_text(errors="replace").splitlines()[-LAST:] if log.exists() else []
        told += [f"last lines of {named[at]}:", *(f"    {line}" for line in lines)]
    if bad:
        raise RuntimeError("\n".join(told))


# What the judge makes of it. Each function gets the list of what the ranks of the group found.

DTYPE_OF = {"gradient": lambda step: step["gradients"][0], "loss": lambda step: step["loss"]}


def whole(found, *names):
    """Return the tensors of all ranks under these names, joined along the vocabulary."""
    import torch

    return torch.cat([functools.reduce(lambda x, name: x[name], names, each) for each in found], -1)


def judge_case(found, probe, name, case, way):
    """Judge losses and gradients of a case; the bits of a fused one are the other lane's, too, where they repeat."""
    losses, gradient = case.reference(whole(found, way, "logits"))
    mine = whole(found, way, "gradients", 0)
    errors = {"loss": max(norm_error(each[way]["loss"], losses) for each in found)}
    errors["gradient"] = norm_error(mine, gradient)
    limits = {"loss": FLOAT32, "gradient": case.tolerance()}
    dtypes = {key: sorted({str(of(each[way]).dtype) for each in found}) for key, of in DTYPE_OF.items()}
    agree = all(each[way]["loss"].equal(found[0][way]["loss"]) for each in found)
    if case["producer"] == "linear" and case["dtype"] in {"float32", "float64"}:
        errors |= products(found, case, gradient, way)
        limits |= {"dX": PRODUCTS, "dW": PRODUCTS}
    if way == "fused":
        say_outputs(probe, name, case, found)
        if case["ranks"] < RANKS:
            errors["differs from unfused"] = int((mine != whole(found, "unfused", "gradients", 0)).sum())
            limits["differs from unfused"] = 0
    right = dtypes == {"gradient": [str(case.dtype)], "loss": ["torch.float32"]}
    ok = right and agree and all(errors[key] <= limit for key, limit in limits.items())
    measured = errors | {"dtypes": dtypes, "ranks_agree": agree}
    return ok, {"measured": measured, "tolerance": limits, "unit": "relative error"}


def say_outputs(probe, name, case, found):
    """Say what every rank came to: its bits are the other lane's, too, where they repeat."""
    for rank, each in enumerate(found):
        first, again = each["fused"], each["again"]
        probe.output(f"{name}.loss.{rank}", first["loss"], must_match=again["loss"].equal(first["loss"]))
        gradient = first["gradients"][0]
        if case["dtype"] != "float16":
            repeats = again["gradients"][0].equal(gradient)
            probe.output(f"{name}.as_bfloat16.{rank}", gradient.bfloat16(), must_match=repeats)


def products(found, case, gradient, way):
    """Return the errors of the gradients of hidden states, summed over the ranks, and of the weights."""
    factor = 6.0 if case["values"] == "large" else 1.0
    hidden = sum(each[way]["gradients"][1].double() for each in found)
    weight = case.torch.cat([each[way]["gradients"][2] for each in found])
    wants = gradient @ case.weight.double() * factor
    flat = gradient.flatten(0, 1).t() @ case.hidden.double().flatten(0, 1) * factor
    return {"dX": norm_error(hidden, wants), "dW": norm_error(weight, flat)}


def judge_example(found, probe, name, case):
    """Judge the example of the report, and say its errors."""
    ok, values = judge_case(found, probe, name, case, "fused")
    for key in ("loss", "gradient", "dX", "dW"):
        if key in values["measured"]:
            probe.say("FIGURE", name=f"{name}.{key}", value=values["measured"][key], unit="1", spread=None)
    return ok, values


def judge_returned(found, dtype):
    """Judge that backward returns the logits' dtype, so that nothing is cast a second time outside the fusion."""
    return found[0]["dtype"] == dtype, {"measured": found[0]["dtype"], "tolerance": dtype, "unit": "dtype"}


def judge_bytes(found):
    """Judge a number of bytes."""
    measured, limit = found[0]["bytes"], found[0]["limit"]
    return measured <= limit, {"measured": measured, "tolerance": limit, "unit": "bytes"}


def judge_collectives(found):
    """Judge how often each rank talks to the others, and with how many bytes."""
    limit = found[0]["limit"]
    measured = {name: max(each[name] for each in found) for name in limit}
    ok = all(0 < measured[name] <= limit[name] for name in limit)
    return ok, {"measured": measured, "tolerance": limit, "unit": "calls, bytes"}


def judge_second(found):
    """Judge that a second backward is refused, and leaves the first gradient alone."""
    return found[0] == {"refused": True, "same": True}, {"measured": found[0]}


def judge_kept(found):
    """Judge what a job found to be as it has to be."""
    return found[0]["same"], {"measured": found[0]}


def judge_interleaved(found):
    """Judge that every gradient was the one of a step by itself."""
    return not found[0]["differ"], {"measured": found[0]}


def judge_sliced(found, case):
    """Judge the losses and gradients of every slice; and that nothing beside it was written or has a gradient."""
    losses, gradient = case.reference(found[0]["logits"])
    slices = found[0]["slices"]
    errors = {name: norm_error(each["gradient"], gradient) for name, each in slices.items()}
    lost = max(norm_error(each["loss"], losses) for each in slices.values())
    stray = sum(each["stray"] for each in slices.values())
    ok = max(errors.values()) <= case.tolerance() and lost <= FLOAT32 and stray == 0
    limits = dict.fromkeys(errors, case.tolerance()) | {"loss": FLOAT32, "stray": 0}
    return ok, {"measured": errors | {"loss": lost, "stray": stray}, "tolerance": limits, "unit": "relative error"}


def judge_distant(found, case, control):
    """Judge each loss by itself, and as a control that gradients are about right; else that they are."""
    losses, gradient = case.reference(whole(found, "logits"))
    within = [each["loss"].double() for each in found]
    off = [((x - losses).abs() / losses.abs().clamp(min=1.0)).where(x != losses, 0.0) for x in within]
    errors = {"loss": max(float(x.nan_to_num(nan=math.inf).max()) for x in off)}
    errors["gradient"] = norm_error(whole(found, "gradients", 0), gradient)
    rough = FLOAT32 + UNIT_ROUNDOFF["bfloat16"] + UNIT_ROUNDOFF.get(case["dtype"], 0.0)
    limits = {"loss": FLOAT32, "gradient": rough if control else case.tolerance()}
    ok = all(errors[key] <= limit for key, limit in limits.items())
    return ok, {"measured": errors, "tolerance": limits, "unit": "relative error"}


def judge_mismatched(found):
    """Judge that targets of another shape are refused."""
    return found[0]["refused"], {"measured": found[0]}


def judge_shared(found, case):
    """Judge the doubled sum of two gradients: two more roundings in the logits' dtype, of a larger sum."""
    wanted = 2 * (case.reference(found[0]["logits"])[1] + 0.25)
    error, tolerance = norm_error(found[0]["gradient"], wanted), FLOAT32 + 2 * UNIT_ROUNDOFF.get(case["dtype"], 0.0)
    return error <= tolerance, {"measured": error, "tolerance": tolerance, "unit": "relative error"}


def judge_autocast(found, case):
    """Judge a gradient by the reference, and its dtype by that of the logits."""
    gradient = found[0]["gradient"]
    error, tolerance = norm_error(gradient, case.reference(found[0]["logits"])[1]), case.tolerance()
    ok = error <= tolerance and gradient.dtype == case.dtype
    return ok, {"measured": error, "tolerance": tolerance, "unit": "relative error"}


def judge_weighted(found, case):
    """Judge a derivative by what is multiplied by the gradient from above: nothing in it is rounded but in float32."""
    logits = found[0]["logits"]
    factor = case.reference(logits)[1] / case.above.double().unsqueeze(-1)
    error = norm_error(found[0]["derivative"], (factor * along(case, logits).double()).sum(-1))
    return error <= FLOAT32, {"measured": error, "tolerance": FLOAT32, "unit": "relative error"}


def judge_evaluated(found, case):
    """Judge the losses of an evaluation, each in fp32."""
    wanted = case.reference(found[0]["logits"])[0]
    errors = {name: norm_error(loss, wanted) for name, loss in found[0]["losses"].items()}
    ok = all(error <= FLOAT32 for error in errors.values())
    ok = ok and all(loss.dtype == case.torch.float32 for loss in found[0]["losses"].values())
    return ok, {"measured": errors, "tolerance": FLOAT32, "unit": "relative error"}


def judge_overflowing(found, case, scale):
    """Judge that exactly the elements beyond fp16's range are infinite: a loss scaler looks for them."""
    case.above = case.torch.full_like(case.above, scale)
    wanted = case.reference(found[0]["logits"])[1].half()
    infinite = wanted.isinf()
    ok = infinite.any() and not infinite.all() and infinite.equal(found[0]["gradient"].isinf())
    return bool(ok), {"measured": int(found[0]["gradient"].isinf().sum()), "tolerance": int(infinite.sum())}


def checks(torch):
    """Return each check: its name, its kind of group, role, what they measure and on what, and how that is judged."""
    found = []
    for number, values in enumerate(CASES):
        case = Case(torch, *values)
        found.append((f"case{number:02}", case["ranks"], case.role(), both, case, (judge_case, case)))
    for dtype, count, common in EXAMPLES:
        values = (dtype, count, (63, 2, 1024 // count), "any", "mean", "normal", "linear", "function")
        case, name = (
            Case(torch, *values, hidden=32, common=common),
            f"example.{dtype}.{count}" + ".common" * (common > 0),
        )
        found.append((name, count, case.role(), both, case, (judge_example, case)))
    for dtype in DTYPES:
        for name, (count, shape) in LARGE.items():
            case = Case(torch, dtype, count, shape, "any", "weights", "normal", "leaf", "function")
            found.append((f"{name}.{dtype}", count, case.role(), both, case, (judge_case, case)))
        case = Case(torch, dtype, 2, (5, 2, 7), "any", "weights", "normal", "leaf", "function")
        found.append((f"apart.{dtype}", APART, case.role(), both, case, (judge_case, case)))
    for dtype in DTYPES:
        role, case = small(torch, dtype).role(), small(torch, dtype)
        found += [
            (f"returned.{dtype}", 1, role, returned, dtype, (judge_returned, dtype)),
            (f"copies.{dtype}", 1, role, copies, dtype, (judge_bytes,)),
            (f"held.{dtype}", 1, "control", held, dtype, (judge_bytes,)),
            (f"released.{dtype}", 1, "control", released, dtype, (judge_bytes,)),
            (f"compact.{dtype}", 1, "control", compact, dtype, (judge_kept,)),
            (f"temporary.{dtype}", 1, role, temporary, dtype, (judge_autocast, case)),
            (f"unpacked.{dtype}", 1, role, unpacked, dtype, (judge_autocast, case)),
            (f"recomputed.{dtype}", 1, role, recomputed, dtype, (judge_autocast, case)),
            (f"on_device.{dtype}", 1, "control", on_device, dtype, (judge_kept,)),
            (f"second.{dtype}", 1, "control", second, dtype, (judge_second,)),
            (f"shared.{dtype}", 1, role, shared, dtype, (judge_shared, case)),
            (f"weighted.{dtype}", 1, role, weighted, dtype, (judge_weighted, case)),
            (f"evaluated.{dtype}", 1, "control", evaluated, dtype, (judge_evaluated, case)),
            (f"by_name.{dtype}", 1, "control", by_name, dtype, (judge_kept,)),
            (f"layouts.{dtype}", 1, "control", layouts, dtype, (judge_interleaved,)),
            (f"sliced.{dtype}", 1, role, sliced, dtype, (judge_sliced, case)),
            (f"changed.{dtype}", 1, "control", changed, dtype, (judge_interleaved,)),
            (f"unnoticed.{dtype}", 1, "control", unnoticed, dtype, (judge_interleaved,)),
            (f"dropped.{dtype}", 1, "control", dropped, case, (judge_interleaved,)),
            (f"mismatched.{dtype}", 1, "control", mismatched, dtype, (judge_mismatched,)),
            (f"autocast.{dtype}", 1, role, autocast, dtype, (judge_autocast, case)),
        ]
        if dtype != "float32":
            found.append((f"kept.{dtype}", 1, "control", kept, dtype, (judge_kept,)))
            found.append((f"read.{dtype}", 1, "control", read, dtype, (judge_kept,)))
        for count in SIZES:
            case = Case(torch, dtype, count, (5, 2, 7), "any", "weights", "normal", "linear", "function")
            found.append((f"collectives.{dtype}.{count}", count, "control", collectives, case, (judge_collectives,)))
            if count > 1:
                continue  # a rank that raises alone in what follows leaves the others in another collective
            for function in (reshaped, labelled):
                found.append((f"{function.__name__}.{dtype}.1", 1, "control", function, case, (judge_interleaved,)))
            case = Distant(torch, dtype)
            found.append((f"distant.{dtype}.1", 1, "control", distant, case, (judge_distant, case, True)))
            found.append((f"distant.{dtype}.1.gradient", 1, role, distant, case, (judge_distant, case, False)))
    case, scale = small(torch, "float16"), 2.0**17
    found.append(("overflow", 1, "control", overflowing, scale, (judge_overflowing, case, scale)))
    order = ("float32", "bfloat16", "float64", "float16")  # the last is too narrow for the first
    found.append(("interleaved", 1, "control", interleaved, order, (judge_interleaved,)))
    return found


def of_group(found, kind):
    """Return what the ranks found whose group is judged: the last one, whose ranks are others in the world."""
    return [found[rank] for rank in members(kind, len(found))[-1]]


def judge_all(probe, results, name, role, function, *given):
    """Judge one check by what the ranks found; what a rank could not do is wrong, or a fault of this probe."""

    def measure():
        found = [each[name.removeprefix("unfused.")] for each in results]
        altered = [each["altered"] for each in found if "altered" in each]
        failed = [each for each in found if "error" in each]
        for each in failed[:1]:
            print(each["traceback"], file=sys.stderr)
        for rank, each in enumerate(found):
            if "error" in each and not each["upstream"] and not altered:
                raise RuntimeError(f"rank {rank} of {len(found)}, in {name}: {each['error']}")
        reasons = [each["error"] for each in failed] + [f"it altered {each}" for each in altered]
        return (False, {"reason": reasons[0]}) if reasons else function(found, *given)

    probe.judge(name, role, measure)


def load(probe, torch):
    """Load the release that is on the path."""
    names = (
        "megatron.core.fusions.fused_cross_entropy",
        "megatron.core.tensor_parallel.cross_entropy",
        "megatron.core.models.common.language_module.language_module",
        "megatron.core.parallel_state",
    )
    modules = [importlib.import_module(name) for name in names]
    for module in modules[:3]:
        probe.upstream(module)
    doors = Doors(*modules)
    doors.torch = torch
    return doors


def judge(probe, target):
    """Judge the release that is on the path."""
    if target != "cpu":
        raise NotImplementedError("the ranks talk through gloo: --target cpu")
    import torch

    torch.set_num_threads(1)  # the ranks are forked
    probe.say("TARGET", target=target, evidence="traced", device="cpu")
    doors = load(probe, torch)
    given = checks(torch)
    jobs = [(name, kind, measure, on) for name, kind, _, measure, on, _ in given]
    values = [(dtype, 1, (5, 2, 7), "any", "weights", "normal", "linear", "function") for dtype in DTYPES[:3]]
    cases = {f"compiled.{each[0]}": Case(torch, *each) for each in values}
    compiled = [(name, 1, both, case) for name, case in cases.items()]
    compiled.append(("compiled.dropped", 1, dropped, cases["compiled.float32"]))
    fuser = functools.partial(torch.compile, backend="aot_eager")
    work = functools.partial(types.SimpleNamespace, doors=doors, tested=probe.tested, seconds=SECONDS)
    plain, traced = work(count=RANKS, jobs=jobs, fuser=lambda x: x), work(count=1, jobs=compiled, fuser=fuser)
    with tempfile.TemporaryDirectory() as folder:
        written = ranks([plain, traced], folder)
    for name, kind, role, _, _, (function, *on) in given:
        results = of_group(written[RANKS], kind)
        if function is judge_case:
            judge_all(probe, results, f"unfused.{name}", "control", function, probe, name, *on, "unfused")
            judge_all(probe, results, name, role, function, probe, name, *on, "fused")
        elif function is judge_example:
            judge_all(probe, results, name, role, function, probe, name, *on)
        else:
            judge_all(probe, results, name, role, function, *on)
    for name, case in cases.items():
        judge_all(probe, written[1], name, case.role(), judge_case, probe, name, case, "fused")
    judge_all(probe, written[1], "compiled.dropped", "control", judge_interleaved)


if __name__ == "__main__":
    Probe().run(judge)
