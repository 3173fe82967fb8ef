"""tilelang lowers a reduction of a gemm's result, and every element is in its sum once.

tilelang 0.1.13 to 0.1.15 refuse it where 8 or more warps lie along the reduced dimension and each has 16 or more of its
elements. They name an equality of two indices, which holds for every value. Nothing is launched. Each kernel is lowered
in a process of its own, since 0.1.13's answer depends on what was lowered before.

For sm_90a, kernels that reduce a view are judged, too. There the contract follows the sums through the CUDA source of a
float32 reduce_sum, for every thread: from the registers in which PTX says that wgmma leaves the accumulator, to the
output. They are counts, so that the tolerance is 0. Not judged: the results of a max, and of a float16 sum; sums for
targets other than sm_90a.
"""

import re
import typing

import pytest
import torch

from kit import current_target
from kit.cuda_source import in_processes, index_value, lower, only_match

EVIDENCE_WITHOUT_GPU = dict.fromkeys(("sm_80", "sm_90a", "sm_100a", "sm_120a"), "compiled")
REFUSAL = "thread-owned reduce"


class Case(typing.NamedTuple):
    """One kernel: a gemm of [M, 64] and [64, N], and a reduction of its result seen in rows of `width`."""

    M: int = 64
    N: int = 64
    width: int = 256
    threads: int = 256
    form: str = "view"  # a sum; or plain, a maximum; or a workaround: two_reductions, shared_memory

    @property
    def rows(self):
        """The number of results."""
        return self.M * self.N // self.width


def plain(*sizes):
    """Return the kernels of a row maximum by their names; a size is rows, keys and threads."""
    return {f"{rows}x{keys}-{n}_threads": Case(rows, keys, keys, n, "plain") for rows, keys, n in sizes}


#: Warps along the keys, and keys of each: 8 of 16, 8 of 32, 16 of 16, 8 of 16, 8 of 32.
PLAIN_REFUSED = plain((16, 128, 256), (16, 256, 256), (16, 256, 512), (32, 128, 512), (32, 256, 512))
#: At most 4 warps along the keys, or 8 keys of each.
PLAIN_LOWERED = plain(
    (16, 64, 128), (16, 64, 256), (16, 128, 128), (16, 128, 512), (16, 256, 128),
    (32, 64, 512), (32, 128, 256), (32, 256, 256), (64, 128, 512), (64, 256, 512),
)  # fmt: skip
VIEW_REFUSED = {
    "16x256": Case(),
    "8x512": Case(width=512),
    "16x512-mamba": Case(N=128, width=512),  # the shape of mamba_mimo_bwd_bwd
}
VIEW_LOWERED = {
    "view-16x256-128_threads": Case(threads=128),
    "view-32x128": Case(width=128),
    "view-64x64": Case(width=64),
    "16x512-two_reductions": Case(N=128, width=512, form="two_reductions"),
    "16x256-shared_memory": Case(form="shared_memory"),
}
IS_HOPPER = current_target().name == "sm_90a"
REFUSED = PLAIN_REFUSED | (VIEW_REFUSED if IS_HOPPER else {})
LOWERED = PLAIN_LOWERED | (VIEW_LOWERED if IS_HOPPER else {})
CASES = {**LOWERED, **REFUSED}
FOLLOWED = [name for name, case in CASES.items() if case.form == "view"]
AGAIN = "view-16x256-128_threads"


def named(*names):
    """Return parameters, each with its mark: a kernel that the release refuses is a defect."""
    return [pytest.param(name, marks=pytest.mark.defect if name in REFUSED else pytest.mark.control) for name in names]


