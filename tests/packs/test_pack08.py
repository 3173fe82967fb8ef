"""Pack 08's probe sees a tile that is overwritten too early, and one that is read from elsewhere."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType, SimpleNamespace

import pytest

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/08_tilelang_bulk_copy_view"
#: The longest example that a report may have.
MOST_LINES = 20
#: What the kernel without a view is lowered to, in as few lines as the probe reads.
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
def probe() -> ModuleType:
    """Load the probe; nothing of tilelang is imported by that."""
    spec = importlib.util.spec_from_file_location("probe_of_pack_08", FOLDER / "reproduce.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class InternalError(Exception):
    """Stands for TVM's."""


def judged(probe: ModuleType, monkeypatch: pytest.MonkeyPatch, source: str | Exception) -> tuple[bool | None, dict]:  # type: ignore[type-arg]
    """Judge a source, or what a kernel was refused with."""

    def lower(*_: object) -> str:
        if isinstance(source, Exception):
            raise source
        return source

    monkeypatch.setattr(probe, "lower", lower)
    tilelang = SimpleNamespace(tvm=SimpleNamespace(error=SimpleNamespace(InternalError=InternalError)))
    ok, values = probe.judge_slots(tilelang, "sm_90a", None)
    return ok, values


def test_a_right_source_has_its_slots(probe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ok, values = judged(probe, monkeypatch, SOURCE)
    assert ok
    assert values["measured"] == {"overwritten": 0, "read elsewhere": 0, "slots": 2, "barriers": 1}


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("((i & 1) * 4096)", "0", (3, 2)),  # one slot is written
        ("((i_2 & 1) * 8192)", "0", (0, 2)),  # one slot is read
        ("((i_2 & 1) * 8192)", "((i_2 & 1) * 4096)", (0, 2)),  # half a slot further
        ("((i & 1) + 2)].wait(((i >> 1) ^ 1))", "(i + 2)].wait(1)", (2, 0)),  # it never waits
    ],
)
def test_a_wrong_source_is_seen(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, old: str, new: str, wrong: tuple[int, int]
) -> None:
    assert old in SOURCE
    ok, values = judged(probe, monkeypatch, SOURCE.replace(old, new))
    assert ok is False
    assert (values["measured"]["overwritten"], values["measured"]["read elsewhere"]) == wrong


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("((i >> 1) ^ 1)", "(i >> 1)"),  # it waits for a gemm before the first tile is there
        ("((i_2 & 1) + 2)].arrive", "(i_2 * 0 + 2)].arrive"),  # the second barrier is never released
    ],
)
def test_a_kernel_that_hangs_is_wrong(probe: ModuleType, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    assert old in SOURCE
    ok, values = judged(probe, monkeypatch, SOURCE.replace(old, new))
    assert (ok, values["measured"]) == (False, "hangs")


def test_only_this_refusal_is_the_bug(probe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(probe, monkeypatch, InternalError("... rescale_num = 16"))[0] is False
    assert judged(probe, monkeypatch, InternalError("Cannot detect TMA layout."))[0] is None


def test_other_words_are_not_judged(probe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ok, values = judged(probe, monkeypatch, SOURCE.replace("tma_load", "cp_async"))
    assert ok is None
    assert "0 times" in values["reason"]


def test_the_example_of_the_report_is_short() -> None:
    text = (FOLDER / "report.in.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example
    assert len([line for line in example[1].splitlines() if line.strip()]) <= MOST_LINES
