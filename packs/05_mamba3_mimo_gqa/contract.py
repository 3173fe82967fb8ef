# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.11.0",
#   "triton==3.6.0",
#   "tilelang==0.1.8",
#   "apache-tvm-ffi==0.1.9",
#   "z3-solver==4.15.4.0",
#   "numpy==2.3.5",
#   "einops==0.8.2",
#   "cloudpickle==3.1.2",
#   "ml-dtypes==0.6.0",
#   "psutil==7.2.2",
#   "torch-c-dlpack-ext==0.1.5",
#   "tqdm==4.70.1",
#   "typing-extensions==4.16.0",
# ]
# ///
"""Mamba-3 MIMO: the backward refuses grouped heads (1 < ngroups < nheads) that the forward accepts.

Symptom: `ValueError: G value of 2 is not currently supported!` out of `loss.backward()`, after a forward that warned
of nothing and after both backward kernels have run.
Cause: `mamba_mimo_bwd_combined` (ops/tilelang/mamba3/mamba3_mimo_bwd.py) and its variable-length twin get dQ and dK per
head, and sum them over the heads of a group for G == 1 only; G == H needs no sum, and every other G raises.

The contract of the two wrappers, and of the public mamba3_mimo that calls them (FACTORS has the values, CASES a
pairwise covering set; GROUPED and EVEN are judged in each case):

    Q, K [B, S, R, G, N]; G any divisor of H    2 of 16 and 6, 3 of 12 and 15, 4 of 12, 8 of 16; 1 and H as controls
    V [B, S, H, P], and dense or packed S       dense: whole chunks; packed: sequences that end within a chunk, or one
                                                sequence of whole chunks (ONE_SEQUENCE)
    Q_bias, K_bias [H, R, N]; MIMO_V [H, R, P]  float32; R = 1, 2, 4 in chunks of 64 / R steps
    MIMO_Out [H, R, P] or None                  None: the output, and so its gradient, is [B, S, R, H, P]
    Z and MIMO_Z, D [H]                         given or None
    ADT, DT, Trap [B, H, S]; Angles [B, S, H, N / 4]
    a head whose dQ and dK are not finite       the groups without it get what they get otherwise, under autocast, too
    inputs that are not contiguous              the public function takes them; the kernels get contiguous ones
    MIMO_Z without Z; D or MIMO_Out None        the gradient is None, in the public function, too
    a gradient's memory                         as much as it fills, contiguous but for the biases'; no buffer is kept

Scope: the sum that is missing, not the kernels, which compute the right per-head gradients.
- On a GPU (executed, bfloat16): first all that is checked on a CPU, in a process that sees no GPU, since the real
  kernels get bfloat16 alone, and no G for which they would read beyond Q and K; such a check's name ends in _traced
  where the real kernels have one of that name. Then the output of the public function, and all gradients, against
  those of the recurrence in float64 and against a G == H run whose Q and K are repeated per head; every run twice.
  And (late_streams) all gradients where every stream that a wrapper enters begins late and freed memory is written to.
- On a GPU, too: 16384 steps of 4 rows, more than a launch has in its second dimension.
- On a CPU (traced): the wrappers and no kernel of TileLang. The kernel factories are replaced by ones whose kernels
  write small whole numbers into what they are given to fill, so that every sum is known, and refuse other shapes than
  the real ones declare, and what is not contiguous (that the real ones do was not seen), which is a failed check; half
  of the numbers of groups take float16 and a rotary divisor of 2.
  Triton's small kernels, from which the rest of dADT, dDT, dTrap and the public function's dAngles come, are
  interpreted for the two packed cases of that function, with 6 and 2 heads, and left out in the others: on a CPU
  nothing is said of the dense ones. The forward, which asks for a GPU by name, is left out. Then calls as a user may
  make them: the dtype by its name, each input frozen, none contiguous, a MIMO_Z that is not used, threads and stages by
  position; gradients below the normal numbers of float16; no memory that the kernels were given outlives the gradients;
  and no operator of the dense wrapper waits for the device.

Upstream: https://github.com/state-spaces/mamba, release 2.3.2.post1. Pull request 967 has fixed the default branch.

The release is an sdist that needs a compiler to install, but only its Python is needed here:
`PYTHONPATH=CHECKOUT uv run reproduce.py`. Both verdicts without the runner (mamba_ssm-2.3.2.post1.tar.gz stands here):

    tar xzf mamba_ssm-2.3.2.post1.tar.gz
    PYTHONPATH=mamba_ssm-2.3.2.post1 python "$PACK/reproduce.py"  # BUG_REPRODUCED
    git -C mamba_ssm-2.3.2.post1 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=mamba_ssm-2.3.2.post1 python "$PACK/reproduce.py"  # FIX_VALIDATED
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

import functools
import importlib.util
import itertools
import math
import multiprocessing
import re
import unittest.mock
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch

FACTORS = {
    "layout": ("dense", "varlen"),
    "entry": ("mamba3_mimo", "wrapper"),  # the public function and autograd, or the backward's wrapper alone
    "R": (1, 2, 4),
    "z": (True, False),
    "D": (True, False),
    "MIMO_Out": (True, False),
    "N": (32, 64),
}
EXCLUDED = [
    ("z", True, "MIMO_Out", False),  # neither Mamba3 nor a test of upstream's gates an output of R rows
    ("layout", "varlen", "MIMO_Out", False),  # refused also where G is 1: no tensor is left that has the kernel's NS
]
CASES = [  # each a set of compiled kernels; compiling them takes the time
    ("varlen", "mamba3_mimo", 1, True, True, True, 64),
    ("dense", "wrapper", 4, False, True, True, 64),
    ("varlen", "mamba3_mimo", 4, True, False, True, 64),
    ("dense", "mamba3_mimo", 2, False, True, False, 64),
    ("dense", "mamba3_mimo", 4, False, True, False, 32),
    ("dense", "wrapper", 2, True, False, True, 32),
    ("varlen", "wrapper", 2, False, True, True, 32),
    ("dense", "wrapper", 1, False, False, False, 32),
]
#: (G, H). Two G that are there twice and two ratios that are, for what is kept from one call to the next.
GROUPED = ((2, 16), (8, 16), (3, 12), (2, 6), (4, 12), (3, 15))
EVEN = ((1, 16), (16, 16), (1, 2))
REFUSED = ((5, 16), (6, 4))  # on stand-ins alone: the real kernels would read beyond Q and K
SMALL = 6  # heads: as many as the interpreter has the time for
KINDS = {"grouped": GROUPED, "g1_and_gh": EVEN}
#: The ends of the sequences for chunks of so many steps: whole chunks where they are dense, and parts of one if packed.
ENDS = {
    ("executed", "dense"): lambda _: (128,),
    ("executed", "varlen"): lambda _: (70, 103, 192),
    ("traced", "dense"): lambda chunk: (2 * chunk,),
    ("traced", "varlen"): lambda chunk: (chunk + 3, 2 * chunk),
}
#: Where R is 2, packed, with the wrapper called: this case, once more with one sequence that ends as a chunk does, for
#: which the packed kernels have a chunk more than the dense ones, and which takes no kernels of its own.
ONE_SEQUENCE = 6
OPTIONS = (96, 7, 160, 5)  # threads and stages of both kernels, none of them a size of a case
SLEEP = 2 * 10**8  # cycles: a tenth of a second, in which a host gets through a call
COUNTS = {"differing": 0, "changed": 0, "dtypes": 0, "in one memory": 0, "of the absent": 0, "no memory of its own": 0}
#: Error over largest value. 0.10 is upstream's own; repeated: one rounding to bfloat16. Traced: whole sums, which
#: float32 holds, rounded once, to nearest but where the interpreter cuts off; then float32 sums of a chunk; and dTrap
#: in 16 bits, which it cuts off, at most twice.
TOLERANCE = {
    "executed": {"reference": 0.10, "repeated": 2**-8} | COUNTS,
    "traced": {"reference": 0, "small kernels": 2**-16, "dTrap": 2**-7, "reached": 0} | COUNTS,
}
FIGURES = ("reference", "repeated", "differing")
ARGUMENTS = (*"QKV", "Q_bias", "K_bias", "MIMO_V", "MIMO_Out", "Z", "MIMO_Z", "Angles")
GRADIENTS = (*"QKV", "ADT", "DT", "Trap", "Q_bias", "K_bias", "MIMO_V", "MIMO_Z", "MIMO_Out", "Angles", *"DZ")
FOLDER, UTILITIES = "tilelang.mamba3.mamba3_mimo", "triton.mamba3.mamba3_mimo_utils"
ANGLES, KERNELS = "triton.mamba3.angle_dt", ("mamba_mimo_bwd_bwd", "mamba_mimo_bwd_fwd", "mamba_mimo_fwd")
FILLED = (("MIMO_Out", "states", "Z", "MIMO_Z", "qk_dot"),  # by the two kernels of the backward, in this order
          ("K", "V", "MIMO_V", "Q", "factor", "gamma", "Angles", "D", "ADT", "decay", "reverse", "sums"))  # fmt: skip
OF_THE_INPUTS = {"states", "Z", "qk_dot", *"QKV"}  # their dtype; the kernels declare all others as float32


@dataclass(frozen=True)
class Case:
    """One row of CASES, and what does not depend on it: the ends of the sequences, sizes, dtype and device."""

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
    def name(self):
        """The layout, the entry and the rank, and what is given or not."""
        given = "".join(f"_{'' if getattr(self, name) else 'no_'}{name.lower()}" for name in ("z", "D", "MIMO_Out"))
        alone = "_one_sequence" * (self.layout == "varlen" and len(self.ends) == 1)
        return f"{self.layout}_{self.entry}_r{self.R}_n{self.N}{given}{alone}"

    @property
    def chunk(self):
        """The steps of a chunk."""
        return 64 // self.R


def load(name):
    """Import a module of upstream; its package's own __init__ needs compiled code, so a bare module stands for it."""
    if "mamba_ssm" not in sys.modules:
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None:
            raise ImportError("no mamba_ssm here; give its source: PYTHONPATH=CHECKOUT uv run reproduce.py")
        sys.modules["mamba_ssm"] = importlib.util.module_from_spec(spec)  # has a __path__, and is never executed
    module = importlib.import_module(f"mamba_ssm.ops.{name}")
    for kernel in vars(module).values():
        if type(kernel).__name__ == "Autotuner":
            kernel.configs = kernel.configs[:1]  # pinned: no time for autotuning, and the same bits in every run
    return module


