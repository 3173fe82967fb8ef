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
Scope: the sum that is missing, not the kernels, which compute the right per-head gradients.
- On a GPU (executed): all gradients that the wrapper returns, against those of the recurrence in float64, and against
  a G == H run whose Q and K are repeated per head; every run twice.
- On a CPU (traced): the reduction in the wrapper and no more. Its two kernel factories are replaced by ones whose
  kernels write small whole numbers, of which every sum is known; Triton's small kernels for dADT, dDT and dTrap are
  left out.

Upstream: https://github.com/state-spaces/mamba, release 2.3.2.post1. Pull request 967 has mended the default branch.

The release is an sdist that needs a compiler to install, but only its Python is needed here:
`PYTHONPATH=CHECKOUT uv run reproduce.py`. Both verdicts without the runner (mamba_ssm-2.3.2.post1.tar.gz stands here):

    tar xzf mamba_ssm-2.3.2.post1.tar.gz
    PYTHONPATH=mamba_ssm-2.3.2.post1 python "$PACK/reproduce.py"  # BUG_REPRODUCED
    git -C mamba_ssm-2.3.2.post1 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=mamba_ssm-2.3.2.post1 python "$PACK/reproduce.py"  # FIX_VALIDATED
"""

# fmt: off
# --- protocol: begin (the same in every probe; the original is harness/protocol.py)
import argparse, ctypes, hashlib, json, sys
from pathlib import Path
class Probe:
    """Prints the lines that a runner reads, and draws the verdict from the checks among them."""
    def __init__(self):
        self.judged = {}  # (role, ok) -> the names of these checks
    def say(self, word, **fields):  # JSON has neither NaN nor infinity: they become strings
        print(word, json.dumps(json.loads(json.dumps(fields), parse_constant=str)), flush=True)
    def upstream(self, module):  # an accused module, as it was really loaded
        sha256 = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
        self.say("UPSTREAM", module=module.__name__, file=module.__file__, sha256=sha256)
    def check(self, name, role, ok, **values):  # ok is None where this cannot be judged here
        self.judged.setdefault((role, ok), []).append(name)
        self.say("CHECK", name=name, role=role, ok=ok, **values)
    def output(self, name, tensor, must_match=True):  # the runner compares the two lanes'
        data = tensor.detach().cpu().contiguous()
        sha256 = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        self.say("OUTPUT", name=name, dtype=str(data.dtype), shape=[*data.shape], sha256=sha256, must_match=must_match)
    def run(self, judge):  # judge(probe, target) loads upstream and makes the checks
        parser = argparse.ArgumentParser(description="Judge one bug; the last line is the verdict.")
        parser.add_argument("--target", help="cpu, sm_90a, ... (default: this host's GPU, else cpu)")
        target, reason = parser.parse_args().target, "no defect check could be judged here"
        try:
            if target is None:
                import torch
                arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
                target = "sm_{}{}".format(*arch) + "a" * (arch >= (9, 0)) if arch else "cpu"
            judge(self, target)
        except (ImportError, NotImplementedError) as error:  # a package or a mode cannot be had
            self.judged, reason = {}, f"{type(error).__name__}: {error}"
        except Exception:
            sys.excepthook(*sys.exc_info())
            sys.exit(125)
        ends = {("control", False): ("CONTROL_FAILED", 125), ("defect", False): ("BUG_REPRODUCED", 10),
                ("defect", True): ("FIX_VALIDATED", 0), None: ("UNSUPPORTED", 125)}
        key = next((key for key in ends if key in self.judged), None)
        self.say(ends[key][0], reason=", ".join(self.judged.get(key, [reason])))
        sys.exit(ends[key][1])
# --- protocol: end
# fmt: on

import contextlib
import functools
import importlib.util
import itertools
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch

ARGUMENTS = (*"QKV", "Q_bias", "K_bias", "MIMO_V", "MIMO_Out", "Z", "MIMO_Z", "Angles")
GRADIENTS = (*"QKV", "ADT", "DT", "Trap", "Q_bias", "K_bias", "MIMO_V", "MIMO_Z", "MIMO_Out", "Angles", *"DZ")
JUDGED = (("control", "g1_and_gh", ((1, 16), (16, 16))), ("defect", "grouped", ((2, 16), (8, 16), (3, 12))))
KINDS = {"executed": JUDGED, "traced": (*JUDGED, ("control", "refused", ((5, 16),)))}  # on a GPU: reads beyond Q, K
BACKWARD = {"dense": "tilelang.mamba3.mamba3_mimo_bwd", "varlen": "tilelang.mamba3.mamba3_mimo_bwd_varlen"}
ENDS = {"dense": (128,), "varlen": (70, 103, 192)}  # of the sequences: whole chunks of 64 / R steps, and parts of one
#: Error over largest value. 0.10 is upstream's own; traced: whole sums below 256; repeated: one rounding to bfloat16.
TOLERANCE = {"executed": {"reference": 0.10, "repeated": 2**-8, "rerun": 0}, "traced": {"reference": 0}}


@dataclass(frozen=True)
class Case:
    """One set of compiled kernels: its layout, MIMO rank, and whether it has the gate z and the skip connection D."""

    layout: str
    R: int
    z: bool
    D: bool
    N: int = 32


CASES = (  # any two values of layout, z and D meet in one of these, and each R in one; compiling them takes the time
    Case("dense", 1, z=True, D=False),
    Case("dense", 4, z=False, D=True),
    Case("varlen", 2, z=True, D=True),
    Case("varlen", 4, z=False, D=False),
)


def load(name):
    """Import a module of upstream; its package's own __init__ needs compiled code, so a bare module stands for it."""
    if "mamba_ssm" not in sys.modules:
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None:
            raise ImportError("no mamba_ssm here; give its source: PYTHONPATH=CHECKOUT uv run reproduce.py")
        sys.modules["mamba_ssm"] = importlib.util.module_from_spec(spec)  # has a __path__, and is never executed
    module = importlib.import_module(f"mamba_ssm.ops.{name}")
    for kernel in vars(module).values():
        if type(kernel).__name__ == "Autotuner":  # pinned: no time for autotuning, and the same bits in every run
            kernel.configs = kernel.configs[:1]
            if "TRITON_INTERPRET" in os.environ:  # they make dADT, dDT and dTrap, which are not judged on a CPU
                kernel.run = lambda *_, **__: None
    return module


