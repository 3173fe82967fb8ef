"""``upstream-tests`` over a toy upstream with a tests folder: real pytest runs, and every way in which they end."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.core import structure
from harness.suites import receipt
from harness.suites.receipt import SuiteReceipt
from testing import mirrors, toys
from testing import workbench as benches
from testing.workbench import Workbench

SOUND = """
from toykernel import scale

def test_total():
    assert scale.total([1, 2, 3]) == 6

def test_ones():
    assert scale.scale([1.0, 2.0], [1.0, 1.0]) == [1.0, 2.0]
"""
WEIGHTS = """
import psutil
import pytest
from toykernel import scale

@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
def test_weights(weights):
    assert scale.scale([1.0, 1.0], weights) == list(weights)
"""
IS_PATCHED = "'zip(' in open(scale.__file__).read()"


@dataclass(frozen=True)
class Case:
    """A suite of the toy upstream, and what the pack brings to it.

    Attributes:
        files: of upstream's tests.
        brings: files that upstream_test.patch writes.
        table: lines of [upstream_tests] besides.
        verdict: that must come of it.
        reason: a part of the verdict's.

    """

    files: dict[str, str]
    verdict: str
    reason: str = ""
    brings: dict[str, str] = field(default_factory=dict)
    table: str = ""


def _alone(text: str) -> dict[str, str]:
    return {"tests/test_scale.py": text}


def _beside(text: str) -> dict[str, str]:
    return _alone(SOUND + text)


CASES = {
    "sound": Case(_alone(SOUND), "UNBROKEN"),
    "every_kind": Case(
        _beside(
            WEIGHTS + "\ndef test_wrong():\n    assert scale.total([1]) == 2\n"
            "@pytest.mark.skip(reason='no such device')\ndef test_gpu():\n    assert 0\n"
            "@pytest.mark.xfail(reason='known')\ndef test_known():\n    assert 0\n"
            "class TestInside:\n    def test_method(self):\n        assert 0\n"
        ),
        "UNBROKEN",
        table='arguments = ["-x"]',
    ),
    "broken_in_every_way": Case(
        {
            **_beside(
                "\nimport pytest\ndef test_value():\n    assert scale.scale([1, 2], [3, 4]) == [3, 6]\n"
                f"def test_skips():\n    if {IS_PATCHED}:\n        pytest.skip('oh')\n"
                f"def test_expects():\n    if {IS_PATCHED}:\n        pytest.xfail('oh')\n"
                f"@pytest.fixture\ndef made():\n    yield\n    assert not ({IS_PATCHED})\n"
                "def test_teardown(made):\n    pass\n"
            ),
            "tests/conftest.py": "def pytest_collection_modifyitems(items):\n"
            f"    from toykernel import scale\n    if {IS_PATCHED}:\n        del items[0]\n",
        },
        "BREAKS_TESTS",
        "5 broken by the patch, the first of them tests/test_scale.py::test_total",
    ),
    "skips_all": Case(
        _alone("import pytest\n@pytest.mark.skip(reason='no such device')\ndef test_gpu():\n    assert 0\n"),
        "UNSUPPORTED",
        "every test is skipped here: no such device",
    ),
    "module_skips": Case(
        _alone("import pytest\npytest.importorskip('a_package_that_nobody_has')\ndef test_it():\n    pass\n"),
        "ERROR",
        "no test was collected (skipped: tests/test_scale.py: could not import 'a_package_that_nobody_has'",
    ),
    "hangs_once_patched": Case(
        _beside(f"\nimport time\ndef test_long():\n    time.sleep(600 if {IS_PATCHED} else 0)\n"),
        "ERROR",
        "with the patch: timed out after 6 s",
        table="timeout_s = 6",
    ),
    "conftest_exits": Case(
        {**_alone(SOUND), "tests/conftest.py": "import os\nos._exit(0)\n"},
        "ERROR",
        "the list of tests: it ended with status 0 before pytest did",
    ),
    "conftest_exits_by_pytest": Case(
        {**_alone(SOUND), "tests/conftest.py": "import pytest\npytest.exit('enough', returncode=0)\n"}, "ERROR"
    ),
    "conftest_hides_failures": Case(
        {
            **_beside(f"\ndef test_patched():\n    assert not ({IS_PATCHED})\n"),
            "tests/conftest.py": "def pytest_sessionfinish(session, exitstatus):\n    session.exitstatus = 0\n",
        },
        "ERROR",
        "with the patch: pytest ended with status 0, and a test failed",
    ),
    "tests_another_checkout": Case(
        {
            **_alone(SOUND),
            "tests/conftest.py": "import sys\nfrom pathlib import Path\n"
            "sys.path.insert(0, str(Path(__file__).with_name('other')))\n",
            "tests/other/toykernel/__init__.py": "",
            "tests/other/toykernel/scale.py": "def total(values):\n    return sum(values)\n"
            "def scale(values, weights):\n    return values\n",
        },
        "ERROR",
        "without the patch: toykernel was loaded from elsewhere: ",
    ),
    "tests_nothing_of_the_tree": Case(
        _alone("def test_arithmetic():\n    assert 1 + 1 == 2\n"),
        "ERROR",
        "without the patch: no module of toykernel was loaded",
    ),
    "test_exits": Case(
        _beside(f"\nimport os\ndef test_exit():\n    {IS_PATCHED} and os._exit(0)\n"),
        "ERROR",
        "with the patch: it ended with status 0 before pytest did",
    ),
    "test_exits_by_pytest": Case(
        _beside("\nimport pytest\ndef test_exit():\n    pytest.exit('enough', returncode=0)\ndef test_last(): pass\n"),
        "ERROR",
        "2 tests did not run, the first of them tests/test_scale.py::test_exit",
    ),
    "test_crashes": Case(
        _beside(f"\nimport os\ndef test_abort():\n    {IS_PATCHED} and os.abort()\n"),
        "ERROR",
        "with the patch: killed by SIGABRT",
    ),
    "collects_nothing": Case(
        _alone(SOUND), "ERROR", "no test was collected", table='arguments = ["-k", "no_test_of_that_name"]'
    ),
    "cannot_be_collected": Case(
        {**_alone("import a_package_that_nobody_has\n"), "tests/test_other.py": SOUND},
        "ERROR",
        "cannot be collected: tests/test_scale.py: ",
        table='files = ["tests/test_scale.py", "tests/test_other.py"]',
    ),
    "file_is_missing": Case({"tests/test_other.py": SOUND}, "ERROR", "without the patch: pytest ended with status 4"),
    "environment": Case(
        _beside(
            "\nimport os, socket\nfrom pathlib import Path\ndef test_variables():\n"
            "    assert os.environ['TOY'] == 'yes'\n    assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
            "    assert 'A_TOKEN' not in os.environ\n"
            "    socket.create_server((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))).close()\n"
            "def test_writes():\n    assert not Path('made').exists()\n    Path('made').write_text('x')\n"
            "    Path(scale.__file__).write_text('broken')\n"
        ),
        "UNBROKEN",
        table='environment = { TOY = "yes" }',
    ),
    "needs_a_gpu": Case(_alone(SOUND), "UNSUPPORTED", "no GPU here, and upstream's tests are", table="gpu = true"),
    "brings_a_test": Case(_alone(SOUND), "UNBROKEN", brings=_alone(SOUND + WEIGHTS)),
    "brings_only_a_file": Case(
        {}, "UNBROKEN", brings={"tests/test_weights.py": WEIGHTS}, table='files = ["tests/test_weights.py"]'
    ),
    "brings_a_case": Case(_alone(WEIGHTS.replace(", (1.0, 3.0)", "")), "UNBROKEN", brings=_alone(WEIGHTS)),
    "brings_a_test_that_is_green_before": Case(
        _alone(SOUND),
        "NEW_TEST_WRONG",
        "not tests/test_scale.py::test_more (passed before, passed after)",
        brings=_beside("\ndef test_more():\n    assert scale.total([]) == 0\n"),
    ),
    "brings_a_test_that_stays_red": Case(
        _alone(SOUND),
        "NEW_TEST_WRONG",
        "(failed before, failed after)",
        brings=_beside("\ndef test_more():\n    assert scale.total([]) == 1\n"),
    ),
    "brings_nothing": Case(
        _alone(SOUND), "NEW_TEST_WRONG", "adds no test, and mends none", brings=_alone(SOUND + "# more\n")
    ),
}


def _lay(workbench: Workbench, number: int, name: str, case: Case, wheel: tuple[Path, str]) -> Path:
    """Lay the sound pack with the suite of one case."""
    pack = workbench.lay("01_confirmed").rename(workbench.packs / f"{number:02}_{name}")
    source = workbench.folder / "sources" / name
    commit = mirrors.repository(source, case.files)
    mirrors.mirror(workbench.folder / "mirrors", source, [commit])
    if case.brings:
        (pack / "upstream_test.patch").write_text(mirrors.diff(source, case.brings))
    files = "" if "files =" in case.table else 'files = ["tests/test_scale.py"]\n'
    toys.pin(pack, "pytest", wheel[0].name.split("-")[1], wheel[1], name="tests")
    with (pack / "pack.toml").open("a") as stream:
        stream.write(f'[upstream_tests]\n{files}origin = "git+{mirrors.URL}@{commit}"\n{case.table}\n')
    return pack


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Lay a pack for each case."""
    made = benches.empty(tmp_path_factory.mktemp("suites"))
    wheel = toys.wheel_of_installed("pytest", made.folder)
    toys.seed(made.cache, *wheel)
    (made.folder / "sources").mkdir()
    (made.folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")  # above the cache: nobody's
    for number, (name, case) in enumerate(CASES.items(), start=1):
        _lay(made, number, name, case, wheel)
    return made


def _pack(bench: Workbench, name: str) -> Path:
    return bench.packs / f"{[*CASES].index(name) + 1:02}_{name}"


def _run(bench: Workbench, *arguments: str) -> tuple[int, str, str]:
    places = ("--mirrors", str(bench.folder / "mirrors"))
    ended = bench.run("upstream-tests", *arguments, *places, A_TOKEN="ghp_" + "x" * 24)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout, ended.stderr


def _said(output: str, pack: str) -> dict[str, Any]:
    """Read the verdict and the reason of a pack, of which nothing is recorded, from what is printed."""
    lines = [line for line in output.splitlines() if line.lstrip().startswith(pack)]
    reasons = [line.partition(": ")[2] for line in lines if line.startswith(f"{pack}: ")]
    return {"verdict": lines[-1].split()[-1], "reason": next(iter(reasons), "")}


@pytest.fixture(scope="module")
def found(bench: Workbench) -> dict[str, dict[str, Any]]:
    """Run every case, nine or so in a call; map its name to its document."""
    calls = [_run(bench, glob, "--record") for glob in ("0*", "1*", "2*")]
    assert [status for status, *_ in calls] == [1, 1, 1]
    output = "".join(text for _, text, _ in calls)
    documents = {}
    for name in CASES:
        path = _pack(bench, name) / "receipts/upstream_tests.json"
        documents[name] = json.loads(path.read_text()) if path.exists() else _said(output, _pack(bench, name).name)
        shutil.rmtree(path.parent, ignore_errors=True)
    return documents


#: Suites that change what is tested, or how it ends.
HOSTILE = [name for name in CASES if name.startswith(("broken", "conftest", "hangs", "test"))]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.hostile("upstream's tests")] * (name in HOSTILE)) for name in CASES],
)
def test_each_case_ends_as_it_must(found: dict[str, dict[str, Any]], name: str) -> None:
    case, document = CASES[name], found[name]
    assert document["verdict"] == case.verdict, document
    assert case.reason in document["reason"], document["reason"]


