"""Mamba-3 MIMO's backward kernels compile with TMA and warp specialisation on, and load Q and K by TMA.

mamba-ssm switches both off in this file. The contract leaves the file as it is, gives the two jit functions other
pass_configs from outside, and calls them as mamba_mimo_bwd_combined does. The claim is about tilelang 0.1.8, which
mamba-ssm pins. With another release nothing is judged.

Compiled, by nvcc and without a GPU: both kernels of the build "full" (the default sizes of Mamba3) with TMA on. Three
kernels of two more builds are traced, and must compile where the file has TMA on for everybody.

Executed: all gradients of "full" against float64, with TMA on and off, and those with TMA on against TMA off. The other
builds run with TMA off: "gated_rows", where bwd_fwd has code of its own, in bwd_fwd alone. The release refuses a length
of no whole chunks, and 1 < G < H: both stay refused, or are right.

Tolerances, of the largest error over the largest value: 8 roundings to the dtype, where an H200 measured 3.7 at most in
bfloat16 and 2.3 in float16; one rounding to bfloat16 between TMA on and off. EXACT has those for inputs that round
little.
"""

import dataclasses
import functools
import importlib
import re
import typing
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.functional import pad, silu, softplus
from triton.testing import do_bench

from kit import alone, current_target, pairwise
from kit.compiled import import_below
from kit.cuda_source import HOST_ERRORS, in_processes, remembered

EVIDENCE_WITHOUT_GPU = dict.fromkeys(("sm_90a", "sm_100a", "sm_120a"), "compiled")
TARGET = current_target()


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
    "gated_rows": Build(64, 2, 2, "float16", ("mimo_z", "D", "z")),  # bwd_fwd alone, with TMA off
}
BOTH = ("full", "bare", "least")  # of which bwd_bwd is run, too
KERNELS = ("bwd_bwd", "bwd_fwd")  # the slower one to compile first
HOST_WORDS = ("out of memory", "Cannot allocate memory", "No space left on device", "Killed")
# Builds, kernels and TMA: on, off, or None, where they are traced, and compiled only with the file's own options.
WITH_TMA = [("full", kernel, True) for kernel in KERNELS]
WITHOUT_TMA = [*((name, kernel, False) for name in BOTH for kernel in KERNELS), ("gated_rows", "bwd_fwd", False)]
WITHOUT_TMA *= TARGET.executed
AS_IT_IS = [("least", "bwd_bwd", None), ("least", "bwd_fwd", None), ("gated_rows", "bwd_fwd", None)]
# Bytes of shared memory that a block may have: the CUDA C++ Programming Guide's table of compute capabilities.
SHARED_MEMORY = {"sm_90a": 227 * 2**10, "sm_100a": 227 * 2**10}


class Case(typing.NamedTuple):
    """The sizes of a call."""

    build: str
    batch: int
    length: int
    heads: int
    groups: str
    tma: bool | None = None  # and warp specialisation


FACTORS = {
    "run": (("full", False), ("full", True), ("bare", False)),  # builds, with and without TMA
    "batch": (2, 3),
    "length": (128, 192),  # of whole chunks: the release asserts that
    "heads": (4, 5),
    "groups": ("one", "each"),  # G = 1, G = H: the release takes no other
}
GROUPS = {"one": lambda _: 1, "two": lambda _: 2, "each": lambda heads: heads}  # of so many heads
OFF, ON = (Case("full", 2, 128, 4, "one", tma) for tma in (False, True))  # the reported example
CASES = [ON]
for row in pairwise(FACTORS):
    name, tma = row.pop("run")
    CASES.append(Case(name, **row, tma=tma))
