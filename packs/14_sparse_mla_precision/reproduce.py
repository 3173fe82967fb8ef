# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "apache-tvm-ffi==0.1.9",
#   "cloudpickle==3.1.2",
#   "megatron-core==0.19.2",
#   "ml-dtypes==0.6.0",
#   "numpy==2.3.5",
#   "packaging==26.0",
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
"""Megatron's SparseMLA backward rounds P and dP to bf16 before the products that make dKV.

Symptom: in the float32 buffer in which the kernel accumulates dKV, the gradient is several times as far from a float64
reference as it would be with P and dP as the kernel computed them. The bf16 output shows little of it: its own
rounding costs as much again.

Cause: tilelang_sparse_mla_bwd.py copies P and dP, which it has in float32, into the bf16 buffers P_shared_cast and
dP_shared_cast, and only these are operands of dKV = dP^T Q + P^T dO. fix.patch keeps what the rounding cut off in two
more bf16 buffers and adds their products.

Scope: the size of one rounding error, which every flash attention in bf16 has too (REPORT.md has the comparison): a
measured option. The limit is twice the error of a dKV computed in float64 from the same inputs and the same lse and
delta, so from exact P and dP; what such a dKV lacks comes from delta, whose O is bf16. A patch that splits P alone
or dP alone leaves more than that. The output in bf16, and what the error does to a training run, are not judged.

`executed` goes through SparseMLA.apply and autograd on that GPU. `compiled` lowers the backward kernel for the target
and runs the CUDA source so obtained on the CPU: g++ compiles it as it stands behind a header that gives it threads,
shared memory and the warp instructions that it uses. Of these, mma_sync is a model (exact products, summed in float64,
rounded to float32 after every instruction); what is bf16 and what is float32, and every rounding between, is the
kernel's. lse and delta are then the float64 ones, rounded as the forward rounds O.

Two things stand in for upstream's: torch's cast to bf16 for the kernel `postprocess`, which does that and no more, so
that the float32 buffer can be seen; and bare packages for megatron.core and megatron.core.transformer, whose __init__
would import all of Megatron.

Upstream: https://github.com/NVIDIA/Megatron-LM, megatron/core/transformer/experimental_attention_variant/ops; the same
kernel is tilelang's examples/deepseek_v32/sparse_mla_bwd.py. By hand, with g++ and no GPU:

    tar xzf megatron_core-0.19.2.tar.gz
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py" --target sm_90a
    git -C megatron_core-0.19.2 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py" --target sm_90a
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

import functools, importlib, importlib.util, math, os, re, subprocess, unittest.mock

WIDTH, VALUES, SCALE, LOG2E = 576, 512, 576**-0.5, 1 / math.log(2)  # a key's first 512 columns are its value
FACTOR = 2  # of what exact P and dP leave: between 1, and the three or more that one rounded operand leaves
TOLERANCE = {"out": 2**-8, "delta": 2**-8, "dq": 2**-8, "lse": 1e-4}  # rounded to bf16 (2^-9) twice; float32
SIZES = {"executed": (512, 2048, 64, 512), "compiled": (4, 1024, 32, 128)}  # queries, keys, heads, top-k
MACROS = "__global__= __shared__= __align__(n)= __launch_bounds__(...)= CUDART_INF_F=INFINITY make_float2=float2"
MACROS += " make_float4=float4 make_int2=int2 ptx_stmatrix_x2=stmatrix ptx_stmatrix_x4=stmatrix"
INTERPRETER = r"""#include <bits/stdc++.h>
#include <ucontext.h>
using std::max; using std::min; using uchar = unsigned char; using u16 = uint16_t; using u32 = uint32_t;
template <class T> struct Two { T x, y; }; template <class T> struct alignas(16) Four { T x, y, z, w; };
using float2 = Two<float>; using float4 = Four<float>; using int2 = Two<int>; using uint2 = Two<u32>;
using uint4 = Four<u32>; using char2 = Two<signed char>; using ushort2 = Two<u16>;
struct bfloat16_t {  // rounds to nearest, ties to even
  u16 bits; bfloat16_t() = default; operator float() const { return std::bit_cast<float>(u32(bits) << 16); }
  explicit bfloat16_t(float f) { u32 u = std::bit_cast<u32>(f); bits = (u + 0x7fff + (u >> 16 & 1)) >> 16; }
};
using __nv_bfloat162 = Two<bfloat16_t>; float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
__nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
u32 __pack_half2(bfloat16_t x, bfloat16_t y) { return x.bits | u32(y.bits) << 16; }
// A thread is a context of its own; one that waits for others gives way until the last of them has arrived.
struct Group { int arrived, generation; } block, warps[32]; struct Index { int x, y, z; } blockIdx;
struct Thread { ucontext_t here; Group* waits; int since; bool done; char stack[1 << 16]; };
std::vector<Thread> threads; ucontext_t scheduler; int current; std::function<void()> body;
struct { struct { operator int() const { return current; } } x; } threadIdx; alignas(1024) uchar buf_dyn_shmem[1 << 18];
template <class F> void together(Group& group, int size, F last) {
  if (++group.arrived == size) { last(); group.arrived = 0; ++group.generation; return; }
  Thread& me = threads[current]; me.waits = &group; me.since = group.generation; swapcontext(&me.here, &scheduler);
}
template <class F> void in_warp(const void* a, const void* b, F all) {
  static const void* given[32][32][2]; auto lanes = given[current / 32]; lanes[current % 32][0] = a;
  lanes[current % 32][1] = b; together(warps[current / 32], 32, [=] { all(lanes); });
}
void __syncthreads() { together(block, threads.size(), [] {}); }
void enter() { body(); threads[current].done = true; setcontext(&scheduler); }
void run(Index grid, int size, std::function<void()> kernel) {
  body = kernel; threads.resize(size);
  for (int number = 0, left = size; number < grid.x * grid.y * grid.z; ++number, left = size) {
    blockIdx = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    for (Thread& thread : threads) {
      thread.waits = nullptr; thread.done = false; getcontext(&thread.here);
      thread.here.uc_stack = {thread.stack, 0, sizeof thread.stack}; makecontext(&thread.here, enter, 0);
    }
    for (current = 0; left; current = (current + 1) % size) {
      Thread& next = threads[current]; if (next.done || (next.waits && next.waits->generation == next.since)) continue;
      next.waits = nullptr; swapcontext(&scheduler, &next.here); left -= next.done;
    }
  }
}
void AtomicAddx4(float* to, const void* from) { for (int i = 0; i < 4; ++i) to[i] += ((const float*)from)[i]; }
namespace tl { enum class DataType { kBFloat16, kFloat32 };
float2 fmul2(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
template <DataType A, DataType B, DataType C, int M, int N, int K, bool, bool>
void mma_sync(float* c, const u32* a, const u32* b) {
  static_assert(A == B && C == DataType::kFloat32 && M == 16 && N == 8 && K == 16); const void* operands[] = {a, b};
  in_warp(c, operands, [](auto lanes) { double a[16][16], b[16][8];
    for (int lane = 0, group, pair; lane < 32; ++lane) {
      auto operands = (const bfloat16_t**)lanes[lane][1]; group = lane / 4; pair = lane % 4 * 2;
      for (int i = 0; i < 8; ++i) a[group + i / 2 % 2 * 8][pair + i % 2 + i / 4 * 8] = operands[0][i];
      for (int i = 0; i < 4; ++i) b[pair + i % 2 + i / 2 * 8][group] = operands[1][i];
    }
    for (int lane = 0; lane < 32; ++lane) for (int i = 0; i < 4; ++i) {
      float& c = ((float*)lanes[lane][0])[i]; double sum = c;
      for (int k = 0; k < 16; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
      c = sum;
    }
  });
}
template <int COUNT, bool TRANSPOSED, bool STORE> void matrices(const void* shared, const void* local) {
  in_warp(shared, local, [](auto lanes) {
    for (int m = 0; m < COUNT; ++m) for (int lane = 0; lane < 32; ++lane) for (int i = 0; i < 2; ++i) {
      int row = lane / 4, column = lane % 4 * 2 + i; if (TRANSPOSED) std::swap(row, column);
      u16 &there = ((u16*)lanes[m * 8 + row][0])[column], &mine = ((u16*)lanes[lane][1])[m * 2 + i];
      (STORE ? there : mine) = STORE ? mine : there;
    }
  });
}
auto ptx_ldmatrix_x2 = matrices<2, false, false>, ptx_ldmatrix_x2_trans = matrices<2, true, false>;
auto ptx_ldmatrix_x4 = matrices<4, false, false>, ptx_ldmatrix_x4_trans = matrices<4, true, false>;
template <class... U> void stmatrix(void* s, U... u) { u32 l[]{u...}; matrices<sizeof...(u), false, true>(s, l); }
template <int N> void cp_async_gs_conditional(void* a, const void* b, bool c) { c ? memcpy(a, b, N) : memset(a, 0, N); }
}"""


def example(torch, sizes, device):
    """Make bf16 q [1, Sq, H, 576], kv [1, Sk, 1, 576], dO, and int32 indices [1, Sq, 1, topk] of keys before all q."""
    (queries, keys, heads, topk), random = sizes, torch.Generator(device).manual_seed(14)
    normal = functools.partial(torch.randn, generator=random, device=device)
    q, kv, grad = normal(1, queries, heads, WIDTH), normal(1, keys, 1, WIDTH), normal(1, queries, heads, VALUES)
    drawn = torch.rand(queries, keys - queries, generator=random, device=device).topk(topk).indices
    return q.bfloat16(), kv.bfloat16(), grad.bfloat16(), drawn.int()[None, :, None]


def reference(torch, inputs, lse=None, delta=None):
    """Compute out, lse (base 2), delta, dQ and dKV [Sk, 576] in float64; lse and delta exact unless given."""
    (query, keys, up), index = (x[0].double() for x in inputs[:3]), inputs[3][0, :, 0].long()
    key = keys[index, 0]
    scores, inner = query @ key.mT * (SCALE * LOG2E), up @ key[..., :VALUES].mT
    lse = torch.logsumexp(scores / LOG2E, -1) * LOG2E if lse is None else lse[0].double()
    p = torch.exp2(scores - lse[..., None])
    delta = (p * inner).sum(-1) if delta is None else delta[0].double()
    dp = p * (inner - delta[..., None]) * SCALE
    parts = dp.mT @ query
    parts[..., :VALUES] += p.mT @ up
    dkv = torch.zeros_like(keys[:, 0]).index_add_(0, index.flatten(), parts.flatten(0, 1))
    return {"out": p @ key[..., :VALUES], "lse": lse, "delta": delta, "dq": dp @ key, "dkv": dkv}


def interpreted(context, *args, **kwargs):
    """Lower upstream's kernel for the target and compile its CUDA source for the CPU. Return what runs it there."""
    probe, target, tilelang, function = context
    program = function.get_tir(*args, **kwargs)
    options = {tilelang.PassConfigKey(name).value: value for name, value in function.pass_configs.items()}
    arch = tilelang.tvm.target.Target({"kind": "cuda", "arch": target}, host="c")
    identity = repr((tilelang.__version__, options, target, program.script(), MACROS, INTERPRETER)).encode()
    library = Path(tilelang.env.TILELANG_CACHE_DIR, f"cpu-{hashlib.sha256(identity).hexdigest()}.so")
    if not library.exists():
        with tilelang.tvm.transform.PassContext(opt_level=3, config=options), arch:
            lowered = tilelang.lower(program, target=arch, enable_device_compile=False)
        shared = re.search(r'"dyn_shared_memory_buf": (\d+)', lowered.device_mod.script())[1]
        waits = r"^#(include|ifdef|endif).*|tl::cp_async_(commit|wait<\d>)\(\);"  # the copies are done by then
        source = re.sub(waits, "", lowered.kernel_source, flags=re.MULTILINE)
        size, name, parameters = re.search(r"__launch_bounds__\((\d+), \d+\) (\w+)\(([^)]*)\) {", source).groups()
        names = ", ".join(parameter.split()[-1] for parameter in parameters.split(","))
        source += f'extern "C" {{ int shared = {shared}; char names[] = "{names}"; void launch(int x, int y, int z, '
        source += f"{parameters}) {{ run({{x, y, z}}, {size}, [=] {{ {name}({names}); }}); }} }}"
        partial = library.with_suffix(f".{os.getpid()}")
        partial.parent.mkdir(parents=True, exist_ok=True)
        command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *(f"-D{macro}" for macro in MACROS.split())]
        subprocess.run([*command, "-xc++", "-", "-o", partial], input=INTERPRETER + source, text=True, check=True)
        partial.replace(library)
    code, z = ctypes.CDLL(str(library)), int(re.search(r'"blockIdx.z", (\d+)', program.script())[1])
    probe.say("FIGURE", name="shared_memory", value=ctypes.c_int.in_dll(code, "shared").value, unit="bytes per block")

