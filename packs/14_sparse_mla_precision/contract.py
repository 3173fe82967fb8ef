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
#   "torch==2.13.0",
#   "torch-c-dlpack-ext==0.1.5",
#   "tqdm==4.70.1",
#   "triton==3.6.0",
#   "typing-extensions==4.16.0",
#   "z3-solver==4.15.4.0",
# ]
# ///
"""Megatron's SparseMLA backward rounds P and dP to bf16 before the products that make dKV.

Symptom: the bf16 dKV that a caller gets is not the exact gradient rounded once; its error against float64 is larger.

Cause: tilelang_sparse_mla_bwd.py copies P and dP, which it has in float32, into the bf16 buffers P_shared_cast and
dP_shared_cast, and only these are operands of dKV = dP^T Q + P^T dO. fix.patch keeps what the rounding cut off in two
more bf16 buffers and adds their products; ask.patch does so where MCORE_DSA_TILELANG_BWD_SPLIT_P=1, which is set here
and which nothing else reads.

Scope: the size of one rounding error, which every flash attention in bf16 has too (REPORT.md has the comparison): a
measured option. Nothing is said about a training run, and nothing about time.

How it is judged: by the distance of the returned dKV from the bf16 rounding of a float64 dKV, in units of that dKV's
norm. Where P and dP keep both parts hardly an element differs; with one of them rounded about a third do. The float64
dKV has the exact lse and either the exact delta or that of the output which the caller got (O is bf16; what dKV loses
by that is not the subject). The limit is a fifth of what the release has, and several times what float32 sums leave.

The contract of sparse_mla_bwd, of SparseMLA.apply and of fused_sparse_mla_absorbed, the doors to it:

    q [B, S, H, 576], kv [B, Sk, G, 576], dO [B, S, H, 512] bf16; indices [B, S, G, topk] int32, -1 for none; without B
        too; any strides in autograd's doors. H / G a power of two, 16 at least (G = 1 alone: fewer are padded)
    scale: a float, or None for 576^-0.5      delta: used where it is given, else made from the output; a ValueError
        where there is neither
    MCORE_DSA_TILELANG_SEQ_BUCKET, _TOPK_BUCKET: S, Sk and topk are padded to multiples; _BWD_MAX_BLOCK_H: 16, 32
    returns dq, dkv: bf16, of the shapes of q and kv, contiguous, and of a batch of two without the padding's memory; 0
        for queries without keys and for keys that no query chose; a dP that is no finite number reaches both; dq is
        that of dP rounded to the nearest bf16, as in the release
    what it is given is not written to, not even with the same values; MCORE_DSA_TILELANG_KERNEL_CACHE_MAX kernels of
        a kind are kept at most, and twelve decimals of a scale tell them apart

FACTORS are these, CASES a pairwise covering set. `executed` runs all of them through autograd, nothing replaced: the
reported example first. DIRECT are calls of sparse_mla_bwd with every argument by position: a large dO, under autocast,
two scales close to each other, 128 RoPE columns; what it is given stays as it is, nothing waits for the device, and no
memory is kept. `compiled` lowers the backward and postprocess kernels for the target and runs their CUDA source on the
CPU: g++ compiles it as it stands behind a header that gives it threads, shared memory and the warp instructions that it
uses. Of these, mma_sync is a model (exact products, summed in float64, rounded to float32 after every instruction);
what is bf16 and what is float32, and every rounding between, is the kernel's. It goes through sparse_mla_bwd with the
float64 lse and the delta of the float64 output rounded to bf16, by position: a smaller example, and the first of CASES,
which has the same kernel. PADDED, 24 and 8 heads with an output (NaN) besides the delta, is judged by both. Builders
that build nothing stand in where kernels are counted and where a ValueError is wanted.

Bare packages stand in for megatron.core and megatron.core.transformer, whose __init__ would import all of Megatron.

Upstream: https://github.com/NVIDIA/Megatron-LM, megatron/core/transformer/experimental_attention_variant/ops; the same
kernel is tilelang's examples/deepseek_v32/sparse_mla_bwd.py. By hand, with g++ and no GPU:

    tar xzf megatron_core-0.19.2.tar.gz
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py" --target sm_90a
    git -C megatron_core-0.19.2 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=megatron_core-0.19.2 python "$PACK/reproduce.py" --target sm_90a
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

import concurrent.futures, functools, gc, importlib, importlib.util, itertools, math, multiprocessing, operator
import re, subprocess, types, typing, unittest.mock, warnings, weakref

WIDTH, VALUES, LOG2E = 576, 512, 1 / math.log(2)  # a key's first 512 columns are its value, the others are RoPE's
LIMIT = 2**-11  # the release has five times as much; float32 sums of both parts leave a third
TOLERANCE = {"out": 2**-8, "dq": 2**-8, "lse": 1e-4}  # rounded to bf16 (2^-9) twice; float32
ROUNDED = 3 * 2**-11  # of dQ from that of dP rounded to nearest: float32 leaves a sixth, another rounding 1.6 times it
SWITCH = {"MCORE_DSA_TILELANG_BWD_SPLIT_P": "1"}  # ask.patch's; fix.patch needs none
BUCKET, BLOCK = "MCORE_DSA_TILELANG_SEQ_BUCKET", "MCORE_DSA_TILELANG_BWD_MAX_BLOCK_H"
FACTORS = {
    "heads": (16, 64, 128),  # of a key group; with door "fused" 16 means 12, which it pads
    "groups": (1, 2),
    "topk": (144, 512),
    "divisor": (None, 11),  # the scale is its inverse; None: not given
    "block": (None, "16"),  # the environment's; None: not set
    "batch": (1, 2),
    "bucket": (None, "3"),  # the environment's; None: not set
    "keys": (700, 512),
    "masked": (False, True),  # a third of the indices and all of the first query are -1
    "gradient": ("normal", "tiny"),  # tiny: 2^-30 of it
    "layout": ("contiguous", "strided", "unbatched"),
    "frozen": ("nothing", "q"),
    "backwards": (1, 2),  # through the same graph
    "door": ("apply", "fused", "function"),
}
EXCLUDED = [
    ("layout", "unbatched", "batch", 2),  # no dimension for it
    ("layout", "unbatched", "door", "fused"),  # takes four dimensions
    ("groups", 2, "door", "fused"),  # declines
    ("topk", 144, "door", "fused"),  # declines what is no multiple of 64
    ("layout", "strided", "door", "function"),  # asserts contiguous tensors
    ("frozen", "q", "door", "function"),  # is not differentiated
    ("backwards", 2, "door", "function"),  # has no graph
]
Case = typing.NamedTuple("Case", [(name, object) for name in FACTORS])
CASES = [
    (64, 2, 144, 11, None, 2, "3", 700, True, "tiny", "contiguous", "nothing", 1, "function"),
    (64, 2, 144, 11, None, 1, None, 512, False, "normal", "unbatched", "nothing", 2, "apply"),
    (16, 1, 512, None, None, 2, "3", 512, True, "normal", "contiguous", "nothing", 2, "fused"),
    (16, 1, 512, None, None, 2, "3", 700, True, "tiny", "strided", "nothing", 2, "apply"),
    (16, 2, 512, 11, "16", 2, None, 512, False, "tiny", "contiguous", "nothing", 2, "apply"),
    (128, 1, 512, 11, None, 2, "3", 512, True, "normal", "contiguous", "nothing", 1, "function"),
    (128, 2, 144, None, "16", 2, None, 700, False, "normal", "strided", "q", 1, "apply"),
    (64, 1, 512, None, "16", 1, None, 512, True, "normal", "unbatched", "nothing", 1, "function"),
    (64, 1, 512, None, "16", 1, None, 700, False, "normal", "strided", "q", 2, "fused"),
    (16, 1, 144, 11, "16", 1, "3", 512, True, "tiny", "unbatched", "q", 1, "apply"),
    (16, 2, 512, 11, "16", 2, "3", 512, False, "tiny", "contiguous", "nothing", 1, "function"),
    (128, 1, 512, 11, None, 1, "3", 512, False, "tiny", "strided", "nothing", 1, "fused"),
    (128, 1, 512, 11, None, 1, "3", 700, False, "tiny", "unbatched", "q", 2, "apply"),
    (128, 2, 144, None, "16", 1, None, 700, True, "normal", "contiguous", "q", 2, "apply"),
]
LEADING = {  # queries, and the reported example: heads 64, top-k 512; a CPU gets the kernel of the first of CASES
    "executed": (512, Case(64, 1, 512, 24, None, 1, None, 2048, False, "normal", "contiguous", "nothing", 1, "apply")),
    "compiled": (2, Case(64, 2, 144, 11, None, 1, "2", 1024, False, "normal", "contiguous", "nothing", 1, "function")),
}
QUERIES = {"executed": 70, "compiled": 2}  # of the other cases
ROWS = 256  # queries of DIRECT: the default bucket, so that nothing is padded, and what is read is the caller's
DIRECT = {  # what differs from the reported example, with 512 keys; columns
    "direct": ({}, WIDTH),
    "large": ({"gradient": "large"}, WIDTH),
    "autocast": ({"door": "autocast"}, WIDTH),
    "close_scale": ({"divisor": 23}, WIDTH),  # the example's is 24
    "tail_128": ({}, VALUES + 128),
}
LATER = "close_scale", "tail_128"  # these have kernels of their own
PADDED = {  # heads that fill no block, judged by both evidences: two queries; 24 heads fill the buckets, 8 do not
    f"heads_{heads}": Case(heads, 1, 64, 24, None, 1, bucket, 128, False, "normal", "contiguous", "nothing", 1, "both")
    for heads, bucket in ((24, "2"), (8, "3"))
}
CACHE, KERNELS = "MCORE_DSA_TILELANG_KERNEL_CACHE_MAX", 32  # read at import; more than the cases have
INTERPRETED = "on a GPU only: minutes of interpreting"
ARGUMENTS = "Q", "KV", "dO", "Indices", "Lse", "Delta"  # of sparse_mla_bwd and of its kernel
KEPT = 2**16  # bytes that a call may keep; a float32 dKV of its 1024 keys has 36 times as many
MACROS = "__global__= __shared__= __align__(n)= __launch_bounds__(...)= CUDART_INF_F=INFINITY make_float2=float2"
MACROS += " __pack_nv_bfloat162=__pack_half2 make_uint4=uint4"
MACROS += " make_float4=float4 make_int2=int2 ptx_stmatrix_x2=stmatrix ptx_stmatrix_x4=stmatrix"
INTERPRETER = r"""#include <algorithm>
#include <bit>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>
#include <ucontext.h>
using std::max; using std::min; using uchar = unsigned char; using u16 = uint16_t; using u32 = uint32_t;
template <class T> struct Two { T x, y; }; template <class T> struct alignas(16) Four { T x, y, z, w; };
using float2 = Two<float>; using float4 = Four<float>; using int2 = Two<int>; using uint2 = Two<u32>;
using uint4 = Four<u32>; using ulonglong4 = Four<uint64_t>; using char2 = Two<signed char>; using ushort2 = Two<u16>;
struct bfloat16_t {  // rounds to nearest, ties to even
  u16 bits; bfloat16_t() = default; operator float() const { return std::bit_cast<float>(u32(bits) << 16); }
  explicit bfloat16_t(float f) {
    u32 u = std::bit_cast<u32>(f); bits = f == f ? (u + 0x7fff + (u >> 16 & 1)) >> 16 : 0x7fff;
  }
};
using __nv_bfloat162 = Two<bfloat16_t>; float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
__nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
u32 __pack_half2(bfloat16_t x, bfloat16_t y) { return x.bits | u32(y.bits) << 16; }
// A thread is a context of its own; one that waits for others gives way until the last of them has arrived.
struct Group { int arrived, generation; } block, warps[32]; struct Index { int x, y, z; } blockIdx;
struct Thread { ucontext_t first; jmp_buf here; Group* waits; int since; bool begun, done; char stack[1 << 16]; };
std::vector<Thread> threads; jmp_buf scheduler; int current; std::function<void()> body;
struct { struct { operator int() const { return current; } } x; } threadIdx; alignas(1024) uchar buf_dyn_shmem[1 << 18];
template <class F> void together(Group& group, int size, F last) {
  if (++group.arrived == size) { last(); group.arrived = 0; ++group.generation; return; }
  Thread& me = threads[current]; me.waits = &group; me.since = group.generation;
  if (!_setjmp(me.here)) _longjmp(scheduler, 1);  // swapcontext would make a system call for each switch
}
template <class F> void in_warp(const void* a, const void* b, F all) {
  static const void* given[32][32][2]; auto lanes = given[current / 32]; lanes[current % 32][0] = a;
  lanes[current % 32][1] = b; together(warps[current / 32], 32, [=] { all(lanes); });
}
void __syncthreads() { together(block, threads.size(), [] {}); }
void enter() { body(); threads[current].done = true; _longjmp(scheduler, 1); }
void resume(Thread& next) {
  if (_setjmp(scheduler)) return; else if (next.begun) _longjmp(next.here, 1);
  next.begun = true; setcontext(&next.first);
}
void run(Index grid, int size, std::function<void()> kernel) {
  body = kernel; threads.resize(size);
  for (int number = 0, left = size; number < grid.x * grid.y * grid.z; ++number, left = size) {
    blockIdx = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    for (Thread& thread : threads) {
      thread.waits = nullptr; thread.begun = thread.done = false; getcontext(&thread.first);
      thread.first.uc_stack = {thread.stack, 0, sizeof thread.stack}; makecontext(&thread.first, enter, 0);
    }
    for (current = 0; left; current = (current + 1) % size) {
      Thread& next = threads[current]; if (next.done || (next.waits && next.waits->generation == next.since)) continue;
      next.waits = nullptr; resume(next); left -= next.done;
    }
  }
}
void AtomicAddx4(float* to, const void* from) { for (int i = 0; i < 4; ++i) to[i] += ((const float*)from)[i]; }
namespace tl { enum class DataType { kBFloat16, kFloat32 };
ulonglong4 load_global_256(const ulonglong4* from) { return *from; }
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


class World:
    """What the checks run in: torch, tilelang, upstream's modules, the target, and where it is."""

