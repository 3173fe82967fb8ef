"""tilelang puts a barrier between the read of a buffer and a store to the same bytes of shared memory.

Since 0.1.10 the barrier is missing where the workspace of tl::AllReduce and the stored buffer have elements of
different sizes. Slower warps then read what a faster one has stored, and rows get wrong sums. Scalar accesses of
different sizes whose first bytes differ have the same fault: a float32 read of A[n - 1 - i] and a bfloat16 store to
B[2 * i + 1].

The contract follows the CUDA source of each kernel from the last read of the workspace to the first store into shared
memory. It counts the bytes of the workspace that the store hits without a barrier between. The tolerance is 0. On a
GPU, some kernels are launched, too. Inputs are -1, 0 and 1, so that every number is exact and equal to the one in
float64. Not judged: targets before Hopper, where a copy is stored by single words and not by stmatrix, and a barrier
was always there; other pairs of types.
"""

import re
import typing

import pytest
import torch

from kit import current_target
from kit.cuda_source import index_value, lower

ARCHITECTURE = re.fullmatch(r"sm_(\d+)a?", current_target().name)
EVIDENCE_WITHOUT_GPU = "compiled" if ARCHITECTURE else ""
BYTES = {"float": 4, "bfloat16_t": 2, "half_t": 2}
ROW = 16  # bytes that one address of stmatrix or cp.async stands for
WIDTH = 64  # of the keys, and their number: so that q, p and the scores can all be multiplied by k
BLOCKS = 132 * 64  # of one launch
LAUNCHES = 50


class Case(typing.NamedTuple):
    """One kernel: the scores of so many rows are reduced, and then p is stored."""

    reduction: str = "reduce_sum"
    dtype: str = "float16"  # of q, k and p
    threads: int = 128
    rows: int = 16
    scores: str = "float32"
    store: str = "copy"  # or async_copy; or a workaround: sync_threads, no_reuse


WRONG = {
    "sum": Case(),
    "max": Case("reduce_max"),
    "bfloat16": Case(dtype="bfloat16"),
    "256_threads": Case(threads=256),
    "32_rows-256_threads": Case(rows=32, threads=256),
    "async_copy": Case(store="async_copy"),
}
RIGHT = {
    "sync_threads": Case(store="sync_threads"),
    "no_reuse": Case(store="no_reuse"),
    "same_size": Case(scores="float16"),
    "32_rows": Case(rows=32),  # each thread stores twice, in a loop: that is never taken for disjoint
    "64_rows": Case(rows=64),  # each warp has rows of its own, and needs no workspace
}
CASES = RIGHT | WRONG
HAS_STMATRIX = ARCHITECTURE is not None and int(ARCHITECTURE[1]) >= 90
JUDGED = [name for name, case in CASES.items() if HAS_STMATRIX or name in RIGHT or case.store != "copy"]
LAUNCHED = [name for name in ("sync_threads", "sum") if name in JUDGED]


def each(names):
    """Return a mark that gives a test each of these kernels."""
    marked = [pytest.param(x, marks=pytest.mark.defect if x in WRONG else pytest.mark.control) for x in names]
    return pytest.mark.parametrize("name", marked)


