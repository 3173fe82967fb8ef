# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "apache-tvm-ffi==0.1.9",
#   "cloudpickle==3.1.2",
#   "einops==0.8.2",
#   "ml-dtypes==0.6.0",
#   "numpy==2.3.5",
#   "psutil==7.2.2",
#   "tilelang==0.1.8",
#   "torch==2.11.0",
#   "torch-c-dlpack-ext==0.1.5",
#   "tqdm==4.70.1",
#   "triton==3.6.0",
#   "typing-extensions==4.16.0",
#   "z3-solver==4.15.4.0",
# ]
# ///
"""Mamba-3's MIMO backward kernels cannot be compiled with TMA on.

Symptom: with TMA lowering and warp specialisation on, tilelang 0.1.8, the version that mamba-ssm pins, refuses
mamba_mimo_bwd_fwd and mamba_mimo_bwd_bwd: "InternalError: Check failed: (shared_layout->InputDim() == 2) is false:
Cannot detect TMA layout."

Cause: both kernels copy [chunk, R, N] of Q or K from global memory into a rank-3 T.view of a shared buffer that has a
swizzled layout annotation, and LowerBulkCopy understands a swizzled layout of rank 2 only. Rank-3 shared buffers
without that annotation are no obstacle. fix.patch hands Q and K to the kernels as [B, S*R, G, N] and copies straight
into the rank-2 buffers.

Scope: mamba-ssm switches TMA off in this file, so nobody meets the error today. The probe leaves the file as it is:
it gives the two jit functions other pass_configs from outside. Their arguments are those that mamba-ssm's own
mamba_mimo_bwd_combined passes. The claim is about the pinned tilelang: with another one the probe is UNSUPPORTED
(measure_versions.py has the figures). A refusal is remembered in TILELANG_CACHE_DIR, as a compiled kernel is.

The contract of mamba_mimo_bwd_combined; FACTORS has the values, CASES a pairwise set, BUILDS what is compiled in:

    q, k [B, S, R, G, N]; G is 1 or H       R 2, 4; N 16, 64, 128; bfloat16, float16; contiguous, as for every kernel
    v [B, S, H, P]; dout alike              S a multiple of chunk_size; B 2, 3; H 4, 5; P 64
    z and mimo_z, D, mimo_o                 given, or None: without mimo_o dout is [B, S, R, H, P]
    dA_cs, dA_cs_rev, dt, trap [B, H, S]; segsum; angles [B, S, H, N / divisor], divisor 2, 4
    chunk_size 64 / R, or 8 where N is 16   all of it by name or by position; the gradients can be changed in place

`compiled`: with TMA on, the kernels of the build "full" (the module Mamba3's default sizes) are lowered and compiled by
nvcc, and reach Q and K through a TMA descriptor and through no pointer; they get the elements of every argument in
order, also of a slice and after a change in place; each of nine builds gets kernels of its own, with the options
(`made_for_each`). Three kernels of two more builds are traced, and compiled only if the file has TMA on for everybody:
then they must compile too (`as_it_is`). What is not about TMA stays: fast math, shared memory that a block can have, no
layouts where upstream says that the kernel hangs with them (`annotated`: P 128 is traced there), and the gradients'
shapes (`returned`, where no GPU is). Whether the kernels compute the right numbers only `executed` judges.

`executed` compiles the builds "full" and "bare", and runs them: all gradients against float64, and with TMA on against
TMA off; of slices, after a change, and with no argument overwritten. The build "least" is run with TMA off. The others
are bwd_fwd alone with TMA off: it has code of its own for z without mimo_o, and for mimo_o without z. The checks
`exact` are of inputs for which a few gradients are rounded once or not at all, so that a float32 which became bfloat16
shows. The release raises where S is no multiple of chunk_size or 1 < G < H: `unsupported` is still refused, or right.
What tracing, lowering, compiling and launching the kernels of the tree raises is a failed check.

Upstream: https://github.com/state-spaces/mamba, mamba_ssm/ops/tilelang/mamba3/mamba3_mimo_bwd.py; the refusal is in
https://github.com/tile-ai/tilelang/blob/v0.1.8/src/op/copy.cc. mamba-ssm has no wheel: PYTHONPATH=CHECKOUT uv run
reproduce.py. By hand, with nvcc and no GPU (the first run takes a minute or two):

    tar xzf mamba_ssm-2.3.2.post1.tar.gz
    PYTHONPATH=mamba_ssm-2.3.2.post1 python "$PACK/reproduce.py" --target sm_90a
    git -C mamba_ssm-2.3.2.post1 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=mamba_ssm-2.3.2.post1 python "$PACK/reproduce.py" --target sm_90a
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

import concurrent.futures, contextlib, dataclasses, functools, importlib.util, itertools, multiprocessing
import re, statistics, typing, unittest.mock


@dataclasses.dataclass(frozen=True)
class Build:
    """What is compiled in: a kernel serves every batch, length, number of heads and of groups."""

    N: int  # d_state
    R: int  # mimo_rank
    divisor: int  # of N: the angles
    dtype: str
    given: tuple  # of OPTIONAL; the others are None, and without mimo_o the gradient of the output has R rows a step
    P: int = 64  # headdim

    @property
    def chunk(self):
        """Steps of a chunk, as the module Mamba3 has it, and as upstream's tests have it for N=16."""
        return 8 if self.N == LEAST_N else 64 // self.R


