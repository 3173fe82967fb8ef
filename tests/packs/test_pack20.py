"""Pack 20's contract counts the bytes that a store takes from a workspace, and sees the barrier that forbids it."""

from __future__ import annotations

from types import ModuleType

import pytest

from testing import contracts

#: What a reduction and the store after it are lowered to: thread t stores the 16 bytes at 16 * t.
SOURCE = """
  void* p = ((void*)((char*)buf_dyn_shmem + 1024));
  void* workspace = ((void*)((char*)buf_dyn_shmem + 1024));
  row[i] = tl::AllReduce<tl::SumOp, 128, 32, 0, tl::NamedBarrier<128>>::run(row[i], (&(((float*)workspace)[0])));
  row[i] = tl::AllReduce<tl::SumOp, 4, 1, 0, tl::NamedBarrier<128>>::run(row[i]);
  tl::ptx_stmatrix_m8n8_x4((&(((bfloat16_t*)p)[(((int)threadIdx.x) * 8)])), acc[0]);
"""


@pytest.fixture(scope="module")
def contract() -> ModuleType:
    """Load the contract; nothing of tilelang is imported by that."""
    return contracts.load("20_tilelang_reduce_barrier")


@pytest.mark.parametrize(
    ("old", "new", "measured"),
    [
        ("", "", 512),  # the whole workspace
        ("_x4", "_x2", 256),  # 16 lanes of 32 give addresses
        ("_x4", "_x1", 128),
        ("buf_dyn_shmem + 1024", "buf_dyn_shmem + 1280", 256),  # p begins in the middle of it
        ("(&(((float*)workspace)[0])", "(&(((float*)workspace)[64])", 512),
        ("ptx_stmatrix_m8n8_x4", "cp_async_gs<16>", 512),
        ("* 8)", "* 0)", 16),
    ],
)
def test_stored_bytes_of_the_workspace_are_counted(contract: ModuleType, old: str, new: str, measured: int) -> None:
    assert old in SOURCE
    assert contract.bytes_hit(SOURCE.replace(old, new, 1), 128) == measured


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  tl::ptx_stmatrix", "  __syncthreads();\n  tl::ptx_stmatrix"),
        ("  tl::ptx_stmatrix", "  tl::__sync_thread_partial(3, 128);\n  tl::ptx_stmatrix"),
        ("buf_dyn_shmem + 1024", "buf_dyn_shmem + 4096"),  # p lies elsewhere
        (", (&(((float*)workspace)[0]))", ""),  # no workspace
    ],
)
def test_a_right_source_passes(contract: ModuleType, old: str, new: str) -> None:
    assert old in SOURCE
    assert contract.bytes_hit(SOURCE.replace(old, new, 1), 128) == 0


@pytest.mark.parametrize("old", ["  void* p", "  tl::AllReduce", "  row[i] ="])
def test_a_barrier_elsewhere_is_no_barrier_between(contract: ModuleType, old: str) -> None:
    assert contract.bytes_hit(SOURCE.replace(old, f"  __syncthreads();\n{old}", 1), 128) == 512


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl::ptx_stmatrix_m8n8_x4((&(((bfloat16_t*)p)[", "*(uint1*)((((bfloat16_t*)p) + ["),
        ("threadIdx.x) * 8", "threadIdx.y) * 8"),
        ("tl::ptx_stmatrix_m8n8_x4((&(((bfloat16_t*)p)[", "f((&((x)["),
    ],
)
def test_a_source_of_another_form_is_not_judged(contract: ModuleType, old: str, new: str) -> None:
    assert old in SOURCE
    with pytest.raises(NotImplementedError):
        contract.bytes_hit(SOURCE.replace(old, new), 128)


def test_every_number_of_the_reference_is_exact(contract: ModuleType) -> None:
    torch = contract.torch
    for case in contract.CASES.values():
        inputs, wanted = contract.reference(case)
        assert torch.equal(wanted, wanted.round())
        assert wanted.abs().max() < 2**24  # float32 has these integers
        scores = inputs[0].double() @ inputs[1].double().T
        assert torch.equal(inputs[2].double(), scores)
        assert scores.abs().sum(1).max() <= 2**11  # float16 has these, in whatever order they are added up
