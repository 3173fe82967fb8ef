"""On Hopper the linear cross entropy fusion (branch dev) gives a loss, and the loss is right.

What the docstrings of LinearCrossEntropy and of Blackwell's kernels promise, for compute capability 9:

- the loss is fp32, logits are not rounded, and a gradient has its input's dtype. Without a group there is one rank;
- a mean divides by the tokens that count on all ranks. If none counts, it is nan, and its gradients are 0 or nan;
- hidden states of ignored tokens may be inf or nan. Such numbers elsewhere show where float64 has them;
- the host waits for the GPU nowhere: "full_iteration" captures forward and backward;
- the current device's compute capability decides, whatever other GPUs are there. 10.x gets Blackwell's kernels.

On a Hopper everything is real except for the answers about other devices. Stand-ins on the CPU: torch.cuda reports a
Hopper to the one module that asks; products with out_dtype, which only a GPU has; the CPU's autocast for every device.
Waits are known there by the names of operators.

Not judged: Blackwell's kernels; time; finite losses of infinite logits; a current device that changes after the first
loss; TF32 where it is allowed; the dtype in which ranks sum the hidden states' gradient; fp32 inputs under autocast.

Tolerances: the norm of the difference over the norm of the reference, in float64 from the same rounded inputs. Losses:
2^-17, 64 roundings of fp32. fp32 gradients: 2^-16, which adds the error of a difference of losses. bf16 and fp16
gradients: 2^-8 besides, one rounding of the logits' gradient and one of the result. Where logits lie about a level, a
loss is off by at most four roundings of numbers of that size: 2^-22 of the level. The hidden states' gradient has one
column that is the level times a sum of zero. It holds rounding alone and is left out. In `unrounded` cases bf16 holds
the gradients exactly, so that any further rounding to bf16 shows.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
import os
import sys
import types
from dataclasses import dataclass, replace
from unittest import mock

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # inductor takes a minute for what eager mode computes at once

import pytest
import torch
from torch.overrides import TorchFunctionMode

torch.compile = functools.partial(torch.compile, backend="eager")  # else it imports inductor, which takes seconds
fused = pytest.importorskip("megatron.core.fusions.fused_linear_cross_entropy", reason="this tree has no such fusion")
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from kit import current_target
from kit.autograd import CHANGED_IN_PLACE, unless_refused
from kit.capture import host_waits, peak_memory, watching
from kit.ranks import own_group
from kit.vocabulary import (
    Handed,
    Storages,
    assert_close,
    assert_same,
    counted_ranks,
    exact_losses,
    gathered,
    on_ranks,
    perform,
)

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
FLOAT32_LOSS = 2.0**-17
FLOAT32_GRADIENT = 2.0**-16
FLOAT32_LEVEL = 2.0**-22
BFLOAT16 = 2.0**-8
IGNORED = -100
FUSIONS = "megatron.core.fusions.linear_cross_entropy"
SECOND_ORDER = ("automatic differentiation", "once_differentiable", "is not implemented", CHANGED_IN_PLACE)


@dataclass(frozen=True)
class Case:
    """What a loss is given."""

    ranks: int = 1
    shape: tuple[int, ...] = (5, 2)  # sequence and batch, or tokens alone
    classes: int = 24  # padded, of all ranks
    labelled: int = 0  # the classes below this have labels; 0: all
    hidden: int = 16
    dtype: str = "float32"
    labels: str = "any"  # or some, all or uneven ignored
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
    group: bool = True  # whether the function is given a group
    broken: tuple[str, float] | None = None  # in one token's hidden state, or one class's weight, stands that number

    @property
    def world(self):
        """Return how many ranks the world needs."""
        return 2 * self.ranks if self.spread else self.ranks


# fmt: off
CASES = {
    "plain": Case(),
    "plain-two": Case(ranks=2, shape=(7, 3)),
    "bfloat16": Case(dtype="bfloat16", shape=(33, 2), hidden=64, classes=1000),
    "bfloat16-two": Case(ranks=2, dtype="bfloat16", shape=(17, 2), hidden=64, classes=1000, labels="some ignored"),
    "bfloat16-four": Case(ranks=4, dtype="bfloat16", shape=(16, 2), hidden=64, classes=1000, sequence_parallel=True),
    "sequence_parallel-two": Case(ranks=2, shape=(6, 3), sequence_parallel=True, labels="some ignored"),
    "spread-two": Case(ranks=2, shape=(7, 3), spread=True),
    "spread-two-sequence_parallel": Case(2, (8,), spread=True, sequence_parallel=True),
    "ignored-all": Case(ranks=2, labels="all ignored"),
    "ignored-class-two": Case(ranks=2, ignore_index=4, shape=(40,), reduction="mean"),
    "ignored-class-zero": Case(ignore_index=0, shape=(20, 3)),
    "mean": Case(reduction="mean", labels="some ignored", shape=(9, 2)),
    "mean-two-uneven": Case(ranks=2, reduction="mean", labels="uneven", shape=(18, 1), sequence_parallel=True),
    "mean-float16": Case(shape=(2049,), classes=4, hidden=4, dtype="float16", reduction="mean"),
    "mean-of_none": Case(reduction="mean", labels="all ignored"),
    "mean-of_none-two": Case(ranks=2, reduction="mean", labels="all ignored", sequence_parallel=True, shape=(4, 3)),
    "sum-two": Case(ranks=2, reduction="sum", labels="uneven", shape=(18, 2)),
    "without_group": Case(group=False, shape=(13,), reduction="mean", labels="some ignored"),
    "without_group-sequence_parallel": Case(group=False, shape=(13,), sequence_parallel=True),
    "expanded": Case(above="expanded", shape=(7,)),
    "many_tokens": Case(shape=(65537,), classes=4, hidden=4, above="ones"),
    "one_token-two": Case(ranks=2, shape=(1, 1), reduction="mean"),
    "large_logits-bfloat16-four": Case(ranks=4, scale=60.0, shape=(12, 2), dtype="bfloat16"),
    "large_logits-tens_of_thousands": Case(scale=3e4, shape=(9, 2), hidden=8),
    "large_logits-tens_of_thousands-four": Case(ranks=4, scale=3e4, shape=(9, 2), hidden=8, classes=44),
    "far_below": Case(levels=(-208.0,), shape=(9, 2)),
    "far_below-two": Case(ranks=2, levels=(-131072.0,), labels="some ignored", reduction="mean"),
    "far_above-hundred_thousand-four": Case(ranks=4, levels=(131072.0,), mixed=True, shape=(8, 2)),
    "far_below-bfloat16-four": Case(ranks=4, levels=(-416.0,), dtype="bfloat16", shape=(7, 3)),
    "far_shards-four": Case(ranks=4, levels=(0.0, -320.0, -112.0, -208.0), mixed=True, shape=(9, 2)),
    "far_splits": Case(classes=9216, levels=(-208.0, -416.0, -112.0), mixed=True, shape=(3, 2), hidden=8),
    "far_splits-two": Case(ranks=2, classes=12288, levels=(-128.0, -112.0, -320.0, -112.0), shape=(3, 2), hidden=8),
    "splits": Case(classes=7001, shape=(9, 2), hidden=8),
    "splits-two": Case(ranks=2, classes=13000, shape=(4, 3), hidden=8, labels="some ignored", sequence_parallel=True),
    "splits-exact": Case(classes=3072, shape=(7, 1), hidden=8),
    "splits-bfloat16": Case(classes=40000, bias=3.0, shape=(3, 2), hidden=8, dtype="bfloat16", above="ones"),
    "unrounded": Case(1, (12, 2), 8, 5, 32, "bfloat16", exact=True),
    "unrounded-mean": Case(1, (49, 7), 8, 3, 351, "bfloat16", "some ignored", reduction="mean", exact=True),  # of 257
    "unrounded-two": Case(2, (24, 1), 16, 3, 40, "bfloat16", exact=True, sequence_parallel=True),
    "autocast": Case(dtype="bfloat16", shape=(9, 2), hidden=64, classes=1000, autocast=True),
    "autocast-two": Case(2, (12,), 1000, 0, 64, "bfloat16", reduction="mean", autocast=True),
    "many_classes": Case(classes=140000, hidden=4, shape=(9,)),
    "many_classes-two": Case(ranks=2, classes=150000, hidden=4, shape=(5, 2)),
    "frozen-weight": Case(frozen="weight"),
    "frozen-hidden-two": Case(ranks=2, frozen="hidden"),
}
# fmt: on
SOME = Case(shape=(13,), labels="some ignored")
MEAN = replace(SOME, reduction="mean")
MEAN_OF_TWO = Case(2, (12,), reduction="mean", sequence_parallel=True)
BROKEN = tuple((name, float(text)) for name in ("hidden", "weight") for text in ("nan", "inf", "-inf"))


def inputs_of(case):
    """Return whole hidden states and weight, labels and the gradient from above: on the CPU, the same anywhere."""
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(*case.shape, case.hidden, generator=random)
    weight = torch.randn(case.classes, case.hidden, generator=random) * (case.scale / case.hidden**0.5)
    weight = weight + case.bias * torch.randn(case.hidden, generator=random).sign()
    if case.levels:
        hidden, weight = about(case, hidden, weight)
    labels = torch.randint(case.labelled or case.classes, case.shape, generator=random)
    flat, count = labels.view(-1), labels.numel()
    if case.labels == "some ignored":
        flat[1::4] = case.ignore_index
    elif case.labels == "all ignored":
        flat.fill_(case.ignore_index)
    elif case.labels == "uneven":  # the first part has 8 for each one that any other has
        size, number = count // case.ranks, torch.arange(count)
        kept = torch.where(number < size, number % 9 != 8, number % size == 0)
        flat[~kept] = case.ignore_index
    above = torch.randn((count,) if case.reduction == "none" else (), generator=random)
    if case.above != "random":
        above = torch.ones_like(above)
    put_not_numbers(case, hidden, weight, flat)
    if case.exact:
        hidden, weight, above = exact(case, flat)
    dtype = getattr(torch, case.dtype)
    return hidden.to(dtype), weight.to(dtype), labels, above


def put_not_numbers(case, hidden, weight, labels):
    """Put nan or an infinite number where a case wants it."""
    kept = labels != case.ignore_index
    if case.spoilt:
        bad = torch.tensor((math.nan, math.inf, -math.inf))
        spoilt = (~kept).nonzero()[:, 0]
        hidden.view(-1, case.hidden)[spoilt] = bad[torch.arange(len(spoilt)) % 3].unsqueeze(-1)
    if case.broken:
        name, value = case.broken
        if name == "hidden":  # the last token that counts
            hidden.view(-1, case.hidden)[kept.nonzero()[-1], 0] = value
        else:  # a class of the last rank, in the midst of a split
            weight[case.classes * 3 // 4, 0] = value


def about(case, hidden, weight):
    """Return hidden states and weight whose logits lie about the levels: in eighths, so that fp32 has the logits."""
    hidden, weight = ((8 * tensor).round() / 8 for tensor in (hidden, weight))
    weight[:, -1] = torch.tensor(case.levels).repeat_interleave(case.classes // len(case.levels))
    hidden[..., -1] = 1.0
    if case.mixed:
        hidden.flatten(0, -2)[1::2, -1] = -1.0
    return hidden, weight


def exact(case, labels):
    """Return hidden states, weight and a gradient from above in fp32, of which bf16 holds the logits' gradient.

    As many classes as have labels are alive, spread over all: the logits of a token are 0 for its label, -below for the
    2 or 4 others alive, and far below for the rest. `gradient` is that of the others: it has 8 bits, and the label's is
    -2 or -4 times that. bf16 has both, and none of their factors: gradient times others + exp(below) from above, and
    the softmax. Every token has a column of its own of the hidden states, and every class another one. The gradient is
    in the upper half between two powers of two, where an error of a factor is the most of a step.
    """
    number, others, spread = torch.arange(labels.numel()), case.labelled - 1, case.classes // case.labelled
    kept = labels != case.ignore_index
    labels[kept] *= spread
    gradient = (-1.0) ** number * (192 + (54 + 5 * number) % 64).double() / 128
    below = torch.tensor((2.0, 1.0, -0.5), dtype=torch.double)[number % 3]
    if case.reduction != "none":
        gradient, below = gradient[:1], below[:1]  # one for all tokens
    weight = torch.full((case.classes, case.hidden), -256.0)
    weight[: case.labelled * spread : spread, : len(number)] = -below.float()
    weight[labels[kept], number[kept]] = 0.0
    weight[:, len(number) :] = torch.eye(case.classes)
    hidden = torch.eye(len(number), case.hidden).view(*case.shape, case.hidden)
    above = gradient * (others + below.exp())
    if case.reduction != "none":
        above = above[0] * (kept.sum() if case.reduction == "mean" else 1)
    return hidden, weight, above.float()


def within(tensor):
    """Return a copy that lies within a larger storage, of 64 elements more before and after it."""
    room = tensor.new_ones(tensor.numel() + 128)  # 1 is a class, too: a label that is read here is wrong, and no worse
    return room[64:-64].view(tensor.shape).copy_(tensor)


class Calls:
    """Calls what a case is about, on one rank."""

    def __init__(self, rank):
        self.count, self.device = rank.count, torch.device(rank.device)
        if self.device.type == "cuda":
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic algorithms need it for every product
        parallel_state.initialize_model_parallel(min(2, self.count), create_gloo_process_groups=False)
        if self.device.type == "cpu":
            stand_in(self.device)
        sizes = [size for size in (1, 2, 4) if size <= self.count]
        self.groups = {(size, False): own_group(size) for size in sizes}
        if self.count == 4:
            self.groups[2, True] = own_group(2, apart=True)
        self.group = None

    def enter(self, case):
        """Use the group of a case; a test without one is about one rank."""
        self.group = self.groups[case.ranks, case.spread] if case else self.groups[1, False]

    def loss(self, case, hidden, weight, labels):
        """Call what a case is about: losses are flat, or one."""
        group = self.group if case.group else None
        return fused.linear_cross_entropy(
            hidden, weight, labels, group, case.reduction, case.ignore_index, case.sequence_parallel
        )

    def parts(self, case):
        """Return what this rank gives: its hidden states, its rows of the weight, labels and gradient from above."""
        hidden, weight, labels, above = (tensor.to(self.device) for tensor in inputs_of(case))
        if case.sequence_parallel:
            hidden = hidden.chunk(case.ranks)[self.group.rank()]
        weight = weight.chunk(case.ranks)[self.group.rank()]
        hidden, weight, labels, above = map(within, (hidden, weight, labels, above))
        hidden.requires_grad_(case.frozen != "hidden")
        weight.requires_grad_(case.frozen != "weight")
        if case.above == "expanded":
            above = torch.ones((), device=self.device).expand(above.shape)
        return hidden, weight, labels, above

    def computed(self, case, parts):
        """Return the loss of what a rank gives, and both of its gradients."""
        hidden, weight, labels, above = parts
        loss = self.loss(case, hidden, weight, labels)
        return loss, *torch.autograd.grad(loss, (hidden, weight), above.reshape(loss.shape))

    def whole(self, case, name, gradient):
        """Return a gradient on the CPU: joined of all ranks' parts, or as each rank has it."""
        in_parts = name == "weight" or case.sequence_parallel
        return torch.cat(gathered(gradient, self.group) if in_parts else [gradient]).cpu()


