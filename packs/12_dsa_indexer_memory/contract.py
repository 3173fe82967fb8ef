# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "megatron-core==0.19.2",
#   "numpy==2.3.5",
#   "packaging==26.3",
#   "torch==2.11.0",
#   "triton==3.6.0",
# ]
# ///
"""DSA without fused kernels holds the indexer's scores, and the loss's target, of all heads at once.

Symptom: Megatron's DSA runs out of memory at lengths whose results would fit easily: the score of one query row, key
and head is a float32 number, and tensors of all of them, [sq, b, heads, sk], stand beside each other. With 32 indexer
heads at batch 2 and 4096 tokens one such tensor is 4 GiB. With the indexer's loss the probabilities of the attention
heads that its target is made of, [b, heads, sq, sk], come to that, and backward makes both again.

Cause: _compute_index_scores multiplies, weights and sums whole tensors; bwd_fused_indexer_loss_naive does so for the
gradients; both losses take the softmax of all attention heads before they sum them. What is used of all these is
[b, sq, sk].

Scope: megatron.core's DSA where the fused kernels are off, absent, or decline the case. What is judged is how the peak
of live memory grows with a head, in units of one head's scores, 4 * b * sq * sk bytes: a tensor that has an element of
a byte or more for each row, key and head adds 0.25 at least, and all that grows with heads otherwise is linear in the
length, some hundredths here. So the limit is 0.25, whatever way a fix streams; that the peak has a part that does not
grow with heads is no defect. Checks `memory.*`, each in five settings (MEMORY): of the indexer's heads in the top-k
without a loss, and in the loss's forward and backward; of the attention's heads in its forward and backward.

    function                      what varies (SMALL has the values, LARGE the cases of many rows and heads)
    fused_qk_topk_naive           sizes, batch, heads, floats, strides, causal by default or by ends, additive masks of
                                  2 and 3 dimensions, float32 as upstream demands, with -inf alone or finite biases,
                                  bounds with keys in another order, relu, top-k of one, some, all; equal scores, and
                                  scores of 0, where relu's derivative is 0; no keys at all; autocast; index scores
                                  differentiated by autograd
    FusedDSAIndexerLoss           these, and attention heads, a key of one head expanded to all, sparse, real rows as
                                  [sq], [1, sq] and [b, sq], none of them, mean or sum, frozen inputs, the gradient of
                                  the loss, its coefficient; a second backward; heads split over two ranks; autocast
    compute_dsa_indexer_loss      the same loss, differentiated by autograd, by query and key, too

The checks `values.*` and `large.*` are controls: what is right in the release has to stay right. The reference is
float64, one head at a time, each derivative by autograd on tensors of one head. Which keys are the top-k is compared by
their scores, and the reference of the sparse loss takes those that upstream took. All inputs must be left as they were.
Two ranks are played one after the other: what each gives to all_reduce is noted first, and added in a second pass.

Tolerances: relative, in the norm. Everything is computed in float32: 2^-15, which is 512 roundings one after another,
for products of 20 numbers, sums over at most 61 heads and 2111 rows or keys (whose rounding errors grow like the root
of their number), and a softmax. A gradient is rounded to the dtype of its input besides, once and at the end: it may be
as far from the reference as the reference rounded to that dtype, and 2^-15 more, which is twice 256 roundings (a number
that they move by e may be rounded the other way, and is then 2 e farther). A fix that rounds anything else to half
precision adds to that. Top-k scores: 2^-15 of the largest. A gradient that is absent, or NaN, is infinitely wrong.

More controls: PyTorch's default dtype is another one, and what a process told PyTorch holds; inputs of two dtypes;
masks of keys alone (top-k); gradients of the gradients; checkpoints, and hooks that move what is saved away; training
follows an evaluation in inference mode, and no call leaves tensors behind, nor forward a quarter of float32 [b, sq, sk]
for backward (the release: a sixteenth, the top-k); every setting of MEMORY runs on device "meta", where no value can be
asked for, whatever the target; 61 query rows, fewer than a fix may take at a time, need no more than 8 times the scores
of all heads for them (the release: 4.3).

`traced` (--target cpu): the bytes of tensors on device "meta", which have sizes and no numbers, are added up operator
by operator, and subtracted when a storage dies; the values are computed on CPU tensors. `executed` is torch.cuda's
allocator (max_memory_allocated), and the values are those of the GPU. There the FIGURE lines are peak and time of a
step with 32 indexer heads of 128 and 16 attention heads of 192: batch 2 at 4096 tokens, batch 1 at 16384.

Upstream: https://github.com/NVIDIA/Megatron-LM, megatron/core/transformer/experimental_attention_variant/dsa.py; for a
checkout: PYTHONPATH=CHECKOUT uv run reproduce.py

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

import functools, gc, importlib, inspect, itertools, math, random, statistics, types, weakref
from unittest import mock

DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
DROP = -math.inf
SMALL = {
    "size": ((5, 5), (7, 12), (1, 9), (12, 7), (0, 4)),  # query rows, keys
    "batch": (1, 2, 3),
    "heads": (1, 2, 5),
    "attention": (1, 2, 5),
    "floats": ("bfloat16", "float32", "float16"),
    "bounds": ("default", "mask", "masks", "bias", "biases", "ends", "keys"),
    "rows": ("any", "row", "one row", "each", "none"),
    "topk": (1, 3, 99),
    "relu": (True, False),
    "sparse": (False, True),
    "per_token": (False, True),
    "frozen": (None, "q", "weights", "k"),
    "shared_key": (False, True),
    "strided": (False, True),
    "ranks": (1, 2),
    "above": (1.0, -3.7),  # -3.7, 0.3 and SCALE are no numbers of bf16 or fp16: a fix that rounds them is seen
    "coefficient": (1.0, 0.3),
    "numbers": ("any", "any", "whole"),
}
SMALL_CASES = 63
# fmt: off
# Heads, attention heads, and what else is not as in USUAL. A fix that takes 2048 rows or keys of LENGTH at a time is
# refused by its memory; every other takes 2049 rows, or 2111 keys, in parts. Where these are a power of two, 2049 rows
# leave one over, 2048 none, and 587 some.
LARGE = {
    "scores.masks": (31, 1, {"size": (2049, 13), "topk": 7, "bounds": "biases", "relu": False, "floats": "float16",
                             "rows": "each", "batch": 2}),
    "scores.keys": (23, 1, {"bounds": "keys", "sparse": True, "frozen": "weights", "strided": True, "rows": "row",
                            "numbers": "whole"}),
    "target.masks": (1, 31, {"bounds": "masks", "sparse": True, "batch": 2, "rows": "each", "ranks": 2}),
    "target.default": (1, 61, {"size": (2048, 13), "topk": 7, "bounds": "default", "shared_key": True,
                               "per_token": True, "above": -3.7}),
    "keys": (13, 2, {"size": (41, 2111), "batch": 2}),
    # Later keys than rows, too: bounds need not be causal, and keys may be in another order.
    "square.keys": (2, 3, {"size": (1100, 1100), "bounds": "keys"}),
    "square.ends": (2, 3, {"size": (1100, 1100), "sparse": True, "rows": "row"}),
}
USUAL = {
    "size": (587, 89), "batch": 1, "floats": "bfloat16", "bounds": "ends", "rows": "any", "topk": 50, "relu": True,
    "sparse": False, "per_token": False, "frozen": None, "shared_key": False, "strided": False, "ranks": 1,
    "above": 1.0, "coefficient": 0.7, "numbers": "any",
}
MEMORY = [  # bounds, relu, sparse, which query rows are real
    ("ends", True, False, "any"), ("default", True, True, "each"), ("mask", False, True, "any"),
    ("masks", False, False, "row"), ("keys", True, True, "any"),
]
# fmt: on
INDEX_WIDTH, WIDTH = 20, 12  # of the indexer's heads and the attention's in the cases; 32 where memory is measured
ROUNDINGS = 2.0**-15
AUTOCAST = 2.0**-6  # both factors and each product are rounded by 2^-9
# Of the softmax: an argument, and not WIDTH ** -0.5. With whole numbers every sum before the softmax is exact.
SCALE = {"any": 0.3, "whole": 0.25}
# What a finite bias adds to all keys of a row, or takes off: no softmax sees it. A half rounds the bias beside it to
# 1/4 or 1/32; 1e5 is infinite in fp16, and float32 holds the whole numbers and quarters beside it.
OFFSET = {"any": 37.0, "whole": 1e5}
PER_HEAD = 0.25  # of one head's float32 scores: a tensor of one byte for each
FEW, FEW_LIMIT = 61, 8.0
SMALLER, LARGER, LENGTH, BATCH = 8, 40, 8192, 2  # heads, tokens, and batch where memory is measured
FIGURES = {"4096": (2, 4096), "16384": (1, 16384)}


class Case:
    """Inputs of one call on the CPU, what varies in them, and what may be seen."""

    def __init__(self, torch, seed, factors):
        self.torch, self.__dict__ = torch, {"torch": torch, **factors}
        self.random = torch.Generator().manual_seed(seed)
        (sq, sk), b, n = self.size, self.batch, self.attention * self.ranks
        self.inputs = {
            "q": self.draw(sq, b, self.heads, INDEX_WIDTH),
            "weights": self.draw(sq, b, self.heads, floats=factors.get("weights_floats")),
            "k": self.draw(sk, b, INDEX_WIDTH),
            "query": self.draw(sq, b, n, WIDTH),
            "key": self.draw(sk, b, 1 if self.shared_key else n, WIDTH).expand(sk, b, n, WIDTH),
        }
        self.options, self.seen, self.bias = self.bound(sq, sk, b)
        some = torch.rand(b, sq, generator=self.random) < 0.6
        kinds = {"any": None, "row": some[0], "one row": some[:1], "each": some, "none": some[0] & False}
        self.real = kinds[self.rows]

    def draw(self, *shape, floats=None):
        """Draw a tensor of the case's dtype; of whole numbers most are 0, and so are some rows of them."""
        found = self.torch.randn(shape, generator=self.random)
        if self.numbers == "whole":
            found = (found * 0.6).round()
            found[self.torch.rand(shape[0], generator=self.random) < 0.2] = 0.0
        return self.laid_out(found.to(getattr(self.torch, floats or self.floats)))

    def laid_out(self, tensor):
        """Return a tensor contiguous or not."""
        return tensor.transpose(0, 1).contiguous().transpose(0, 1) if self.strided else tensor

    def biases(self, shape):
        """Draw finite biases: float32 numbers that no half holds, or halves, and an offset of each row."""
        found = self.torch.randn(shape, generator=self.random)
        found = (found * 2).round() / 2 if self.numbers == "whole" else found
        rows = self.torch.randint(-1, 2, (shape[-2], 1), generator=self.random)
        return found + OFFSET[self.numbers] * rows

    def bound(self, sq, sk, b):
        """Draw which keys a row may see: upstream's arguments, the mask [b, sq, sk], and what is added to scores."""
        torch, rows, keys = self.torch, self.torch.arange(sq)[:, None], self.torch.arange(sk)
        nothing = torch.zeros(1, sq, sk)
        if self.bounds == "default":
            return {}, (keys <= rows).expand(b, sq, sk), nothing
        if self.bounds in ("padding", "paddings"):  # one row of keys for all query rows
            seen = torch.rand((1, sk) if self.bounds == "padding" else (b, 1, sk), generator=self.random) < 0.7
            return {"mask": torch.zeros(seen.shape).masked_fill(~seen, DROP)}, seen.expand(b, sq, sk), nothing
        if self.bounds in ("mask", "masks", "bias", "biases"):
            shape = (sq, sk) if self.bounds in ("mask", "bias") else (b, sq, sk)
            seen = (torch.rand(shape, generator=self.random) < 0.7) & (rows != 3)  # the third row sees no key
            bias = self.biases(shape) if self.bounds in ("bias", "biases") else torch.zeros(shape)
            mask = self.laid_out(bias.masked_fill(~seen, DROP))
            return {"mask": mask}, seen.expand(b, sq, sk), bias.expand(b, sq, sk)
        starts = torch.randint(0, max(1, sk // 2), (sq,), generator=self.random)
        ends = starts + torch.randint(0, sk, (sq,), generator=self.random)
        places = torch.randperm(sk, generator=self.random) if self.bounds == "keys" else keys
        seen = ((places >= starts[:, None]) & (places < ends[:, None])).expand(b, sq, sk)
        named = {"varlen_starts": starts, "varlen_ends": ends.int()}
        return named | ({"key_positions": places} if self.bounds == "keys" else {}), seen, nothing

    def on(self, device):
        """Return all inputs on a device, the options among them."""
        real = {} if self.real is None else {"query_valid_rows": self.real}
        moved = {name: x.to(device) for name, x in (self.options | real).items()}
        return {name: x.to(device) for name, x in self.inputs.items()}, moved

    def of_rank(self, tensor, rank):
        """Return the attention heads of one rank."""
        return tensor[:, :, rank * self.attention : (rank + 1) * self.attention]


# The reference.


def indexed(case, h):
    """Return a head's weighted scores [b, sq, sk] in float64, and the leaves that they are made of."""
    q, weights, k = (case.inputs[name].double() for name in ("q", "weights", "k"))
    leaves = q[:, :, h].clone().requires_grad_(), weights[:, :, h].clone().requires_grad_(), k.requires_grad_()
    scores = leaves[0].transpose(0, 1) @ leaves[2].permute(1, 2, 0)
    return (scores.relu() if case.relu else scores) * leaves[1].t().unsqueeze(-1), leaves


def index_scores(case):
    """Return the scores of all heads, without any mask."""
    total = 0
    for h in range(case.heads):
        total = total + indexed(case, h)[0].detach()
    return total


def back_to_inputs(case, above):
    """Return the gradients of q, weights and k, given that of the scores summed over heads."""
    found = [case.torch.zeros(case.inputs[name].shape, dtype=case.torch.float64) for name in ("q", "weights", "k")]
    for h in range(case.heads):
        scores, leaves = indexed(case, h)
        q, weights, k = case.torch.autograd.grad(scores, leaves, above)
        found[0][:, :, h], found[1][:, :, h] = q, weights
        found[2] += k
    return found


def probabilities(case, support, query, key):
    """Return the attention's target: probabilities summed over the heads of all ranks, then normalized."""
    total = 0
    for h in range(query.shape[2]):
        scores = query[:, :, h].transpose(0, 1) @ key[:, :, h].permute(1, 2, 0) * SCALE[case.numbers] + case.bias
        total = total + scores.masked_fill(~support, DROP).softmax(-1).nan_to_num(0.0)
    return total / total.sum(-1, keepdim=True).clamp_min(1e-10)


def loss_of(case, scores, target, support):
    """Return the loss, given the summed scores and the target."""
    logits = (scores + case.bias).masked_fill(~support, -1e300)  # a row without keys has no NaN in its derivative
    terms = target * (target.clamp_min(1e-10).log() - logits.log_softmax(-1))
    rows = terms.masked_fill(~support, 0.0).sum(-1)
    real = case.torch.ones_like(rows) if case.real is None else case.real.expand(rows.shape).double()
    total = (rows * real).sum()
    return case.coefficient * (total if case.per_token else total / real.sum().clamp_min(1.0))


def supported(case, chosen):
    """Return which keys take part in the loss: all that are seen, or those of them that are among the top-k."""
    if not case.sparse:
        return case.seen
    among = case.torch.zeros(*case.seen.shape[:2], case.seen.shape[2] + 1, dtype=case.torch.bool)
    return case.seen & among.scatter(-1, chosen.where(chosen >= 0, case.seen.shape[2]), value=True)[..., :-1]


# What is compared.


def distance(found, wanted):
    """Return the norm of the difference over that of what is wanted, or over one if that is nothing.

    Infinity, and never NaN, where shapes differ or a NaN is found: the largest of several errors would lose a NaN.
    """
    found, wanted = found.detach().cpu().double(), wanted.detach().double()
    if found.shape != wanted.shape or found.isnan().any():
        return math.inf
    return float((found - wanted).norm() / (wanted.norm() or 1.0))


def beyond(found, wanted):
    """Return how much farther a tensor is from what is wanted than that is when rounded to the tensor's dtype."""
    return max(0.0, distance(found, wanted) - distance(wanted.to(found.dtype), wanted))


def topk_error(case, scores, chosen):
    """Return how far the scores of the chosen keys are from the largest, or infinity if one must not be chosen."""
    (b, sq, sk), k = scores.shape, min(case.topk, scores.shape[-1])
    seen = case.seen if case.options else case.torch.ones_like(case.seen)  # upstream masks nothing by default
    masked = (scores + case.bias).masked_fill(~seen, DROP)
    wanted = masked.topk(k, dim=-1).values
    extended = case.torch.cat((masked, case.torch.full((b, sq, 1), DROP, dtype=masked.dtype)), -1)
    if chosen.shape != wanted.shape or chosen.dtype != case.torch.int64 or (chosen >= sk).any():
        return math.inf
    found = extended.gather(-1, chosen.where(chosen >= 0, sk)).sort(-1, descending=True).values
    places = chosen.where(chosen >= 0, -1 - case.torch.arange(k)).sort(-1).values
    twice = (places[..., 1:] == places[..., :-1]).any()
    if twice or not case.torch.equal(found.isinf(), wanted.isinf()) or ((chosen < 0) != (wanted.isinf())).any():
        return math.inf
    error = (found - wanted).nan_to_num(0.0).abs().amax() if found.numel() else 0.0
    return float(error / scores[seen].abs().max().clamp_min(1e-30)) if seen.any() else 0.0


class Upstream:
    """The functions under test, called by name on one device."""

    def __init__(self, torch, device):
        self.torch, self.device, self.module = torch, device, importlib.import_module(DSA)

    def scores(self, case, inputs, options):
        """Call the top-k without a loss."""
        named = {name: x for name, x in options.items() if name != "query_valid_rows"}
        named |= {"use_relu": case.relu, "index_topk": case.topk}
        return self.call(self.module.fused_qk_topk_naive, **{x: inputs[x] for x in ("q", "k", "weights")}, **named)

    def call(self, function, **named):
        """Call a function with the options it has; one that it lacks must have the value that it had before."""
        known = inspect.signature(function).parameters
        before = {"use_relu": True, "calculate_per_token_loss": False}
        lacking = [name for name, x in named.items() if name not in known and (name, x) not in before.items()]
        if lacking:
            raise NotImplementedError(f"this release has no {', '.join(lacking)}")
        return function(**{name: x for name, x in named.items() if name in known})

    def loss(self, case, inputs, options, chosen=None):
        """Call the loss: the custom function, or for given top-k what autograd differentiates."""
        fixed = {
            "softmax_scale": SCALE[case.numbers],
            "loss_coeff": case.coefficient,
            "sparse_loss": case.sparse,
            "pg_collection": types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: case.ranks)),
            "calculate_per_token_loss": case.per_token,
            **options,
        }
        if chosen is not None:
            named = {x: inputs[x] for x in ("index_scores", "query", "key")}
            return self.call(self.module.compute_dsa_indexer_loss, topk_indices=chosen, **named, **fixed)
        function = self.module.FusedDSAIndexerLoss
        named = inputs | {"topk": case.topk, "mask": None, "use_relu": case.relu} | fixed

        def positional(**given):
            parameters = list(inspect.signature(function.forward).parameters.values())[1:]
            return function.apply(*[given.get(x.name, x.default) for x in parameters])

        positional.__signature__ = inspect.signature(function.forward)
        return self.call(positional, **named)

    def trained(self, case, rank=0):
        """Return a rank's inputs, ready for autograd, its options, and copies of both."""
        inputs, options = case.on(self.device)
        inputs = {
            name: case.of_rank(x, rank) if name in ("query", "key") and case.ranks > 1 else x
            for name, x in inputs.items()
        }
        copies = {name: x.clone() for name, x in (inputs | options).items()}
        leaves = {name: inputs[name].detach().requires_grad_(name != case.frozen) for name in ("q", "weights", "k")}
        return inputs | leaves, options, copies


