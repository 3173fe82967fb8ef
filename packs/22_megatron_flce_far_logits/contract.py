# ruff: noqa: SLF001 - private names are where stand-ins enter
"""The linear cross entropy fusion (branch dev) is right for tokens whose logits all lie far below zero.

Upstream promises cross entropy, which stays the same where all logits of a token move together: down to -2^96 (the main
loop goes to -1e30), far above, and mixed over tokens, splits of the vocabulary, steps of 64 splits, and ranks. The loss
is nan where one split or rank is nan. It is 0 for an ignored token whose hidden state is nan or infinite. The host
waits for the GPU nowhere, buffers have the dtype that the kernels read, and no access leaves its tensor.

Where each token's maximum over the first 64 splits is not below zero, the bits are those of the unpatched tree.

Real are linear_cross_entropy, its autograd function, the host code of blackwell/entry.py, the Triton kernels, in
Triton's interpreter, and ranks, which talk through gloo. Stand-ins: the two kernels in the CuTe DSL, in torch with the
semantics of their source; streams, is_cuda and the compute capability; torch.mm with out_dtype; the CPU's autocast for
CUDA's. Not judged: a Blackwell GPU; time; infinite losses that the reference has.

Tolerances: inputs are multiples of 1/8 of which fp32 holds every sum, so that the logits are exact in any order. A loss
may be off by 2^-19 (exponentials, a sum and a logarithm of some roundings of 2^-24 each, and a loss below 16) and by
2^-22 of the largest logit (three sums of numbers of that size). Gradients: 2^-7, the norm of the difference over the
norm, since the logits' gradient and the result are rounded to bf16, by 2^-9 each, and terms of a sum cancel. The column
of the weight's gradient that carries the level is judged apart: it is larger than all others together.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import sys
import types
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch

from kit import current_target
from kit.interpreter import interpret

interpret(on=True)
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from kit.capture import host_waits
from kit.ranks import own_group, ranks
from kit.vocabulary import assert_close, assert_same, exact_losses

pytestmark = pytest.mark.skipif(current_target().name != "cpu", reason="the main loop is a stand-in on every GPU, too")
EVIDENCE_WITHOUT_GPU = {"cpu": "interpreted"}
FLOOR = -1e30  # where the main loop's maximum starts, in each split
HIDDEN = 64  # the main loop takes multiples of 64 elements
COLUMNS = 2  # of the hidden size, that carry the level of the logits
WIDTH = 256  # classes in a split: the main loop's tile
BLOCK = 64  # splits in a step of the epilogues
RANKS = 4
READERS = [getattr(torch.Tensor, name) for name in ("cpu", "numpy", "tolist", "__array__")]
LOSS = 2.0**-19
LEVEL = 2.0**-22
GRADIENT = 2.0**-7
MEAN = 2  # the reduction, as the kernel is told it


@dataclass(frozen=True)
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
    default: str = "float32"  # PyTorch's default dtype
    autocast: bool = False  # forward is under torch.autocast, to bf16
    in_flight: bool = False  # another batch's forward comes before backward
    twice: bool = False  # backward comes twice
    padding: float = 0.0  # added to the hidden states of ignored tokens: nan and infinity stay there

    @property
    def gradients(self):
        """Return whether gradients are judged: not of a mean of none, of a peak, or where a number is not finite."""
        finite = math.isfinite(sum(self.levels) + self.padding)
        return finite and len(self.levels) < BLOCK and (self.labels, self.reduction) != ("all ignored", "mean")


FAR = (-150.0,)
PEAK = (-130.0, *FAR * (130 * 1024 - 1))  # one logit above 133,119: a split of these adds 2e-6, all of them 3e-4
# fmt: off
DEFECTS = {
    "example": Case(FAR, classes=20, shape=(1,), spread=0.0),
    "mean": Case(FAR, reduction="mean", above=3.0),
    "float16": Case(FAR, dtype="float16", reduction="mean", group=True),
    "tokens-33": Case(FAR, shape=(33,), reduction="mean", labels="some ignored", group=True),
    "level-minus-2_to_the_96": Case((-(2.0**96),), spread=0.0, shape=(17,)),
    "ignored-class": Case(FAR, labels="some ignored", reduction="mean", ignore_index=4),
    "splits-300": Case(FAR, classes=300 * WIDTH, shape=(3,)),
    "far_blocks-falling": Case((-120.0, -400.0), classes=128 * WIDTH, shape=(3,)),
    "far_blocks-rising": Case((-400.0, -120.0), classes=128 * WIDTH, shape=(3,)),
    "mixed-tokens": Case(FAR, signs=(1.0, 0.0, -1.0), labels="some ignored", ignore_index=0),
    "peak": Case(PEAK, classes=len(PEAK), shape=(1,), spread=0.0, width=1024),
    "ranks-two-peak": Case(PEAK, ranks=2, classes=len(PEAK), shape=(1,), spread=0.0, width=1024),
    "default_dtype-in_flight": Case(FAR, shape=(5,), default="bfloat16", in_flight=True),
    "ranks-two-default_dtype-in_flight": Case(
        FAR, ranks=2, shape=(5,), default="bfloat16", reduction="mean", in_flight=True
    ),
    "autocast-twice": Case(FAR, shape=(5,), labels="some ignored", autocast=True, twice=True),
    "ranks-two-autocast-twice": Case(FAR, ranks=2, shape=(5,), reduction="sum", autocast=True, twice=True),
    "ranks-two-padding-nan": Case(FAR, ranks=2, shape=(5,), reduction="mean", labels="some ignored", padding=math.nan),
    "ranks-two-sequence": Case(FAR, ranks=2, classes=1200, shape=(6, 3), sequence_parallel=True),
    "ranks-two-deepest": Case((-(2.0**96),), ranks=2, classes=1200, spread=0.0, shape=(17,)),
    "ranks-two-blocks-rising": Case((-400.0, -120.0) * 2, ranks=2, classes=4 * 65 * WIDTH, shape=(3,)),
    "ranks-four": Case((-131072.0,), ranks=4, classes=1100, shape=(8, 1), sequence_parallel=True),
}
EXACT = {  # in each token the first 64 splits reach 0: the same bits with the patch as without
    "normal-mean": Case(reduction="mean", labels="some ignored", above=2.0),
    "normal-splits-300": Case(classes=300 * WIDTH, shape=(3,)),
    "zero-ranks-two-blocks": Case(spread=0.0, ranks=2, classes=4 * 65 * WIDTH, shape=(3,), reduction="mean"),
    "above-peak": Case((20.0, *(0.0,) * (130 * 1024 - 1)), classes=130 * 1024, shape=(1,), spread=0.0, width=1024),
    "above-ignored": Case((150.0,), shape=(5,), labels="some ignored"),
    "above-ranks-two-default-bfloat16": Case((150.0,), ranks=2, shape=(4, 1), default="bfloat16"),
}
NEAR = {  # below 0, and no sum underflows: right, but not the same bits; and what is nan, or has nan beside it
    "below-ranks-two-unlike": Case((-50.0, -300.0), ranks=2, shape=(5,), labels="some ignored"),
    "below-ranks-two-unlike-rising": Case((-300.0, -50.0), ranks=2, shape=(5,), reduction="mean"),
    "ignored-all-mean": Case(reduction="mean", labels="all ignored"),
    "nan_split": Case((0.0, math.nan), classes=512, shape=(5,), labels="first part"),
    "nan_split-far": Case((math.nan, *FAR), classes=512, shape=(5,), labels="last part"),
    "padding-inf": Case(shape=(5,), reduction="sum", labels="some ignored", padding=math.inf),
    "ranks-two-padding-nan-mean": Case(ranks=2, shape=(5,), reduction="mean", labels="some ignored", padding=math.nan),
}
# fmt: on


def assert_fp32(*tensors):
    """Assert what a kernel takes that copies its tensors with an atom for fp32."""
    dtypes = [tensor.dtype for tensor in tensors]
    assert set(dtypes) == {torch.float32}, f"the kernel copies fp32, and was given {dtypes}"


def products(hidden, rows):
    """Return logits in fp32, as a kernel does that autocast does not reach."""
    with torch.autocast("cpu", enabled=False):
        return hidden.float() @ rows.float().t()


class ForwardMainLoop:
    """FwdMainLoop in torch: of each split the maximum, the sum of exponentials below it, and the label's logit."""

    def __init__(self, vocab_per_split):
        self.width = vocab_per_split

    def __call__(self, hidden, weight, labels, *arguments):
        label_logits, maximum, total, ignore_index, rank, _stream = arguments
        assert_fp32(label_logits, maximum, total)
        logits = products(hidden, weight)
        classes = logits.shape[1]
        for split, part in enumerate(logits.split(self.width, dim=1)):
            largest = part.where(~part.isnan(), FLOOR).amax(dim=1).clamp(min=FLOOR)  # as the kernel's fmax
            maximum[:, split] = largest
            total[:, split] = (part - largest.unsqueeze(1)).exp().sum(dim=1)
            columns = labels - rank * classes - split * self.width
            here = (columns >= 0) & (columns < part.shape[1])
            picked = part.gather(1, columns.clamp(0, part.shape[1] - 1).unsqueeze(1)).squeeze(1)
            label_logits.copy_(picked.where(labels != ignore_index, 0.0).where(here, label_logits))