def reference(case):
    return exact_losses(inputs_of(case), case.reduction, case.ignore_index)


def judge(up, case, loss, *gradients):
    """Judge the loss, and the gradients of what is not frozen, by float64."""
    right = reference(case)
    losses = gathered(loss, up.group)
    assert_same(losses, losses[:1] * case.ranks, "the loss of another rank")
    assert loss.dtype == torch.float32, f"a loss of {loss.dtype}"
    level = FLOAT32_LEVEL * max(map(abs, case.levels), default=0.0)
    assert_close(loss.cpu(), right.loss, FLOAT32_LOSS + level, "the loss")
    names = [name for name in ("hidden", "weight") if name != case.frozen]
    for name, gradient in zip(names, gradients, strict=False):  # none, where the loss alone is judged
        assert gradient.dtype == getattr(torch, case.dtype), f"a gradient of {gradient.dtype}"
        pair = up.whole(case, name, gradient), vars(right)[f"towards_{name}"]
        if case.reduction == "mean" and case.labels == "all ignored":  # of a mean of none: 0 or nan
            pair = (tensor.nan_to_num(nan=0.0) for tensor in pair)
        elif case.levels and name == "hidden":  # the last column is a level times a sum that is zero
            pair = (tensor[..., :-1] for tensor in pair)
        rounding = BFLOAT16 if case.dtype != "float32" and not case.exact else 0.0
        assert_close(*pair, FLOAT32_GRADIENT + rounding, f"the gradient of {name}")


