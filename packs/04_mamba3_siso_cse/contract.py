# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "einops==0.8.1",
#   "numpy==2.3.5",
#   "torch==2.11.0",
#   "triton==3.6.0",
# ]
# ///
"""Mamba-3's SISO backward kernel writes V.dO^T three times, and applies the causal decay to it three times.

Not a bug: the results are right, and with the line numbers left out today's Triton compiles both texts of the kernel
to the same machine code, bit for bit. The claim is about clarity: one value with three names reads as three.

Symptom: mamba3_siso_bwd_kernel_dqkv computes tl.dot(v_block, tl.trans(do_block)) three times in its chunk loop, each
followed by the same causal-decay mask: as dAinv for dADT, as dp_t_block for dK, as s_block for dQ.

Cause: the three gradients were written one after another, each with its own copy of the shared product.

Scope: the defect checks count, in the IR that Triton's frontend emits, the tt.dot operations between blocks of V and dO
and the masks on their results, by following operands back to the kernel's arguments; text and names play no part. What
the compiler leaves of them, for each architecture, dense with RECOMPUTE_MASK off and on and for packed sequences
without D and states, is told as figures and as the kernel's cubin. The controls are that the masked product reaches
dADT, dK and dQ and nothing else, that no result is made of more values rounded to 16 bits than the release makes it of
(counted, for bf16 inputs), and, on the target cpu (interpreted) and on a GPU of the target (executed), the seven
gradients of compute_dqkv against float64, dense and varlen, with D and the states' gradients and without, with
d_ov_state, with RECOMPUTE_MASK put on, and with a sequence of no tokens in cu_seqlens, whose state's gradient passes
through. Every element of a result is written, whatever its memory held. compute_dqkv leaves what it is given as it was,
for autograd has saved it and a graph may be walked twice. A result is the same bit for bit in a second call and behind
the launches of autotuning, and no float is summed by atomics. A V or dO cut out of a wider tensor, with rows and an
offset that are no multiple of 16 bytes, comes to the kernel's descriptors as a block that they may describe. Every
launch and every compilation is pinned to one of the kernel's 27 autotune configurations: nothing is said of the others.
A result has memory of its own and no more than it fills, which the next call leaves alone. D may be in 16 bits, and its
gradient is in float32; the size of V's heads may be no power of two; cu_seqlens may be a column of a table; the first
state has a gradient where the last one has none. No line of compute_dqkv waits for the device; shapes that do not agree
are refused before the launch; the autotuner keeps one entry for all lengths, batches and heads. Time on a GPU is a
figure.

Upstream: https://github.com/state-spaces/mamba, mamba_ssm/ops/triton/mamba3/mamba3_siso_bwd.py; of this kernel speak
https://github.com/state-spaces/mamba/issues/904 and pull/905 (registers and spills), pull/869 and pull/877 (dtypes).

The index has mamba-ssm as an sdist only. It is not built, only unpacked (CHECKOUT: such a folder, or a clone):

    PYTHONPATH=CHECKOUT uv run reproduce.py

Both sentinels without a runner, in an environment that has the packages of the header above:

    tar xzf mamba_ssm-2.3.2.post1.tar.gz
    PYTHONPATH=mamba_ssm-2.3.2.post1 python "$PACK/reproduce.py"
    git -C mamba_ssm-2.3.2.post1 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=mamba_ssm-2.3.2.post1 python "$PACK/reproduce.py"
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

import importlib
import math
import multiprocessing
import re
import types
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.machinery import PathFinder
from itertools import pairwise, permutations
from unittest import mock

KERNEL = "mamba3_siso_bwd_kernel_dqkv"
PINNED = {"num_warps": 8, "num_stages": 1}  # one of the kernel's own configurations; its shared memory suffices
INPUTS = ("q", "k", "v", "da_cs", "da_cs_sum", "qk_dot", "SSM_States", "do")
RESULTS = ("dQ", "dK", "dV", "dADT", "dQK_dot", "dD", "d_issm_state")
WIDE = ("dADT", "dQK_dot", "dD")  # float32, whatever the inputs are
# Tokens of each sequence, heads, heads of Q and K and their size, size of V's heads, chunk.
# "bare": no D, no gradient of the last state, none asked of the first; "d_ov_state": a gradient of the last V; "fused":
# V and dO are cut out of wider tensors, as in sliced(); "16-bit D": D is in bf16; "padded": the rows of da_cs and of
# qk_dot are cut out of longer ones, of different lengths; "no last": no gradient of the last state, though one is asked
# of the first; "strong decay": packed, cu_seqlens is a column of a table, too.
SMALL = {
    "dense B=2 S=40": ((40, 40), 2, 1, 16, 32, 16),
    "varlen S=16+0+7+17": ((16, 0, 7, 17), 2, 1, 16, 32, 16),
    "dense B=3 S=21 d_ov_state fused": ((21, 21, 21), 1, 1, 16, 16, 16),
    "varlen S=18+5 d_ov_state": ((18, 5), 4, 2, 16, 16, 16),
    "dense B=1 S=37 bare": ((37,), 3, 3, 16, 16, 16),
    "varlen S=3+19 bare": ((3, 19), 1, 1, 16, 16, 16),
    "varlen S=11+5 strong decay": ((11, 5), 2, 1, 16, 16, 16),
    "dense B=2 S=19 DV=24 16-bit D padded": ((19, 19), 2, 1, 16, 24, 16),
    "varlen S=7+20 DV=24 16-bit D padded": ((7, 20), 2, 2, 16, 24, 16),
    "dense B=1 S=18 no last": ((18,), 1, 1, 16, 16, 16),
    "varlen S=5+0+17 no last": ((5, 0, 17), 1, 1, 16, 16, 16),
}
PUBLIC = {
    "dense B=2 S=256 NH=8 D=64": ((256, 256), 8, 1, 64, 64, 64),
    "dense B=1 S=2048 NH=32 D=128": ((2048,), 32, 1, 128, 128, 64),
    "dense B=1 S=4096 NH=24 DQK=64 DV=128": ((4096,), 24, 1, 64, 128, 64),
    "varlen S=1000+1+3095 NH=24 DQK=64 DV=128": ((1000, 1, 3095), 24, 1, 64, 128, 64),
    "dense B=3 S=200 NH=6 D=64 d_ov_state": ((200,) * 3, 6, 2, 64, 64, 64),
    "varlen S=100+1+155 NH=6 D=64 bare": ((100, 1, 155), 6, 3, 64, 64, 64),
    "varlen S=75+0+21 NH=2 D=64 strong decay": ((75, 0, 21), 2, 2, 64, 64, 64),
    "dense B=2 S=200 NH=4 DV=96 16-bit D padded": ((200, 200), 4, 2, 64, 96, 64),
    "dense B=2 S=90 NH=2 D=64 no last": ((90, 90), 2, 1, 64, 64, 64),
    "varlen S=70+0+33 NH=2 D=64 no last": ((70, 0, 33), 2, 1, 64, 64, 64),
}
# What is compiled: a case, and RECOMPUTE_MASK, of which compute_dqkv passes False always.
VARIANTS = {
    "RECOMPUTE_MASK=False": ("dense B=2 S=256 NH=8 D=64", False),
    "RECOMPUTE_MASK=True": ("dense B=2 S=256 NH=8 D=64", True),
    "varlen bare": ("varlen S=100+1+155 NH=6 D=64 bare", False),
}
# Cases in which the kernel is launched a second time, with RECOMPUTE_MASK=True.
RECOMPUTED = {"dense B=2 S=40", "varlen S=11+5 strong decay"}
RECOMPUTED |= {"dense B=2 S=256 NH=8 D=64", "varlen S=100+1+155 NH=6 D=64 bare"}
RECOMPUTED |= {"varlen S=75+0+21 NH=2 D=64 strong decay"}
# Cases called behind the launches of autotuning, and once more: without D, and on a GPU with D and three batches too.
TUNED = {"varlen S=3+19 bare"}
TUNED |= {"dense B=3 S=200 NH=6 D=64 d_ov_state", "varlen S=100+1+155 NH=6 D=64 bare"}
# What waits for the device: functions of tensors as they are called, and operators, whose result the host must know.
WAITING = {
    "tolist",
    "item",
    "cpu",
    "numpy",
    "__array__",
    "__bool__",
    "__int__",
    "__index__",
    "__float__",
    "__contains__",
}
WAITING |= {"nonzero", "_local_scalar_dense", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"}
# Values rounded to 16 bits of which the release makes each result: what a dot takes, and what is stored in 16 bits.
ROUNDINGS = {"dQ": 2, "dK": 4, "dV": 4, "dADT": 2, "dQK_Dot": 1, "dD": 1, "d_ISSM_State": 1}
# Largest error over largest value; the inputs are exact in the reference, too. In float32 the sums have a few hundred
# terms, each rounded to 2^-24. In bf16 scores, states and results are rounded, one after another, to 2^-8 at most.
TOLERANCES = {"cpu": 2**-16, "cuda": 2**-6}
# Operations that hand on a block, or a pointer to it; and operations on each of its elements.
LOADS = {"tt.load", "tt.descriptor_load"}
MOVES = {"load", "descriptor_load", "make_tensor_descriptor", "addptr", "splat", "broadcast", "trans"}
EXACT = MOVES | {"expand_dims", "reshape", "arith.select", "arith.negf"}
ELEMENTWISE = {"arith.mulf", "arith.select", "arith.truncf", "arith.extf", "tt.trans", "tt.broadcast"}
COUNTED = ("tt.dot", "math.exp2", "arith.mulf", "arith.select")


def module_under_test():
    """Import the kernel's module. The package itself imports compiled code: it is found, not executed."""
    spec = PathFinder.find_spec("mamba_ssm")
    if spec is None:
        raise ImportError("no mamba_ssm on the path; use PYTHONPATH=CHECKOUT uv run reproduce.py")
    sys.modules["mamba_ssm"] = types.ModuleType("mamba_ssm")
    sys.modules["mamba_ssm"].__path__ = list(spec.submodule_search_locations)
    return importlib.import_module("mamba_ssm.ops.triton.mamba3.mamba3_siso_bwd")