class BackwardPartialLogits:
    """BwdPartialDlogits in torch: the gradient of one split's logits, from the maximum and the sum that were saved."""

    def __init__(self, reduction, vocab_per_split):
        self.reduction, self.width = reduction, vocab_per_split

    def __call__(self, split, hidden, weight, labels, *arguments):
        above, maximum, total, towards_logits, valid, ignore_index, rank, _stream = arguments
        assert_fp32(above, maximum, total)
        if self.reduction == MEAN:
            above = above / ctypes.c_int64.from_address(valid).value
        above = above.expand(labels.shape) * (labels != ignore_index)
        rows = weight[split * self.width : (split + 1) * self.width]
        exponentials = (products(hidden, rows) - maximum.unsqueeze(1)).exp()
        gradient = exponentials * (above * total.reciprocal()).unsqueeze(1)
        columns = labels - rank * weight.shape[0] - split * self.width
        here = (columns >= 0) & (columns < rows.shape[0]) & (labels != ignore_index)
        columns = columns.clamp(0, rows.shape[0] - 1).unsqueeze(1)
        gradient.scatter_add_(1, columns, (-above).where(here, 0.0).unsqueeze(1))
        towards_logits[:, : rows.shape[0]] = gradient.to(towards_logits.dtype)


class NoReading(TorchFunctionMode):
    """Refuses what brings a tensor to the host, which here no operator shows."""

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str)]
        moves = function is torch.Tensor.to and "cpu" in names  # by name, and not as the device of another tensor
        reads = moves or function in READERS
        assert not reads, f"the host waits for the GPU: {function}"
        return function(*args, **kwargs)