def backward_module(case):
    """Import the module of a case's backward."""
    return load(f"{FOLDER}_bwd" + "_varlen" * (case.layout == "varlen"))


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
    x |= {"DT": torch.nn.functional.softplus(normal(B, H, S) - 3), "Trap": normal(B, H, S).sigmoid().to(dtype)}
    x |= {"ADT": -x["DT"] * normal(B, H, S).sigmoid(), "D": normal(H)}
    x |= {"Angles": normal(B, S, H, case.N // case.divisor).sigmoid()}
    x |= dict.fromkeys(["Z", "MIMO_Z"] * (not case.z) + ["D"] * (not case.D) + ["MIMO_Out"] * (not case.MIMO_Out))
    return x, normal(B, S, *[case.R] * (not case.MIMO_Out), H, P, dtype=dtype)


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


def chunks(case):
    """Give the slot, first step and end of every chunk; no chunk spans two sequences."""
    for index, (start, stop) in enumerate(itertools.pairwise((0, *case.ends))):
        for n, begin in enumerate(range(start, stop, case.chunk)):
            yield start // case.chunk + index + n, begin, min(begin + case.chunk, stop)


def call(case, x, dout, *options, frozen=()):
    """Call upstream; return the gradients by name, and beside them what the public function returned as "out".

    The wrapper may be given options beyond the dtype by position; of the public function's inputs some may be frozen.
    """
    utilities, _ = load(UTILITIES), load(ANGLES)
    given = {"cu_seqlens": torch.tensor([0, *case.ends], device=case.device).int()} if case.layout == "varlen" else {}
    if case.entry == "mamba3_mimo":
        leaves = {
            name: one if one is None else one.detach().requires_grad_(name not in frozen) for name, one in x.items()
        }
        given |= {"chunk_size": case.chunk, "rotary_dim_divisor": case.divisor, "dtype": case.dtype}
        out = load(FOLDER).mamba3_mimo(**leaves, **given)
        try:
            out.backward(dout)
        except RuntimeError as error:  # raised by autograd itself, of what upstream's backward gave it
            if "returned a gradient different" not in str(error):  # from None, or "than None", by torch's version
                raise
            raise RuntimeError(f"the backward returned an invalid gradient: {error}") from error
        found = {name: one.grad for name, one in leaves.items() if one is not None and name not in frozen}
        return {name: one for name, one in found.items() if one is not None} | {"out": out.detach()}
    on_gpu, decay = case.device == "cuda", utilities.compute_dacs_segsum_triton_varlen
    total, left, pairs = decay(x["ADT"], case.chunk, **given) if on_gpu else sums(x, case)
    others = [total, left, x["DT"], x["Trap"], x["D"], pairs, case.chunk, case.divisor, case.dtype]
    combined = getattr(backward_module(case), "mamba_mimo_bwd_combined" + "_varlen" * bool(given))
    if options:  # behind the dtype; the packed wrapper has the ends of its sequences there
        options = (*given.values(), *options)
        given = {}
    result = combined(dout, *(x[name] for name in ARGUMENTS), *others, *options, **given)
    return {name: one for name, one in zip(GRADIENTS, result, strict=False) if one is not None}


def turns(case, angles, dt):
    """Return the angles that Q and K are turned by: those given, or, in the public function, what they add up to."""
    if case.entry == "wrapper":
        return angles
    steps = angles.tanh() * math.pi * dt.transpose(1, 2)[..., None]
    return torch.cat([steps[:, start:stop].cumsum(1) for start, stop in itertools.pairwise((0, *case.ends))], 1)


def reference(case, x, dout):
    """Differentiate Mamba-3's recurrence in float64, step by step; every sequence starts with an empty state."""
    x = {name: one.double().requires_grad_() for name, one in x.items() if one is not None}
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
    gate = torch.nn.functional.silu(torch.einsum("bshp,hrp->bsrhp", x["Z"], x["MIMO_Z"])) if "Z" in x else 1
    y = (torch.stack(rows, 1) + (v * x["D"][:, None] if "D" in x else 0)) * gate
    y = torch.einsum("bsrhp,hrp->bshp", y, x["MIMO_Out"]) if "MIMO_Out" in x else y
    y.backward(dout.double())
    return {name: one.grad for name, one in x.items()} | ({"out": y.detach()} if case.entry == "mamba3_mimo" else {})


def distance(actual, expected):
    """Return the largest error over the largest value; infinity for None, other shapes, or where no number stands."""
    if actual is None or expected is None or actual.shape != expected.shape:
        return math.inf
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).abs().max() / expected.abs().max().clamp(1e-9)).nan_to_num(math.inf).item()


