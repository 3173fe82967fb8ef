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

import concurrent.futures, contextlib, functools, importlib, importlib.util, multiprocessing, os, re, types, unittest.mock

VARIANT = "megatron.core.transformer.experimental_attention_variant"
DEEPSEEK, ODD = (512, 64, 64), ((96, 32, 16), (64, 48, 64))  # latent dimension, RoPE dimension, heads
SHAPES = (DEEPSEEK, (64, 64, 16), (192, 32, 64))  # the second and the third fall through to the unfused path
KERNELS = {"forward": ("sparse_mla_fwd", "dim", "tail_dim"), "backward": ("bwd", "D", "D_tail")}
KERNELS |= {"preprocess": ("preprocess", "D"), "postprocess": ("postprocess", "D", "D_tail")}
SCALE, TOP_K, LENGTH, LONG = 0.1, 128, 256, 4096
TOLERANCE = 0.01  # relative, Frobenius norm: P, dP and the results are rounded to bf16, 2**-9 each; a wrong row is 0.06


def load(*, executed):
    """Import the real modules, and tilelang first: Megatron swallows what goes wrong there."""
    try:
        importlib.import_module("tilelang")
    except OSError as error:  # a library of its that cannot be loaded
        raise ImportError(str(error)) from error
    for name in () if executed else ("megatron.core", "megatron.core.transformer"):
        sys.modules.setdefault(name, importlib.util.module_from_spec(importlib.util.find_spec(name)))
    importlib.import_module("megatron.core.parallel_state")  # before megatron.core.utils, which imports it in a circle
    names = {"forward": "tilelang_sparse_mla_fwd", "backward": "tilelang_sparse_mla_bwd", "function": "sparse_mla"}
    names |= {"dispatcher": "tilelang_dsa", "utilities": "tilelang_utils"}
    found = {key: importlib.import_module(f"{VARIANT}.ops.{name}") for key, name in names.items()}
    return types.SimpleNamespace(**found)


def builders(modules):
    """Map each kernel to the module that builds it, and the name of the jit function there."""
    return {key: (getattr(modules, "forward" if key == "forward" else "backward"), KERNELS[key][0]) for key in KERNELS}


@contextlib.contextmanager
def recorded(modules):
    """Let the jit functions note what they are asked for, and give kernels that return zeros of the right shapes."""
    asked, kernels = {}, {
        "forward": lambda a: lambda q, kv, indices: (0 * q[..., : a["dim"]], 0 * q[..., 0].float()),
        "backward": lambda a: lambda q, *rest: 0 * q,
        "preprocess": lambda a: lambda out, d_out: 0 * out[..., 0].float(),
        "postprocess": lambda a: lambda d_kv: d_kv.bfloat16(),
    }  # fmt: skip

    def note(key, signature, *args, **kwargs):
        asked[key] = dict(signature.bind(*args, **kwargs).arguments)
        return kernels[key](asked[key])

    with contextlib.ExitStack() as stack:
        for key, (module, name) in builders(modules).items():
            recorder = functools.partial(note, key, getattr(module, name).signature)
            stack.enter_context(unittest.mock.patch.object(module, name, recorder))
            uncached = functools.partial(lambda _cache, _lock, _key, build: build())
            stack.enter_context(unittest.mock.patch.object(module, "_get_cached_kernel", uncached))
        yield asked


def example(torch, shape, device, length=4, own=False):
    """Make query, key [S, B, heads, dims], top-k indices [B, S, K] (of the past, or of rows of each query's own), dO."""
    dim, tail, heads = shape
    random, keys = torch.Generator(device).manual_seed(7), length * TOP_K if own else length
    query, key, d_out = (
        torch.randn(*sizes, generator=random, device=device).bfloat16()
        for sizes in ((length, 1, heads, dim + tail), (keys, 1, 1, dim + tail), (length, 1, heads, dim))
    )
    if own:
        return query, key, torch.randperm(keys, generator=random, device=device).view(1, length, TOP_K), d_out
    weights = torch.rand(length, length, generator=random, device=device).tril()
    weights = torch.nn.functional.pad(weights, (0, max(0, TOP_K - length))).topk(TOP_K)
    return query, key, weights.indices.masked_fill(weights.values == 0, -1)[None], d_out


