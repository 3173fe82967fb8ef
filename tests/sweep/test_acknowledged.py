"""Deviations that somebody knows: a sweep names them, and fails again as soon as they change."""

from __future__ import annotations

import json
import subprocess
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from testing import toys
from testing.workbench import Workbench

CELL = "01_confirmed/cpu"
PATCHES = toys.RESOURCES / "packs"


def _sweep(bench: Workbench, patch: str) -> tuple[int, list[str], dict[str, Any]]:
    """Sweep one pack with the patch of a toy; return the exit status, the lines printed, and the cell."""
    (bench.packs / "01_confirmed/fix.patch").write_text((PATCHES / patch / "fix.patch").read_text())
    ended = bench.run("sweep", "--runs", str(bench.folder / "sweeps"))
    assert "Traceback" not in ended.stderr, ended.stderr
    newest = max((bench.folder / "sweeps").glob("*/results.json"))
    (cell,) = json.loads(newest.read_text())["cells"]
    return ended.returncode, ended.stdout.splitlines(), cell


def _ack(bench: Workbench, *arguments: str) -> subprocess.CompletedProcess[str]:
    return bench.run("ack", "--runs", str(bench.folder / "sweeps"), *arguments)


def test_what_is_acknowledged_fails_no_sweep_until_it_changes(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    status, lines, _ = _sweep(workbench, "03_fix_ineffective")
    assert (status, lines[-2].startswith("1 needs attention; 1 cells")) == (1, True), lines
    said = _ack(workbench, CELL, "--reason", 'upstream #7, "soon"\nor \x7f later')
    assert said.returncode == 0, said.stderr
    assert (workbench.folder / "acknowledged.toml").read_text().startswith("# Deviations that are known")
    status, lines, cell = _sweep(workbench, "03_fix_ineffective")
    assert (status, lines[0].startswith(f"{CELL}: KNOWN since 2")) == (0, True), lines
    assert cell["known"].endswith(': upstream #7, "soon" or \x7f later')
    assert lines[-2].startswith("nothing needs attention, 1 known; 1 cells")
    newest = max((workbench.folder / "sweeps").glob("*/results.json")).parent
    assert "<p>Known since" in (newest / "index.html").read_text()
    (case,) = ET.parse(newest / "junit.xml").iter("testcase")  # noqa: S314 - our own file
    assert [child.tag for child in case] == ["skipped"]
    status, lines, cell = _sweep(workbench, "06_patch_needs_an_offset")
    assert (status, cell["known"], cell["verdict"]) == (1, "", "PATCH_STALE"), lines
    assert _ack(workbench, CELL, "--reason", "the patch is being renewed").returncode == 0
    assert _sweep(workbench, "06_patch_needs_an_offset")[0] == 0, "of two entries the last counts"
    status, lines, _ = _sweep(workbench, "01_confirmed")
    assert (status, "well now: the entry can go" in "\n".join(lines)) == (0, True), lines


def test_what_needs_no_attention_or_is_unknown_is_refused(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    nothing = _ack(workbench, CELL, "--reason", "none")
    assert (nothing.returncode, "holds no finished sweep. Next: runner.py sweep" in nothing.stderr) == (2, True)
    assert _sweep(workbench, "01_confirmed")[0] == 0
    for cell, reason, said in (
        (CELL, "because", f"{CELL} needs no attention in "),
        ("01_confirmed/cpx", "because", f"no cell '01_confirmed/cpx'; did you mean {CELL}?"),
        (CELL, "  ", "--reason is empty"),
    ):
        ended = _ack(workbench, cell, "--reason", reason)
        assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr
    assert not (workbench.folder / "acknowledged.toml").exists()
    results = max((workbench.folder / "sweeps").glob("*/results.json"))
    for text, said in (("{", "is damaged"), ('{"schema": 2}', "written by another version"), ("[]", "is damaged")):
        results.write_text(text)
        ended = _ack(workbench, CELL, "--reason", "because")
        assert (ended.returncode, said in ended.stderr, "Traceback" in ended.stderr) == (2, True, False), ended.stderr


@pytest.mark.parametrize(
    "text",
    [
        "acknowledged = 1",
        "[[acknowledged]]\ncell = 'a'",
        "[[acknowledged]]\ncell = 'a'\ndate = 2026-01-01\nreason = 'b'\nsays = {verdict = 'ERROR', other = 1}",
        "[[acknowledged",
        "\xff",
    ],
)
def test_a_file_that_is_no_list_of_what_is_known_stops_the_sweep(workbench: Workbench, text: str) -> None:
    workbench.lay("01_confirmed")
    (workbench.folder / "acknowledged.toml").write_bytes(text.encode("latin-1"))
    ended = workbench.run("sweep", "--runs", str(workbench.folder / "sweeps"))
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
    assert ("acknowledged.toml: " in ended.stderr, "Next: mend it" in ended.stderr) == (True, True), ended.stderr