LEAST_N = 16  # of those that mamba3_mimo takes without a warning
OPTIONAL = ("mimo_z", "mimo_o", "D", "z")
BUILDS = {
    "full": Build(128, 4, 4, "bfloat16", OPTIONAL),
    "bare": Build(64, 2, 2, "float16", ()),
    "least": Build(LEAST_N, 4, 4, "bfloat16", OPTIONAL),  # with TMA off: tilelang makes no TMA load of it
    "gated": Build(64, 2, 2, "float16", OPTIONAL),  # this and those below: bwd_fwd alone, with TMA off
    "gated_rows": Build(64, 2, 2, "float16", ("mimo_z", "D", "z")),
    "ungated": Build(64, 2, 2, "float16", ("mimo_o", "D")),
}
WHOLE = ("full", "bare")
BOTH = (*WHOLE, "least")  # of which bwd_bwd is run too
TRACED = (("least", "bwd_bwd"), ("least", "bwd_fwd"), ("gated_rows", "bwd_fwd"))
KERNELS = ("bwd_bwd", "bwd_fwd")  # the slower one to compile first
FACTORS = {
    "build": ("full", "bare"),  # of BUILDS
    "batch": (2, 3),
    "length": (128, 192),  # of whole chunks: the release asserts that
    "heads": (4, 5),
    "groups": ("one", "each"),  # G = 1, G = H: the release takes no other
    "tma": (False, True),  # and warp specialisation
}
EXCLUDED = []  # every pair is possible
GROUPS = {"one": lambda _: 1, "two": lambda _: 2, "each": lambda heads: heads}  # of so many heads
Case = typing.NamedTuple("Case", [(name, object) for name in FACTORS])
CASES = [  # the first two are the reported example
    ("full", 2, 128, 4, "one", False),
    ("full", 2, 128, 4, "one", True),
    ("full", 3, 192, 4, "each", False),
    ("full", 3, 128, 5, "each", True),
    ("bare", 2, 192, 5, "one", False),
    ("bare", 2, 192, 5, "each", True),
    ("bare", 3, 128, 4, "each", True),
    ("bare", 3, 128, 5, "one", True),
]
UNSUPPORTED = {  # the release raises: at the end, where its kernels have run
    "two_groups": Case("bare", 2, 128, 4, "two", False),
    "short": Case("full", 2, 8, 4, "one", False),  # half a chunk
}
# Bytes of shared memory that a block may have: the CUDA C++ Programming Guide's table of compute capabilities.
SHARED_MEMORY = {"sm_90a": 227 * 2**10, "sm_100a": 227 * 2**10}
REFUSALS = (AssertionError, NotImplementedError, ValueError)
# A kernel serves one of these alone: each differs from the first in one thing. With it, the steps of a chunk.
FIRST_BUILD = BUILDS["gated"]
SERVED = [(FIRST_BUILD, 16), (FIRST_BUILD, 32)]
SERVED += [(dataclasses.replace(FIRST_BUILD, **one), 16) for one in ({"N": 128}, {"R": 4}, {"divisor": 4})]
SERVED += [(dataclasses.replace(FIRST_BUILD, dtype="bfloat16"), 16)]
WITHOUT = (("D",), ("mimo_o",), ("z", "mimo_z"))
SERVED += [
    (dataclasses.replace(FIRST_BUILD, given=tuple(x for x in OPTIONAL if x not in names)), 16) for names in WITHOUT
]
# With so many threads upstream annotates no layouts for such a build: it says that bwd_bwd hangs with them.
HANGING = {"N=16": BUILDS["least"], "P=128": dataclasses.replace(BUILDS["full"], P=128)}
HANGING_THREADS = 256
# What mamba_mimo_bwd_combined takes besides and hands on, and to which kernel: values that are not the defaults.
HANDED_ON = {"bf_threads": ("bwd_fwd", 256), "bf_num_stages": ("bwd_fwd", 1)}
HANDED_ON |= {"bb_threads": ("bwd_bwd", 128), "bb_num_stages": ("bwd_bwd", 1)}
PARAMETERS = ("dout", "q", "k", "v", "q_bias", "k_bias", "mimo_v", "mimo_o", "z", "mimo_z", "angles", "dA_cs")
PARAMETERS += ("dA_cs_rev", "dt", "trap", "D", "segsum", "chunk_size", "rotary_dim_divisor", "dtype", *HANDED_ON)
SIZES = {name: (3, 192, 4) if name == "full" else (3, 128, 4) for name in BUILDS}  # of CASES: Triton compiles them
LARGE = Case("full", 4, 2048, 16, "one", None)  # to be timed: a line of the grid in mamba-ssm's own tests
VARIABLES = ("q", "k", "v", "dA", "dt", "trap", "q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_o", "angles", "D", "z")
FIRST = ("mimo_z", "mimo_o", "z")  # whose gradients are bwd_fwd's
# Of the largest error over the largest value. The kernels round to dtype a dozen times on the way: 8 roundings, where
# an H200 measured 3.7 at most in bfloat16 and 2.3 in float16.
TOLERANCE = {"bfloat16": 8 * 2**-8, "float16": 8 * 2**-11}
# Of the gradients in `exact`. What is float32 throughout is right to 2**-17 or so (sums of a few hundred terms, a fast
# exp), and wrong by 2**-9 if its terms are bfloat16. What is rounded to float16 once, at its end, is right to
# 2**-11, and wrong by 2**-8 if gamma is bfloat16.
SINGLE, ONCE = 2**-13, 2**-9
EXACT = {
    "full": {"mimo_z": SINGLE},
    "bare": {"q": ONCE, "k": ONCE},
    "least": {"mimo_z": SINGLE},
    "gated": {"mimo_z": SINGLE},
    "gated_rows": {"mimo_z": SINGLE},
    "ungated": {"mimo_o": SINGLE},  # with z a tanh stands in it, which is approximate
}
SAME = 2**-8  # TMA on against off, likewise: the arithmetic is the same, so one rounding to bfloat16 at most


