"""The gradient of Megatron's fused vocab-parallel cross entropy is as exact as the dtype of the logits.

What upstream promises of fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group):

- logits [sequence, batch, vocabulary / ranks] in fp32, fp16, bf16 or fp64, whatever makes them and however they lie in
  memory: large, shifted, -inf for classes that are masked out, slices, up to 131101 classes or 8209 tokens;
- target [sequence, batch]: any class, all on one rank, or some of no rank (-100, or too large), int64 or int32, of any
  strides; [batch, sequence] is refused;
- tp_group: 1, 2 or 4 ranks, beside other groups of the same size; also {0, 2} and {1, 3}, as order="dp-tp" makes them;
- any gradient from above: ones, one number expanded, weights, a loss mask, a loss scale, of any strides, or none;
- it returns fp32 losses and gives a gradient of the logits' dtype; what the caller gave stays as it is, but fp32
  logits, which both implementations overwrite (https://github.com/NVIDIA/Megatron-LM/pull/1594);
- nothing of the logits' size outlives backward; a change in place of what backward needs is refused, or changes
  nothing;
- few copies, few bytes held, two collectives a forward, nothing that the host reads or makes.

Every statement is judged for each dtype: bf16 is right in the release. The unfused function is a control throughout.

Not judged: second derivatives by the logits, for which both functions take the softmax as a constant; a GPU; time;
inductor's code (jit_fuser is judged up to AOTAutograd); the implementations "te" and "linear"; label smoothing, which
the function does not have.

Tolerances are norms of the difference over norms of the reference: softmax minus one-hot, times the gradient from
above, in float64 on the same logits. 2^-17 is 64 roundings of float32: exp, two sums of 131101 terms at most, which
PyTorch adds up in parts, a division and a product. For fp16 and bf16 one rounding to the dtype comes on top. On one and
two ranks, where a sum has one order, the gradient has the bits of the unfused function. The gradients of hidden states
and weights are sums of at most 1024 products, where much can cancel: 2^-15.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import inspect
import math
import types
import weakref
from dataclasses import dataclass

import pytest
import torch
from megatron.core import jit, parallel_state
from megatron.core.fusions import fused_cross_entropy
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel import cross_entropy
from torch.utils.checkpoint import checkpoint

from kit import current_target, pairwise
from kit.autograd import CHANGED_IN_PLACE, copies_of_saved, saved_sizes, unless_refused
from kit.errors import relative_error, unit_roundoff
from kit.ranks import assert_ranks_agree, own_group, partition, ranks
from kit.vocabulary import (
    Handed,
    Storages,
    assert_close,
    assert_same,
    function_node,
    on_ranks,
    perform,
    tensors_in,
    watching,
)

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
RANKS = 4
DTYPES = ("float32", "float16", "bfloat16", "float64")
FLOAT32 = 2.0**-17
PRODUCTS = 2.0**-15
TALKING = {"c10d", "c10d_functional", "_c10d_functional"}  # the namespaces of PyTorch's collectives
MANY = 8209  # a prime, so that no block of tokens or of classes divides it, and beyond the usual sizes of blocks
DISTANCES = (0.0, 1.0, 20.0, 86.0, 88.0, 95.0, 103.0, 104.0, 110.0, 300.0, 4e4, 1.2e5, 1e6, 1e30, math.inf)


@dataclass(frozen=True)
class Case:
    """What the loss is given; `shape` is sequence, batch, and the classes of each rank."""

    dtype: str = "float32"
    ranks: int = 1
    shape: tuple[int, int, int] = (5, 2, 7)
    targets: str = "any"
    gradient: str = "weights"
    values: str = "normal"
    producer: str = "linear"
    entry: str = "function"
    hidden: int = 6
    common: float = 0.0  # how many times larger than the rest what all output weights have in common is
    apart: bool = False  # the ranks of a group do not follow one another

    @property
    def classes(self):
        return self.shape[2] * self.ranks

    @property
    def tolerance(self):
        narrow = self.dtype in {"float16", "bfloat16"}
        return FLOAT32 + (unit_roundoff(getattr(torch, self.dtype)) if narrow else 0.0)


def sizes(shape):
    return "x".join(map(str, shape))


FACTORS = {
    "dtype": DTYPES,
    "ranks": (1, 2, 4),
    "shape": ((5, 2, 7), (1, 1, 3), (3, 2, 16), (13, 1, 33)),
    "targets": ("any", "one rank", "some of no rank"),
    "gradient": ("ones", "mean", "weights", "loss mask", "loss scale"),
    "values": ("normal", "large", "shifted", "masked"),
    "producer": ("linear", "leaf"),
    "entry": ("function", "model"),
}
EXAMPLE = {"shape": (63, 2, 1024), "gradient": "mean", "hidden": 32}
EXAMPLES = {  # of the report
    "example.float32.1": Case("float32", **EXAMPLE),
    "example.float32.2": Case("float32", 2, **EXAMPLE | {"shape": (63, 2, 512)}),
    "example.float32.4": Case("float32", 4, **EXAMPLE | {"shape": (63, 2, 256)}),
    "example.float32.1.common": Case("float32", **EXAMPLE, common=4.0),
    "example.float16.1": Case("float16", **EXAMPLE),
    "example.bfloat16.1": Case("bfloat16", **EXAMPLE),
}
CASES = {}
for values in pairwise(FACTORS):
    words = [str(value).replace(" ", "_") for name, value in values.items() if name != "shape"]
    CASES["-".join([*words, sizes(values["shape"])])] = Case(**values)
for dtype in DTYPES:
    CASES[f"long-{dtype}"] = Case(dtype, shape=(MANY, 1, 3), producer="leaf")
    CASES[f"wide-{dtype}"] = Case(dtype, 2, (3, 1, MANY), producer="leaf")
    CASES[f"wider_than_15_bits-{dtype}"] = Case(dtype, shape=(5, 1, 65521), producer="leaf")
    CASES[f"wider_than_16_bits-{dtype}"] = Case(dtype, shape=(5, 1, 131101), producer="leaf")
    CASES[f"ranks_apart-{dtype}"] = Case(dtype, 2, producer="leaf", apart=True)


def role(dtype):
    """Return the mark of what needs a gradient of the logits' dtype: in bf16 it is right in the release."""
    return pytest.mark.control if dtype == "bfloat16" else pytest.mark.defect