def judged(up, case):
    """Judge a loss and its gradients; a second call and backward agree, and inputs stay as they are.

    As Megatron's DDP has it: its hook adds the gradient that is returned to main_grad, and nothing else does.
    """
    hidden, weight, labels, above = parts = up.parts(case)
    leaves = [tensor for tensor in (hidden, weight) if tensor.requires_grad]
    attributes = {"main_grad": torch.ones_like(weight, dtype=torch.float32), "grad_added_to_main_grad": False}
    vars(weight).update(attributes)
    handed = Handed()
    names = ("hidden", "weight", "labels", "the gradient from above", "main_grad")
    for name, tensor in zip(names, (*parts, weight.main_grad), strict=True):
        handed.watch(name, tensor)
    autocast = torch.autocast(up.device.type, torch.bfloat16, enabled=case.autocast)
    with autocast:
        loss = up.loss(case, hidden, weight, labels)
    above = above.reshape(loss.shape)
    once = torch.autograd.grad(loss, leaves, above, retain_graph=True)
    twice = torch.autograd.grad(loss, leaves, above)
    with autocast:
        again = up.loss(case, hidden, weight, labels)
    assert_same([again, *twice], [loss, *once], "a second call or backward")
    pairs = zip([again, *twice], [loss, *once], strict=True)
    assert all(x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() for x, y in pairs), "shared memory"
    handed.assert_unaltered()
    assert vars(weight).keys() == attributes.keys(), f"attributes of the weight: {[*vars(weight)]}"
    assert all(vars(weight)[name] is value for name, value in attributes.items()), "attributes of the weight"
    judge(up, case, loss, *once)


