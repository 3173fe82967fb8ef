"""What `check` refuses, and the Markdown that `report` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Workbench

from harness import header


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "reason"),
    [
        ("reproduce.py", "self.judged.setdefault", "self.judged.setdefault  ", "its protocol block differs"),
        ("reproduce.py", "# /// script", "# // script", "it has no PEP 723 header"),
        ("reproduce.py", "toykernel==1.0", "toykernel>=1.0", "does not pin toykernel exactly"),
        ("reproduce.py", "toykernel==1.0", "toykernel==1.1", "its header pins toykernel==1.1, pack.toml says 1.0"),
        (
            "reproduce.py",
            'toykernel==1.0"]',
            'toykernel==1.0", "torch==1.0"]',
            "no receipt was made with its header's torch",
        ),
        ("reproduce.py", "    git -C", "git -C", "lacks the four indented lines"),
        (
            "reproduce.py",
            "from pathlib import Path\n",
            "from pathlib import Path\nimport harness\n",
            "a probe is standalone",
        ),
        ("reproduce.py", "if __name__", "#\n" * 200 + "if __name__", "lines below the protocol block"),
        (
            "reproduce.py",
            "if __name__",
            "# budget: 9 lines, because it is small\nif __name__",
            "lines below the protocol block; 9 are the limit",
        ),
        (
            "reproduce.py",
            "if __name__",
            "# budget: 900 lines\n" + "#\n" * 200 + "if __name__",
            "lines below the protocol block; 200 are the limit",
        ),
        ("fix.patch", "Subject: ", "", "does not open with 'Subject: '"),
        ("fix.patch", "SPDX-License-Identifier: Apache-2.0", "", "has no line 'SPDX-License-Identifier: Apache-2.0'"),
        ("fix.patch", "Subject: ", "Subject: x\nSigned-off-by: a\n", "are a human's (git commit -s)"),
        ("fix.patch", "f203338badbe322dc7415d4a1462a9c12806c7d2..", "f203338..", "its index line is abbreviated"),
        ("fix.patch", "src/toykernel/scale.py", "tests/scale.py", "tests/scale.py is no source"),
        ("fix.patch", "weights[0] for value", "weights[1] for value", "does not apply to toykernel 1.0"),
        (
            "pack.toml",
            'loads = ["src/toykernel/scale.py"]',
            'loads = ["src/toykernel/other.py"]',
            "does not change src/",
        ),
        (
            "pack.toml",
            'verdict = "CONFIRMED"',
            'verdict = "FIXED_UPSTREAM"',
            "shows CONFIRMED, pack.toml expects FIXED",
        ),
        ("pack.toml", 'claims = ["', 'claims = ["MEMORY_SAVE_VERIFIED", "', "lacks the claims MEMORY_SAVE_VERIFIED"),
        ("REPORT.md", "{{figure:cpu:max_error}}", "{{figure:cpu:other}}", "no such figure in the pristine lane"),
        ("REPORT.md", "{{versions:cpu}}", "{{versions:sm_90a}}", "no receipt for sm_90a"),
        ("REPORT.md", "largest", "TODO", "'TODO' is left in it"),
    ],
)
def test_each_rule_is_held(workbench: Workbench, file: str, old: str, new: str, reason: str) -> None:
    pack = workbench.lay("01_confirmed")
    workbench.rows()
    _edit(pack / file, old, new)
    ended = workbench.run("check")
    assert ended.returncode == 1, ended.stdout
    assert reason in ended.stdout


@pytest.mark.parametrize("file", ["reproduce.py", "fix.patch", "REPORT.md"])
def test_a_missing_file_is_named(workbench: Workbench, file: str) -> None:
    pack = workbench.lay("01_confirmed")
    workbench.rows()
    (pack / file).unlink()
    assert f"{file} is missing" in workbench.run("check").stdout


def test_a_number_is_never_used_twice(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    (workbench.packs / "01_confirmed").rename(workbench.packs / "01_other")
    workbench.lay("01_confirmed")
    assert "its number 01 is that of 01_confirmed" in workbench.run("check").stdout


def test_a_robustness_report_says_first_that_it_is_no_bug(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    _edit(pack / "pack.toml", "wrong-result", "robustness")
    workbench.rows()
    assert "opens with 'Not a bug:'" in workbench.run("check").stdout
    _edit(pack / "REPORT.md", "Pinned release:", "Not a bug: a simplification.\n\nPinned release:")
    assert workbench.run("check").returncode == 0


def test_every_probe_of_the_toys_has_the_block_of_at_most_40_lines() -> None:
    assert len(header.original_block().splitlines()) <= header.MOST_BLOCK_LINES


def test_list_says_what_each_target_can_show(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    (document,) = json.loads(workbench.run("list", "--json").stdout)
    assert document["targets"]["cpu"] == {
        "evidence": ["traced"],
        "expected": "CONFIRMED",
        "receipt": "none",
        "verdict": "",
    }
    workbench.rows()
    assert "receipt fresh CONFIRMED" in workbench.run("list").stdout