def with_roles(cases):
    return [pytest.param(case, id=name, marks=role(case.dtype)) for name, case in cases.items()]


def on_ranks_for(dtypes, mark):
    """Return a decorator that makes a test for each dtype of a function that asserts on every rank."""
    parameters = pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=mark(dtype)) for dtype in dtypes])
    return lambda job: parameters(on_ranks(job))


wrong_but_in_bf16 = on_ranks_for(DTYPES, role)
right_for_each_dtype = on_ranks_for(DTYPES, lambda _: pytest.mark.control)
right_but_for_fp32 = on_ranks_for(DTYPES[1:], lambda _: pytest.mark.control)


class Inputs:
    """The whole inputs of a case, a rank's part of them, and the reference."""

    def __init__(self, case, replica=0):
        self.case, (length, batch, part) = case, case.shape
        self.dtype, self.classes = getattr(torch, case.dtype), case.classes
        random = torch.Generator().manual_seed(19 + replica)
        normal = functools.partial(torch.randn, generator=random)
        self.hidden = normal(length, batch, case.hidden).to(self.dtype)
        # What all output weights have in common cancels in the gradient of the hidden states.
        self.weight = (normal(self.classes, case.hidden) + case.common * normal(case.hidden)).to(self.dtype)
        self.offset = normal(self.classes).zero_()
        if case.values == "shifted":
            self.offset.fill_(100.0)
        elif case.values == "masked":  # as for classes that pad the vocabulary
            self.offset[1::3] = -math.inf
        self.offset = self.offset.to(self.dtype)
        self.factor = 6.0 if case.values == "large" else 1.0
        self.targets = self.chosen(torch.randint(self.classes, (length, batch), generator=random), part)
        self.above = self.weighed(normal(length, batch))
        self.rows = self.distant(replica) if case.values == "distant" else None

    def chosen(self, targets, part):
        """Return the targets: never a class that is masked out."""
        if self.case.targets == "one rank":
            targets = targets % part + self.classes - part
        targets = targets - (targets % 3 == 1).long() if self.case.values == "masked" else targets
        if self.case.targets == "some of no rank":
            targets.view(-1)[::4] = -100
            targets.view(-1)[3::4] = self.classes
        return targets

    def weighed(self, normal):
        """Return the gradient of the losses that comes from above, in float32."""
        count = normal.numel()
        return {
            "ones": torch.ones_like(normal),
            "mean": torch.tensor(1 / count).expand(normal.shape),
            "weights": normal,
            "loss mask": (torch.arange(count).view(normal.shape) % 3 != 1).float() / count,
            "loss scale": torch.full_like(normal, 1024.0),
        }[self.case.gradient]

    def distant(self, replica):
        """Return logits whose label lies as far below the largest of its row as DISTANCES say; sets the targets."""
        distances = distances_in(self.case.dtype)
        rows = torch.arange(len(distances)).unsqueeze(1)
        self.targets = (3 * rows + replica) % self.classes
        place = (torch.arange(self.classes) - self.targets) % self.classes / (self.classes - 1)  # 0: the label
        far = torch.tensor(distances, dtype=torch.float64).unsqueeze(1)
        logits = (place - 0.5) * far.where(far.isfinite(), 1.0)
        return logits.masked_fill(far.isinf() & (place == 0), -math.inf).to(self.dtype).unsqueeze(1)

    def leaves(self, rank=0):
        """Return hidden states, the rank's part of the weights, and its logits, ready for autograd."""
        part = self.case.shape[2]
        own = slice(rank * part, (rank + 1) * part)
        if self.rows is not None:
            return None, None, self.rows[..., own].clone().requires_grad_()
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight[own].clone().requires_grad_()
        logits = hidden @ weight.t() * self.factor + self.offset[own]
        return hidden, weight, logits.detach().requires_grad_() if self.case.producer == "leaf" else logits

    def reference(self, logits):
        """Return losses and gradient in float64 for the whole logits; both functions compute in float32 on them."""
        wide = logits.float().double()
        mine = (self.targets >= 0) & (self.targets < self.classes)
        index = self.targets.where(mine, 0).unsqueeze(-1)
        # A target of no rank counts as if its logit were the largest, and is no class in the gradient.
        chosen = wide.gather(-1, index).squeeze(-1).where(mine, wide.amax(-1))
        gradient = wide.softmax(-1).scatter_add(-1, index, -mine.double().unsqueeze(-1))
        return wide.logsumexp(-1) - chosen, gradient * self.above.double().unsqueeze(-1)