def make(case, G, H, S, device):
    """Return the arguments, distributed as in upstream's tests, and the gradient of the output."""
    generator, B, P = torch.Generator(device).manual_seed(5), 1 if case.layout == "varlen" else 2, 64

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    x = {name: normal(B, S, case.R, G, case.N, dtype=torch.bfloat16) for name in "QK"}
    x |= {name: normal(B, S, H, P, dtype=torch.bfloat16) for name in "VZ"}
    x |= {name: normal(H, case.R, case.N) for name in ("Q_bias", "K_bias")}
    x |= {name: normal(H, case.R, P) / case.R for name in ("MIMO_V", "MIMO_Out", "MIMO_Z")}
    x |= {"DT": torch.nn.functional.softplus(normal(B, H, S) - 3), "Trap": normal(B, H, S).sigmoid().bfloat16()}
    x |= {"ADT": -x["DT"] * normal(B, H, S).sigmoid(), "Angles": normal(B, S, H, case.N // 4).sigmoid(), "D": normal(H)}
    x |= dict.fromkeys(["Z", "MIMO_Z"] * (not case.z) + ["D"] * (not case.D))
    return x, normal(B, S, H, P, dtype=torch.bfloat16)


def backward(case, x, dout):
    """Call upstream's backward wrapper; return the gradients by name."""
    module, utilities = load(BACKWARD[case.layout]), load("triton.mamba3.mamba3_mimo_utils")
    ends = torch.tensor([0, *ENDS[case.layout]], device=dout.device).int()
    packed = {"cu_seqlens": ends} if case.layout == "varlen" else {}
    sums, reverse, segments = utilities.compute_dacs_segsum_triton_varlen(x["ADT"], 64 // case.R, **packed)
    others = [sums, reverse, x["DT"], x["Trap"], x["D"], segments, 64 // case.R, 4, torch.bfloat16]
    combined = getattr(module, "mamba_mimo_bwd_combined" + "_varlen" * bool(packed))
    result = combined(dout, *(x[name] for name in ARGUMENTS), *others, **packed)
    return {name: one for name, one in zip(GRADIENTS, result, strict=False) if one is not None}


def reference(x, dout, ends):
    """Differentiate Mamba-3's recurrence in float64, step by step; every sequence starts with an empty state."""
    x = {name: one.double().requires_grad_() for name, one in x.items() if one is not None}
    heads, n, half = x["V"].shape[2] // x["Q"].shape[3], x["Angles"].shape[-1], x["Q"].shape[-1] // 2
    cos, sin = x["Angles"].cos()[:, :, None], x["Angles"].sin()[:, :, None]

    def turned(name):  # the pairs (i, N/2 + i) of the first quarter are rotated
        y = x[name].repeat_interleave(heads, 3) + x[f"{name}_bias"].transpose(0, 1)
        a, b = y[..., :n], y[..., half : half + n]
        return torch.cat([a * cos - b * sin, y[..., n:half], a * sin + b * cos, y[..., half + n :]], -1)

    q, k, v, rows = turned("Q"), turned("K"), torch.einsum("bshp,hrp->bsrhp", x["V"], x["MIMO_V"]), []
    for t in range(ends[-1]):
        if t in (0, *ends):
            state = previous = 0
        decay, dt, mix = (y[:, :, t, None, None] for y in (x["ADT"].exp(), x["DT"], x["Trap"].sigmoid()))
        new = torch.einsum("brhn,brhp->bhnp", k[:, t], v[:, t])
        state, previous = decay * (state + (1 - mix) * dt * previous) + mix * dt * new, new
        rows.append(torch.einsum("brhn,bhnp->brhp", q[:, t], state))
    gate = torch.nn.functional.silu(torch.einsum("bshp,hrp->bsrhp", x["Z"], x["MIMO_Z"])) if "Z" in x else 1
    y = (torch.stack(rows, 1) + (v * x["D"][:, None] if "D" in x else 0)) * gate
    torch.einsum("bsrhp,hrp->bshp", y, x["MIMO_Out"]).backward(dout.double())
    return {name: one.grad for name, one in x.items()}


def distance(actual, expected):
    """Return the largest error over the largest value; infinity where the shapes differ or no number stands."""
    same, actual, expected = actual.shape == expected.shape, actual.double(), expected.double()
    return ((actual - expected).abs().max() / expected.abs().max()).nan_to_num(math.inf).item() if same else math.inf


def executed(case, G, H):
    """Run the kernels on a GPU; return the gradients and their errors."""
    x, dout = make(case, G, H, ENDS[case.layout][-1], "cuda")
    actual, again, exact = backward(case, x, dout), backward(case, x, dout), reference(x, dout, ENDS[case.layout])
    repeated = backward(case, x | {name: x[name].repeat_interleave(H // G, 3) for name in "QK"}, dout)
    repeated |= {name: repeated[name].double().unflatten(3, (G, -1)).sum(4) for name in "QK"}
    error, worst = max((distance(actual[name], exact[name]), name) for name in exact)
    others = max(distance(actual[name], repeated[name]) for name in exact)
    differing = sum(int((actual[name] != again[name]).sum()) for name in exact)
    return actual, {"reference": error, "worst": worst, "repeated": others, "rerun": differing}


def traced(case, G, H):
    """Run the wrapper on a CPU, with kernels that fill every tensor they get with small whole numbers."""
    case, upstream = replace(case, N=8), load(BACKWARD[case.layout])  # a CPU's sums in bfloat16 are slow
    x, dout = make(case, G, H, ENDS[case.layout][-1], "cpu")
    (B, S, R, _, N), P, written, generator = x["Q"].shape, dout.shape[-1], [], torch.Generator().manual_seed(6)

    def kernel(*arguments):
        for one in (one for one in arguments if isinstance(one, torch.Tensor) and one.is_floating_point()):
            written.append(one.random_(-2, 3, generator=generator).clone())  # noqa: PERF401 - it writes

    upstream.mamba_mimo_bwd_fwd = upstream.mamba_mimo_bwd_bwd = lambda *_, **__: kernel
    actual, block, expected = backward(case, x, dout), torch.arange(H) // (H // G), {}
    for name, one in zip("KQ", (one for one in written if one.shape == (B, S * R, H, N)), strict=True):
        per_head = one.double().view(B, S, R, H, N)
        expected[name] = torch.zeros(B, S, R, G, N, dtype=torch.float64).index_add_(3, block, per_head)
        expected[f"{name}_bias"] = per_head.sum((0, 1)).transpose(0, 1)
    weights = (one for one in written if one.shape in ((B, H, R, P), (B, H, 3, R, P), (B, H), (B, H, 3)))
    for name, one in zip(["MIMO_Out", *["MIMO_Z"] * case.z, "MIMO_V", *["D"] * case.D], weights, strict=True):
        expected[name] = one.double().reshape(B, H, -1, *((R, P) if one.dim() > 3 else ())).sum((0, 2))
    return actual, {"reference": max(distance(actual[name], expected[name]) for name in expected)}


def compile_one(left_out, case):
    """Compile one kernel of a case into the cache on disk, in a process of its own; the other kernel is left out."""
    setattr(load(BACKWARD[case.layout]), left_out, lambda *_, **__: lambda *_: None)
    for G, H in (pair for _, _, pairs in JUDGED for pair in pairs):
        with contextlib.suppress(ValueError):
            backward(case, *make(case, G, H, ENDS[case.layout][-1], "cuda"))


def judge(probe, target):
    """Judge every case, with the numbers of groups that always worked as controls."""
    here = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "CPU"
    if target not in ("cpu", here, f"{here}a"):
        raise NotImplementedError(f"the kernels run on {target} itself, not on {here}")
    evidence, measure = ("traced", traced) if target == "cpu" else ("executed", executed)
    os.environ |= {"TRITON_INTERPRET": "1"} if target == "cpu" else {}  # a reduction may be written in Triton
    probe.say("TARGET", target=target, evidence=evidence, device=here)
    for module in BACKWARD.values():
        probe.upstream(load(module))
    if evidence == "executed":
        language = load(BACKWARD["dense"]).T
        language.dynamic = functools.cache(language.dynamic)  # else the release traces its kernels anew in every call
        jobs = itertools.product(("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd"), CASES)  # the slow ones first
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
            list(pool.map(compile_one, *zip(*jobs, strict=True)))
    limits, figures = TOLERANCE[evidence], {}
    for case, (role, kind, pairs) in itertools.product(CASES, KINDS[evidence]):
        name, measured, ok = f"{case.layout}_r{case.R}" + "_z" * case.z + "_d" * case.D, {}, True
        for G, H in pairs:
            try:
                gradients, errors = measure(case, G, H)
            except ValueError as error:
                gradients, errors = {}, {"raised": str(error)}
            measured[f"G={G} H={H}"] = errors
            for key in [key for key in limits if key in errors]:
                figures[f"{kind}_{key}"] = max(figures.get(f"{kind}_{key}", 0), errors[key])
            within = all(errors.get(key, math.inf) <= limit for key, limit in limits.items())
            ok &= str(G) in errors.get("raised", "") if kind == "refused" else within
            if kind == "g1_and_gh" and gradients:
                data = [one.contiguous().view(torch.uint8).flatten() for one in gradients.values()]
                probe.output(f"{name}_g{G}_gradients", torch.cat(data))
        probe.check(f"{name}_{kind}", role, ok, measured=measured, tolerance=limits)
    for figure, value in figures.items():
        probe.say("FIGURE", name=figure, value=value)


if __name__ == "__main__":
    Probe().run(judge)