UNSUPPORTED = {  # the release raises: at the end, where its kernels have run
    "two-groups": Case("bare", 2, 128, 4, "two", False),
    "half-a-chunk": Case("full", 2, 8, 4, "one", False),
}
LARGE = Case("full", 4, 2048, 16, "one")  # to be timed: a line of the grid in mamba-ssm's own tests
EXAMPLE = Case("full", 2, 128, 4, "each")
# A kernel serves one of these alone: each differs from the first in one thing.
GATED = Build(64, 2, 2, "float16", OPTIONAL)
CHANGES = [{"N": 128}, {"R": 4}, {"divisor": 4}, {"dtype": "bfloat16"}, {"given": ("mimo_z", "mimo_o", "z")}]
SERVED = [GATED, *(dataclasses.replace(GATED, **one) for one in CHANGES)]
# With so many threads upstream annotates no layouts for such a build: it says that bwd_bwd hangs with them.
HANGING = {"N16": BUILDS["least"], "P128": dataclasses.replace(BUILDS["full"], P=128)}
HANGING_THREADS = 256
# What mamba_mimo_bwd_combined takes besides and hands on, and to which kernel: values that are not the defaults.
HANDED_ON = {"bf_threads": ("bwd_fwd", 256), "bf_num_stages": ("bwd_fwd", 1)}
HANDED_ON |= {"bb_threads": ("bwd_bwd", 128), "bb_num_stages": ("bwd_bwd", 1)}
PARAMETERS = ("dout", "q", "k", "v", "q_bias", "k_bias", "mimo_v", "mimo_o", "z", "mimo_z", "angles", "dA_cs")
PARAMETERS += ("dA_cs_rev", "dt", "trap", "D", "segsum", "chunk_size", "rotary_dim_divisor", "dtype", *HANDED_ON)
VARIABLES = ("q", "k", "v", "dA", "dt", "trap", "q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_o", "angles", "D", "z")
FIRST = ("mimo_z", "mimo_o", "z")  # whose gradients are bwd_fwd's
TOLERANCE = {"bfloat16": 8 * 2**-8, "float16": 8 * 2**-11}
SAME = 2**-8  # TMA on against off: the arithmetic is the same, so one rounding to bfloat16 at most
# Of the gradients of exact(). What is float32 throughout is right to 2**-17 or so (sums of a few hundred terms, a fast
# exp), and wrong by 2**-9 if its terms are bfloat16. What is rounded to float16 once, at its end, is right to 2**-11,
# and wrong by 2**-8 if gamma is bfloat16.
EXACT = {"full": {"mimo_z": 2**-13}, "least": {"mimo_z": 2**-13}, "gated_rows": {"mimo_z": 2**-13}}
EXACT |= {"bare": {"q": 2**-9, "k": 2**-9}}


# A call, and what it should return


def load():
    return import_below("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd")


@functools.cache
def variant(module, kernel, target, tma):
    """Return a jit function with other options, or with those of the file for None; it has a cache of its own."""
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
    with mock.patch.multiple(module, **functions):
        made = dict(zip(VARIABLES, module.mamba_mimo_bwd_combined(**arguments), strict=False))  # main has a fifteenth
    return made if bwd is not None else {name: made[name] for name in FIRST}


def decays(dA, chunk):
    """Return the sums of dA within each chunk: up to a step, from it to the end, and between two."""
    total = pad(dA, (0, -dA.shape[2] % chunk)).unflatten(2, (-1, chunk)).cumsum(3)
    sums = {"dA_cs": total, "dA_cs_rev": total[..., -1:] - total}
    sums = {name: sums[name].flatten(2)[..., : dA.shape[2]].contiguous() for name in sums}
    return {**sums, "segsum": (total[..., None] - total[..., None, :]).tril()}


def example(case, device, build=None, seed=7):
    """Make arguments of mamba_mimo_bwd_combined, distributed as in upstream's tests, and the decay of each step."""
    build, B, S, H = build or BUILDS[case.build], case.batch, case.length, case.heads
    N, R, P, G, low = build.N, build.R, build.P, GROUPS[case.groups](H), getattr(torch, build.dtype)
    random = torch.Generator(device).manual_seed(seed)
    normal = functools.partial(torch.randn, generator=random, device=device)
    uniform = functools.partial(torch.rand, generator=random, device=device)
    dt = softplus(normal(B, H, S) - 3)
    dA = -dt * uniform(B, H, S)
    arguments = decays(dA, build.chunk)
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


def exact(case, device):
    """Make arguments of which the kernels round little: see EXACT. They are signs, and nothing outlives its step.

    With D, the output is D times what goes in, since q is 0. Without it, q and k matter, and gamma. D and gamma are
    halfway between two numbers of a format of three bits fewer: of bfloat16, where dtype is float16.
    """
    given, _ = example(case, device)
    build, low = BUILDS[case.build], given["dtype"]
    for name in ("dout", "q", "k", "v", "q_bias", "k_bias", "mimo_v", "mimo_o", "D"):
        if given[name] is not None:
            given[name] = given[name].sign() / (build.R if name in ("mimo_v", "mimo_o") else 1)
    halfway = 1 + 4 * torch.finfo(low).eps
    if "D" in build.given:
        given |= {"D": given["D"] * halfway, "q": given["q"] * 0, "q_bias": given["q_bias"] * 0}
    given |= {"dt": torch.full_like(given["dt"], halfway), "trap": given["trap"] * 0}
    dA = torch.full_like(given["dt"], -1000)
    return {**given, **decays(dA, build.chunk)}, dA


