"""What a maintainer reads: short, of the right project, kept beside its template, and with every figure sourced."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.core.words import Evidence
from harness.pack import load
from harness.pack.model import Pack
from harness.receipt import figures, receipt, strength
from harness.report import issue, links, patches, reports, written
from testing import toys
from testing.workbench import REPOSITORY, Workbench, confirmed

TEMPLATE = "# A title\n\n**Wrong result**: it is wrong.\n\n"
COMMIT = "1" * 40
STATED = f"""
searched = {{ date = 2026-11-21, queries = ["weights", "first weight"] }}

[[threads]]
url = "https://github.com/example/toykernel/pull/12"
state = "merged"
date = 2026-11-20
says = "It fixes the same line."

[[threads]]
url = "https://github.com/another/project/issues/3"
state = "open"
date = 2026-11-19
says = "It reports the same."

[ask]
text = "Please merge ask.patch."
patch = "ask.patch"
origin = "git+https://github.com/example/toykernel@{COMMIT}"
date = 2026-08-21
checks = ["scale"]

[head]
commit = "{"2" * 40}"
date = 2026-08-22
verdict = "CONFIRMED"
"""


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Judge the sound toy pack once."""
    return confirmed(tmp_path_factory.mktemp("judged"))


@pytest.fixture
def folder(judged: Workbench, tmp_path: Path) -> Path:
    """Copy the judged pack, to be changed."""
    return Path(shutil.copytree(judged.packs / "01_confirmed", tmp_path / "packs/01_confirmed"))


def _state(folder: Path) -> None:
    """Let pack.toml state threads, an ask and a head."""
    text = (folder / "pack.toml").read_text().replace("https://example.org/", "https://github.com/Example/")
    top, rest = text.split("[upstream]", 1)
    searched, others = STATED.strip().split("\n", 1)
    (folder / "pack.toml").write_text(f"{top}{searched}\n{others}\n[upstream]{rest}\n")
    fix = (folder / "fix.patch").read_text()
    (folder / "ask.patch").write_text(fix.replace("value * weight for value, weight", "value * scale for value, scale"))


def _rendered(folder: Path, text: str, name: str = "") -> str:
    """Render a template of a pack."""
    (folder / f"report{name}.in.md").write_text(TEMPLATE + text)
    one = load.load_pack(folder)
    return written.render(one, reports.of_pack(one)[name.lstrip(".")])


def test_verdicts_threads_ask_and_search_stand_as_pack_toml_and_receipts_have_them(folder: Path) -> None:
    _state(folder)
    text = _rendered(folder, "{{verdicts}}\n\n{{threads}}\n\n{{ask}}\n\n{{searched}}\n\n{{strength}}\n")
    assert f"toykernel 1.0 | default branch, {'2' * 12} of 2026-08-22 | strength |" in text
    assert "| cpu | traced | CPU | CONFIRMED | not judged | not measured |" in text
    assert "CONFIRMED: the tree is wrong, and right with the patch. Fixed in toykernel 2.0." in text
    assert (
        "**Already there**\n"
        "- [#12](https://github.com/example/toykernel/pull/12), merged, 2026-11-20: It fixes the same line.\n"
        "- [another/project#3](https://github.com/another/project/issues/3), open, 2026-11-19: It reports the same.\n"
    ) in text
    assert "\nPlease merge ask.patch.\n" in text
    assert "Searched on 2026-11-21 for “weights”, “first weight”." in text
    assert "Strength: not measured." in text
    headed = _rendered(folder, "## Already there\n\n{{threads}}\n")
    assert "**Already there**" not in headed


def test_what_pack_toml_does_not_state_is_an_error_and_never_empty(folder: Path) -> None:
    for placeholder in (
        "threads",
        "ask",
        "searched",
        "nothing",
        "verdicts:cpu",
        "patch:none.patch",
        "patch:../x.patch",
    ):
        with pytest.raises(Exception, match=re.escape(f"{{{{{placeholder}}}}}: ")):
            _rendered(folder, f"{{{{{placeholder}}}}}\n")