    def launch(*tensors):
        values = dict(zip(("Q", "KV", "dO", "Indices", "Lse", "Delta", "dKV"), tensors, strict=True))
        values["dQ"], rows = tensors[0].new_zeros(tensors[0].shape), tensors[0].shape[1]
        values |= {"batch": 1, "seq_len": rows, "seq_len_kv": tensors[1].shape[1]}
        given = (values[name] for name in ctypes.string_at(code.names).decode().split(", "))
        code.launch(rows, 1, z, *(x if isinstance(x, int) else ctypes.c_void_p(x.data_ptr()) for x in given))
        return values["dQ"]

    return launch


def judge(probe, target):
    """Run the backward, and compare dKV in its float32 buffer with what exact P and dP would leave."""
    import tilelang, torch

    if not target.startswith("sm_"):
        raise NotImplementedError("these are GPU kernels; without a GPU: --target sm_90a")
    for name in ("megatron.core", "megatron.core.transformer"):  # left bare: theirs would import all of Megatron
        sys.modules.setdefault(name, importlib.util.module_from_spec(importlib.util.find_spec(name)))
    importlib.import_module("megatron.core.parallel_state")  # before megatron.core.utils: each imports the other
    folder = "megatron.core.transformer.experimental_attention_variant.ops."
    sparse, backward = (importlib.import_module(folder + x) for x in ("sparse_mla", "tilelang_sparse_mla_bwd"))
    executed = torch.cuda.is_available() and target == "sm_{}{}a".format(*torch.cuda.get_device_capability())
    evidence, gpu = ("executed", torch.cuda.get_device_name()) if executed else ("compiled", "none")
    probe.say("TARGET", target=target, evidence=evidence, device=gpu)
    probe.upstream(backward)
    os.environ["MCORE_DSA_TILELANG_SEQ_BUCKET"] = "1"  # no rows of padding to interpret
    inputs = q, kv, grad, indices = example(torch, SIZES[evidence], "cuda" if executed else "cpu")
    exact, buffers = reference(torch, inputs), []
    replaced = {"postprocess": lambda *_: lambda buffer: buffers.append(buffer[0, :, 0]) or buffer.bfloat16()}
    if not executed:
        replaced["bwd"] = functools.partial(interpreted, (probe, target, tilelang, backward.bwd))
    with unittest.mock.patch.multiple(backward, **replaced):
        if executed:
            leaves = [x.clone().requires_grad_() for x in (q, kv)]
            out, lse = sparse.SparseMLA.apply(*leaves, indices, SCALE)
            delta = sparse.sparse_mla_delta(out.detach(), grad)
            dq, _ = torch.autograd.grad(out, leaves, grad)
        else:
            out, lse = exact["out"].bfloat16()[None], exact["lse"].float()[None]
            delta = (out.float() * grad.float()).sum(-1)
            dq, _ = backward.sparse_mla_bwd(q, kv, None, grad, indices, lse, sm_scale=SCALE, delta=delta)

    def error(found, wanted):
        return float((found.double() - wanted).norm() / wanted.norm())

    made = {"out": out, "lse": lse, "delta": delta, "dq": dq} if executed else {"dq": dq}
    for name, found in made.items():
        measured = float((found[0] - exact[name]).abs().max()) if name == "lse" else error(found[0], exact[name])
        probe.check(name, "control", measured <= TOLERANCE[name], measured=measured, tolerance=TOLERANCE[name])
    least = reference(torch, inputs, lse.detach(), delta)["dkv"]
    for name, start in (("dkv", 0), ("dkv_tail", VALUES)):
        found, wanted = buffers[0][:, start:], exact["dkv"][:, start:]
        measured, floor = error(found, wanted), error(least[:, start:], wanted)
        unit, limit = "relative error in the float32 buffer", FACTOR * floor
        probe.check(name, "defect", measured <= limit, measured=measured, tolerance=limit, unit=unit)
        probe.say("FIGURE", name=f"{name}_exact_p_and_dp", value=floor, unit="relative error")
        probe.say("FIGURE", name=f"{name}_as_bf16", value=error(found.bfloat16(), wanted), unit="relative error")
    probe.output("dq", dq)


if __name__ == "__main__":
    Probe().run(judge)
