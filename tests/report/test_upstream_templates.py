"""Every required field of each upstream's own template, filled from a receipt, and what is left to a human."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.core import markdown
from harness.pack import load
from harness.pack.model import Pack
from harness.receipt import receipt
from harness.report import issue, placeholders, reports, template, template_fields, template_table, upstream_templates
from testing.workbench import REPOSITORY, Workbench, confirmed

NAMES = [one.name for one in upstream_templates.EVERY]
GPU_HOST = {
    "driver": "580.159.04",
    "gpu": "NVIDIA H200",
    "compute_capability": "9.0",
    "cuda": "13.0",
    "cudnn": "9.15.1.9",
    "nccl": "2.28.9",
    "system": "Ubuntu 24.04.3 LTS (Linux 6.8, x86_64)",
    "triton": "3.6.0",
    "torch": "2.11.0",
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Judge the sound toy pack once."""
    return confirmed(tmp_path_factory.mktemp("judged"))


def _text(upstream: template.Upstream) -> str:
    labels = [one.label for one in upstream.sections if one.source == template.REPORT]
    return "".join(f"## {label}\n\nIt is so: {{{{figure:cpu:max_error}}}}.\n\n" for label in labels)


def _as_reported_to(judged: Workbench, folder: Path, name: str, **host: str) -> Pack:
    """Make the judged pack one about a package of this upstream, seen on a host with these facts."""
    upstream = upstream_templates.BY_NAME[name]
    target = folder / "packs/01_confirmed"
    (target / "receipts").mkdir(parents=True)
    source = judged.packs / "01_confirmed"
    for file in ("reproduce.py", "fix.patch"):
        (target / file).write_text((source / file).read_text())
    definition = (
        (source / "pack.toml").read_text().replace('package = "toykernel"', f'package = "{upstream.packages[0]}"')
    )
    (target / "pack.toml").write_text(definition)
    document: dict[str, Any] = json.loads((source / "receipts/cpu.traced.json").read_text())
    document["upstream"]["package"] = upstream.packages[0]
    gpu = {"name": host.pop("gpu", ""), "compute_capability": host.pop("compute_capability", "")}
    document["host"] |= host | {"gpus": [gpu] if gpu["name"] else []}
    (target / "receipts/cpu.traced.json").write_text(json.dumps(document))
    shutil.copy(source / "receipts" / document["log"]["file"], target / "receipts")
    (target / "report.in.md").write_text(_text(upstream))
    return load.load_pack(target)


def _missing(text: str, sections: tuple[template.Section, ...]) -> list[str]:
    """List the required parts and facts of a template that a text lacks or leaves empty."""
    missing = []
    for section in (one for one in sections if one.required):
        if section.source == template.HUMAN:
            missing += [tick for tick in section.ticks if f"- [ ] {tick}" not in text]
        elif not placeholders.holds(text, section) and section.source == template.REPORT:
            missing.append(section.label)
        missing += [label for label, _ in section.facts if not re.search(rf"(?m)^- {re.escape(label)}: \S", text)]
    return missing


@pytest.mark.parametrize("name", NAMES)
def test_every_required_field_of_an_upstream_is_filled(judged: Workbench, tmp_path: Path, name: str) -> None:
    subject, upstream = _as_reported_to(judged, tmp_path, name, **GPU_HOST), upstream_templates.BY_NAME[name]
    assert placeholders.errors(subject, receipt.load_all(subject.receipts)) == []
    text = issue.build(subject, "issue")
    assert _missing(text, upstream.sections) == []
    asked = {fact for section in upstream.sections for _, fact in section.facts}
    for value in {GPU_HOST[fact] for fact in asked & set(GPU_HOST)}:
        assert value in text
    comment = issue.build_in_full(subject, "pr-comment")
    assert all(f"- [ ] {duty}" in comment for duty in upstream.duties)
    assert "[x]" not in text + comment
    for label in (one.label for one in upstream.sections if one.source == template.REPORT and one.required):
        (subject.folder / "report.in.md").write_text(_text(upstream).replace(f"## {label}", "## Else"))
        (error,) = placeholders.errors(subject, receipt.load_all(subject.receipts))
        assert repr(label) in error