class FaultError(Exception):
    """The tree's kernels cannot be launched, or end with an error."""


def is_of_host(error):
    """Whether the host is to blame for an exception, not the tree: the package, memory, a file or a process."""
    words = ("out of memory", "Cannot allocate memory", "No space left on device", "Killed")
    kinds = (ImportError, MemoryError, NotImplementedError, OSError)
    return isinstance(error, kinds) or any(word in str(error) for word in words)


def said(error):
    """Return an exception in a line: of TVM's the last, of nvcc's the last that says error."""
    lines = str(error).strip().splitlines() or [""]
    wrong = [line.split("): ")[-1] for line in lines if ": error" in line]
    return f"{type(error).__name__}: {(wrong or lines)[-1].strip()}"[:400]


def load():
    """Import the real module below a package that is not executed: its __init__ imports compiled code."""
    if (spec := importlib.util.find_spec("mamba_ssm")) is None:
        raise NotImplementedError("no mamba_ssm on the path; PYTHONPATH=CHECKOUT uv run reproduce.py")
    sys.modules.setdefault("mamba_ssm", importlib.util.module_from_spec(spec))
    return importlib.import_module("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd")


@functools.cache
def variant(module, kernel, target, tma):
    """Return a jit function with other options, given from outside, or with those of the file, where tma is None.

    It has a cache of kernels of its own.
    """
    key, arch = module.tilelang.PassConfigKey, module.tilelang.tvm.target.Target({"kind": "cuda", "arch": target})
    function = getattr(module, f"mamba_mimo_{kernel}")
    options = {} if tma is None else {key.TL_DISABLE_TMA_LOWER: not tma, key.TL_DISABLE_WARP_SPECIALIZED: not tma}
    return dataclasses.replace(function, pass_configs={**(function.pass_configs or {}), **options}, target=arch)


def left_out(*_, **__):
    """Stand for a jit function whose kernel does nothing."""
    return lambda *_, **__: None


def backward(module, target, arguments, *, fwd, bwd):
    """Run mamba_mimo_bwd_combined with TMA on or off in bwd_fwd and in bwd_bwd. Return the gradients by name.

    With None for bwd, bwd_bwd is left out, and the gradients are those of bwd_fwd.
    """
    options = {"bwd_fwd": fwd, "bwd_bwd": bwd}
    chosen = {kernel: variant(module, kernel, target, tma) for kernel, tma in options.items() if tma is not None}
    functions = {f"mamba_mimo_{kernel}": chosen.get(kernel, left_out) for kernel in options}
    with unittest.mock.patch.multiple(module, **functions):
        made = dict(zip(VARIABLES, module.mamba_mimo_bwd_combined(**arguments), strict=False))  # main has a fifteenth
    return made if bwd is not None else {name: made[name] for name in FIRST}


def ended(module, target, arguments, **tma):
    """Run one backward to its end: an error of a kernel comes late, and out of whatever asks next."""
    try:
        made = backward(module, target, arguments, **tma)
        module.torch.cuda.synchronize()
    except Exception as error:
        if is_of_host(error):
            raise
        raise FaultError(said(error)) from error
    return made


def decays(torch, dA, chunk):
    """Return the sums of dA within each chunk: up to a step, from it to the end, and between two."""
    total = torch.nn.functional.pad(dA, (0, -dA.shape[2] % chunk)).unflatten(2, (-1, chunk)).cumsum(3)
    sums = {"dA_cs": total, "dA_cs_rev": total[..., -1:] - total}
    sums = {name: sums[name].flatten(2)[..., : dA.shape[2]].contiguous() for name in sums}
    return {**sums, "segsum": (total[..., None] - total[..., None, :]).tril()}


