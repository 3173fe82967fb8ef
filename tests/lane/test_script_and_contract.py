"""A lane of two files: a script and a contract, judged by the tables of the design."""

from __future__ import annotations

import compileall
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.core import terminal
from harness.lane import process, results, script
from harness.lane.lane import WITNESS
from testing import toys
from testing.workbench import Workbench

TOY = "60_script_and_contract"
SECOND = "assert kernel.total([1.0, 2.0, 3.0]) == 6.0"


def _receipt(workbench: Workbench) -> dict[str, Any]:
    """Run the toy; return what its receipt says, however it ended."""
    ended = workbench.run("run", "60")
    (path,) = workbench.receipts.rglob("cpu.traced.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found["status"], found["said"] = ended.returncode, ended.stdout + ended.stderr
    return found


def test_script_and_contract_agree(workbench: Workbench) -> None:
    workbench.lay(TOY)
    found = _receipt(workbench)
    assert (found["verdict"], found["status"]) == ("CONFIRMED", 0), found["said"]
    pristine, patched = found["lanes"]["pristine"], found["lanes"]["patched"]
    assert (pristine["script"], patched["script"]) == ("BUG_REPRODUCED", "FIX_VALIDATED")
    assert (pristine["exit_status"], patched["exit_status"]) == (10, 0)
    assert pristine["reason"] == "test_each_value_has_its_weight[unlike]"
    roles = {check["name"]: (check["role"], check["ok"]) for check in pristine["checks"]}
    assert roles == {
        "test_weights_of_one_change_nothing": ("control", True),
        "test_each_value_has_its_weight[alike]": ("control", True),
        "test_each_value_has_its_weight[unlike]": ("defect", False),
        "test_total_is_the_sum": ("control", True),
    }
    assert [line["value"] for line in patched["figures"]] == [4.0, 1.0]
    assert {line["module"] for line in pristine["upstream"]} == {"toykernel", "toykernel.scale"}
    for lane in (pristine, patched):
        assert lane["printed"].endswith(f"\n{lane['script']}")
        assert "passed" not in lane["printed"], "the contract's output is none of the script's"


@pytest.mark.hostile("text that comes to life")
@pytest.mark.parametrize(
    ("pieces", "printed"),
    [
        ([b"one\n", b"FIX_VALI", b"DATED"], "one\nFIX_VALIDATED"),
        ([b"a\r\nb\rc\n"], "a\nb\nc"),
        ([b"\x1b[31mred\x1b[0m \x00\xff\n"], "red \ufffd"),
        (["\u202eflipped\u200b\ttab\n".encode()], "\\u202eflipped\\u200b\ttab"),
    ],
)
def test_what_is_kept_is_harmless(pieces: list[bytes], printed: str) -> None:
    output = process.Log()
    for piece in pieces:
        output.feed(1, piece)
    assert script.printed(output.text()) == printed


@pytest.mark.parametrize("line", [b"x" * 99 + b"\n", b"\xc2\xad" * 40 + b"\n", b"y" * 9999 + b"\n", b"\n"])
def test_of_a_long_output_the_beginning_and_the_last_line_are_kept(line: bytes) -> None:
    output = process.Log()
    for _ in range(5000):
        output.feed(1, line)
    output.feed(1, b"UNSUPPORTED: it needs a GPU")
    printed = script.printed(output.text())
    assert len(printed.encode()) <= script.MOST_PRINTED
    assert printed.endswith("\n[... more was printed ...]\nUNSUPPORTED: it needs a GPU")
    kept = printed.splitlines()[:-2]
    assert set(kept) <= {terminal.visible(line.decode()).rstrip("\n"), ""}


def test_a_contract_is_not_needed(workbench: Workbench) -> None:
    folder = workbench.lay(TOY)
    (folder / "contract.py").unlink()
    found = _receipt(workbench)
    assert (found["verdict"], found["lanes"]["patched"]["checks"]) == ("CONFIRMED", []), found["said"]


def _without_a_gpu(workbench: Workbench) -> Path:
    """Lay the toy with a script that needs a GPU."""
    folder, says = workbench.lay(TOY), 'print("UNSUPPORTED: needs a GPU")\nsys.exit(125)\n'
    toys.replace(folder / "reproduce.py", "values, weights =", f"{says}values, weights =")
    return folder


def test_the_contract_judges_alone_where_the_script_cannot(workbench: Workbench) -> None:
    _without_a_gpu(workbench)
    found = _receipt(workbench)
    assert found["verdict"] == "CONFIRMED", found["said"]
    assert found["lanes"]["pristine"]["script"] == "UNSUPPORTED: needs a GPU"
    assert found["lanes"]["pristine"]["reason"].startswith("contract alone (needs a GPU): test_each")


def test_nothing_is_judged_where_neither_can(workbench: Workbench) -> None:
    folder = _without_a_gpu(workbench)
    toys.replace(folder / "contract.py", 'EVIDENCE_WITHOUT_GPU = "traced"\n', "")
    found = _receipt(workbench)
    assert (found["verdict"], found["reason"]) == ("UNSUPPORTED", "needs a GPU")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}['absent']", "contract: test_total_is_the_sum: KeyError: 'absent'"),
        (
            "import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)",
            "killed by SIGKILL (as the out-of-memory killer does) in test_total_is_the_sum",
        ),
        (
            "import os\n    os._exit(0)",
            "the contract's results end in test_total_is_the_sum without an end: exit status 0",
        ),
    ],
    ids=["the contract raises", "a test is killed", "a test exits"],
)
def test_a_test_that_does_not_end_well_is_an_error(workbench: Workbench, text: str, reason: str) -> None:
    toys.replace(workbench.lay(TOY) / "contract.py", SECOND, text)
    found = _receipt(workbench)
    assert (found["verdict"], found["status"]) == ("ERROR", 1), found["said"]
    assert reason in found["reason"]


