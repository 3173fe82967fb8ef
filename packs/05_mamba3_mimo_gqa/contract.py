"""Mamba-3 MIMO: the backward sums dQ and dK over the heads of each group, for any G that divides H.

Judged are mamba_mimo_bwd_combined, its packed twin, and the public mamba3_mimo. Without a GPU (traced), TileLang is a
mock, and stand-ins replace its kernels. They write small whole numbers into their outputs, so that each sum is known.
Those of Triton's small kernels and of the forward write constants. A fix may sum in a Triton kernel, which is
interpreted.

On a GPU (executed, bfloat16), the real kernels run in two builds: a small one without the optional inputs, and one
with all of them. What stand-ins show is left to the target cpu.

Tolerances, of the largest error over the largest value: 0.10 against the recurrence in float64, as upstream's own tests
allow. 2^-8, one rounding to bfloat16, against a run with Q and K repeated for each head. With stand-ins, sums are exact
or rounded once to 16 bits: to nearest, or cut off by a Triton kernel in the interpreter.

Not judged: a packed call without MIMO_Out, which the release refuses for one group, too; Z without MIMO_Out.
"""

import functools
import importlib
import itertools
import math
import sys
from collections import defaultdict
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch
from torch.nn.functional import silu, softplus

from kit import current_target
from kit.autograd import kept_alive, weak_storages
from kit.compiled import import_below
from kit.cuda_source import in_processes
from kit.interpreter import interpret

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
TARGET = current_target()
if TARGET.name == "cpu":
    interpret()
    names = ("tilelang", "tilelang.autotuner", "tilelang.language", "tilelang.profiler")
    sys.modules |= dict.fromkeys(names, mock.MagicMock())

#: (G, H). A G and a ratio that are there twice show what is kept between calls. A mean of 7 heads is rounded.
KINDS = {"grouped": ((2, 16), (3, 12), (2, 6), (4, 12), (2, 14)), "g1_and_gh": ((1, 16), (16, 16), (1, 2))}
KIND = [
    pytest.param("grouped", marks=pytest.mark.defect),
    pytest.param("g1_and_gh", marks=pytest.mark.control, id="one-and-all"),
]
FEW = [pytest.param(2, 6, marks=pytest.mark.defect), pytest.param(1, 2, marks=pytest.mark.control)]
OPTIONS = (96, 7, 160, 5)  # threads and stages of both kernels, none of them a size of a case
SLEEP = 2 * 10**8  # cycles: a tenth of a second, in which a host gets through a call
CONSTANT = 0.5  # what the stand-in of a small kernel writes into its first result
ARGUMENTS = (*"QKV", "Q_bias", "K_bias", "MIMO_V", "MIMO_Out", "Z", "MIMO_Z", "Angles")
GRADIENTS = (*"QKV", "ADT", "DT", "Trap", "Q_bias", "K_bias", "MIMO_V", "MIMO_Z", "MIMO_Out", "Angles", *"DZ")
PUBLIC = "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo"
UTILITIES = "mamba_ssm.ops.triton.mamba3.mamba3_mimo_utils"
ANGLES, KERNELS = "mamba_ssm.ops.triton.mamba3.angle_dt", ("mamba_mimo_bwd_bwd", "mamba_mimo_bwd_fwd", "mamba_mimo_fwd")
FILLED = {  # by the two kernels of the backward, in this order
    "mamba_mimo_bwd_fwd": ("MIMO_Out", "states", "Z", "MIMO_Z", "qk_dot"),
    "mamba_mimo_bwd_bwd": (*"KV", "MIMO_V", "Q", "factor", "gamma", "Angles", "D", "ADT", "decay", "reverse", "sums"),
}
OF_THE_INPUTS = {"states", "Z", "qk_dot", *"QKV"}  # their dtype; the kernels declare all others as float32
HEADS_THIRD = {*"QKVZ", "Angles"}  # the heads are their third dimension, and the second one of all others