def same(torch, x, y):
    """Whether these are two tensors of the same dtype, shape and values."""
    return x is not None and y is not None and x.dtype == y.dtype and torch.equal(x, y)


def changed(given, copies):
    """Count the inputs that a call has changed."""
    return sum(not bool((given[name] == copies[name]).all()) for name in copies)


def derivatives(torch, result, leaves, above, **named):
    """Return the gradients of the leaves; None for all where autograd finds no way to them."""
    if not result.requires_grad or result.shape != above.shape:
        return [None] * len(leaves)
    try:
        return torch.autograd.grad(result, leaves, above, allow_unused=True, **named)
    except RuntimeError as error:  # in place changes, reentrant checkpoints: the graph is upstream's
        if isinstance(error, torch.OutOfMemoryError):
            raise
        traceback.print_exc()
        return [None] * len(leaves)


def gradients(torch, result, inputs, above, **named):
    """Return the gradients of q, weights and k, but of one that is frozen."""
    names = [name for name in ("q", "weights", "k") if inputs[name].requires_grad]
    return dict(zip(names, derivatives(torch, result, [inputs[name] for name in names], above, **named), strict=True))


def each_rank(torch, case, run):
    """Run what a rank does, for each; the second pass adds to all_reduce what the other ranks gave in the first."""
    if case.ranks == 1:
        return [run(0)]
    given = [[] for _ in range(case.ranks)]
    for rank in range(case.ranks):
        with mock.patch.object(torch.distributed, "all_reduce", lambda x, **_: given[rank].append(x.clone())):  # noqa: B023
            run(rank)
    answers = []
    for rank in range(case.ranks):
        turn = itertools.count()

        def reduced(x, rank=rank, turn=turn, **_):
            place = next(turn)
            for other in range(case.ranks):
                x.add_(given[other][place]) if other != rank else None

        with mock.patch.object(torch.distributed, "all_reduce", reduced):
            answers.append(run(rank))
    return answers


