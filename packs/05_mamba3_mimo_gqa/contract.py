"""Mamba-3 MIMO: the backward sums dQ and dK over the heads of each group, for any G that divides H.

Judged are mamba_mimo_bwd_combined, its packed twin and the public mamba3_mimo, for G of H heads: grouped, one group, a
group for each head. FACTORS has the rest. Every gradient is compared. An absent input has no gradient. A gradient's
memory is as large as the gradient. No buffer is kept.

On a CPU (traced) the kernels of TileLang are stand-ins. These write small whole numbers into what they are given to
fill, so that each sum is known. They refuse tensors that are not contiguous, or of other shapes than the real kernels
declare. Triton's small kernels, from which the rest of dADT, dDT, dTrap and the public function's dAngles come, are
interpreted for packed calls of the public function, and left out elsewhere. So is the forward, which asks for a GPU.

On a GPU (executed, bfloat16) the same is judged in a process that sees no GPU, and then the real kernels: against the
recurrence in float64, against a run with Q and K repeated for each head, with every stream that begins late, and with
more steps and rows than the second dimension of a launch holds.

Tolerances, of the largest error over the largest value: 0.10 against float64, which upstream's own tests allow; 2^-8
against repeated heads, one rounding to bfloat16. With stand-ins, sums are exact, or rounded once to 16 bits: to nearest
or, after a Triton kernel in the interpreter, cut off. The small kernels' sums of a chunk are float32: 2^-16. dTrap has
16 bits, cut off twice by the interpreter: 2^-7.

Not judged: a packed call without MIMO_Out, which the release refuses for one group, too; Z without MIMO_Out.
"""

import functools
import importlib
import itertools
import math
import os
import re
import sys
from collections import defaultdict
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import pad, silu, softplus
from torch.utils._python_dispatch import TorchDispatchMode

from kit import current_target, pairwise
from kit.compiled import import_below, workers
from kit.cuda_source import in_processes
from kit.interpreter import interpret

EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
TARGET = current_target()
if TARGET.name == "cpu":
    interpret()

FACTORS = {
    "entry": ("public", "wrapper"),  # mamba3_mimo and autograd, or the backward's wrapper alone
    "layout": ("dense", "varlen"),
    "D": (True, False),
    "MIMO_Out": (True, False),
    "N": (32, 64),
    "z": (True, False),
    "R": (1, 2, 4),
}
ROWS = pairwise(FACTORS, lambda row: not row.get("MIMO_Out", True) and (row.get("z") or row.get("layout") == "varlen"))
#: (G, H). A G and a ratio that are there twice show what is kept from one call to the next.
KINDS = {"grouped": ((2, 16), (8, 16), (3, 12), (2, 6), (4, 12), (3, 15)), "g1_and_gh": ((1, 16), (16, 16), (1, 2))}
KIND = [
    pytest.param("grouped", marks=pytest.mark.defect),
    pytest.param("g1_and_gh", marks=pytest.mark.control, id="one-and-all"),
]
REFUSED = ((5, 16), (6, 4))  # on stand-ins alone: the real kernels would read beyond Q and K
SMALL = 6  # heads: as many as the interpreter has the time for
FEW = [pytest.param(2, SMALL, marks=pytest.mark.defect), pytest.param(1, 2, marks=pytest.mark.control)]
OPTIONS = (96, 7, 160, 5)  # threads and stages of both kernels, none of them a size of a case
SLEEP = 2 * 10**8  # cycles: a tenth of a second, in which a host gets through a call
LIMITS = {"small kernels": 2**-16, "dTrap": 2**-7}
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


@dataclass(frozen=True)
class Case:
    """A row of ROWS, and what does not depend on it: the ends of the sequences, sizes, dtype and device."""

    layout: str
    entry: str
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


def cases(device):
    """Return a case for each row: dense sequences end as a chunk does, packed ones within a chunk.

    And a packed one whose single sequence ends as a chunk does, for which the packed kernels have a chunk more.
    """

    def ended(case, layout):
        executed = {"dense": (128,), "varlen": (70, 103, 192)}
        traced = {"dense": (2 * case.chunk,), "varlen": (case.chunk + 3, 2 * case.chunk)}
        return replace(case, ends=(executed if device == "cuda" else traced)[layout])

    rows = [Case(**row, device=device) for row in ROWS]
    packed = next(case for case in rows if (case.layout, case.entry) == ("varlen", "wrapper"))
    return [*(ended(case, case.layout) for case in rows), ended(packed, "dense")]


