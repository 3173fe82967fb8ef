"""Seals beyond what `testing.tampering` plants: caches of other users, JIT results, and what receipts state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.core import seal
from harness.core.cache import Cache
from harness.pack import judges, load
from testing import tampering, toys
from testing.workbench import Workbench

LINE = "from toykernel import scale\n"


def test_a_cache_from_elsewhere_is_built_again_and_compared(tmp_path: Path) -> None:
    bench = tmp_path / "bench"
    bench.mkdir()
    workbench = tampering.with_a_dependency(bench)
    assert workbench.rows()[1][0]["verdict"] == "CONFIRMED"
    state = {"XDG_STATE_HOME": str(tmp_path / "state of another user")}
    assert workbench.rows(**state)[1][0]["verdict"] == "CONFIRMED"
    tampering.append(tampering.scale(workbench))
    workbench.gives(1, "ERROR", XDG_STATE_HOME=str(tmp_path / "a third user"))


def test_an_entry_is_laid_out_anew_where_what_it_is_made_from_has_changed_too(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(entry: Path) -> None:
        (entry / "content").mkdir(parents=True)
        built.append(entry)
        if len(built) == 2:  # the release that a patched tree is copied from was changed, and is laid out anew now
            raise seal.ChangedError("the release changed")
        (entry / "content/kernel.py").write_text("x = 1\n")

    layout = seal.Layout(Cache(tmp_path / "cache"), "trees", "key", build, "the patched tree")
    before = layout.lay_out()
    (layout.folder / "new.py").write_text("x = 1\n")
    with pytest.raises(seal.ChangedError, match=r"the patched tree .* new.py was added"):
        layout.check(before, while_it_ran=True)
    assert [path.name for path in layout.folder.iterdir()] == ["kernel.py"]


def test_jit_results_that_somebody_touched_are_not_used(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    jit = 'import os, pathlib\nkept = pathlib.Path(os.environ["TRITON_CACHE_DIR"], "x")\n'
    jit += "kept.parent.mkdir(exist_ok=True)\n"
    jit += 'print("FOUND", kept.read_text() if kept.exists() else None)\nkept.write_text("made")\n'
    toys.replace(pack / "reproduce.py", LINE, LINE + jit)

    def printed() -> list[str]:
        logs = [Path(log).read_text() for log in workbench.rows()[1][0]["logs"]]
        return [line for log in logs for line in log.splitlines() if line.startswith("FOUND")]

    assert printed() == ["FOUND None", "FOUND None"]
    assert printed() == ["FOUND made", "FOUND made"]
    for path in workbench.cache.glob("jit/*/triton/x"):
        path.write_text("poisoned")
    assert printed() == ["FOUND None", "FOUND None"]


def test_what_runs_is_what_the_receipt_states(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    probe = pack / "reproduce.py"
    edit = f'with open({str(probe)!r}, "a") as stream: stream.write("# edited\\n")\n'
    toys.replace(probe, LINE, LINE + edit)
    before, judged = probe.read_bytes(), judges.sha256(load.load_pack(pack))
    workbench.rows()
    assert probe.read_bytes() != before
    (receipt,) = workbench.receipts.rglob("*.json")
    assert json.loads(receipt.read_text())["probe"]["sha256"] == judged


def test_a_lane_cannot_tell_which_one_it_is_by_its_paths(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    shown = 'print("PATHS", scale.__file__, __file__, sys.path)\n'
    toys.replace(pack / "reproduce.py", LINE, LINE + shown)
    status, (row,) = workbench.rows()
    assert status == 0
    for log in row["logs"]:
        assert "patched" not in next(line for line in Path(log).read_text().splitlines() if line.startswith("PATHS"))