# Other devices.


def altered(module, **replaced):
    """Return a copy of a module with some of its names replaced."""
    made = types.ModuleType(module.__name__)
    vars(made).update(vars(module) | replaced)
    return made


def seen_from(own, capabilities, current=0):
    """Return torch, as it answers on a host whose GPUs have these compute capabilities."""

    def capability(device=None):
        index = device
        if device is not None and not isinstance(device, int):
            device = torch.device(device)
            index = None if device == own else device.index  # where tensors lie is the current device
        return capabilities[current if index is None else index]

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: len(capabilities),
        "current_device": lambda: current,
        "get_device_capability": capability,
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            **dict(zip(("major", "minor"), capability(device), strict=True))
        ),
        "nvtx": types.SimpleNamespace(range=lambda _: contextlib.nullcontext()),
    }
    return altered(torch, cuda=altered(torch.cuda, **answers))


def stand_in(device):
    """Let one module see a GPU of compute capability 9, and let the CPU compute what takes out_dtype."""

    def widened(function, *args, out_dtype=None, **kwargs):
        """Compute in the dtype that is asked for: that one autocast leaves alone on a GPU, and here."""
        if out_dtype is None:
            return function(*args, **kwargs)
        with autocast("cpu", enabled=False):
            return function(*(tensor.to(out_dtype) for tensor in args), **kwargs)

    autocast = torch.autocast
    fused.torch = seen_from(device, ((9, 0),))
    torch.cuda.current_device = lambda: "cpu"
    for name in ("mm", "addmm", "bmm", "baddbmm"):
        setattr(torch, name, functools.partial(widened, getattr(torch, name)))
    torch.autocast = torch.amp.autocast = lambda _device, *args, **kwargs: autocast("cpu", *args, **kwargs)