@pytest.mark.parametrize("name", NAMES)
def test_what_a_receipt_lacks_is_said_and_never_left_empty(judged: Workbench, tmp_path: Path, name: str) -> None:
    subject = _as_reported_to(judged, tmp_path, name, system="", cuda="", torch="2.13.0+cpu")
    assert _missing(issue.build(subject, "issue"), upstream_templates.BY_NAME[name].sections) == []
    one = next(iter(receipt.load_all(subject.receipts)))
    assert template_fields.Facts(subject, one).value("system") == template_fields.NOT_RECORDED
    assert (
        template_fields.Facts(subject, one).value("cudnn").startswith("none: PyTorch 2.13.0+cpu is not built for CUDA")
    )
    assert template_fields.Facts(subject, one).value("gpu") == "none used (traced for cpu)"


def test_a_regression_names_the_previous_and_the_new_commit(judged: Workbench, tmp_path: Path) -> None:
    subject = _as_reported_to(judged, tmp_path, "megatron", **GPU_HOST)
    row = {"date": "2026-01-01", "figure": "", "reason": "", "seconds": 1.0}
    rows = [
        row | {"label": "111111111111", "verdict": "FIX_VALIDATED", "figure": "max_error 0"},
        row | {"label": "222222222222", "verdict": "BUG_REPRODUCED", "figure": "max_error 3"},
    ]
    history = subject.folder / "data/history.cpu.json"
    history.parent.mkdir()
    for number, wanted in ((1, upstream_templates.MEGATRON.sections), (2, upstream_templates.MEGATRON.regression)):
        history.write_text(json.dumps({"rows": rows[-number:]}))
        text = issue.build(subject, "issue")
        assert _missing(text, wanted) == []
        assert ("- Previous Megatron-LM commit ID: 111111111111" in text) == (number == 2)
    assert "- New Megatron-LM commit ID: 222222222222" in text
    assert "- Result: FIX_VALIDATED max_error 0" in text
    assert "DCO" in issue.build_in_full(subject, "pr-comment")


def test_a_second_report_is_for_another_upstream(judged: Workbench) -> None:
    folder = judged.packs / "01_confirmed"
    second = folder / "report.tilelang.in.md"
    second.write_text(_text(upstream_templates.TILELANG))
    ended = judged.run("report", "1", "--for", "tilelang")
    assert ended.returncode == 0, ended.stderr
    assert _missing(ended.stdout, upstream_templates.TILELANG.sections) == []
    assert "left to you: issue tracker searched" in ended.stderr
    assert "no report 'tilelan'; did you mean tilelang?" in judged.run("report", "1", "--for", "tilelan").stderr
    bundle = judged.run("bundle", "1", "-o", str(judged.folder / "two.zip"))
    assert bundle.returncode == 0, bundle.stderr
    second.write_text("## Problem\n\n{{figure:cpu:none}} TODO\n")
    (folder / "report.nobody.in.md").write_text("x\n")
    found = judged.run("check", "1").stdout
    assert "report.tilelang.in.md: its upstream's template asks for a section 'Problem description'" in found
    assert "report.tilelang.in.md: {{figure:cpu:none}}: no such figure" in found
    assert "report.nobody.in.md: no upstream 'nobody'; there is liger-kernel, mamba" in found
    second.unlink()
    (folder / "report.nobody.in.md").unlink()


PACKS = [load.load_pack(folder) for folder in sorted((REPOSITORY / "packs").glob("*_*"))]


@pytest.mark.parametrize("one", PACKS, ids=lambda one: one.name)
def test_every_report_of_a_committed_pack_is_whole(one: Pack) -> None:
    for name in reports.of_pack(one):
        upstream = upstream_templates.BY_NAME[name]
        receipts = list(receipt.strongest(receipt.load_all(one.receipts)).values())
        for form in issue.FORMS:
            text = issue.build_in_full(one, form, name)
            assert len(text.encode()) <= issue.MOST_BYTES_IN_FULL
            made = {check.name for each in receipts for lane in each.lanes.values() for check in lane.checks}
            parts = re.split(r" \||; ", text.partition("<summary>Checks</summary>")[2])
            said = {part.strip(" |\n") for part in parts}
            tests = {part.partition(" (")[0].partition("[")[0] for part in said}
            assert {markdown.cell(check.partition("[")[0]) for check in made} <= tests
            assert len(issue.build(one, form, name).encode()) <= issue.MOST_BYTES
            if form == "issue":
                leading = next(iter(one.definition.targets))
                assert _missing(text, template_fields.sections_of(upstream, one, leading)) == []


def test_the_table_of_fields_is_that_of_the_code() -> None:
    assert (REPOSITORY / "docs/upstream-fields.md").read_text(encoding="utf-8") == template_table.markdown()
    for upstream in upstream_templates.EVERY:
        for section in (*upstream.sections, *upstream.regression):
            assert {fact.partition(":")[0] for _, fact in section.facts} <= set(template_table.SOURCES)