def kernel(T, case):
    """Return the program: out = the reduction of each row of a view of A @ B.T."""
    M, N, width, threads, form = case
    reduced = T.reduce_max if form == "plain" else T.reduce_sum

    @T.prim_func
    def main(A: T.Tensor((M, 64), "bfloat16"), B: T.Tensor((N, 64), "bfloat16"), C: T.Tensor((case.rows,), "float32")):
        with T.Kernel(1, threads=threads) as _:
            a = T.alloc_shared((M, 64), "bfloat16")
            b = T.alloc_shared((N, 64), "bfloat16")
            acc = T.alloc_fragment((M, N), "float32")
            out = T.alloc_fragment((case.rows,), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, acc, transpose_B=True, clear_accum=True)
            if form == "two_reductions":
                row = T.alloc_fragment((M,), "float32")
                reduced(acc, row, dim=1)
                reduced(T.view(row, [case.rows, width // N]), out, dim=-1)
            elif form == "shared_memory":
                shared = T.alloc_shared((M, N), "float32")
                T.copy(acc, shared)
                reduced(T.view(shared, [case.rows, width]), out, dim=-1)
            else:
                reduced(acc if form == "plain" else T.view(acc, [case.rows, width]), out, dim=-1)
            T.copy(out, C)

    return main


def lower_case(name, target):
    """Lower a kernel in a process of its own; the kernel of AGAIN three times."""
    import tilelang

    return [lower(kernel(tilelang.language, CASES[name]), target) for _ in range(3 if name == AGAIN else 1)]


@pytest.fixture(scope="module")
def lowered(figure):
    """Return what became of each kernel, by its name."""
    import tilelang  # noqa: F401 - once, and not in each process

    found = dict(zip(CASES, in_processes(lower_case, [(name, current_target().name) for name in CASES]), strict=True))
    figure("kernels_refused", sum(bool(found[name][0].error) for name in REFUSED), f"of {len(REFUSED)}")
    return found


def assert_lowers(answers):
    """Take this refusal for the bug; any other error says nothing of it."""
    for answer in answers:
        if answer.error and REFUSAL not in answer.error:
            raise NotImplementedError(f"another error: {answer.error}")
        assert answer.source, answer.error


@pytest.mark.parametrize("name", named(*CASES))
def test_reduction_lowers(name, lowered):
    assert_lowers(lowered[name][:1])


@pytest.mark.defect
@pytest.mark.skipif(not IS_HOPPER, reason="views are judged for sm_90a alone")
def test_reduction_lowers_again_in_the_same_process(lowered):
    assert_lowers(lowered[AGAIN][1:])


@pytest.mark.skipif(not IS_HOPPER, reason="the registers are those of wgmma")
@pytest.mark.parametrize("name", named(*FOLLOWED) if IS_HOPPER else [pytest.param("any", marks=pytest.mark.control)])
def test_every_element_is_in_its_sum_once(name, lowered):
    case, answer = CASES[name], lowered[name][0]
    if answer.error:
        pytest.skip("it is refused")
    assert_each_once(case, answer.source)


def assert_each_once(case, source):
    """Compare the elements in each sum with the elements of a row."""
    right = torch.arange(case.M * case.N) // case.width == torch.arange(case.rows)[:, None]
    wrong = (elements_of_sums(case, source) != right).any(1).sum()
    assert wrong == 0, f"{wrong} of {case.rows} sums do not have each of their elements once"


@pytest.mark.control
@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_two_equal_indices(name, lowered):
    if not lowered[name][0].error:
        pytest.skip("it is lowered")
    assert_equal_indices(CASES[name], lowered[name][0].error)


def assert_equal_indices(case, refusal):
    """Compare the two indices for all values; where they differ, the refusal is right."""
    names = only_match(r" src_index=(.+), projected_src_index=(.+), reduce_var=(\w+), projected_reduce_var=", refusal)
    values = {"i": torch.arange(case.rows)[:, None], names[3]: torch.arange(case.width)}
    differ = (index_value(names[1], **values) != index_value(names[2], **values)).sum()
    assert differ == 0, f"they differ at {differ} of {case.rows * case.width} values"


def elements_of_sums(case, source):
    """Follow every thread through the source. Return how often each element is in each sum, [rows, M * N]."""
    rows, columns = map(int, only_match(r"tl::wgmma_ss<(?:[\w:]+, ){3}(\d+), (\d+), 16,", source).groups())
    if (rows, columns * case.threads // 128) != (case.M, case.N):
        raise NotImplementedError(f"wgmma of [{rows}, {columns}] by {case.threads} threads")
    index, register = only_match(r"out\[(\w+)\] = \(out\[\w+\] \+ acc\[(.+)\]\);", source).groups()
    summed = torch.arange(int(only_match(r"int rv = 0; rv < (\d+);", source)[1]))
    end = source[source.rfind("tl::AllReduce") :]
    thread = torch.arange(case.threads)
    stores = index_value(only_match(r"if \((.+) == 0\) \{", end)[1], thread=thread) == 0
    found = torch.zeros(case.rows, case.M * case.N, dtype=torch.int32)
    for number in range(int(only_match(r"float out\[(\d+)\];", source)[1])):
        registers = index_value(register, thread=thread[:, None], rv=summed, **{index: number}).expand(len(thread), -1)
        elements = element(case, columns, thread[:, None], registers)
        held = torch.zeros(len(thread), case.M * case.N, dtype=torch.int32)
        held.scatter_add_(1, elements, torch.ones_like(elements, dtype=torch.int32))
        for width, scale in re.findall(r"tl::AllReduce<tl::SumOp, (\d+), (\d+),", source):
            # It adds up the threads whose numbers differ in one bit, from width / 2 to scale.
            for bit in (2**power for power in range(32) if int(scale) <= 2**power < int(width)):
                held = held + held[thread ^ bit]
        found.index_add_(0, place(end, thread, number)[stores], held[stores])
    return found


def element(case, columns, thread, register):
    """Return the place in [M, N], row by row, of an accumulator's register (PTX, wgmma.m64nNk16, D)."""
    group, warp, lane = thread // 128, thread // 32 % 4, thread % 32
    row = 16 * warp + 8 * (register // 2 % 2) + lane // 4
    return row * case.N + columns * group + 8 * (register // 4) + 2 * (lane % 4) + register % 2


def place(end, thread, number):
    """Return where a thread stores its sum of that number: one by one, or several in one vector."""
    if scalar := re.search(r"\bC\[(.+)\] = out\[(\w+)\];", end):
        return index_value(scalar[1], thread=thread, **{scalar[2]: number})
    vector = only_match(r"\*\(float\d\*\)\(C \+ (.+)\) = \*\(float\d\*\)\(out \+ 0\);", end)[1]
    return index_value(vector, thread=thread) + number