def short(case):
    given = "".join(f"-{name}" for name in ("z", "D", "MIMO_Out") if getattr(case, name))
    alone = "-one-sequence" * (case.layout == "varlen" and len(case.ends) == 1)
    return f"{case.layout}-{case.entry}-R{case.R}-N{case.N}{given}{alone}"


TRACED, EXECUTED = cases("cpu"), cases("cuda")
WRAPPERS = [next(x for x in TRACED if (x.layout, x.entry) == (layout, "wrapper")) for layout in ("dense", "varlen")]
FUNCTION = next(x for x in TRACED if (x.layout, x.entry) == ("dense", "public"))


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
    B = 1 if case.layout == "varlen" or H <= SMALL else 2

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


def chunks(case):
    """Give the slot, first step and end of every chunk; no chunk spans two sequences."""
    for index, (start, stop) in enumerate(itertools.pairwise((0, *case.ends))):
        for n, begin in enumerate(range(start, stop, case.chunk)):
            yield start // case.chunk + index + n, begin, min(begin + case.chunk, stop)


def sums(x, case):
    """Return the sums of ADT within each chunk, the sums that are left, and those of each pair of steps."""
    out = [x["ADT"].new_empty(x["ADT"].shape) for _ in range(2)]
    B, H, S = x["ADT"].shape
    slots = S // case.chunk + (len(case.ends) if case.layout == "varlen" else 0)
    pairs = x["ADT"].new_zeros(B, H, slots, case.chunk, case.chunk)
    for slot, begin, end in chunks(case):
        total = x["ADT"][..., begin:end].cumsum(-1)
        out[0][..., begin:end], out[1][..., begin:end] = total, total[..., -1:] - total
        pairs[:, :, slot, : end - begin, : end - begin] = (total[..., None] - total[..., None, :]).tril(-1)
    return *out, pairs


def call(case, x, dout, *options, frozen=(), packed=()):
    """Call upstream; return the gradients by name, and beside them what the public function returned as "out".

    The wrapper may be given options after the dtype by position, and None for the ends of its sequences as `packed`; of
    the public function's inputs some may be frozen.
    """
    load(ANGLES)
    ends = [torch.tensor([0, *case.ends], device=case.device).int()] if case.layout == "varlen" else [*packed]
    given = {"cu_seqlens": ends[0]} if case.layout == "varlen" else {}
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
    decay = load(UTILITIES).compute_dacs_segsum_triton_varlen
    total, left, pairs = decay(x["ADT"], case.chunk, **given) if case.device == "cuda" else sums(x, case)
    others = [total, left, x["DT"], x["Trap"], x["D"], pairs, case.chunk, case.divisor, case.dtype]
    module = backward_module(replace(case, layout="varlen") if packed else case)
    combined = getattr(module, "mamba_mimo_bwd_combined" + "_varlen" * bool(ends))
    if options:  # the packed wrapper has the ends of its sequences before them
        options, given = (*ends, *options), {}
    result = combined(dout, *(x[name] for name in ARGUMENTS), *others, *options, **given)
    return {name: y for name, y in zip(GRADIENTS, result, strict=False) if y is not None}


def turns(case, angles, dt):
    """Return the angles that Q and K are turned by: those given, or, in the public function, what they add up to."""
    if case.entry == "wrapper":
        return angles
    steps = angles.tanh() * math.pi * dt.transpose(1, 2)[..., None]
    return torch.cat([steps[:, start:stop].cumsum(1) for start, stop in itertools.pairwise((0, *case.ends))], 1)


def reference(case, x, dout):
    """Differentiate Mamba-3's recurrence in float64, step by step; every sequence starts with an empty state."""
    x = {name: y.double().requires_grad_() for name, y in x.items() if y is not None}
    heads, n, half = x["V"].shape[2] // x["Q"].shape[3], x["Angles"].shape[-1], x["Q"].shape[-1] // 2
    angles = turns(case, x["Angles"], x["DT"])
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