def test_no_live_line_erases_the_verdict_on_a_terminal(bench: Workbench) -> None:
    shown = bench.run_on_terminal("upstream-tests", "1", "--mirrors", str(bench.folder / "mirrors"))
    assert b"\x1b" not in shown.rpartition(b": UNBROKEN")[2]


def _rows(document: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    return {row["test"].rpartition("::")[2]: (row["before"], row["after"], row["change"]) for row in document["tests"]}


def test_tests_are_told_one_by_one_where_they_are_not_green_in_both(found: dict[str, dict[str, Any]]) -> None:
    assert _rows(found["sound"]) == {}
    assert (found["sound"]["before"], found["sound"]["after"]) == ({"passed": 2}, {"passed": 2})
    kinds = found["every_kind"]
    assert _rows(kinds) == {
        "test_wrong": ("failed", "failed", "red in both"),
        "test_method": ("failed", "failed", "red in both"),
        "test_gpu": ("skipped", "skipped", "skipped"),
        "test_weights[weights1]": ("failed", "passed", "mended"),
    }
    assert kinds["after"] == {"failed": 2, "passed": 4, "skipped": 1, "xfailed": 1}
    reasons = {row["test"]: row["reason"] for row in kinds["tests"]}
    assert reasons["tests/test_scale.py::test_gpu"] == "no such device"
    assert reasons["tests/test_scale.py::TestInside::test_method"] == "assert 0"
    assert _rows(found["broken_in_every_way"]) == {
        "test_total": ("passed", "missing", "broken"),
        "test_value": ("passed", "failed", "broken"),
        "test_skips": ("passed", "skipped", "broken"),
        "test_expects": ("passed", "xfailed", "broken"),
        "test_teardown": ("passed", "error", "broken"),
    }


def test_a_new_test_is_known_by_what_upstream_has_already(found: dict[str, dict[str, Any]]) -> None:
    new = {"test_weights[weights0]": ("passed", "passed", "new"), "test_weights[weights1]": ("failed", "passed", "new")}
    assert _rows(found["brings_a_test"]) == _rows(found["brings_only_a_file"]) == new
    assert _rows(found["brings_a_case"]) == {"test_weights[weights1]": ("failed", "passed", "new")}


def test_the_document_says_what_was_run(bench: Workbench, found: dict[str, dict[str, Any]]) -> None:
    document = found["brings_a_test"]
    one = structure.structure(document, SuiteReceipt)
    assert one.upstream.commit in (_pack(bench, "brings_a_test") / "pack.toml").read_text()
    assert [patch and patch.name for patch in (one.patch, one.test_patch)] == ["fix.patch", "upstream_test.patch"]
    assert list(one.dependencies.packages) == ["pytest"]
    assert str(bench.folder) not in json.dumps(document)


def test_a_test_that_two_classes_inherit_from_another_file_is_two(tmp_path: Path) -> None:
    names = ("test_x.TestX", "test_y.TestX", "base.Base", "base_more.Base")
    cases = "".join(f'<testcase classname="tests.{name}" name="test_a" file="tests/base.py"/>' for name in names)
    (tmp_path / "report.xml").write_text(f"<testsuite>{cases}</testsuite>")
    ends = receipt.read(tmp_path / "report.xml", 0, listing=False)
    assert len(ends) == len(names)
    assert "tests/base.py::Base::test_a" in ends


def test_a_receipt_is_recorded_on_request_and_other_verbs_leave_it_alone(bench: Workbench) -> None:
    pack = _pack(bench, "sound")
    assert _run(bench, "sound")[0] == 0
    assert not (pack / "receipts").exists()
    status, output, errors = _run(bench, "sound", "--record")
    assert (status, output.split()[-1]) == (0, "UNBROKEN"), errors
    document = json.loads((pack / "receipts/upstream_tests.json").read_text())
    assert document["verdict"] == "UNBROKEN"
    assert bench.run("list").returncode == 0
    assert "upstream_tests" not in bench.run("check", "sound").stdout
    (pack / "upstream_test.patch").write_text("diff --git a/x b/x\n")
    assert "upstream_tests.json: STALE: upstream_test.patch changed" in bench.run("check", "sound").stdout
    (pack / "upstream_test.patch").unlink()
    (pack / "receipts/upstream_tests.json").write_text("{}")
    assert "receipts/upstream_tests.json: " in bench.run("check", "sound").stdout
    (pack / "receipts/upstream_tests.json").unlink()
    assert "receipts/upstream_tests.json is missing" in bench.run("check", "sound").stdout
    empty = _pack(bench, "collects_nothing")
    assert _run(bench, "collects_nothing", "--record")[0] == 1
    assert not (empty / "receipts").exists()


def test_exit_statuses_and_the_table(bench: Workbench) -> None:
    assert _run(bench, "needs_a_gpu")[0] == 5
    assert _run(bench, "sound", "--gpu")[0] == 5
    assert _run(bench, "sound", "needs_a_gpu")[0] == 0
    status, output, _ = _run(bench, "broken_in_every_way")
    assert status == 1
    assert "broken: tests/test_scale.py::test_value (passed -> failed) " in output
    assert output.split()[-1] == "BREAKS_TESTS"


def test_a_patch_that_does_not_apply_is_stale(bench: Workbench) -> None:
    pack = _pack(bench, "sound")
    kept = (pack / "fix.patch").read_text()
    try:
        (pack / "fix.patch").write_text(kept.replace("weights[0] for value", "weights[1] for value"))
        status, output, _ = _run(bench, "sound")
    finally:
        (pack / "fix.patch").write_text(kept)
    document = _said(output, pack.name)
    assert (status, document["verdict"]) == (1, "PATCH_STALE")
    assert document["reason"].startswith("fix.patch: ")


def test_a_pack_that_names_no_tests_is_a_wrong_call(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    ended = workbench.run("upstream-tests", "1")
    assert ended.returncode == 2
    assert "01_confirmed: pack.toml has no [upstream_tests]" in ended.stderr
    assert workbench.run("upstream-tests").returncode == 5


def test_an_interruption_leaves_no_process(bench: Workbench) -> None:
    places = ("--mirrors", str(bench.folder / "mirrors"))
    command = bench.command("upstream-tests", "hangs_once_patched", "--timeout", "300", *places)
    runner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert runner.stderr is not None
    assert any("with the patch" in line for line in runner.stderr)
    time.sleep(1.0)
    children = psutil.Process(runner.pid).children(recursive=True)
    runner.send_signal(signal.SIGINT)
    runner.communicate(timeout=30)
    assert runner.returncode == 130
    assert children
    assert psutil.wait_procs(children, timeout=20)[1] == []