@contextlib.contextmanager
def apart():
    """Keep host and GPU apart, though here both are the host: what is made without a device has no memory at all."""
    with host_waits("cpu") as seen, NoReading(), torch.device("meta"):
        yield
    assert not seen, f"the host waits for the GPU: {seen}"


def product(left, right, out_dtype=None, multiply=torch.mm):
    """Stand for torch.mm, which on this host takes no other dtype for its result."""
    return multiply(left.to(out_dtype or left.dtype), right.to(out_dtype or right.dtype))


# The packages of the CuTe DSL, with what the host code uses of them. The kernels get the tensors themselves.
dsl = mock.MagicMock(CUstream=int, from_dlpack=lambda tensor, assumed_align: tensor)  # noqa: ARG005 - its name
dsl.compile, dsl.make_ptr = lambda kernel, *_: kernel, lambda _dtype, address, *_, **__: address
for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cutlass", "cutlass.cute", "cutlass.cute.runtime"):
    sys.modules[name] = dsl
    setattr(dsl, name.rpartition(".")[2], dsl)
torch.Tensor.mark_compact_shape_dynamic = lambda tensor, **_: tensor
for name in ("Stream", "Event", "current_stream", "stream"):
    setattr(torch.cuda, name, mock.MagicMock())
torch.cuda.nvtx.range, torch.Tensor.is_cuda, torch.mm = contextlib.nullcontext, True, product
torch.set_deterministic_debug_mode("warn")  # so that new memory holds nan
torch.set_num_threads(1)  # sums in one order
logging.disable(logging.WARNING)  # that the CuTe DSL is not there
fused = pytest.importorskip("megatron.core.fusions.fused_linear_cross_entropy", reason="this tree has no such fusion")
blackwell = {"is_available": lambda: True, "current_device": lambda: 0, "get_device_capability": lambda *_: (10, 0)}
with mock.patch.multiple(torch.cuda, **blackwell):  # not while kernels run: Triton would look for that GPU's driver
    fused._get_platform()
