"""DSA without fused kernels needs memory for no more than a few heads' scores, and computes what it computed.

Under test is megatron.core's dsa.py where the fused kernels are off, absent, or decline the case. Upstream promises
top-k, loss and gradients. It does not promise a tensor [queries, batch, heads, keys], which runs out of memory.

Memory is judged by how the peak of live bytes grows with each head of the indexer or of the attention. The unit is one
head's fp32 scores, 4 * batch * queries * keys bytes. A tensor with one byte or more for each query, head and key adds
0.25. All else that grows with heads is linear in the length and adds some hundredths. The limit is 0.25, however a fix
streams. A part of the peak that does not grow with heads is no defect. Tensors on device "meta" have sizes and no
numbers; their bytes are added up operator by operator. On a GPU the allocator counts the bytes of realistic steps.

Values are controls: what is right in the release stays right. The reference is float64, differentiated by autograd.
Top-k are compared by their scores. The reference of the sparse loss takes the keys that upstream took. Two ranks are
played one after the other.

Tolerances are relative, in the norm. Everything is computed in fp32: 2^-15 is 512 roundings one after another, for
products of 20 numbers, sums over at most 61 heads and 2111 rows or keys (whose errors grow like the root of their
number), and a softmax. A result may also be as far off as the reference rounded to the result's dtype.

Not judged: the fused kernels; a training run; several GPUs; the loss under finite biases, which upstream's forward
adds twice to the indexer's scores (its gradients are judged). Times are figures.
"""

import functools
import gc
import inspect
import itertools
import math
import types
import weakref
from unittest import mock

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant import dsa
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from kit import current_target, pairwise
from kit.autograd import unless_refused
from kit.capture import Watch, peak_memory, watching
from kit.errors import relative_error

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
pytestmark = pytest.mark.control
DEVICE = current_target().device
DROP = -math.inf
LEAVES = ("q", "weights", "k")
if DEVICE == "cuda":  # cuBLAS takes its workspace before memory is measured
    torch.zeros(8, 8, device=DEVICE) @ torch.zeros(8, 8, device=DEVICE)
FACTORS = {
    "size": [(5, 5), (7, 12), (1, 9), (12, 7), (0, 4)],  # query rows, keys
    "batch": [1, 2, 3],
    "heads": [1, 2, 5],  # of the indexer
    "attention": [1, 2, 5],  # heads of the attention on one rank
    "floats": ["bfloat16", "float32", "float16"],
    "bounds": ["default", "mask", "masks", "bias", "biases", "ends", "keys"],
    "rows": ["any", "row", "one row", "each", "none"],  # which query rows are real: all, or [sq], [1, sq], [b, sq]
    "topk": [1, 3, 99],
    "relu": [True, False],
    "sparse": [False, True],
    "per_token": [False, True],
    "frozen": [None, "q", "weights", "k"],
    "shared_key": [False, True],  # a key of one head, expanded to all
    "strided": [False, True],
    "ranks": [1, 2],
    "above": [1.0, -3.7],  # the loss's gradient; -3.7, 0.3 and SCALE are no numbers of bf16 or fp16
    "coefficient": [1.0, 0.3],
    "numbers": ["any", "whole"],  # whole: equal scores, and scores of 0, where relu's derivative is 0
}
SMALL = pairwise(FACTORS)
USUAL = {name: values[0] for name, values in FACTORS.items()}
USUAL |= {"size": (587, 89), "bounds": "ends", "topk": 50, "coefficient": 0.7, "weights_floats": None}
USUAL |= {"widths": (20, 12)}  # of the indexer's heads and the attention's
FEW = {"size": (33, 29), "batch": 2, "heads": 5, "attention": 3, "topk": 9}
USUAL_CASES = [{**FEW, "bounds": "masks"}, {**FEW, "rows": "each", "sparse": True}]  # in the first a row sees no key
# What is judged besides, and by which of the assertions below. Many rows, keys or heads: a fix that takes 2048 rows or
# keys of LENGTH at a time is refused by its memory; every other takes 2049 rows, or 2111 keys, in parts. Where these
# are a power of two, 2049 rows leave one over, 2048 none, and 587 some.
SPECIAL = {
    "heads-masks": ("scores loss", {"heads": 31, "size": (2049, 13), "topk": 7, "bounds": "biases", "relu": False,
                                    "floats": "float16", "rows": "each", "batch": 2}),
    "heads-keys": ("loss", {"heads": 23, "bounds": "keys", "sparse": True, "frozen": "weights", "strided": True,
                            "rows": "row", "numbers": "whole"}),
    "attention-masks": ("loss", {"attention": 31, "bounds": "masks", "sparse": True, "batch": 2, "rows": "each",
                                 "ranks": 2}),
    "attention-default": ("loss autograd", {"attention": 61, "size": (2048, 13), "topk": 7, "bounds": "default",
                                            "shared_key": True, "per_token": True, "above": -3.7}),
    "many-keys": ("scores loss", {"heads": 13, "attention": 2, "size": (41, 2111), "batch": 2}),
    # Later keys than rows, too: bounds need not be causal, and keys may be in another order.
    "square-keys": ("loss", {"heads": 2, "attention": 3, "size": (1100, 1100), "bounds": "keys"}),
    "square-ends": ("loss", {"heads": 2, "attention": 3, "size": (1100, 1100), "sparse": True, "rows": "row"}),
    "mask-of-keys": ("scores", {"batch": 2, "heads": 3, "topk": 9, "bounds": "padding"}),  # [1, sk]
    "masks-of-keys": ("scores", {"batch": 2, "heads": 3, "topk": 9, "bounds": "paddings"}),  # [b, 1, sk]
    **{f"{floats}-and-{weights}-weights": ("scores loss", {**FEW, "size": (530, 29), "bounds": "masks",
                                                           "floats": floats, "weights_floats": weights})
       for floats, weights in (("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"))},
    "no-keys": ("scores", {"size": (7, 0), "batch": 2, "heads": 3, "bounds": "default"}),
}  # fmt: skip
ROUNDINGS = 2.0**-15
SCALE = {"any": 0.3, "whole": 0.25}  # of the softmax, and not 12 ** -0.5; sums of whole numbers are exact
# What a finite bias adds to all keys of a row, or takes off: no softmax sees it. A half rounds the bias beside it to
# 1/4 or 1/32; 1e5 is infinite in fp16, and float32 holds the whole numbers and quarters beside it.
OFFSET = {"any": 37.0, "whole": 1e5}