@dataclass(frozen=True)
class Case:
    """What is compiled in, and beside it the ends of the sequences, sizes, dtype and device."""

    layout: str
    entry: str  # mamba3_mimo and autograd, or the backward's wrapper alone
    R: int
    z: bool
    D: bool
    MIMO_Out: bool
    N: int
    ends: tuple = ()
    P: int = 64
    divisor: int = 4
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @property
    def chunk(self):
        """The steps of a chunk."""
        return 64 // self.R


BARE = Case("dense", "wrapper", 4, z=False, D=False, MIMO_Out=False, N=32, ends=(32,))
PACKED = Case("varlen", "wrapper", 2, z=True, D=False, MIMO_Out=True, N=32, ends=(35, 64))
FUNCTION = Case("dense", "public", 1, z=True, D=True, MIMO_Out=True, N=64, ends=(128,))
WHOLE = Case("varlen", "public", 4, z=True, D=True, MIMO_Out=True, N=64, ends=(19, 32))
TRACED = (
    *(BARE, PACKED, FUNCTION, WHOLE),
    replace(BARE, R=2, z=True, D=True, MIMO_Out=True, ends=(64,)),
    replace(FUNCTION, z=False, D=False, MIMO_Out=False),
    replace(WHOLE, R=1, z=False, ends=(67, 128)),
    replace(PACKED, ends=(64,)),  # it ends as a chunk does: the packed kernels have a chunk more for it
)
EXECUTED = (replace(BARE, ends=(128,)), replace(WHOLE, ends=(70, 103, 192)))
EXECUTED += (replace(EXECUTED[1], entry="wrapper", ends=(128,)),)


def short(case):
    given = "".join(f"-{name}" for name in ("z", "D", "MIMO_Out") if getattr(case, name))
    return f"{case.layout}-{case.entry}-R{case.R}-N{case.N}{given}-{'-'.join(map(str, case.ends))}"


# A call, and what it should return


def load(name):
    """Import a module of upstream; its kernels have one configuration: the same bits in every run, and no tuning."""
    module = import_below(name)
    for kernel in autotuned(module):
        kernel.configs = kernel.configs[:1]
    return module


def autotuned(*modules):
    return [x for module in modules for x in vars(module).values() if type(x).__name__ == "Autotuner"]


def backward_module(case):
    return load(f"{PUBLIC}_bwd" + "_varlen" * (case.layout == "varlen"))