def test_a_contract_that_cannot_be_collected_is_an_error(workbench: Workbench) -> None:
    toys.replace(workbench.lay(TOY) / "contract.py", "import pytest\n", "import pytest\nimport nowhere\n")
    found = _receipt(workbench)
    assert found["verdict"] == "ERROR", found["said"]
    assert "contract: collection: ModuleNotFoundError: No module named 'nowhere'" in found["reason"]


def test_a_fix_that_the_contract_refuses_is_incomplete(workbench: Workbench) -> None:
    more = "@pytest.mark.defect\ndef test_more(kernel):\n    assert kernel.scale([1.0, 2.0], [3.0, 0.5])[0] == 0.0\n"
    total = "@pytest.mark.control\ndef test_total"
    toys.replace(workbench.lay(TOY) / "contract.py", total, f"{more}\n\n{total}")
    found = _receipt(workbench)
    assert (found["verdict"], found["reason"]) == ("FIX_INCOMPLETE", "test_more"), found["said"]


@pytest.mark.parametrize(
    "way",
    [
        "import multiprocessing as m\n    m.get_context('spawn').Process(target=run, args=(HOW,)).start()",
        "import os\n    pid = os.fork()\n    pid or exec(HOW) or os._exit(0)\n    os.waitpid(pid, 0)",
        "import subprocess, sys\n    subprocess.run([sys.executable, '-c', HOW], check=True)",
    ],
    ids=["spawn", "fork", "subprocess"],
)
def test_a_module_that_a_child_process_loads_is_seen(workbench: Workbench, way: str) -> None:
    """Each child loads the package from outside the tree: only a witness in the child can say so."""
    folder = workbench.lay(TOY)
    elsewhere = workbench.folder / "elsewhere"
    (elsewhere / "toykernel").mkdir(parents=True)
    (elsewhere / "toykernel/__init__.py").write_text("")
    (elsewhere / "toykernel/other.py").write_text("")
    first = f"import sys; sys.modules.pop('toykernel', None); sys.path.insert(0, {str(elsewhere)!r})"
    how = f"{first}; import toykernel.other"
    runs = "def run(how):\n    exec(how)\n"
    child = f"HOW = {how!r}\n{runs}\nif __name__ == '__main__':\n    {way}\n"
    (folder / "child.py").write_text(child)
    call = f"import subprocess, sys\n    subprocess.run([sys.executable, {str(folder / 'child.py')!r}], check=True)"
    toys.replace(folder / "contract.py", SECOND, call)
    found = _receipt(workbench)
    assert found["verdict"] == "ERROR", found["said"]
    assert "toykernel was loaded from outside the lane's tree" in found["reason"]


def test_bytecode_in_the_tree_is_not_executed_unseen(tmp_path: Path) -> None:
    """The source is compiled and noted although its bytecode lies beside it; a module without source is noted, too."""
    package = tmp_path / "tree/toykernel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "bare.py").write_text("value = 1\n")
    compileall.compile_file(package / "bare.py", quiet=2, legacy=True)
    (package / "bare.py").unlink()
    compileall.compile_dir(package, quiet=2)
    environment = os.environ | {
        "PYTHONPATH": f"{WITNESS}:{tmp_path / 'tree'}",
        "REPRODUCER_TREE": str(tmp_path / "tree"),
        "REPRODUCER_MODULES": "toykernel",
        "REPRODUCER_LOADED": str(tmp_path / "loaded.jsonl"),
    }
    subprocess.run([sys.executable, "-c", "import toykernel.bare"], env=environment, check=True)
    found = {Path(line.file).name: line.sha256 for line in results.read_loaded(tmp_path / "loaded.jsonl")[0]}
    hashes = {name: hashlib.sha256((package / name).read_bytes()).hexdigest() for name in ("__init__.py", "bare.pyc")}
    assert found == hashes