def recurrence(inputs):
    """Give o_t = a_t S_(t-1) q_t + (D + qk_dot_t) v_t and the last S_t = a_t S_(t-1) + v_t k_t^T, a_t = exp(adt_t)."""
    q, k, v, adt, qk_dot, D, state = inputs
    decay = adt.cumsum(-1)
    not_before = adt.new_ones(adt.shape[-1], adt.shape[-1]).triu().bool()
    between = (decay[..., None] - decay[:, None]).masked_fill(not_before, -math.inf).exp()
    out = (q @ k.mT * between) @ v + decay.exp()[..., None] * (q @ state.mT) + (D[:, None] + qk_dot)[..., None] * v
    whole = adt.sum(-1, keepdim=True)  # 0 for a sequence of no tokens
    return out, whole[..., None].exp() * state + (v * (whole - decay).exp()[..., None]).mT @ k


def sliced(x):
    """Cut what equals x out of a wider tensor: its rows and its offset are no multiple of 16 bytes."""
    wide = x.new_zeros(*x.shape[:2], x[0, 0].numel() + 1)
    wide[..., 1:] = x.flatten(2)
    return wide[..., 1:].unflatten(-1, x.shape[2:])


def padded(x, more):
    """Cut what equals x out of a tensor with longer rows."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + more)
    wide[..., :-more] = x
    return wide[..., :-more]


def describable(x):
    """Tell whether a tensor's blocks may be described to the TMA unit: rows of one stride, all at 16 bytes."""
    rows = [stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1]
    return x.stride(-1) == 1 and not any(n % 16 for n in [x.data_ptr(), *(n * x.itemsize for n in rows)])