def distances_in(dtype):
    """Return the distances that a dtype can hold; fp16 reaches 1.2e5 from its largest number to its smallest."""
    return [each for each in DISTANCES if each <= (1.2e5 if dtype == "float16" else 1e30)] + [math.inf]


class Functions:
    """The functions under test, called alike, on one rank of the group that a case asks for."""

    def __init__(self, rank, fuser):
        jit.jit_fuser = fuser
        importlib.reload(fused_cross_entropy)  # whose functions were decorated when it was imported
        language_module.fused_vocab_parallel_cross_entropy = fused_cross_entropy.fused_vocab_parallel_cross_entropy
        self.world, self.number = rank.count, rank.number
        layouts = [(size, False) for size in (1, 2, 4) if size <= self.world] + [(2, True)] * (self.world == RANKS)
        self.groups = {each: own_group(partition(self.world, each[0], apart=each[1])) for each in layouts}

    def perform(self, job, **given):
        """Run a job on every group of a case; return what the last group found, whose ranks are others in the world."""
        case = given.get("case", Case())
        members = partition(self.world, case.ranks, apart=case.apart)
        mine = next(number for number, each in enumerate(members) if self.number in each)
        self.group, self.rank = self.groups[case.ranks, case.apart], members[mine].index(self.number)
        self.replica = len(members) - 1 - mine
        self.handed = Handed()
        found = job(self, **given)
        self.handed.assert_unaltered()
        return found if self.replica == 0 else None

    def loss(self, logits, targets, *, fused=True, entry="function"):
        """Return the losses of a rank's logits; the function gets a copy of the targets."""
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = self.group  # noqa: SLF001 - where older releases look for it
        self.handed.watch("the logits", logits, version=logits.dtype != torch.float32)  # fp32 ones are overwritten
        labels = self.handed.copy("the targets", targets.t() if entry == "model" else targets)
        if entry == "model":
            config = types.SimpleNamespace(cross_entropy_loss_fusion=fused, cross_entropy_fusion_impl="native")
            groups = types.SimpleNamespace(tp=self.group)
            model = types.SimpleNamespace(config=config, pg_collection=groups, tp_group=self.group)
            model.model_comm_pgs = groups  # the name in 0.14.0
            loss = language_module.LanguageModule.compute_language_model_loss(model, labels, logits)
        else:
            loss = (self.fused if fused else self.unfused)(logits, labels)
        shape = targets.t().shape if entry == "model" else targets.shape
        assert loss.shape == shape, f"losses of shape {loss.shape}, not {shape}"
        return loss.t() if entry == "model" else loss

    def fused(self, *given, **named):
        return self.grouped(fused_cross_entropy.fused_vocab_parallel_cross_entropy, *given, **named)

    def unfused(self, *given):
        return self.grouped(cross_entropy.vocab_parallel_cross_entropy, *given)

    def grouped(self, function, *given, **named):
        """Call a function with the group, which older releases take from parallel_state."""
        has_group = "tp_group" in inspect.signature(function).parameters
        return function(*given, **named, **({"tp_group": self.group} if has_group else {}))

    def step(self, case, *, fused=True):
        """Go forward and backward; return the logits as they were, the losses, and the gradients."""
        inputs = Inputs(case, self.replica)
        hidden, weight, logits = inputs.leaves(self.rank)
        given = logits.detach().clone()
        loss = self.loss(logits, inputs.targets, fused=fused, entry=case.entry)
        leaves = (logits,) if case.producer == "leaf" else (logits, hidden, weight)
        gradients = self.gradients(loss, leaves, inputs.above)
        return {"logits": given, "loss": loss.detach(), "gradients": gradients}

    def start(self, dtype):
        """Return the inputs, the logits and the losses of the smallest case."""
        inputs = Inputs(Case(dtype), self.replica)
        logits = inputs.leaves()[2]
        inputs.given = logits.detach().clone()
        return inputs, logits, self.loss(logits, inputs.targets)

    def bits(self, loss, logits, above):
        """Return the losses and the logits' gradient."""
        return loss.detach(), *self.gradients(loss, [logits], above)

    def gradients(self, loss, leaves, above, **named):
        """Return the gradients of the leaves: zeros where there is none, which is wrong almost everywhere."""
        if not loss.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        if above is not None and not above.requires_grad:
            above = self.handed.copy("the gradient from above", above)
        found = torch.autograd.grad(loss, leaves, above, allow_unused=True, **named)
        return [torch.zeros_like(leaf) if x is None else x for x, leaf in zip(found, leaves, strict=True)]


def set_up(rank):
    return Functions(rank, lambda function: function)  # as disable_jit_fuser does: inductor compiles for a minute


def set_up_traced(rank):
    return Functions(
        rank, functools.partial(torch.compile, backend="aot_eager")
    )  # traced and functionalized, not lowered


@pytest.fixture(scope="session")
def world():
    """Four ranks; each group of 1, 2 or 4 of them runs a job, with numbers of its own."""
    if current_target().name != "cpu":
        pytest.skip("the ranks talk through gloo: only the target cpu is judged")
    with ranks(RANKS, set_up) as group:
        yield group