def kernel(T, case):
    """Return the program: out = (q + p) @ k and the row's reduction, where p = q @ k.T is stored after that."""
    reduction, dtype, threads, rows, scores_dtype, store = case
    reduced = getattr(T, reduction)

    @T.prim_func
    def main(
        Q: T.Tensor((rows, WIDTH), dtype),
        K: T.Tensor((WIDTH, WIDTH), dtype),
        P: T.Tensor((rows, WIDTH), dtype),
        Out: T.Tensor((BLOCKS, rows, WIDTH), "float32"),
    ):
        with T.Kernel(BLOCKS, threads=threads) as block:
            q = T.alloc_shared((rows, WIDTH), dtype)
            k = T.alloc_shared((WIDTH, WIDTH), dtype)
            p = T.alloc_shared((rows, WIDTH), dtype)
            scores = T.alloc_fragment((rows, WIDTH), scores_dtype)
            row = T.alloc_fragment((rows,), scores_dtype)
            out = T.alloc_fragment((rows, WIDTH), "float32")
            T.copy(Q, q)
            T.copy(K, k)
            T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
            reduced(scores, row, dim=1)
            if store == "async_copy":
                T.async_copy(P, p)
                T.ptx_wait_group(0)
            else:
                if store == "sync_threads":
                    T.sync_threads()
                T.copy(scores, p)
            T.gemm(q, k, out, clear_accum=True)
            T.gemm(p, k, out)
            for i, j in T.Parallel(rows, WIDTH):
                out[i, j] += row[i]
            T.copy(out, Out[block, 0:rows, 0:WIDTH])

    return main


def compiled(program, **options):
    """Compile a program for the GPU that is here."""
    import tilelang

    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": current_target().name})
    return tilelang.compile(program(tilelang.language), target=target, **options)


@pytest.fixture(scope="module")
def unguarded(figure):
    """Return a list for the kernels that lack a barrier; their number becomes a figure when all have been judged."""
    names = []
    yield names
    figure("kernels_without_barrier", len(names), f"of {len({*JUDGED} & {*WRONG})}")


@each(JUDGED)
def test_a_barrier_precedes_the_store(name, unguarded):
    import tilelang

    case, T = CASES[name], tilelang.language
    if case.store == "async_copy" and not hasattr(T, "async_copy"):
        pytest.skip("this release has no T.async_copy")
    options = {"tl.disable_shared_memory_reuse": True} if case.store == "no_reuse" else {}
    source, error, _ = lower(kernel(T, case), current_target().name, options)
    if error:
        pytest.skip(f"it is not lowered: {error}")
    count = bytes_hit(source, case.threads)
    unguarded.extend([name] * (count > 0))
    assert count == 0, f"{count} bytes of the workspace are stored to with no barrier after their last read"


@each(LAUNCHED)
def test_every_launch_is_exact(name, figure):
    if not current_target().executed:
        pytest.skip("on a GPU only")
    case = CASES[name]
    launch = compiled(lambda T: kernel(T, case))
    inputs, right = reference(case)
    inputs, right = [tensor.cuda() for tensor in inputs], right.float().cuda()
    launches, blocks = 0, 0
    for _ in range(LAUNCHES):
        out = torch.full((BLOCKS, case.rows, WIDTH), float("nan"), device="cuda")
        launch(*inputs, out)
        wrong = (out != right).flatten(1).any(1).sum().item()  # NaN is unequal, too
        launches, blocks = launches + (wrong > 0), blocks + wrong
    figure(f"wrong_launches_{name}", launches, f"of {LAUNCHES} launches")
    assert launches == 0, f"{launches} launches, {blocks} of {BLOCKS * LAUNCHES} blocks"


SCALAR_THREADS, SCALAR_BLOCKS = 1024, 512
each_index = pytest.mark.parametrize(
    "odd", [pytest.param(0, marks=pytest.mark.control, id="even"), pytest.param(1, marks=pytest.mark.defect, id="odd")]
)


def scalar_kernel(T, odd, n=SCALAR_THREADS):
    """Return the program: Y = X, by way of A in float32 and then of every second bfloat16 of B, in the same bytes."""

    @T.prim_func
    def main(X: T.Tensor((SCALAR_BLOCKS, n), "float32"), Y: T.Tensor((SCALAR_BLOCKS, n), "bfloat16")):
        with T.Kernel(SCALAR_BLOCKS, threads=n) as block:
            thread = T.get_thread_binding()
            A = T.alloc_shared((n,), "float32")
            B = T.alloc_shared((2 * n,), "bfloat16")
            value = T.alloc_local((1,), "float32")
            A[thread] = X[block, thread]
            value[0] = A[n - 1 - thread]
            B[2 * thread + odd] = T.cast(value[0], "bfloat16")
            Y[block, thread] = B[2 * (n - 1 - thread) + odd]

    return main


