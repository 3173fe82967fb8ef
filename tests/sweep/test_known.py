"""Deviations that are known: a sweep names them with their thread, and fails for everything else."""

from __future__ import annotations

from typing import Any

import pytest

from testing import toys
from testing.workbench import Workbench

CELL = "01_confirmed/cpu"
PATCHES = toys.RESOURCES / "packs"


def _sweep(bench: Workbench, patch: str) -> tuple[int, list[str], dict[str, Any]]:
    """Sweep one pack with the patch of a toy; return the exit status, the lines printed, and the cell."""
    (bench.packs / "01_confirmed/fix.patch").write_text((PATCHES / patch / "fix.patch").read_text())
    ended = bench.sweep()
    return ended.returncode, ended.stdout.splitlines(), bench.cells()[CELL]


@pytest.fixture
def bench(workbench: Workbench) -> Workbench:
    """Lay a pack whose deviation is known."""
    definition = workbench.lay("01_confirmed") / "pack.toml"
    definition.write_text('known = "tilelang#3042 <soon>"\n' + definition.read_text())
    return workbench


def test_a_known_deviation_is_listed_with_its_thread_and_fails_nothing(bench: Workbench) -> None:
    status, lines, cell = _sweep(bench, "03_fix_ineffective")
    assert lines[0].startswith(f"{CELL}: KNOWN tilelang#3042 <soon>: FIX INEFFECTIVE: toykernel 1.0: was CONFIRMED")
    assert (status, cell["known"], cell["verdict"]) == (0, "tilelang#3042 <soon>", "FIX_INEFFECTIVE")
    assert lines[-2].startswith("nothing needs attention, 1 known; 1 cells")
    assert "<p>Known: tilelang#3042 &lt;soon&gt;</p>" in (bench.newest / "index.html").read_text()


def test_a_known_deviation_that_is_gone_is_said(bench: Workbench) -> None:
    status, lines, cell = _sweep(bench, "01_confirmed")
    assert (status, cell["known"]) == (0, "")
    assert lines[0] == f"{CELL}: KNOWN: tilelang#3042 <soon>: no deviation was seen; `known` in pack.toml can go"


def test_an_error_is_never_known(bench: Workbench) -> None:
    (bench.packs / "01_confirmed/reproduce.py").write_text("raise RuntimeError('broken')\n")
    status, lines, cell = _sweep(bench, "01_confirmed")
    assert (status, cell["known"], cell["verdict"]) == (1, "", "ERROR"), lines


def test_another_pack_that_deviates_fails(bench: Workbench) -> None:
    bench.lay("03_fix_ineffective")
    ended = bench.sweep()
    assert ended.returncode == 1
    assert "03_fix_ineffective/cpu: FIX INEFFECTIVE" in ended.stdout