def make(case, G, H):
    """Return the arguments by name, distributed as in upstream's tests, and the gradient of the output."""
    generator, S, P, dtype = torch.Generator(case.device).manual_seed(5), case.ends[-1], case.P, case.dtype
    B = 1 if case.layout == "varlen" or H <= 6 else 2

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator, device=case.device).to(dtype)

    x = {name: normal(B, S, case.R, G, case.N, dtype=dtype) for name in "QK"}
    x |= {name: normal(B, S, H, P, dtype=dtype) for name in "VZ"}
    x |= {name: normal(H, case.R, case.N) for name in ("Q_bias", "K_bias")}
    x |= {name: normal(H, case.R, P) / case.R for name in ("MIMO_V", "MIMO_Out", "MIMO_Z")}
    x |= {"DT": softplus(normal(B, H, S) - 3), "Trap": normal(B, H, S).sigmoid().to(dtype)}
    x |= {"ADT": -x["DT"] * normal(B, H, S).sigmoid(), "D": normal(H)}
    x |= {"Angles": normal(B, S, H, case.N // case.divisor).sigmoid()}
    x |= dict.fromkeys(["Z", "MIMO_Z"] * (not case.z) + ["D"] * (not case.D) + ["MIMO_Out"] * (not case.MIMO_Out))
    return x, normal(B, S, *[case.R] * (not case.MIMO_Out), H, P, dtype=dtype)


def slots(case, layout):
    """Return how many chunks the kernels of a layout have places for: where packed, one more for each sequence."""
    steps = case.ends[-1]
    return steps // case.chunk + len(case.ends) if layout == "varlen" else math.ceil(steps / case.chunk)


def call(case, x, dout, *options, frozen=()):
    """Call upstream; return the gradients by name, and beside them what the public function returned as "out".

    The wrapper may be given options after the dtype by position; of the public function's inputs some may be frozen.
    """
    load(ANGLES)
    varlen = case.layout == "varlen"
    given = {"cu_seqlens": torch.tensor([0, *case.ends], device=case.device).int()} if varlen else {}
    if case.entry == "public":
        leaves = {name: y if y is None else y.detach().requires_grad_(name not in frozen) for name, y in x.items()}
        given |= {"chunk_size": case.chunk, "rotary_dim_divisor": case.divisor, "dtype": case.dtype}
        out = load(PUBLIC).mamba3_mimo(**leaves, **given)
        try:
            out.backward(dout)
        except RuntimeError as error:  # raised by autograd itself, of what upstream's backward gave it
            if "returned a gradient different" not in str(error):  # from None, or "than None", by torch's version
                raise
            raise AssertionError(str(error)) from error
        found = {name: leaf.grad for name, leaf in leaves.items() if leaf is not None and name not in frozen}
        return {name: y for name, y in found.items() if y is not None} | {"out": out.detach()}
    if case.device == "cuda":
        decays = load(UTILITIES).compute_dacs_segsum_triton_varlen(x["ADT"], case.chunk, **given)
    else:  # the stand-ins read no number
        pairs = (*x["ADT"].shape[:2], slots(case, case.layout), case.chunk, case.chunk)
        decays = [torch.ones(shape) for shape in (x["ADT"].shape, x["ADT"].shape, pairs)]
    others = [*decays[:2], x["DT"], x["Trap"], x["D"], decays[2], case.chunk, case.divisor, case.dtype]
    combined = getattr(backward_module(case), "mamba_mimo_bwd_combined" + "_varlen" * varlen)
    if options:  # the packed wrapper has the ends of its sequences before them
        options, given = (*given.values(), *options), {}
    result = combined(dout, *(x[name] for name in ARGUMENTS), *others, *options, **given)
    return {name: y for name, y in zip(GRADIENTS, result, strict=False) if y is not None}


def reference(case, x, dout):
    """Differentiate Mamba-3's recurrence in float64, step by step; every sequence starts with an empty state."""
    x = {name: y.double().requires_grad_() for name, y in x.items() if y is not None}
    heads, n, half, angles = x["V"].shape[2] // x["Q"].shape[3], x["Angles"].shape[-1], case.N // 2, x["Angles"]
    spans = list(itertools.pairwise((0, *case.ends)))
    if case.entry == "public":  # which adds them up
        turns = angles.tanh() * math.pi * x["DT"].transpose(1, 2)[..., None]
        angles = torch.cat([turns[:, start:stop].cumsum(1) for start, stop in spans], 1)
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]

    def turned(name):  # the pairs (i, N/2 + i) of the first quarter are rotated
        y = x[name].repeat_interleave(heads, 3) + x[f"{name}_bias"].transpose(0, 1)
        a, b = y[..., :n], y[..., half : half + n]
        return torch.cat([a * cos - b * sin, y[..., n:half], a * sin + b * cos, y[..., half + n :]], -1)

    q, k, v, rows = turned("Q"), turned("K"), torch.einsum("bshp,hrp->bsrhp", x["V"], x["MIMO_V"]), []
    for t in range(case.ends[-1]):
        if t in (0, *case.ends):
            state = previous = 0
        decay, dt, mix = (y[:, :, t, None, None] for y in (x["ADT"].exp(), x["DT"], x["Trap"].sigmoid()))
        new = torch.einsum("brhn,brhp->bhnp", k[:, t], v[:, t])
        state, previous = decay * (state + (1 - mix) * dt * previous) + mix * dt * new, new
        rows.append(torch.einsum("brhn,bhnp->brhp", q[:, t], state))
    gate = silu(torch.einsum("bshp,hrp->bsrhp", x["Z"], x["MIMO_Z"])) if "Z" in x else 1
    y = (torch.stack(rows, 1) + (v * x["D"][:, None] if "D" in x else 0)) * gate
    y = torch.einsum("bsrhp,hrp->bshp", y, x["MIMO_Out"]) if "MIMO_Out" in x else y
    y.backward(dout.double())
    return {name: leaf.grad for name, leaf in x.items()} | ({"out": y.detach()} if case.entry == "public" else {})


def repeated(case, x, dout, G):
    """Return the gradients of a call with Q and K repeated for each head; dQ and dK are summed in float64."""
    heads = x["V"].shape[2] // G
    found = call(case, x | {name: x[name].repeat_interleave(heads, 3) for name in "QK"}, dout)
    return found | {name: found[name].double().unflatten(3, (G, -1)).sum(4) for name in {*"QK"} & {*found}}


def distance(actual, expected):
    """Return the largest error over the largest value; infinity for None, other shapes, or where no number stands."""
    if actual is None or expected is None or actual.shape != expected.shape:
        return math.inf
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).abs().max() / expected.abs().max().clamp(1e-9)).nan_to_num(math.inf).item()