def varied(case, passed, named):
    """Give the arguments of compute_dqkv as the name of the case asks for: cut out of others, in 16 bits, or None."""
    import torch

    if "fused" in case:
        passed[2], passed[7] = sliced(passed[2]), sliced(passed[7])
    if "padded" in case:
        passed[3], passed[5] = padded(passed[3], 1), padded(passed[5], 3)
    if "varlen" in case and "strong" in case:
        ends = named["Cu_Seqlens"]
        named["Cu_Seqlens"] = torch.stack([ends, torch.zeros_like(ends)], 1)[:, 0]
    if "16-bit D" in case:
        named["D"] = named["D"].bfloat16()
    if "no last" in case:
        named["d_ossm_state"] = None
    if "bare" in case:
        named |= {"d_ossm_state": None, "D": None, "has_input_state": False}
    return passed, named


def problem(case, shape, device):
    """Make what compute_dqkv takes, and what it has to give: the derivatives of the recurrence in float64."""
    import torch

    (lengths, H, G, DQK, DV, chunk), random = shape, torch.Generator().manual_seed(4)
    varlen, N, T = "varlen" in case, len(lengths), sum(lengths)
    sizes = [(G, T, DQK)] * 2 + [(H, T, DV)] * 2 + [(H, T)] * 2 + [(H,)] + [(N, H, DV, DQK)] * 2 + [(N, H, DV)]
    q, k, v, do, adt, qk_dot, D, first, d_last, d_v = (torch.randn(x, generator=random).to(device) for x in sizes)
    absent = ["bare" in case, "bare" in case or "no last" in case]
    D, d_last = (torch.zeros_like(x) if none else x for x, none in zip((D, d_last), absent, strict=True))
    D = D.bfloat16().to(D.dtype) if "16-bit D" in case else D
    dtype = torch.float32 if shape in SMALL.values() else torch.bfloat16
    q, k, v, do, adt = *(x.to(dtype) * x.shape[-1] ** -0.5 for x in (q, k, v, do)), -0.1 * adt.abs()
    if "strong" in case:
        adt[:, torch.tensor(lengths).cumsum(0) - 1] = -200.0
    tokens = [x.double().repeat_interleave(H // x.shape[0], 0) for x in (q, k, v, adt, qk_dot, do)]
    d_out, ends, grads, da_cs = tokens.pop(), [0, *torch.tensor(lengths).cumsum(0).tolist()], [], torch.zeros_like(adt)
    states = d_out.new_zeros(N + T // chunk if varlen else N * -(-lengths[0] // chunk), H, DV, DQK)
    sums = adt.new_zeros(H, len(states))
    for n, (start, end) in enumerate(pairwise(ends)):
        inputs = [*(x[:, start:end] for x in tokens), D.double(), first[n].double()]
        out, last = recurrence([x.requires_grad_() for x in inputs])
        loss = (out * d_out[:, start:end]).sum() + (last * d_last[n]).sum()
        grads.append(torch.autograd.grad(loss, inputs))
        *fixed, state = (x.detach() for x in inputs)
        place = n + start // chunk if varlen else n * len(states) // N
        for begin in range(0, end - start, chunk):  # what the forward saves of each chunk
            part = [x[:, begin : begin + chunk] for x in fixed[:5]]
            decay, states[place] = part[3].cumsum(-1) / math.log(2), state
            da_cs[:, start + begin :][:, : decay.shape[-1]], sums[:, place] = decay, decay[:, -1]
            state, place = recurrence([*part, fixed[5], state])[1], place + 1

    def rows(x):  # [H, T, size] to [B, S, H, size], [H, T] to [B, H, S]
        return x.unflatten(1, (1 if varlen else N, -1)).movedim(0, x.dim() - 1).contiguous()

    *per_token, d_D, d_first = zip(*grads, strict=True)
    wants = [*(rows(torch.cat(x, 1)) for x in per_token), sum(d_D), torch.stack(d_first)]
    states = states.to(dtype).unflatten(0, (1 if varlen else N, -1)).permute(0, 2, 3, 1, 4).flatten(3)
    passed = [*map(rows, (q, k, v, da_cs, sums, qk_dot)), states, rows(do)]
    lasts = (0, torch.tensor(ends[1:]) - 1) if varlen else (slice(None), -1)
    ends = torch.tensor(ends, dtype=torch.int32, device=device) if varlen else None
    named = {"d_ossm_state": d_last, "D": D, "chunk_size": chunk, "has_input_state": True, "Cu_Seqlens": ends}
    if "d_ov_state" in case:
        named["d_ov_state"] = d_v
        wants[2][lasts] += d_v
    if "bare" in case:
        wants[5:] = None, None
    return *varied(case, passed, named), wants


def recomputing(module, call):
    """Make a call in which the kernel is launched with RECOMPUTE_MASK=True, which compute_dqkv never passes."""
    kernel = getattr(module, KERNEL)

    def launcher(_, grid):
        return lambda *passed, **named: kernel[grid](*passed, **named | {"RECOMPUTE_MASK": True})

    with mock.patch.object(module, KERNEL, mock.MagicMock(__getitem__=launcher)):
        return call()


def gradients(probe, case, call, given, wants):
    """Judge the seven gradients of one case, and that what was given for them is as it was."""
    import torch

    before, errors = {name: x.clone() for name, x in given.items()}, {}
    torch.set_deterministic_debug_mode("warn")  # fills what torch.empty returns with NaN
    try:
        results = call()
    finally:
        torch.set_deterministic_debug_mode("default")
    for name, result, want in zip(RESULTS, results, wants, strict=True):
        if result is not None and name in WIDE and result.dtype != torch.float32:
            errors[name] = math.inf
            continue
        if want is None or result is None:
            errors[name] = 0.0 if want is result else math.inf
            continue
        probe.output(f"{name}, {case}", result)
        errors[name] = float(f"{(result.double() - want).abs().max() / want.abs().max():.2g}")
    own = {name: x for name, x in zip(RESULTS, results, strict=True) if x is not None}
    errors |= {f"{name} keeps more": math.inf for name, x in own.items() if x.untyped_storage().nbytes() != x.nbytes}
    errors |= {f"{name} was changed": math.inf for name, x in given.items() if not torch.equal(x, before[name])}
    tolerance, unit = TOLERANCES[given["q"].device.type], "largest error over largest value"
    return all(x <= tolerance for x in errors.values()), {"measured": errors, "tolerance": tolerance, "unit": unit}


def launched_once(launch, quantiles):
    """Stand for the autotuner's timing of one configuration, which launches it many times."""
    launch()
    return [1.0 for _ in quantiles]


def tuned(kernel, call):
    """Judge that behind the launches of autotuning the results are, bit for bit, those of the call after it.

    That call has them in memory of its own: the caller holds the first ones still.
    """
    import torch

    with mock.patch.multiple(kernel, configs=2 * kernel.configs, cache={}):
        calls = zip(RESULTS, call(), call(), strict=True)
    pairs = [(name, x, y) for name, x, y in calls if x is not None or y is not None]
    differ = [name for name, x, y in pairs if x is None or y is None or not torch.equal(x, y)]
    shared = [name for name, x, y in pairs if name not in differ and x.data_ptr() == y.data_ptr()]
    return not differ + shared, {"measured": {"differ": differ, "in one memory": shared}, "tolerance": []}


def caller_from(file):
    """Tell whether the nearest frame outside of torch and of this probe is one of a file."""
    frame = sys._getframe(2)  # noqa: SLF001 - the documented way to a caller
    passed_by = (f"{os.sep}torch{os.sep}", __file__)
    while frame is not None and any(each in frame.f_code.co_filename for each in passed_by):
        frame = frame.f_back  # one mode's function calls what the other one sees
    return frame is not None and frame.f_code.co_filename == file


def waits(module, device):
    """Judge that no line of the module waits for the device, by a function of a tensor or by an operator.

    The kernel is left out; d_ov_state is what is added behind it.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = set()

    def note(name, args):
        chosen = [x for each in args if isinstance(each, list | tuple) for x in each]  # of index and index_put
        masks = any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in chosen)
        seen.update({name} & WAITING | ({f"{name} by a mask"} if masks and name.startswith("index") else set()))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if caller_from(module.__file__):
                note(getattr(function, "__name__", ""), args)
                moved = (*args[1:], *(kwargs or {}).values()) if getattr(function, "__name__", "") == "to" else ()
                seen.update({"to cpu"} if "cpu" in [x for x in moved if isinstance(x, str)] else ())
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if caller_from(module.__file__):
                note(function.overloadpacket.__name__, args)
            return function(*args, **(kwargs or {}))

    for case in ("varlen d_ov_state", "varlen strong d_ov_state padded", "dense d_ov_state fused"):
        passed, named, _ = problem(case, ((18,) if "dense" in case else (18, 5), 4, 2, 16, 16, 16), device)
        with mock.patch.object(module, KERNEL), Functions(), Operators():
            module.compute_dqkv(*passed, **named)
    return not seen, {"measured": sorted(seen), "tolerance": []}


def tuned_again(module, device):
    """Count what the autotuner keeps of calls whose lengths, batches and heads differ, and no size of its blocks."""
    kernel, measured = getattr(module, KERNEL), {}
    for layout, others in (("dense", ((18,), (18, 18), (40,))), ("varlen", ((18,), (3, 30), (40,)))):
        patched = {"configs": 2 * kernel.configs, "cache": {}, "do_bench": lambda *_, **__: [1.0] * 3}
        with mock.patch.multiple(kernel, **patched), mock.patch.object(kernel.fn, "run"):
            for lengths, heads in zip(others, (2, 4, 6), strict=True):
                passed, named, _ = problem(layout, (lengths, heads, 2, 16, 16, 16), device)
                module.compute_dqkv(*passed, **named)
            measured[layout] = len(kernel.cache)
    return all(x == 1 for x in measured.values()), {"measured": measured, "tolerance": 1}


def refused(module, device):
    """Judge that shapes which do not agree are refused before a launch, each in a call that is right otherwise."""
    import torch

    passed, named, _ = problem("varlen d_ov_state", ((18, 5), 4, 2, 16, 16, 16), device)
    given = dict(zip(INPUTS, passed, strict=True)) | named
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and name != "Cu_Seqlens"}
    calls = {f"{name} longer": {name: torch.cat([x, x[:1]])} for name, x in tensors.items()}
    calls["two batches beside cu_seqlens"] = {name: torch.cat([given[name]] * 2) for name in INPUTS}
    calls["3 heads of Q and K for 4"] = {name: torch.cat([given[name], given[name][:, :, :1]], 2) for name in "qk"}
    taken = []
    for what, changed in calls.items():
        with mock.patch.object(module, KERNEL) as launched:
            try:
                module.compute_dqkv(**given | changed)
            except (AssertionError, ValueError):
                taken += [what] * bool(launched.mock_calls)
            else:
                taken.append(what)
    return not taken, {"measured": taken, "tolerance": []}


def judge_gradients(probe, module, cases, device):
    """Compare the seven gradients with float64 and, bit for bit, between the trees; on a GPU tell the time."""
    import torch

    kernel = getattr(module, KERNEL)
    kernel.configs = [next(one for one in kernel.configs if PINNED.items() <= one.all_kwargs().items())]
    kernel.do_bench = launched_once
    probe.judge("tuned once for all lengths", "control", tuned_again, module, device)
    probe.judge("waits for the device", "control", waits, module, device)
    probe.judge("shapes that do not agree are refused", "control", refused, module, device)
    for case, shape in cases.items():
        passed, named, wants = problem(case, shape, device)
        call = partial(module.compute_dqkv, *passed, **named)
        given = dict(zip(INPUTS, passed, strict=True)) | named
        given = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        probe.judge(f"gradients, {case}", "control", gradients, probe, case, call, given, wants)
        if case in RECOMPUTED:
            again = f"{case} RECOMPUTE_MASK=True"
            recompute = partial(recomputing, module, call)
            probe.judge(f"gradients, {again}", "control", gradients, probe, again, recompute, given, wants)
        if case in TUNED:
            probe.judge(f"the same when tuned and again, {case}", "control", tuned, kernel, call)
        if device == "cuda":
            with probe.alone():
                low, median, high = module.triton.testing.do_bench_cudagraph(call, rep=100, quantiles=(0.25, 0.5, 0.75))
            probe.say("FIGURE", name=f"time, {case}", value=median, unit="ms", spread=high - low)


def read(module):
    """Return a module's operations, as names and operands, and of each value what made it, and which have 16 bits."""
    operations, made, short = [], {}, set()
    module.walk(operations.append)  # an operation follows what lies in it, so that a loop follows its yield
    uses = [(x.get_name(), [x.get_operand(i).id() for i in range(x.get_num_operands())]) for x in operations]
    for n, x in enumerate(operations):
        results = [x.get_result(i) for i in range(x.get_num_results())]
        made |= {value.id(): uses[n] for value in results}
        if uses[n][0] not in EXACT | {f"tt.{name}" for name in EXACT}:
            short |= {value.id() for value in results if re.search(r"(b?f16|f8\w+)>?$", str(value.get_type()))}
        if uses[n][0] == "scf.for":  # a carried value is made of its first one and of what the loop yields
            block, firsts = operations[n - 1].get_block(), uses[n][1][3:]
            for i, each in enumerate(zip(firsts, uses[n - 1][1], strict=True)):
                made[results[i].id()] = made[block.arg(i + 1).id()] = "scf.yield", each
    return uses, made, short


def behind(made, value, stops=LOADS, only=None):
    """Return a value and what it is computed from, up to operations of the names `stops`, or by those in `only`."""
    found, left = set(), [value]
    while left:
        value = left.pop()
        name, operands = made.get(value, ("", ()))
        if name in only if only else name not in stops:
            left += [x for x in operands if x not in found]
        found.add(value)
    return found


def census(module, names):
    """Count V.dO^T products, masks on them and all dots in a module of Triton's IR; tell which results they reach."""
    function, (uses, made, short) = module.get_function(module.get_entry_func_name()), read(module)
    arguments = {function.args(i).id(): name for i, name in enumerate(names)}

    def origin(value):  # the kernel's argument that a block was loaded from
        name, operands = made.get(value, ("", ()))
        return origin(operands[0]) if name.removeprefix("tt.") in MOVES else arguments.get(value)

    def reached(values, stops=LOADS):  # the results that are made of one of these values
        return sorted({place for place, x in stores if behind(made, x, stops) & values})

    dots, exps, muls, selects = ({v for v in made if made[v][0] == x} for x in COUNTED)
    products = {v for v in dots if {origin(x) for x in made[v][1][:2]} == {"V", "dO"}}
    element = {v: behind(made, v, only=ELEMENTWISE) for v in made}
    pairs = [(v, a, b) for v in muls for a, b in permutations(element[x] for x in made[v][1])]
    decayed = {v for v, a, b in pairs if a & products and b & exps and not b & products}
    masked = {v for v in decayed | selects if element[v] & decayed and element[v] & selects}
    stored = [operands for name, operands in uses if name in {"tt.store", "tt.descriptor_store"}]
    stores = [(str(origin(place)), x) for place, *rest in stored for x in rest]
    loaded = {v for v in made if made[v][0] in LOADS}
    rounded = {v for v in short if behind(made, v) & loaded}  # not constants
    counts = {"products": len(products), "masks": len(masked), "dots": len(dots)}
    found = {"reached": reached(masked), "unrounded": reached(products, LOADS | {"arith.truncf"})}
    found["described"] = sorted({str(origin(x[0])) for name, x in uses if name == "tt.make_tensor_descriptor"})
    found["atomics"] = len(re.findall(r"tt\.atomic_rmw fadd", str(module)))
    roundings = {place: set() for place, _ in stores}
    for place, x in stores:
        roundings[place] |= behind(made, x) & rounded
    narrow = sorted(set(re.findall(r"(?<!\w)(?:\d+x)*(i(?:8|16))\b", str(module))))
    return counts | found | {"roundings": {name: len(x) for name, x in roundings.items()}, "narrow": narrow}


def compiled(target):
    """Compile the kernel as compute_dqkv launches it, by name of VARIANTS; count before CSE and after it.

    Where the compiler refuses it, what it says stands in place of the counts and the code.
    """
    import torch
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.compiler.errors import CompilationError
    from triton.runtime import driver

    module, gpu, found = (
        module_under_test(),
        GPUTarget("cuda", 90 if target == "cpu" else int(target.strip("sm_a")), 32),
        {},
    )
    active = mock.Mock(get_current_target=lambda: gpu, get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    context = ir.context()
    ir.load_dialects(context)
    make_backend(gpu).load_dialects(context)
    for name, (case, masked) in VARIANTS.items():
        passed, named, _ = problem(f"{case} fused", PUBLIC[case], "cpu")
        with mock.patch.object(torch.Tensor, "is_cuda", True), mock.patch.object(module, KERNEL) as launched:
            module.compute_dqkv(*passed, **named)
        passed, named = launched.__getitem__.return_value.call_args
        kernel, named["RECOMPUTE_MASK"] = getattr(module, KERNEL).fn, masked
        with mock.patch.object(driver, "_active", active):
            try:
                binary = kernel.warmup(*passed, grid=(1,), **named, **PINNED)
            except (CompilationError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "PassManager::run failed" not in str(error):
                    raise
                found[name] = str(error)
                continue
        names = [each for each, kind in binary.src.signature.items() if kind != "constexpr"]
        files = {Path(each).suffix: path for each, path in binary.metadata_group.items()}
        counts = [census(ir.parse_mlir_module(files[x], context), names) for x in (".source", ".ttir")]
        handed = dict(zip(kernel.arg_names, passed, strict=False))
        counts[0]["misaligned"] = [x for x in counts[0]["described"] if x in handed and not describable(handed[x])]
        found[name] = *counts, {**binary.asm, "shared": binary.metadata.shared}
    return found


def judge(probe, target):
    """Count in the IR everywhere, and compute where the kernel can run."""
    import torch

    torch.set_num_threads(1)  # the matrices are too small for more
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # machine code that does not depend on where a line stands
    if target == "cpu":  # the interpreter replaces the frontend for a whole process, so the frontend gets a child
        child = ProcessPoolExecutor(1, multiprocessing.get_context("fork")).submit(compiled, target)
        os.environ["TRITON_INTERPRET"] = "1"
    gpu = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else ""
    evidence = "interpreted" if target == "cpu" else "executed" if target.rstrip("a") == gpu else "compiled"
    device = torch.cuda.get_device_name() if evidence == "executed" else "no GPU"
    probe.say("TARGET", target=target, evidence=evidence, device=device)
    module = module_under_test()
    probe.upstream(module)
    for mode, found in (child.result() if target == "cpu" else compiled(target)).items():
        refused = isinstance(found, str)
        probe.check(f"{mode} compiles", "control", not refused, **({"reason": found[-300:]} if refused else {}))
        if refused:
            continue
        emitted, left, asm = found
        for name in ("products", "masks"):
            probe.check(f"{mode} V.dO^T {name}", "defect", emitted[name] <= 1, measured=emitted[name], tolerance=1)
        reached, right = emitted["reached"], ["dADT", "dK", "dQ"]  # and so the product is not hidden from the count
        probe.check(f"{mode} masked product reaches", "control", reached == right, measured=reached, tolerance=right)
        whole = emitted["unrounded"]  # the others are dots of it, which take it in the inputs' dtype
        probe.check(
            f"{mode} product reaches in float32", "control", whole == ["dADT"], measured=whole, tolerance=["dADT"]
        )
        roundings = emitted["roundings"]  # a right tree may round less
        fewer = all(count <= ROUNDINGS.get(name, 0) for name, count in roundings.items())
        probe.check(f"{mode} values rounded to 16 bits", "control", fewer, measured=roundings, tolerance=ROUNDINGS)
        narrow = emitted["narrow"]  # packed sequences may begin behind more than 32,767 tokens
        probe.check(f"{mode} counts in 32 bits", "control", not narrow, measured=narrow, tolerance=[])
        atomics, misaligned = emitted["atomics"], emitted["misaligned"]  # the order of atomics is another in each run
        probe.check(f"{mode} floats summed by atomics", "control", atomics == 0, measured=atomics, tolerance=0)
        blocks = {"measured": misaligned, "tolerance": []}
        probe.check(f"{mode} TMA blocks out of place, of V and dO sliced", "control", not misaligned, **blocks)
        figures = {"products before CSE": emitted["products"]}
        if target != "cpu":
            figures |= {"products after CSE": left["products"], "dots after CSE": left["dots"]}
            figures["MMA instructions"] = sum(map(asm["ptx"].count, ("mma.sync", "wgmma.mma_async", "tcgen05.mma")))
            figures["bytes of shared memory"] = asm["shared"]
            probe.output(f"{mode} cubin", torch.frombuffer(bytearray(asm["cubin"]), dtype=torch.uint8))
        for name, value in figures.items():
            probe.say("FIGURE", name=f"{mode} {name}", value=value)
    if evidence != "compiled":
        with mock.patch.object(
            torch.Tensor, "is_cuda", True
        ):  # the interpreter takes CPU tensors, compute_dqkv does not
            judge_gradients(probe, module, *((SMALL, "cpu") if target == "cpu" else (PUBLIC, "cuda")))


if __name__ == "__main__":
    Probe().run(judge)
