"""What ends an ordinary script, by kind: its bug, nothing, or what lets nothing be judged. Each script is a toy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.lane import ordinary
from harness.lane.lane import ORDINARY
from harness.pack import load
from testing.workbench import REPOSITORY, installed

SETTINGS: dict[str, Any] = {"fails": "", "timeout_s": 0, "repeat": 1, "environment": {}, "beside": []}
#: A module under test that is wrong, one that calls another library wrongly, and one that no package has.
RELEASE = {
    "toy.py": "def twice(x):\n    return x\n\n\ndef broken():\n    raise ValueError('of the release')\n\n\n"
    "def hangs():\n    while True:\n        twice(1)\n",
    "other.py": "import json\n\n\ndef read():\n    return json.loads('{')\n",
}


def ended(folder: Path, text: str, dependencies: str = "", **settings: object) -> list[str]:
    """Run a script on the toy release and a folder of dependencies; return what it printed, the sentinel last."""
    for place in ("tree", "pack", "cwd"):
        (folder / place).mkdir(exist_ok=True)
    for name, source in RELEASE.items():
        (folder / "tree" / name).write_text(source)
    script = folder / "pack/reproduce.py"
    script.write_text(text)
    environment = os.environ | {"REPRODUCER_TREE": str(folder / "tree"), "REPRODUCER_TARGET": "cpu"}
    environment |= {
        "PYTHONPATH": f"{folder / 'tree'}:{dependencies}:{REPOSITORY}",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONSAFEPATH": "1",
    }
    run = subprocess.run(
        [sys.executable, "-P", str(ORDINARY), str(script), json.dumps(SETTINGS | settings)],
        cwd=folder / "cwd",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = run.stdout.splitlines()
    word = lines[-1].partition(":")[0]
    assert run.returncode == {"BUG_REPRODUCED": 10, "FIX_VALIDATED": 0, "UNSUPPORTED": 125}[word], run.stderr
    return lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "from toy import *\nassert twice(2) == 4, twice(2)",
            "AssertionError: 2 (line 2: assert twice(2) == 4, twice(2))",
        ),
        ("import sys, toy\nsys.exit(f'wrong: {toy.twice(2)}')", "SystemExit: wrong: 2 (line 2"),
        ("exit(1)", "SystemExit: 1 (line 1: exit(1))"),
        ("raise RuntimeError('my own word')", "RuntimeError: my own word (line 1"),
        ("import toy\ntoy.broken()", "ValueError: of the release (line 2: toy.broken())"),
        ("import other\nother.read()", "JSONDecodeError: "),
        ("import torch\ntorch.testing.assert_close(1, 2)", "AssertionError: "),
    ],
)
def test_the_bug_is_what_the_script_or_the_release_raises(tmp_path: Path, text: str, said: str) -> None:
    assert ended(tmp_path, text)[-1].startswith(f"BUG_REPRODUCED: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\ntorch.ones(1).cuda()", "it needs a GPU: "),
        ("import torch\nassert torch.cuda.is_available(), 'no card'", "it needs a GPU: "),
        ("import nobodyknows\nassert 0", "ModuleNotFoundError: No module named 'nobodyknows'"),
        ("from toy import gone\nassert 0", "ImportError: cannot import name 'gone'"),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('x')\np.parse_args()\nassert 0",
            "argparse ended it",
        ),
        ("import sys, pytest\nassert pytest\nsys.exit(3)", "no assertion ended it (SystemExit: 3"),
        ("import sys, pytest\nsys.exit(pytest.ExitCode.TESTS_FAILED)", "no assertion ended it"),
        ("import json\njson.loads('{')", "JSONDecodeError: Expecting property name"),
        ("import toy\nprint(toy.twice(2))", "it asserts nothing. Next: assert"),
        ("def test_x(missing_fixture):\n    assert 0", "FixtureLookupError: "),
        ("import pytest\n@pytest.mark.skip\ndef test_x():\n    assert 0", "pytest ended with status 0"),
        ("import torch\ndef test_x():\n    torch.ones(1, device='cuda')", "it needs a GPU: "),
        ("import os\nassert os\nos._exit(1)", "it was ended by os._exit(1)"),
        ("import os\nassert os\nos.abort()", "it was killed by SIGABRT"),
        ("raise MemoryError", "MemoryError, raised in reproduce.py"),
    ],
)
def test_what_is_no_verdict_is_one_line_with_the_next_step(tmp_path: Path, text: str, said: str) -> None:
    line = ended(tmp_path, text)[-1]
    assert line.startswith("UNSUPPORTED: ")
    assert said in line
    assert "Next: " in line


UNITTEST = """import unittest, toy
class T(unittest.TestCase):
    def test_x(self):
        self.assertEqual(toy.twice(2), 2)