def gradients(torch, attend, query, key, indices, d_out):
    """Return out, dQ and dKV through the user's door or another one; None where it answers None."""
    query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
    out = attend(query, key, indices, SCALE, d_out.shape[-1])
    return None if out is None else (out.detach(), *torch.autograd.grad(out, (query, key), d_out))


def reference(torch, query, key, indices, scale, dim):
    """Compute the attention over the chosen rows in float64."""
    chosen = key[:, 0, 0].double()[indices[0].clamp(min=0)]
    scores = torch.einsum("shw,skw->shk", query[:, 0].double(), chosen) * scale
    weights = scores.masked_fill(indices[0, :, None] < 0, -torch.inf).softmax(-1)
    return (weights @ chosen[..., :dim])[:, None].type_as(query.double())


def refuses(torch, modules, shape):
    """Call both interfaces directly; return what each raises."""
    query, key, indices, d_out = (x.transpose(0, 1).contiguous() for x in example(torch, shape, "cpu"))
    indices, row = indices.transpose(0, 1)[:, :, None].int().contiguous(), 0 * query[..., 0].float()
    found = []
    for call in (
        lambda: modules.forward.sparse_mla_fwd_interface(query, key, indices, SCALE, d_v=shape[0]),
        lambda: modules.backward.sparse_mla_bwd(query, key, None, d_out, indices, row, SCALE, delta=row),
    ):
        try:
            found.append(call() and "returns")
        except Exception as error:
            found.append(type(error).__name__)
    return found


def build(key, arguments, target, executed):
    """In a process of its own: lower a kernel, or compile it into tilelang's cache. Return its CUDA source, and why not."""
    modules = load(executed=executed)
    module, name = builders(modules)[key]
    function, tilelang = getattr(module, name), sys.modules["tilelang"]
    identity = repr((tilelang.__version__, Path(module.__file__).read_text(), arguments, target, executed)).encode()
    known = Path(tilelang.env.TILELANG_CACHE_DIR, f"source-{hashlib.sha256(identity).hexdigest()}.json")
    if not executed and known.exists():
        return json.loads(known.read_text())
    arch = tilelang.tvm.target.Target({"kind": "cuda", "arch": target}, host="c")
    configs = {getattr(option, "value", option): value for option, value in (function.pass_configs or {}).items()}
    try:
        if executed:
            return function(**arguments).get_kernel_source(), ""
        with tilelang.tvm.transform.PassContext(opt_level=3, config=configs), arch:
            program = function.get_tir(**arguments)
            found = tilelang.lower(program, target=arch, enable_device_compile=False).kernel_source, ""
    except Exception as error:
        found = "", f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    known.parent.mkdir(parents=True, exist_ok=True)
    partial = known.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(found))
    partial.replace(known)
    return found


def judge_runs(probe, torch, modules):
    """Launch the kernels through the user's door: numbers against float64, and the memory of the path that he gets."""
    door = modules.dispatcher.fused_sparse_mla_absorbed
    unfused = importlib.import_module(f"{VARIANT}.dsa")._unfused_absorbed_dsa_fn

    def given(*inputs):  # as dsa.py does: what the fused backend declines goes the unfused way
        return unfused(*inputs) if (out := door(*inputs)) is None else out

    def compare(name, role, attend, inputs):
        if (got := gradients(torch, attend, *inputs)) is None:
            return probe.check(name, role, None, reason="the dispatcher answers None")
        exact = gradients(torch, functools.partial(reference, torch), *(x.double() for x in inputs[:2]), *inputs[2:])
        pairs = zip(("out", "dq", "dkv"), got, exact, strict=True)
        errors = {key: float((x.double() - y).norm() / y.norm()) for key, x, y in pairs}
        ok = all(error <= TOLERANCE for error in errors.values())
        probe.check(name, role, ok, measured=errors, tolerance=TOLERANCE, unit="relative error")
        return got

    def peak(attend):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients(torch, attend, *long)
        return torch.cuda.max_memory_allocated() - before

    for shape in SHAPES:
        role = "control" if shape == DEEPSEEK else "defect"
        compare("right.{}+{}".format(*shape), role, door, inputs := example(torch, shape, "cuda", LENGTH))
        compare("unfused.{}+{}".format(*shape), "control", unfused, inputs)
    inputs = example(torch, DEEPSEEK, "cuda", LENGTH)
    runs = torch.stack([gradients(torch, door, *inputs)[2].double() for _ in range(5)])
    spread = float((runs - runs[0]).flatten(1).norm(dim=1).max() / runs[0].norm())
    probe.say("FIGURE", name="dkv_spread", value=spread, unit="relative difference of reruns: atomics")
    own = example(torch, DEEPSEEK, "cuda", LENGTH, own=True)  # no row of dKV gets more than two sums: any order is one
    tensors = dict(zip(("out", "dq", "dkv"), compare("own.512+64", "control", door, own), strict=True))
    query, key, indices = own[0].transpose(0, 1), own[1].transpose(0, 1), own[2][:, :, None].int()
    tensors["lse"] = modules.function.SparseMLA.apply(query, key, indices, SCALE)[1]
    for name, tensor in tensors.items():
        probe.output(f"{name}.512+64", tensor)
    long, bound = example(torch, shape := SHAPES[1], "cuda", LONG), 4 * shape[2] * LONG**2
    probe.check("peak.64+64", "defect", peak(given) < bound, measured=peak(given), tolerance=bound, unit="bytes")
    if door(*long[:3], SCALE, shape[0]) is not None and peak(door) < min(bound, peak(unfused)):
        probe.say("FIGURE", name="peak_fused_over_unfused", value=peak(door) / peak(unfused), unit="1")
        probe.say("MEMORY_SAVE_VERIFIED", length=LONG, heads=shape[2], fused=peak(door), unfused=peak(unfused))