def rounded_once(actual, exact, dtype, *, interpreted):
    """Return whether all are exact numbers, rounded once to 16 bits: to nearest, or, where interpreted, all cut off."""
    nearest = exact.to(dtype)
    cut_off = (nearest.view(torch.int16) - (nearest.double().abs() > exact.abs()).short()).view(dtype)
    allowed = (nearest, cut_off) if interpreted else (nearest,)
    return any(torch.equal(actual.double(), each.double()) for each in allowed)


@contextlib.contextmanager
def launches():
    """Give the names of the Triton kernels that the interpreter runs meanwhile."""
    executor, names = importlib.import_module("triton.runtime.interpreter").GridExecutor, []
    run = executor.__call__

    def named(self, *given, **options):
        names.append(self.fn.__name__)
        return run(self, *given, **options)

    with unittest.mock.patch.object(executor, "__call__", named):
        yield names


def differing(ours, others):
    """Count the elements of ours that are not the same bit for bit in the others, or have no place there."""
    count = 0
    for name, one in ours.items():
        other = others.get(name)
        alike = one is None or (other is not None and other.shape == one.shape)
        count += 0 if one is None else int((one != other).sum()) if alike else one.numel()
    return count


def not_own(case, gradients):
    """Name the gradients that are views into more memory than they fill, or, but for those of the biases, strided.

    Of the public function's, which autograd may have copied, dQ and dK alone.
    """
    chosen = gradients if case.entry == "wrapper" else {name: gradients[name] for name in {*"QK"} & {*gradients}}
    wider = {name for name, one in chosen.items() if one.untyped_storage().nbytes() != one.nbytes}
    return sorted(wider | {name for name, one in chosen.items() if "bias" not in name and not one.is_contiguous()})


