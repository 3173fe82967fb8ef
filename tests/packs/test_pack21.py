"""Pack 21's contract sees a sum that lacks an element or has one twice, and a refusal that would be right."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from testing import contracts

#: What rows of 64 of [64, 64] are lowered to with 128 threads, in as few lines as the script reads.
SOURCE = """
  float out[2];
  tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64, 64, 16, false>(a, b);
    for (int rv = 0; rv < 16; ++rv) {
      out[i] = (out[i] + acc[((((rv & 7) * 4) + (i * 2)) + (rv >> 3))]);
    }
    out[i] = tl::AllReduce<tl::SumOp, 4, 1, 0>::run(out[i]);
  if ((((int)threadIdx.x) & 3) == 0) {
      C[((((((int)threadIdx.x) >> 5) * 16) + (k * 8)) + ((((int)threadIdx.x) & 31) >> 2))] = out[k];
  }
"""
REFUSAL = "ReduceOp cannot lower: src_index={}, projected_src_index={}, reduce_var=rv, projected_reduce_var=rv - rv % 2"


@pytest.fixture(scope="module")
def contract() -> ModuleType:
    """Load the contract; nothing of tilelang is imported by that."""
    return contracts.load("21_tilelang_reduce_max_refused")


def test_a_right_source_has_every_element_once(contract: ModuleType) -> None:
    contract.assert_each_once(contract.Case(width=64, threads=128), SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("AllReduce<tl::SumOp, 4, 1", "AllReduce<tl::SumOp, 4, 2"),  # two of four lanes
        ("AllReduce<tl::SumOp, 4, 1", "AllReduce<tl::SumOp, 8, 1"),  # two rows in one sum
        ("rv < 16", "rv < 15"),
        ("(rv & 7)", "(rv & 3)"),  # elements twice, and others not at all
        ("(i * 2)", "(i * 0)"),
        ("(k * 8)", "(k * 4)"),
        ("& 3) == 0", "& 1) == 0"),  # it is stored twice: the followed stores are added up
    ],
)
def test_a_wrong_source_is_seen(contract: ModuleType, old: str, new: str) -> None:
    assert old in SOURCE
    with pytest.raises(AssertionError, match="of 64 sums do not have each of their elements once"):
        contract.assert_each_once(contract.Case(width=64, threads=128), SOURCE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [("acc[", "other["), ("64, 64, 16", "64, 32, 16"), ("rv & 7", "warp & 7"), ("C[", "D["), ("tl::AllReduce", "sum")],
)
def test_a_source_of_another_form_is_not_judged(contract: ModuleType, old: str, new: str) -> None:
    assert old in SOURCE
    with pytest.raises(NotImplementedError, match=r"source|form|wgmma"):
        contract.assert_each_once(contract.Case(width=64, threads=128), SOURCE.replace(old, new))


def test_a_refusal_without_reason_is_seen(contract: ModuleType) -> None:
    contract.assert_equal_indices(contract.Case(), REFUSAL.format("rv // 8 * 4", "(rv - rv % 2) // 8 * 4"))


def test_a_refusal_with_reason_is_seen(contract: ModuleType) -> None:
    refusal = REFUSAL.format("rv % 2 + i % 4 * 2", "(rv - rv % 2) % 2 + i % 4 * 2")
    with pytest.raises(AssertionError, match="differ at 2048 of 4096 values"):
        contract.assert_equal_indices(contract.Case(), refusal)


def test_another_error_says_nothing(contract: ModuleType) -> None:
    other = SimpleNamespace(source="", error="AttributeError: no view")
    with pytest.raises(NotImplementedError, match="another error: AttributeError"):
        contract.assert_lowers([other])