def errors_of_scores(up, case):
    """Compare the top-k without a loss, and its scores differentiated by autograd."""
    inputs, options, copies = up.trained(case)
    scores, chosen = up.scores(case, inputs, options)
    wanted = index_scores(case)
    seen = case.seen if case.options else up.torch.ones_like(case.seen)
    valued = seen & case.bias.isfinite()
    if scores.shape != seen.shape:
        return {"scores": math.inf}
    plain = scores.detach().cpu()
    hidden = not bool((plain[~seen] == DROP).all()) or plain.dtype != up.torch.float32
    plain = plain.double().where(valued, 0.0)
    above = up.torch.randn(wanted.shape, generator=case.random).where(valued, 0.0)
    found = gradients(up.torch, scores, inputs, above.to(up.device))
    with up.torch.no_grad():
        again = up.scores(case, inputs, options)
    pairs = list(zip(again, (scores, chosen), strict=True))[: 1 if case.numbers == "whole" else 2]  # any of equal keys
    answer = {
        "scores": math.inf if hidden else distance(plain - case.bias.where(valued, 0.0), wanted.where(valued, 0.0)),
        "topk": max(topk_error(case, wanted, x.cpu()) for x in (chosen, again[1])),
        "changed": changed(inputs | options, copies),
        "unrepeated": sum(not same(up.torch, x, y) for x, y in pairs),
    }
    return answer | by_name(case, found, back_to_inputs(case, above.double()))