def reference(arguments, dA):
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
    weight, total = gamma + pad(late[..., 1:], (0, 1)), x["dA"].cumsum(2)[..., time]
    past, same = time[:, None] > time, time[:, None] == time
    factor = (total[..., None] - total[..., None, :]).masked_fill(~past, -torch.inf).exp() * weight[..., None, time]
    scores = rows(rotated(q)) @ rows(rotated(k)).mT * factor + rows(q) @ rows(k).mT * same * gamma[..., None, time]
    if "D" in x:
        scores = scores + x["D"][:, None, None] * torch.eye(S * R, device=dA.device)
    outputs = scores @ rows(torch.einsum("bshp,hrp->bsrhp", x["v"], x["mimo_v"]))
    if "z" in x:
        outputs = outputs * silu(rows(torch.einsum("bshp,hrp->bsrhp", x["z"], x["mimo_z"])))
    outputs = outputs.unflatten(2, (S, R)).permute(0, 2, 3, 1, 4)
    out = torch.einsum("bsrhp,hrp->bshp", outputs, x["mimo_o"]) if "mimo_o" in x else outputs
    return dict(zip(x, torch.autograd.grad(out, list(x.values()), arguments["dout"].double()), strict=True))


def sliced(arguments):
    """Return the arguments with every tensor a contiguous part of a larger one, after other numbers."""
    return {name: torch.stack((x + 1, x))[1] if torch.is_tensor(x) else x for name, x in arguments.items()}


def change(arguments, case):
    """Change every tensor in place, to the values of another example. Return the decay of each step of that."""
    other, dA = example(case, arguments["q"].device, seed=8)
    for name, x in arguments.items():
        if torch.is_tensor(x):
            x.copy_(other[name])
    return dA


# What mamba_mimo_bwd_combined asks tilelang for


def requested(module, several):
    """Return what mamba-ssm's own entry point gives each jit function and its kernel, for each of several arguments.

    Arguments are given by name, or by position where they are a tuple. What a kernel was made for is told by the call
    that made it, be it of these arguments or of some before.
    """
    calls = []

    def record(kernel, *args, **kwargs):
        def run(*tensors):
            calls[-1][kernel] = args, kwargs, tensors
            if len(calls[-1]) == len(KERNELS):
                raise StopIteration  # before the first that needs a GPU

        return run

    recorders = {f"mamba_mimo_{kernel}": functools.partial(record, kernel) for kernel in KERNELS}
    with mock.patch.multiple(module, **recorders):
        for arguments in several:
            calls.append({})
            with suppress(StopIteration):
                by_name, by_position = ({}, arguments) if isinstance(arguments, tuple) else (arguments, ())
                module.mamba_mimo_bwd_combined(*by_position, **by_name)
    return calls


def placed(arguments):
    """Return arguments by position, as mamba-ssm's own autograd function gives them."""
    return tuple(arguments[name] for name in PARAMETERS if name in arguments)


def misgiven(program, tensors, arguments):
    """Name the arguments of a rank that the kernel does not declare, and those whose elements are not the caller's.

    And the inference tensors that the kernel is to fill: a gradient can be changed in place, and these cannot.
    """
    buffers = [program.buffer_map[parameter] for parameter in program.params]
    pairs = [(tensor, buffer) for tensor, buffer in zip(tensors, buffers, strict=True) if tensor is not None]
    wrong = {buffer.name for tensor, buffer in pairs if tensor.dim() != len(buffer.shape)}
    given = {buffer.name: tensor.flatten() for tensor, buffer in pairs}
    wanted = {name.upper(): x.flatten() for name, x in arguments.items() if torch.is_tensor(x)}
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


def said(error):
    """Return an exception in a line, of nvcc's the last that says error; raise one that is the host's fault."""
    if isinstance(error, HOST_ERRORS) or any(word in str(error) for word in HOST_WORDS):
        raise error
    lines = str(error).strip().splitlines() or [""]
    wrong = [line.split("): ")[-1] for line in lines if ": error" in line]
    return f"{type(error).__name__}: {(wrong or lines)[-1].strip()}"[:400]