from megatron.core.fusions.linear_cross_entropy.blackwell import entry
from megatron.core.fusions.linear_cross_entropy.blackwell import triton as kernels

kernels.get_num_valid_tokens.configs = kernels.get_num_valid_tokens.configs[:1]  # to time both takes a GPU
entry.fwd_mainloop.FwdMainLoop = ForwardMainLoop
entry.bwd_partial_dlogits.BwdPartialDlogits = BackwardPartialLogits
# PyTorch turns off the modes by which functions are seen, before it calls this.
fused.LinearCrossEntropy.backward = staticmethod(apart()(fused.LinearCrossEntropy.backward))


def set_split(width):
    """Set the classes in a split, as LCE_FWD_VOCAB_SPLIT_SIZE and LCE_BWD_VOCAB_SPLIT_SIZE do."""
    for config in (entry._get_fwd_config, entry._get_bwd_config):
        config.cache_clear()  # kernels are kept by the number of classes, whatever a split has
        config()._vocab_per_split = width


def inputs_of(case):
    """Return hidden states, the whole weight, labels and the gradient from above: fp32 holds all logits."""
    random = torch.Generator().manual_seed(3)
    dtype = getattr(torch, case.dtype)
    hidden = torch.randint(-16, 17, (*case.shape, HIDDEN), generator=random).float() / 8 * case.spread
    weight = torch.randint(-4, 5, (case.classes, HIDDEN), generator=random).float() / 8
    count = math.prod(case.shape)
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
    shape = (count,) if case.reduction == "none" else ()
    above = torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float32)
    above = above * case.above if case.reduction == "none" else torch.full_like(above, case.above)
    return hidden.to(dtype), weight.to(dtype), labels, above


@apart()
def forward(case, group, *tensors):
    """Compute the loss, under autocast where the case says so: on this host it is the CPU's."""
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        return fused.linear_cross_entropy(*tensors, group, case.reduction, case.ignore_index, case.sequence_parallel)


