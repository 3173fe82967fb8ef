"""``run --upstream ask``: what upstream is asked to merge, judged on its own tree by the checks that it is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.pack import load
from harness.report import report
from testing import histories, mirrors, toys
from testing.workbench import Workbench

HEADER = "Subject: Scale each value by its own weight\n\nSPDX-License-Identifier: Apache-2.0\n---\n"
FILE = "src/toykernel/scale.py"
#: Mends the weights; that lengths differ still goes unnoticed.
SMALLER = histories.RIGHT
SECOND_DEFECT = """

@pytest.mark.defect
def test_lengths(scale):
    with pytest.raises(ValueError):
        scale.scale(VALUES, [1.0])
"""


def _asks(workbench: Workbench, asked: str = SMALLER, checks: str = '["test_wei*"]') -> Path:
    """Lay the sound pack with a second defect check, and a smaller patch that upstream is asked to merge."""
    pack = workbench.lay("01_confirmed")
    with (pack / "contract.py").open("a") as stream:
        stream.write(SECOND_DEFECT)
    source = workbench.folder / "source"
    commit = mirrors.repository(source, {"README": "where development happens\n"})
    mirrors.mirror(workbench.folder / "mirrors", source, [commit])
    (pack / "ask.patch").write_text(HEADER + mirrors.diff(source, {FILE: asked}))
    with (pack / "pack.toml").open("a") as stream:
        stream.write(
            f'[ask]\npatch = "ask.patch"\norigin = "git+{mirrors.URL}@{commit}"\ndate = 2026-08-21\nchecks = {checks}\n'
        )
    return pack


def _gives(workbench: Workbench, status: int, verdict: str, *arguments: str, reason: str = "") -> dict[str, Any]:
    places = ("--mirrors", str(workbench.folder / "mirrors"))
    return workbench.gives(status, verdict, "--upstream", "ask", *places, *arguments, reason=reason)


def test_another_defect_may_stay_wrong(workbench: Workbench) -> None:
    pack = _asks(workbench)
    assert _gives(workbench, 0, "CONFIRMED", "--record")["patched"] == "FIX_INCOMPLETE"
    found = json.loads((pack / "receipts/ask/cpu.traced.json").read_text())
    assert (found["about"], found["fix"]["name"], found["upstream"]["origin"]) == (["test_wei*"], "ask.patch", "git")
    assert found["upstream"]["commit"] in (pack / "pack.toml").read_text()
    assert list(pack.glob("receipts/*.json")) == []
    workbench.gives(0, "CONFIRMED", "--record")
    assert "about" not in json.loads((pack / "receipts/cpu.traced.json").read_text())
    report.write(load.load_pack(pack))
    assert "| CONFIRMED | not judged |" not in (pack / "README.md").read_text()
    assert "of 2026-08-21 | mutants |" in (pack / "README.md").read_text()
    checked = workbench.run("check", "--mirrors", str(workbench.folder / "mirrors"))
    assert "1 sound" in checked.stdout, checked.stdout
    assert _verified(workbench, pack) == (0, "")
    for old, new, reason in (
        ('"test_wei*"', '"*"', "ask.checks changed"),
        ('"CONFIRMED"', '"PATCH_BREAKS"', "the lanes say CONFIRMED"),
        ("test_wei*", "none", "ask.checks changed"),
    ):
        path = pack / "receipts/ask/cpu.traced.json"
        text = path.read_text()
        toys.replace(path, old, new)
        status, said = _verified(workbench, pack)
        assert (status, reason in said) == (1, True), said
        path.write_text(text)


def _verified(workbench: Workbench, pack: Path) -> tuple[int, str]:
    """Check a pack; return its errors."""
    ended = workbench.run("check", pack.name, "--mirrors", str(workbench.folder / "mirrors"))
    return ended.returncode, ended.stdout + ended.stderr if ended.returncode else ""


@pytest.mark.parametrize(
    ("asked", "checks", "verdict", "reason"),
    [
        (histories.WRONG + "#\n", '["test_weights"]', "FIX_INEFFECTIVE", "still wrong: test_weights"),
        (SMALLER, '["test_weights", "test_lengths"]', "FIX_INEFFECTIVE", "still wrong: test_lengths"),
        (SMALLER, '["nothing"]', "ERROR", "no defect check that was judged matches nothing"),
        (SMALLER.replace("sum(", "1 + sum("), '["test_weights"]', "PATCH_BREAKS", "test_total"),
    ],
)
def test_a_patch_that_does_not_do_what_it_is_for(
    workbench: Workbench, asked: str, checks: str, verdict: str, reason: str
) -> None:
    _asks(workbench, asked, checks)
    _gives(workbench, 1, verdict, reason=reason)


def test_a_defect_that_the_patch_makes_wrong_is_a_break(workbench: Workbench) -> None:
    pack = _asks(workbench, SMALLER)
    right_before = 'assert scale.scale([1.0], [3.0, 1.0]) == [3.0] and "zip(" not in open(scale.__file__).read()'
    toys.replace(
        pack / "contract.py", SECOND_DEFECT, f"\n\n@pytest.mark.defect\ndef test_l(scale):\n    {right_before}\n"
    )
    _gives(workbench, 1, "PATCH_BREAKS", reason="right without the patch, wrong with it: test_l")


def test_a_check_that_is_right_without_the_patch_is_no_proof(workbench: Workbench) -> None:
    pack = _asks(workbench, checks='["test_weights", "test_lengths"]')
    toys.replace(pack / "contract.py", "    with pytest.raises(ValueError):\n        scale", "    scale")
    _gives(workbench, 1, "ERROR", reason="right without the patch already: test_lengths")


def test_a_patch_made_for_another_tree_is_stale(workbench: Workbench) -> None:
    pack = _asks(workbench)
    toys.replace(pack / "ask.patch", "@@ -3,7 +3,7 @@", "@@ -2,7 +2,7 @@")
    _gives(workbench, 1, "PATCH_STALE")


def test_an_origin_that_cannot_be_had_is_an_error(workbench: Workbench) -> None:
    _asks(workbench)
    workbench.gives(1, "ERROR", "--upstream", "ask", reason="not in the cache")


def test_a_pack_that_asks_for_no_patch_of_its_own(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    ended = workbench.run("run", "1", "--upstream", "ask")
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert "--upstream ask: pack.toml names no patch in [ask]" in line


def test_check_names_what_the_ask_lacks(workbench: Workbench) -> None:
    pack = _asks(workbench)
    places = ("--mirrors", str(workbench.folder / "mirrors"))
    assert workbench.run("run", "--record").returncode == 0
    toys.replace(pack / "pack.toml", '"test_wei*"', '"test_wei*", "no such"')
    said = workbench.run("check", *places).stdout
    assert "ask.checks: no defect check of a receipt matches 'no such'" in said
    toys.replace(pack / "ask.patch", "-3,7 +3,7", "-2,7 +2,7")
    assert "ask.patch does not apply to ask.origin" in workbench.run("check", *places).stdout
    assert "ask.patch was not tried" in workbench.run("check", "--cache", str(workbench.folder / "other")).stdout
    (pack / "ask.patch").unlink()
    assert "ask.patch is missing" in workbench.run("check", *places).stdout