def differing(ours, others):
    """Count the elements of ours that are not the same bit for bit in the others, or have no place there."""
    count = 0
    for name, y in ours.items():
        other = others.get(name)
        alike = y is None or (other is not None and other.shape == y.shape)
        count += 0 if y is None else int((y != other).sum()) if alike else y.numel()
    return count


def called(case, x, dout):
    """Call upstream twice; return the first gradients, and count what differs or what a call has changed."""
    inputs = {name: y if y is None else y.clone() for name, y in x.items()} | {"dout": dout.clone()}
    first = call(case, x, dout)
    copies = {name: y.clone() for name, y in first.items()}
    second = call(case, x, dout)
    typed = [name for name in x if name in first and "bias" not in name]
    return copies, {
        "differing": differing(copies, second),
        "changed": differing(inputs, x | {"dout": dout}) + differing(copies, first),
        "in one memory": sum(y.data_ptr() == second[name].data_ptr() for name, y in first.items() if name in second),
        "of absent inputs": sum(x[name] is None for name in x if name in first),
        "of another dtype": sum(x[name] is not None and first[name].dtype != x[name].dtype for name in typed),
        "wider than they are, or strided": sum(
            y.untyped_storage().nbytes() != y.nbytes or not ("bias" in name or y.is_contiguous())
            for name, y in first.items()
            if case.entry == "wrapper" or name in ("Q", "K")  # autograd may have copied the others
        ),
    }


# Stand-ins for the kernels, on a CPU