def build(name, kernel, tma, target):
    """In a process of its own: trace a kernel, lower and compile it; tell what became of it.

    With None for tma, it is traced alone, unless the file has other options than the release, which has TMA off.
    """
    module, case = load(), EXAMPLE._replace(build=name)
    function = variant(module, kernel, target, tma)
    arguments, _ = example(case, "cpu")
    own = {name: x.clone() if torch.is_tensor(x) else x for name, x in arguments.items()}

    def kinds():
        yield placed(arguments)
        yield placed(sliced(arguments))
        yield placed(own)
        change(own, case)
        yield placed(own)

    try:
        whole, part, _, again = requested(module, kinds())
        args, kwargs, _ = whole[kernel]
        program = function.get_tir(*args, **kwargs)
        calls = (("", whole, arguments), (" of a slice", part, arguments), (" after a change", again, own))
        wrong = [f"{x}{kind}" for kind, made, right in calls for x in misgiven(program, made[kernel][2], right)]
    except Exception as error:
        return {"misgiven": None, "lowers": False, "compiles": False, "error": said(error)}
    if tma is None and function.pass_configs == variant(module, kernel, target, False).pass_configs:
        return {"misgiven": wrong}

    def compiled():
        try:
            made = function.compile(*args, **kwargs)
        except Exception as error:  # nvcc's, with its output, is a RuntimeError; tilelang's own are of other types
            return {"lowers": type(error) is RuntimeError, "compiles": False, "error": said(error)}
        found = {"shared": shared_memory(made.get_host_source()), **ways(made.get_kernel_source())}
        found["loads_by_tma"] = found["Q"] == found["K"] == ["TMA"]
        return {"lowers": True, "compiles": True, "error": "", **found}

    identity = function.pass_configs, target, program.script()
    return {"misgiven": wrong, **remembered(identity, compiled)}


@pytest.fixture(scope="module", autouse=True)
def bwd():
    """Give the module under test, where this host can judge it."""
    module = load()
    if module.tilelang.__version__ != "0.1.8":
        pytest.skip(f"tilelang is {module.tilelang.__version__}; the claim is about 0.1.8, which mamba-ssm pins")
    if not Path(module.tilelang.env.CUDA_HOME or "/", "bin", "nvcc").exists():
        pytest.skip("no nvcc: neither on PATH nor in CUDA_HOME")
    if TARGET.executed:
        module.T.dynamic = functools.cache(module.T.dynamic)  # or each call would trace both kernels anew, for seconds
        for kernel in vars(importlib.import_module(module.bwd_dtrap_ddt_triton.__module__)).values():
            if hasattr(kernel, "configs"):
                kernel.configs = kernel.configs[:1]  # autotuning costs time, and may choose otherwise in another run
    return module


@pytest.fixture(scope="module")
def built(bwd, figure):
    """Give what became of each kernel, by build, kernel and TMA."""
    tasks = sorted([*WITH_TMA, *WITHOUT_TMA, *AS_IT_IS], key=lambda task: KERNELS.index(task[1]))
    with ThreadPoolExecutor(1) as thread:
        results = thread.submit(in_processes, build, [(*task, TARGET.name) for task in tasks])
        for name, kernel, _ in WITHOUT_TMA:  # tilelang keeps what is traced meanwhile, and a launch traces with any TMA
            with suppress(Exception):  # the process says what it raised
                args, kwargs, _ = requested(bwd, [example(EXAMPLE._replace(build=name), "cpu")[0]])[0][kernel]
                getattr(bwd, f"mamba_mimo_{kernel}").get_tir(*args, **kwargs)
        found = dict(zip(tasks, results.result(), strict=True))
    loading = sum(found["full", kernel, True].get("loads_by_tma", False) for kernel in KERNELS)
    figure("kernels_with_tma", loading, "of 2")
    return found


def short(task):
    name, kernel, tma = task
    return f"{name}-{kernel}" if tma is None else f"{name}-{kernel}-tma-{'on' if tma else 'off'}"


each_task = functools.partial(pytest.mark.parametrize, "task", ids=short)


@pytest.mark.control
@pytest.mark.parametrize("kernel", KERNELS)
def test_fast_math_stays(bwd, kernel):
    options = getattr(bwd, f"mamba_mimo_{kernel}").pass_configs or {}
    assert options.get(bwd.tilelang.PassConfigKey.TL_ENABLE_FAST_MATH) is True