if __name__ == "__main__":
    unittest.main()
"""


@pytest.mark.parametrize(
    "text",
    [
        "from __future__ import annotations\nclass A:\n    def f(self) -> A: ...\nassert A().f() is None",
        "n = 0\ndef f():\n    global n\n    n += 1\nf()\nassert n == 1",
        "import functools\n@functools.cache\ndef f(x):\n    return x\nassert f(1) == 1",
        "import sys\nassert sys.argv == [__file__] and __name__ == '__main__' and __file__.endswith('reproduce.py')",
        "import helper\nassert helper.VALUE == open('data.txt').read()",
        "import inspect, sys\nassert 'inspect' in inspect.getsource(sys.modules['__main__'])",
        "import os\nassert os.environ['MY_SWITCH'] == '1'",
        "import subprocess, sys\nassert subprocess.run([sys.executable, '-c', 'import helper']).returncode == 0",
        UNITTEST,
        "import os\nif os.fork() == 0:\n    raise AssertionError('of a child')\nos.wait()\nassert 1",
    ],
)
def test_a_script_works_as_at_home(tmp_path: Path, text: str) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/helper.py").write_text("VALUE = 'a'\n")
    (tmp_path / "pack/data.txt").write_text("a")
    lines = ended(tmp_path, text, beside=["helper.py", "data.txt"], environment={"MY_SWITCH": "1"})
    assert lines[-1] == "FIX_VALIDATED", lines


SPAWN = """import torch.multiprocessing as mp, torch.distributed as dist
import toy

def rank(number, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=number, world_size=1)
    assert toy.twice(2) == 4, "wrong on a rank"

if __name__ == "__main__":
    mp.spawn(rank, (__file__ + ".store",))
"""
TESTS = """import pytest, toy
@pytest.mark.parametrize("x", [0, 2])
def test_twice(x):
    assert toy.twice(x) == 2 * x