def called(case, x, dout, *, again=True):
    """Call upstream, twice if asked; return the first gradients, and count what differs or what a call has changed."""
    inputs = {name: y if y is None else y.clone() for name, y in x.items()} | {"dout": dout.clone()}
    first = call(case, x, dout)
    copies = {name: y.clone() for name, y in first.items()}
    second = call(case, x, dout) if again else {name: y.clone() for name, y in copies.items()}
    both, typed = first.keys() & second.keys(), [name for name in x if name in first and "bias" not in name]
    return copies, {
        "differing": differing(copies, second),
        "changed": differing(inputs, x | {"dout": dout}) + differing(copies, first),
        "in one memory": sum(first[name].data_ptr() == second[name].data_ptr() for name in both),  # both are held
        "of absent inputs": sum(x[name] is None for name in x if name in first),
        "of another dtype": sum(x[name] is not None and first[name].dtype != x[name].dtype for name in typed),
        "wider than they are, or strided": sum(
            y.untyped_storage().nbytes() != y.nbytes or not ("bias" in name or y.is_contiguous())
            for name, y in first.items()
            if case.entry == "wrapper" or name in ("Q", "K")  # autograd may have copied the others
        ),
    }


# Stand-ins for the kernels, on a CPU


@functools.cache
def prepare_cpu():
    """Make what is new recognizable, and let the interpreter run what it can of the public function."""

    def forward(q, _k, v, *others, **_):  # upstream's makes its output on a GPU; others[3] is MIMO_Out
        shape = v.shape if others[3] is not None else (*v.shape[:2], q.shape[2], *v.shape[2:])
        return v.new_zeros(shape), None, None

    torch.use_deterministic_algorithms(mode=True)  # so new memory holds no number
    angles, public = load(ANGLES), load(PUBLIC)
    public.mamba_mimo_forward = public.mamba_mimo_forward_varlen = forward
    sigmoid = angles.tl.sigmoid
    angles.tanh_approx = lambda y: 2 * sigmoid(2 * y) - 1  # this and the next are instructions of a GPU
    angles.sech2_approx = lambda y: 4 * sigmoid(2 * y) * sigmoid(-2 * y)


@functools.cache
def signature(path, kernel):
    """Return the dimensions that a tree's kernel declares for its operands, in order; none where they have a name."""
    programs = Path(path).read_text(encoding="utf-8").split("@T.prim_func")[1:]  # in the order of FILLED
    text = programs[[*FILLED].index(kernel)].split("T.Kernel(")[0]
    declared = re.findall(r"^ *\w+: T\.Tensor\((.*)$", text, re.MULTILINE)
    return [x[1 : x.index("]")].split(",") if x.startswith("[") else [] for x in declared]


