"""Links to this repository: absolute ones where it has an address, none where it has not."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from harness.pack import load
from harness.pack.model import Pack
from harness.report import links, report
from testing import clones
from testing.workbench import REPOSITORY, Workbench

URL = "https://example.org/somebody-with-a-long-name/reproducer-packs"
PACKS = [load.load_pack(path.parent) for path in sorted(REPOSITORY.glob("packs/*/report.in.md"))]
LINK = re.compile(r"\]\(([^)\s]*)\)")


@pytest.mark.parametrize("pack", PACKS, ids=lambda one: one.name)
def test_a_report_links_to_the_web_alone(pack: Pack) -> None:
    """Above the line, which is pasted elsewhere: a relative link would lead nowhere from there."""
    above = report.for_upstream(pack.report_template.read_text(encoding="utf-8"))
    assert [url for url in LINK.findall(above) if not url.startswith("https://")] == []


@pytest.mark.parametrize("url", ["", URL])
def test_one_command_writes_the_address_wherever_it_has_a_place(workbench: Workbench, url: str) -> None:
    clone = clones.lay(workbench)
    before = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in links.WRITTEN}
    for name, text in before.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text, encoding="utf-8")
    clones.address(clone, url)
    for said in ["written", "as it was"] if url else ["as it was"]:
        command = [sys.executable, "-m", "harness.report.links"]
        ended = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout == "".join(f"{name}: {said}\n" for name in links.WRITTEN)
    for name, text in before.items():
        after = (clone / name).read_text(encoding="utf-8")
        assert after == text if not url else "URL-OF-THIS-REPOSITORY" not in after