if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
"""


def test_an_assertion_of_a_spawned_rank_of_a_process_group_counts(tmp_path: Path) -> None:
    said = ended(tmp_path, SPAWN)[-1]
    assert (
        said == 'BUG_REPRODUCED: AssertionError: wrong on a rank (line 6: assert toy.twice(2) == 4, "wrong on a rank")'
    )


def test_pytest_runs_a_file_of_tests(tmp_path: Path) -> None:
    lines = ended(tmp_path, TESTS)
    assert lines[-1] == "BUG_REPRODUCED: AssertionError: assert 2 == (2 * 2) (line 4: assert toy.twice(x) == 2 * x)"
    assert "1 failed, 1 passed" in lines[-2]
    assert ended(tmp_path, TESTS.replace("[0, 2]", "[0]"))[-1] == "FIX_VALIDATED"


def test_a_hang_is_a_failure_where_a_limit_is_named(tmp_path: Path) -> None:
    hangs = "import time\nprint('begun', flush=True)\ntime.sleep(60)\n"
    lines = ended(tmp_path, hangs, timeout_s=1)
    assert lines == ["begun", "BUG_REPRODUCED: timeout: no end after 1 s"]
    assert ended(tmp_path, "print(1)", timeout_s=30, fails="timeout")[-1] == "FIX_VALIDATED"


def test_what_the_release_raised_or_where_it_hangs_is_named(tmp_path: Path) -> None:
    lines = ended(tmp_path, "import toy\nprint('begun')\ntoy.broken()")
    assert lines[:2] == ["begun", "Traceback (most recent call last):"]
    assert lines[2:4] == ['  File "reproduce.py", line 3, in <module>', "    toy.broken()"]
    assert lines[4:6] == ['  File "toy.py", line 6, in broken', "    raise ValueError('of the release')"]
    tested = ended(tmp_path, "import toy\ndef test_x():\n    toy.broken()")
    assert '  File "toy.py", line 6, in broken' in tested
    assert str(tmp_path) not in "".join(tested)
    hung = ended(tmp_path, "import toy\ntoy.hangs()", timeout_s=1)
    assert '  File "reproduce.py", line 2, in <module>' in hung
    assert any('File "toy.py", line 1' in line and "in hangs" in line for line in hung), hung
    assert hung[-1] == "BUG_REPRODUCED: timeout: no end after 1 s"


def test_what_keeps_pytest_from_collecting_is_named_itself(tmp_path: Path) -> None:
    said = ended(tmp_path, "from toy import gone\ndef test_x():\n    assert gone")[-1]
    assert said.startswith("UNSUPPORTED: ImportError: cannot import name 'gone' from 'toy'")
    assert "line 1: from toy import gone" in said
    assert "Next: --with the package that has it" in said


@pytest.mark.parametrize(
    ("text", "environment", "command"),
    [
        ("assert 0", {}, "python reproduce.py"),
        ("assert 0", {"A": "1", "B": "two words"}, "A=1 B='two words' python reproduce.py"),
        ("def test_x(): ...\ntest_x()", {}, "python reproduce.py"),
        (TESTS, {"A": "1"}, "A=1 python -m pytest reproduce.py"),
        (UNITTEST, {}, "python -m pytest reproduce.py"),
    ],
)
def test_the_command_of_a_script_is_what_runs_it_by_hand(text: str, environment: dict[str, str], command: str) -> None:
    assert ordinary.command_line(text, environment) == command


def test_what_happens_sometimes_is_counted_in_a_process_for_each_run(tmp_path: Path) -> None:
    odd = f"from pathlib import Path\np = Path({str(tmp_path / 'n')!r})\nn = len(p.read_text()) if p.exists() else 0\n"
    odd += "p.write_text('x' * (n + 1))\nassert n % 2, 'at times'\n"
    assert ended(tmp_path, odd, repeat=5)[-1].startswith(
        "BUG_REPRODUCED: 3 of 5 runs: AssertionError: at times (line 5"
    )


def test_another_failure_than_the_known_one_is_no_verdict(tmp_path: Path) -> None:
    said = ended(tmp_path, "import toy\ntoy.gone()", fails="AssertionError")[-1]
    assert said.startswith("UNSUPPORTED: it fails in another way than by AssertionError: AttributeError")


def test_the_last_lines_stand_before_the_failing_one(tmp_path: Path) -> None:
    lines = ended(tmp_path, "for n in range(99):\n    print(n)\nassert n < 9")
    assert lines[-3:] == ["97", "98", "BUG_REPRODUCED: AssertionError (line 3: assert n < 9)"]
    assert len(lines) == 21


KERNEL = """import torch, triton, triton.language as tl
@triton.jit
def add_one(x, n: tl.constexpr):
    at = x + tl.arange(0, n)
    tl.store(at, tl.load(at) + 1)
x = torch.zeros(4)
add_one[(1,)](x, 4)
assert x.sum() == 5, x.sum().item()
"""


def test_interpreted_is_said_only_where_a_kernel_was(tmp_path: Path) -> None:
    numpy = str(installed(load.load_pack(REPOSITORY / "packs/09_liger_flce_none")))
    lines = ended(tmp_path, KERNEL, numpy)
    assert lines == [
        "(Triton kernels ran in Triton's interpreter)",
        "BUG_REPRODUCED: AssertionError: 4.0 (line 8: assert x.sum() == 5, x.sum().item())",
    ]
    assert len(ended(tmp_path, KERNEL.replace("add_one[(1,)]", "print"), numpy)) > 1
    assert "interpreter" not in ended(tmp_path, "import triton\nassert 0", numpy)[0]