def test_the_strength_is_that_of_the_record_and_stale_with_the_probe(folder: Path) -> None:
    own, made = strength.Count(9, 10, 1, 0, 0), strength.Count(29, 30, 0, 1, 0)
    pack = load.load_pack(folder)
    probe, patch = receipt.judged_by(pack), receipt.hashed(pack.patch)
    upstream = pack.definition.upstream.sha256
    record = strength.Strength(
        1, folder.name, "cpu", Evidence.TRACED, "2026-11-21", 1, 40, own, made, probe, patch, upstream,
        "3.11", "2", "3", "", 1.0, "runner.py mutate", (),
    )  # fmt: skip
    path = folder / "receipts/strength.cpu.traced.json"
    path.write_text(receipt.to_json(strength.document_of(record)))
    text = _rendered(folder, "{{verdicts}}\n\n{{strength}}\n")
    assert "| CONFIRMED | 38/40, 2026-11-21 |" in text
    assert "Strength: cpu (traced): killed 38 of 40 wrong fixes, 2026-11-21." in text
    (folder / "reproduce.py").write_text((folder / "reproduce.py").read_text() + "\nANOTHER = 1\n")
    text = _rendered(folder, "{{verdicts}}\n\n{{strength}}\n")
    assert "| CONFIRMED STALE | 38/40, 2026-11-21 STALE |" in text
    assert "2026-11-21, STALE." in text
    path.write_text("{}")
    assert "not measured" in _rendered(folder, "{{strength}}\n"), "check says why it cannot be read"


def test_each_project_gets_its_own_patch_once_or_is_told_that_there_is_none(folder: Path) -> None:
    fix = (folder / "fix.patch").read_text()
    diff = "".join(
        line for line in fix[fix.index("diff --git") :].splitlines(keepends=True) if not line.startswith("index ")
    )
    assert f"fix.patch, for toykernel 1.0:\n```diff\n{diff.strip()}\n```" in _rendered(folder, "{{patch}}\n")
    (folder / "report.tilelang.in.md").write_text(TEMPLATE + "## Problem description\n\nx\n")
    one = load.load_pack(folder)
    for form in issue.FORMS:
        for text in (issue.build(one, form, "tilelang"), issue.build_in_full(one, form, "tilelang")):
            assert text.count("There is no patch for tilelang in this report.") == 1
            assert "weights[0] for value" not in text
            assert text.count("# A title") == 1
    (folder / "fix.tilelang.patch").write_text(
        fix.replace("+    return [value * weight ", "+    return [weight * value ")
    )
    text = _rendered(folder, "## Problem description\n\n{{patch}}\n", ".tilelang")
    assert text.count("+    return [weight * value") == 1
    assert "+    return [value * weight " not in text
    full = issue.build_in_full(load.load_pack(folder), "issue", "tilelang")
    assert "+    return [value * weight " not in full
    _state(folder)
    text = _rendered(folder, "{{patch}}\n\n{{patch:fix.patch}}\n")
    assert f"ask.patch, for commit {COMMIT[:12]} of 2026-08-21:" in text
    assert text.count("+    return [value * scale ") == text.count("+    return [value * weight ") == 1


def test_a_large_patch_is_its_files_and_a_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "fix.patch"
    path.write_text(path.read_text().replace("\nSPDX", "\n" + "It was wrong in many ways.\n" * 90 + "\nSPDX"))
    text = _rendered(folder, "{{patch}}\n")
    assert "`packs/01_confirmed/fix.patch`, for toykernel 1.0:" in text
    assert "src/toykernel/scale.py | +1 -1" in text
    assert "weights[0]" not in text
    monkeypatch.setattr(links, "repository_url", lambda: "https://example.org/us/packs")
    text = _rendered(folder, "{{patch}}\n")
    assert "[packs/01_confirmed/fix.patch](https://example.org/us/packs/blob/main/packs/01_confirmed/fix.patch)" in text


def test_the_files_of_a_patch_are_counted_line_by_line() -> None:
    text = (REPOSITORY / "packs/02_sparse_mla_dims/fix.tilelang.patch").read_text()
    stat = subprocess.run(["git", "apply", "--numstat"], input=text, capture_output=True, text=True, check=True).stdout
    rows = [(int(added), int(removed), path) for added, removed, path in map(str.split, stat.splitlines())]
    assert [(one.added, one.removed, one.path) for one in patches.changes(text)] == rows


