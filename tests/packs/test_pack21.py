"""Pack 21's probe sees a sum that lacks an element or has one twice, and a refusal that would be right."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/21_tilelang_reduce_of_view"
#: The longest example that a report may have.
MOST_LINES = 20
#: What rows of 64 of [64, 64] are lowered to with 128 threads, in as few lines as the probe reads.
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
def probe() -> ModuleType:
    """Load the probe; nothing of tilelang is imported by that."""
    spec = importlib.util.spec_from_file_location("probe_of_pack_21", FOLDER / "reproduce.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_right_source_has_every_element_once(probe: ModuleType) -> None:
    ok, values = probe.judge_sums(probe.Case(128, 64, 64, 64, "view.reduce_sum", "float32"), SOURCE)
    assert (ok, values["measured"]) == (True, 0)


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
def test_a_wrong_source_is_seen(probe: ModuleType, old: str, new: str) -> None:
    assert old in SOURCE
    ok, values = probe.judge_sums(probe.Case(128, 64, 64, 64, "view.reduce_sum", "float32"), SOURCE.replace(old, new))
    assert ok is False
    assert values["measured"] > 0


@pytest.mark.parametrize(
    ("old", "new"),
    [("acc[", "other["), ("64, 64, 16", "64, 32, 16"), ("rv & 7", "warp & 7"), ("C[", "D["), ("tl::AllReduce", "sum")],
)
def test_a_source_of_another_form_is_not_judged(probe: ModuleType, old: str, new: str) -> None:
    assert old in SOURCE
    case = probe.Case(128, 64, 64, 64, "view.reduce_sum", "float32")
    ok, values = probe.judge_sums(case, SOURCE.replace(old, new))
    assert ok is None
    assert "source" in values["reason"] or "form" in values["reason"] or "wgmma" in values["reason"]


@pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")  # torch says so where there is none
@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [
        ("rv // 8 * 4", "(rv - rv % 2) // 8 * 4", 0),
        ("rv % 2 + i % 4 * 2", "(rv - rv % 2) % 2 + i % 4 * 2", 2048),
    ],
)
def test_a_refusal_with_reason_is_seen(probe: ModuleType, first: str, second: str, differ: int) -> None:
    case = probe.Case(256, 64, 64, 256, "view.reduce_sum", "float32")
    ok, values = probe.judge_message(case, REFUSAL.format(first, second))
    assert (ok, values["measured"]) == (differ == 0, differ)


def test_another_error_says_nothing(probe: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="another error: AttributeError"):
        probe.judge_lowers([("", "AttributeError: no view")])


def test_the_example_of_the_report_is_short() -> None:
    text = (FOLDER / "report.in.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(example.splitlines()) <= MOST_LINES