@pytest.fixture(scope="session")
def traced_world():
    if current_target().name != "cpu":
        pytest.skip("only the target cpu is judged")
    with ranks(1, set_up_traced) as group:
        yield group


def steps_of(up, case, fused):
    return [up.step(case, fused=fused) for _ in range(2 if fused else 1)]


@pytest.fixture(scope="session")
def steps(world):
    """Return a function: the steps of each rank of the last group, twice the fused one."""

    @functools.cache
    def run(case, fused):
        return [
            each
            for each in world.run(perform, __name__, "steps_of", {"case": case, "fused": fused})
            if each is not None
        ]

    return run


def whole(found, name):
    """Join what the ranks found along the vocabulary."""
    return torch.cat([each[0]["gradients"][0] if name == "gradient" else each[0][name] for each in found], -1)


def measured(found, case):
    """Return what the ranks found and its reference: losses, gradient, and those of hidden states (dX) and weights."""
    inputs = Inputs(case)
    losses, gradient = inputs.reference(whole(found, "logits"))
    pairs = {"loss": (found[0][0]["loss"], losses), "gradient": (whole(found, "gradient"), gradient)}
    if case.producer == "linear" and case.dtype in {"float32", "float64"}:
        hidden = sum(each[0]["gradients"][1].double() for each in found)
        weight = torch.cat([each[0]["gradients"][2] for each in found])
        pairs["dX"] = hidden, gradient @ inputs.weight.double() * inputs.factor
        pairs["dW"] = weight, gradient.flatten(0, 1).t() @ inputs.hidden.double().flatten(0, 1) * inputs.factor
    return pairs


def judge(found, case):
    """Judge dtypes, losses and gradients of a case against float64, and that the ranks agree."""
    for step, *_ in found:
        assert step["loss"].dtype == torch.float32, f"losses of {step['loss'].dtype}"
        assert step["gradients"][0].dtype == getattr(torch, case.dtype), f"a gradient of {step['gradients'][0].dtype}"
    assert_ranks_agree([step["loss"] for step, *_ in found], "the losses")
    tolerances = {"loss": FLOAT32, "gradient": case.tolerance, "dX": PRODUCTS, "dW": PRODUCTS}
    for name, pair in measured(found, case).items():
        assert_close(
            *pair, tolerances[name], name, least=1.0 if name == "loss" else 0.0
        )  # a difference, which can cancel


def record(output, name, found, case):
    """Record what every rank came to: its bits have to be the other tree's, where they repeat."""
    for rank, (first, again) in enumerate(found):
        output(f"{name}.loss.{rank}", first["loss"], must_match=again["loss"].equal(first["loss"]))
        gradient = first["gradients"][0]
        if case.dtype != "float16":
            repeats = again["gradients"][0].equal(gradient)
            output(f"{name}.as_bfloat16.{rank}", gradient.bfloat16(), must_match=repeats)


@pytest.mark.parametrize("case", with_roles(CASES | EXAMPLES))
def test_losses_and_gradients_are_exact(steps, output, figure, request, case):
    found, name = steps(case, True), request.node.callspec.id
    record(output, name, found, case)
    for key, pair in measured(found, case).items() if name in EXAMPLES else ():
        figure(f"{name}.{key}", relative_error(*pair))
    judge(found, case)
    if case.ranks < RANKS:
        differ = int((whole(found, "gradient") != whole(steps(case, False), "gradient")).sum())
        assert differ == 0, f"{differ} numbers of the gradient are not those of the unfused function"


@pytest.mark.control
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_unfused_losses_and_gradients_are_exact(steps, case):
    judge(steps(case, False), case)


@wrong_but_in_bf16
def test_backward_returns_the_dtype_of_the_logits(up, dtype):
    """Nothing is cast a second time outside the fusion."""
    above = []
    inputs, logits, loss = up.start(dtype)
    function_node(loss).register_prehook(lambda given: above.extend(copy.deepcopy(given)))
    up.gradients(loss, [logits], inputs.above)
    again = up.start(dtype)[2]  # the losses: PyTorch 2.11 frees what is saved for backward with the last of them
    found = getattr(function_node(again).apply(*above)[0], "dtype", None)
    assert found == getattr(torch, dtype), f"backward returned {found}"


@wrong_but_in_bf16
def test_backward_copies_the_gradient_at_most_once(up, dtype):
    inputs, logits, loss = up.start(dtype)
    made = []

    def note(_, arguments, found):
        old = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.numel() == logits.numel():
            made.append(0 if found.untyped_storage().data_ptr() in old else found.nbytes)

    with watching(note):
        up.gradients(loss, [logits], inputs.above)
    assert sum(made) <= logits.nbytes, f"new tensors of {made} bytes; the gradient has {logits.nbytes}"


@right_for_each_dtype
def test_forward_holds_a_softmax_and_labels_at_most(up, dtype):
    inputs = Inputs(Case(dtype), up.replica)
    logits = inputs.leaves()[2]
    with saved_sizes() as saved:
        up.loss(logits, inputs.targets)
    limit = logits.numel() * 4 + inputs.targets.numel() * 9
    assert sum(saved) <= limit, f"{sum(saved)} bytes are held, {limit} are allowed"