    def __init__(self, **fields):
        vars(self).update(fields)


def scale_of(case):
    """Return the scale that the case gives to upstream, None where it gives none."""
    return case.divisor and 1 / case.divisor


def example(torch, case, queries, device, width=WIDTH):
    """Make bf16 q [B, S, H, width], kv [B, Sk, G, width], dO [B, S, H, 512], and int32 indices [B, S, G, topk]."""
    random = torch.Generator(device).manual_seed(14)
    normal = functools.partial(torch.randn, generator=random, device=device)
    uniform = functools.partial(torch.rand, generator=random, device=device)
    heads = 12 if (case.heads, case.door) == (16, "fused") else case.heads * case.groups
    q, kv = normal(case.batch, queries, heads, width), normal(case.batch, case.keys, case.groups, width)
    grad = normal(case.batch, queries, heads, VALUES) * {"normal": 1, "tiny": 2**-30, "large": 2**14}[case.gradient]
    index = uniform(case.batch, queries, case.groups, case.keys).topk(case.topk).indices.int()
    if case.masked:
        index[uniform(index.shape) < 1 / 3] = -1
        index[:, 0] = -1
    return types.SimpleNamespace(q=q.bfloat16(), kv=kv.bfloat16(), grad=grad.bfloat16(), index=index)


def reference(torch, given, scale, delta=None):
    """Compute out, lse (base 2), delta, dq and dkv in float64, shaped as upstream's; delta is exact unless given."""
    (batch, queries, heads, _), groups = given.q.shape, given.kv.shape[2]
    double = functools.partial(torch.zeros, dtype=torch.float64, device=given.q.device)
    made = types.SimpleNamespace(out=double(given.grad.shape), dq=double(given.q.shape), dkv=double(given.kv.shape))
    made.lse, made.delta, made.dq_of_rounded = (
        double(given.q.shape[:3]),
        double(given.q.shape[:3]),
        double(given.q.shape),
    )
    for b, g, start in itertools.product(range(batch), range(groups), range(0, queries, 16)):
        part = b, slice(start, start + 16), slice(g * heads // groups, (g + 1) * heads // groups)
        index = given.index[b, part[1], g].long()
        chosen, key = index >= 0, given.kv[b, :, g].double()[index.clamp_min(0)]
        query, up = given.q[part].double(), given.grad[part].double()
        scores = (query @ key.mT * (scale * LOG2E)).masked_fill(~chosen[:, None], -math.inf)
        inner, some = up @ key[..., :VALUES].mT, chosen.any(-1)[:, None]
        lse = torch.where(some, torch.logsumexp(scores / LOG2E, -1) * LOG2E, 0)
        p = torch.exp2(scores - lse[..., None])
        made.lse[part], made.delta[part] = lse, (p * inner).sum(-1) if delta is None else delta[part]
        dp = p * (inner - made.delta[part][..., None]) * scale
        made.out[part], made.dq[part] = p @ key[..., :VALUES], dp @ key
        made.dq_of_rounded[part] = dp.bfloat16().double() @ key
        products = dp.mT @ query
        products[..., :VALUES] += p.mT @ up
        products *= chosen[..., None]
        made.dkv[b, :, g].index_add_(0, index.clamp_min(0).flatten(), products.flatten(0, 1))
    return made


def source_of(tilelang, target, function, *args, **kwargs):
    """Lower upstream's kernel for the target. Return its program, CUDA source and bytes of shared memory."""
    program = function.get_tir(*args, **kwargs)
    options = {tilelang.PassConfigKey(name).value: value for name, value in (function.pass_configs or {}).items()}
    arch = tilelang.tvm.target.Target({"kind": "cuda", "arch": target}, host="c")
    identity = repr((tilelang.__version__, options, target, program.script(), MACROS, INTERPRETER)).encode()
    library = Path(tilelang.env.TILELANG_CACHE_DIR, f"cpu-{hashlib.sha256(identity).hexdigest()}.so")
    if not library.exists():
        with tilelang.tvm.transform.PassContext(opt_level=3, config=options), arch:
            lowered = tilelang.lower(program, target=arch, enable_device_compile=False)
        shared = re.search(r'"dyn_shared_memory_buf": (\d+)', lowered.device_mod.script())
        compile_for_cpu(lowered.kernel_source, int(shared[1]) if shared else 0, library)
    return program, library


def compile_for_cpu(source, shared, library):
    """Make a library of a kernel's CUDA source, with `launch`, the names of its parameters and its shared memory."""
    waits = r"^#(include|ifdef|endif).*|tl::cp_async_(commit|wait<\d>)\(\);"  # the copies are done by then
    source = re.sub(waits, "", source, flags=re.MULTILINE)
    size, name, parameters = re.search(r"__launch_bounds__\((\d+), \d+\) (\w+)\(([^)]*)\) {", source).groups()
    names = ", ".join(parameter.split()[-1] for parameter in parameters.split(","))
    source += f'extern "C" {{ int shared = {shared}; char names[] = "{names}"; void launch(int x, int y, int z, '
    source += f"{parameters}) {{ run({{x, y, z}}, {size}, [=] {{ {name}({names}); }}); }} }}"
    partial = library.with_suffix(f".{os.getpid()}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    options = ["-std=c++20", "-O1", "-w", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]  # fortified, longjmp refuses
    command = ["g++", *options, *(f"-D{macro}" for macro in MACROS.split()), "-xc++", "-", "-o", partial]
    ended = subprocess.run(command, input=INTERPRETER + source, text=True, capture_output=True, check=False)
    if ended.returncode:  # no verdict on the kernel
        raise OSError(f"the header for the CPU lacks something that this kernel uses:\n{ended.stderr[:2000]}")
    partial.replace(library)


def interpreted(world, function, inputs, output, *args, **kwargs):
    """Stand in for a builder of upstream's: build what runs its kernel on the CPU and returns `output`."""
    program, library = source_of(world.tilelang, world.target, function, *args, **kwargs)
    code, script = ctypes.CDLL(str(library)), program.script()
    world.shared.append(ctypes.c_int.in_dll(code, "shared").value)
    grid = [re.search(rf'"blockIdx.{axis}", (.*)\)$', script, re.MULTILINE)[1] for axis in "xyz"]

    def launch(*tensors):
        values = dict(zip(inputs, tensors, strict=True))
        like = values["Q" if output == "dQ" else "dKV"]
        made = values[output] = like.new_zeros(like.shape, dtype=world.torch.bfloat16)
        sizes = {"batch": like.shape[0], "seq_len": like.shape[1], "seq_len_kv": values["dKV"].shape[1]}
        blocks = (eval(extent, {"T": None}, sizes) for extent in grid)  # noqa: S307 - tilelang's own arithmetic
        given = ({**values, **sizes}[name] for name in ctypes.string_at(code.names).decode().split(", "))
        code.launch(*blocks, *(x if isinstance(x, int) else ctypes.c_void_p(x.data_ptr()) for x in given))
        return made

    return launch


@contextlib.contextmanager
def environment(case):
    """Set the environment that upstream reads as the case wants it, and nothing else of it."""
    with unittest.mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("MCORE_DSA_TILELANG_")]:
            del os.environ[name]
        os.environ.update(SWITCH)
        os.environ.update({name: value for name, value in ((BUCKET, case.bucket), (BLOCK, case.block)) if value})
        yield


@contextlib.contextmanager
def interpreter(world):
    """Run what is called within on the CPU where there is no GPU; delta is then made by PyTorch."""
    names = (*ARGUMENTS, "dKV")
    builders = {"bwd": (names, "dQ"), "postprocess": (("dKV",), "dKV_out")}
    builders = {
        name: functools.partial(interpreted, world, getattr(world.backward, name), *rest)
        for name, rest in builders.items()
    }
    builders["preprocess"] = lambda *_: lambda out, grad: (out.float() * grad.float()).sum(-1)
    with contextlib.nullcontext() if world.executed else unittest.mock.patch.multiple(world.backward, **builders):
        yield


def on_cpu(world, case, given, exact):
    """Run the backward kernels on the CPU, with what float64 would have given them. Return out, no lse, dq, dkv."""
    with interpreter(world):
        return direct(world, case, given, exact)


def arguments(case, given, exact):
    """Return the six tensors that sparse_mla_bwd reads, lse and delta by float64: that of the output in bf16."""
    delta = (exact.out.bfloat16().float() * given.grad.float()).sum(-1)
    tensors = given.q, given.kv, given.grad, given.index, exact.lse.float(), delta
    return [x[0] if case.layout == "unbatched" else x for x in tensors]


def called(world, case, tensors):
    """Call sparse_mla_bwd with every argument by position. The delta counts, whether there is an output or none."""
    q, kv, grad, index, lse, delta = tensors
    out = world.torch.full_like(grad, math.nan) if case.door == "both" else None
    under = world.torch.autocast("cuda", world.torch.bfloat16) if case.door == "autocast" else contextlib.nullcontext()
    with under:
        return world.backward.sparse_mla_bwd(q, kv, out, grad, index, lse, scale_of(case), delta)


def direct(world, case, given, exact):
    """Call sparse_mla_bwd as such; note which of its arguments are not what they were. Return out, no lse, dq, dkv."""
    tensors = arguments(case, given, exact)
    with watched(world, dict(zip(ARGUMENTS, tensors, strict=True))) as given.altered:
        dq, dkv = called(world, case, tensors)
    return exact.out.bfloat16(), None, dq, dkv


@contextlib.contextmanager
def watched(world, tensors):
    """Yield a list that gets the names of those tensors that are other ones afterwards, or were written to."""
    version = operator.attrgetter("_version")  # autograd refuses a saved tensor of another one
    altered, before = [], {name: (x.clone(), version(x)) for name, x in tensors.items()}
    yield altered
    for name, (values, first) in before.items():
        if version(tensors[name]) != first or not world.torch.equal(tensors[name], values):
            altered.append(name)


def on_gpu(world, case, given, exact):
    """Go through the case's door, and autograd where it has that. Return out, lse (None from "fused"), dq, dkv."""
    torch, scale = world.torch, scale_of(case)
    if case.door in ("direct", "autocast", "both"):
        return direct(world, case, given, exact)
    laid = {"contiguous": lambda x: x, "strided": lambda x: x.mT.contiguous().mT, "unbatched": lambda x: x[0]}
    q, kv, grad, index = map(laid[case.layout], (given.q, given.kv, given.grad, given.index))
    if case.door == "function":
        out, lse = world.sparse.SparseMLA.apply(q, kv, index, scale)
        return out, lse, *world.backward.sparse_mla_bwd(q, kv, out, grad, index, lse, sm_scale=scale)
    leaves = [x.clone().requires_grad_() for x in (q, kv)[case.frozen == "q" :]]
    q = leaves[0] if case.frozen == "nothing" else q
    if case.door == "apply":
        out, lse = world.sparse.SparseMLA.apply(q, leaves[-1], index, scale)
    else:  # sequence first
        turned = q.transpose(0, 1), leaves[-1].transpose(0, 1), index[:, :, 0]
        out, lse = world.fused.fused_sparse_mla_absorbed(*turned, scale, VALUES).transpose(0, 1), None
    for _ in range(case.backwards):
        found = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    return out.detach(), lse, found[0] if len(found) == 2 else None, found[-1]


@functools.cache
def result(world, case, queries, width=WIDTH):
    """Run a case once. Return what upstream made, what is exact, and dKV with the delta of the output that it made."""
    given = example(world.torch, case, queries, world.device, width)
    scale = scale_of(case) or WIDTH**-0.5
    exact = reference(world.torch, given, scale)
    with environment(case), watched(world, dict(vars(given))) as altered:
        out, lse, dq, dkv = (on_gpu if world.executed else on_cpu)(world, case, given, exact)
    altered += vars(given).get("altered", [])
    delta = (out.double().reshape(given.grad.shape) * given.grad.double()).sum(-1)
    made = types.SimpleNamespace(out=out, lse=lse, dq=dq, dkv=dkv, altered=altered)
    return made, exact, reference(world.torch, given, scale, delta)


def fault(found, wanted, case):
    """Say in what a tensor of upstream's has not the shape, type or layout that the caller was promised."""
    promised = wanted.shape[1:] if case.layout == "unbatched" else wanted.shape
    right = found.shape == promised and str(found.dtype) == "torch.bfloat16"
    if not right:
        return f"{found.dtype} {[*found.shape]}, but promised was bf16 {[*promised]}"
    if case.door not in ("function", "direct", "both"):  # autograd may lay out what it returns
        return ""
    held = found.untyped_storage().nbytes()  # a batch of one is contiguous in its bucket, which the release keeps
    alone = found.is_contiguous() and (case.batch == 1 or held == found.nbytes)
    return "" if alone else f"strides {[*found.stride()]} in {held} bytes, but promised was a contiguous copy"


def error(found, wanted):
    """Return the norm of the difference over that of the float64 reference."""
    return float((found.double() - wanted).norm() / wanted.norm())


def dkv_is_exact(world, case, queries, columns, width=WIDTH):
    """Judge the returned dKV in some of its columns: it is to be a float64 dKV, rounded once to bf16."""
    found, exact, given_delta = result(world, case, queries, width)
    if reason := fault(found.dkv, exact.dkv, case):
        return False, {"measured": math.inf, "reason": reason}
    dkv = found.dkv.double().reshape(exact.dkv.shape)[..., columns]
    wanted = [x.dkv[..., columns] for x in (given_delta, exact)]
    measured = min(float((dkv - x.bfloat16().double()).norm() / x.norm()) for x in wanted)
    return measured <= LIMIT, {"measured": measured, "tolerance": LIMIT, "unit": "relative distance"}


def both_are_exact(world, case, queries, width=WIDTH):
    """Judge the returned dKV of a case in its value columns and in those of RoPE, by the worse of them."""
    ends = [dkv_is_exact(world, case, queries, columns, width) for columns in (slice(VALUES), slice(VALUES, None))]
    return all(ok for ok, _ in ends), max((values for _, values in ends), key=lambda values: values["measured"])


def is_right(world, case, queries, name, width=WIDTH):
    """Judge what upstream returned as `name` by its error."""
    found, exact, given_delta = result(world, case, queries, width)
    if name == "lse":
        measured = float((found.lse.detach() - exact.lse.reshape(found.lse.shape)).abs().max())
    else:
        wanted = exact.out if name == "out" else given_delta.dq
        if reason := fault(getattr(found, name), wanted, case):
            return False, {"measured": math.inf, "reason": reason}
        measured = error(getattr(found, name).reshape(wanted.shape), wanted)
    if name != "dq":
        return measured <= TOLERANCE[name], {"measured": measured, "tolerance": TOLERANCE[name]}
    if (distance := dq_distance(found, given_delta)) <= ROUNDED:
        return measured <= TOLERANCE[name], {"measured": measured, "tolerance": TOLERANCE[name]}
    return False, {"measured": distance, "tolerance": ROUNDED, "unit": "distance from dP rounded to nearest"}


def dq_distance(found, wanted):
    """Return the relative distance of dq from the one of dP rounded to the nearest bf16, which no fix changes."""
    rounded = wanted.dq_of_rounded.bfloat16().double()
    return float((found.dq.double().reshape(rounded.shape) - rounded).norm() / rounded.norm())


def forward_and_dq_are_right(world, case, queries):
    """Judge out and dq of a case, by the worse of them; a frozen q has no dq."""
    names = ["out", "dq"][: 1 if case.frozen == "q" and world.executed else 2]
    ends = [is_right(world, case, queries, name) for name in names]
    if altered := result(world, case, queries)[0].altered:
        return False, {"measured": math.inf, "reason": f"altered {altered}"}
    return all(ok for ok, _ in ends), max((values for _, values in ends), key=lambda values: values["measured"])


def arguments_stay(world, case, queries):
    """Judge that sparse_mla_bwd altered nothing that it was given."""
    altered = result(world, case, queries)[0].altered
    return not altered, {"measured": altered, "unit": "arguments that were altered"}


def nothing_waits(world, case, queries):
    """Judge that no operator of a call waits for the device, by what PyTorch warns of."""
    torch = world.torch
    given = example(torch, case, queries, world.device)
    tensors = arguments(case, given, reference(torch, given, scale_of(case)))
    with environment(case), warnings.catch_warnings(record=True, action="always") as caught:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            called(world, case, tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [text for one in caught if "called a synchronizing" in (text := str(one.message))]
    return not waits, {"measured": waits, "unit": "what waited"}


def nothing_is_kept(world, case, queries):
    """Judge the memory that a call leaves behind when what it returned is gone; the first call of these sizes."""
    torch = world.torch
    given = example(torch, case, queries, world.device)
    tensors = arguments(case, given, reference(torch, given, scale_of(case)))
    gc.collect()
    start = torch.cuda.memory_allocated()
    with environment(case):
        called(world, case, tensors)
    gc.collect()
    kept = torch.cuda.memory_allocated() - start
    return kept <= KEPT, {"measured": kept, "tolerance": KEPT, "unit": "bytes"}


def what_is_not_finite_stays(world, case, queries):
    """Judge that an infinite and a NaN dP reach dQ and dKV, where a loss scaler looks for them, and nothing else."""
    given = example(world.torch, case, queries, world.device)
    tensors = arguments(case, given, reference(world.torch, given, scale_of(case)))
    (q, kv, grad, index, *_), where = tensors, {(0, case.heads - 1): math.nan, (1, 3): math.inf}
    finite_dq, finite_dkv = q.isfinite().all(-1), kv.isfinite()
    for (query, head), value in where.items():
        grad[0, query, head, 5] = value  # every key has a value there: its dP is no number, nor finite
        finite_dq[0, query, head] = False
        finite_dkv[0, index[0, query, 0].long()] = False
    with environment(case), interpreter(world):
        dq, dkv = called(world, case, tensors)
    pairs = (dq.isfinite(), finite_dq[..., None].expand_as(dq)), (dkv.isfinite(), finite_dkv)
    measured = [int((found != wanted).sum()) for found, wanted in pairs]
    return not any(measured), {"measured": measured, "unit": "elements of dQ and dKV that should be finite or are not"}


@contextlib.contextmanager
def counted(world):
    """Replace the builders of kernels by ones that build nothing. Yield by name what they made, weakly."""
    made, torch = {"preprocess": [], "bwd": [], "postprocess": []}, world.torch
    kernels = {
        "preprocess": lambda out, _: out.new_zeros(out.shape[:3], dtype=torch.float32),
        "bwd": lambda q, *_: torch.zeros_like(q),
        "postprocess": lambda dkv: dkv.bfloat16(),
    }

    def build(name, *_, **__):
        kernel = functools.partial(kernels[name])  # another one each time
        made[name].append(weakref.ref(kernel))
        return kernel

    builders = {name: functools.partial(build, name) for name in kernels}
    with unittest.mock.patch.multiple(world.backward, **builders), unittest.mock.patch.dict(os.environ):
        os.environ.update({BUCKET: "1", CACHE: str(KERNELS)})
        yield made


def backward_of_zeros(world, heads, scale, tail=64, **changed):
    """Call sparse_mla_bwd with one query and one key."""
    torch, of = world.torch, {"device": world.device, "dtype": world.torch.bfloat16}
    q, kv = torch.zeros(1, 1, heads, VALUES + tail, **of), torch.zeros(1, 1, 1, VALUES + tail, **of)
    index = torch.zeros(1, 1, 1, 32, device=world.device, dtype=torch.int32)
    given = {"o": q[..., :VALUES].contiguous(), "do": q[..., :VALUES].contiguous(), "lse": q[..., 0].float()}
    given |= {"q": q, "kv": kv, "indices": index} | changed
    return world.backward.sparse_mla_bwd(**given, sm_scale=scale)


def kernels_are_bounded(world):
    """Judge how many kernels are kept, and for what another is built; the builders are replaced."""
    with counted(world) as made:
        for i in range(2 * KERNELS):  # of other heads, RoPE columns and scales each
            backward_of_zeros(world, 1 + i, 0.1 + i / 1000, 64 + i)
            backward_of_zeros(world, 1, 0.1)  # is used all the time: the others go before it
        gc.collect()
        kept = {name: sum(ref() is not None for ref in refs) for name, refs in made.items()}
        built = [len(made["bwd"])]
        for scale in (0.1, 0.1 + 1e-15, 0.1 + 1e-10):  # twelve decimals count
            backward_of_zeros(world, 1, scale)
            built.append(len(made["bwd"]))
    wanted = [2 * KERNELS] * 3 + [2 * KERNELS + 1]
    ok = all(0 < count <= KERNELS for count in kept.values()) and built == wanted
    return ok, {"measured": [*kept.values(), *built], "unit": f"kernels kept, {KERNELS} at most; built, {wanted}"}


def delta_is_asked_for(world):
    """Judge that a call without an output and a delta is refused; the builders are replaced."""
    found = []
    with counted(world):
        for unbatched in (False, True):
            tensors = {"o": None}
            if unbatched:
                of = {"device": world.device, "dtype": world.torch.bfloat16}
                tensors |= {"q": world.torch.zeros(1, 16, WIDTH, **of), "kv": world.torch.zeros(1, 1, WIDTH, **of)}
                tensors |= {"do": world.torch.zeros(1, 16, VALUES, **of)}
                tensors |= {"indices": world.torch.zeros(1, 1, 32, device=world.device, dtype=world.torch.int32)}
                tensors |= {"lse": world.torch.zeros(1, 16, device=world.device)}
            try:
                backward_of_zeros(world, 16, 0.1, **tensors)
                found.append("nothing")
            except ValueError:
                found.append("ValueError")
    return found == ["ValueError"] * 2, {"measured": found, "unit": "what is raised, batched and not"}


def directly(case, name):
    """Return the case and width of one of DIRECT, which differs from the reported example."""
    changed, width = DIRECT[name]
    return case._replace(**({"door": "direct", "keys": 512} | changed)), width


def judge_direct(probe, world, names):
    """Judge sparse_mla_bwd as such."""
    _, example_case = LEADING["executed"]
    for name in names:
        case, width = directly(example_case, name)
        if world.executed:
            probe.judge(f"{name}.dkv", "defect", both_are_exact, world, case, ROWS, width)
            probe.judge(f"{name}.dq", "control", is_right, world, case, ROWS, "dq", width)
        else:
            for of, role in (("dkv", "defect"), ("dq", "control")):
                probe.check(f"{name}.{of}", role, None, reason=INTERPRETED)


def judge_manners(probe, world):
    """Judge what a call of sparse_mla_bwd does besides its results."""
    queries, case = LEADING["compiled"]
    if world.executed:
        queries, (case, _) = ROWS, directly(LEADING["executed"][1], "direct")
    probe.judge("direct.arguments", "control", arguments_stay, world, case, queries)
    for name, measure, keys in (("waits", nothing_waits, 512), ("kept", nothing_is_kept, 1024)):
        if world.executed:
            probe.judge(f"direct.{name}", "control", measure, world, case._replace(keys=keys), queries)
        else:
            probe.check(f"direct.{name}", "control", None, reason="there is a device on a GPU only")


def judge_padded(probe, world):
    """Judge heads that fill no block, with an output besides the delta, and what is not finite."""
    for name, case in PADDED.items():
        probe.judge(f"{name}.dkv", "defect", both_are_exact, world, case, 2)
        probe.judge(f"{name}.dq", "control", forward_and_dq_are_right, world, case, 2)
    name, case = next(iter(PADDED.items()))
    probe.judge(f"{name}.arguments", "control", arguments_stay, world, case, 2)
    probe.judge(f"{name}.nonfinite", "control", what_is_not_finite_stays, world, case, 2)


def judge_leading(probe, world):
    """Judge the reported example, and state what the report shows of it."""
    queries, case = LEADING["executed" if world.executed else "compiled"]
    for name in ("out", "lse", "dq") if world.executed else ("dq",):
        probe.judge(name, "control", is_right, world, case, queries, name)
    for name, columns in (("dkv", slice(WIDTH)), ("dkv_tail", slice(VALUES, WIDTH))):
        probe.judge(name, "defect", dkv_is_exact, world, case, queries, columns)
    if probe.only:
        return
    found, exact, given_delta = result(world, case, queries)
    for name, columns in (("dkv", slice(WIDTH)), ("dkv_tail", slice(VALUES, WIDTH))):
        wanted = exact.dkv[..., columns]
        made = {"as_bf16": found.dkv[..., columns], "rounded_once": given_delta.dkv[..., columns].bfloat16()}
        for which, tensor in made.items():
            value = error(tensor.reshape(wanted.shape), wanted)
            probe.say("FIGURE", name=f"{name}_{which}", value=value, unit="relative error")
    probe.output("dq", found.dq)
    if world.shared:
        probe.say("FIGURE", name="shared_memory", value=max(world.shared), unit="bytes per block")


@functools.cache
def load(target):
    """Import upstream; return what the checks run in, once in each process."""
    import tilelang, torch

    if not target.startswith("sm_"):
        raise NotImplementedError("these are GPU kernels; without a GPU: --target sm_90a")
    for name in ("megatron.core", "megatron.core.transformer"):  # left bare: theirs would import all of Megatron
        sys.modules.setdefault(name, importlib.util.module_from_spec(importlib.util.find_spec(name)))
    os.environ[CACHE] = str(KERNELS)
    importlib.import_module("megatron.core.parallel_state")  # before megatron.core.utils: each imports the other
    folder = "megatron.core.transformer.experimental_attention_variant.ops."
    names = ("tilelang_dsa", "sparse_mla", "tilelang_sparse_mla_bwd")
    fused, sparse, backward = (importlib.import_module(folder + name) for name in names)
    executed = torch.cuda.is_available() and target == "sm_{}{}a".format(*torch.cuda.get_device_capability())
    fields = {"torch": torch, "tilelang": tilelang, "fused": fused, "sparse": sparse, "backward": backward}
    fields |= {"target": target, "executed": executed, "device": "cuda" if executed else "cpu", "shared": []}
    return World(**fields)


def run_ahead(target, case, queries, width=WIDTH):
    """Run a case in a process of its own: tilelang keeps the kernels on disk. What fails here will fail again."""
    with contextlib.suppress(Exception):
        result(load(target), case, queries, width)


def compile_ahead(target):
    """Compile the kernels of all cases but the reported one at once: nvcc takes many seconds for each."""
    cases = [(Case(*row), QUERIES["executed"]) for row in CASES]
    for name in LATER:
        case, width = directly(LEADING["executed"][1], name)
        cases.append((case, ROWS, width))
    cases += [(case, 2) for case in PADDED.values()]
    processes = int(os.environ.get("REPRODUCER_PROCESSES") or os.cpu_count())  # the runner shares the cores out
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        concurrent.futures.wait([pool.submit(run_ahead, target, *case) for case in cases])


def judge(probe, target):
    """Run the backward through every door, and compare the dKV that it returns with float64."""
    world = load(target)
    evidence = "executed" if world.executed else "compiled"
    gpu = world.torch.cuda.get_device_name() if world.executed else "none"
    probe.say("TARGET", target=target, evidence=evidence, device=gpu)
    probe.upstream(world.backward)
    judge_leading(probe, world)  # before the others are compiled: most patches that are wrong are so here
    judge_direct(probe, world, [name for name in DIRECT if name not in LATER])
    judge_manners(probe, world)
    if world.executed and not probe.only:
        compile_ahead(target)
    judge_direct(probe, world, LATER)
    judge_padded(probe, world)
    for number, case in enumerate(itertools.starmap(Case, CASES)):
        name = f"case_{number:02}"
        if world.executed or number == 0:
            given = world, case, QUERIES[evidence]
            probe.judge(f"{name}.dkv", "defect", both_are_exact, *given)
            probe.judge(f"{name}.dq", "control", forward_and_dq_are_right, *given)
        else:
            for of, role in (("dkv", "defect"), ("dq", "control")):
                probe.check(f"{name}.{of}", role, None, reason=INTERPRETED)
    probe.judge("direct.without_delta", "control", delta_is_asked_for, world)
    probe.judge("direct.kernels", "control", kernels_are_bounded, world)  # the last: others lose their kernels by it


if __name__ == "__main__":
    Probe().run(judge)