def on_rank(groups, case):
    """Return the loss and its gradients on one rank, and assert that the caller's tensors are as they were."""
    group = groups and groups[case.ranks]
    rank, size = (group.rank(), group.size()) if group else (0, 1)
    hidden, weight, labels, above = inputs_of(case)
    if group and torch.distributed.get_rank() < RANKS - size:
        hidden = -hidden  # the groups that are not judged have other numbers
    weight = weight.chunk(size)[rank].contiguous().requires_grad_(case.gradients)
    if case.sequence_parallel:
        hidden = hidden.chunk(size)[rank].contiguous()
    mine = (hidden.requires_grad_(case.gradients), weight, labels, above)
    before = [tensor.detach().clone() for tensor in mine]
    set_split(case.width)
    torch.set_default_dtype(getattr(torch, case.default))
    try:
        with watch():
            loss = forward(case, group, hidden, weight, labels)
            if case.in_flight:
                forward(case, group, hidden.detach().neg().requires_grad_(case.gradients), weight, labels)
            for again in range(1 + case.twice) if case.gradients else ():
                loss.backward(above, retain_graph=again < case.twice)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same([x.detach() for x in mine], before, "the caller's hidden states, weight, labels or gradient")
    results = {"loss": loss.detach()}
    if case.gradients:  # the half of a sum of two like numbers is exact
        results |= {"towards_hidden": hidden.grad / (1 + case.twice), "towards_weight": weight.grad / (1 + case.twice)}
    return results


def groups_of(_rank):
    return {size: own_group(size) for size in (1, 2, RANKS)}


@pytest.fixture(scope="session")
def world():
    with ranks(RANKS, groups_of) as group:
        yield group


def reference(case):
    """Return losses and gradients in float64, and how far a loss may be from them."""
    inputs = inputs_of(case)
    right = exact_losses(inputs, case.reduction, case.ignore_index, gradients=case.gradients)
    counted = inputs[2].view(-1) != case.ignore_index
    near = (LOSS + LEVEL * right.logits.abs().nan_to_num(posinf=0.0).amax(dim=1)).where(counted, 0.0)
    if case.reduction != "none":
        near = near.sum() / (1 if case.reduction == "sum" else max(1, int(counted.sum())))
    return right, near


def assert_near(loss, expected, near):
    """Assert that each number is off by at most `near`, or by LOSS; nan is right where nan is expected alone."""
    error = (loss.double() - expected).abs() / near.clamp(min=LOSS)
    off = float(error.where(~(loss.isnan() & expected.isnan()), 0.0).max().nan_to_num(nan=math.inf))
    last = f"{loss.flatten()[-1]:.6g} instead of {expected.flatten()[-1]:.6g}"
    assert off <= 1.0, f"the loss: {last}; {off:.3g} times what it may be off"


def assert_gradients(results, right):
    hiddens = [result["towards_hidden"] for result in results]
    weight = torch.cat([result["towards_weight"] for result in results])
    if hiddens[0].shape != right.towards_hidden.shape:  # sequence parallel: each rank has its part
        hiddens = [torch.cat(hiddens)]
    rest = slice(COLUMNS, None)
    for hidden in hiddens:
        assert_close(hidden[..., rest], right.towards_hidden[..., rest], GRADIENT, "the gradient of hidden states")
    for columns in (rest, 0):
        exact = right.towards_weight[:, columns]
        assert_close(weight[:, columns], exact, GRADIENT, f"the weight's gradient {columns}")


@pytest.fixture(scope="session")
def infinite(figure):
    """Collect the cases far below zero whose loss is not finite."""
    names = set()
    yield names
    figure("checks_with_an_infinite_loss", len(names))


def rows(cases, mark):
    return [pytest.param(case, id=name, marks=mark) for name, case in cases.items()]


DEFECT, CONTROL = pytest.mark.defect, pytest.mark.control


@pytest.mark.parametrize("case", [*rows(DEFECTS, DEFECT), *rows(EXACT, CONTROL), *rows(NEAR, CONTROL)])
def test_losses_and_gradients_are_those_of_cross_entropy(world, case, infinite, output, request):
    name = request.node.callspec.id
    # Of the last group of ranks, whose numbers in the world are not those in the group.
    results = world.run(on_rank, case)[-case.ranks :] if case.ranks > 1 or case.group else [on_rank(None, case)]
    if name in DEFECTS and not all(result["loss"].isfinite().all() for result in results):
        infinite.add(name)
    for number, result in enumerate(results) if name in EXACT else ():
        for key, tensor in result.items():
            output(f"{name}.{key}.{number}", tensor)
    right, near = reference(case)
    for result in results:
        assert_near(result["loss"], right.loss, near)
    if case.gradients:
        assert_gradients(results, right)


