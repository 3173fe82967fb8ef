"""Pack 08's contract sees a tile that is overwritten too early, and one that is read from elsewhere."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from testing import contracts

#: What the kernel without a view is lowered to, in as few lines as the contract reads.
SOURCE = """
    mbarrier[0].init(1);
    for (int i = 0; i < 4; ++i) {
      mbarrier[((i & 1) + 2)].wait(((i >> 1) ^ 1));
        tl::tma_load(A_desc, mbarrier[(i & 1)], (&(tile[((i & 1) * 4096)])), 0, 0, i);
    }
    for (int i_2 = 0; i_2 < 4; ++i_2) {
      mbarrier[(i_2 & 1)].wait((i_2 >> 1));
        tl::initialize_wgmma_descriptor<1, 1, 64>(desc_a, (&(tile[0])));
        tl::increase_descriptor_offset<int>(desc_a, ((i_2 & 1) * 8192));
        for (int ki = 0; ki < 4; ++ki) {
        }
      mbarrier[((i_2 & 1) + 2)].arrive();
    }
"""


@pytest.fixture(scope="module")
def contract() -> ModuleType:
    """Load the contract; nothing of tilelang is imported by that."""
    return contracts.load("08_tilelang_bulk_copy_view")


def test_a_right_source_has_its_slots(contract: ModuleType) -> None:
    assert contract.fault(SOURCE) == ""
    assert {tile.written for tile in contract.followed(SOURCE)} == {0, 4096}


@pytest.mark.parametrize(
    ("old", "new", "overwritten", "elsewhere"),
    [
        ("((i & 1) * 4096)", "0", 3, 2),  # one slot is written
        ("((i_2 & 1) * 8192)", "0", 0, 2),  # one slot is read
        ("((i_2 & 1) * 8192)", "((i_2 & 1) * 4096)", 0, 2),  # half a slot further
        ("((i & 1) + 2)].wait(((i >> 1) ^ 1))", "(i + 2)].wait(1)", 2, 0),  # it never waits
    ],
)
def test_a_wrong_source_is_seen(contract: ModuleType, old: str, new: str, overwritten: int, elsewhere: int) -> None:
    assert old in SOURCE
    said = f"of 4 tiles {overwritten} can be overwritten, {elsewhere} are read elsewhere"
    assert said in contract.fault(SOURCE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("((i >> 1) ^ 1)", "(i >> 1)"),  # it waits for a gemm before the first tile is there
        ("((i_2 & 1) + 2)].arrive", "(i_2 * 0 + 2)].arrive"),  # the second barrier is never released
    ],
)
def test_a_kernel_that_hangs_is_wrong(contract: ModuleType, old: str, new: str) -> None:
    assert old in SOURCE
    assert "it hangs" in contract.fault(SOURCE.replace(old, new))


@pytest.mark.parametrize(
    ("error", "outcome"),
    [("... rescale_num = 16", pytest.fail.Exception), ("Cannot detect TMA layout.", pytest.skip.Exception)],
)
def test_only_this_refusal_is_the_bug(
    contract: ModuleType, monkeypatch: pytest.MonkeyPatch, error: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setitem(sys.modules, "tilelang", ModuleType("tilelang"))
    monkeypatch.setattr(contract, "current_target", lambda: SimpleNamespace(name="sm_90a"))
    monkeypatch.setattr(contract, "kernel", lambda *_: None)
    monkeypatch.setattr(contract, "lower", lambda *_: ("", f"InternalError: {error}", 0))
    with pytest.raises(outcome):
        contract.test_each_stage_has_its_slot("written-64x64", [])


def test_other_words_are_not_judged(contract: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="0 times"):
        contract.fault(SOURCE.replace("tma_load", "cp_async"))