def by_name(case, found, wanted):
    """Return the errors of the gradients; infinite where dtype or None is not as it should be."""
    answer = {}
    for name, x in zip(("q", "weights", "k"), wanted, strict=True):
        gradient = found.get(name)
        right = (gradient is None) == (name == case.frozen)
        right = right and (gradient is None or gradient.dtype == case.inputs[name].dtype)
        answer[f"grad_{name}"] = math.inf if not right else 0.0 if gradient is None else beyond(gradient, x)
    return answer


def errors_of_loss(up, case):
    """Compare the custom function, forward, backward, and backward again, on every rank."""
    torch = up.torch

    def run(rank):
        inputs, options, copies = up.trained(case, rank)
        chosen, loss = up.loss(case, inputs, options)
        above = torch.tensor(case.above, device=up.device)
        twice = case.ranks == 1 and case.size in SMALL["size"]
        first = gradients(torch, loss, inputs, above, retain_graph=twice)
        second = gradients(torch, loss, inputs, above) if twice else first
        unrepeated = sum(not same(torch, first[x], second[x]) for x in first)
        return chosen.cpu(), loss.detach().cpu(), first, changed(inputs | options, copies), unrepeated

    scores = index_scores(case)
    worst = {}
    for chosen, loss, found, overwritten, unrepeated in each_rank(torch, case, run):
        error = topk_error(case, scores, chosen)
        if math.isinf(error):  # nothing can be said of a loss over these
            return {"topk": error}
        support = supported(case, chosen)
        query, key = (case.inputs[name].double() for name in ("query", "key"))
        leaf = scores.clone().requires_grad_()
        wanted = loss_of(case, leaf, probabilities(case, support, query, key), support)
        (above,) = torch.autograd.grad(wanted, [leaf], torch.tensor(case.above, dtype=torch.float64))
        answer = {"loss": distance(loss, wanted), "topk": error, "changed": overwritten, "unrepeated": unrepeated}
        if case.bounds in ("bias", "biases"):  # which upstream's forward adds twice to the indexer's scores
            del answer["loss"]
        answer |= by_name(case, found, back_to_inputs(case, above))
        worst = {name: max(x, worst.get(name, 0.0)) for name, x in answer.items()}
    return worst


def errors_of_autograd(up, case):
    """Compare the loss that autograd differentiates, by the scores and by the attention's query and key."""
    torch = up.torch
    inputs, options, copies = up.trained(case)
    with torch.no_grad():
        scores, chosen = up.scores(case, inputs, options)
        error = topk_error(case, index_scores(case), chosen.cpu())
        if math.isinf(error) or scores.shape != case.seen.shape:  # nothing can be said of a loss over these
            return {"topk": math.inf}
        scores = scores.where(scores.isfinite(), 0.0)
    leaves = [x.detach().requires_grad_() for x in (scores, inputs["query"], inputs["key"])]
    own = leaves[0] if case.bounds in ("ends", "keys") else leaves[0] + 0  # under other masks it overwrites them
    given = dict(zip(("index_scores", "query", "key"), (own, *leaves[1:]), strict=True))
    loss = up.loss(case, given, options, chosen)
    above = torch.tensor(case.above, device=up.device)
    found = derivatives(torch, loss, leaves, above)
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    support = supported(case, chosen.cpu())
    target = probabilities(case, support, *exact[1:])
    wanted = loss_of(case, exact[0], target, support)
    reference = torch.autograd.grad(wanted, exact, above.cpu().double())
    altered = changed(inputs | options, copies) + (own is leaves[0] and not same(torch, own, scores))
    answer = {"loss": distance(loss, wanted), "changed": altered}
    return answer | {
        f"grad_{name}": math.inf if x is None or x.dtype != leaf.dtype else beyond(x, y)
        for name, x, y, leaf in zip(("scores", "query", "key"), found, reference, leaves, strict=True)
    }