@dataclass
class StandIns:
    """The kernels of a backward, and what they note: what they wrote, the memory and the options they were given.

    They fill what is new, or zero, with small whole numbers. dQ and dK of the heads get larger ones: bfloat16 does not
    hold the sums of a group, only what these are rounded to. A launch may be for some of the heads: the rows of Q_bias
    say for which. If numbers are "spoilt", those of the first head are not finite; "tiny" ones are multiples of the
    smallest number of float16, whose sums it holds; into tensors "without values" nothing is written.
    """

    case: Case
    x: dict
    numbers: str
    written: dict = field(default_factory=dict)
    storages: list = field(default_factory=list)
    options: dict = field(default_factory=dict)

    def factory(self, layout, name):
        def make_kernel(*given, **named):
            self.options[name] = [x for x in (*given, *named.values()) if x in OPTIONS]
            return functools.partial(self.run, layout, name)

        return make_kernel

    def run(self, layout, name, *arguments):
        if self.numbers == "without values":
            return
        self.refuse(layout, arguments)
        self.storages += weak_storages(y for y in arguments if y is not None)
        biases = self.x["Q_bias"]
        heads = torch.stack([(biases == row).all((1, 2)).nonzero()[0, 0] for row in arguments[4]])
        names = [each for each in FILLED[name] if each not in self.x or self.x[each] is not None]
        floats = [y for y in arguments if y is not None and y.is_floating_point()]
        random = torch.Generator().manual_seed(6 + int(heads[0]))
        for result, y in zip(names, [y for y in floats if y.isnan().all() or not y.any()], strict=True):
            axis, per_head = 2 if result in HEADS_THIRD else 1, result in ("Q", "K")
            y.random_(*(-127, 128) if per_head else (-2, 3), generator=random)
            if self.numbers == "spoilt" and per_head and heads[0] == 0:
                y.select(axis, 0).fill_(math.nan if result == "Q" else math.inf)
            if self.numbers == "tiny" and per_head:
                y.mul_(2.0**-24)
            shape = [len(biases) if n == axis else size for n, size in enumerate(y.shape)]
            self.written.setdefault(result, y.new_full(shape, math.nan)).index_copy_(axis, heads, y)

    def refuse(self, layout, arguments):
        """Raise for what the real kernels refuse: gaps, other heads than those of Q_bias, other chunks."""
        strided = [index for index, y in enumerate(arguments) if y is not None and not y.is_contiguous()]
        heads, chunks = len(arguments[4]), slots(self.case, layout)
        pairs = next(y for y in reversed(arguments) if y is not None and y.dim() == 5)  # the decays
        if strided or {y.shape[-2] for y in (arguments[0], arguments[3])} != {heads} or pairs.shape[2] != chunks:
            raise TypeError(f"operands {strided} have gaps, or sizes are not of {heads} heads and {chunks} chunks")


def left_out(*arguments, **_):
    """Stand for one of Triton's small kernels: give each result that is new, or zero, a constant of its own."""
    floats = [y for y in arguments if torch.is_tensor(y) and y.is_floating_point()]
    for number, y in enumerate(y for y in floats if y.isnan().all() or not y.any()):
        y.fill_(CONSTANT + number)


def forward(q, _k, v, *others, **_):
    """Stand for the forward, which makes its output on a GPU; others[3] is MIMO_Out."""
    shape = v.shape if others[3] is not None else (*v.shape[:2], q.shape[2], *v.shape[2:])
    return v.new_zeros(shape), None, None