@right_for_each_dtype
def test_nothing_as_large_as_the_logits_outlives_backward(up, dtype):
    """A caller keeps the losses of many steps, to report them; copies made on the way are counted, too."""
    inputs, storages = Inputs(Case(dtype), up.replica), Storages()
    logits = inputs.leaves()[2]
    with watching(storages.note):
        loss = up.loss(logits, inputs.targets)
        gradients = up.gradients(loss, [logits], inputs.above)
    up.handed.clear()
    del logits, gradients
    smallest = 2 * inputs.classes * inputs.targets.numel()
    living = [each for each in storages.living() if each[0] >= smallest]
    assert not living, f"beside {loss.numel()} losses there live on {living}"


@right_for_each_dtype
def test_gradient_lies_dense_in_memory_of_its_own(up, dtype):
    """Else the products of the linear layer copy it, or it holds memory that nobody reads."""
    inputs, logits, loss = up.start(dtype)
    seen = []
    logits.register_hook(lambda x: seen.append((x.is_contiguous(), x.untyped_storage().nbytes())))
    up.gradients(loss, [logits], inputs.above)
    assert seen == [(True, logits.nbytes)], f"contiguous, bytes: {seen}; expected {logits.nbytes}"


def with_copies(function):
    with copies_of_saved(at_each_use=True):
        return function()


LOGITS_GONE = {
    "forward": lambda function: function(),
    "offloaded": with_copies,
    "recomputed": functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
}


@pytest.mark.parametrize("way", LOGITS_GONE)
@wrong_but_in_bf16
def test_gradient_of_logits_that_nobody_keeps(up, way, dtype):
    """As in a model: nothing can be looked up about the logits in backward, and a hook alone sees their gradient."""
    inputs, caught = Inputs(Case(dtype), up.replica), []
    hidden, weight, given = inputs.leaves()
    given = given.detach().clone()

    def losses():
        logits = hidden @ weight.t() + inputs.offset
        logits.register_hook(caught.append)
        loss = up.loss(logits, inputs.targets)
        up.handed.forget(logits)
        return loss

    up.gradients(LOGITS_GONE[way](losses), [hidden, weight], inputs.above)
    assert caught, "no gradient reached the logits"
    assert_close(caught[0], inputs.reference(given)[1], inputs.case.tolerance, "the logits' gradient")
    assert caught[0].dtype == inputs.dtype, f"a gradient of {caught[0].dtype}"


@right_for_each_dtype
def test_nothing_is_read_or_made_on_the_host(up, dtype):
    """On tensors without memory: a GPU's host would wait or copy, which the capture of a CUDA graph refuses.

    A number without dimensions may come from the host.
    """
    inputs, made = Inputs(Case(dtype), up.replica), []
    logits, labels, above = (x.detach().to("meta") for x in (inputs.leaves()[2], inputs.targets, inputs.above))
    logits.requires_grad_()

    def note(operator, _, found):
        made.extend(operator.name() for each in tensors_in(found) if each.dim() and not each.is_meta)

    try:
        with watching(note):
            up.fused(logits, labels).backward(above)
    except (RuntimeError, NotImplementedError) as error:
        raise AssertionError(f"it needs a number of a tensor: {error}"[:200]) from error
    assert not made, f"made elsewhere: {made}"
    assert (logits.grad.dtype, logits.grad.shape) == (logits.dtype, logits.shape)


@right_for_each_dtype
def test_second_backward_is_refused_and_leaves_the_gradient(up, dtype):
    inputs, logits, loss = up.start(dtype)
    (first,) = up.gradients(loss, [logits], inputs.above, retain_graph=True)
    before = first.clone()
    with pytest.raises(RuntimeError, match=CHANGED_IN_PLACE):
        up.gradients(loss, [logits], inputs.above)
    assert_same([first], [before], "the first gradient after the second backward")


@wrong_but_in_bf16
def test_gradient_of_logits_that_another_term_uses(up, dtype):
    """Its gradient is 0.25 everywhere, and a hook doubles the sum in place: two more roundings, of a larger sum."""
    inputs = Inputs(Case(dtype), up.replica)
    given, logits = inputs.leaves()[2].detach(), inputs.leaves()[2]
    logits.register_hook(lambda x: x.mul_(2))
    term = (logits * 0.25).sum()  # before forward overwrites fp32 logits
    (gradient,) = up.gradients((up.loss(logits, inputs.targets) * inputs.above).sum() + term, [logits], None)
    tolerance = 2 * inputs.case.tolerance - FLOAT32
    assert_close(gradient, 2 * (inputs.reference(given)[1] + 0.25), tolerance, "the doubled sum")


@wrong_but_in_bf16
def test_derivative_of_the_gradient_by_the_weights_of_the_losses(up, dtype):
    """Along one direction: what is multiplied by the gradient from above is rounded in float32 alone."""
    inputs = Inputs(Case(dtype), up.replica)
    logits, above = inputs.leaves()[2], up.handed.copy("the gradient from above", inputs.above).requires_grad_()
    given = logits.detach().clone()
    along = torch.arange(logits.numel()).sin().view_as(logits).to(logits.dtype)
    (gradient,) = up.gradients(up.loss(logits, inputs.targets), [logits], above, create_graph=True)
    (derivative,) = up.gradients(gradient, [above], along)
    factor = inputs.reference(given)[1] / inputs.above.double().unsqueeze(-1)
    assert_close(derivative, (factor * along.double()).sum(-1), FLOAT32, "the derivative")