def example(torch, case, device, build=None, seed=7):
    """Make arguments of mamba_mimo_bwd_combined, distributed as in mamba-ssm's own tests, and the decay behind them."""
    build, B, S, H = build or BUILDS[case.build], case.batch, case.length, case.heads
    N, R, P, G, low = build.N, build.R, build.P, GROUPS[case.groups](H), getattr(torch, build.dtype)
    random = torch.Generator(device).manual_seed(seed)
    normal = functools.partial(torch.randn, generator=random, device=device)
    uniform = functools.partial(torch.rand, generator=random, device=device)
    dt = torch.nn.functional.softplus(normal(B, H, S) - 3)
    dA = -dt * uniform(B, H, S)
    arguments = decays(torch, dA, build.chunk)
    rows = [R] * ("mimo_o" not in build.given)
    arguments |= {"dout": normal(B, S, *rows, H, P).to(low), "q": normal(B, S, R, G, N).to(low)}
    arguments |= {"k": normal(B, S, R, G, N).to(low), "v": normal(B, S, H, P).to(low), "q_bias": normal(H, R, N)}
    arguments |= {"k_bias": normal(H, R, N), "mimo_v": normal(H, R, P) / R, "mimo_o": normal(H, R, P) / R}
    arguments |= {"z": normal(B, S, H, P).to(low), "mimo_z": normal(H, R, P), "D": normal(H), "dt": dt}
    arguments |= {"angles": uniform(B, S, H, N // build.divisor), "trap": uniform(B, H, S).to(low)}
    arguments |= dict.fromkeys(name for name in OPTIONAL if name not in build.given)
    arguments |= {"chunk_size": build.chunk, "dtype": low}
    if build.N == LEAST_N:  # as in upstream's tests
        arguments |= {"bf_threads": 128, "bf_num_stages": 0, "bb_threads": 128, "bb_num_stages": 0}
    return {**arguments, "rotary_dim_divisor": build.divisor}, dA


def exact(torch, case, device):
    """Make arguments of which the kernels round little: see EXACT. They are signs, and nothing outlives its step.

    With D, the output is D times what goes in, since q is 0. Without it, q and k matter, and gamma. D and gamma are
    halfway between two numbers of a format of three bits fewer: of bfloat16, where dtype is float16.
    """
    given, _ = example(torch, case, device)
    build, low = BUILDS[case.build], given["dtype"]
    for name in ("dout", "q", "k", "v", "q_bias", "k_bias", "mimo_v", "mimo_o", "D"):
        if given[name] is not None:
            given[name] = given[name].sign() / (build.R if name in ("mimo_v", "mimo_o") else 1)
    halfway = 1 + 4 * torch.finfo(low).eps
    if "D" in build.given:
        given |= {"D": given["D"] * halfway, "q": given["q"] * 0, "q_bias": given["q_bias"] * 0}
    given |= {"dt": torch.full_like(given["dt"], halfway), "trap": given["trap"] * 0}
    dA = torch.full_like(given["dt"], -1000)
    return {**given, **decays(torch, dA, build.chunk)}, dA


def reference(torch, arguments, dA):
    """Compute all gradients by autograd in float64, from the formula over the whole sequence: no chunks, no states."""
    given = {name: {**arguments, "dA": dA}[name] for name in VARIABLES}
    x = {name: tensor.double().requires_grad_() for name, tensor in given.items() if tensor is not None}
    (_, S, H, _), (*_, R, _, N) = x["v"].shape, x["q"].shape

    def rows(tensor):  # [B, S, R, H, width] -> [B, H, S*R, width]
        return tensor.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def rotated(tensor):  # channel n with N/2 + n, for as many of the first as there are angles
        rest = N // 2 - (turned := x["angles"].shape[-1])
        a, b, c, d = tensor.split([turned, rest, turned, rest], -1)
        cos, sin = x["angles"].cos()[:, :, None], x["angles"].sin()[:, :, None]
        return torch.cat((cos * a - sin * c, b, sin * a + cos * c, d), -1)

    wide = (x[name].repeat_interleave(H // x[name].shape[3], 3) for name in "qk")  # each group's heads lie together
    q, k = (each + x[f"{name}_bias"].transpose(0, 1) for name, each in zip("qk", wide, strict=True))
    gamma, late = x["dt"] * x["trap"].sigmoid(), x["dt"] * (-x["trap"]).sigmoid()
    time = torch.arange(S, device=dA.device).repeat_interleave(R)
    weight, total = gamma + torch.nn.functional.pad(late[..., 1:], (0, 1)), x["dA"].cumsum(2)[..., time]
    past, same = time[:, None] > time, time[:, None] == time
    factor = (total[..., None] - total[..., None, :]).masked_fill(~past, -torch.inf).exp() * weight[..., None, time]
    scores = rows(rotated(q)) @ rows(rotated(k)).mT * factor + rows(q) @ rows(k).mT * same * gamma[..., None, time]
    if "D" in x:
        scores = scores + x["D"][:, None, None] * torch.eye(S * R, device=dA.device)
    outputs = scores @ rows(torch.einsum("bshp,hrp->bsrhp", x["v"], x["mimo_v"]))
    if "z" in x:
        outputs = outputs * torch.nn.functional.silu(rows(torch.einsum("bshp,hrp->bsrhp", x["z"], x["mimo_z"])))
    outputs = outputs.unflatten(2, (S, R)).permute(0, 2, 3, 1, 4)
    out = torch.einsum("bsrhp,hrp->bshp", outputs, x["mimo_o"]) if "mimo_o" in x else outputs
    return dict(zip(x, torch.autograd.grad(out, list(x.values()), arguments["dout"].double()), strict=True))


def requested(module, several):
    """Return what mamba-ssm's own entry point gives each jit function and its kernel, for each of several arguments.

    Arguments are given by name, or by position where they are a tuple.
    What a kernel was made for is told by the call that made it, be it of these arguments or of some before.
    """
    calls = []

    def record(kernel, *args, **kwargs):
        def run(*tensors):
            calls[-1][kernel] = args, kwargs, tensors
            if len(calls[-1]) == len(KERNELS):
                raise StopIteration  # before the first that needs a GPU

        return run

    recorders = {f"mamba_mimo_{kernel}": functools.partial(record, kernel) for kernel in KERNELS}
    with unittest.mock.patch.multiple(module, **recorders):
        for arguments in several:
            calls.append({})
            with contextlib.suppress(StopIteration):
                by_name, by_position = ({}, arguments) if isinstance(arguments, tuple) else (arguments, ())
                module.mamba_mimo_bwd_combined(*by_position, **by_name)
    return calls


def placed(arguments):
    """Return arguments by position, as mamba-ssm's own autograd function gives them."""
    return tuple(arguments[name] for name in PARAMETERS if name in arguments)


def sliced(torch, arguments):
    """Return the arguments with every tensor a contiguous part of a larger one, behind other numbers."""
    parts = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    return {**arguments, **{name: torch.stack((x + 1, x))[1] for name, x in parts.items()}}


def changed(torch, arguments, case):
    """Change every tensor in place, to the values of another example. Return the decay behind these."""
    other, dA = example(torch, case, arguments["q"].device, seed=8)
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            x.copy_(other[name])
    return dA


def given_kinds(torch, case, arguments, own):
    """Yield arguments: whole tensors, parts of larger ones, and the same tensors before and after a change in them."""
    yield placed(arguments)
    yield placed(sliced(torch, arguments))
    yield placed(own)
    changed(torch, own, case)
    yield placed(own)


def misgiven(torch, program, tensors, arguments):
    """Name the arguments of a rank that the kernel does not declare, and those whose elements are not the caller's.

    And the inference tensors that the kernel is to fill: a gradient can be changed in place, and these cannot.
    """
    buffers = [program.buffer_map[parameter] for parameter in program.params]
    pairs = [(tensor, buffer) for tensor, buffer in zip(tensors, buffers, strict=True) if tensor is not None]
    wrong = {buffer.name for tensor, buffer in pairs if tensor.dim() != len(buffer.shape)}
    given = {buffer.name: tensor.flatten() for tensor, buffer in pairs}
    wanted = {name.upper(): x.flatten() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    differ = {name for name, x in wanted.items() if name not in given or not torch.equal(given[name], x)}
    frozen = {buffer.name for tensor, buffer in pairs if buffer.name not in wanted and tensor.is_inference()}
    return sorted(wrong | differ | frozen)


def ways(source):
    """Tell from a kernel's CUDA how it reaches Q and K, and whether it loads anything by TMA."""
    loaded = re.findall(r"\btl::tma_load\((\w+)_desc\b", source)
    pointers = re.findall(r"(\w+)[,)]", source.partition("__global__")[2].partition("{")[0])
    both = (("TMA", loaded), ("pointer", pointers))
    return {"tma": "tl::tma_load" in source, **{x: [way for way, names in both if x in names] for x in "QK"}}


def shared_memory(launch):
    """Tell from the C that launches a kernel how many bytes of shared memory it asks for: the last argument."""
    return int(re.findall(r"stack_ffi_any\)\[\d+\]\.v_int64\) = \(\(int64_t\)(\d+)\)", launch)[-1])


def build(name, kernel, tma, target):
    """In a process of its own: trace a kernel, lower and compile it. Return what say_builds unpacks.

    With None for tma, it is traced alone, unless the file has other options than the release, which has TMA off.
    """
    module = load()
    function, off = (variant(module, kernel, target, one) for one in (tma, False))
    case = Case(name, 2, 128, 4, "each", None)
    arguments, _ = example(module.torch, case, "cpu")
    own = {name: x.clone() if isinstance(x, module.torch.Tensor) else x for name, x in arguments.items()}
    try:
        whole, part, _, again = requested(module, given_kinds(module.torch, case, arguments, own))
        args, kwargs, _ = whole[kernel]
        program = function.get_tir(*args, **kwargs)
        kinds = (("", whole, arguments), (" of a slice", part, arguments), (" after a change", again, own))
        wrong = [
            f"{name}{kind}"
            for kind, calls, wanted in kinds
            for name in misgiven(module.torch, program, calls[kernel][2], wanted)
        ]
    except Exception as error:
        if is_of_host(error):
            raise
        traceback.print_exc()
        return [None, False, False, None, said(error)]
    if tma is None and function.pass_configs == off.pass_configs:
        return [wrong, None, None, None, ""]
    identity = repr((module.tilelang.__version__, function.pass_configs, target, wrong, program.script())).encode()
    refused = Path(module.tilelang.env.TILELANG_CACHE_DIR, f"refused-{hashlib.sha256(identity).hexdigest()}.json")
    if refused.exists():
        return json.loads(refused.read_text())
    try:
        compiled = function.compile(*args, **kwargs)
    except Exception as error:
        if is_of_host(error):
            raise
        lowers = type(error) is RuntimeError  # nvcc's, with its output; what tilelang raises itself is of another type
        found = [wrong, lowers, False, None, said(error)]
        partial = refused.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found))
        partial.replace(refused)
        return found
    found = {**ways(compiled.get_kernel_source()), "shared": shared_memory(compiled.get_host_source())}
    return [wrong, True, True, found, ""]


def plain(args, kwargs):
    """Return the numbers, flags and names among the arguments of a jit function; the sizes left open are objects."""
    return repr([x for x in (*args, *kwargs.values()) if isinstance(x, (int, str))])


def made_for_each():
    """In a process of its own: whether each of SERVED gets kernels that were made for it, and for none before.

    Likewise each of HANDED_ON, which by position are the same; a dtype by its name is that dtype.
    """
    module = load()
    case = Case(None, 2, 128, 4, "each", None)
    given = [{**example(module.torch, case, "cpu", one)[0], "chunk_size": steps} for one, steps in SERVED]
    given += [{**given[0], "dtype": FIRST_BUILD.dtype}]
    given += [{**given[0], name: value} for name, (_, value) in HANDED_ON.items()]
    every = {**given[0], **{name: value for name, (_, value) in HANDED_ON.items()}}
    given += [every, placed(every)]
    try:
        made = [{kernel: plain(*each[kernel][:2]) for kernel in KERNELS} for each in requested(module, given)]
    except Exception as error:
        if is_of_host(error):
            raise
        traceback.print_exc()
        return False, {"reason": said(error)}
    first, (by_name, *options, named, by_position) = made[0], made[len(SERVED) :]
    different = {kernel: len({each[kernel] for each in made[: len(SERVED)]}) for kernel in KERNELS}
    lost = [
        name
        for (name, (kernel, _)), each in zip(HANDED_ON.items(), options, strict=True)
        if each[kernel] == first[kernel]
    ]
    measured = {"builds": different, "options not handed on": lost, "dtype by its name": by_name == first}
    measured |= {"options by position": named == by_position}
    ok = set(different.values()) == {len(SERVED)} and not lost and by_name == first and named == by_position
    return ok, {"measured": measured, "unit": f"kernels for {len(SERVED)} builds"}


def annotated():
    """In a process of its own: count the layouts that bwd_bwd annotates where upstream annotates none."""
    module = load()
    found = {}
    try:
        for name, of in HANGING.items():
            arguments, _ = example(module.torch, Case(None, 2, 128, 4, "each", None), "cpu", of)
            calls = requested(module, [{**arguments, "bb_threads": HANGING_THREADS}])
            args, kwargs, _ = calls[0]["bwd_bwd"]
            layouts = []

            def visit(node, layouts=layouts):
                layouts.extend(getattr(node, "annotations", {}).get("layout_map", ()))

            program = module.mamba_mimo_bwd_bwd.get_tir(*args, **kwargs)
            module.tilelang.tvm.tir.stmt_functor.post_order_visit(program.body, visit)
            found[name] = len(layouts)
    except Exception as error:
        if is_of_host(error):
            raise
        traceback.print_exc()
        return False, {"reason": said(error)}
    return not any(found.values()), {"measured": found, "tolerance": 0, "unit": "layouts annotated"}


def returned():
    """In a process of its own: name the gradients that are not of the shape of what they are gradients of.

    No kernel runs for it: tilelang's are left out, and of Triton's the two that the release launches. Whoever launches
    others is judged on a GPU.
    """
    module = load()
    torch = module.torch
    instead = {f"mamba_mimo_{kernel}": left_out for kernel in KERNELS}
    instead["bwd_dtrap_ddt_triton"] = lambda trap, dt, *_, **__: (torch.zeros_like(dt), torch.zeros_like(trap))
    instead["bwd_dadt_fused_triton"] = lambda *_, **__: 0.0
    wrong = []
    try:
        for name, groups in itertools.product(WHOLE, ("one", "each")):
            arguments, dA = example(torch, Case(name, 2, 128, 4, groups, None), "cpu")
            with unittest.mock.patch.multiple(module, **instead):
                made = dict(zip(VARIABLES, module.mamba_mimo_bwd_combined(**arguments), strict=False))
            for each, x in {**arguments, "dA": dA}.items():
                if each in made and getattr(made[each], "shape", None) != getattr(x, "shape", None):
                    wrong.append(f"{name}, G is {groups}: d{each}")
    except Exception as error:
        if is_of_host(error):
            raise
        if "active driver" in str(error):
            return None, {"reason": "it launches Triton kernels besides, which need a GPU"}
        traceback.print_exc()
        return False, {"reason": said(error)}
    return not wrong, {"measured": wrong, "unit": "gradients of another shape"}


def say_builds(probe, tasks, built, target):
    """Make the checks of what is built, as it comes. Return the names of the builds that compile with TMA on."""
    compiled = {name: 0 for name, *_ in tasks}
    for (name, kernel, tma), (wrong, lowers, compiles, found, reason) in zip(tasks, built, strict=True):
        label = f"{kernel}" if name == "full" else f"{name}.{kernel}"
        asked_for, limit = found and found.pop("shared"), SHARED_MEMORY.get(target)
        if tma is not None:
            ok, values = None, {"reason": "it does not compile, or no limit is known here"}
            if asked_for and limit:
                ok, values = asked_for <= limit, {"measured": asked_for, "tolerance": limit, "unit": "bytes"}
            probe.check(f"{label}.shared_memory.tma_{'on' if tma else 'off'}", "control", ok, **values)
        if tma is False:
            right = found == {"tma": False, "Q": ["pointer"], "K": ["pointer"]}
            probe.check(f"{label}.tma_off", "control", right, measured=found, reason=reason)
            continue
        values = {"reason": reason} if wrong is None else {"measured": wrong, "unit": "of another rank or elements"}
        probe.check(f"{label}.arguments", "control", wrong == [], **values)
        if tma is None:
            if lowers is not None:
                probe.check(f"{label}.as_it_is", "control", compiles, measured=found, reason=reason)
            continue
        by_tma = found and {x: found[x] for x in "QK"}
        right = by_tma == {"Q": ["TMA"], "K": ["TMA"]}
        compiled[name] += right
        probe.check(f"{label}.lowers", "defect", lowers, measured="lowers" if lowers else reason)
        probe.check(f"{label}.compiles", "defect", compiles if lowers else None, reason=reason)
        probe.check(f"{label}.tma_load", "defect", right if compiles else None, measured=by_tma, reason=reason)
    probe.say("FIGURE", name="kernels_with_tma", value=compiled["full"], unit="of 2")
    return {name for name, kernels in compiled.items() if kernels == len(KERNELS)}


def distance(got, wanted):
    """Return the largest error of each gradient over its largest value.

    Infinity where None or another shape stands, or a tensor that nobody can change in place.
    """
    result = {}
    for name, x in got.items():
        y = wanted.get(name)
        if x is None or y is None or x.shape != y.shape:
            result[f"d{name}"] = 0.0 if x is y is None else float("inf")
        elif x.is_inference():
            result[f"d{name}"] = float("inf")
        else:
            result[f"d{name}"] = float((x - y).abs().max() / y.abs().max())
    return result


def judge_case(torch, module, target, case):
    """Run one backward: its gradients against float64, and with TMA on against those with TMA off, too."""
    arguments, dA = example(torch, case, "cuda")
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    got = ended(module, target, arguments, fwd=case.tma, bwd=case.tma)
    overwritten = [name for name, x in before.items() if not torch.equal(x, arguments[name])]
    errors = distance(got, reference(torch, arguments | before, dA))
    apart = distance(got, ended(module, target, arguments, fwd=False, bwd=False))
    limit = TOLERANCE[BUILDS[case.build].dtype]
    ok = all(error <= limit for error in errors.values()) and all(error <= SAME for error in apart.values())
    ok = ok and not overwritten
    limits = {"reference": limit, "TMA off": SAME, "overwritten": []}
    measured = {"reference": errors, "TMA off": max(apart.values()), "overwritten": overwritten}
    return ok, {"measured": measured, "tolerance": limits, "unit": "largest error over largest value"}


def judge_again(torch, module, target, case, kind):
    """Run one backward on parts of larger tensors, or again after a change in every tensor: against float64."""
    arguments, dA = example(torch, case, "cuda")
    if kind == "sliced":
        arguments = sliced(torch, arguments)
    else:
        ended(module, target, arguments, fwd=case.tma, bwd=case.tma)
        dA = changed(torch, arguments, case)
    got = ended(module, target, arguments, fwd=case.tma, bwd=case.tma)
    return within(case, distance(got, reference(torch, arguments, dA)))


def judge_unsupported(torch, module, target, case):
    """Run one backward that the release refuses: it is still refused, or right."""
    arguments, dA = example(torch, case, "cuda")
    try:
        got = ended(module, target, arguments, fwd=case.tma, bwd=case.tma)
    except FaultError as error:
        if isinstance(error.__cause__, REFUSALS):
            return True, {"measured": str(error)}
        raise
    return within(case, distance(got, reference(torch, arguments, dA)))


def within(case, errors):
    """Return whether every gradient is as near to float64 as the roundings of its dtype allow, and the errors."""
    limit = TOLERANCE[BUILDS[case.build].dtype]
    ok = all(error <= limit for error in errors.values())
    return ok, {"measured": errors, "tolerance": limit, "unit": "largest error over largest value"}


def judge_some(torch, module, target, name, make):
    """Run one backward with TMA off, of bwd_fwd alone where the build is that: some gradients against float64."""
    made = VARIABLES if name in BOTH else FIRST
    limits = EXACT[name] if make is exact else dict.fromkeys(made, TOLERANCE[BUILDS[name].dtype])
    arguments, dA = make(torch, Case(name, *SIZES[name], "each", False), "cuda")
    got = ended(module, target, arguments, fwd=False, bwd=False if name in BOTH else None)
    errors = distance({each: got[each] for each in limits}, reference(torch, arguments, dA))
    limits = {f"d{each}": limit for each, limit in limits.items()}
    ok = all(errors[each] <= limit for each, limit in limits.items())
    return ok, {"measured": errors, "tolerance": limits, "unit": "largest error over largest value"}


def repeated(torch, module, target, given):
    """Name the gradients that are not bitwise the same in two runs with TMA off."""
    first, second = (ended(module, target, given, fwd=False, bwd=False) for _ in range(2))
    differ = [f"d{name}" for name, x in first.items() if not torch.equal(x, second[name])]
    return not differ, {"measured": differ, "unit": "gradients that differ between two runs"}


def milliseconds(probe, torch, module, target, name, **tma):
    """Time one whole backward."""
    large, _ = example(torch, LARGE, "cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(53)]
    with probe.alone():
        for begin, end in events:
            begin.record(), backward(module, target, large, **tma), end.record()
        torch.cuda.synchronize()
    low, middle, high = statistics.quantiles([begin.elapsed_time(end) for begin, end in events[3:]], n=4)
    probe.say("FIGURE", name=name, value=middle, unit="ms", spread=high - low)


def checks(given, compiled):
    """List the checks of what runs: name, role, what measures it and of what; None where it cannot be judged."""
    for number, case in enumerate(map(Case._make, CASES)):
        sizes = "" if number < 2 else f".{case.build}_b{case.batch}_s{case.length}_h{case.heads}_g_{case.groups}"
        name, role = f"gradients{sizes}.tma_{'on' if case.tma else 'off'}", "defect" if case.tma else "control"
        yield name, role, None if case.tma and case.build not in compiled else judge_case, (case,)
    for name in BUILDS:
        if name not in WHOLE:
            yield f"gradients.{name}{'' if name in BOTH else '.bwd_fwd'}", "control", judge_some, (name, example)
        yield f"exact.{name}", "control", judge_some, (name, exact)
    yield "rerun.tma_off", "control", repeated, (given,)
    slow, fast = (Case._make(row) for row in CASES[:2])
    yield "sliced.tma_off", "control", judge_again, (slow, "sliced")
    yield "sliced.tma_on", "defect", judge_again if fast.build in compiled else None, (fast, "sliced")
    yield "changed_in_place.tma_off", "control", judge_again, (slow, "changed")
    for name, case in UNSUPPORTED.items():
        yield f"unsupported.{name}", "control", judge_unsupported, (case,)


def judge_runs(probe, torch, module, target, *, compiled):
    """Run the kernels in all CASES, and time them; where one cannot be launched, they are not timed."""
    utilities = vars(sys.modules[module.bwd_dtrap_ddt_triton.__module__]).values()
    for kernel in (value for value in utilities if hasattr(value, "configs")):
        kernel.configs = kernel.configs[:1]  # autotuning costs time, and may choose otherwise in the other lane
    module.T.dynamic = functools.cache(module.T.dynamic)  # or each call would elaborate both kernels anew, for seconds
    given, _ = example(torch, Case._make(CASES[0]), "cuda")
    fault = False
    for name, role, measure, what in checks(given, compiled):
        if measure is None:
            probe.check(name, role, None, reason="the kernels do not compile with TMA on, or do not load by it")
            continue
        try:
            probe.judge(name, role, measure, torch, module, target, *what)
        except FaultError as error:
            traceback.print_exc()
            probe.check(name, role, False, reason=f"it raised {error}")
            fault = True
            if is_lost(torch):
                return
    if not fault:
        say_runs(probe, module, target, given, compiled=compiled)


def is_lost(torch):
    """Whether the GPU takes no more calls from this process, as after an illegal access."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def say_runs(probe, module, target, given, *, compiled):
    """Say the gradients, for the runner to compare, and the times."""
    torch = module.torch
    off = backward(module, target, given, fwd=False, bwd=False)
    for name, gradient in off.items():
        probe.output(f"d{name}", gradient)
    milliseconds(probe, torch, module, target, "tma_off_ms", fwd=False, bwd=False)
    if "full" in compiled:
        on = backward(module, target, given, fwd=True, bwd=True)
        differ = [f"d{name}" for name, x in on.items() if not torch.equal(x, off[name])]
        probe.say("FIGURE", name="tma_on_differs", value=differ, unit="gradients that are not bitwise the same")
        milliseconds(probe, torch, module, target, "tma_on_ms", fwd=True, bwd=True)
        milliseconds(probe, torch, module, target, "tma_in_bwd_fwd_ms", fwd=True, bwd=False)


def judge(probe, target):
    """Build the kernels with TMA on and off, and run them where this host has the target's GPU."""
    if not (match := re.fullmatch(r"sm_(\d+)a?", target)) or int(match[1]) < 90:
        raise NotImplementedError(f"{target} has no TMA; name one that has, such as --target sm_90a: no GPU is needed")
    module = load()
    torch, tilelang = module.torch, module.tilelang
    if tilelang.__version__ != "0.1.8":
        raise NotImplementedError(f"tilelang is {tilelang.__version__}; the claim is about 0.1.8, which mamba-ssm pins")
    if not Path(tilelang.env.CUDA_HOME or "/", "bin", "nvcc").exists():
        raise NotImplementedError("no nvcc: neither on PATH nor in CUDA_HOME")
    fast = tilelang.PassConfigKey.TL_ENABLE_FAST_MATH
    executed = torch.cuda.is_available() and target == "sm_{}{}a".format(*torch.cuda.get_device_capability())
    device, evidence = (torch.cuda.get_device_name(), "executed") if executed else ("none", "compiled")
    probe.say("TARGET", target=target, evidence=evidence, device=device)
    probe.upstream(module)
    for kernel in KERNELS:
        is_fast = (getattr(module, f"mamba_mimo_{kernel}").pass_configs or {}).get(fast)
        probe.check(f"{kernel}.fast_math", "control", is_fast is True, measured=is_fast)
    names, options = (WHOLE, (True, False)) if executed else (["full"], (True,))
    tasks = list(itertools.product(names, KERNELS, options))
    if executed:
        tasks += [(name, kernel, False) for name in BOTH if name not in WHOLE for kernel in KERNELS]
        tasks += [(name, "bwd_fwd", False) for name in BUILDS if name not in BOTH]
    tasks += [(*traced, None) for traced in TRACED]
    context = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")  # CUDA survives no fork
    processes = int(os.environ.get("REPRODUCER_PROCESSES") or os.cpu_count())  # the runner shares the cores out
    with concurrent.futures.ProcessPoolExecutor(min(len(tasks), processes), mp_context=context) as pool:
        besides = (made_for_each, annotated, *([] if executed else [returned]))  # `executed` judges the gradients
        others = {each.__name__: pool.submit(each) for each in besides}
        built = pool.map(build, *zip(*tasks, strict=True), itertools.repeat(target))
        compiled = say_builds(probe, tasks, built, target)
        for name, judged in others.items():
            probe.judge(name, "control", judged.result)
    if executed:
        judge_runs(probe, torch, module, target, compiled=compiled)


if __name__ == "__main__":
    Probe().run(judge)