def load_again(seen):
    """Load the fusion's modules again; the one that asks for the device sees this torch."""
    for name in [name for name in sys.modules if name.startswith(FUSIONS)]:
        del sys.modules[name]
    importlib.reload(fused)
    fused.torch = seen


@contextlib.contextmanager
def loaded_again(seen, **environment):
    """Let the fusion's modules, loaded anew, see this torch and environment."""
    before = fused.torch
    try:
        with mock.patch.dict(os.environ, environment):
            load_again(seen)
            yield
    finally:
        load_again(before)


@contextlib.contextmanager
def another_gpu(up, capabilities, current):
    """Let the platform, loaded anew, see GPUs of these compute capabilities, and which one is the current device.

    A launcher's LOCAL_RANK names another one, as it does where a process sees fewer GPUs than its host has. There is a
    stand-in for Blackwell's kernels.
    """
    entry = types.ModuleType(f"{FUSIONS}.blackwell.entry")
    entry.forward, entry.backward = object(), object()
    other = str((current + 1) % len(capabilities))
    with loaded_again(seen_from(up.device, capabilities, current), LOCAL_RANK=other):
        sys.modules[entry.__name__] = importlib.import_module(f"{FUSIONS}.blackwell").entry = entry
        yield entry


# The tests.


@pytest.fixture(scope="session")
def up(figure):
    target = current_target()
    if target.executed and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the claim is about GPUs of compute capability 9: this is none")
    with counted_ranks(Calls, figure) as group:
        yield group


def cases(**named):
    return pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in named.items()])


WITHOUT_GROUP = CASES["without_group"]


@pytest.mark.defect
@cases(**CASES)
@on_ranks
def test_losses_and_gradients_are_exact(up, case):
    judged(up, case)


@pytest.mark.defect
@cases(
    **{
        "two": Case(ranks=2, shape=(7, 2)),
        "spoilt": Case(shape=(13, 2), labels="some ignored", spoilt=True),
        "spoilt-mean-two": Case(2, (26,), labels="some ignored", spoilt=True, reduction="mean"),
    }
)
@on_ranks
def test_losses_without_autograd(up, case):
    hidden, weight, labels, _ = up.parts(case)
    with torch.no_grad():
        loss = up.loss(case, hidden, weight, labels)
    judge(up, case, loss)


@pytest.mark.defect
@cases(
    **{
        "bfloat16": Case(dtype="bfloat16", shape=(9, 2), hidden=64, classes=1000),
        "mean-two": replace(MEAN_OF_TWO, classes=7000, labels="some ignored"),
    }
)
@on_ranks
def test_deterministic_algorithms(up, case):
    """What is not deterministic raises, and new memory is filled with nan."""
    torch.use_deterministic_algorithms(True)
    try:
        judged(up, case)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.defect
@cases(none=SOME, mean=MEAN, two=replace(MEAN_OF_TWO, reduction="none"))
@on_ranks
def test_loss_that_its_caller_halves_in_place_with_twice_the_gradient_from_above(up, case):
    hidden, weight, labels, above = up.parts(case)
    loss = up.loss(case, hidden, weight, labels)
    assert unless_refused(lambda: loss.mul_(0.5), "") is not None, "the loss cannot be changed in place"
    judge(up, case, 2 * loss, *torch.autograd.grad(loss, (hidden, weight), 2 * above.reshape(loss.shape)))