def declared(case, kernel, arguments):
    """Return the dimensions that a kernel declares of its arguments; refuse other sizes and gaps, as real ones do."""
    (B, S, R, G, N), (H, P), T = arguments[1].shape, arguments[3].shape[2:], case.chunk
    sizes = dict(zip("BSRGNHP", (B, S, R, G, N, H, P), strict=True))
    sizes |= {"chunk_size": T, "nchunks": math.ceil(S / T), "max_nchunks": S // T + len(case.ends)}
    sizes |= {"rotary_dim_divisor": case.divisor, "NS": len(case.ends)}
    found = signature(backward_module(case).__file__, kernel)
    for index, (names, y) in enumerate(zip(found, arguments, strict=False)):
        if y is not None and not y.is_contiguous():
            raise TypeError(f"operand {index} of {kernel} has strides {y.stride()}")
        if y is not None and names and set(re.findall(r"[a-zA-Z]\w*", " ".join(names))) <= sizes.keys():
            right = [eval(each.strip(), {}, sizes) for each in names]  # noqa: S307 - upstream's own arithmetic
            if [*y.shape] != right:
                raise TypeError(f"operand {index} of {kernel} is {names}, {right}, and was given {[*y.shape]}")
    return found


def filling(case, name, x, written, *, numbers, given):
    """Make a kernel factory; its kernels fill what is new, or zero, with small whole numbers, and note it by name.

    Of "decay", [B, H, chunks, steps, steps], they fill what lies within the sequences.
    dQ and dK of the heads get larger ones: bfloat16 does not hold the sums of a group, only what these are rounded to.
    A launch may be for some of the heads: the rows of Q_bias say for which. If numbers are "spoilt", those of the first
    head are not finite; "tiny" ones are multiples of the smallest number of float16, whose sums it holds. The memory of
    all arguments is noted in `given`: address, bytes and a weak reference.
    """
    names, biases = [each for each in FILLED[name] if each not in x or x[each] is not None], x["Q_bias"]

    def kernel(*arguments):
        for storage in [y.untyped_storage() for y in arguments if y is not None]:
            given.append((storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage)))
        dimensions = declared(case, name, arguments)
        heads = torch.stack([(biases == row).all((1, 2)).nonzero()[0, 0] for row in arguments[4]])
        pairs = [(axes, y) for axes, y in zip(dimensions, arguments, strict=False) if y is not None]
        floats = [(axes, y) for axes, y in pairs if y.is_floating_point()]
        new = [([axis.strip() for axis in axes].index("H"), y) for axes, y in floats if y.isnan().all() or not y.any()]
        generator = torch.Generator().manual_seed(6 + int(heads[0]))
        for result, (axis, y) in zip(names, new, strict=True):
            per_head, largest = result in ("Q", "K"), 127 if result in ("Q", "K") else 2
            y.random_(-largest, largest + 1, generator=generator)
            if result == "decay":
                y.mul_((sums({"ADT": torch.ones_like(x["ADT"])}, case)[2][0, 0] > 0).mT)
            if numbers == "spoilt" and per_head and heads[0] == 0:
                y.select(axis, 0).fill_(math.nan if result == "Q" else math.inf)
            if numbers == "tiny" and per_head:
                y.mul_(2.0**-24)
            shape = [len(biases) if n == axis else size for n, size in enumerate(y.shape)]
            written.setdefault(result, y.new_full(shape, math.nan)).index_copy_(axis, heads, y)

    return lambda *_, **__: kernel


def left_out(*arguments, **_):
    """Stand for one of Triton's small kernels: give what is new, and zeros by pairs of steps, any number."""
    for y in (y for y in arguments if torch.is_tensor(y) and y.is_floating_point()):
        if y.isnan().all() or (y.dim() > 4 and not y.any()):
            y.fill_(0.5)


