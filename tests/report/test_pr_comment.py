"""The three lines that a pull request's comment has for each pack."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.words import Evidence, LaneVerdict, Role
from harness.lane.results import CheckLine, FigureLine, LaneRecord, OutputLine
from harness.pack import load
from harness.receipt import redaction
from harness.report import links, pr_comment
from harness.verdict.change import Compared, Side
from testing.workbench import REPOSITORY

BASE, HEAD = "a" * 40, "b" * 40
URL = "https://example.org/us/packs"
LINK = re.compile(r"\]\(([^)]*)\)")


def _side(verdict: LaneVerdict, version: str, error: float = 0.0, check: str = "weights", reason: str = "") -> Side:
    is_wrong = verdict == LaneVerdict.BUG_REPRODUCED
    record = LaneRecord(
        verdict, reason, 0, 1.0, 0, 0, "", "",
        checks=(CheckLine(check, Role.DEFECT, not is_wrong),),
        figures=(FigureLine("grad_weight_max_abs_error", error, "1"),),
        outputs=(OutputLine("total", "float", (), str(error), must_match=True),),
    )  # fmt: skip
    return Side(verdict, reason, version, record)


def _text(base: Side, head: Side, pack: str = "09_liger_flce_none") -> str:
    comparison = Compared(load.load_pack(REPOSITORY / "packs" / pack), "cpu", Evidence.INTERPRETED, base, head)
    return pr_comment.text([comparison], redaction.host_scrubber({Path("/data/cache"): "$CACHE"}))


FIX = (_side(LaneVerdict.BUG_REPRODUCED, f"commit {BASE}", 0.25), _side(LaneVerdict.FIX_VALIDATED, f"commit {HEAD}"))


def test_without_an_address_nothing_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "repository_url", lambda: "")
    text = _text(*FIX)
    assert LINK.findall(text) == []
    first, second, third = text.splitlines()
    assert first.startswith("`packs/09_liger_flce_none/README.md`: ")
    assert "base: `BUG_REPRODUCED`, head: `FIX_VALIDATED`: **this change fixes it**." in first
    assert f"base is commit {BASE[:12]}, head is commit {HEAD[:12]}; wrong in base: `weights`" in second
    assert "`grad_weight_max_abs_error 0.25 -> 0`" in second
    assert re.search(r"reproduce\.py` refused: \d+ of \d+, ", third)
    assert "in a clone of the repository of this pack: `runner.py pr-verdict 09_liger_flce_none" in third


def test_with_one_every_link_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "repository_url", lambda: URL)
    text = _text(*FIX)
    urls = LINK.findall(text)
    assert f"{URL}/blob/main/packs/09_liger_flce_none/README.md" in urls
    for url in urls:
        assert url.startswith("https://")
        path = url.removeprefix(f"{URL}/blob/main/").partition("#")[0]
        assert not url.startswith(URL) or (REPOSITORY / path).exists(), f"{url} leads nowhere"
    assert f"in a clone of {URL}:" in text


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (f"commit {BASE}", f"commit {BASE[:12]}"),
        (f"path at {BASE}", f"commit {BASE[:12]}"),
        (f"path at {BASE} with modified files", f"`path at {BASE} with modified files`"),
        ("path", "a folder that states no commit"),
        ("", "not to be had"),
        ("0.8.2", "`0.8.2`"),
    ],
)
def test_a_tree_is_named_by_what_is_known_of_it(version: str, expected: str) -> None:
    assert f"base is {expected}" in _text(_side(LaneVerdict.FIX_VALIDATED, version), FIX[1])


def test_what_the_code_under_test_printed_stays_text() -> None:
    hostile = "x`@somebody <img src=y> [z](https://example.org)\n# now | `"
    text = _text(
        _side(LaneVerdict.BUG_REPRODUCED, "path", 1.0, hostile), _side(LaneVerdict.UNSUPPORTED, "path", reason=hostile)
    )
    assert len(text.splitlines()) == 3
    spans = re.findall(r"`[^`]*`", text)
    outside = re.sub(r"`[^`]*`", "", text)
    assert sum("@somebody" in span for span in spans) == 2
    assert not re.search(r"@|<|\[z\]|#", outside)
    assert "..." in _text(_side(LaneVerdict.UNSUPPORTED, "path", reason="y" * 999), FIX[1])


def test_a_private_reason_is_withheld_and_known_places_get_names() -> None:
    text = _text(_side(LaneVerdict.ERROR, "path", reason="no /data/cache/trees"), FIX[1])
    assert "`no $CACHE/trees`" in text
    text = _text(_side(LaneVerdict.ERROR, "path", reason="ghp_" + "A1b2C3d4" * 5), FIX[1])
    assert "A1b2" not in text
    assert "base: (withheld: it holds a token)" in text


def test_results_that_differ_bit_for_bit_are_named() -> None:
    assert "outputs that differ bit for bit between the two: `total`" in _text(*FIX)
    sides = _side(LaneVerdict.BUG_REPRODUCED, "path"), _side(LaneVerdict.FIX_VALIDATED, "path")
    assert "differ bit for bit" not in _text(*sides)


def test_what_a_lane_printed_before_an_error_is_not_shown() -> None:
    side = replace(
        _side(LaneVerdict.BUG_REPRODUCED, "path", 9.0), verdict=LaneVerdict.ERROR, reason="killed by SIGSEGV"
    )
    _, second, _ = _text(FIX[1], side).splitlines()
    assert "head: `killed by SIGSEGV`; `grad_weight_max_abs_error 0` (base)." in second
    assert "wrong in head" not in second


def test_many_checks_are_counted() -> None:
    checks = tuple(CheckLine(f"check {number}", Role.DEFECT, ok=False) for number in range(9))
    record = LaneRecord(LaneVerdict.BUG_REPRODUCED, "", 10, 1.0, 0, 0, "", "", checks=checks)
    side = Side(LaneVerdict.BUG_REPRODUCED, "", "path", record)
    assert "`check 5`, 3 more" in _text(side, side)


@pytest.mark.parametrize("name", ["README.md", "docs/nights.md", "deploy/github/reproducer-packs.yml"])
def test_a_placeholder_stands_where_there_is_no_address(name: str) -> None:
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert ("URL-OF-THIS-REPOSITORY" in text) == (links.repository_url() == "")