@pytest.mark.slow
def test_the_command_lines_of_a_report_work(folder: Path, tmp_path: Path) -> None:
    upstream = tmp_path / "upstream"
    shutil.copytree(toys.RESOURCES / "upstream/toykernel-1.0", upstream)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in ([*git, "init", "-q"], [*git, "add", "."], [*git, "commit", "-qm1"]):
        subprocess.run(command, cwd=upstream, check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], cwd=upstream, capture_output=True, text=True, check=True
    ).stdout
    definition = (folder / "pack.toml").read_text()
    (folder / "pack.toml").write_text(definition.replace("0" * 39 + "1", commit.strip()))
    instead = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{upstream}.insteadOf"}
    instead["GIT_CONFIG_VALUE_0"] = "https://example.org/toykernel"
    text = _rendered(folder, "{{reproduce}}\n")
    lines = text.partition("```sh\n")[2].partition("\n```")[0].splitlines()
    assert len(lines) <= 10
    script = "\n".join(f"{line}\necho STATUS $?" for line in lines).replace("uv run", f"{sys.executable} -B")
    ended = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=os.environ | instead, capture_output=True, text=True, check=False
    )
    seen = [
        line.partition(" {")[0] for line in ended.stdout.splitlines() if line.startswith(("STATUS", "BUG_", "FIX_"))
    ]
    assert seen[-5:] == ["BUG_REPRODUCED", "STATUS 10", "STATUS 0", "FIX_VALIDATED", "STATUS 0"], ended.stderr


def _found(folder: Path, text: str) -> str:
    (folder / "report.in.md").write_text(TEMPLATE + text)
    one = load.load_pack(folder)
    return "\n".join(written.errors(one, written.receipt.load_all(one.receipts)))


def test_a_written_report_is_what_its_template_renders_to_and_short(folder: Path) -> None:
    (folder / "report.in.md").write_text(TEMPLATE)
    one = load.load_pack(folder)
    assert written.write(one) == [folder / "REPORT.md"]
    assert written.write(one) == []
    assert (folder / "REPORT.md").read_text() == TEMPLATE.strip() + "\n"
    assert written.errors(one, written.receipt.load_all(one.receipts)) == []
    (folder / "REPORT.md").write_text(TEMPLATE + "Typed.\n")
    assert "REPORT.md: not what report.in.md renders to from the receipts. Next: " in _found(folder, "")
    assert "REPORT.md: 84 lines, more than 80. Next: shorten report.in.md" in _found(folder, "x\n" * 80)
    found = re.search(r"REPORT\.md: as issue (\d+) bytes, more than 6144", _found(folder, "a word " * 870))
    assert found
    assert int(found[1]) > 6144
    with pytest.raises(Exception, match=r"the report is \d+ bytes, more than 6144. Next: shorten report.in.md"):
        issue.build(load.load_pack(folder), "issue")
    assert len(issue.build_in_full(load.load_pack(folder), "issue")) > 6144
    assert re.search(
        r"more than 6144 \(\{\{verdicts\}\} \d+\)\. Next: ", _found(folder, "{{verdicts}}" + " a word" * 870)
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("![figure](data/time.png)", "an image that is not on the web"),
        ('<img width="1" src="data/time.png">', "an image that is not on the web"),
        ("It is 0.12345678901234.", "a number with every digit"),
        ("It measured {'a': 1.5}.", "a raw mapping"),
        ("It stops at 18 sites of 27 sites.", "the unit stands there twice; {{number:TARGET:NAME}}"),
    ],
)
def test_what_no_person_writes_is_refused(folder: Path, text: str, reason: str) -> None:
    assert reason in _found(folder, text)
    assert reason not in _found(folder, "![a](https://example.org/a.png) 0.123 {a: 1} 18 of 27 sites")