@pytest.mark.defect
@cases(one=SOME, two=MEAN_OF_TWO)
@on_ranks
def test_other_losses_in_flight_change_nothing(up, case):
    """Others of the same shapes are computed whole between any two operators of a loss and its gradients.

    One more loss is begun before, and goes back first: its bits are those that it has alone. Several ranks compute the
    others between forward and backward alone: their operators need not be the same, and their reductions have to meet.
    """
    hidden, weight, labels, above = up.parts(case)
    cuda = up.device.type == "cuda"
    aside = torch.cuda.stream(torch.cuda.Stream()) if cuda else contextlib.nullcontext()
    wait = torch.cuda.synchronize if cuda else lambda: None  # the order is the host's, on two streams

    def whole(*inputs):
        return up.computed(case, [*(tensor.detach().requires_grad_() for tensor in inputs), labels, above])

    class Between(TorchFunctionMode):
        def __torch_function__(self, function, _types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function.__name__ != "__get__":  # a shape, a dtype
                wait()
                with aside, torch.enable_grad():
                    whole(-hidden, weight.clone())  # of both with the other sign logits are the same
                wait()
            return result

    first = [tensor.detach().clone().requires_grad_() for tensor in (hidden / 2, weight)]
    alone = up.computed(case, [*first, labels, above])
    begun = up.loss(case, *first, labels)
    between = Between() if case.ranks == 1 else contextlib.nullcontext()
    with between:
        loss = up.loss(case, hidden, weight, labels)
    whole(-hidden, weight.clone())
    # Autograd leaves modes behind: this one is entered again in the thread that runs the backward, around it alone.
    loss.grad_fn.register_prehook(lambda _: between.__enter__() and None)
    loss.grad_fn.register_hook(lambda *_: between.__exit__(None, None, None))
    begun_first = [begun, *torch.autograd.grad(begun, first, above.reshape(begun.shape))]
    assert_same(begun_first, alone, "a loss that was begun before")
    judge(up, case, loss, *torch.autograd.grad(loss, (hidden, weight), above.reshape(loss.shape)))


@pytest.mark.defect
@cases(one=WITHOUT_GROUP, sequence_parallel=CASES["without_group-sequence_parallel"])
@on_ranks
def test_losses_where_torch_distributed_is_not_set_up(up, case):
    group = torch.distributed.group
    default, group.WORLD = group.WORLD, None
    try:
        judged(up, case)
    finally:
        group.WORLD = default


@pytest.mark.defect
@pytest.mark.parametrize(("forward", "backward"), [(1024, 2048), (2048, 1024)])
@on_ranks
def test_split_sizes_of_the_environment_are_not_half_followed(up, forward, backward):
    sizes = {"LCE_FWD_VOCAB_SPLIT_SIZE": str(forward), "LCE_BWD_VOCAB_SPLIT_SIZE": str(backward)}
    with loaded_again(fused.torch, **sizes):
        judged(up, Case(classes=5001, shape=(9,), hidden=8))


@pytest.mark.defect
@pytest.mark.parametrize(
    ("capabilities", "current"),
    [
        pytest.param(((8, 0), (9, 0), (12, 0)), 1, id="between_others"),
        pytest.param(((10, 0), (9, 0), (8, 9)), 1, id="after_a_blackwell"),
        pytest.param(((9, 0), (10, 0)), 0, id="before_a_blackwell"),
    ],
)
@on_ranks
def test_losses_on_a_hopper_beside_other_gpus(up, capabilities, current):
    parts = up.parts(WITHOUT_GROUP)
    with another_gpu(up, capabilities, current):
        judge(up, WITHOUT_GROUP, *up.computed(WITHOUT_GROUP, parts))


@pytest.mark.defect
@cases(
    **{
        "none": SOME,
        "mean": MEAN,
        "sum-two": Case(2, (12,), reduction="sum", labels="some ignored"),
        "bfloat16-two": replace(MEAN_OF_TWO, classes=7000, hidden=8, dtype="bfloat16"),
    }
)
@on_ranks
def test_what_is_not_finite_shows_and_changes_no_other_token(up, case):
    """Of a weight that is infinite a token's loss may be finite, and is not judged then."""
    rounding = BFLOAT16 if case.dtype != "float32" else 0.0
    counted = inputs_of(case)[2].flatten() != case.ignore_index
    for broken in BROKEN:
        mine = replace(case, broken=broken)
        loss, to_hidden, to_weight = up.computed(mine, up.parts(mine))
        right = reference(mine)
        rows = [x.flatten(0, -2)[counted] for x in (up.whole(case, "hidden", to_hidden), right.towards_hidden)]
        for tensor, exact, tolerance in (
            (loss.detach().cpu(), right.loss, FLOAT32_LOSS),
            (*rows, FLOAT32_GRADIENT + rounding),
            (up.whole(case, "weight", to_weight), right.towards_weight, math.inf),
        ):
            finite = exact.isfinite()
            assert not finite.all(), "the reference has lost what is not finite"  # a fault of this test
            assert not (tensor.isfinite() & ~finite).any(), f"{broken} is lost: finite where it should not be"
            if broken[0] == "hidden":
                assert_close(tensor[finite], exact[finite], tolerance, f"beside {broken}")


@pytest.mark.defect
@cases(none=SOME, mean_two=MEAN_OF_TWO)
@on_ranks
def test_input_that_changes_in_place_is_refused_or_makes_no_difference(up, case):
    for index, name in enumerate(("hidden", "weight", "labels")):
        hidden, weight, labels, above = parts = up.parts(case)
        loss = up.loss(case, hidden, weight, labels)
        backward = functools.partial(torch.autograd.grad, loss, (hidden, weight), above.reshape(loss.shape))
        before = backward(retain_graph=True)
        with torch.no_grad():
            parts[index].mul_(0)
        after = unless_refused(backward, CHANGED_IN_PLACE)
        assert_same(after or before, before, f"{name} changed in place")


@pytest.mark.defect
@cases(none=SOME, mean=MEAN)
@on_ranks
def test_nothing_outlives_a_loss_that_is_dropped(up, case):
    """Without a collection of cycles; a loss that is held after its backward keeps no input and no gradient."""
    seconds = 10.0 if up.device.type == "cuda" else 1.0  # there the thread of the backward may lag behind
    gc.disable()
    try:
        for backward in (False, True):
            *leaves, above = up.parts(case)
            inputs, memory = [leaf.clone() for leaf in leaves], Storages()  # a graph keeps its leaves, not these
            loss = up.loss(case, *inputs)
            memory.note(None, None, [*inputs, loss])
            if backward:
                gradients = torch.autograd.grad(loss, inputs[:2], above.reshape(loss.shape))
                memory.note(None, None, gradients)
                del inputs, gradients
                held = memory.living(loss, seconds=seconds)
                assert not held, f"a loss that is held after backward keeps inputs or gradients: {held}"
            inputs = loss = None
            held = memory.living(seconds=seconds)
            assert not held, f"after {'a' if backward else 'no'} backward: {held}"
    finally:
        gc.enable()


@pytest.mark.defect
@on_ranks
def test_second_order_gradients_are_right_or_refused(up):
    """Of the sum of losses and of the square of their gradient."""
    case = Case(shape=(13,))
    hidden, weight, labels, above = up.parts(case)

    def penalized(loss, hidden, weight):
        (gradient,) = torch.autograd.grad(loss, hidden, above.to(loss.dtype), create_graph=True)
        return torch.autograd.grad((loss * above).sum() + gradient.square().sum(), (hidden, weight))

    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    eager = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].t(), labels, reduction="none")
    right = penalized(eager, *leaves)
    fused_loss = up.loss(case, hidden, weight, labels)
    gradients = unless_refused(lambda: penalized(fused_loss, hidden, weight), *SECOND_ORDER) or right
    for name, gradient, exact in zip(("hidden", "weight"), gradients, right, strict=True):
        assert_close(gradient, exact, 2 * FLOAT32_GRADIENT, f"second order, {name}")  # the rounding of two gradients