def called(case, x, dout, *, again=True):
    """Call upstream, two times if asked; return the first gradients, and count what differs or a call has changed."""
    inputs = {name: one if one is None else one.clone() for name, one in x.items()} | {"dout": dout.clone()}
    first = call(case, x, dout)
    copies = {name: one.clone() for name, one in first.items()}
    second = call(case, x, dout) if again else copies
    changed = differing(inputs, x | {"dout": dout}) + differing(copies, first)
    absent = [name for name in x if name in first and x[name] is None]
    typed = [name for name in x if name in first and "bias" not in name and name not in absent]
    wrong = [name for name in typed if first[name].dtype != x[name].dtype]
    both = first.keys() & second.keys()
    shared = [name for name in both if again and first[name].data_ptr() == second[name].data_ptr()]
    counts = {"differing": differing(copies, second), "changed": changed, "dtypes": len(wrong)}
    counts |= {"in one memory": len(shared), "of the absent": len(absent)}  # the first results are held still
    return copies, counts | {"no memory of its own": len(not_own(case, first))}


def executed(case, G, H):
    """Run the kernels on a GPU; return the gradients and their errors."""
    x, dout = make(case, G, H)
    (actual, errors), exact = called(case, x, dout), reference(case, x, dout)
    repeated = call(case, x | {name: x[name].repeat_interleave(H // G, 3) for name in "QK"}, dout)
    repeated |= {name: repeated[name].double().unflatten(3, (G, -1)).sum(4) for name in {*"QK"} & {*repeated}}
    error, worst = max((distance(actual.get(name), exact[name]), name) for name in exact)
    others = max(distance(actual.get(name), repeated.get(name)) for name in exact)
    return actual, {"reference": error, "worst": worst, "repeated": others} | errors


def late(case, G, H):
    """Count what differs where each stream begins late, and what is freed is written to before a small kernel runs.

    At larger sizes the small kernels' own results would take that memory.
    """
    x, dout = make(case, G, H)
    per_head, expected, own = x["Q"].repeat_interleave(H // G, 3), call(case, x, dout), torch.cuda.current_stream()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # so that little is free
    enter, sleep = torch.cuda.set_stream, functools.partial(torch.cuda._sleep, SLEEP)  # noqa: SLF001 (nothing public)

    def entered(stream):
        enter(stream)
        if stream not in (None, own):
            sleep()

    def crowded(run, *given, **named):
        free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        _ = [torch.ones_like(per_head) for _ in range(free // per_head.nbytes + 1)]
        return run(*given, **named)

    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.object(torch.cuda, "set_stream", entered))
        for kernel in vars(load(UTILITIES)).values():
            if type(kernel).__name__ == "Autotuner":
                run = functools.partial(crowded, kernel.run)
                stack.enter_context(unittest.mock.patch.object(kernel, "run", run))
        sleep()  # so what waits for nobody begins too early
        wrong = differing(expected, call(case, x, dout))
    return wrong == 0, {"measured": wrong, "tolerance": 0}


@functools.cache
def signature(path, which):
    """Return the dimensions that a tree's kernel declares for its operands, in order; none where they have a name."""
    text = Path(path).read_text(encoding="utf-8").split("@T.prim_func")[1 + which].split("T.Kernel(")[0]
    declared = re.findall(r"^ *\w+: T\.Tensor\((.*)$", text, re.MULTILINE)
    return [re.findall(r"[^,]+", each[1 : each.index("]")]) if each.startswith("[") else [] for each in declared]


def declared(case, which, arguments):
    """Return the dimensions that a kernel declares of what it is given; refuse other sizes, as the real one does."""
    (B, S, R, G, N), (H, P), T = arguments[1].shape, arguments[3].shape[2:], case.chunk
    sizes = dict(zip("BSRGNHP", (B, S, R, G, N, H, P), strict=True))
    sizes |= {"chunk_size": T, "nchunks": math.ceil(S / T), "max_nchunks": S // T + len(case.ends)}
    sizes |= {"rotary_dim_divisor": case.divisor, "NS": len(case.ends)}
    found = [[each.strip() for each in one] for one in signature(backward_module(case).__file__, which)]
    for index, (names, one) in enumerate(zip(found, arguments, strict=False)):
        if one is not None and not one.is_contiguous():  # declared by a shape alone, and so without gaps
            raise TypeError(f"operand {index} of the kernel is {names}, but it is given strides of {one.stride()}")
        known = names and set(re.findall(r"[a-zA-Z]\w*", " ".join(names))) <= sizes.keys()
        if one is None or not known:
            continue
        wanted = [eval(each, {}, sizes) for each in names]  # noqa: S307 - upstream's own arithmetic
        if [*one.shape] != wanted:
            raise TypeError(f"operand {index} of the kernel is {names}, {wanted}, but it is given {[*one.shape]}")
    return found


def filling(case, which, x, written, numbers):
    """Make a kernel factory; its kernels fill what is new, or zero, with small whole numbers, and note it by name.

    Of "decay", [B, H, chunks, steps, steps], they fill what lies within the sequences.
    dQ and dK of the heads get larger ones: bfloat16 does not hold the sums of a group, only what these are rounded to.
    A launch may be for some of the heads: the rows of Q_bias say for which. If numbers are "spoilt", those of the first
    head are not finite; "tiny" ones are multiples of the smallest number of float16, whose sums it holds.
    """
    names, biases = [each for each in FILLED[which] if each not in x or x[each] is not None], x["Q_bias"]

    def kernel(*arguments):
        dimensions = declared(case, which, arguments)
        heads = torch.stack([(biases == row).all((1, 2)).nonzero()[0, 0] for row in arguments[4]])
        pairs = [(names, one) for names, one in zip(dimensions, arguments, strict=False) if one is not None]
        floats = [(names, one) for names, one in pairs if one.is_floating_point()]
        new = [(names.index("H"), one) for names, one in floats if one.isnan().all() or not one.any()]
        generator = torch.Generator().manual_seed(6 + int(heads[0]))
        for name, (axis, one) in zip(names, new, strict=True):
            largest = 127 if name in ("Q", "K") else 2
            one.random_(-largest, largest + 1, generator=generator)
            if name == "decay":
                one.mul_((sums({"ADT": torch.ones_like(x["ADT"])}, case)[2][0, 0] > 0).mT)
            if numbers == "spoilt" and name in ("Q", "K") and heads[0] == 0:
                one.select(axis, 0).fill_(math.nan if name == "Q" else math.inf)
            if numbers == "tiny" and name in ("Q", "K"):
                one.mul_(2.0**-24)
            shape = [len(biases) if n == axis else size for n, size in enumerate(one.shape)]
            written.setdefault(name, one.new_full(shape, math.nan)).index_copy_(axis, heads, one)

    return lambda *_, **__: kernel


def left_out(*arguments, **_):
    """Stand for one of Triton's small kernels: give what is new, and zeros by pairs of steps, any number."""
    for one in (one for one in arguments if isinstance(one, torch.Tensor) and one.is_floating_point()):
        if one.isnan().all() or (one.dim() > 4 and not one.any()):
            one.fill_(0.5)


def summed(written, case, G):
    """Return the gradients that follow from per-head ones by sums, in float64."""
    plain = ("V", "Z", "ADT", *["Angles"] * (case.entry == "wrapper"))  # to ADT, what is left out adds nothing
    found = {name: written[name].double() for name in plain if name in written}
    (B, S, H, _), N = written["V"].shape, case.N
    for name in "QK":
        per_head = written[name].double().view(B, S, case.R, H, N)
        block = torch.arange(H) // (H // G)
        found[name] = torch.zeros(B, S, case.R, G, N, dtype=torch.float64).index_add_(3, block, per_head)
        found[f"{name}_bias"] = per_head.sum((0, 1)).transpose(0, 1)
    for name in ("MIMO_Out", "MIMO_Z", "MIMO_V", "D"):
        if name in written:
            over = (0, 2) if case.layout == "varlen" else 0
            found[name] = written[name].double().sum(over)
    return found


def decayed(written, x, case):
    """Differentiate in float64 what the small kernels do: the decays of each chunk, the trapezoid and the angles."""
    w = {name: one.double() for name, one in written.items()}
    y = {name: x[name].double().requires_grad_() for name in ("ADT", "DT", "Trap", "Angles")}
    mix, loss = y["Trap"].sigmoid(), (w["ADT"] * y["ADT"]).sum()
    total, left, pairs = (one.exp() for one in sums(y, case))
    loss = loss + (w["sums"] * total + w["reverse"] * left).sum()
    loss = loss + (w["decay"].mT.tril(-1) * pairs).sum() + (turns(case, y["Angles"], y["DT"]) * w["Angles"]).sum()
    for start, stop in itertools.pairwise((0, *case.ends)):
        gamma, last = (mix * y["DT"])[..., start:stop], (0, 1)
        shifted = torch.nn.functional.pad(((1 - mix) * y["DT"])[..., start + 1 : stop], last)
        factor, diagonal = w["factor"][..., start:stop], w["gamma"][..., start:stop]
        loss = loss + (factor * (gamma + shifted) + diagonal * gamma).sum()
    loss.backward()
    return {name: one.grad for name, one in y.items() if name != "Angles" or case.entry == "mamba3_mimo"}


def prepared(case, G, H, numbers="usual"):
    """Make a case for the CPU; return it, its arguments, what its kernels will write, and if small ones run at all.

    What numbers they write: "usual" ones, or see filling().
    """
    case, written = replace(case, N=case.N // 4, P=12), {}  # a CPU takes its time
    if H % 6 == 0:
        case = replace(case, dtype=torch.float16, divisor=2)
    x, dout = make(case, G, H)
    interpreted = case.entry == "mamba3_mimo" and case.MIMO_Out  # the packed cases
    for layout in FACTORS["layout"]:  # packed steps may be sent to the dense kernels
        called_as = replace(case, layout=layout)
        for which, name in enumerate(("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd")):
            factory = filling(called_as, which, x, written, numbers)
            setattr(backward_module(called_as), name, factory)
    for kernel in (*vars(load(UTILITIES)).values(), *vars(load(ANGLES)).values()):
        if type(kernel).__name__ == "Autotuner":
            kernel.run = functools.partial(type(kernel).run, kernel) if interpreted else left_out
    return case, x, dout, written, interpreted


def reached(case, G, H, actual):
    """Count what differs beyond a group with a head whose dQ and dK are not finite, where autocast is on, too."""
    case, x, dout, *_ = prepared(case, G, H, "spoilt")
    with torch.autocast("cpu", dtype=case.dtype):
        spoilt = call(case, x, dout)
    beyond = {"Q": (..., slice(1, None), slice(None)), "Q_bias": slice(1, None)}
    beyond |= {"K": beyond["Q"], "K_bias": beyond["Q_bias"]}
    lost = sum(int(spoilt[name][..., 0, :].isfinite().sum()) for name in {*"QK"} & {*spoilt})  # sums of no numbers
    cast = {name: one.to(actual[name].dtype) for name, one in spoilt.items() if name in actual}  # as autograd does
    ours, others = ({name: one[beyond.get(name, ...)] for name, one in each.items()} for each in (actual, cast))
    return lost + differing(ours, others)


def traced(case, G, H):
    """Run the wrapper on a CPU, with kernels that fill every tensor they are given to fill with small whole numbers."""
    given, (case, x, dout, written, interpreted) = case, prepared(case, G, H)
    with launches() as kernels:  # a fix may sum in one
        actual, errors = called(case, x, dout, again=not interpreted)
    exact, rounded = summed(written, case, G), decayed(written, x, case) if interpreted else {}
    errors["dtypes"] += sum(one.dtype != torch.float32 for name, one in written.items() if name not in OF_THE_INPUTS)
    errors |= {"dTrap": distance(actual.get("Trap"), rounded.pop("Trap")) if rounded else 0}
    errors |= {"small kernels": max([distance(actual.get(name), rounded[name]) for name in rounded], default=0)}
    for name in {*"QK", "Q_bias", "K_bias"} & actual.keys():  # the kernels' dtype does not hold these sums
        if rounded_once(actual[name], exact[name], case.dtype, interpreted=bool(kernels)):
            exact[name] = actual[name]
    error, worst = max((distance(actual.get(name), exact[name]), name) for name in exact.keys() - rounded.keys())
    errors["reached"] = reached(given, G, H, actual) if given.entry == "wrapper" and H <= SMALL else 0
    return actual, {"reference": error, "worst": worst} | errors


def same(case, G, H, *options, frozen=(), **named):
    """Count what differs from the gradients of a call with nothing frozen and the dtype itself."""
    case, x, dout, *_ = prepared(case, G, H)
    expected = call(case, x, dout)
    found = call(replace(case, **named), x, dout, *options, frozen=frozen)
    wanted = {name: one for name, one in expected.items() if name not in frozen}
    return len({*found} & {*frozen}) + differing(wanted, found)


def dtype_by_name(cases):
    """Judge a dtype that is given by its name, which the kernels' factories are given, too."""
    measured = {}
    for case, (G, H) in itertools.product(cases, ((2, 6), (1, 2))):
        name = str(prepared(case, G, H)[0].dtype).removeprefix("torch.")
        measured[f"{case.layout} G={G} H={H}"] = same(case, G, H, dtype=name)
    return not any(measured.values()), {"measured": measured, "tolerance": 0}


def with_frozen(case):
    """Judge the public function where one of its inputs is frozen: all others get what they get otherwise."""
    x = make(case, 2, SMALL)[0]
    measured = {name: same(case, 2, SMALL, frozen=(name,)) for name, one in x.items() if one is not None}
    return not any(measured.values()), {"measured": measured, "tolerance": 0}


def tiny_gradients(case):
    """Judge sums of gradients below the normal numbers of float16, which holds them as they are."""
    case, x, dout, written, _ = prepared(case, 2, SMALL, "tiny")
    found = {name: one.double() for name, one in call(case, x, dout).items()}
    exact = summed(written, case, 2)
    wrong = {name: differing({name: exact[name]}, found) for name in "QK"}
    return case.dtype == torch.float16 and not any(wrong.values()), {"measured": wrong, "tolerance": 0}


def strided(case):
    """Judge the public function where no input is contiguous: all get what they get otherwise."""
    case, x, dout, *_ = prepared(case, 2, SMALL)
    apart = {name: one if one is None else torch.stack([one, one], -1)[..., 0] for name, one in x.items()}
    expected, found = call(case, x, dout), call(case, apart, torch.stack([dout, dout], -1)[..., 0])
    wrong = differing(expected, found)
    return wrong == 0, {"measured": wrong, "tolerance": 0}


def unused(cases):
    """Judge a MIMO_Z that is given without Z: it has no gradient, and the others are what they are without it."""
    measured = {}
    for case, (G, H) in itertools.product(cases, ((2, SMALL), (1, 2))):
        one, x, dout, *_ = prepared(case, G, H)
        expected, found = call(one, x, dout), call(one, x | {"MIMO_Z": torch.ones_like(x["MIMO_V"])}, dout)
        more = sorted({*found} - {*expected})
        measured[f"{case.name} G={G} H={H}"] = [*more, *["others"] * (differing(expected, found) > 0)]
    return not any(measured.values()), {"measured": measured, "tolerance": []}


def kept(cases):
    """Judge what outlives a call of the memory that its kernels were given: the gradients, and what the caller has."""
    weak, measured = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef, {}
    for case, (G, H) in itertools.product(cases, ((2, SMALL), (1, 2))):
        one, x, dout, *_ = prepared(case, G, H)
        module, given = backward_module(one), []
        for name in KERNELS[:2]:
            setattr(module, name, remembering(getattr(module, name), given, weak))
        found = call(one, x, dout)
        held = [each for each in (*found.values(), *x.values(), dout) if each is not None]
        alive = {each.untyped_storage().data_ptr() for each in held}
        more = [(name, nbytes) for name, pointer, nbytes, each in given if pointer not in alive and not each.expired()]
        measured[f"{case.layout} G={G} H={H}"] = more
    return not any(measured.values()), {"measured": measured, "tolerance": []}


def remembering(factory, given, weak):
    """Let the kernels of a factory remember the memory of what they are given, and hold none of it."""

    def made(*options, **named):
        kernel = factory(*options, **named)

        def run(*arguments):
            for index, one in enumerate(arguments):
                if one is not None:
                    storage = one.untyped_storage()
                    given.append((f"operand {index}", storage.data_ptr(), storage.nbytes(), weak(storage)))
            return kernel(*arguments)

        return run

    return made


def noted(module, name, given):
    """Let a kernel factory note which of OPTIONS it is given, in their order."""
    factory = getattr(module, name)

    def noting(*passed, **named):
        given[name] = [each for each in (*passed, *named.values()) if each in OPTIONS]
        return factory(*passed, **named)

    setattr(module, name, noting)


def by_position(cases):
    """Judge what the kernels' factories are given where threads and stages are given by position, in their old places.

    The packed wrapper without sequences hands them on to the dense one so.
    """
    measured = {}
    for case in cases:
        for ends in (case.ends, None) if case.layout == "varlen" else (case.ends,):
            given = measured[f"{case.layout}{', no sequences' * (ends is None)}"] = {}
            single = replace(case, layout="dense", ends=(2 * case.chunk,))
            one, x, dout, *_ = prepared(single if ends is None else case, 1, 2)
            modules = [backward_module(replace(one, layout=layout)) for layout in {"dense", case.layout}]
            for module, name in itertools.product(modules, KERNELS[:2]):
                noted(module, name, given)
            if ends is not None:
                call(one, x, dout, *OPTIONS)
                continue
            total, left, pairs = sums(x, one)
            others = [total, left, x["DT"], x["Trap"], x["D"], pairs, one.chunk, one.divisor, one.dtype]
            packed = backward_module(case).mamba_mimo_bwd_combined_varlen
            packed(dout, *(x[name] for name in ARGUMENTS), *others, None, *OPTIONS)
    wanted = {KERNELS[1]: [*OPTIONS[:2]], KERNELS[0]: [*OPTIONS[2:]]}
    return all(each == wanted for each in measured.values()), {"measured": measured, "tolerance": wanted}


def waits(case):
    """Count the operators that wait for the device in a dense call: those whose result has a size that it must tell."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen, waiting = [], ("nonzero", "_local_scalar_dense", "masked_select", "unique", "item")

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            frame = sys._getframe(1)  # noqa: SLF001 - the documented way to a caller
            while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
                frame = frame.f_back
            upstream = frame is not None and "mamba_ssm" in frame.f_code.co_filename
            chosen = [x for each in args if isinstance(each, list | tuple) for x in each]  # of index and index_put
            masks = any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in chosen)
            if upstream and (masks or any(name in str(function) for name in waiting)):
                seen.append(str(function))
            return function(*args, **(kwargs or {}))

    for G, H in ((2, 6), (3, 15), (1, 2)):
        one, x, dout, *_ = prepared(case, G, H)
        with Mode():
            call(one, x, dout)
    return not seen, {"measured": sorted({*seen}), "tolerance": []}


def judge_calls(probe, ending=""):
    """Judge on a CPU what a call may be given, and what it must not do."""
    cases = cases_of("traced")
    wrappers = [next(x for x in cases if (x.layout, x.entry) == (layout, "wrapper")) for layout in FACTORS["layout"]]
    dense, _ = wrappers
    public = next(x for x in cases if x.entry == "mamba3_mimo" and x.layout == "dense" and x.R == 2)
    probe.judge(f"dtype_by_name{ending}", "defect", dtype_by_name, wrappers)
    probe.judge(f"frozen{ending}", "defect", with_frozen, public)
    probe.judge(f"strided{ending}", "defect", strided, public)
    probe.judge(f"unused{ending}", "defect", unused, [*wrappers, public])
    probe.judge(f"kept{ending}", "defect", kept, wrappers)
    probe.judge(f"tiny{ending}", "defect", tiny_gradients, dense)
    probe.judge(f"by_position{ending}", "control", by_position, wrappers)
    probe.judge(f"waits{ending}", "defect", waits, dense)


def long(case):
    """Judge as many steps and rows as no second dimension of a launch holds: each group's sums, and no error."""
    case = replace(case, ends=(16384,))
    x, dout = make(case, 2, SMALL)
    actual = call(case, x, dout)
    repeated = call(case, x | {name: x[name].repeat_interleave(SMALL // 2, 3) for name in "QK"}, dout)
    found = {name: repeated[name].double().unflatten(3, (2, -1)).sum(4) for name in {*"QK"} & {*repeated}}
    errors = {name: distance(actual.get(name), found.get(name)) for name in "QK"}
    tolerance = TOLERANCE["executed"]["repeated"]
    return all(x <= tolerance for x in errors.values()), {"measured": errors, "tolerance": tolerance}


def prepare_cpu():
    """Make what is new recognizable, and let the interpreter run what it can of the public function."""

    def forward(q, _k, v, *others, **_):  # upstream's makes its output on a GPU; others[3] is MIMO_Out
        shape = v.shape if others[3] is not None else (*v.shape[:2], q.shape[2], *v.shape[2:])
        return v.new_zeros(shape), None, None

    torch.use_deterministic_algorithms(mode=True)  # so new memory holds no number
    angles, public = load(ANGLES), load(FOLDER)
    public.mamba_mimo_forward = public.mamba_mimo_forward_varlen = forward
    sigmoid = angles.tl.sigmoid
    angles.tanh_approx = lambda y: 2 * sigmoid(2 * y) - 1  # this and the next are instructions of a GPU
    angles.sech2_approx = lambda y: 4 * sigmoid(2 * y) * sigmoid(-2 * y)


def compile_one(kernel, case):
    """Compile one kernel of a case into the cache on disk, in another process; the other kernels are left out."""
    forward, backward = load(f"{FOLDER}_fwd" + "_varlen" * (case.layout == "varlen")), backward_module(case)
    others = zip(KERNELS, (backward, backward, forward), strict=True)
    with contextlib.ExitStack() as stack:
        for module, name in [(module, name) for name, module in others if name != kernel]:
            stack.enter_context(unittest.mock.patch.object(module, name, return_value=lambda *_: None))
        with contextlib.suppress(Exception):  # the check compiles it again, and says what it raised
            call(case, *make(case, 16, 16))


def compile_all(pool, cases):
    """Have all kernels compiled, those of the first case first, then the slow ones. Return what each case waits for."""
    jobs = itertools.product(KERNELS, cases)
    jobs = [(kernel, case) for kernel, case in jobs if kernel != KERNELS[-1] or case.entry == "mamba3_mimo"]
    started = {case: [] for case in cases}
    for kernel, case in sorted(jobs, key=lambda job: job[1] != cases[0]):
        started[case].append(pool.submit(compile_one, kernel, case))
    return started


def judged(probe, case, kind, figures, ending=""):
    """Judge one case for the numbers of groups of this kind; note the largest errors as figures.

    The names of the outputs get the ending.
    """
    evidence = "executed" if case.device == "cuda" else "traced"
    limits, measured, ok = TOLERANCE[evidence], {}, True
    for G, H in KINDS[kind]:
        if evidence == "traced" and case.entry == "mamba3_mimo" and H > SMALL:
            continue  # for which the interpreter lacks the time
        gradients, errors = (executed if evidence == "executed" else traced)(case, G, H)
        measured[f"G={G} H={H}"] = errors
        for key in [key for key in FIGURES if key in errors]:
            figures[f"{kind}_{key}"] = max(figures.get(f"{kind}_{key}", 0), errors[key])
        ok &= all(errors[key] <= limit for key, limit in limits.items())
        if kind == "g1_and_gh":
            data = [one.contiguous().view(torch.uint8).flatten() for one in gradients.values()]
            probe.output(f"{case.name}_g{G}_h{H}_gradients{ending}", torch.cat(data))
    return ok, {"measured": measured, "tolerance": limits}


def refused(case, pairs):
    """Judge whether numbers of groups that divide nothing are refused, in words that name them."""
    said = {}
    for G, H in pairs:
        try:
            call(*prepared(case, G, H)[:3])
        except (AssertionError, ValueError) as error:
            said[f"G={G} H={H}"] = str(error)
    ok = all(str(G) in said.get(f"G={G} H={H}", "") for G, H in pairs)
    return ok, {"measured": said, "tolerance": "an error that names G"}


def cases_of(evidence):
    """Return the cases of CASES with the sequences and the device of this kind of evidence."""
    cases = [Case(*row, device="cpu" if evidence == "traced" else "cuda") for row in CASES]
    cases = [replace(case, ends=ENDS[evidence, case.layout](case.chunk)) for case in cases]
    return [*cases, replace(cases[ONE_SEQUENCE], ends=ENDS[evidence, "dense"](cases[ONE_SEQUENCE].chunk))]


def judge_traced(probe, figures, ending=""):
    """Judge every case on a CPU, with stand-ins for the kernels; names that the real kernels have, too, get the ending.

    Return all checks of the probe, for a caller in another process.
    """
    prepare_cpu()
    for case in cases_of("traced"):
        for role, kind in (("defect", "grouped"), ("control", "g1_and_gh")):
            probe.judge(f"{case.name}_{kind}{ending}", role, judged, probe, case, kind, figures, ending)
        probe.judge(f"{case.name}_refused", "control", refused, case, REFUSED)
    judge_calls(probe, ending)
    return probe.judged


def judge_executed(probe, figures):
    """Judge every case by the real kernels, which other processes compile."""
    cases, language = cases_of("executed"), load(f"{FOLDER}_bwd").T
    language.dynamic = functools.cache(language.dynamic)  # else the release traces its kernels anew in every call
    processes = int(os.environ.get("REPRODUCER_PROCESSES") or os.cpu_count())  # the runner shares the cores out
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        started = compile_all(pool, cases[: len(CASES)])  # what is beyond them has the kernels of one of them
        for case in cases:
            for kernel in started.get(case, ()):
                kernel.result()
            for role, kind in (("defect", "grouped"), ("control", "g1_and_gh")):
                probe.judge(f"{case.name}_{kind}", role, judged, probe, case, kind, figures)
            if case.entry == "wrapper":
                probe.judge(f"{case.name}_late_streams", "defect", late, case, *GROUPED[0])
            if case.entry == "wrapper" and case.layout == "dense" and case.R == 4:
                probe.judge(f"{case.name}_long", "defect", long, case)


def judge_apart(probe):
    """Judge every case on a CPU in a new process, which sees no GPU and has imported no module of upstream yet."""
    on_cpu, spawn = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, multiprocessing.get_context("spawn")
    with unittest.mock.patch.dict(os.environ, on_cpu), ProcessPoolExecutor(1, spawn) as pool:
        probe.judged = pool.submit(judge_traced, probe, {}, "_traced").result()


def judge(probe, target):
    """Judge every case, with the numbers of groups that always worked as controls."""
    here = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "CPU"
    if target not in ("cpu", here, f"{here}a"):
        raise NotImplementedError(f"the kernels run on {target} itself, not on {here}")
    evidence, figures = "traced" if target == "cpu" else "executed", {}
    os.environ |= {"TRITON_INTERPRET": "1"} if target == "cpu" else {}
    probe.say("TARGET", target=target, evidence=evidence, device=here)
    for name in ("_bwd", "_bwd_varlen", ""):
        probe.upstream(load(FOLDER + name))
    if target == "cpu":
        judge_traced(probe, figures)
    else:
        judge_apart(probe)  # first, as it takes seconds and the real kernels take minutes to compile
        judge_executed(probe, figures)
    for figure, value in figures.items():
        probe.say("FIGURE", name=figure, value=value)


if __name__ == "__main__":
    Probe().run(judge)
