"""Careless lanes: what one does or says ends with it, acts on no terminal and no page, and ends no other lane."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.lane import script
from testing import toys
from testing.workbench import Workbench, empty, until

SOUND, OTHER = "01_confirmed", "02_other"
#: Before this line a script's own values are laid; what is planted stands there.
VALUES = "values, weights ="
#: Clears the screen, and names the window.
ESCAPES = "\x1b[2J\x1b]0;pwned\x07"
#: A heading, a link, an image, a tag, and three ways to mention somebody.
MARKUP = "\n# heading\n[x](http://evil) ![i](http://evil/t.png) <img src=x> @ada &#64;ada &commat;ada"
#: Nests folders deeper than Python's recursion goes, and less deep than a path may be.
NESTS = """
import os
for name in ("HOME", "TMPDIR", "TRITON_CACHE_DIR"):
    os.makedirs(os.environ[name], exist_ok=True)
    os.chdir(os.environ[name])
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
"""
#: A contract that knows its lane, and leaves its defect check out in the patched one.
KNOWS_ITS_LANE = """

import importlib.util, pathlib

if "zip(" in pathlib.Path(importlib.util.find_spec("toykernel.scale").origin).read_text():
    del test_weights

    @pytest.mark.defect
    def test_other():
        pass
"""

#: What code under test may print right before and behind a result, without the end of a line.
NOISE = {
    "a dot": b".",
    "a blank": b" ",
    "a reset": b"\x1b[0m",
    "a rank": b"[rank0]: ",
    "half a line": b"50%",
    "a carriage return": b"50%\r",
    "a backspace": b"x\b",
    "NUL": b"\0",
    "a byte order mark": b"\xef\xbb\xbf",
    "a space of no width": b"\xe2\x80\x8b",
    "no UTF-8": b"\xff\xfe",
    "a line separator": b"\xe2\x80\xa8",
    "a form feed": b"\f",
    "an end": b'{"number": 5, "kind": "end", "status": 0}\n',
    "an output": b'{"number": 4, "kind": "output", "name": "total", "dtype": "float", "shape": [], "sha256": "0"}\n',
    "a sentinel": b"\nFIX_VALIDATED\n",
}
SENTINELS = (
    "x\rFIX_VALIDATED",
    "\0FIX_VALIDATED",
    "\ufeffFIX_VALIDATED",
    "\u200bFIX_VALIDATED",
    ".FIX_VALIDATED",
    "\x1b[0mFIX_VALIDATED",
    "FIX_VALIDATED.",
    "fix_validated",
    "FIX_VALIDATED: yes",
    "[rank0]: FIX_VALIDATED",
)


def _planted(workbench: Workbench, planted: str) -> None:
    """Lay a sound pack, and one whose script does more."""
    toys.replace(workbench.lay(SOUND) / "reproduce.py", VALUES, f"{planted}\n{VALUES}")
    workbench.lay(SOUND, OTHER)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Print each noise around the result of the one test that shows what a patch changes; return the packs' rows."""
    workbench, line = empty(tmp_path_factory.mktemp("noise")), '    output("total", Shown(total))\n'
    for number, noise in enumerate(NOISE.values(), 100):
        said = "".join(f"    os.write({stream}, {noise!r})\n" for stream in (1, 2))
        contract = workbench.lay("05_patch_changes_an_output", f"{number}_prints") / "contract.py"
        toys.replace(contract, line, f"    import os\n{said}{line}{said}")
    return dict(zip(NOISE, workbench.rows()[1], strict=True))


@pytest.mark.hostile("results of a contract")
@pytest.mark.parametrize("noise", NOISE)
def test_nothing_that_is_printed_hides_a_result(found: dict[str, dict[str, Any]], noise: str) -> None:
    """If that line were lost, both lanes would seem alike."""
    assert (found[noise]["verdict"], found[noise]["claims"]) == ("PATCH_BREAKS", [])


@pytest.mark.hostile("scripts and contracts")
@pytest.mark.parametrize("line", SENTINELS)
def test_what_only_looks_like_a_sentinel_is_none(line: str) -> None:
    assert script.read(script.last_line(f"{line}\n"), 0).verdict == "ERROR"


@pytest.mark.hostile("what a lane leaves")
def test_neither_the_script_of_a_killed_supervisor_nor_what_it_started_goes_on(workbench: Workbench) -> None:
    pack = workbench.lay("37_needs_long")
    files = [pack / name for name in ("pid", "grandchild")]
    command = workbench.command("run", "--lane", "unpatched", "--timeout", "60")
    with subprocess.Popen(command, stdout=-3, stderr=-3) as runner:
        until(lambda: all(file.exists() and file.read_text() for file in files), 60)
        pids = [int(file.read_text()) for file in files]
        psutil.Process(psutil.Process(pids[0]).ppid()).kill()
        assert runner.wait(60) == 1
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.mark.hostile("what a lane leaves")
def test_folders_that_a_lane_nests_are_removed(workbench: Workbench) -> None:
    _planted(workbench, NESTS)
    for _ in range(2):
        status, rows = workbench.rows()
        assert (status, {row["verdict"] for row in rows}) == (0, {"CONFIRMED"}), rows
        assert not list(workbench.cache.glob("work/*"))
        assert not list(workbench.cache.glob("jit/**/d/d"))


@pytest.mark.hostile("what a lane leaves")
def test_a_file_whose_name_is_no_text_is_named_in_the_receipt(workbench: Workbench) -> None:
    file = "os.path.join(os.fsencode(os.path.dirname(toykernel.__file__)), b'\\xff.py')"
    _planted(workbench, f"import os, toykernel\nopen({file}, 'w').close()")
    status, (row, other) = workbench.rows("--lane", "unpatched", "--jobs", "1")
    assert (status, row["verdict"], other["verdict"]) == (1, "ERROR", "REPRODUCED")
    assert "\\udcff.py was added" in row["reason"], row
    assert Path(row["receipt"]).is_file()


@pytest.mark.hostile("scripts and contracts")
def test_the_patched_lane_has_to_judge_what_the_unpatched_one_judged(workbench: Workbench) -> None:
    with (workbench.lay(SOUND) / "contract.py").open("a") as stream:
        stream.write(KNOWS_ITS_LANE)
    workbench.gives(1, "ERROR", reason="the lanes made other checks: test_weights is gone")


@pytest.mark.hostile("text that comes to life")
def test_escapes_of_an_exception_reach_no_terminal(workbench: Workbench) -> None:
    _planted(workbench, f"raise RuntimeError({ESCAPES!r})")
    shown = workbench.run_on_terminal("run")
    assert b"RuntimeError" in shown, shown
    assert b"\x1b[2J" not in shown, shown
    assert b"\x1b]0" not in shown, shown


@pytest.mark.hostile("text that comes to life")
def test_the_text_of_an_exception_comes_to_life_in_no_summary(workbench: Workbench) -> None:
    _planted(workbench, f"raise NotImplementedError({MARKUP!r})")
    line = "    total = scale.total(VALUES)\n"
    toys.replace(workbench.packs / OTHER / "contract.py", line, f"    raise RuntimeError({MARKUP!r})\n")
    workbench.swept(status=1)
    summary = (workbench.newest / "summary.md").read_text(encoding="utf-8")
    assert "RuntimeError" in summary, summary
    not_code = re.sub(r"`[^`\n]*`", "", summary)
    for alive in ("\n# heading", "](http", "<img", "@ada", "&#64;", "&commat;"):
        assert alive not in not_code, (alive, summary)