@right_for_each_dtype
def test_losses_where_no_gradient_is_asked_for(up, dtype):
    inputs = Inputs(Case(dtype), up.replica)
    given = inputs.leaves()[2].detach().clone()
    losses = {"grad mode, no leaf": up.loss(given.clone(), inputs.targets)}
    for name, mode in (("no_grad", torch.no_grad), ("no_grad, no leaf", torch.no_grad), ("", torch.inference_mode)):
        logits = inputs.leaves()[2]
        with mode():
            found = up.loss(logits if name == "no_grad" else logits.detach(), inputs.targets)
            losses[name or "inference_mode, no leaf"] = found.clone()
    for name, loss in losses.items():
        assert loss.dtype == torch.float32, f"{name}: losses of {loss.dtype}"
        assert_close(loss, inputs.reference(given)[0], FLOAT32, name)


@right_for_each_dtype
def test_arguments_by_name(up, dtype):
    inputs, logits, loss = up.start(dtype)
    expected = up.bits(loss, logits, inputs.above)
    logits = inputs.leaves()[2]
    try:
        loss = up.fused(vocab_parallel_logits=logits, target=inputs.targets.clone())
    except TypeError as error:  # of the call itself, which is here
        raise AssertionError(str(error)) from error
    assert_same(up.bits(loss, logits, inputs.above), expected, "by name")


@right_for_each_dtype
def test_gradient_from_above_of_any_strides_or_none(up, dtype):
    above = Inputs(Case(dtype), up.replica).above
    strided = {
        "transposed": above.t().contiguous().t(),
        "one row": above[:1].expand(above.shape),
        "one column": above[:, :1].expand(above.shape),
        "every second": above.repeat_interleave(2, 1)[:, ::2],
    }
    for name, each in strided.items():
        found = []
        for given in (each, each.clone(memory_format=torch.contiguous_format)):
            _, logits, loss = up.start(dtype)
            found.append(up.gradients(loss, [logits], given))
        assert_same(*found, name)

    class Stop(torch.autograd.Function):  # autograd hands on zeros, or None to a function that asks for it
        forward, backward = staticmethod(lambda _, loss: loss.clone()), staticmethod(lambda *_: None)

    inputs, logits, loss = up.start(dtype)
    (gradient,) = up.gradients(Stop.apply(loss), [logits], inputs.above)
    assert not gradient.any(), "without a gradient from above the logits' is not 0"


@wrong_but_in_bf16
def test_logits_and_targets_that_are_slices(up, dtype):
    """Nothing beside them is written or has a gradient."""
    inputs = Inputs(Case(dtype), up.replica)
    given = inputs.leaves()[2].detach()
    (length, batch, classes), (losses, reference) = given.shape, inputs.reference(given)
    slices = {
        "of padded classes": ((length, batch, classes + 2), (slice(None), slice(None), slice(classes))),
        "of a longer sequence": ((length + 1, batch, classes), (slice(1, None),)),
        "every second of a batch": ((length, 2 * batch, classes), (slice(None), slice(1, None, 2))),
    }
    for name, (shape, at) in slices.items():
        larger = given.new_full(shape, 9.0)
        larger[at] = given
        leaf = larger.clone().requires_grad_()
        loss = up.loss(leaf[at], inputs.targets.repeat_interleave(2, 1)[:, ::2])
        (gradient,) = up.gradients(loss, [leaf], inputs.above)
        assert_close(loss, losses, FLOAT32, f"losses, {name}")
        assert_close(gradient[at], reference, inputs.case.tolerance, f"the gradient, {name}")
        gradient[at], larger[at] = 0, leaf.detach()[at]
        assert not gradient.any(), f"a gradient beside the slice {name}"
        assert_same([leaf.detach()], [larger], f"beside the slice {name}")


def changed_by_the_caller(up, dtype, what):
    """Return losses and gradient after a change in place between forward and backward, and those without it."""
    inputs, logits, loss = up.start(dtype)
    if what == "losses":  # masked and divided
        mask = (torch.arange(loss.numel()).view_as(loss) % 3 != 1).float()
        expected = up.bits(loss * mask / 3, logits, inputs.above)
        _, logits, loss = up.start(dtype)
        return up.bits(loss.mul_(mask).div_(3), logits, inputs.above), expected
    if what == "targets":
        up.handed.last().add_(1).remainder_(inputs.classes)  # the copy that the function was given
    else:
        up.handed.forget(logits)
        logits.detach().zero_()
    return up.gradients(loss, [logits], inputs.above), up.step(inputs.case)["gradients"][:1]


@right_for_each_dtype
def test_caller_changes_in_place_what_is_his(up, dtype):
    """The losses, the targets, and logits that forward made fp32 ones of."""
    for what in ("losses", "targets", "logits")[: 2 if dtype == "float32" else 3]:
        found = unless_refused(functools.partial(changed_by_the_caller, up, dtype, what), "inplace")
        assert found is not None, f"refused: a change of the {what}"
        assert_same(*found, f"after a change of the {what}")


