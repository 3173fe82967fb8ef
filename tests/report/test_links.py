"""Links to this repository: absolute ones where it has an address, none where it has not."""

from __future__ import annotations

import re

import pytest

from harness.pack import load
from harness.pack.model import Pack
from harness.report import report
from testing.workbench import REPOSITORY

PACKS = [load.load_pack(path.parent) for path in sorted(REPOSITORY.glob("packs/*/report.in.md"))]
LINK = re.compile(r"\]\(([^)\s]*)\)")


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name)
def test_a_report_links_to_the_web_alone(pack: Pack) -> None:
    """Above the line, which is pasted elsewhere: a relative link would lead nowhere from there."""
    above = report.for_upstream(pack.report_template.read_text(encoding="utf-8"))
    assert [url for url in LINK.findall(above) if not url.startswith("https://")] == []
