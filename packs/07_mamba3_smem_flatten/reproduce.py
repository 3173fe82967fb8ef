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
it replaces pass_configs of the two jit functions from outside. Their arguments are those that mamba-ssm's own
mamba_mimo_bwd_combined passes, at the module's default sizes (d_state 128, headdim 64, mimo_rank 4, chunk 64 / 4). The
claim is about the pinned tilelang: with another one the probe is UNSUPPORTED (measure_versions.py has the figures).
`compiled` shows that the kernels are lowered and compiled by nvcc and load by TMA; right numbers and times need the
GPU (`executed`). A refusal is remembered in TILELANG_CACHE_DIR, as tilelang remembers a compiled kernel.

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

import concurrent.futures, contextlib, dataclasses, functools, importlib.util, itertools, multiprocessing
import os, re, statistics, unittest.mock

N, P, R, CHUNK = 128, 64, 4, 16  # Mamba-3's defaults, and a line of the grid in mamba-ssm's own tests
SIZES, LARGE = (2, 128, 4), (4, 2048, 16)  # batch, length, heads: to be right, and (as in those tests) to be timed
KERNELS = ("bwd_bwd", "bwd_fwd")  # the slower one to compile first
VARIABLES = ("q", "k", "v", "dA", "dt", "trap", "q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_o", "angles", "D", "z")
TOLERANCE = 0.10  # of the largest error over the largest value: REL_TOL of mamba-ssm's own tests of these kernels


def load():
    """Import the real module below a package that is not executed: its __init__ imports compiled code."""
    if (spec := importlib.util.find_spec("mamba_ssm")) is None:
        raise NotImplementedError("no mamba_ssm on the path; PYTHONPATH=CHECKOUT uv run reproduce.py")
    sys.modules.setdefault("mamba_ssm", importlib.util.module_from_spec(spec))
    return importlib.import_module("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd")


def switch(module, target, *, tma):
    """Give both jit functions other options from outside; a replaced one has an empty cache of kernels."""
    key, arch = module.tilelang.PassConfigKey, module.tilelang.tvm.target.Target({"kind": "cuda", "arch": target})
    options = {key.TL_DISABLE_TMA_LOWER: not tma, key.TL_DISABLE_WARP_SPECIALIZED: not tma}
    for name in (f"mamba_mimo_{kernel}" for kernel in KERNELS):
        function = getattr(module, name)
        configs = {**function.pass_configs, **options}
        setattr(module, name, dataclasses.replace(function, pass_configs=configs, target=arch))