@right_for_each_dtype
def test_change_in_place_of_what_backward_needs_is_noticed(up, dtype):
    """Of what forward saved, of fp32 logits, in whose memory that lies, and of what another term saved of these."""
    (expected,) = up.step(Case(dtype))["gradients"][:1]
    changes = {
        "cleared": lambda logits, _: logits.detach().zero_(),
        "divided": lambda logits, _: logits.detach().div_(2.0),
        "one row": lambda logits, _: logits.detach()[1].add_(1.0),
        "clamped without gradients": lambda logits, _: logits.detach().clamp_(0.1, 0.2),
    }
    for number in range(len(saved(up.start(dtype)[2]))):
        changes[f"saved {number}"] = lambda _, loss, at=number: saved(loss)[at].detach().logical_not_()
    for name, change in changes.items():
        inputs, logits, loss = up.start(dtype)
        up.handed.forget(logits)
        change(logits, loss)
        assert_refused_or(functools.partial(up.gradients, loss, [logits], inputs.above), expected, name)
    inputs = Inputs(Case(dtype), up.replica)
    logits = inputs.leaves()[2]
    term, expected = logits.square().sum(), 2 * logits.detach()
    up.loss(logits, inputs.targets)
    assert_refused_or(functools.partial(torch.autograd.grad, term, [logits]), expected, "another term")


def saved(loss):
    return function_node(loss).saved_tensors


def assert_refused_or(backward, expected, what):
    """Assert that a backward is refused because of a change in place, or gives what is expected."""
    found = unless_refused(backward, CHANGED_IN_PLACE)
    assert_same(found or [expected], [expected], f"not refused after a change in place: {what}")


class Witness:
    """Something that the graph behind the logits refers to."""


