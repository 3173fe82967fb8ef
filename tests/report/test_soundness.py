"""What `check` refuses, and the Markdown that `report` writes."""

from __future__ import annotations

import json
import re

import pytest

from testing import toys
from testing.workbench import Workbench


@pytest.mark.parametrize(
    ("file", "old", "new", "reason"),
    [
        ("reproduce.py", "FIX_VALIDATED", "FIX_INVALID", "it never says FIX_VALIDATED"),
        ("reproduce.py", "import sys\n", "import sys\n" + "\n" * 80, "the rest belongs in contract.py"),
        ("reproduce.py", "Cause:", "\n" * 12 + "Cause:", "lines; at most 12"),
        ("reproduce.py", "# /// script", "# // script", "it has no PEP 723 header"),
        ("reproduce.py", "toykernel==1.0", "toykernel>=1.0", "does not pin toykernel exactly"),
        ("reproduce.py", "toykernel==1.0", "toykernel==1.1", "its header pins toykernel==1.1, pack.toml says 1.0"),
        ("reproduce.py", "reproduce.py", "it", "its docstring does not say how reproduce.py is run"),
        ("reproduce.py", "import sys\n", "import sys\nimport kit\n", "it imports from this repository"),
        ("fix.patch", "Subject: ", "", "does not open with 'Subject: '"),
        ("fix.patch", "SPDX-License-Identifier: Apache-2.0", "", "has no line 'SPDX-License-Identifier: Apache-2.0'"),
        ("fix.patch", "Subject: ", "Subject: x\nSigned-off-by: a\n", "are a human's (git commit -s)"),
        ("fix.patch", "f203338badbe322dc7415d4a1462a9c12806c7d2..", "f203338..", "its index line is abbreviated"),
        ("fix.patch", "src/toykernel/scale.py", "tests/scale.py", "tests/scale.py is no source"),
        ("fix.patch", "weights[0] for value", "weights[1] for value", "does not apply to toykernel 1.0"),
        (
            "pack.toml",
            "timeout_s = 60",
            'loads = ["src/toykernel/other.py"]',
            "does not change src/",
        ),
        (
            "pack.toml",
            "leading_figure",
            'fix = "none"\nleading_figure',
            "shows CONFIRMED, pack.toml expects REPRODUCED",
        ),
        ("pack.toml", 'claims = ["', 'claims = ["MEMORY_SAVE_VERIFIED", "', "lacks the claims MEMORY_SAVE_VERIFIED"),
        ("report.in.md", "largest", "TODO", "'TODO' is left in it"),
    ],
)
def test_each_rule_is_held(recorded: Workbench, file: str, old: str, new: str, reason: str) -> None:
    toys.replace(recorded.packs / "01_confirmed" / file, old, new)
    assert reason in recorded.findings()


@pytest.mark.parametrize("file", ["reproduce.py", "fix.patch"])
def test_a_missing_file_is_named(recorded: Workbench, file: str) -> None:
    (recorded.packs / "01_confirmed" / file).unlink()
    assert re.search(rf"{re.escape(file)}(:| is) missing", recorded.run("check").stdout)


def test_a_number_is_never_used_twice(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    (workbench.packs / "01_confirmed").rename(workbench.packs / "01_other")
    workbench.lay("01_confirmed")
    assert "its number 01 is that of 01_confirmed" in workbench.run("check").stdout


def test_list_says_what_each_target_can_show(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    (document,) = json.loads(workbench.run("list", "--json").stdout)["packs"]
    cpu = document["targets"]["cpu"]
    assert (cpu["expected"], cpu["state"], cpu["verdict"], cpu["strength"]) == ("CONFIRMED", "none", "", "not measured")
    workbench.recorded()
    assert "CONFIRMED (traced), fresh" in workbench.run("list").stdout