def judge(probe, target):
    """Ask the dispatcher; lower or compile what it asks for where the target is a GPU, and run it where it is here."""
    if not re.fullmatch(r"cpu|sm_\d+a?", target):
        raise NotImplementedError(f"no target {target}; name cpu, or an architecture such as sm_90a")
    torch, executed = importlib.import_module("torch"), False
    if target != "cpu" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        executed = target == "sm_{}{}".format(*capability) + "a" * (capability >= (9, 0))
    modules = load(executed=executed)
    evidence = "executed" if executed else "traced" if target == "cpu" else "compiled"
    probe.say("TARGET", target=target, evidence=evidence, device=torch.cuda.get_device_name() if executed else "none")
    for module in vars(modules).values():
        probe.upstream(module)
    tasks = {}
    for dim, tail, heads in (*SHAPES, *ODD):
        name, inputs = f"{dim}+{tail}", example(torch, (dim, tail, heads), "cpu")
        with recorded(modules) as asked:
            try:
                got = gradients(torch, modules.dispatcher.fused_sparse_mla_absorbed, *inputs)
                found = got and {"out": [*got[0].shape]}
            except Exception as error:
                found = {"raises": f"{type(error).__name__}: {error}"}
            found = found and found | {key: [asked[key][x] for x in KERNELS[key][1:]] for key in asked}
            if (dim, tail, heads) in ODD:
                probe.check(f"declines.{name}", "control", not found and not asked, measured=found, unit="heads")
                raised = refuses(torch, modules, (dim, tail, heads))
                ok = all(each.endswith("Error") for each in raised)
                probe.check(f"refuses.{name}", "control", ok, measured=raised, unit="raised by the interfaces")
                continue
        wanted = {key: [dim, tail][: len(KERNELS[key]) - 1] for key in KERNELS} | {"out": [4, 1, heads, dim]}
        role = "control" if (dim, tail, heads) == DEEPSEEK else "defect"
        probe.check(f"reaches.{name}", role, found == wanted, measured=found, unit="dimensions asked for")
        for key in (KERNELS if executed else ("backward", "forward")) if target != "cpu" else ():
            if found == wanted:
                tasks[role, key, name] = asked[key]
            else:
                probe.check(f"builds.{name}.{key}", role, None, reason="the dispatcher asks for no such kernel")
    if not tasks:
        return
    context = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")  # CUDA survives no fork
    with concurrent.futures.ProcessPoolExecutor(min(len(tasks), os.cpu_count()), mp_context=context) as pool:
        built = {task: pool.submit(build, task[1], tasks[task], target, executed) for task in tasks}
    for (role, key, name), future in built.items():
        source, reason = future.result()
        probe.check(f"builds.{name}.{key}", role, bool(source), measured=reason or len(source), unit="bytes of CUDA")
        if role == "control" and source:
            probe.output(f"source.{name}.{key}", torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8))
    if executed:
        judge_runs(probe, torch, modules)


if __name__ == "__main__":
    Probe().run(judge)