def compare(up, cases, measures):
    """Judge cases: the worst error of each quantity."""
    worst, counted = {}, 0
    for case in cases:
        for measure in measures:
            for name, x in measure(up, case).items():
                worst[name] = max(worst.get(name, 0.0), math.inf if math.isnan(x) else x)
            counted += 1
    tolerance = {name: 0.0 if name in ("changed", "unrepeated") else ROUNDINGS for name in worst}
    ok = counted > 0 and all(x <= tolerance[name] for name, x in worst.items())
    measured = {"calls": counted, **worst}
    return ok, {"measured": measured, "tolerance": tolerance, "unit": "relative error"}


def without_keys(up):
    """Judge the top-k of no keys at all, of which upstream takes care: nothing is chosen."""
    case = Case(up.torch, 3, USUAL | {"size": (7, 0), "batch": 2, "bounds": "default", "heads": 3, "attention": 1})
    inputs, options, _ = up.trained(case)
    found = [[str(x.dtype), *x.shape] for x in up.scores(case, inputs, options)]
    wanted = [["torch.float32", 2, 7, 0], ["torch.int64", 2, 7, 0]]
    return found == wanted, {"measured": found, "tolerance": wanted, "unit": "dtype and shape of scores and indices"}


def under_autocast(up):
    """Judge scores of float32 inputs under autocast, which multiplies in bf16: they are float32 all the same."""
    factors = {"size": (33, 29), "batch": 2, "bounds": "mask", "floats": "float32", "heads": 5, "attention": 1}
    case = Case(up.torch, 4, USUAL | factors)
    inputs, options, _ = up.trained(case)
    with up.torch.autocast(up.device, dtype=up.torch.bfloat16):
        scores, _ = up.scores(case, inputs, options)
    right = scores.dtype == up.torch.float32 and scores.shape == case.seen.shape
    wanted = index_scores(case).where(case.seen, 0.0)
    error = distance(scores.detach().cpu().double().where(case.seen, 0.0), wanted) if right else math.inf
    return error <= AUTOCAST, {"measured": error, "tolerance": AUTOCAST, "unit": "relative error"}


def loss_under_autocast(up, *, sparse):
    """Judge the loss of whole numbers under autocast: products in bf16 are exact then, and the softmax is float32's.

    The backward is called outside, as PyTorch advises, and multiplies in float32.
    """
    torch, factors = up.torch, {"size": (33, 29), "batch": 2, "bounds": "mask", "floats": "float32", "topk": 9}
    factors |= {"heads": 5, "attention": 3, "numbers": "whole", "sparse": sparse}
    case = Case(torch, 5, USUAL | factors)
    inputs, options, _ = up.trained(case)
    with torch.autocast(up.device, dtype=torch.bfloat16):
        chosen, loss = up.loss(case, inputs, options)
        scores = up.scores(case, inputs, options)[0].detach()
        given = {"index_scores": scores.where(scores.isfinite(), 0.0), "query": inputs["query"], "key": inputs["key"]}
        alone = up.loss(case, given, options, chosen)
    if math.isinf(topk_error(case, index_scores(case), chosen.cpu())):  # nothing can be said of a loss over these
        return False, {"measured": "the top-k are wrong"}
    support, leaf = supported(case, chosen.cpu()), index_scores(case).requires_grad_()
    target = probabilities(case, support, *(case.inputs[name].double() for name in ("query", "key")))
    wanted = loss_of(case, leaf, target, support)
    (above,) = torch.autograd.grad(wanted, [leaf])
    errors = {"loss": distance(loss, wanted), "loss, differentiated by autograd": distance(alone, wanted)}
    found = gradients(torch, loss, inputs, torch.ones((), device=up.device))
    errors |= by_name(case, found, back_to_inputs(case, above))
    right = all(x <= ROUNDINGS for x in errors.values())
    return right, {"measured": errors, "tolerance": ROUNDINGS, "unit": "relative error"}


def second_derivatives(up):
    """Judge what autograd makes of the gradients themselves, as a penalty on them needs: float64's, of all at once."""
    torch, names = up.torch, ("q", "weights", "k")
    factors = {"size": (530, 23), "batch": 2, "bounds": "masks", "floats": "float32", "topk": 9, "heads": 3}
    case = Case(torch, 8, USUAL | factors | {"attention": 2, "sparse": True})
    inputs, options, _ = up.trained(case)
    chosen, loss = up.loss(case, inputs, options)
    leaves = [inputs[name] for name in names]
    first = derivatives(torch, loss, leaves, torch.ones((), device=up.device), create_graph=True)
    if any(x is None for x in first):
        return False, {"measured": "no gradient"}
    penalty = sum(x.square().sum() for x in first)
    found = derivatives(torch, penalty, leaves, torch.ones((), device=up.device))
    support, exact = supported(case, chosen.cpu()), [case.inputs[name].double().requires_grad_() for name in names]
    q, weights, k = exact
    scores = torch.einsum("sbhd,tbd->sbht", q, k)
    scores = ((scores.relu() if case.relu else scores) * weights.unsqueeze(-1)).sum(2).transpose(0, 1)
    target = probabilities(case, support, *(case.inputs[name].double() for name in ("query", "key")))
    wanted = torch.autograd.grad(loss_of(case, scores, target, support), exact, create_graph=True)
    wanted = torch.autograd.grad(sum(x.square().sum() for x in wanted), exact)
    errors = {name: math.inf if x is None else beyond(x, y) for name, x, y in zip(names, found, wanted, strict=True)}
    ok = all(x <= ROUNDINGS for x in errors.values())
    return ok, {"measured": errors, "tolerance": ROUNDINGS, "unit": "relative error"}


