# /// script
# requires-python = ">=3.12"
# dependencies = [
#   "apache-tvm-ffi==0.1.9",
#   "cloudpickle==3.1.2",
#   "megatron-core==0.19.2",
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
"""Megatron's fused sparse MLA answers None for every latent and RoPE dimension but DeepSeek V3.2's 512 + 64.

Symptom: with dsa_kernel_backend="tilelang" and, say, kv_lora_rank 64 and qk_pos_emb_head_dim 64, the dispatcher
fused_sparse_mla_absorbed returns None, and attention silently takes the unfused path, which holds [B, H, S, S] scores.

Cause: the kernels take their dimensions as arguments, but what calls them does not pass them on: the dispatcher
returns None unless they are 576 and 512, SparseMLA does not carry v_channels, the forward's interface asserts 576 (and
its kernel powers of two), and the backward's sets 512. fix.patch hands them through.

Scope: dimension plumbing, compilation, launch, and gradients at the shapes below; not convergence. `traced`: what the
dispatcher answers, and which kernels it asks for (with kernels replaced by ones that return zeros). `compiled`: those
kernels are lowered for the target. `executed`: they are compiled, launched and compared with float64, and the memory of
the path that a user gets is measured against that of the unfused one. Not a stub, but not executed unless kernels are
launched: the __init__ of megatron.core and of megatron.core.transformer, which take seconds to import all the rest.
A lowered kernel is remembered in TILELANG_CACHE_DIR, as tilelang remembers a compiled one.

Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5049 brought the dispatcher; the kernels come from
https://github.com/tile-ai/tilelang/tree/main/examples/deepseek_v32. By hand, no GPU is needed:

    tar xzf megatron_core-0.19.2.tar.gz
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py" --target cpu
    git -C megatron_core-0.19.2 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py" --target cpu
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

import concurrent.futures, contextlib, functools, importlib, importlib.util, multiprocessing, os, re, types
import unittest.mock

VARIANT = "megatron.core.transformer.experimental_attention_variant"
FILES = {"forward": "tilelang_sparse_mla_fwd", "backward": "tilelang_sparse_mla_bwd", "function": "sparse_mla"}
FILES |= {"dispatcher": "tilelang_dsa", "utilities": "tilelang_utils"}
KERNELS = {"bwd": ("D", "D_tail"), "sparse_mla_fwd": ("dim", "tail_dim")}  # the jit functions, and their dimensions
KERNELS |= {"preprocess": ("D",), "postprocess": ("D", "D_tail")}
DEEPSEEK, ODD = (512, 64, 64), ((96, 32, 16), (64, 48, 64))  # latent dimension, RoPE dimension, heads
SHAPES = (DEEPSEEK, (64, 64, 16), (192, 32, 64))  # the second and the third fall through to the unfused path
SCALE, TOP_K, SHORT, LENGTH, LONG = 0.1, 128, 4, 256, 4096
TOLERANCE = 0.01  # relative, Frobenius norm: P, dP and the results are rounded to bf16, 2**-9 each; a wrong row is 0.06


def load(*, executed):
    """Import the real modules, and tilelang first: Megatron swallows what goes wrong there."""
    try:
        found = {name: importlib.import_module(name) for name in ("torch", "tilelang", "tilelang.language")}
    except OSError as error:  # one of its libraries cannot be loaded
        raise ImportError(str(error)) from error
    for name in () if executed else ("megatron.core", "megatron.core.transformer"):
        sys.modules.setdefault(name, importlib.util.module_from_spec(importlib.util.find_spec(name)))
    importlib.import_module("megatron.core.parallel_state")  # before megatron.core.utils, which imports it in a circle
    found |= {key: importlib.import_module(f"{VARIANT}.ops.{name}") for key, name in FILES.items()}
    return types.SimpleNamespace(**found)


def attempt(call, *args):
    """Return what a call gives, and an empty reason; or None, and what it raises."""
    try:
        return call(*args), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {['', *str(error).strip().splitlines()][-1]}"


def example(torch, shape, device, length, *, own=False):
    """Make query, key [S, B, heads, dims], top-k indices [B, S, K] (of the past, or rows of each query's own), dO."""
    dim, tail, heads = shape
    random, keys = torch.Generator(device).manual_seed(7), length * TOP_K if own else length
    sizes = ((length, 1, heads, dim + tail), (keys, 1, 1, dim + tail), (length, 1, heads, dim))
    query, key, d_out = (torch.randn(*size, generator=random, device=device).bfloat16() for size in sizes)
    if own:
        return query, key, torch.randperm(keys, generator=random, device=device).view(1, length, TOP_K), d_out
    weights = torch.rand(length, max(length, TOP_K), generator=random, device=device).tril().topk(TOP_K)
    return query, key, weights.indices.masked_fill(weights.values == 0, -1)[None], d_out


def gradients(torch, attend, inputs):
    """Return out, dQ and dKV through the user's door or another one; None where it answers None."""
    query, key, indices, d_out = (x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
    out = attend(query, key, indices, SCALE, d_out.shape[-1])
    return None if out is None else (out.detach(), *torch.autograd.grad(out, (query, key), d_out))


def reference(query, key, indices, scale, dim):
    """Attend to the chosen rows; in float64 where the inputs are."""
    chosen = key[:, 0, 0][indices[0].clamp(min=0)]
    scores = query[:, 0] @ chosen.mT * scale
    weights = scores.masked_fill(indices[0, :, None] < 0, float("-inf")).softmax(-1)
    return (weights @ chosen[..., :dim])[:, None]


def ask(probe, modules, shape):
    """Go through the user's door with kernels that give zeros; return what they were asked for, if that is right."""
    (dim, tail, heads), name, asked = shape, "{}+{}".format(*shape), {}
    inputs, calls = example(modules.torch, shape, "cpu", SHORT), []

    def note(key, signature, *args, **kwargs):
        asked[key] = dict(signature.bind(*args, **kwargs).arguments)

        def kernel(first, *_):  # q; of preprocess, out; of postprocess, the buffer
            rows = 0 * first[..., 0].float()
            given = {"bwd": 0 * first, "preprocess": rows, "postprocess": first.bfloat16()}
            return given[key] if key in given else (0 * first[..., : asked[key]["dim"]], rows)

        return kernel

    with contextlib.ExitStack() as stack:
        for module in (modules.forward, modules.backward):
            found = (key for key in KERNELS if hasattr(module, key))
            stand_ins = {key: functools.partial(note, key, getattr(module, key).signature) for key in found}
            stand_ins["_get_cached_kernel"] = lambda *args: args[-1]()
            stack.enter_context(unittest.mock.patch.multiple(module, **stand_ins))
        got, raised = attempt(gradients, modules.torch, modules.dispatcher.fused_sparse_mla_absorbed, inputs)
        found = got and {"out": [*got[0].shape]} | {key: [asked[key][x] for x in KERNELS[key]] for key in asked}
        if shape in ODD:
            probe.check(f"declines.{name}", "control", got is None and not raised, measured=raised or found, unit="")
            query, key, d_out = (x.transpose(0, 1).contiguous() for x in (inputs[0], inputs[1], inputs[3]))
            indices, row = inputs[2][:, :, None].int(), query[..., 0].float()
            calls = [(modules.forward.sparse_mla_fwd_interface, query, key, indices, SCALE, dim)]
            calls += [(modules.backward.sparse_mla_bwd, query, key, None, d_out, indices, row, SCALE, row)]
            errors = [attempt(*call)[1] for call in calls]
            probe.check(f"refuses.{name}", "control", all(errors), measured=errors, unit="raised by the interfaces")
            return {}
    wanted = {"out": [SHORT, 1, heads, dim]} | {key: [dim, tail][: len(KERNELS[key])] for key in KERNELS}
    role = "control" if shape == DEEPSEEK else "defect"
    probe.check(f"reaches.{name}", role, found == wanted, measured=raised or found, unit="dimensions asked for")
    return asked if found == wanted else {}


def build(key, arguments, target, executed):
    """In a process of its own: lower a kernel, or compile it into tilelang's cache. Return its source, and why not."""
    modules = load(executed=executed)
    tilelang, module = modules.tilelang, modules.forward if hasattr(modules.forward, key) else modules.backward
    function, arch = getattr(module, key), tilelang.tvm.target.Target({"kind": "cuda", "arch": target}, host="c")
    if executed:
        return attempt(lambda: function(**arguments).get_kernel_source())
    identity = repr((tilelang.__version__, Path(module.__file__).read_text(), arguments, target)).encode()
    known = Path(tilelang.env.TILELANG_CACHE_DIR, f"source-{hashlib.sha256(identity).hexdigest()}.json")
    if not known.exists():
        configs = {getattr(option, "value", option): value for option, value in (function.pass_configs or {}).items()}
        with tilelang.tvm.transform.PassContext(opt_level=3, config=configs), arch:
            lower = functools.partial(tilelang.lower, target=arch, enable_device_compile=False)
            found = attempt(lambda: lower(function.get_tir(**arguments)).kernel_source)
        known.parent.mkdir(parents=True, exist_ok=True)
        (partial := known.with_suffix(f".{os.getpid()}")).write_text(json.dumps(found))
        partial.replace(known)
    return json.loads(known.read_text())


def judge_builds(probe, torch, asked, target, *, executed):
    """Build what the dispatcher asked for; the control's source has to be the same in both lanes."""
    controls = (DEEPSEEK,) if target == "sm_90a" else ()  # once is enough: only lowering depends on the target
    kernels = (*KERNELS,) if executed else ("bwd", "sparse_mla_fwd")
    tasks = [(shape, key) for shape in (*SHAPES[1:], *controls) if asked[shape] for key in kernels]
    context = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")  # CUDA survives no fork
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        futures = [pool.submit(build, key, asked[shape][key], target, executed) for shape, key in tasks]
    for (shape, key), future in zip(tasks, futures, strict=True):
        (source, reason), name = future.result(), "{}+{}.{}".format(*shape[:2], key)
        role, size = "control" if shape == DEEPSEEK else "defect", len(source or "")
        probe.check(f"builds.{name}", role, bool(source), measured=reason or size, unit="bytes of CUDA")
        if shape == DEEPSEEK and source:
            probe.output(f"source.{name}", torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8))


def judge_runs(probe, torch, modules):
    """Launch the kernels through the user's door: numbers against float64, and the memory of the path that he gets."""
    door = modules.dispatcher.fused_sparse_mla_absorbed
    unfused = importlib.import_module(f"{VARIANT}.dsa")._unfused_absorbed_dsa_fn  # noqa: SLF001 - the path fallen back to

    def compare(name, role, attend, inputs):
        if (got := gradients(torch, attend, inputs)) is None:
            return probe.check(name, role, None, reason="the dispatcher answers None")
        exact = gradients(torch, reference, [x.double() if x.is_floating_point() else x for x in inputs])
        pairs = zip(("out", "dq", "dkv"), got, exact, strict=True)
        errors = {key: float((x.double() - y).norm() / y.norm()) for key, x, y in pairs}
        ok = all(error <= TOLERANCE for error in errors.values())
        probe.check(name, role, ok, measured=errors, tolerance=TOLERANCE, unit="relative error")
        return got

    def peak(attend):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients(torch, attend, long)
        return torch.cuda.max_memory_allocated() - before

    for shape in SHAPES:
        role, inputs = "control" if shape == DEEPSEEK else "defect", example(torch, shape, "cuda", LENGTH)
        compare("right.{}+{}".format(*shape), role, door, inputs)
        compare("unfused.{}+{}".format(*shape), "control", unfused, inputs)
    own = example(torch, DEEPSEEK, "cuda", LENGTH, own=True)  # no row of dKV gets more than two sums: any order is one
    tensors = dict(zip(("out", "dq", "dkv"), compare("own.512+64", "control", door, own), strict=True))
    query, key, indices = own[0].transpose(0, 1), own[1].transpose(0, 1), own[2][:, :, None].int()
    tensors["lse"] = modules.function.SparseMLA.apply(query, key, indices, SCALE)[1]
    for name, tensor in tensors.items():
        probe.output(f"{name}.512+64", tensor)
    long, matrix = example(torch, SHAPES[1], "cuda", LONG), 4 * SHAPES[1][2] * LONG**2  # bytes of [B, H, S, S] in fp32
    mine = peak(lambda *args: unfused(*args) if (out := door(*args)) is None else out)  # what dsa.py gives its user
    theirs = peak(unfused)
    probe.check("peak.64+64", "defect", mine < matrix, measured=mine, tolerance=matrix, unit="bytes")
    probe.say("FIGURE", name="peak_over_unfused", value=mine / theirs, unit="1")
    if mine < min(matrix, theirs):
        probe.say("MEMORY_SAVE_VERIFIED", length=LONG, heads=SHAPES[1][2], fused=mine, unfused=theirs)


def judge(probe, target):
    """Ask the dispatcher; build what it asks for where the target is a GPU, and run it where this host has it."""
    if not re.fullmatch(r"cpu|sm_\d+a?", target):
        raise NotImplementedError(f"no target {target}; name cpu, or an architecture such as sm_90a")
    torch = importlib.import_module("torch")
    here = torch.cuda.is_available() and target != "cpu"
    executed = here and target.rstrip("a") == "sm_{}{}".format(*torch.cuda.get_device_capability())
    modules = load(executed=executed)
    evidence = "executed" if executed else "traced" if target == "cpu" else "compiled"
    probe.say("TARGET", target=target, evidence=evidence, device=torch.cuda.get_device_name() if executed else "none")
    for key in FILES:
        probe.upstream(getattr(modules, key))
    asked = {shape: ask(probe, modules, shape) for shape in (*SHAPES, *ODD)}
    if target != "cpu":
        judge_builds(probe, torch, asked, target, executed=executed)
    if executed:
        judge_runs(probe, torch, modules)


if __name__ == "__main__":
    Probe().run(judge)