PER_HEAD = 0.25  # of one head's fp32 scores: a tensor of one byte for each
FEWER, MORE, LENGTH, BATCH = 8, 24, 8192, 2  # heads, tokens and batch where memory is measured
MEMORY = {
    "ends": {},
    "mask": {"bounds": "mask", "relu": False, "sparse": True},
    "keys": {"bounds": "keys", "sparse": True, "rows": "each"},
    "rank": {"size": (LENGTH // 8, 8 * LENGTH), "bounds": "default", "rows": "row"},  # context parallelism: few rows
}
STEPS = {"4096": (2, 4096), "16384": (1, 16384)}  # batch, tokens
# GiB that the release needs of a GPU, 8, 13 and 64, with room for fragments: a smaller GPU leaves them out.
NEEDS = {"topk-4096": 12, "step-4096": 20, "topk-16384": 72}


class Case:
    """Inputs of one call: q, weights, k, query, key, options; the mask `seen` and `bias`, [b, sq, sk]."""

    def __init__(self, seed, device="cpu", **factors):
        vars(self).update(USUAL | factors)
        self.seed, random = seed, None if device == "meta" else torch.Generator(device).manual_seed(seed)
        self.made = {"generator": random, "device": device}
        (sq, sk), b, n = self.size, self.batch, self.attention * self.ranks
        self.inputs = {
            "q": self.draw(sq, b, self.heads, self.widths[0]),
            "weights": self.draw(sq, b, self.heads, floats=self.weights_floats),
            "k": self.draw(sk, b, self.widths[0]),
            "query": self.draw(sq, b, n, self.widths[1]),
            "key": self.draw(sk, b, 1 if self.shared_key else n, self.widths[1]).expand(sk, b, n, self.widths[1]),
        }
        self.bias = torch.zeros(1, device=device).expand(1, sq, sk)
        self.options = self.bound(sq, sk, b)
        some = torch.rand(b, sq, **self.made) < 0.6
        kinds = {"any": None, "row": some[0], "one row": some[:1], "each": some, "none": some[0] & False}
        self.real = kinds[self.rows]
        self.options |= {} if self.real is None else {"query_valid_rows": self.real}
        # Without any bounds upstream's top-k sees all keys, and its loss is causal.
        self.chosen_among = torch.ones_like(self.seen) if self.bounds == "default" else self.seen

    def __str__(self):
        return f"case {self.seed}"

    def draw(self, *shape, floats=None):
        """Draw a tensor of the case's dtype; of whole numbers most are 0, and so are some rows of them."""
        tensor = torch.randn(shape, **self.made)
        if self.numbers == "whole":
            tensor = (tensor * 0.6).round()
            tensor[torch.rand(shape[0], **self.made) < 0.2] = 0.0
        return self.laid_out(tensor.to(getattr(torch, floats or self.floats)))

    def laid_out(self, tensor):
        """Return a tensor contiguous or not."""
        return tensor.transpose(0, 1).contiguous().transpose(0, 1) if self.strided else tensor

    def bound(self, sq, sk, b):
        """Draw which keys a row sees, and what is added to its scores; return upstream's arguments."""
        device = self.made["device"]
        rows, keys = torch.arange(sq, device=device)[:, None], torch.arange(sk, device=device)
        if self.bounds == "default":
            self.seen = (keys <= rows).expand(b, sq, sk)
            return {}
        shapes = {"mask": (sq, sk), "bias": (sq, sk), "masks": (b, sq, sk), "biases": (b, sq, sk)}
        shapes |= {"padding": (1, sk), "paddings": (b, 1, sk)}  # one row of keys for all query rows
        if shape := shapes.get(self.bounds):
            seen = (torch.rand(shape, **self.made) < 0.7) & (rows[: shape[-2]] != 3)  # the third row sees no key
            bias = torch.zeros(shape, device=device)
            if self.bounds in ("bias", "biases"):  # fp32 numbers that no half holds, or halves, and an offset a row
                bias = torch.randn(shape, **self.made)
                bias = (bias * 2).round() / 2 if self.numbers == "whole" else bias
                bias += OFFSET[self.numbers] * torch.randint(-1, 2, (sq, 1), **self.made)
            self.seen, self.bias = seen.expand(b, sq, sk), bias.expand(b, sq, sk)
            return {"mask": self.laid_out(bias.masked_fill(~seen, DROP))}
        starts = torch.randint(0, max(1, sk // 2), (sq,), **self.made)
        ends = starts + torch.randint(0, sk, (sq,), **self.made)
        places = torch.randperm(sk, **self.made) if self.bounds == "keys" else keys
        self.seen = ((places >= starts[:, None]) & (places < ends[:, None])).expand(b, sq, sk)
        options = {"varlen_starts": starts, "varlen_ends": ends.int()}
        return options | ({"key_positions": places} if self.bounds == "keys" else {})

    def on_device(self, rank=0):
        """Return a rank's inputs, ready for autograd, the options, and copies of both."""
        heads = slice(rank * self.attention, (rank + 1) * self.attention)
        inputs = {name: x.to(DEVICE).detach() for name, x in self.inputs.items()}
        inputs |= {name: inputs[name][:, :, heads] for name in ("query", "key")}
        options = {name: x.to(DEVICE) for name, x in self.options.items()}
        copies = {name: x.clone() for name, x in (inputs | options).items()}
        for name in LEAVES:
            inputs[name].requires_grad_(name != self.frozen)
        return inputs, options, copies


# The reference, in float64.


def exact_inputs(case):
    """Return q, weights and k."""
    return [case.inputs[name].double().requires_grad_() for name in LEAVES]


def exact_scores(case, q, weights, k):
    """Return the scores summed over heads, [b, sq, sk], without any mask."""
    scores = torch.einsum("sbhd,tbd->sbht", q, k)
    return ((scores.relu() if case.relu else scores) * weights.unsqueeze(-1)).sum(2).transpose(0, 1)


def exact_loss(case, chosen, scores, query=None, key=None):
    """Return the loss, given the top-k that upstream chose and the summed scores; the target is of all ranks' heads."""
    support, keys = case.seen, case.seen.shape[2]
    if case.sparse:  # of the keys that are seen, those among the top-k
        among = torch.zeros(*support.shape[:2], keys + 1, dtype=torch.bool)
        support = support & among.scatter(-1, chosen.where(chosen >= 0, keys), value=True)[..., :-1]
    query, key = (case.inputs[n].double() if x is None else x for n, x in (("query", query), ("key", key)))
    attention = torch.einsum("sbnd,tbnd->bnst", query, key) * SCALE[case.numbers] + case.bias[:, None]
    target = attention.masked_fill(~support[:, None], DROP).softmax(-1).nan_to_num(0.0).sum(1)
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-10)
    logits = (scores + case.bias).masked_fill(~support, -1e300)  # a row without keys has no NaN in its derivative
    terms = target * (target.clamp_min(1e-10).log() - logits.log_softmax(-1))
    rows = terms.masked_fill(~support, 0.0).sum(-1)
    real = torch.ones_like(rows) if case.real is None else case.real.expand(rows.shape).double()
    total = (rows * real).sum()
    return case.coefficient * (total if case.per_token else total / real.sum().clamp_min(1.0))


# The functions under test.


def call(function, **named):
    """Call a function with the options that it has; one that it lacks must have the value that was fixed before."""
    parameters = inspect.signature(getattr(function, "forward", function)).parameters
    before = {"use_relu": True, "calculate_per_token_loss": False}
    lacking = [name for name, x in named.items() if name not in parameters and (name, x) not in before.items()]
    if lacking:
        pytest.skip(f"this release has no {', '.join(lacking)}")
    if function is dsa.FusedDSAIndexerLoss:
        return function.apply(*[named.get(x.name, x.default) for x in [*parameters.values()][1:]])
    return function(**{name: x for name, x in named.items() if name in parameters})


def topk_of(case, inputs, options):
    """Return the scores [b, sq, sk] and the top-k without a loss."""
    named = {name: x for name, x in options.items() if name != "query_valid_rows"}
    named |= {name: inputs[name] for name in LEAVES}
    return call(dsa.fused_qk_topk_naive, use_relu=case.relu, index_topk=case.topk, **named)


def loss_of(case, inputs, options, **scores):
    """Return the top-k and the loss; with index_scores and topk_indices, the loss that autograd differentiates."""
    group = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: case.ranks))
    named = {"mask": None, "softmax_scale": SCALE[case.numbers], "loss_coeff": case.coefficient, **options}
    named |= {"sparse_loss": case.sparse, "pg_collection": group, "calculate_per_token_loss": case.per_token}
    if scores:
        named |= scores
        return call(dsa.compute_dsa_indexer_loss, query=inputs["query"], key=inputs["key"], **named)
    return call(dsa.FusedDSAIndexerLoss, **inputs, topk=case.topk, use_relu=case.relu, **named)


def gradients(result, inputs, above=None, **options):
    """Return the gradients of those leaves that are not frozen, by name, given that of the result."""
    leaves = {name: x for name, x in inputs.items() if x.requires_grad}
    above = torch.ones((), device=result.device) if above is None else above
    assert result.requires_grad, "the result has no gradient"
    assert result.shape == above.shape, f"the result has shape {[*result.shape]}, promised was {[*above.shape]}"
    try:
        grads = torch.autograd.grad(result, [*leaves.values()], above, allow_unused=True, **options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # changes in place, reentrant checkpoints: the graph is upstream's
        raise AssertionError(f"autograd refuses the graph: {error}") from error
    return dict(zip(leaves, grads, strict=True))


def on_each_rank(case, run):
    """Return run(rank) of each rank. A first pass notes what a rank gives to all_reduce; a second adds the others'."""
    ranks, reduced, results = range(case.ranks), [[] for _ in range(case.ranks)], []
    for rank in ranks if case.ranks > 1 else ():
        with mock.patch.object(torch.distributed, "all_reduce", lambda x, n=rank, **_: reduced[n].append(x.clone())):
            run(rank)
    for rank in ranks:
        others = zip(*(reduced[other] for other in ranks if other != rank), strict=True)
        with mock.patch.object(torch.distributed, "all_reduce", lambda x, o=others, **_: x.add_(sum(next(o)))):
            results.append(run(rank))
    return results


# What is compared.


def assert_near(what, tensor, exact, tolerance=ROUNDINGS):
    """Assert that a result is as near to float64 as fp32 and one rounding to its dtype allow."""
    assert tensor is not None, f"{what}: none"
    tensor, exact = tensor.detach().cpu(), exact.detach()
    assert tensor.shape == exact.shape, f"{what}: shape {[*tensor.shape]}, promised was {[*exact.shape]}"
    tolerance += relative_error(exact.to(tensor.dtype), exact)
    zero = exact.norm() < 2.0**-40  # but for float64's own roundings
    error = float(tensor.double().norm()) if zero else relative_error(tensor, exact)
    assert error <= tolerance, f"{what}: relative error {error:.2e}, tolerance {tolerance:.2e}"


def assert_gradients(case, grads, exact):
    """Assert the gradients of q, weights and k: each of its input's dtype, and none of what is frozen."""
    for name, x in zip(LEAVES, exact, strict=True):
        if name != case.frozen:
            assert_near(f"{case}, gradient of {name}", grads[name], x)
            assert grads[name].dtype == case.inputs[name].dtype, f"{case}, gradient of {name}: {grads[name].dtype}"


def assert_unchanged(case, tensors, copies):
    """Assert that a call left its inputs as they were."""
    changed = [name for name, x in copies.items() if not torch.equal(tensors[name], x)]
    assert not changed, f"{case}: the call overwrote {changed}"


def assert_topk(case, chosen):
    """Assert that the chosen keys have the largest scores, by their scores, and are -1 where too few are seen."""
    scores, chosen = exact_scores(case, *exact_inputs(case)).detach(), chosen.cpu()
    (b, sq, sk), k = scores.shape, min(case.topk, scores.shape[-1])
    masked = (scores + case.bias).masked_fill(~case.chosen_among, DROP)
    exact = masked.topk(k, dim=-1).values
    assert chosen.shape == exact.shape, f"{case}: top-k of shape {[*chosen.shape]}, promised was {[*exact.shape]}"
    assert chosen.dtype == torch.int64, f"{case}: top-k of {chosen.dtype}"
    assert (chosen < sk).all(), f"{case}: a key of the top-k does not exist"
    assert torch.equal(chosen < 0, exact.isinf()), f"{case}: -1 stands elsewhere than after the keys that are seen"
    extended = torch.cat((masked, torch.full((b, sq, 1), DROP, dtype=masked.dtype)), -1)
    reached = extended.gather(-1, chosen.where(chosen >= 0, sk)).sort(-1, descending=True).values
    assert torch.equal(reached.isinf(), exact.isinf()), f"{case}: a key is chosen that must not be seen"
    if reached.numel() and case.chosen_among.any():
        error = (reached - exact).nan_to_num(0.0).abs().amax() / scores[case.chosen_among].abs().max().clamp_min(1e-30)
        assert error <= ROUNDINGS, f"{case}: scores of the top-k off by {error:.2e} of the largest"


def assert_scores(case):
    """Assert the top-k without a loss, its scores, their gradients by autograd, and that a second call agrees."""
    inputs, options, copies = case.on_device()
    scores, chosen = topk_of(case, inputs, options)
    seen, plain = case.chosen_among, scores.detach().cpu()
    assert plain.shape == seen.shape, f"{case}: scores of shape {[*plain.shape]}"
    assert plain.dtype == torch.float32, f"{case}: scores of {plain.dtype}"
    assert (plain[~seen] == DROP).all(), f"{case}: a key that must not be seen has a score"
    above = torch.randn(seen.shape, **case.made).where(seen, 0.0)
    grads = gradients(scores, inputs, above.to(DEVICE))
    with torch.no_grad():
        again, chosen_again = topk_of(case, inputs, options)
    leaves = exact_inputs(case)
    exact = exact_scores(case, *leaves)
    assert_near(f"{case}, scores", (plain.double() - case.bias).where(seen, 0.0), exact.where(seen, 0.0))
    assert_topk(case, chosen)
    assert_topk(case, chosen_again)
    assert_unchanged(case, inputs | options, copies)
    assert torch.equal(again, scores), f"{case}: a second call gives other scores"
    assert case.numbers == "whole" or torch.equal(chosen_again, chosen), f"{case}: a second call gives another top-k"
    assert_gradients(case, grads, torch.autograd.grad(exact, leaves, above.double()))


def assert_loss(case):
    """Assert the custom function on every rank: top-k, loss, gradients, and a second backward in small cases."""
    above = torch.tensor(case.above, device=DEVICE)

    def run(rank):
        inputs, options, copies = case.on_device(rank)
        chosen, loss = loss_of(case, inputs, options)
        twice = case.ranks == 1 and max(case.size) <= max(FACTORS["size"][1])
        grads = gradients(loss, inputs, above, retain_graph=twice)
        for name, x in gradients(loss, inputs, above).items() if twice else ():
            same = grads[name] is not None and x is not None and torch.equal(grads[name], x)
            assert same, f"{case}: a second backward gives another gradient of {name}"
        assert_unchanged(case, inputs | options, copies)
        return chosen.cpu(), loss, grads

    for chosen, loss, grads in on_each_rank(case, run):
        assert_topk(case, chosen)
        leaves = exact_inputs(case)
        exact = exact_loss(case, chosen, exact_scores(case, *leaves))
        if case.bounds not in ("bias", "biases"):  # which upstream's forward adds twice to the indexer's scores
            assert_near(f"{case}, loss", loss, exact)
        assert_gradients(case, grads, torch.autograd.grad(exact, leaves, above.cpu().double()))


def assert_autograd(case):
    """Assert the loss that autograd differentiates, by the scores and by the attention's query and key."""
    inputs, options, copies = case.on_device()
    with torch.no_grad():
        scores, chosen = topk_of(case, inputs, options)
    assert_topk(case, chosen)
    leaves = {"scores": scores.where(scores.isfinite(), 0.0), "query": inputs["query"], "key": inputs["key"]}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    copies["scores"] = leaves["scores"].detach().clone()
    # Under masks upstream overwrites the scores that it is given.
    own = leaves["scores"] if case.bounds in ("ends", "keys") else leaves["scores"] + 0
    loss = loss_of(case, leaves, options, index_scores=own, topk_indices=chosen)
    above = torch.tensor(case.above, device=DEVICE)
    grads = gradients(loss, leaves, above)
    exact = {name: x.detach().cpu().double().requires_grad_() for name, x in leaves.items()}
    reference = exact_loss(case, chosen.cpu(), *exact.values())
    assert_near(f"{case}, loss", loss, reference)
    assert_unchanged(case, inputs | options | leaves, copies)
    for name, x in zip(exact, torch.autograd.grad(reference, [*exact.values()], above.cpu().double()), strict=True):
        assert_near(f"{case}, gradient of {name}", grads[name], x)
        assert grads[name].dtype == leaves[name].dtype, f"{case}, gradient of {name}: {grads[name].dtype}"


ASSERTIONS = {"scores": assert_scores, "loss": assert_loss, "autograd": assert_autograd}


def live_bytes():
    """Count the bytes of the storages of all tensors that Python holds."""
    gc.collect()
    storages = (x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor)
    return sum({x._cdata: x.nbytes() for x in storages}.values())  # noqa: SLF001 - their identity


# The first: nothing has been left before it.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["f32", "bf16", "f64"])
def test_training_after_inference_is_right_by_any_default_dtype_and_no_call_leaves_tensors(dtype):
    cases, usual = [Case(6, **factors) for factors in USUAL_CASES], torch.get_default_dtype()
    calls = [(case, *case.on_device()[:2]) for case in cases]
    before = live_bytes()
    torch.set_default_dtype(dtype)
    try:
        with torch.inference_mode():
            for arguments in calls:
                topk_of(*arguments)
                loss_of(*arguments)
        assert (kept := live_bytes() - before) == 0, f"inference left {kept} bytes"
        for case, check in itertools.product(cases, ASSERTIONS.values()):
            check(case)
    finally:
        torch.set_default_dtype(usual)
    assert (kept := live_bytes() - before) == 0, f"training left {kept} bytes"


@pytest.mark.parametrize("bounds", FACTORS["bounds"])
@pytest.mark.parametrize("result", ASSERTIONS)
def test_values_of_small_cases_are_right(result, bounds):
    for seed, factors in enumerate(SMALL):
        if factors["bounds"] == bounds and (result, factors["ranks"]) != ("autograd", 2):
            ASSERTIONS[result](Case(seed, **factors))


@pytest.mark.parametrize("name", SPECIAL)
def test_values_of_special_cases_are_right(name):
    results, factors = SPECIAL[name]
    for result in results.split():
        ASSERTIONS[result](Case(1000 + [*SPECIAL].index(name), **factors))


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_scores_and_softmax_under_autocast_are_float32(kind):
    """Products of whole numbers are exact in bf16. The backward is called outside, as PyTorch advises."""
    factors = FEW | {"bounds": "mask", "floats": "float32", "numbers": "whole", "sparse": kind == "sparse"}
    case = Case(5, **factors)
    inputs, options, _ = case.on_device()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        chosen, loss = loss_of(case, inputs, options)
        scores = topk_of(case, inputs, options)[0].detach().where(case.seen.to(DEVICE), 0.0)
        alone = loss_of(case, inputs, options, index_scores=scores + 0, topk_indices=chosen)  # it overwrites them
    assert_topk(case, chosen)
    leaves = exact_inputs(case)
    exact = exact_scores(case, *leaves)
    assert scores.dtype == torch.float32
    assert_near("scores", scores, exact.where(case.seen, 0.0))
    exact = exact_loss(case, chosen.cpu(), exact)
    assert_near("loss", loss, exact)
    assert_near("loss, differentiated by autograd", alone, exact)
    assert_gradients(case, gradients(loss, inputs), torch.autograd.grad(exact, leaves))


def test_second_derivatives_are_right():
    """A penalty on the gradients differentiates them."""
    factors = FEW | {"size": (530, 23), "bounds": "masks", "floats": "float32", "heads": 3, "attention": 2}
    case = Case(8, **factors, sparse=True)
    inputs, options, _ = case.on_device()
    chosen, loss = loss_of(case, inputs, options)
    first = gradients(loss, inputs, create_graph=True)
    assert all(x is not None for x in first.values()), "no gradient"
    grads = gradients(sum(x.square().sum() for x in first.values()), inputs)
    leaves = exact_inputs(case)
    exact = exact_loss(case, chosen.cpu(), exact_scores(case, *leaves))
    first = torch.autograd.grad(exact, leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
    for name, x in zip(LEAVES, second, strict=True):
        assert_near(f"gradient of {name}", grads[name], x)


@pytest.mark.parametrize("kind", ["reentrant", "checkpoint"])
def test_loss_is_the_same_where_saved_tensors_are_made_again(kind):
    """The newer kind of checkpoint gives each of them once a backward."""
    case = Case(6, **USUAL_CASES[1])

    def results(run):
        inputs, options, _ = case.on_device()
        leaves = [inputs[name] for name in LEAVES]
        loss = run(lambda *new: loss_of(case, inputs | dict(zip(LEAVES, new, strict=True)), options)[1], *leaves)
        loss.backward()
        return [loss, *(x.grad for x in leaves)]

    plain = results(lambda call, *leaves: call(*leaves))
    remade = results(functools.partial(checkpoint, use_reentrant=kind == "reentrant"))
    for name, x, y in zip(("loss", *LEAVES), remade, plain, strict=True):
        assert_near(name, x, y.cpu())


@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_precision_of_the_process_holds_within_a_call_and_after_it(precision):
    case, before, seen = Case(6, **USUAL_CASES[0]), torch.get_float32_matmul_precision(), set()
    inputs, options, _ = case.on_device()

    def note(operator, *_):  # PyTorch raises where its two ways to set the precision were mixed
        if any(name in str(operator) for name in ("mm", "matmul", "einsum")):
            seen.add(torch.get_float32_matmul_precision())

    try:
        torch.set_float32_matmul_precision(precision)
        with watching(note):
            for _ in range(2):  # what a call leaves is seen by the next one
                topk_of(case, inputs, options)
                gradients(loss_of(case, inputs, options)[1], inputs)
    finally:
        unless_refused(lambda: torch.set_float32_matmul_precision(before), "")
    assert seen == {precision}, f"products were computed in {seen}"


# Memory.


class Meter(Watch):
    """Adds up the live bytes of tensors on device "meta"; a storage counts from its birth to its death."""

    def __init__(self):
        super().__init__(lambda *call: self.count(*tree_leaves(call[-1])))
        self.live, self.now, self.peak = set(), 0, 0

    def count(self, *values):
        for storage in (x.untyped_storage() for x in values if isinstance(x, torch.Tensor) and x.is_meta):
            key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 - its identity
            if key not in self.live:
                self.live.add(key)
                weakref.finalize(storage, self.dies, key, size)
                self.now += size
                self.peak = max(self.peak, self.now)

    def dies(self, key, size):
        self.live.remove(key)
        self.now -= size


def memory_of(case):
    """Return the peak of the top-k, the loss and its backward, and what each of them keeps."""
    memory, inputs = {}, {name: x.requires_grad_(name in LEAVES) for name, x in case.inputs.items()}

    def measured(part, run):
        before = meter.peak = meter.now
        result = run()
        memory.update({part: meter.peak - before, f"{part}.kept": meter.now - before})
        return result

    with Meter() as meter:
        meter.count(*inputs.values(), *case.options.values())
        with torch.no_grad():
            measured("topk", lambda: topk_of(case, inputs, case.options))
        _, loss = measured("forward", lambda: loss_of(case, inputs, case.options))
        results = measured("backward", lambda: gradients(loss, inputs))
    assert all(x is not None for x in results.values()), "no gradient"
    return memory


def long_case(how, device="meta", **factors):
    """Return a case of many tokens."""
    usual = {"size": (LENGTH, LENGTH), "batch": BATCH, "topk": 256, "widths": (32, 32)}
    return Case(0, device, **usual | MEMORY[how] | factors)


def realistic_case(name, device, topk):
    """Return a case of a training step, by its number of tokens."""
    batch, tokens = STEPS[name]
    factors = {"size": (tokens, tokens), "batch": batch, "heads": 32, "attention": 16, "topk": topk}
    return long_case("ends", device, widths=(128, 192), **factors)


@functools.cache
def memory_of_heads(how, heads, attention):
    """Return what a long case needs with so many heads, in units of one head's fp32 scores."""
    needed = memory_of(long_case(how, heads=heads, attention=attention))
    return {part: size / (4 * BATCH * LENGTH * LENGTH) for part, size in needed.items()}


@pytest.mark.defect
@pytest.mark.parametrize(
    "part", ["heads.topk", "heads.forward", "heads.backward", "attention.forward", "attention.backward"]
)
def test_peak_memory_does_not_grow_with_heads(part, figure):
    more, name = part.split(".")
    growth = {}
    for how in MEMORY:
        few, many = (memory_of_heads(how, **{"heads": 1, "attention": 1, more: count})[name] for count in (FEWER, MORE))
        growth[how] = round((many - few) / (MORE - FEWER), 4)
    figure(f"{part}.growth", max(growth.values()), "scores of a head")
    assert all(x < PER_HEAD for x in growth.values()), f"each head adds {growth} of its scores, limit {PER_HEAD}"


def test_a_step_asks_for_no_value_of_a_tensor(figure):
    """On device "meta" there is none to ask for; on a GPU the host would wait for it."""
    case = realistic_case("4096", "meta", 256)
    needed, unit = memory_of(case), 4 * case.batch * case.size[0] * case.size[1] * case.heads
    for part in ("topk", "forward", "backward"):
        figure(f"{part}.peak", needed[part] / unit, "units")


def test_few_rows_need_what_these_rows_need():
    """17 query rows, fewer than a fix may take at a time: 8 times the scores of all heads at most; the release: 4.4."""
    needed = memory_of(long_case("ends", size=(17, LENGTH), heads=MORE, attention=MORE))
    for part in ("topk", "forward", "backward"):
        times = needed[part] / (4 * BATCH * 17 * LENGTH * MORE)
        assert times < 8.0, f"{part} needs {times:.1f} times the scores of all heads for these rows, limit 8"


@pytest.mark.parametrize("how", MEMORY)
def test_forward_keeps_nothing_made_of_scores_for_backward(how):
    """The release keeps a sixteenth of fp32 [batch, queries, keys], the top-k; the limit is a quarter."""
    kept = memory_of_heads(how, heads=FEWER, attention=1)["forward.kept"]
    assert kept < 0.25, f"{kept:.3f} of fp32 [batch, queries, keys] is kept, limit 0.25"


@pytest.mark.defect
@pytest.mark.parametrize("step", NEEDS)
def test_a_realistic_step_needs_less_than_the_scores_of_all_heads(step, figure, claim):
    if DEVICE != "cuda":
        pytest.skip("needs a GPU")
    if torch.cuda.get_device_properties(0).total_memory < NEEDS[step] * 2**30:
        pytest.skip(f"needs {NEEDS[step]} GiB of GPU memory")
    part, tokens = step.split("-")
    case = realistic_case(tokens, DEVICE, 2048)
    inputs = {name: x.requires_grad_(name in LEAVES) for name, x in case.inputs.items()}

    def run():
        if part == "step":
            gradients(loss_of(case, inputs, case.options)[1], inputs)
        else:
            with torch.no_grad():
                topk_of(case, inputs, case.options)

    torch.cuda.empty_cache()
    peak = peak_memory(run)
    figure(f"{part}.{tokens}.peak", peak / 2**30, "GiB")
    scores = 4 * case.batch * case.size[0] * case.size[1] * case.heads
    assert peak < scores, f"{peak / 2**30:.2f} GiB, and the scores of all heads are {scores / 2**30:.2f} GiB"
    if step == "step-4096":
        claim("MEMORY_SAVE_VERIFIED")