def given_back(up):
    """Judge the loss in both kinds of checkpoint, and with what is saved moved away: it is given back once a backward.

    The newer kind of checkpoint refuses to give a tensor back twice.
    """
    torch, case, packed = up.torch, usual_cases(up.torch)[1], []
    checkpoint, names = importlib.import_module("torch.utils.checkpoint").checkpoint, ("q", "weights", "k")

    def call(*leaves):
        inputs, options, _ = up.trained(case)
        return up.loss(case, inputs | dict(zip(names, leaves, strict=True)), options)[1]

    def pack(x):
        packed.append([x, 0])
        return len(packed) - 1

    def unpack(place):
        packed[place][1] += 1
        return packed[place][0].clone()

    def moved(*leaves):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return call(*leaves)

    ways = {"plain": call, "moved": moved}
    for reentrant in (True, False):
        ways[f"reentrant {reentrant}"] = functools.partial(checkpoint, call, use_reentrant=reentrant)
    found = {}
    for way, run in ways.items():
        leaves = [up.trained(case)[0][name] for name in names]
        loss = run(*leaves)
        loss.backward(torch.tensor(case.above, device=up.device))
        found[way] = [loss.detach(), *(x.grad for x in leaves)]
    errors = {
        way: max(math.inf if x is None else distance(x, y.cpu()) for x, y in zip(answer, found["plain"], strict=True))
        for way, answer in found.items()
    }
    often = max((times for _, times in packed), default=0)
    ok = often == 1 and all(x <= ROUNDINGS for x in errors.values())
    measured = {"errors": errors, "given back": often}
    return ok, {"measured": measured, "tolerance": ROUNDINGS, "unit": "relative to a plain call; times a backward"}


def mixed_dtypes(up):
    """Judge weights in float32 beside inputs in bf16 or fp16, and the other way round: each keeps its own precision."""
    factors = USUAL | {"size": (530, 29), "batch": 2, "heads": 5, "attention": 2, "topk": 9, "bounds": "masks"}
    pairs = ("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")
    given = [{"floats": floats, "weights_floats": weights} for floats, weights in pairs]
    cases = [Case(up.torch, 20 + seed, factors | one) for seed, one in enumerate(given)]
    return compare(up, cases, [errors_of_scores, errors_of_loss])


def masks_of_keys(up):
    """Judge the top-k under an additive mask of keys alone, [1, sk] or [b, 1, sk], which is added to every row."""
    factors = USUAL | {"batch": 2, "heads": 3, "attention": 1, "topk": 9}
    cases = [Case(up.torch, 30, factors | {"bounds": bounds}) for bounds in ("padding", "paddings")]
    return compare(up, cases, [errors_of_scores])


def asked(question):
    """Return what PyTorch answers, or that it refuses: it does where its two ways to set precision were mixed."""
    try:
        return question()
    except RuntimeError as error:
        return f"refused: {error}"[:80]


def told_to_torch(torch):
    """Return what a process may have told PyTorch, and a call must leave as it is."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    questions = {
        "precision": torch.get_float32_matmul_precision,
        "TF32": lambda: matmul.allow_tf32,
        "TF32 in cuDNN": lambda: cudnn.allow_tf32,
        "sums in bf16": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "default dtype": torch.get_default_dtype,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "gradients": torch.is_grad_enabled,
        "threads": torch.get_num_threads,
        "random": lambda: torch.get_rng_state().tolist(),
    }
    return {name: asked(question) for name, question in questions.items()}


def settings_kept(up):
    """Judge that a process's settings hold within each call, for every product, and after it."""
    torch, case, found = up.torch, usual_cases(up.torch)[0], {}
    precision = torch.get_float32_matmul_precision()

    class Products(torch.utils._python_dispatch.TorchDispatchMode):  # noqa: SLF001
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            if any(name in str(function) for name in ("mm", "matmul", "einsum")):
                seen.add(asked(torch.get_float32_matmul_precision))
            return function(*args, **(kwargs or {}))

    try:
        for wanted in ("medium", "high", "highest"):
            torch.set_float32_matmul_precision(wanted)
            before, seen = told_to_torch(torch), set()
            inputs, options, _ = up.trained(case)
            with Products():
                up.scores(case, inputs, options)
                loss = up.loss(case, inputs, options)[1]
                gradients(torch, loss, inputs, torch.ones((), device=up.device))
            after = told_to_torch(torch)
            found[wanted] = [name for name in before if before[name] != after[name]]
            found[wanted] += sorted(seen - {wanted}) or ([] if seen else ["no products"])
    finally:
        with contextlib.suppress(RuntimeError):
            torch.set_float32_matmul_precision(precision)
    return not any(found.values()), {"measured": found, "unit": "settings that did not hold"}


def usual_cases(torch):
    """Draw two cases that no setting of PyTorch must change; in the first, a row sees no key."""
    factors = USUAL | {"size": (33, 29), "batch": 2, "heads": 5, "attention": 3, "topk": 9}
    return [Case(torch, 6, factors | other) for other in ({"bounds": "masks"}, {"rows": "each", "sparse": True})]


def other_default(up, dtype):
    """Judge all results where PyTorch makes tensors of another dtype than float32 when it is told none."""
    torch, cases = up.torch, usual_cases(up.torch)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return compare(up, cases, [errors_of_scores, errors_of_loss, errors_of_autograd])
    finally:
        torch.set_default_dtype(before)


def alive(torch):
    """Count the bytes of the storages of all tensors that Python holds."""
    gc.collect()
    storages = (x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor)
    return sum({x._cdata: x.nbytes() for x in storages}.values())  # noqa: SLF001 - their identity


def after_inference(up):
    """Judge training after an evaluation in inference mode, and that no call leaves tensors behind."""
    torch, cases = up.torch, usual_cases(up.torch)
    given = [case.on(up.device) for case in cases]
    before = alive(torch)
    with torch.inference_mode():
        for case, (inputs, options) in zip(cases, given, strict=True):
            up.scores(case, inputs, options)
            up.loss(case, inputs, options)
    kept = alive(torch) - before
    ok, values = compare(up, cases, [errors_of_scores, errors_of_loss, errors_of_autograd])
    left = alive(torch) - before
    more = {"measured": values["measured"] | {"bytes kept": kept, "bytes kept, in training": left}}
    return ok and kept == left == 0, values | more


def small_cases(torch):
    """Draw cases of a few rows: of some, that one in which most values meet that had not; all pairs do in the end."""
    draw, met, cases = random.Random(12), set(), []  # noqa: S311
    for n in range(SMALL_CASES):
        some = [{name: draw.choice(values) for name, values in SMALL.items()} for _ in range(20)]
        pairs = [set(itertools.combinations(factors.items(), 2)) - met for factors in some]
        best = max(range(len(some)), key=lambda place: len(pairs[place]))
        met |= pairs[best]
        cases.append(Case(torch, n, some[best]))
    return cases


# Memory.


