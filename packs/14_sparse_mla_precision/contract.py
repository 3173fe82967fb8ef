"""The dKV that SparseMLA's backward returns is the exact gradient, rounded once to bf16.

P and dP are float32 in the kernel. With both of their bf16 parts in dKV = dP^T Q + P^T dO, nearly every element of the
bf16 dKV equals the float64 dKV rounded once. With one of them rounded, about a third of the elements differ. The
float64 dKV has the exact lse, and the exact delta or that of the bf16 output that the caller got. The distance is in
units of the norm of that dKV. The limit is a fifth of what the release has. All else is a control: out, lse and dq;
inputs stay as they were; nothing waits for the device; no memory is kept.

    q [B, S, H, 576], kv [B, Sk, G, 576], dO [B, S, H, 512] bf16; indices [B, S, G, topk] int32, -1 for none; without B
        too; any strides where autograd calls. H / G a power of two, at least 16 (G = 1 alone: fewer are padded)
    delta: used where it is given, else made from the output; a ValueError where there is neither
    MCORE_DSA_TILELANG_SEQ_BUCKET, _TOPK_BUCKET: S, Sk and topk are padded to multiples
    returns dq, dkv: bf16, of the shapes of q and kv, contiguous; for a batch of two without the padding's memory. 0 for
        queries without keys and for keys that no query chose. A dP that is not finite reaches both. dq is that of dP
        rounded to the nearest bf16, as in the release

On a GPU, SparseMLA.apply, fused_sparse_mla_absorbed and sparse_mla_bwd run as they are. Without one, the backward and
postprocess kernels are lowered for the target, and g++ compiles their CUDA source as it stands. A header gives it
threads, shared memory and the warp instructions that it uses. Of these, mma_sync is a model (exact products, summed in
float64, rounded to float32 after every instruction). Every dtype and every rounding between is the kernel's. It gets
the float64 lse, and the delta of the float64 output rounded to bf16. Builders that build nothing stand in where kernels
are counted.

Not judged: a training run; time; the default scale; MCORE_DSA_TILELANG_BWD_MAX_BLOCK_H; a bucket that is no multiple of
32 where a batch of one has an output and no delta. MCORE_DSA_TILELANG_BWD_SPLIT_P=1 is set for ask.patch, whose option
it is.
"""

import contextlib
import ctypes
import functools
import gc
import itertools
import math
import operator
import os
import re
import subprocess
import types
import typing
import unittest.mock
import weakref

import pytest
import torch

from kit import current_target
from kit.capture import host_waits
from kit.cuda_source import in_processes, index_value, lower, options_of, remembered_file
from kit.errors import relative_error
from kit.sparse_attention import attend, bare_megatron, counted, share_compiled_kernels

CACHE, KERNELS = "MCORE_DSA_TILELANG_KERNEL_CACHE_MAX", 32  # kernels kept; more than the cases have
os.environ[CACHE] = str(KERNELS)  # read at import
bare_megatron()
from megatron.core.transformer.experimental_attention_variant.ops import sparse_mla, tilelang_dsa
from megatron.core.transformer.experimental_attention_variant.ops import tilelang_sparse_mla_bwd as under_test

EVIDENCE_WITHOUT_GPU = {"sm_90a": "compiled", "sm_100a": "compiled", "sm_120a": "compiled"}
TARGET = current_target()
WIDTH, VALUES, LOG2E = 576, 512, 1 / math.log(2)  # a key's first 512 columns are its value, the others are RoPE's
LIMIT = 2**-11  # the release has five times as much; float32 sums of both parts leave a third
TOLERANCE = 2**-8  # of out and dq, which are rounded to bf16 (2^-9) twice
ROUNDED = 3 * 2**-11  # of dq from that of dP rounded to nearest: float32 leaves a sixth, another rounding 1.6 times it
BUCKET = "MCORE_DSA_TILELANG_SEQ_BUCKET"
SHARED = []  # bytes of shared memory of the kernels that were interpreted


