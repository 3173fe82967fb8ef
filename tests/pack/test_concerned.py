"""Which packs the files of a change concern."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.pack import load
from harness.pack.load import packs_about, paths
from testing.workbench import REPOSITORY

PACKS = [load.load_pack(folder) for folder in load.folders(REPOSITORY / "packs")]
FUSED = [
    "09_liger_flce_none",
    "17_liger_flce_saved_gradients",
    "24_liger_flce_frozen_input",
    "25_liger_flce_none_rounds_weights",
]
CROSS_ENTROPY = "src/liger_kernel/ops/fused_linear_cross_entropy.py"


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ([CROSS_ENTROPY], FUSED),
        ([f"./{CROSS_ENTROPY}", "README.md"], FUSED),
        (["liger_kernel/ops/fused_linear_cross_entropy.py"], []),
        (["megatron/core/fusions/fused_cross_entropy.py"], ["19_megatron_fused_ce_rounding"]),
        (["megatron/core/fusions/fused_cross_entropy.py.orig", "megatron/__init__.py"], []),
        (["tilelang/language/reduce.py", "tilelang/__init__.py"], []),
        (["", "docs/a file.md", '"odd\\tname"', "../outside", "/etc/passwd"], []),
        ([], []),
    ],
)
def test_by_the_files_that_a_target_loads_else_by_the_modules(changed: list[str], wanted: list[str]) -> None:
    assert [pack.name for pack in packs_about(PACKS, changed)] == wanted


def test_a_pack_without_a_patch_is_about_its_modules() -> None:
    (pack,) = [pack for pack in PACKS if pack.name == "21_tilelang_reduce_max_refused"]
    assert paths(pack.definition) == ("tilelang.py", "tilelang/")
    definition = pack.definition
    pure = replace(
        pack, definition=replace(definition, upstream=replace(definition.upstream, file="x-py3-none-any.whl"))
    )
    assert packs_about([pure], ["tilelang/language/reduce.py"]) == packs_about([pure], ["tilelang.py"]) == [pure]
    assert packs_about([pure], ["tilelang_extra/x.py", "docs/tilelang/x.md", "src/tilelang/x.py"]) == []
    assert packs_about([pack], ["tilelang.py"]) == [], "its checkout would have to be built first"


def test_every_pack_is_about_some_file() -> None:
    for pack in PACKS:
        assert paths(pack.definition), pack.name
        assert not any(Path(path).is_absolute() for path in paths(pack.definition))