class Meter:
    """Adds up the live bytes of tensors on device "meta"; a storage counts from its birth to its death."""

    def __init__(self, torch):
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        self.live, self.now, self.peak, self.largest = {}, 0, 0, 0
        meter = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                found = function(*args, **(kwargs or {}))
                for x in tree_leaves((args, kwargs, found)):
                    if isinstance(x, torch.Tensor) and x.device.type == "meta":
                        meter.count(x.untyped_storage())
                return found

        self.mode = Mode

    def count(self, storage):
        """Count a storage, once while it lives."""
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 - its identity
        if key in self.live:
            return

        def dies(_):
            self.live.pop(key)
            self.now -= size

        self.live[key] = weakref.ref(storage, dies)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)

    def start(self, *tensors):
        """Begin anew: what lives now is no part of the peak."""
        for x in tensors:
            self.count(x.untyped_storage())
        self.peak = self.before = self.now
        self.largest = 0

    def kept(self):
        """Return what lives of what was made since then."""
        return self.now - self.before

    def end(self):
        """Return the peak since then, and the largest tensor that was made."""
        return self.peak - self.before, self.largest


class Allocator:
    """The same of the GPU's allocator, which does not know the largest tensor."""

    def __init__(self, torch):
        self.torch, self.mode = torch, contextlib.nullcontext

    def start(self, *_):
        """Begin anew."""
        self.torch.cuda.synchronize()
        self.torch.cuda.reset_peak_memory_stats()
        self.before = self.torch.cuda.memory_allocated()

    def kept(self):
        """Return what lives of what was made since then."""
        self.torch.cuda.synchronize()
        return self.torch.cuda.memory_allocated() - self.before

    def end(self):
        """Return the peak since then."""
        return self.torch.cuda.max_memory_allocated() - self.before, None


def setting(torch, device, shape, how, widths=(32, 32)):
    """Return a call with tensors that are not filled, or with random ones on a GPU."""
    (b, s), (bounds, relu, sparse, rows), (heads, attention) = shape[:2], how, shape[2:]
    make = torch.empty if device == "meta" else torch.randn

    def made(*size):
        return make(size, dtype=torch.bfloat16, device=device)

    inputs = {"q": made(s, b, heads, widths[0]), "weights": made(s, b, heads), "k": made(s, b, widths[0])}
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    inputs |= {"query": made(s, b, attention, widths[1]), "key": made(s, b, attention, widths[1])}
    options, ends = {}, torch.arange(1, s + 1, device=device)
    if bounds in ("ends", "keys"):
        options = {"varlen_starts": torch.zeros_like(ends), "varlen_ends": ends}
        options |= {"key_positions": ends - 1} if bounds == "keys" else {}
    if bounds in ("mask", "masks"):
        mask = torch.full((s, s), DROP, device=device).triu(1)
        options = {"mask": mask if bounds == "mask" else mask.expand(b, s, s).contiguous()}
    options |= {"any": {}, "row": {"query_valid_rows": ends > 3}}.get(
        rows, {"query_valid_rows": (ends > 3).expand(b, s).contiguous()}
    )
    case = {"topk": 256, "relu": relu, "sparse": sparse, "coefficient": 1.0, "per_token": False, "ranks": 1}
    case = types.SimpleNamespace(**case, numbers="any")
    return case, inputs, options


def peaks(up, meter, case, inputs, options):
    """Return the peaks of the top-k without a loss, of the loss, and of its backward, over what lived before each."""
    with meter.mode():
        found = {}
        meter.start(*inputs.values(), *options.values())
        with up.torch.no_grad():
            up.scores(case, inputs, options)
        found["topk"] = meter.end()
        meter.start()
        chosen, loss = up.loss(case, inputs, options)
        found["forward"] = meter.end()
        found["kept"] = meter.kept(), None
        leaves = [inputs[name] for name in ("q", "weights", "k")]
        meter.start()
        kept = derivatives(up.torch, loss, leaves, up.torch.ones((), device=up.device))
        found["backward"] = meter.end() if all(x is not None for x in kept) else (math.inf, None)
        del chosen, kept
    return found


def growth(up, meter, how, attention):
    """Return by how much of one head's scores the peaks grow with a head of the indexer, or of the attention."""
    unit = 4 * BATCH * LENGTH * LENGTH
    shapes = [(BATCH, LENGTH, 1, n) if attention else (BATCH, LENGTH, n, 1) for n in (SMALLER, LARGER)]
    few, many = (peaks(up, meter(up.torch), *setting(up.torch, up.device, shape, how)) for shape in shapes)
    return {name: (many[name][0] - few[name][0]) / unit / (LARGER - SMALLER) for name in few}


def grows(up, meter, part, attention, known):
    """Judge one part of all settings; known has what was measured for another part."""
    for how in MEMORY:
        if (how, attention) not in known:
            known[how, attention] = growth(up, meter, how, attention)
    measured = {"_".join(map(str, how)): round(known[how, attention][part], 4) for how in MEMORY}
    return all(x < PER_HEAD for x in measured.values()), {
        "measured": measured,
        "tolerance": PER_HEAD,
        "unit": "scores of one head, for each head",
    }


def kept_for_backward(up, meter):
    """Judge what lives between forward and backward beside the inputs: the top-k, and not what is made of scores."""
    unit, measured = 4 * BATCH * LENGTH * LENGTH, {}
    for how in MEMORY:
        found = peaks(up, meter(up.torch), *setting(up.torch, up.device, (BATCH, LENGTH, SMALLER, SMALLER), how))
        measured["_".join(map(str, how))] = round(found["kept"][0] / unit, 4)
    return all(x < PER_HEAD for x in measured.values()), {
        "measured": measured,
        "tolerance": PER_HEAD,
        "unit": "float32 [b, sq, sk]",
    }


def few_rows(up, meter):
    """Judge the peaks of fewer query rows than a fix may take at a time: they need what these rows need."""
    case, inputs, _ = setting(up.torch, up.device, (BATCH, LENGTH, LARGER, LARGER), ("default", True, True, "any"))
    inputs |= {name: inputs[name].detach()[:FEW] for name in ("q", "weights", "query")}
    for name in ("q", "weights"):
        inputs[name].requires_grad_()
    unit = 4 * BATCH * FEW * LENGTH * LARGER
    found = peaks(up, meter(up.torch), case, inputs, {})
    measured = {name: round(peak / unit, 4) for name, (peak, _) in found.items() if name != "kept"}
    ok = all(x < FEW_LIMIT for x in measured.values())
    return ok, {"measured": measured, "tolerance": FEW_LIMIT, "unit": "scores of all heads for these rows"}