class Case(typing.NamedTuple):
    """One call. Upstream compiles kernels for each heads, groups, topk, width and scale."""

    # apply, fused and function: the user's entry points; direct: sparse_mla_bwd with every argument by position;
    # autocast: direct, under torch.autocast; both: direct, with an output (NaN) besides the delta
    door: str = "apply"
    batch: int = 1
    queries: int = 512
    keys: int = 2048
    heads: int = 64  # of a key group
    groups: int = 1
    topk: int = 512
    width: int = WIDTH
    divisor: int = 24  # the scale is its inverse
    layout: str = "contiguous"  # or strided, or unbatched
    gradient: float = 1  # the factor of the output's gradient
    masked: bool = False  # a third of the indices and all of the first query are -1
    frozen: bool = False  # the query needs no gradient
    backwards: int = 1  # through the same graph
    bucket: str | None = None  # the environment's; None: not set


REPORTED = Case()
OTHER = Case("direct", topk=144, groups=2, divisor=11, keys=700, queries=70)  # its kernels are the others
FIRST = OTHER._replace(batch=2, bucket="3", masked=True, gradient=2**-30)
# 256 queries are the default bucket: what is read is the caller's.
DIRECT = REPORTED._replace(door="direct", keys=512, queries=256)
if TARGET.executed:  # few kernels, since four take most of a minute; the script builds those of the reported case
    share_compiled_kernels()
    PADDED = DIRECT._replace(keys=2048, queries=2)
    SHORT = REPORTED._replace(keys=700, queries=70, bucket="3")
    CASES = {
        "reported": REPORTED,
        "direct": DIRECT,
        "large": DIRECT._replace(gradient=2**14),
        "autocast": DIRECT._replace(door="autocast"),
        "tail_128": DIRECT._replace(width=VALUES + 128),  # RoPE columns
        "first": FIRST,
        "function": SHORT._replace(door="function", batch=2, masked=True),
        "unbatched": SHORT._replace(layout="unbatched", backwards=2, bucket=None),
        "strided": SHORT._replace(layout="strided", batch=2),
        "fused": SHORT._replace(door="fused", layout="strided", batch=2, masked=True, bucket=None),
        "frozen_query": SHORT._replace(frozen=True, backwards=2),
    }
else:  # few and small, since they are interpreted; 24 and 8 heads fill no block, and 8 do not fill the buckets
    PADDED = Case("both", heads=24, topk=64, bucket="2", keys=128, queries=2)
    CASES = {
        "reported": OTHER._replace(bucket="2", keys=1024, queries=2),
        "heads_24": PADDED,
        "heads_8": PADDED._replace(heads=8, bucket="3"),
        "first": FIRST._replace(queries=2),
    }
KEPT = 2**16  # bytes that a call may keep; a float32 dKV of its 1024 keys has 36 times as many
ARGUMENTS = "Q", "KV", "dO", "Indices", "Lse", "Delta"  # of sparse_mla_bwd and of its kernel
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

# Inputs and their float64 reference.


def example(case, device):
    """Make bf16 q [B, S, H, width], kv [B, Sk, G, width], dO [B, S, H, 512], and int32 indices [B, S, G, topk]."""
    random = torch.Generator(device).manual_seed(14)
    normal = functools.partial(torch.randn, generator=random, device=device)
    uniform = functools.partial(torch.rand, generator=random, device=device)
    heads = case.heads * case.groups
    q, kv = normal(case.batch, case.queries, heads, case.width), normal(case.batch, case.keys, case.groups, case.width)
    grad = normal(case.batch, case.queries, heads, VALUES)
    grad *= case.gradient
    index = uniform(case.batch, case.queries, case.groups, case.keys).topk(case.topk).indices.int()
    if case.masked:
        index[uniform(index.shape) < 1 / 3] = -1
        index[:, 0] = -1
    return types.SimpleNamespace(q=q.bfloat16(), kv=kv.bfloat16(), grad=grad.bfloat16(), index=index)