def prepared(case, G, H, numbers="usual"):
    """Return a case for the CPU, its arguments, what its kernels will write, if small ones run, what they get."""
    prepare_cpu()
    case, written, given = replace(case, N=case.N // 4, P=12), {}, []  # a CPU takes its time
    if H % 6 == 0:
        case = replace(case, dtype=torch.float16, divisor=2)
    x, dout = make(case, G, H)
    interpreted = case.entry == "public" and case.layout == "varlen"
    for layout in FACTORS["layout"]:  # packed steps may be sent to the dense kernels
        called_as = replace(case, layout=layout)
        for name in FILLED:
            setattr(
                backward_module(called_as), name, filling(called_as, name, x, written, numbers=numbers, given=given)
            )
    for kernel in autotuned(load(UTILITIES), load(ANGLES)):
        kernel.run = functools.partial(type(kernel).run, kernel) if interpreted else left_out
    return case, x, dout, written, interpreted, given


def summed(written, case, G):
    """Return the gradients that follow from per-head ones by sums, in float64."""
    plain = ("V", "Z", "ADT", *["Angles"] * (case.entry == "wrapper"))  # to ADT, what is left out adds nothing
    found = {name: written[name].double() for name in plain if name in written}
    B, S, H, _ = written["V"].shape
    for name in "QK":
        per_head = written[name].double().view(B, S, case.R, H, case.N)
        found[name] = per_head.unflatten(3, (G, -1)).sum(4)
        found[f"{name}_bias"] = per_head.sum((0, 1)).transpose(0, 1)
    over = (0, 2) if case.layout == "varlen" else 0
    return found | {x: written[x].double().sum(over) for x in ("MIMO_Out", "MIMO_Z", "MIMO_V", "D") if x in written}


def decayed(written, x, case):
    """Differentiate in float64 what the small kernels do: the decays of each chunk, the trapezoid and the angles."""
    w = {name: y.double() for name, y in written.items()}
    y = {name: x[name].double().requires_grad_() for name in ("ADT", "DT", "Trap", "Angles")}
    mix, loss = y["Trap"].sigmoid(), (w["ADT"] * y["ADT"]).sum()
    total, left, pairs = (z.exp() for z in sums(y, case))
    loss = loss + (w["sums"] * total + w["reverse"] * left).sum()
    loss = loss + (w["decay"].mT.tril(-1) * pairs).sum() + (turns(case, y["Angles"], y["DT"]) * w["Angles"]).sum()
    for start, stop in itertools.pairwise((0, *case.ends)):
        gamma, last = (mix * y["DT"])[..., start:stop], (0, 1)
        shifted = pad(((1 - mix) * y["DT"])[..., start + 1 : stop], last)
        factor, diagonal = w["factor"][..., start:stop], w["gamma"][..., start:stop]
        loss = loss + (factor * (gamma + shifted) + diagonal * gamma).sum()
    loss.backward()
    return {name: leaf.grad for name, leaf in y.items()}


def rounded_once(actual, exact, dtype, *, interpreted):
    """Return whether all are exact numbers, rounded once to 16 bits: to nearest, or, where interpreted, all cut off."""
    nearest = exact.to(dtype)
    cut_off = (nearest.view(torch.int16) - (nearest.double().abs() > exact.abs()).short()).view(dtype)
    allowed = (nearest, cut_off) if interpreted else (nearest,)
    return any(torch.equal(actual.double(), each.double()) for each in allowed)


@contextmanager
def launches():
    """Give the names of the Triton kernels that the interpreter runs meanwhile."""
    executor, names = importlib.import_module("triton.runtime.interpreter").GridExecutor, []
    run = executor.__call__

    def named(self, *given, **options):
        names.append(self.fn.__name__)
        return run(self, *given, **options)

    with mock.patch.object(executor, "__call__", named):
        yield names


def traced(case, G, H):
    """Run the backward with stand-ins; return the gradients and, by name, their errors and what else is wrong."""
    given, (case, x, dout, written, interpreted, _) = case, prepared(case, G, H)
    with launches() as kernels:  # a fix may sum in one
        actual, errors = called(case, x, dout, again=not interpreted)
    exact, rounded = summed(written, case, G), decayed(written, x, case) if interpreted else {}
    errors["of another dtype"] += sum(
        y.dtype != torch.float32 for name, y in written.items() if name not in OF_THE_INPUTS
    )
    if rounded:
        errors["dTrap"] = distance(actual.get("Trap"), rounded.pop("Trap"))
        errors["small kernels"] = max(distance(actual.get(name), y) for name, y in rounded.items())
    for name in {*"QK", "Q_bias", "K_bias"} & actual.keys():  # the kernels' dtype does not hold these sums
        if rounded_once(actual[name], exact[name], case.dtype, interpreted=bool(kernels)):
            exact[name] = actual[name]
    errors["reference"] = max(distance(actual.get(name), exact[name]) for name in exact.keys() - rounded.keys())
    if given.entry == "wrapper" and H <= SMALL:
        errors["reached by a spoilt head"] = reached(given, G, H, actual)
    return actual, errors


def reached(case, G, H, actual):
    """Count what differs outside a group with a head whose dQ and dK are not finite, where autocast is on, too."""
    case, x, dout, *_ = prepared(case, G, H, "spoilt")
    with torch.autocast("cpu", dtype=case.dtype):
        spoilt = call(case, x, dout)
    others = {"Q": (..., slice(1, None), slice(None)), "Q_bias": slice(1, None)}
    others |= {"K": others["Q"], "K_bias": others["Q_bias"]}
    lost = sum(int(spoilt[name][..., 0, :].isfinite().sum()) for name in {*"QK"} & {*spoilt})  # sums of no numbers
    cast = {name: y.to(actual[name].dtype) for name, y in spoilt.items() if name in actual}  # as autograd does
    return lost + differing(*({name: y[others.get(name, ...)] for name, y in z.items()} for z in (actual, cast)))


def unlike(case, G, H, *, frozen=(), apart=False, numbers="usual", **changed):
    """Count what differs from the gradients of a plain call: with inputs frozen, strided, or other options."""
    case, x, dout, *_ = prepared(case, G, H, numbers)
    expected = call(case, x, dout)
    if apart:
        x = {name: y if y is None else torch.stack([y, y], -1)[..., 0] for name, y in x.items()}
        dout = torch.stack([dout, dout], -1)[..., 0]
    found = call(replace(case, **changed), x, dout, frozen=frozen)
    return len({*found} & {*frozen}) + differing({name: y for name, y in expected.items() if name not in frozen}, found)


def dtype_by_name(case, G, H):
    return unlike(case, G, H, dtype=str(prepared(case, G, H)[0].dtype).removeprefix("torch."))


def tiny(case):
    case, x, dout, written, *_ = prepared(case, 2, SMALL, "tiny")
    found = {name: y.double() for name, y in call(case, x, dout).items()}
    exact = summed(written, case, 2)
    return case.dtype, differing({name: exact[name] for name in "QK"}, found)


def unused(case, G, H):
    case, x, dout, *_ = prepared(replace(case, z=False), G, H)
    expected, found = call(case, x, dout), call(case, x | {"MIMO_Z": torch.ones_like(x["MIMO_V"])}, dout)
    return sorted(found.keys() - expected.keys()), differing(expected, found)


def kept(case, G, H):
    """Return the bytes of the memory that the kernels were given, and that outlives a call, except the gradients'."""
    case, x, dout, *_, given = prepared(case, G, H)
    found = call(case, x, dout)
    alive = {y.untyped_storage().data_ptr() for y in (*found.values(), *x.values(), dout) if y is not None}
    return [size for place, size, weak in given if place not in alive and not weak.expired()]


def by_position(case, *packed):
    """Return, by kernel, the OPTIONS that its factory gets where they are given to the wrapper by position."""
    case, x, dout, *_ = prepared(case, 1, 2)
    spies = {}
    for layout, name in itertools.product(FACTORS["layout"], FILLED):
        module = backward_module(replace(case, layout=layout))
        spies[layout, name] = mock.Mock(wraps=getattr(module, name))
        setattr(module, name, spies[layout, name])
    call(case, x, dout, *OPTIONS, packed=packed)
    calls = [(name, spy.call_args) for (_, name), spy in spies.items() if spy.called]
    return {name: [x for x in (*given.args, *given.kwargs.values()) if x in OPTIONS] for name, given in calls}


def waits(case, G, H):
    """Return the operators of upstream that wait for the device: the host must know their result, or its size."""
    seen, waiting = set(), ("nonzero", "_local_scalar_dense", "masked_select", "unique", "item")

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            frame = sys._getframe(1)  # noqa: SLF001 - the documented way to a caller
            while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
                frame = frame.f_back
            chosen = [x for each in args if isinstance(each, list | tuple) for x in each]  # of index and index_put
            masks = any(torch.is_tensor(x) and x.dtype == torch.bool for x in chosen)
            if "mamba_ssm" in frame.f_code.co_filename and (masks or any(x in str(function) for x in waiting)):
                seen.add(str(function))
            return function(*args, **(kwargs or {}))

    case, x, dout, *_ = prepared(case, G, H)
    with Mode():
        call(case, x, dout)
    return sorted(seen)


@pytest.fixture(scope="module")
def on_cpu():
    """Give what calls a function by its name here, or, where there is a GPU, in a process that sees none."""
    if not TARGET.executed:
        yield lambda name, *arguments, **named: globals()[name](*arguments, **named)
        return
    with workers(__name__, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", REPRODUCER_TARGET="cpu") as submit:
        yield lambda name, *arguments, **named: submit(name, *arguments, **named)()


@pytest.fixture(scope="module")
def largest(figure):
    """Give a dictionary of figures, which are recorded at the end."""
    found = defaultdict(float)
    yield found
    for name, value in found.items():
        figure(name, value, "largest error over largest value")


@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("case", TRACED, ids=short)
def test_gradients_are_sums_over_groups(on_cpu, case, kind, largest, output):
    for G, H in KINDS[kind]:
        if case.entry == "public" and H > SMALL:
            continue  # for which the interpreter lacks the time
        gradients, errors = on_cpu("traced", case, G, H)
        if kind == "g1_and_gh":
            record(output, f"{short(case)}-G{G}-H{H}, traced", gradients)
        if not TARGET.executed:
            largest[f"{kind}_reference"] = max(largest[f"{kind}_reference"], errors["reference"])
        wrong = {name: value for name, value in errors.items() if not value <= LIMITS.get(name, 0)}
        assert not wrong, f"G={G} H={H}: {wrong}, tolerances {LIMITS} and 0"


def record(output, name, gradients):
    output(name, torch.cat([y.contiguous().view(torch.uint8).flatten().cpu() for y in gradients.values()]))


@pytest.mark.control
@pytest.mark.parametrize(("G", "H"), REFUSED)
@pytest.mark.parametrize("case", TRACED, ids=short)
def test_groups_that_do_not_divide_the_heads_are_refused(on_cpu, case, G, H):
    assert str(G) in on_cpu("refusal", case, G, H), "no error that names G"


def refusal(case, G, H):
    try:
        call(*prepared(case, G, H)[:3])
    except (AssertionError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("G", "H"), FEW)
@pytest.mark.parametrize("case", WRAPPERS, ids=short)
def test_dtype_may_be_given_by_its_name(on_cpu, case, G, H):
    assert on_cpu("dtype_by_name", case, G, H) == 0, "elements differ"


@pytest.mark.defect
@pytest.mark.parametrize("name", [*GRADIENTS[:-2], "D", "Z"])
def test_frozen_input_changes_no_other_gradient(on_cpu, name):
    assert on_cpu("unlike", FUNCTION, 2, SMALL, frozen=(name,)) == 0, "elements differ"


@pytest.mark.defect
def test_inputs_need_not_be_contiguous(on_cpu):
    assert on_cpu("unlike", FUNCTION, 2, SMALL, apart=True) == 0, "elements differ"


@pytest.mark.parametrize(("G", "H"), FEW)
@pytest.mark.parametrize("case", [*WRAPPERS, FUNCTION], ids=short)
def test_unused_mimo_z_has_no_gradient(on_cpu, case, G, H):
    assert on_cpu("unused", case, G, H) == ([], 0), "gradients that are there; elements that differ"


@pytest.mark.parametrize(("G", "H"), FEW)
@pytest.mark.parametrize("case", WRAPPERS, ids=short)
def test_no_buffer_is_kept(on_cpu, case, G, H):
    assert on_cpu("kept", case, G, H) == [], "bytes that outlive the call"


@pytest.mark.defect
def test_tiny_gradients_are_summed(on_cpu):
    assert on_cpu("tiny", WRAPPERS[0]) == (torch.float16, 0), "elements differ"


@pytest.mark.control
@pytest.mark.parametrize(
    ("case", "packed"),
    [(WRAPPERS[0], ()), (WRAPPERS[1], ()), (WRAPPERS[0], (None,))],
    ids=["dense", "varlen", "no-ends"],
)
def test_threads_and_stages_keep_their_places(on_cpu, case, packed):
    right = {"mamba_mimo_bwd_fwd": [*OPTIONS[:2]], "mamba_mimo_bwd_bwd": [*OPTIONS[2:]]}
    assert on_cpu("by_position", case, *packed) == right


@pytest.mark.parametrize(("G", "H"), [*FEW, pytest.param(3, 15, marks=pytest.mark.defect)])
def test_no_operator_waits_for_the_device(on_cpu, G, H):
    assert on_cpu("waits", WRAPPERS[0], G, H) == []


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
    jobs = itertools.product(KERNELS, EXECUTED[:-1])  # the last case has the kernels of another one
    in_processes(compile_one, [job for job in jobs if job[0] != "mamba_mimo_fwd" or job[1].entry == "public"])


def repeated(case, x, dout, G):
    """Return the gradients of a call with Q and K repeated for each head; dQ and dK are summed in float64."""
    heads = x["V"].shape[2] // G
    found = call(case, x | {name: x[name].repeat_interleave(heads, 3) for name in "QK"}, dout)
    return found | {name: found[name].double().unflatten(3, (G, -1)).sum(4) for name in {*"QK"} & {*found}}


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
        for G, H in KINDS[kind]:
            x, dout = make(case, G, H)
            (actual, errors), exact, others = (
                called(case, x, dout),
                reference(case, x, dout),
                repeated(case, x, dout, G),
            )
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
        case = next(x for x in EXECUTED if (x.layout, x.entry, x.R) == ("dense", "wrapper", 4))
        case = replace(case, ends=(16384,))
        x, dout = make(case, 2, SMALL)
        actual, others = call(case, x, dout), repeated(case, x, dout, 2)
        errors = {name: distance(actual.get(name), others.get(name)) for name in "QK"}
        assert all(error <= 2**-8 for error in errors.values()), errors