def ruler(up, meter):
    """Measure what is known: two tensors of one unit at once, then a third after one has died."""
    torch, unit = up.torch, 4 * 1024 * 1024

    def made():
        return torch.empty(unit // 4, dtype=torch.float32, device=up.device)

    measured = []
    counted = meter(torch)
    with counted.mode():
        counted.start()
        first, second = made(), made()
        measured.append(counted.end()[0] / unit)
        del first
        third = made()
        measured.append(counted.end()[0] / unit)
        view = third.view(2, -1)[0]
        measured.append(counted.end()[0] / unit)
        fourth = second + view.sum()
        fifth = fourth.add_(1).relu()
        measured.append(counted.end()[0] / unit)
        del fourth, fifth
    return all(abs(x - y) < 0.001 for x, y in zip(measured, (2, 2, 2, 4), strict=True)), {
        "measured": measured,
        "tolerance": 0.001,
        "unit": "units",
    }


# Figures.


def without_numbers(probe, up):
    """Judge that every setting runs on device "meta", where nothing can be asked of a value: on a GPU the host waits.

    Print the largest tensors and peaks of the first one, in units of the scores of all heads.
    """
    b, s = FIGURES["4096"]
    ran = []
    for how in MEMORY:
        found = peaks(up, Meter(up.torch), *setting(up.torch, up.device, (b, s, 32, 16), how, (128, 192)))
        if how == MEMORY[0]:
            del found["kept"]
            for name, (peak, biggest) in found.items():
                for what, x in (("peak", peak), ("largest", biggest)) if math.isfinite(peak) else ():
                    probe.say(
                        "FIGURE", name=f"{name}.{what}", value=x / (4 * b * s * s * 32), unit="units", spread=None
                    )
        ran.append("_".join(map(str, how)))
    return len(ran) == len(MEMORY), {"measured": ran, "unit": "settings that ran without numbers"}


def times(torch, run):
    """Return the median of the milliseconds that five runs take, and how far apart they are."""
    found = []
    for n in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found += [begin.elapsed_time(end)] * (n > 1)
    return statistics.median(found), max(found) - min(found)


def on_gpu(probe, up):
    """Print peaks and times of realistic steps on a GPU."""
    torch = up.torch
    for name, (b, s) in FIGURES.items():
        case, inputs, options = setting(torch, up.device, (b, s, 32, 16), MEMORY[0], (128, 192))
        case.topk = 2048
        leaves = [inputs[x] for x in ("q", "weights", "k")]

        def topk(case=case, inputs=inputs, options=options):
            with torch.no_grad():
                up.scores(case, inputs, options)

        def forward(case=case, inputs=inputs, options=options):
            with torch.no_grad():
                up.loss(case, inputs, options)

        def step(case=case, inputs=inputs, options=options, leaves=leaves):
            derivatives(torch, up.loss(case, inputs, options)[1], leaves, torch.ones((), device=up.device))

        for part, run in (("topk", topk), ("forward", forward), ("step", step)):
            torch.cuda.empty_cache()
            meter = Allocator(torch)
            meter.start()
            try:
                run()
            except torch.OutOfMemoryError:  # what this is about: no figures of it, and no verdict by it
                probe.say("FIGURE", name=f"{part}.{name}.fits", value=0, unit="1", spread=None)
                continue
            peak, _ = meter.end()
            probe.say("FIGURE", name=f"{part}.{name}.fits", value=1, unit="1", spread=None)
            probe.say("FIGURE", name=f"{part}.{name}.peak", value=peak / 2**30, unit="GiB", spread=None)
            with probe.alone():
                value, spread = times(torch, run)
            probe.say("FIGURE", name=f"{part}.{name}.time", value=value, unit="ms", spread=spread)
        del inputs, options, leaves, topk, forward, step
        torch.cuda.empty_cache()


def judge_settings(probe, up):
    """Walk the checks of no keys, and of what PyTorch is told beside the call."""
    probe.judge("values.no_keys", "control", without_keys, up)
    probe.judge("values.autocast", "control", under_autocast, up)
    for name, sparse in {"dense": False, "sparse": True}.items():
        probe.judge(
            f"values.autocast.loss.{name}", "control", functools.partial(loss_under_autocast, sparse=sparse), up
        )
    for dtype in ("bfloat16", "float64"):
        probe.judge(f"values.default_dtype.{dtype}", "control", other_default, up, dtype)
    functions = {"second_derivatives": second_derivatives, "mixed_dtypes": mixed_dtypes}
    functions |= {"masks_of_keys": masks_of_keys, "settings": settings_kept, "given_back": given_back}
    for name, function in functions.items():
        probe.judge(f"values.{name}", "control", function, up)


def judge(probe, target):
    """Walk all checks."""
    torch = importlib.import_module("torch")
    if target != "cpu":
        found = torch.cuda.is_available() and "sm_{}{}".format(*torch.cuda.get_device_capability())
        if not found or not target.startswith(found):
            raise NotImplementedError(f"no {target} here; --target cpu needs no GPU")
    device = "cpu" if target == "cpu" else "cuda"
    name = "none" if target == "cpu" else torch.cuda.get_device_name()
    probe.say("TARGET", target=target, evidence="traced" if target == "cpu" else "executed", device=name)
    up = Upstream(torch, device)
    probe.upstream(up.module)
    metered, sensor = (Upstream(torch, "meta"), Meter) if target == "cpu" else (up, Allocator)
    probe.judge("memory.ruler", "control", ruler, metered, sensor)
    probe.judge("values.after_inference", "control", after_inference, up)  # before any call has left anything behind
    cases = small_cases(torch)
    for bounds in SMALL["bounds"]:
        some = [x for x in cases if x.bounds == bounds]
        probe.judge(f"values.{bounds}.scores", "control", compare, up, some, [errors_of_scores])
        probe.judge(f"values.{bounds}.loss", "control", compare, up, some, [errors_of_loss])
        whole = [x for x in some if x.ranks == 1]
        probe.judge(f"values.{bounds}.autograd", "control", compare, up, whole, [errors_of_autograd])
    judge_settings(probe, up)
    if target != "cpu":
        torch.zeros(8, 8, device=device) @ torch.zeros(8, 8, device=device)  # the workspace of products, once
    known = {}
    for name in ("indexer.topk", "indexer.forward", "indexer.backward", "attention.forward", "attention.backward"):
        kind, part = name.split(".")
        probe.judge(f"memory.{name}", "defect", grows, metered, sensor, part, kind == "attention", known)
    probe.judge("memory.without_numbers", "control", without_numbers, probe, Upstream(torch, "meta"))
    probe.judge("memory.few_rows", "control", few_rows, metered, sensor)
    probe.judge("memory.kept", "control", kept_for_backward, metered, sensor)
    for number, (name, (heads, attention, other)) in enumerate(LARGE.items()):
        factors = USUAL | {"heads": heads, "attention": attention} | other
        measures = [errors_of_loss]
        measures += [errors_of_scores] * (name in ("scores.masks", "keys"))
        measures += [errors_of_autograd] * (name == "target.default")
        probe.judge(f"large.{name}", "control", large, up, 1000 + number, factors, measures)
    if probe.only is None and target != "cpu":
        on_gpu(probe, up)


def large(up, seed, factors, measures):
    """Judge a case of many rows and heads."""
    return compare(up, [Case(up.torch, seed, factors)], measures)


if __name__ == "__main__":
    Probe().run(judge)