@contextlib.contextmanager
def watch():
    """Assert that kernels are launched, raise nothing, and access nothing outside of the tensors of their launch.

    Such an access is prevented: what is written elsewhere would end this process, and only later. What a mask leaves
    out, and no other value is given for, is undefined: here it is nan, or the largest.
    """
    raw, convert, numpy_type = interpreter._interpreter, interpreter._implicit_cvt, interpreter._get_np_dtype
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    launch, masked_load = executor.__call__, builder.create_masked_load
    places, outside = [], []  # the first and last element of each tensor; how many lie elsewhere, of each access

    def launching(this, *args, **kwargs):
        places.clear()
        return launch(this, *args, **kwargs)

    def take(argument):
        tensor = getattr(argument, "base", argument)
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            places.append((tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size()))
        return convert(argument)

    def inside(pointers, mask):
        within = mask & np.any([(first <= pointers) & (pointers <= last) for first, last in places], axis=0)
        outside.append(int((mask & ~within).sum()))
        return within

    def loading(this, pointers, mask, other, *args):
        if other is None:
            kind = pointers.get_element_ty()
            dtype = np.dtype(numpy_type(kind))
            most = math.nan if dtype.kind == "f" else np.iinfo(dtype).max
            other = interpreter.TensorHandle(np.full(pointers.data.shape, most, dtype), kind)
        return masked_load(this, pointers, mask, other, *args)

    watching = types.SimpleNamespace(
        load=lambda pointers, mask, *rest: raw.load(pointers, inside(pointers, mask), *rest),
        store=lambda pointers, value, mask: raw.store(pointers, value, inside(pointers, mask)),
        atomic_rmw=lambda operation, pointers, value, mask, order: raw.atomic_rmw(
            operation, pointers, value, inside(pointers, mask), order
        ),
    )
    with (
        mock.patch.multiple(interpreter, _interpreter=watching, _implicit_cvt=take),
        mock.patch.object(executor, "__call__", launching),
        mock.patch.object(builder, "create_masked_load", loading),
    ):
        try:
            yield
        except InterpreterError as error:  # a fault of the kernel, though no frame has upstream's file
            raise AssertionError(f"it raised {type(error).__name__}: {error}"[:400]) from error
    assert outside, "no kernel was launched"
    assert not sum(outside), f"{sum(outside)} accesses outside of a tensor"


@pytest.mark.parametrize(
    ("splits", "level"),
    [pytest.param(3, 0.0, id="near", marks=CONTROL), pytest.param(67, -131072.0, id="far_below", marks=DEFECT)],
)
def test_kernel_adds_the_sums_of_all_splits(splits, level):
    """Maxima of the rank and of all ranks may have unlike strides; a loss hides by how little a sum is off there."""
    count = 21
    logits = torch.randint(-24, 25, (count, splits, 8), generator=torch.Generator().manual_seed(11)) / 8 + level
    maximum = logits.amax(dim=2)  # of each split, and the sum of exponentials below it, as the main loop gives them
    total = (logits - maximum.unsqueeze(2)).exp().sum(dim=2)
    reduced = maximum + torch.arange(splits) % 3 / 2  # another rank's are larger
    strided = reduced.t().contiguous().t()
    kernel_max, kernel_sum = torch.zeros(2, count)
    with watch():
        kernels.forward_tp_epilogue[lambda meta: (-(-count // meta["BLOCK_SIZE_M"]),)](
            count, splits, strided, *strided.stride(), maximum, *maximum.stride(), total, *total.stride(),
            kernel_max, 1, kernel_sum, 1,
        )  # fmt: skip
    expected = (logits.double().flatten(1) - reduced.amax(dim=1, keepdim=True)).exp().sum(dim=1)
    assert_same([kernel_max], [reduced.amax(dim=1)], "the maximum")
    assert_close(kernel_sum, expected, LOSS, "the sum")
