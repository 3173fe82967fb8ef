"""The Markdown to attach: whole, within its limit, and filled from receipts."""

from __future__ import annotations

import json
import re

import pytest
from markdown_it import MarkdownIt

from harness.core import markdown
from testing.workbench import Workbench

HOSTILE = "```\n</details>\n````text\n<script>alert(1)</script>\n\x1b[31mred\x1b[0m\x00 | pipe | `tick`\r\nlast"


def test_markdown_stays_whole_whatever_a_log_contains() -> None:
    text = markdown.details("A <log>", markdown.fenced(HOSTILE, "text")) + "\nafter\n"
    tokens = MarkdownIt("commonmark").parse(text)
    (fence,) = [token for token in tokens if token.type == "fence"]
    assert "</details>" in fence.content
    assert "\x1b" not in text
    assert "\x00" not in text
    html = [token.content.strip() for token in tokens if token.type == "html_block"]
    assert html == ["<details>\n<summary>A &lt;log&gt;</summary>", "</details>"]
    assert tokens[-2].content == "after"


@pytest.mark.parametrize("form", ["issue", "pr-comment"])
def test_a_report_holds_everything_within_60_kib(workbench: Workbench, form: str) -> None:
    pack = workbench.lay("01_confirmed")
    probe = pack / "reproduce.py"
    noise = f"print({HOSTILE!r})\nprint('x' * 70 + chr(10), end='') if False else print('y' * 90_000)\n"
    text = probe.read_text()
    probe.write_text(text.replace("values, weights = [1.0", noise + "values, weights = [1.0"))
    workbench.recorded()
    ended = workbench.run("report", "1", "--to", form, "--full")
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.encode()) <= 60 * 1024
    tokens = MarkdownIt("commonmark").enable("table").parse(ended.stdout)
    html = "".join(token.content for token in tokens if token.type == "html_block")
    assert html.count("<details>") == html.count("</details>") >= 4
    assert "<script>" not in html
    for part in ("CONFIRMED", "max_error", "wrong-result", "diff --git", "Triton", "The largest error is 3."):
        assert part in ended.stdout
    assert not re.search(r"\{\{|\$TREE/\.\.", ended.stdout)
    assert str(workbench.folder) not in ended.stdout


def test_a_report_needs_receipts_and_one_pack(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    workbench.lay("30_control_fails")
    ended = workbench.run("report", "1")
    assert (ended.returncode, "no receipt to report from. Next: runner.py run" in ended.stderr) == (2, True)
    assert "names 2 packs" in workbench.run("report", "*").stderr


def test_releases_that_could_not_be_judged_for_one_reason_are_one_row(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    workbench.recorded()
    said = [("0.1", "UNSUPPORTED", "a"), ("0.2", "UNSUPPORTED", "a"), ("0.3", "UNSUPPORTED", "b")]
    said += [("0.4", "BUG_REPRODUCED", ""), ("0.5", "BUG_REPRODUCED", "")]
    rows = [{"label": label, "date": "2026-01-02", "verdict": word, "reason": why} for label, word, why in said]
    (pack / "data").mkdir()
    (pack / "data/history.cpu.json").write_text(json.dumps({"rows": rows}))
    shown = workbench.run("report", "1", "--full").stdout
    labels = re.findall(r"(?m)^\| (0\.\S[^|]*?) +\| 2026", shown)
    assert labels == ["0.1 to 0.2 (2)", "0.3", "0.4", "0.5"]