@pytest.mark.control
@each_task([*WITH_TMA, *AS_IT_IS])
def test_arguments_reach_the_kernel_in_order(built, task):
    assert built[task]["misgiven"] == [], built[task].get("error") or "arguments of another rank, or other elements"


@pytest.mark.control
@each_task(AS_IT_IS)
def test_kernel_compiles_as_the_file_has_it(built, task):
    if "compiles" not in built[task]:
        pytest.skip("the file has TMA off")
    assert built[task]["compiles"], built[task]["error"]


@pytest.mark.control
@each_task([*WITH_TMA, *WITHOUT_TMA])
def test_shared_memory_suffices(built, task):
    if not built[task]["compiles"] or TARGET.name not in SHARED_MEMORY:
        pytest.skip("it does not compile, or no limit is known here")
    assert built[task]["shared"] <= SHARED_MEMORY[TARGET.name], "bytes"


@pytest.mark.defect
@pytest.mark.parametrize("stage", ["lowers", "compiles", "loads_by_tma"])  # by tilelang, by nvcc, Q and K alone
@each_task(WITH_TMA)
def test_kernel_with_tma(built, task, stage):
    found = built[task]
    before = {"compiles": "lowers", "loads_by_tma": "compiles"}.get(stage)
    if before and not found[before]:
        pytest.skip(found["error"])
    assert found[stage], found["error"] or f"Q by {found['Q']}, K by {found['K']}"


def plain(call):
    """Return the numbers, flags and names among the arguments of a jit function; the sizes left open are objects."""
    args, kwargs, _ = call
    return repr([x for x in (*args, *kwargs.values()) if isinstance(x, (int, str))])


@pytest.mark.control
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_build_gets_a_kernel_of_its_own(bwd, kernel):
    given = [example(EXAMPLE, "cpu", one)[0] for one in SERVED]
    made = {plain(calls[kernel]) for calls in requested(bwd, given)}
    assert len(made) == len(SERVED)


@pytest.mark.control
def test_options_are_handed_on(bwd):
    first, _ = example(EXAMPLE, "cpu", GATED)
    every = first | {name: value for name, (_, value) in HANDED_ON.items()}
    given = [first, {**first, "dtype": GATED.dtype}, every, placed(every)]
    given += [{**first, name: value} for name, (_, value) in HANDED_ON.items()]
    made = [{kernel: plain(calls[kernel]) for kernel in KERNELS} for calls in requested(bwd, given)]
    plain_call, by_name, named, by_position, *options = made
    assert by_name == plain_call, "a dtype by its name is that dtype"
    assert named == by_position, "options by position"
    for (name, (kernel, _)), calls in zip(HANDED_ON.items(), options, strict=True):
        assert calls[kernel] != plain_call[kernel], name


@pytest.mark.control
@pytest.mark.parametrize("hanging", HANGING)
def test_no_layouts_are_annotated_where_the_kernel_hangs(bwd, hanging):
    arguments, _ = example(EXAMPLE, "cpu", HANGING[hanging])
    args, kwargs, _ = requested(bwd, [{**arguments, "bb_threads": HANGING_THREADS}])[0]["bwd_bwd"]
    layouts = []

    def visit(node):
        layouts.extend(getattr(node, "annotations", {}).get("layout_map", ()))

    bwd.tilelang.tvm.tir.stmt_functor.post_order_visit(bwd.mamba_mimo_bwd_bwd.get_tir(*args, **kwargs).body, visit)
    assert len(layouts) == 0, f"{len(layouts)} layouts annotated"


# The kernels, on a GPU


def ended(module, arguments, **tma):
    """Run one backward to its end: an error of a kernel comes late, and out of whatever asks next."""
    try:
        made = backward(module, TARGET.name, arguments, **tma)
        torch.cuda.synchronize()
    except Exception as error:
        raise AssertionError(said(error)) from error
    return made


def distances(got, right):
    """Return the largest error of each gradient over its largest value.

    Infinity where None or another shape stands, or a tensor that nobody can change in place.
    """
    result = {}
    for name, x in got.items():
        y = right.get(name)
        if x is None or y is None or x.shape != y.shape or x.is_inference():
            result[name] = 0.0 if x is y is None else float("inf")
        else:
            result[name] = float((x - y).abs().max() / y.abs().max())
    return result