def prepared(case, G, H, numbers="usual"):
    """Return a case for the CPU, its arguments, and the stand-ins, which are in place."""
    torch.set_deterministic_debug_mode("error")  # so new memory holds no number
    load(PUBLIC).mamba_mimo_forward = load(PUBLIC).mamba_mimo_forward_varlen = forward
    case = replace(case, N=case.N // 4, P=12, device="cpu")  # a CPU takes its time
    if H % 6 == 0:
        case = replace(case, dtype=torch.float16, divisor=2)
    x, dout = make(case, G, H)
    kernels = StandIns(case, x, numbers)
    for layout, name in itertools.product(("dense", "varlen"), FILLED):  # packed steps may go to the dense kernels
        setattr(backward_module(replace(case, layout=layout)), name, kernels.factory(layout, name))
    for kernel in autotuned(load(UTILITIES), load(ANGLES)):
        kernel.run = left_out if numbers != "without values" else mock.Mock()
    return case, x, dout, kernels


def summed(written, case, G):
    """Return the gradients that follow from per-head ones by sums, in float64."""
    found = {name: written[name].double() for name in ("V", "Z") if name in written}
    found["ADT"] = written["ADT"].double() + CONSTANT
    B, S, H, _ = written["V"].shape
    for name in "QK":
        per_head = written[name].double().view(B, S, case.R, H, case.N)
        found[name] = per_head.unflatten(3, (G, -1)).sum(4)
        found[f"{name}_bias"] = per_head.sum((0, 1)).transpose(0, 1)
    over = (0, 2) if case.layout == "varlen" else 0
    return found | {x: written[x].double().sum(over) for x in ("MIMO_Out", "MIMO_Z", "MIMO_V", "D") if x in written}


def rounded_once(actual, exact, dtype, *, interpreted):
    """Return whether all are exact numbers, rounded once to 16 bits: to nearest, or, where interpreted, all cut off."""
    nearest = exact.to(dtype)
    cut_off = (nearest.view(torch.int16) - (nearest.double().abs() > exact.abs()).short()).view(dtype)
    allowed = (nearest, cut_off) if interpreted else (nearest,)
    return any(torch.equal(actual.double(), each.double()) for each in allowed)


def launches():
    """Replace, and give, what launches a kernel in Triton's interpreter; it still does."""
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    return mock.patch.object(executor, "__call__", autospec=True, side_effect=executor.__call__)


def traced(case, G, H):
    """Run the backward with stand-ins; return the gradients and, by name, their errors and what else is wrong."""
    case, x, dout, kernels = prepared(case, G, H)
    with launches() as launched:  # a fix may sum in one
        actual, errors = called(case, x, dout)
    exact = summed(kernels.written, case, G)
    typed = {name: y.dtype for name, y in kernels.written.items() if name not in OF_THE_INPUTS}
    errors["of another dtype"] += sum(dtype != torch.float32 for dtype in typed.values())
    for name in {*"QK", "Q_bias", "K_bias"} & actual.keys():  # the kernels' dtype does not hold these sums
        if rounded_once(actual[name], exact[name], case.dtype, interpreted=launched.called):
            exact[name] = actual[name]
    errors["reference"] = max(distance(actual.get(name), exact[name]) for name in exact)
    others = {name: y for name, y in repeated(case, x, dout, G).items() if name not in exact}
    errors["unlike those of repeated heads"] = differing(others, actual)
    return actual, errors


# What a call promises besides


def a_spoilt_head_stays_in_its_group(case, G, H):
    case, x, dout, _ = prepared(case, G, H)
    expected = call(case, x, dout)
    case, x, dout, _ = prepared(replace(case, N=4 * case.N), G, H, "spoilt")
    with torch.autocast("cpu", dtype=case.dtype):
        found = call(case, x, dout)
    assert not any(found[name][..., 0, :].isfinite().any() for name in "QK"), "sums of no numbers"
    others = dict.fromkeys("QK", (..., slice(1, None), slice(None))) | dict.fromkeys(
        ("Q_bias", "K_bias"), slice(1, None)
    )
    found = {name: y.to(expected[name].dtype) for name, y in found.items()}  # as autograd does
    alone = [{name: y[others.get(name, ...)] for name, y in each.items()} for each in (expected, found)]
    assert differing(*alone) == 0, "elements of other groups"


def a_dtype_may_be_given_by_its_name(case, G, H):
    case, x, dout, _ = prepared(case, G, H)
    by_name = replace(case, dtype=str(case.dtype).removeprefix("torch."))
    assert differing(call(case, x, dout), call(by_name, x, dout)) == 0


def a_frozen_input_changes_no_other_gradient(case, G, H):
    case, x, dout, _ = prepared(case, G, H)
    expected = call(case, x, dout)
    for frozen in (name for name in x if x[name] is not None):
        found = call(case, x, dout, frozen=[frozen])
        assert frozen not in found
        assert differing({name: y for name, y in expected.items() if name != frozen}, found) == 0, frozen


def inputs_need_not_be_contiguous(case, G, H):
    case, x, dout, _ = prepared(case, G, H)
    expected = call(case, x, dout)
    apart = {name: y if y is None else torch.stack([y, y], -1)[..., 0] for name, y in x.items()}
    assert differing(expected, call(case, apart, torch.stack([dout, dout], -1)[..., 0])) == 0


def an_unused_mimo_z_has_no_gradient(case, G, H):
    case, x, dout, _ = prepared(replace(case, z=False), G, H)
    expected, found = call(case, x, dout), call(case, x | {"MIMO_Z": torch.ones_like(x["MIMO_V"])}, dout)
    assert found.keys() == expected.keys()
    assert differing(expected, found) == 0


def no_buffer_is_kept(case, G, H):
    case, x, dout, kernels = prepared(case, G, H)
    found = call(case, x, dout)
    held = weak_storages(y for y in (*found.values(), *x.values(), dout) if y is not None)
    others = [storage for storage in kernels.storages if all(storage != each for each in held)]
    assert kept_alive(others, seconds=0) == 0, "buffers outlive the call"


def no_operator_waits_for_the_device(case, G, H):
    case, x, dout, _ = prepared(case, G, H, "without values")
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    with torch.device("meta"), mock.patch.object(executor, "__call__"):  # where tensors have no values to wait for
        call(case, {name: y if y is None else y.to("meta") for name, y in x.items()}, dout.to("meta"))


WITH_STAND_INS = pytest.mark.skipif(TARGET.executed, reason="the target cpu judges it")


@pytest.fixture(scope="module")
def largest(figure):
    """Give a dictionary of figures, which are recorded at the end."""
    found = defaultdict(float)
    yield found
    for name, value in found.items():
        figure(name, value)


@WITH_STAND_INS
@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("case", TRACED, ids=short)
def test_gradients_are_sums_over_groups(case, kind, largest, output):
    for G, H in KINDS[kind]:
        gradients, errors = traced(case, G, H)
        if kind == "g1_and_gh":
            record(output, f"{short(case)}-G{G}-H{H}, traced", gradients)
        largest[f"{kind}_reference"] = max(largest[f"{kind}_reference"], errors["reference"])
        assert not any(errors.values()), f"G={G} H={H}: {errors}"


def record(output, name, gradients):
    output(name, torch.cat([y.contiguous().view(torch.uint8).flatten().cpu() for y in gradients.values()]))


@WITH_STAND_INS
@pytest.mark.control
@pytest.mark.parametrize(("G", "H"), [(5, 16), (6, 4)])  # the real kernels would read beyond Q and K
@pytest.mark.parametrize("case", [BARE, PACKED, FUNCTION, WHOLE], ids=short)
def test_groups_that_do_not_divide_the_heads_are_refused(case, G, H):
    case, x, dout, _ = prepared(case, G, H)
    with pytest.raises((AssertionError, ValueError), match=str(G)):
        call(case, x, dout)


PROMISES = [
    *itertools.product([a_spoilt_head_stays_in_its_group, a_dtype_may_be_given_by_its_name], [BARE, PACKED]),
    *itertools.product([no_buffer_is_kept], [BARE, PACKED]),
    *itertools.product([a_frozen_input_changes_no_other_gradient, inputs_need_not_be_contiguous], [FUNCTION]),
    *itertools.product([an_unused_mimo_z_has_no_gradient], [BARE, PACKED, FUNCTION]),
    (no_operator_waits_for_the_device, BARE),
]


@WITH_STAND_INS
@pytest.mark.parametrize(("G", "H"), FEW)
@pytest.mark.parametrize(("promise", "case"), PROMISES, ids=lambda x: getattr(x, "__name__", None) or short(x))
def test_promise_is_kept(promise, case, G, H):
    promise(case, G, H)


@WITH_STAND_INS
@pytest.mark.defect
def test_tiny_gradients_are_summed():
    case, x, dout, kernels = prepared(BARE, 2, 6, "tiny")
    assert case.dtype == torch.float16
    found, exact = call(case, x, dout), summed(kernels.written, case, 2)
    assert differing({name: exact[name] for name in "QK"}, {name: found[name].double() for name in "QK"}) == 0


@WITH_STAND_INS
@pytest.mark.control
@pytest.mark.parametrize("case", [BARE, PACKED], ids=short)
def test_threads_and_stages_keep_their_places(case):
    case, x, dout, kernels = prepared(case, 1, 2)
    call(case, x, dout, *OPTIONS)
    assert kernels.options == {"mamba_mimo_bwd_fwd": [*OPTIONS[:2]], "mamba_mimo_bwd_bwd": [*OPTIONS[2:]]}


# The real kernels, on a GPU


def compile_one(kernel, case):
    """In a process of its own: compile one kernel of a case into the cache on disk; the others are left out."""
    forward, backward = load(f"{PUBLIC}_fwd" + "_varlen" * (case.layout == "varlen")), backward_module(case)
    with ExitStack() as stack:
        for module, name in zip((backward, backward, forward), KERNELS, strict=True):
            if name != kernel:
                stack.enter_context(mock.patch.object(module, name, return_value=lambda *_: None))
        with suppress(Exception):  # the test compiles it again, and says what it raised
            call(case, *make(case, 16, 16))


@pytest.fixture(scope="class")
def compiled():
    """Compile all kernels side by side, before the first of them is launched."""
    language = load(f"{PUBLIC}_bwd").T
    language.dynamic = functools.cache(language.dynamic)  # else the release traces its kernels anew in every call
    jobs = itertools.product(KERNELS, EXECUTED[:2])  # the last case has the kernels of the second
    in_processes(compile_one, [job for job in jobs if job[0] != "mamba_mimo_fwd" or job[1].entry == "public"])


@contextmanager
def late_streams(x):
    """Let each stream that is entered begin late, and fill freed memory before a small kernel runs."""
    enter, own = torch.cuda.set_stream, torch.cuda.current_stream()
    sleep = functools.partial(torch.cuda._sleep, SLEEP)  # noqa: SLF001 - nothing public
    per_head = x["Q"].repeat_interleave(x["V"].shape[2] // x["Q"].shape[3], 3)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # so that little is free

    def entered(stream):
        enter(stream)
        if stream not in (None, own):
            sleep()

    def crowded(run, *given, **named):
        free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        _ = [torch.ones_like(per_head) for _ in range(free // per_head.nbytes + 1)]
        return run(*given, **named)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "set_stream", entered))
        for kernel in autotuned(load(UTILITIES)):
            stack.enter_context(mock.patch.object(kernel, "run", functools.partial(crowded, kernel.run)))
        sleep()  # so what waits for nobody begins too early
        yield


@pytest.mark.usefixtures("compiled")
class TestKernels:
    __test__ = TARGET.executed

    @pytest.mark.parametrize("kind", KIND)
    @pytest.mark.parametrize("case", EXECUTED, ids=short)
    def test_gradients_agree(self, case, kind, largest, output):
        for G, H in KINDS[kind][:2]:
            x, dout = make(case, G, H)
            (actual, errors), exact = called(case, x, dout), reference(case, x, dout)
            others = repeated(case, x, dout, G)
            if kind == "g1_and_gh":
                record(output, f"{short(case)}-G{G}-H{H}", actual)
            far = max(distance(actual.get(name), exact[name]) for name in exact)
            apart = max(distance(actual.get(name), others.get(name)) for name in exact)
            for name, value in (("reference", far), ("repeated", apart)):
                largest[f"{kind}_{name}"] = max(largest[f"{kind}_{name}"], value)
            assert far <= 0.10, f"G={G} H={H}: {far:.1e} from float64"
            assert apart <= 2**-8, f"G={G} H={H}: {apart:.1e} from repeated heads"
            assert not any(errors.values()), f"G={G} H={H}: {errors}"

    @pytest.mark.defect
    @pytest.mark.parametrize("case", [case for case in EXECUTED if case.entry == "wrapper"], ids=short)
    def test_late_streams_change_no_bit(self, case):
        x, dout = make(case, *KINDS["grouped"][0])  # at larger sizes the small kernels' results would take that memory
        expected = call(case, x, dout)
        with late_streams(x):
            found = call(case, x, dout)
        assert differing(expected, found) == 0

    @pytest.mark.defect
    def test_more_steps_and_rows_than_a_launch_has_in_its_second_dimension(self):
        case = replace(BARE, ends=(16384,))
        x, dout = make(case, 2, 6)
        actual, others = call(case, x, dout), repeated(case, x, dout, 2)
        errors = {name: distance(actual.get(name), others.get(name)) for name in "QK"}
        assert all(error <= 2**-8 for error in errors.values()), errors