@pytest.mark.defect
@cases(none=SOME, mean_two=MEAN_OF_TWO)
@on_ranks
def test_other_default_dtypes_and_inference_mode_change_nothing(up, case):
    parts = up.parts(case)
    usual = up.computed(case, parts)
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            again = up.computed(case, parts)
        finally:
            torch.set_default_dtype(torch.float32)
        assert_same(again, usual, f"where the default is {dtype}")
    with torch.inference_mode():
        assert_same([up.loss(case, *parts[:3])], usual[:1], "in inference mode")


MATMUL = torch.backends.cuda.matmul  # on the CPU its settings do nothing, but are kept as on a GPU
SWITCHES = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


def settings_now(device):
    """Return what the process has set, by name; what PyTorch refuses to tell was set in two ways: a change as well."""
    return {name: unless_refused(functools.partial(getattr, MATMUL, name), "") for name in SWITCHES} | {
        "float32 products": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled(device.type),
        "random numbers": torch.get_rng_state().tolist(),
        "environment": dict(os.environ),
        "GPU": device.type == "cuda" and (torch.cuda.current_device(), torch.cuda.current_stream()),
    }


@pytest.mark.defect
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
@cases(one=SOME, two=MEAN_OF_TWO)
@on_ranks
def test_settings_of_the_process_stay_as_they_are(up, case, on):
    hidden, weight, labels, above = up.parts(case)
    restored = {name: getattr(MATMUL, name) for name in SWITCHES}
    try:
        for name in SWITCHES:
            setattr(MATMUL, name, on)
        before, after = settings_now(up.device), {}
        loss = up.loss(case, hidden, weight, labels)
        after["forward"] = settings_now(up.device)
        torch.autograd.grad(loss, (hidden, weight), above.reshape(loss.shape))
        after["backward"] = settings_now(up.device)
        refusal(functools.partial(up.loss, replace(case, reduction="avg"), hidden, weight, labels))
        after["a refusal"] = settings_now(up.device)
    finally:
        for name, value in restored.items():
            setattr(MATMUL, name, value)
    for when, now in after.items():
        changed = [name for name in before if now[name] != before[name]]
        assert not changed, f"changed after {when}: {', '.join(changed)}"