def left_of(up, case, how):
    """Name what is alive after a loss was dropped, of which its numbers alone are kept."""
    inputs, watched, storages = Inputs(case, up.replica), {}, Storages()
    leaf = inputs.leaves(up.rank)[2].detach().requires_grad_()

    class Behind(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            ctx.witness = Witness()
            watched["the graph of the model"] = weakref.ref(ctx.witness)
            return logits.clone()

        backward = staticmethod(lambda _, above: above)

    def run():
        logits = Behind.apply(leaf)
        watched["the logits"] = weakref.ref(logits)
        loss = up.loss(logits, inputs.targets)
        watched["the losses"] = weakref.ref(loss)
        if loss.requires_grad:
            watched["forward's node"] = weakref.ref(function_node(loss))
        if how.startswith("after"):
            up.gradients(loss, [leaf], inputs.above, retain_graph="keeps" in how)
        return loss.detach().clone()

    with watching(storages.note), torch.set_grad_enabled(how != "evaluated"):
        numbers = run()
    up.handed.clear()
    living = [name for name, reference in watched.items() if reference() is not None]
    return living + storages.living(numbers, leaf, inputs.targets, inputs.above, seconds=3.0)


@right_for_each_dtype
def test_loss_that_is_dropped_leaves_nothing(up, dtype):
    """With Python's collector of cycles off, as --manual-gc has it: what waits for it holds a GPU's memory."""
    ways = ("without backward", "evaluated", "after backward", "after backward that keeps the graph")
    for how in ways:
        left_of(up, Case(dtype), how)  # what is compiled now may leave cycles
    gc.collect()
    gc.disable()
    try:
        for how in ways:
            left = left_of(up, Case(dtype), how)
            assert not left, f"{how}, there live on {left}"
    finally:
        gc.enable()


@right_for_each_dtype
def test_targets_of_batch_and_sequence_are_refused(up, dtype):
    """They would be the targets of other tokens."""
    inputs = Inputs(Case(dtype), up.replica)
    with pytest.raises((RuntimeError, ValueError, IndexError, AssertionError)):
        up.fused(inputs.leaves()[2], inputs.targets.t().contiguous())


@wrong_but_in_bf16
def test_autocast_to_another_dtype_changes_nothing(up, dtype):
    inputs = Inputs(Case(dtype), up.replica)
    logits = inputs.leaves()[2]
    given = logits.detach().clone()
    with torch.autocast("cpu", torch.float16 if dtype == "bfloat16" else torch.bfloat16):
        (gradient,) = up.gradients(up.loss(logits, inputs.targets), [logits], inputs.above)
    assert_close(gradient, inputs.reference(given)[1], inputs.case.tolerance, "the gradient")
    assert gradient.dtype == inputs.dtype, f"a gradient of {gradient.dtype}"


@right_but_for_fp32
def test_logits_that_are_not_fp32_stay_as_they_are(up, dtype):
    """They are only read, and may not count as changed: another term that saved them can go backward."""
    inputs = Inputs(Case(dtype), up.replica)
    logits = inputs.leaves()[2]
    before, term = logits.detach().clone(), logits.square().sum()
    up.gradients(up.loss(logits, inputs.targets), [logits], inputs.above)
    assert_same([logits.detach()], [before], "the logits, after backward")
    found = unless_refused(lambda: torch.autograd.grad(term, [logits]), CHANGED_IN_PLACE)
    assert found is not None, "refused: the logits count as changed"
    assert_same(found, [2 * logits], "the gradient of the other term")


@pytest.mark.control
@pytest.mark.parametrize("case", [pytest.param(Case(d, n), id=f"{d}-{n}") for d in DTYPES for n in (1, 2, 4)])
@on_ranks
def test_ranks_talk_twice_with_three_numbers_a_token(up, case):
    """Of the largest logits; and of the labels' logits and the sums together, for which the fusion is there."""
    called = []

    def note(operator, arguments, _):
        if operator.namespace in TALKING and "wait" not in operator.name():
            called.append(sum(each.nbytes for each in tensors_in(arguments)))

    with watching(note):
        up.step(case)
    limit = 3 * 4 * math.prod(case.shape[:2])
    assert 0 < len(called) <= 2, f"{len(called)} collectives"
    assert 0 < sum(called) <= limit, f"collectives of {called} bytes, {limit} are allowed"


@pytest.mark.parametrize("shape", [(10,), (2, 2, 3), (3, 3, 3), (2, 1, 2, 2), (2, 0)], ids=sizes)
@right_for_each_dtype
def test_tokens_in_one_to_four_dimensions(up, shape, dtype):
    inputs, count, found = Inputs(Case(dtype), up.replica), math.prod(shape), []
    rows = (inputs.leaves()[2].detach().flatten(0, 1), inputs.targets.flatten(), inputs.above.flatten())
    for each in (shape, (1, count)):
        logits, targets, above = (
            x.repeat(3, *[1] * (x.dim() - 1))[:count].reshape(*each, *x.shape[1:]).clone() for x in rows
        )
        loss = up.loss(logits.requires_grad_(), targets)
        found.append([each.flatten() for each in up.bits(loss, logits, above)])
    assert_same(*found, "than in two dimensions")


@right_for_each_dtype
def test_labels_of_any_strides_and_of_int32(up, dtype):
    """Transposed ones may be refused, as the release does, whose copy of them keeps their strides."""
    inputs = Inputs(Case(dtype), up.replica)
    labels, (length, batch) = inputs.targets, inputs.targets.shape
    wide = torch.full((length + 2, 3 * batch + 1), -1)
    wide[1:-1, 1:-batch:2] = labels
    strided = {
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
    for name, given in strided.items():
        found = []
        for each in (given, given.long().clone(memory_format=torch.contiguous_format)):
            logits = inputs.leaves()[2]
            messages = ["view"] if "transposed" in name else []
            loss = unless_refused(functools.partial(up.loss, logits, each), *messages)
            found += [] if loss is None else [up.bits(loss, logits, inputs.above)]
        assert_same(found[0], found[-1], name) if found else None


def far_labels(dtype):
    return Case(dtype, shape=(len(distances_in(dtype)), 1, 5), values="distant", producer="leaf")


@right_for_each_dtype
def test_losses_of_labels_far_below_the_largest_logit(up, dtype):
    """Where the label's exponential is 0; each loss by itself, and the gradient at least as exact as bf16."""
    case = far_labels(dtype)
    found, inputs = up.step(case), Inputs(case, up.replica)
    losses, gradient = inputs.reference(found["logits"])
    near = found["loss"].double().isclose(losses, rtol=FLOAT32, atol=FLOAT32)
    assert near.all(), f"{found['loss'][~near].tolist()} instead of {losses[~near].tolist()}"
    rough = case.tolerance + unit_roundoff(torch.bfloat16)
    assert_close(found["gradients"][0], gradient, rough, "the gradient")


@wrong_but_in_bf16
def test_gradient_of_labels_far_below_the_largest_logit(up, dtype):
    case = far_labels(dtype)
    found = up.step(case)
    gradient = Inputs(case, up.replica).reference(found["logits"])[1]
    assert_close(found["gradients"][0], gradient, case.tolerance, "the gradient")


@pytest.mark.control
@on_ranks
def test_fp16_gradient_that_overflows_is_infinite(up):
    """Exactly the elements beyond fp16's range: a loss scaler looks for them."""
    inputs, logits, loss = up.start("float16")
    inputs.above = torch.full(loss.shape, 2.0**17)
    (gradient,) = up.gradients(loss, [logits], inputs.above)
    infinite = inputs.reference(inputs.given)[1].half().isinf()
    assert infinite.any(), "the reference does not overflow"
    assert_same([gradient.isinf()], [infinite], "which elements are infinite")


@pytest.mark.control
@on_ranks
def test_backwards_that_come_later_than_other_forwards(up):
    dtypes = ("float32", "bfloat16", "float64", "float16")  # the last is too narrow for the first
    started = [up.start(dtype) for dtype in dtypes]
    found = [up.gradients(loss, [logits], inputs.above)[0] for inputs, logits, loss in started]
    alone = [up.step(inputs.case)["gradients"][0] for inputs, _, _ in started]
    for dtype, *pair in zip(dtypes, found, alone, strict=True):
        assert torch.equal(*pair), f"the gradient of {dtype} differs from that of a step by itself"


@pytest.mark.parametrize("case", with_roles({dtype: Case(dtype) for dtype in DTYPES[:3]}))
def test_compiled_losses_and_gradients_are_exact(traced_world, output, request, case):
    ways = ({"case": case, "fused": fused} for fused in (True, False))
    found, unfused = (traced_world.run(perform, __name__, "steps_of", way) for way in ways)
    record(output, f"compiled.{request.node.callspec.id}", found, case)
    judge(found, case)
    assert_same([whole(found, "gradient")], [whole(unfused, "gradient")], "than the unfused function")


@pytest.mark.control
def test_compiled_loss_that_is_dropped_leaves_nothing(traced_world):
    traced_world.run(perform, __name__, "test_loss_that_is_dropped_leaves_nothing", {"dtype": "float32"})
