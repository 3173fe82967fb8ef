"""What the block does for a probe: checks that raise, one check alone, and the verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.pack import probe

BODY = """
import toykernel


def judge(probe, target):
    probe.say("TARGET", target=target, evidence="traced", device="CPU")
    probe.upstream(toykernel)
    probe.judge("sound", "control", lambda: (True, {"measured": 1}))
    probe.judge("defect.one", "defect", ONE)
    probe.judge("defect.two", "defect", lambda: (True, {}))


Probe().run(judge)
"""


def _probe(folder: Path, upstream: str, one: str, *arguments: str) -> tuple[int, list[list[str]], str]:
    (folder / "toykernel").mkdir()
    (folder / "toykernel/__init__.py").write_text(upstream)
    (folder / "probe.py").write_text(probe.original_block() + BODY.replace("ONE", one))
    command = [sys.executable, "-P", str(folder / "probe.py"), "--target", "cpu", *arguments]
    environment = {"PYTHONPATH": str(folder)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return ended.returncode, [line.split(" ", 1) for line in ended.stdout.splitlines()], ended.stderr


def _checks(lines: list[list[str]]) -> dict[str, object]:
    return {json.loads(text)["name"]: json.loads(text)["ok"] for word, text in lines if word == "CHECK"}


RAISES = "def scale():\n    raise {error}\n"


@pytest.mark.parametrize("error", ["ValueError('no')", "AssertionError()", "NotImplementedError('not yet')"])
def test_code_under_test_that_raises_is_a_failed_check(tmp_path: Path, error: str) -> None:
    status, lines, said = _probe(tmp_path, RAISES.format(error=error), "lambda: (toykernel.scale(), {})")
    assert (status, lines[-1][0]) == (10, "BUG_REPRODUCED"), said
    assert _checks(lines) == {"sound": True, "defect.one": False, "defect.two": True}
    (reason,) = [json.loads(text)["reason"] for word, text in lines if word == "CHECK" and "defect.one" in text]
    assert reason.startswith(f"it raised {error.partition('(')[0]}: ")
    assert "Traceback" in said


@pytest.mark.parametrize("words", ["invalid gradient at index 0", "incorrect number of gradients (expected 2, got 1)"])
def test_gradients_that_autograd_refuses_are_a_failed_check(tmp_path: Path, words: str) -> None:
    error = (
        f"RuntimeError('function ScaleBackward returned an {words}')"  # none of upstream's lines is in its traceback
    )
    status, lines, said = _probe(tmp_path, "", f"lambda: (_ for _ in ()).throw({error})")
    assert (status, lines[-1][0], _checks(lines)["defect.one"]) == (10, "BUG_REPRODUCED", False), said


@pytest.mark.parametrize(
    ("upstream", "one", "word"),
    [
        ("", "lambda: (1 / 0, {})", ""),
        ("", "lambda: (toykernel.missing(), {})", ""),
        (RAISES.format(error="MemoryError()"), "lambda: (toykernel.scale(), {})", ""),
        (RAISES.format(error="RuntimeError('CUDA out of memory')"), "lambda: (toykernel.scale(), {})", ""),
        (RAISES.format(error="OSError('no space left')"), "lambda: (toykernel.scale(), {})", ""),
        (RAISES.format(error="ImportError('no tilelang')"), "lambda: (toykernel.scale(), {})", "UNSUPPORTED"),
    ],
)
def test_a_fault_of_the_probe_or_of_the_host_is_never_the_bug(
    tmp_path: Path, upstream: str, one: str, word: str
) -> None:
    status, lines, said = _probe(tmp_path, upstream, one)
    assert (status, "defect.one" in _checks(lines)) == (125, False)
    assert lines[-1][0] == (word or "CHECK"), said


def test_one_check_alone_decides_nothing(tmp_path: Path) -> None:
    status, lines, _ = _probe(tmp_path, "", "lambda: (False, {})", "--only", "defect.*")
    assert _checks(lines) == {"sound": None, "defect.one": False, "defect.two": True}
    assert (status, lines[-1]) == (125, ["UNSUPPORTED", '{"reason": "only defect.* was run"}'])


def test_nobody_is_asked_where_no_gpu_is_shared(tmp_path: Path) -> None:
    one = "lambda: (probe.alone().__enter__() == '', {})"
    status, lines, said = _probe(tmp_path, "", one)
    assert (status, lines[-1][0]) == (0, "FIX_VALIDATED"), said