def refusal(call):
    """Return with what a GPU or a reduction is refused: nothing where it is not."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.defect
@cases(one=SOME, two=MEAN_OF_TWO)
@on_ranks
def test_reductions_that_there_are_not_are_refused_by_name(up, case):
    hidden, weight, labels, _ = up.parts(case)

    def ask(reduction):
        return up.loss(replace(case, reduction=reduction), hidden, weight, labels)

    assert (ask("none").numel(), ask("mean").numel()) == (labels.numel(), 1)
    for reduction in ("Mean", "avg", "batchmean", "", None):
        told = refusal(functools.partial(ask, reduction))
        assert told, f"{reduction!r} is accepted"
        assert str(reduction) in told, f"{reduction!r} is refused by: {told}"


@pytest.mark.defect
@cases(
    one=Case(classes=7001, shape=(9,), hidden=8, labels="some ignored", reduction="mean"),
    two=Case(2, (4, 2), 13000, hidden=8, labels="some ignored", sequence_parallel=True),
)
@on_ranks
def test_host_does_not_wait_for_the_gpu(up, case):
    parts = up.parts(case)
    up.computed(case, parts)  # what is set up once may wait
    with host_waits(up.device.type) as seen:
        up.computed(case, parts)
    assert not seen, f"waits: {seen}"


@pytest.mark.defect
@on_ranks
def test_memory_is_less_than_half_of_the_logits(up):
    """In elements of one tensor, and in bytes of fp32 of all that live together."""
    tokens = 512 if up.device.type == "cuda" else 64  # on a GPU a library's own memory counts, too
    case = Case(1, (tokens, 2), 24576, 0, 8, "bfloat16", "some ignored", reduction="mean")
    hidden, weight, labels, above = up.parts(case)
    storages, most = Storages(), {"largest": 0, "together": 0}

    def note(*noted):
        storages.note(*noted)
        living = storages.living()
        most["largest"] = max([most["largest"], *(math.prod(shape) for _, shape in living)])
        most["together"] = max(most["together"], sum(size for size, _ in living))

    def step():
        hidden.grad = weight.grad = None
        up.loss(case, hidden, weight, labels).backward(above)

    step()  # libraries allocate, and tuners measure, at the first call
    with watching(note):
        step()
    if up.device.type == "cuda":
        most["together"] = max(most["together"], peak_memory(step))
    logits = math.prod(case.shape) * case.classes
    assert most["largest"] <= logits / 2, f"a tensor of {most['largest'] / logits:.2f} of the logits"
    assert most["together"] <= 4 * logits / 2, f"together {most['together'] / logits / 4:.2f} of the logits in fp32"


@pytest.mark.control
@pytest.mark.parametrize("minor", [0, 1, 3])
@on_ranks
def test_blackwell_gets_its_own_kernels(up, minor):
    with another_gpu(up, ((9, 0), (10, minor), (8, 0)), 1) as entry:
        platform = fused.Platform()
        assert (platform.forward_func, platform.backward_func) == (entry.forward, entry.backward)


@pytest.mark.control
@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (11, 0), (12, 0), (12, 1)], ids=str)
@on_ranks
def test_other_gpus_are_refused_at_every_call(up, capability):
    """The first GPU of such a host is a Hopper, its last one a Blackwell; the message has the number."""
    hidden, weight, labels, _ = up.parts(WITHOUT_GROUP)
    with another_gpu(up, ((9, 0), capability, (10, 0)), 1):
        for call in [fused.Platform, lambda: up.loss(WITHOUT_GROUP, hidden, weight, labels)] * 2:
            told = refusal(call)
            assert str(capability[0]) in told, f"refused by: {told}"


def gpt_model(up, fusion):
    """Judge a model of one MLP layer, without a final norm: losses and gradients are those of its own logits."""
    torch.manual_seed(11)
    if up.device.type == "cuda":
        parallel_random.model_parallel_cuda_manual_seed(11)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        init_method_std=0.7,
        use_cpu_initialization=True,
        tensor_model_parallel_size=min(2, up.count),
        cross_entropy_loss_fusion=fusion,
        cross_entropy_fusion_impl="linear",
    )
    local = get_gpt_layer_local_submodules()
    layer = TransformerLayerSubmodules(pre_mlp_layernorm=local.pre_mlp_layernorm, mlp=local.mlp, mlp_bda=local.mlp_bda)
    spec = ModuleSpec(module=TransformerLayer, submodules=layer)
    block = TransformerBlockSubmodules(layer_specs=[spec], layer_norm=None)
    model = GPTModel(config, block, 44, 16, position_embedding_type="none").to(up.device).eval()
    random = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(44, (2, 7), generator=random).to(up.device) for _ in range(2))
    positions = torch.arange(7, device=up.device).expand_as(ids)
    loss = model(ids, positions, None, labels=labels).flatten()
    logits = model(ids, positions, None, runtime_gather_output=True).flatten(0, 1)
    exact = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    assert_close(loss, exact, FLOAT32_LOSS, "the loss")
    weights = dict(model.named_parameters())
    gradients, right = (torch.autograd.grad(x.sum(), weights.values()) for x in (loss, exact))
    least = max(float(gradient.norm()) for gradient in right) / 8  # what is nothing but rounding has no direction
    for name, gradient, exact_gradient in zip(weights, gradients, right, strict=True):
        assert_close(gradient, exact_gradient, FLOAT32_GRADIENT, f"the gradient of {name}", least)
    return {"loss": loss.detach(), "weight": gradients[[*weights].index("output_layer.weight")]}


@pytest.mark.parametrize(
    "fusion",
    [
        pytest.param(True, id="gpt", marks=pytest.mark.defect),
        pytest.param(False, id="gpt-unfused", marks=pytest.mark.control),
    ],
)
def test_gpt_model(up, output, fusion):
    """The unfused model has the bits of the release."""
    for rank, tensors in enumerate(up.run(perform, gpt_model, {"fusion": fusion})):
        for name, tensor in () if fusion else tensors.items():
            output(f"gpt-unfused.{name}.{rank}", tensor)