def test_the_report_of_a_cleanup_has_no_sentinel(folder: Path) -> None:
    (folder / "pack.toml").write_text((folder / "pack.toml").read_text().replace('"wrong-result"', '"cleanup"'))
    for path in (folder / "receipts").glob("*.json"):
        path.write_text(path.read_text().replace('"kind": "wrong-result"', '"kind": "cleanup"'))
    every = "{{verdicts}}\n\n{{verdict:cpu}}\n\n{{reproduce}}\n"
    assert "| CPU | shown; gone with the patch, and the results are the same |" in _rendered(folder, every)
    assert "in words" not in _found(folder, every)
    assert "'BUG_REPRODUCED': the report of a cleanup says it in words" in _found(folder, "It says BUG_REPRODUCED.")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.23456, "1.23"),
        (1234.5678, "1230"),
        (0.00012345, "0.000123"),
        (1.5e-9, "1.5e-09"),
        (3.0e12, "3e+12"),
        (512, "512"),
        (123456789, "123456789"),
        (True, "yes"),
        (None, "-"),
        ({"first": 0.1234567, "second": [1, 2.5]}, "first 0.123, second 1, 2.5"),
        (float("nan"), "nan"),
    ],
)
def test_values_have_three_digits_and_are_no_code(value: object, text: str) -> None:
    assert figures.significant(value) == text


def test_the_bundle_is_named_with_how_it_is_checked(folder: Path) -> None:
    (folder / "report.in.md").write_text(TEMPLATE)
    text = issue.build(load.load_pack(folder), "pr-comment")
    (line,) = [line for line in text.splitlines() if "runner.py bundle" in line]
    assert "01_confirmed.zip (`runner.py bundle 01`); `runner.py check --bundle` judges it again" in line


# --- the committed packs

PACKS = [load.load_pack(folder) for folder in sorted((REPOSITORY / "packs").glob("*_*"))]
#: A number with what only a measurement has: a unit of time, memory or speed, a per cent sign, or "times".
UNITS = r"ms|µs|us|ns|s|seconds|minutes|[KMGT]i?B(?:/s)?|[GT]FLOP/?s|times|x|\N{MULTIPLICATION SIGN}"
MEASURED = re.compile(rf"(?<![\w.#/-])[+-]?\d[\d.,]*\s?(?:%|per cent|(?:{UNITS})(?!\w))")
#: What looks measured in a template and is not, by pack: the text, and why.
GIVEN: dict[str, dict[str, str]] = {}


def _typed(text: str) -> list[str]:
    """List what a template states as measured, in its own words."""
    for dropped in (r"(?s)```.*?```", r"`[^`\n]*`", r"\{\{[^{}]*\}\}", r"\]\([^)]*\)|https?://\S+"):
        text = re.sub(dropped, "", text)
    return [match[0] for match in MEASURED.finditer(text)]


def test_a_typed_measurement_is_found_and_other_numbers_are_not() -> None:
    typed = "+2.33 % and 279 TFLOP/s, 3.5x, 12 ms, 4 GiB, 1.2 times, 40 seconds"
    assert len(_typed(typed)) == 7
    assert (
        _typed("H200, 0.19.2, sm_90a, #1298, 2026-11-21, 512 + 64, bf16, batch 2, 09_x `12 ms` {{number:cpu:x}} s")
        == []
    )


@pytest.mark.parametrize("one", PACKS, ids=lambda one: one.name)
def test_no_template_states_a_measurement_of_its_own(one: Pack) -> None:
    for report in reports.of_pack(one).values():
        found = _typed(report.template.read_text(encoding="utf-8"))
        assert [text for text in found if text not in GIVEN.get(one.name, {})] == []


@pytest.mark.parametrize("one", PACKS, ids=lambda one: one.name)
def test_each_written_report_is_what_its_template_renders_to(one: Pack) -> None:
    assert written.errors(one, written.receipt.load_all(one.receipts)) == []


def test_the_readme_links_each_report_and_states_the_repositorys_address() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for one in PACKS:
        assert f"[{one.name}](packs/{one.name}/REPORT.md)" in text
    placeholder, url = "RAW-URL-OF-THIS-REPOSITORY", links.repository_url()
    assert (placeholder in text) == (url == "")
    assert url in text