def assert_near(errors, limits, of):
    assert all(error <= limits[name] for name, error in errors.items()), f"from {of}: {errors}, tolerance {limits}"


def near_float64(got, arguments, dA, name):
    limits = dict.fromkeys(VARIABLES, TOLERANCE[BUILDS[name].dtype])
    assert_near(distances(got, reference(arguments, dA)), limits, "float64")


def named(case):
    """Return a case as a parameter: with TMA on the release does not compile."""
    marks = pytest.mark.defect if case.tma else pytest.mark.control
    name = f"{case.build}-B{case.batch}-S{case.length}-H{case.heads}-G-{case.groups}-tma-{'on' if case.tma else 'off'}"
    return pytest.param(case, marks=marks, id=name)


@pytest.mark.usefixtures("built")  # which has compiled them side by side
class TestKernels:
    __test__ = TARGET.executed

    @pytest.fixture(autouse=True)
    def _gpu(self):
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            pytest.skip("the GPU takes no more calls from this process, as after an illegal access")

    @pytest.fixture
    def tma(self, built, case):
        if case.tma and not all(built[case.build, kernel, True].get("loads_by_tma") for kernel in KERNELS):
            pytest.skip("the kernels do not compile with TMA on, or do not load by it")
        return {"fwd": case.tma, "bwd": case.tma}

    @pytest.mark.control
    @each_task(WITHOUT_TMA)
    def test_q_and_k_are_read_by_pointers_with_tma_off(self, built, task):
        found = built[task]
        assert found["compiles"], found["error"]
        assert {x: found[x] for x in ("tma", "Q", "K")} == {"tma": False, "Q": ["pointer"], "K": ["pointer"]}

    @pytest.mark.parametrize("case", map(named, CASES))
    def test_gradients_agree_with_float64_and_with_tma_off(self, bwd, case, tma, figure):
        arguments, dA = example(case, "cuda")
        before = {name: x.clone() for name, x in arguments.items() if torch.is_tensor(x)}
        got = ended(bwd, arguments, **tma)
        assert [name for name, x in before.items() if not torch.equal(x, arguments[name])] == [], "overwritten"
        near_float64(got, arguments, dA, case.build)
        off = ended(bwd, arguments, fwd=False, bwd=False)
        assert_near(distances(got, off), dict.fromkeys(VARIABLES, SAME), "TMA off")
        if case == ON:
            differ = [f"d{name}" for name, x in got.items() if not torch.equal(x, off[name])]
            figure("tma_on_differs", differ, "gradients that are not bitwise the same")

    @pytest.mark.control
    @pytest.mark.parametrize("name", BUILDS)
    def test_gradients_of_each_build_agree_with_float64(self, bwd, name):
        case = Case(name, 3, 192 if name == "full" else 128, 4, "each")
        off = {"fwd": False, "bwd": False if name in BOTH else None}
        arguments, dA = example(case, "cuda")
        near_float64(ended(bwd, arguments, **off), arguments, dA, name)
        arguments, dA = exact(case, "cuda")
        got = ended(bwd, arguments, **off)
        errors = distances({each: got[each] for each in EXACT[name]}, reference(arguments, dA))
        assert_near(errors, EXACT[name], "float64, of numbers that round little")

    @pytest.mark.control
    def test_second_run_gives_the_same_bits(self, bwd, output, figure):
        arguments, _ = example(OFF, "cuda")
        first, second = (ended(bwd, arguments, fwd=False, bwd=False) for _ in range(2))
        for name, gradient in first.items():
            output(f"d{name}", gradient)
        assert [name for name, x in first.items() if not torch.equal(x, second[name])] == []
        large, _ = example(LARGE, "cuda")
        with alone():
            call = functools.partial(backward, bwd, TARGET.name, large, fwd=False, bwd=False)
            low, middle, high = do_bench(call, quantiles=(0.25, 0.5, 0.75))
        figure("tma_off_ms", middle, "ms", spread=high - low)

    @pytest.mark.control
    @pytest.mark.parametrize("case", UNSUPPORTED.values(), ids=UNSUPPORTED)
    def test_sizes_that_the_release_refuses_are_refused_or_right(self, bwd, case):
        arguments, dA = example(case, "cuda")
        try:
            got = ended(bwd, arguments, fwd=False, bwd=False)
        except AssertionError as error:
            if isinstance(error.__cause__, (AssertionError, NotImplementedError, ValueError)):
                return
            raise
        near_float64(got, arguments, dA, case.build)