def example(torch, sizes, device):
    """Make arguments of mamba_mimo_bwd_combined, distributed as in mamba-ssm's own tests, and the decay behind them."""
    (B, S, H), low = sizes, torch.bfloat16
    random = torch.Generator(device).manual_seed(7)
    normal = functools.partial(torch.randn, generator=random, device=device)
    uniform = functools.partial(torch.rand, generator=random, device=device)
    dt = torch.nn.functional.softplus(normal(B, H, S) - 3)
    dA = -dt * uniform(B, H, S)
    total = dA.unflatten(2, (-1, CHUNK)).cumsum(3)
    arguments = {"dout": normal(B, S, H, P).to(low), "q": normal(B, S, R, 1, N).to(low)}
    arguments |= {"k": normal(B, S, R, 1, N).to(low), "v": normal(B, S, H, P).to(low), "q_bias": normal(H, R, N)}
    arguments |= {"k_bias": normal(H, R, N), "mimo_v": normal(H, R, P) / R, "mimo_o": normal(H, R, P) / R}
    arguments |= {"z": normal(B, S, H, P).to(low), "mimo_z": normal(H, R, P), "angles": uniform(B, S, H, N // 4)}
    arguments |= {"dA_cs": total.flatten(2), "dA_cs_rev": (total[..., -1:] - total).flatten(2), "dt": dt}
    arguments |= {"trap": uniform(B, H, S).to(low), "D": normal(H), "segsum": total[..., None] - total[..., None, :]}
    return {**arguments, "chunk_size": CHUNK, "rotary_dim_divisor": 4, "dtype": low}, dA


def reference(torch, arguments, dA):
    """Compute all gradients by autograd in float64, from the formula over the whole sequence: no chunks, no states."""
    x = {name: {**arguments, "dA": dA}[name].double().requires_grad_() for name in VARIABLES}
    B, S, H, _ = x["v"].shape

    def rows(tensor):  # [B, S, R, H, width] -> [B, H, S*R, width]
        return tensor.expand(B, S, R, H, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def rotated(tensor):  # channel n with N/2 + n, for the first quarter of the channels
        a, b, c, d = tensor.expand(B, S, R, H, N).chunk(4, -1)
        cos, sin = x["angles"].cos()[:, :, None], x["angles"].sin()[:, :, None]
        return torch.cat((cos * a - sin * c, b, sin * a + cos * c, d), -1)

    q, k = (x[name] + x[f"{name}_bias"].transpose(0, 1) for name in "qk")
    v, z = (torch.einsum("bshp,hrp->bsrhp", x[name], x[f"mimo_{name}"]) for name in "vz")
    gamma, late = x["dt"] * x["trap"].sigmoid(), x["dt"] * (-x["trap"]).sigmoid()
    time = torch.arange(S, device=dA.device).repeat_interleave(R)
    weight, total = gamma + torch.nn.functional.pad(late[..., 1:], (0, 1)), x["dA"].cumsum(2)[..., time]
    past, same = time[:, None] > time, time[:, None] == time
    factor = (total[..., None] - total[..., None, :]).masked_fill(~past, -torch.inf).exp() * weight[..., None, time]
    scores = rows(rotated(q)) @ rows(rotated(k)).mT * factor + rows(q) @ rows(k).mT * same * gamma[..., None, time]
    outputs = (scores + x["D"][:, None, None] * torch.eye(S * R, device=dA.device)) @ rows(v)
    gated = (outputs * torch.nn.functional.silu(rows(z))).unflatten(2, (S, R))
    out = torch.einsum("bhsrp,hrp->bshp", gated, x["mimo_o"])
    return torch.autograd.grad(out, list(x.values()), arguments["dout"].double())


def requested(module):
    """Return what mamba-ssm's own entry point gives each jit function and its kernel, before it needs a GPU."""
    calls = {}

    def record(kernel, *args, **kwargs):
        def run(*tensors):
            calls[kernel] = args, kwargs, tensors
            if len(calls) == len(KERNELS):
                raise StopIteration

        return run

    recorders = {f"mamba_mimo_{kernel}": functools.partial(record, kernel) for kernel in KERNELS}
    with contextlib.suppress(StopIteration), unittest.mock.patch.multiple(module, **recorders):
        module.mamba_mimo_bwd_combined(**example(module.torch, SIZES, "cpu")[0])
    return calls


def build(kernel, tma, target):
    """In a process of its own: lower a kernel and compile it. Return what the loop at the end of judge unpacks."""
    module = load()
    args, kwargs, tensors = requested(module)[kernel]
    switch(module, target, tma=tma)
    function = getattr(module, f"mamba_mimo_{kernel}")
    program = function.get_tir(*args, **kwargs)
    pairs = [(x, program.buffer_map[y]) for x, y in zip(tensors, program.params, strict=True) if x is not None]
    wrong = [buffer.name for tensor, buffer in pairs if tensor.dim() != len(buffer.shape)]
    identity = repr((module.tilelang.__version__, function.pass_configs, target, wrong, program.script())).encode()
    refused = Path(module.tilelang.env.TILELANG_CACHE_DIR, f"refused-{hashlib.sha256(identity).hexdigest()}.json")
    if refused.exists():
        return json.loads(refused.read_text())
    try:
        source = function.compile(*args, **kwargs).get_kernel_source()
    except RuntimeError as error:  # tilelang's own are TVMErrors; nvcc's is a plain RuntimeError with its output
        lowers = not isinstance(error, module.tilelang.tvm.error.TVMError)
        said = [line.split("): ")[-1] for line in str(error).splitlines() if not lowers or ": error" in line][-1]
        found = [wrong, lowers, False, None, f"{type(error).__name__}: {said}"]
        partial = refused.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found))
        partial.replace(refused)
        return found
    return [wrong, True, True, len(re.findall(r"\btl::tma_load\b", source)), ""]


def judge_runs(probe, torch, module, target, *, compiled):
    """Run both kernels, TMA off and on: all gradients against float64, and the time of one whole backward."""

    def backward():
        return module.mamba_mimo_bwd_combined(**arguments)

    def differing(some, others):
        return [f"d{name}" for name, x, y in zip(VARIABLES, some, others, strict=False) if not torch.equal(x, y)]

    def check(name, role, got):
        pairs = zip(VARIABLES, got, wanted, strict=False)  # upstream's main branch returns a fifteenth
        errors = {f"d{key}": float((x - y).abs().max() / y.abs().max()) for key, x, y in pairs}
        ok = all(error <= TOLERANCE for error in errors.values())
        probe.check(name, role, ok, measured=errors, tolerance=TOLERANCE, unit="largest error over largest value")

    def milliseconds(name):
        large, _ = example(torch, LARGE, "cuda")
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(53)]
        for begin, end in events:
            begin.record(), module.mamba_mimo_bwd_combined(**large), end.record()
        torch.cuda.synchronize()
        low, middle, high = statistics.quantiles([begin.elapsed_time(end) for begin, end in events[3:]], n=4)
        probe.say("FIGURE", name=name, value=middle, unit="ms", spread=high - low)
        return middle

    utilities = vars(sys.modules[module.bwd_dtrap_ddt_triton.__module__]).values()
    for kernel in (value for value in utilities if hasattr(value, "configs")):
        kernel.configs = kernel.configs[:1]  # autotuning costs time, and may choose otherwise in the other lane
    module.T.dynamic = functools.cache(module.T.dynamic)  # or each call would elaborate both kernels anew, for seconds
    arguments, dA = example(torch, SIZES, "cuda")
    wanted = reference(torch, arguments, dA)
    switch(module, target, tma=False)
    off = backward()
    check("gradients.tma_off", "control", off)
    differ = differing(off, backward())
    probe.check("rerun.tma_off", "control", not differ, measured=differ, unit="gradients that differ between two runs")
    for name, gradient in zip(VARIABLES, off, strict=False):
        probe.output(f"d{name}", gradient)
    slow = milliseconds("tma_off_ms")
    if not compiled:
        probe.check("gradients.tma_on", "defect", None, reason="the kernels do not compile with TMA on")
        return
    switch(module, target, tma=True)
    on = backward()
    check("gradients.tma_on", "defect", on)
    probe.say("FIGURE", name="tma_on_differs", value=differing(off, on), unit="gradients that are not bitwise the same")
    probe.say("FIGURE", name="tma_on_over_off", value=milliseconds("tma_on_ms") / slow, unit="1")


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
    executed = torch.cuda.is_available() and target == "sm_{}{}a".format(*torch.cuda.get_device_capability())
    device, evidence = (torch.cuda.get_device_name(), "executed") if executed else ("none", "compiled")
    probe.say("TARGET", target=target, evidence=evidence, device=device)
    probe.upstream(module)
    tasks = [(kernel, tma) for tma in ((True, False) if executed else (True,)) for kernel in KERNELS]
    context = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")  # CUDA survives no fork
    with concurrent.futures.ProcessPoolExecutor(min(len(tasks), os.cpu_count()), mp_context=context) as pool:
        built = list(pool.map(build, *zip(*tasks, strict=True), itertools.repeat(target)))
    for (kernel, tma), (wrong, lowers, compiles, loads, reason) in zip(tasks, built, strict=True):
        if not tma:
            probe.check(f"{kernel}.tma_off", "control", compiles and loads == 0, measured=loads, reason=reason)
            continue
        probe.check(f"{kernel}.ranks", "control", not wrong, measured=wrong, unit="arguments of an undeclared rank")
        probe.check(f"{kernel}.lowers", "defect", lowers, measured="lowers" if lowers else reason)
        probe.check(f"{kernel}.compiles", "defect", compiles if lowers else None, reason=reason)
        probe.check(f"{kernel}.tma_load", "defect", loads > 0 if compiles else None, measured=loads, reason=reason)
    if executed:
        judge_runs(probe, torch, module, target, compiled=all(compiles for _, _, compiles, _, _ in built))


if __name__ == "__main__":
    Probe().run(judge)
