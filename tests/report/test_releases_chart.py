"""The chart of releases in README.md: drawn from histories and receipts, and readable."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from harness.core.words import LaneVerdict
from harness.report import packs_table, releases_chart
from harness.report.releases_chart import Row
from testing.workbench import REPOSITORY

WRONG, RIGHT, NOT = LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED, LaneVerdict.CONTROL_FAILED
TOY = [
    Row("01_a", "alpha", "crash", {"1.9": WRONG, "1.10": RIGHT, "1.11": NOT}),
    Row("02_b", "alpha", "precision", {"1.10": WRONG}),
    Row("03_<c>", "beta", "precision", {"0.1": WRONG}),
]


def _marks(drawn: str) -> list[str]:
    """List the marks below the legend, row by row."""
    return re.findall(r'class="(wrong|right|unknown)"', drawn)[len(releases_chart.LEGEND) :]


def test_the_committed_chart_is_what_histories_and_receipts_give() -> None:
    found = releases_chart.rows(packs_table.every_pack())
    assert packs_table.CHART.read_text(encoding="utf-8") == releases_chart.drawing(found), (
        "python -m harness.report.packs_table"
    )
    warned = {path.stem.rpartition("-")[2] for path in (REPOSITORY / "advisories").glob("*.json")}
    assert {row.pack.partition("_")[0] for row in found} == warned


def test_releases_stand_in_the_order_of_versions_and_none_is_judged_by_its_neighbours() -> None:
    assert releases_chart.columns(TOY[:2]) == ["1.9", "1.10"]
    assert _marks(releases_chart.drawing(TOY)) == ["wrong", "right", "unknown", "wrong", "wrong"]


def test_of_many_releases_the_newest_are_drawn_and_how_many_there_are_is_said() -> None:
    drawn = releases_chart.drawing([Row("01_a", "alpha", "crash", {f"1.{minor}": WRONG for minor in range(31)})])
    assert "10 of 31 judged" in drawn
    assert re.findall(r">(1\.\d+)<", drawn) == [f"1.{minor}" for minor in range(21, 31)]


def test_the_chart_is_sound_xml_with_both_schemes_and_inside_its_page() -> None:
    drawn = releases_chart.drawing(TOY)
    root = ET.fromstring(drawn)  # noqa: S314 - written here
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    assert "prefers-color-scheme: dark" in drawn
    assert "03_<c>" in [one.text for one in root.iter() if one.tag.endswith("text")]
    for one in root.iter():
        assert 0 <= float(one.get("x", one.get("cx", 0))) <= width
        assert 0 <= float(one.get("y", one.get("cy", 0))) <= height


def test_no_bug_is_no_crash() -> None:
    assert ET.fromstring(releases_chart.drawing([])).attrib["role"] == "img"  # noqa: S314 - likewise