@each_index
def test_a_barrier_precedes_the_scalar_store(odd):
    import tilelang

    source, error, _ = lower(scalar_kernel(tilelang.language, odd), current_target().name)
    if error:
        pytest.skip(f"it is not lowered: {error}")
    between = source.partition("float value[1];")[2].partition("value[0] =")[2].partition("((bfloat16_t*)B)[")[0]
    if not between:
        raise NotImplementedError("the source is of another form")
    assert "__syncthreads" in between, "no barrier stands between the read of A and the store to B"


@each_index
def test_every_scalar_launch_is_exact(odd, figure):
    if not current_target().executed:
        pytest.skip("on a GPU only")
    launch = compiled(lambda T: scalar_kernel(T, odd), out_idx=[1])
    generator = torch.Generator().manual_seed(20)
    launches, elements = 0, 0
    for _ in range(LAUNCHES):
        values = torch.randint(-100, 101, (SCALAR_BLOCKS, SCALAR_THREADS), generator=generator).float().cuda()
        wrong = (launch(values).float() != values).sum().item()
        launches, elements = launches + (wrong > 0), elements + wrong
    figure(f"wrong_launches_scalar_{'odd' if odd else 'even'}", launches, f"of {LAUNCHES} launches")
    assert launches == 0, f"{launches} launches, {elements} elements"


def reference(case):
    """Return inputs of -1, 0 and 1, P, and the output in float64: all of them are integers, and small enough."""
    generator = torch.Generator().manual_seed(20)
    q, k = (torch.randint(-1, 2, (rows, WIDTH), generator=generator).double() for rows in (case.rows, WIDTH))
    scores = q @ k.T
    row = scores.sum(1) if case.reduction == "reduce_sum" else scores.amax(1)
    return [tensor.to(getattr(torch, case.dtype)) for tensor in (q, k, scores)], (q + scores) @ k + row[:, None]


def bytes_hit(source, threads):
    """Return how many bytes of the workspace the first store after its last read hits with no barrier between."""
    starts = {name: int(start) for name, start in re.findall(r"void\* (\w+) = .*buf_dyn_shmem \+ (\d+)\)\);", source)}
    starts["buf_dyn_shmem"] = 0  # releases before 0.1.10 give no names to what lies in it
    place = r"\(&\(\(\((\w+)\*\)(\w+)\)\[(.+?)\]\)\)"  # (&(((float*)workspace)[0]))
    exchanges = [*re.finditer(r"tl::AllReduce<[^;]*?" + place, source)]
    if not exchanges:
        return 0  # there is no workspace
    dtype, name, index = exchanges[-1].groups()
    start = starts[name] + BYTES[dtype] * index_value(index)
    rest = source[exchanges[-1].end() :].partition(";")[2]
    store = re.search(r"(?:ptx_stmatrix\w*_x(\d)|cp_async_gs<16>)\(" + place, rest)
    first = re.search(r"\(\((?:\w+)\*\)(?:" + "|".join(starts) + r")\)", rest)
    if first is None:
        raise NotImplementedError("nothing is stored after the reduction")
    if re.search(r"__syncthreads\(|__sync_thread_partial|bar\.sync", rest[: first.start()]):
        return 0
    if store is None or store.start() > first.start():
        raise NotImplementedError(f"the first store is of another form: {rest[first.start() : first.start() + 80]}")
    matrices, stored, buffer, index = store.groups()
    base, size = starts[buffer], BYTES[stored]
    lanes = 8 * int(matrices or 4)  # x2 takes the addresses of 16 lanes of a warp, x4 those of all
    addresses = {base + size * index_value(index, thread=thread) for thread in range(threads) if thread % 32 < lanes}
    reached = {address + byte for address in addresses for byte in range(ROW)}
    return len(reached & {*range(start, start + BYTES[dtype] * threads)})