def reference(given, scale, delta=None):
    """Compute out, lse (base 2), delta, dq and dkv in float64, shaped as upstream's; delta is exact unless given."""
    (batch, queries, heads, _), groups = given.q.shape, given.kv.shape[2]
    shapes = {"out": given.grad, "dq": given.q, "dq_of_rounded": given.q, "dkv": given.kv}
    shapes |= {"lse": given.q[..., 0], "delta": given.q[..., 0]}
    made = types.SimpleNamespace(**{name: torch.zeros_like(x, dtype=torch.float64) for name, x in shapes.items()})
    for b, g, start in itertools.product(range(batch), range(groups), range(0, queries, 16)):
        part = b, slice(start, start + 16), slice(g * heads // groups, (g + 1) * heads // groups)
        query, key, up = given.q[part].double(), given.kv[b, :, g].double(), given.grad[part].double()
        counts = counted(given.index[b : b + 1, part[1], g], len(key))
        out, lse = attend(query[None], key[None], counts, scale, VALUES)
        made.out[part], made.lse[part] = out[0], lse[0]
        p = torch.exp2(query @ key.T * (scale * LOG2E) - made.lse[part][..., None]) * counts[0, :, None]
        inner = up @ key[:, :VALUES].T
        made.delta[part] = (p * inner).sum(-1) if delta is None else delta[part]
        dp = p * (inner - made.delta[part][..., None]) * scale
        made.dq[part], made.dq_of_rounded[part] = dp @ key, dp.bfloat16().double() @ key
        made.dkv[b, :, g] += torch.einsum("sht,shd->td", dp, query)
        made.dkv[b, :, g, :VALUES] += torch.einsum("sht,shd->td", p, up)
    return made


# The kernels on the CPU.


def compiled_for_cpu(lowered, library):
    """Make a library of a kernel's CUDA source, with `launch`, the names of its parameters and its shared memory."""
    assert not lowered.error, f"the kernel does not lower: {lowered.error}"
    waits = r"^#(include|ifdef|endif).*|tl::cp_async_(commit|wait<\d>)\(\);"  # the copies are done by then
    source = re.sub(waits, "", lowered.source, flags=re.MULTILINE)
    size, name, parameters = re.search(r"__launch_bounds__\((\d+), \d+\) (\w+)\(([^)]*)\) {", source).groups()
    names = ", ".join(parameter.split()[-1] for parameter in parameters.split(","))
    source += f'extern "C" {{ int shared = {lowered.shared_bytes}; char names[] = "{names}"; void launch(int x, int y, '
    source += f"int z, {parameters}) {{ run({{x, y, z}}, {size}, [=] {{ {name}({names}); }}); }} }}"
    options = ["-std=c++20", "-O1", "-w", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]  # fortified, longjmp refuses
    command = ["g++", *options, *(f"-D{macro}" for macro in MACROS.split()), "-xc++", "-", "-o", library]
    ended = subprocess.run(command, input=INTERPRETER + source, text=True, capture_output=True, check=False)
    if ended.returncode:  # says nothing of the kernel
        raise OSError(f"the header for the CPU lacks something that this kernel uses:\n{ended.stderr[:2000]}")


def interpreted(function, inputs, output, *args, **kwargs):
    """Stand in for a builder of upstream's: build what runs its kernel on the CPU and returns `output`."""
    program, options = function.get_tir(*args, **kwargs), options_of(function)
    script = program.script()
    library = remembered_file(
        (TARGET.name, options, script, MACROS, INTERPRETER),
        ".so",
        lambda file: compiled_for_cpu(lower(program, TARGET.name, options), file),
    )
    code = ctypes.CDLL(str(library))
    SHARED.append(ctypes.c_int.in_dll(code, "shared").value)
    grid = [re.search(rf'"blockIdx.{axis}", (.*)\)$', script, re.MULTILINE)[1] for axis in "xyz"]

    def launch(*tensors):
        values = dict(zip(inputs, tensors, strict=True))
        like = values["Q" if output == "dQ" else "dKV"]
        made = values[output] = torch.zeros_like(like, dtype=torch.bfloat16)
        sizes = {"batch": like.shape[0], "seq_len": like.shape[1], "seq_len_kv": values["dKV"].shape[1]}
        given = ({**values, **sizes}[name] for name in ctypes.string_at(code.names).decode().split(", "))
        pointers = (x if isinstance(x, int) else ctypes.c_void_p(x.data_ptr()) for x in given)
        code.launch(*(index_value(extent, **sizes) for extent in grid), *pointers)
        return made

    return launch


@contextlib.contextmanager
def environment(case):
    """Set the environment that upstream reads as the case says; without a GPU, run the kernels on the CPU within.

    Delta is made by PyTorch there.
    """
    names = (*ARGUMENTS, "dKV")
    builders = {
        "bwd": functools.partial(interpreted, under_test.bwd, names, "dQ"),
        "postprocess": functools.partial(interpreted, under_test.postprocess, ("dKV",), "dKV_out"),
        "preprocess": lambda *_: lambda out, grad: (out.float() * grad.float()).sum(-1),
    }
    kernels = contextlib.nullcontext() if TARGET.executed else unittest.mock.patch.multiple(under_test, **builders)
    with unittest.mock.patch.dict(os.environ), kernels:
        for name in [name for name in os.environ if name.startswith("MCORE_DSA_TILELANG_")]:
            del os.environ[name]
        os.environ["MCORE_DSA_TILELANG_BWD_SPLIT_P"] = "1"
        if case.bucket:
            os.environ[BUCKET] = case.bucket
        yield


# A case, run once.


def arguments(case, given, exact):
    """Return the six tensors that sparse_mla_bwd reads, lse and delta by float64: that of the output in bf16."""
    delta = (exact.out.bfloat16().float() * given.grad.float()).sum(-1)
    tensors = given.q, given.kv, given.grad, given.index, exact.lse.float(), delta
    return [x[0] if case.layout == "unbatched" else x for x in tensors]


def inputs(case):
    """Make the six tensors of a case."""
    given = example(case, TARGET.device)
    return arguments(case, given, reference(given, 1 / case.divisor))


def called(case, tensors):
    """Call sparse_mla_bwd with every argument by position. The delta counts, whether there is an output or none."""
    q, kv, grad, index, lse, delta = tensors
    out = torch.full_like(grad, math.nan) if case.door == "both" else None
    under = torch.autocast("cuda", torch.bfloat16) if case.door == "autocast" else contextlib.nullcontext()
    with under:
        return under_test.sparse_mla_bwd(q, kv, out, grad, index, lse, 1 / case.divisor, delta)


def through_its_door(case, given):
    """Go through the case's door on a GPU, and autograd where it has that. Return out, lse or None, dq or None, dkv."""
    laid = {"contiguous": lambda x: x, "strided": lambda x: x.mT.contiguous().mT, "unbatched": lambda x: x[0]}
    q, kv, grad, index = map(laid[case.layout], (given.q, given.kv, given.grad, given.index))
    scale = 1 / case.divisor
    if case.door == "function":
        out, lse = sparse_mla.SparseMLA.apply(q, kv, index, scale)
        return out, lse, *under_test.sparse_mla_bwd(q, kv, out, grad, index, lse, sm_scale=scale)
    leaves = [x.clone().requires_grad_() for x in (q, kv)[int(case.frozen) :]]
    q = q if case.frozen else leaves[0]
    if case.door == "apply":
        out, lse = sparse_mla.SparseMLA.apply(q, leaves[-1], index, scale)
    else:  # sequence first
        turned = q.transpose(0, 1), leaves[-1].transpose(0, 1), index[:, :, 0]
        out, lse = tilelang_dsa.fused_sparse_mla_absorbed(*turned, scale, VALUES).transpose(0, 1), None
    for _ in range(case.backwards):
        found = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    return out.detach(), lse, found[0] if len(found) == 2 else None, found[-1]


@functools.cache
def result(case):
    """Run a case. Return what upstream made, what is exact, and that with the delta of the output which it made."""
    given, scale = example(case, TARGET.device), 1 / case.divisor
    exact = reference(given, scale)
    positional = not TARGET.executed or case.door in ("direct", "autocast", "both")
    tensors = dict(zip(ARGUMENTS, arguments(case, given, exact), strict=True)) if positional else vars(given)
    version = operator.attrgetter("_version")  # autograd refuses a saved tensor that was written to
    before = [(x.clone(), version(x)) for x in tensors.values()]
    with environment(case):
        if positional:
            out, lse, (dq, dkv) = exact.out.bfloat16(), None, called(case, tensors.values())
        else:
            out, lse, dq, dkv = through_its_door(case, given)
    after = zip(tensors.items(), before, strict=True)
    altered = [name for (name, x), (y, first) in after if version(x) != first or not torch.equal(x, y)]
    delta = (out.double().reshape(given.grad.shape) * given.grad.double()).sum(-1)
    found = types.SimpleNamespace(out=out, lse=lse, dq=dq, dkv=dkv, altered=altered)
    return found, exact, reference(given, scale, delta)


def run_ahead(name):
    """Run a case in a process of its own: tilelang keeps the kernels on disk. What fails here will fail again."""
    with contextlib.suppress(Exception):
        result(CASES[name])


@pytest.fixture(scope="session", autouse=True)
def kernels():
    """Compile the kernels of the other cases at once; the script has compiled those of the reported case."""
    if TARGET.executed:
        torch.cuda.init()  # so that the processes are spawned: CUDA survives no fork, and upstream's import begins it
        in_processes(run_ahead, [("first",), ("tail_128",)])


def assert_promised(found, exact, case):
    """Assert the shape, type and layout that the caller was promised."""
    shape = exact.shape[1:] if case.layout == "unbatched" else exact.shape
    assert (found.shape, found.dtype) == (shape, torch.bfloat16)
    if case.door in ("function", "direct", "both"):  # autograd may lay out what it returns
        held = found.untyped_storage().nbytes()  # a batch of one is contiguous in its bucket, which the release keeps
        alone = found.is_contiguous() and (case.batch == 1 or held == found.nbytes)
        assert alone, f"strides {[*found.stride()]} in {held} bytes, but promised was a contiguous copy"


every_case = pytest.mark.parametrize("name", CASES)


@pytest.mark.defect
@every_case
def test_dkv_is_the_exact_gradient_rounded_once(name):
    found, exact, given_delta = result(CASES[name])
    assert_promised(found.dkv, exact.dkv, CASES[name])
    for columns in (slice(VALUES), slice(VALUES, None)):  # those of values, and of RoPE
        dkv = found.dkv.double().reshape(exact.dkv.shape)[..., columns]
        right = [x.dkv[..., columns] for x in (given_delta, exact)]
        distance = min(float((dkv - x.bfloat16().double()).norm() / x.norm()) for x in right)
        assert distance <= LIMIT, f"distance {distance:.2e} from the exact dKV rounded once, limit {LIMIT:.2e}"


@pytest.mark.control
@every_case
def test_out_lse_and_dq_are_right_and_arguments_stay(name):
    found, exact, given_delta = result(CASES[name])
    for what, x, right in (("out", found.out, exact.out), ("dq", found.dq, given_delta.dq)):
        if what == "dq" and TARGET.executed and CASES[name].frozen:
            assert x is None
            continue
        assert_promised(x, right, CASES[name])
        error = relative_error(x.reshape(right.shape), right)
        assert error <= TOLERANCE, f"relative error of {what} {error:.2e}, tolerance {TOLERANCE:.2e}"
    if found.lse is not None and CASES[name].layout == "contiguous":
        error = float((found.lse.detach() - exact.lse).abs().max())
        assert error <= 1e-4, f"lse is off by {error:.2e}"  # float32
    if found.dq is not None:
        rounded = given_delta.dq_of_rounded.bfloat16().double()
        distance = relative_error(found.dq.reshape(rounded.shape), rounded)
        assert distance <= ROUNDED, f"dq is {distance:.2e} from that of dP rounded to nearest, limit {ROUNDED:.2e}"
    assert not found.altered, f"the call altered {found.altered}"


@pytest.mark.control
def test_dq_is_the_releases_bit_for_bit(figure, output):
    """The runner compares both lanes' dq. Figures: errors of dKV, returned and exact but rounded once."""
    found, exact, given_delta = result(CASES["reported"])
    for name, columns in (("dkv", slice(WIDTH)), ("dkv_tail", slice(VALUES, WIDTH))):
        right = exact.dkv[..., columns]
        figure(f"{name}_as_bf16", relative_error(found.dkv[..., columns].reshape(right.shape), right), "relative error")
        once = relative_error(given_delta.dkv[..., columns].bfloat16(), right)
        figure(f"{name}_rounded_once", once, "relative error")
    if SHARED:
        figure("shared_memory", max(SHARED), "bytes per block")
    output("dq", found.dq)


@pytest.mark.control
def test_nothing_waits_for_the_device_and_no_memory_is_kept():
    """The first call of these sizes, when what it returned is gone."""
    if not TARGET.executed:
        pytest.skip("there is a device on a GPU only")
    case = DIRECT._replace(keys=1024)
    tensors = inputs(case)
    gc.collect()
    start = torch.cuda.memory_allocated()
    with environment(case), host_waits("cuda") as waits:
        called(case, tensors)
    assert not waits, f"the host waits: {waits}"
    gc.collect()
    kept = torch.cuda.memory_allocated() - start
    assert kept <= KEPT, f"{kept} bytes are kept, limit {KEPT}"


@pytest.mark.control
def test_what_is_not_finite_reaches_both_gradients_and_nothing_else():
    """A loss scaler looks for an infinite and a NaN dP there."""
    tensors = inputs(PADDED)
    q, kv, grad, index, *_ = tensors
    finite_dq, finite_dkv = q.isfinite().all(-1), kv.isfinite()
    for (query, head), value in {(0, PADDED.heads - 1): math.nan, (1, 3): math.inf}.items():
        grad[0, query, head, 5] = value  # every key has a value there: its dP is no number, nor finite
        finite_dq[0, query, head] = False
        finite_dkv[0, index[0, query, 0].long()] = False
    with environment(PADDED):
        dq, dkv = called(PADDED, tensors)
    wrong = [int((dq.isfinite() != finite_dq[..., None]).sum()), int((dkv.isfinite() != finite_dkv).sum())]
    assert wrong == [0, 0], f"elements of dq and dKV that should be finite or are not: {wrong}"


@pytest.mark.control
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_a_call_without_output_and_delta_is_refused(batched):
    q, kv, grad, *others = [x if batched else x[0] for x in inputs(PADDED)[:5]]
    with environment(PADDED), pytest.raises(ValueError, match="delta"):
        under_test.sparse_mla_bwd(q, kv, None, grad, *others)


@pytest.fixture
def built():
    """Replace the builders of kernels by ones that build nothing; give by name what they made, weakly."""
    made = {"preprocess": [], "bwd": [], "postprocess": []}
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
    with unittest.mock.patch.multiple(under_test, **builders), unittest.mock.patch.dict(os.environ):
        os.environ.update({BUCKET: "1", CACHE: str(KERNELS)})
        yield made


def backward_of_zeros(heads, scale, tail=64):
    """Call sparse_mla_bwd with one query and one key."""
    zeros = functools.partial(torch.zeros, 1, 1, device=TARGET.device, dtype=torch.bfloat16)
    q, kv, grad, row = zeros(heads, VALUES + tail), zeros(1, VALUES + tail), zeros(heads, VALUES), zeros(heads).float()
    under_test.sparse_mla_bwd(q, kv, grad.clone(), grad, zeros(1, 32).int(), row, sm_scale=scale)


@pytest.mark.control  # the last: others lose their kernels by it
def test_kernels_are_bounded_and_told_apart(built):
    for i in range(2 * KERNELS):  # of other heads, RoPE columns and scales each
        backward_of_zeros(1 + i, 0.1 + i / 1000, 64 + i)
        backward_of_zeros(1, 0.1)  # is used all the time: the others go before it
    gc.collect()
    kept = {name: sum(kernel() is not None for kernel in kernels) for name, kernels in built.items()}
    assert all(0 < count <= KERNELS for count in kept.values()), f"kernels kept: {kept}, at most {KERNELS}"
    counts = [len(built["bwd"])]
    for scale in (0.1, 0.1 + 1e-15, 0.1 + 1e-10):  # twelve decimals count
        backward_of_zeros(1, scale)
        counts.append(len(built["bwd"]))
    assert counts == [2 * KERNELS] * 3 + [2 * KERNELS + 1], f"kernels built: {counts}"
