"""What a maintainer reads: one form, short, in his words, with every figure sourced."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.pack import load
from harness.pack.model import Pack
from harness.receipt import figures, receipt
from harness.report import parts, report
from testing import strengths
from testing.workbench import REPOSITORY, Workbench

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
patch = "ask.patch"
origin = "git+https://github.com/example/toykernel@{COMMIT}"
date = 2026-08-21
checks = ["scale"]

[head]
commit = "{"2" * 40}"
date = 2026-08-22
verdict = "CONFIRMED"
"""


@pytest.fixture
def folder(judged: Workbench, tmp_path: Path) -> Path:
    """Copy the judged pack, to be changed."""
    return Path(shutil.copytree(judged.packs / "01_confirmed", tmp_path / "packs/01_confirmed"))


def _state(folder: Path) -> None:
    """Let pack.toml state threads, an ask and a head."""
    text = (folder / "pack.toml").read_text().replace("https://example.org/", "https://github.com/Example/")
    top, rest = re.sub(r"(?m)^searched = .*\n", "", text).split("[upstream]", 1)
    searched, others = STATED.strip().split("\n", 1)
    (folder / "pack.toml").write_text(f"{top}{searched}\n{others}\n[upstream]{rest}\n")
    fix = (folder / "fix.patch").read_text()
    (folder / "ask.patch").write_text(fix.replace("value * weight for value, weight", "value * scale for value, scale"))


def _rendered(folder: Path, text: str) -> str:
    """Render a text as a report of a pack."""
    one = load.load_pack(folder)
    return report.fill_template(one, report.receipts_of(one), "# A title\n\n" + text)


def _edited(folder: Path, old: str, new: str) -> str:
    """Change one text of the pack's report, and say what is then wrong with it."""
    path = folder / "report.in.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    found = "\n".join(report.errors(load.load_pack(folder)))
    path.write_text(text)
    return found


def test_the_part_for_upstream_has_the_script_its_output_on_both_trees_and_the_diff(judged: Workbench) -> None:
    ended = judged.run("report", "1")
    assert ended.returncode == 0, ended.stderr
    script = (judged.packs / "01_confirmed/reproduce.py").read_text()
    assert f"```python\n{script.strip()}\n```" in ended.stdout
    assert re.search(r"\$ python reproduce.py  # toykernel 1.0, no GPU\n(?:.*\n)*?BUG_REPRODUCED\n", ended.stdout)
    assert re.search(r"# toykernel 1.0 with the patch, no GPU\n(?:.*\n)*?FIX_VALIDATED\n```", ended.stdout)
    assert "```diff\ndiff --git a/src/toykernel/scale.py" in ended.stdout
    assert "index 0" not in ended.stdout
    assert "The largest error is 3, expected 0." in ended.stdout
    assert "How this was checked" not in ended.stdout
    assert report.render(load.load_pack(judged.packs / "01_confirmed")).startswith(ended.stdout.rstrip())


def test_a_pack_that_is_fixed_says_so_first(folder: Path) -> None:
    definition = folder / "pack.toml"
    fixed = definition.read_text().replace(
        'kind = "file"\ntext = "Open an issue."', 'kind = "fixed"\ntext = "Fixed in 2.0."'
    )
    definition.write_text(fixed)
    assert report.render(load.load_pack(folder)).splitlines()[2] == "*Fixed in 2.0.*"


def test_a_cleanup_is_said_to_be_no_bug(folder: Path) -> None:
    definition = folder / "pack.toml"
    kind = next(line for line in definition.read_text().splitlines() if line.startswith("kind = "))
    definition.write_text(definition.read_text().replace(kind, 'kind = "cleanup"', 1))
    assert "CONFIRMED: the tree has the code, and with the patch it does not." in _rendered(folder, "{{verdicts}}\n")


def test_where_a_question_goes_to_another_upstream_it_is_what_is_printed(folder: Path) -> None:
    path = folder / "report.in.md"
    question = "\n## The question to Other\n\nTitle: Is it so?\n\n> First.\n>\n> {text}\n\nIt was measured.\n"
    path.write_text(path.read_text() + question.format(text="Second."))
    assert report.for_upstream(report.render(load.load_pack(folder))) == "# Is it so?\n\nFirst.\n\nSecond.\n"
    assert "in the question: pack" in _edited(folder, "> Second.", "> This pack asks.")


def test_the_command_of_upstreams_own_tests_selects_what_the_pack_selects() -> None:
    found = parts.suite_command(("test/test_a.py",), ("-k", "one or two"), {"TRITON_INTERPRET": "1"})
    assert found == "TRITON_INTERPRET=1 pytest test/test_a.py -k 'one or two'"


def test_a_long_diff_is_folded_away(folder: Path) -> None:
    path = folder / "fix.patch"
    path.write_text(path.read_text() + "".join(f"+line {number}\n" for number in range(40)))
    text = _rendered(folder, "{{diff}}\n")
    assert "<summary>The patch, 42 lines</summary>" in text


def test_verdicts_threads_and_search_stand_as_pack_toml_and_receipts_have_them(folder: Path) -> None:
    _state(folder)
    text = _rendered(folder, "{{verdicts}}\n\n{{threads}}\n\n{{searched}}\n\n{{environment}}\n")
    assert "| cpu | traced | CPU | CONFIRMED | not measured |" in text
    assert "CONFIRMED: the tree has the bug, and with the patch it does not. Fixed in toykernel 2.0." in text
    assert (
        "- [#12](https://github.com/example/toykernel/pull/12) (merged, 2026-11-20): It fixes the same line.\n"
        "- [another/project#3](https://github.com/another/project/issues/3) (open, 2026-11-19): It reports the same.\n"
    ) in text
    assert "Searched on 2026-11-21 for:\n\n- “weights”\n- “first weight”\n" in text
    assert re.search(r"toykernel 1\.0 \(no GPU: Python [\d.]+, torch", text)
    assert f"Not judged: default branch at {'2' * 12} of 2026-08-22." in text
    pack_toml = folder / "pack.toml"
    pack_toml.write_text(pack_toml.read_text().replace('verdict = "CONFIRMED"', 'verdict = "UNSUPPORTED"'))
    assert f"No such code: default branch at {'2' * 12} of 2026-08-22." in _rendered(folder, "{{environment}}\n")
    (folder / "ask.patch").write_text((folder / "fix.patch").read_text().replace("value * weight", "weight * value"))
    assert "weight * value" in _rendered(folder, "{{diff}}\n"), (
        "the diff is that of the patch that upstream is asked for"
    )


def test_checks_that_were_not_judged_are_counted_with_their_reasons(folder: Path) -> None:
    path = folder / "receipts/cpu.traced.json"
    document = json.loads(path.read_text())
    checks = document["lanes"]["patched"]["checks"]
    checks[0] |= {"ok": None, "reason": "needs [2] GPUs"}
    path.write_text(receipt.to_json(document))
    text = _rendered(folder, "{{verdicts}}\n")
    assert f"does not. On cpu, 1 of {len(checks)} checks are not judged (`needs [2] GPUs`)." in text


def test_what_nothing_states_is_an_error_and_never_empty(folder: Path) -> None:
    for placeholder in (
        "nothing",
        "verdicts:cpu",
        "diff:none.patch",
        "diff:../x.patch",
        "diff:data/../x.patch",
        "figure:cpu:none",
        "figure:sm_90a:max_error",
        "data:none.json:key",
        "data:../pack.toml:key",
    ):
        with pytest.raises(parts.MissingError, match=re.escape(f"{{{{{placeholder}")):
            _rendered(folder, f"{{{{{placeholder}}}}}\n")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("# scale", "# Scale", "its first line is not '# ' and the title of pack.toml"),
        ("\n---\n", "\n", "it has no line '---'"),
        ("Other dtypes.", "The contract judges packs.", "above the line: contract, packs"),
        ("Other dtypes.", "word " * 300, "words above the line beside code, more than 300"),
        (
            "Other dtypes.",
            "It is CONFIRMED, with a strength.",
            "words of this repository above the line: CONFIRMED, strength",
        ),
        ("Other dtypes.", "TODO", "'TODO' is left in it"),
        ("Other dtypes.", "It is {{figure:cpu:none}}.", "no such figure in the unpatched lane"),
        ("Other dtypes.", "Other shapes.", "README.md: not what report.in.md renders to from the receipts. Next: "),
    ],
)
def test_what_a_maintainer_would_not_read_is_named(folder: Path, old: str, new: str, reason: str) -> None:
    report.write(load.load_pack(folder))
    assert not [*report.errors(load.load_pack(folder))]
    assert reason in _edited(folder, old, new)


def test_a_report_is_written_once_and_missing_until_then(folder: Path) -> None:
    (folder / "README.md").unlink(missing_ok=True)
    assert any("README.md: not what report.in.md renders to" in one for one in report.errors(load.load_pack(folder)))
    assert report.write(load.load_pack(folder))
    assert not report.write(load.load_pack(folder))


def test_more_than_three_threads_and_no_action_are_named(folder: Path) -> None:
    _state(folder)
    definition = folder / "pack.toml"
    thread = STATED[STATED.index("[[threads]]") : STATED.index("[ask]")].split("\n\n", maxsplit=1)[0]
    others = "".join(thread.replace("/12", f"/{number}") + "\n\n" for number in (13, 14))
    text = definition.read_text().replace("[[threads]]", f"{others}[[threads]]", 1)
    action = text[text.index("[action]") : text.index("[requires]")]
    definition.write_text(text.replace(action, ""))
    found = [*report.errors(load.load_pack(folder))]
    assert "report.in.md: pack.toml has 4 [[threads]], more than 3" in found
    assert "report.in.md: pack.toml has no [action] that says what is to be done with it" in found


def test_text_from_outside_comes_to_life_in_no_report(folder: Path) -> None:
    path = next((folder / "receipts").glob("cpu.*.json"))
    evil = '"![i](http://evil.example/t.png) @someone <b>"'
    path.write_text(
        re.sub(r'("name": "max_error",\s+"value": )[\d.]+', lambda match: match[1] + evil, path.read_text())
    )
    text = _rendered(folder, "{{figure:cpu:max_error}}\n")
    assert "`![i](http://evil.example/t.png) @someone <b>`" in text


def test_a_run_stands_in_for_the_committed_receipts(judged: Workbench) -> None:
    assert "no receipt" not in judged.run("report", "1", "--from", "last", "--cache", str(judged.cache)).stderr
    refused = judged.run("report", "1", "--write", "--from", "last")
    assert refused.returncode == 2


def _receipt(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "receipts/cpu.traced.json"
    return path, json.loads(path.read_text())


def test_output_that_no_receipt_holds_is_a_draft_and_fails_check(judged: Workbench, folder: Path) -> None:
    bench = Workbench(folder.parents[1], judged.sha256)
    path, document = _receipt(folder)
    for lane in document["lanes"].values():
        assert lane.pop("printed").endswith(f"\n{lane['script']}"), "older runners did not record it"
    path.write_text(json.dumps(document))
    ended = bench.run("report", "1")
    assert "\n```\n\n(output is not recorded yet)\n" in ended.stdout
    assert "a draft: no receipt holds the script's output" in ended.stderr
    assert "repository_url in pyproject.toml is empty" in ended.stderr
    assert report.write(load.load_pack(folder)), "a draft can be written"
    reason = "report.in.md: {{script}}: no receipt holds what today's script printed; record again. Next: runner.py run"
    assert [error.partition(" 01_")[0] for error in report.errors(load.load_pack(folder))] == [reason]
    assert "words of this repository above the line: lane" in _edited(folder, "Other dtypes.", "Another lane.")
    assert "record again" in bench.run("report", "1", "--bundle", str(folder.parents[1] / "x.zip")).stderr


def test_what_an_older_script_printed_is_not_shown(folder: Path) -> None:
    one = load.load_pack(folder)
    assert "scaled: [1.0, 2.0, 3.0], right: [1.0, 1.0, 0.0]\nBUG_REPRODUCED" in report.render(one)
    script = folder / "reproduce.py"
    script.write_text(script.read_text().replace("values, weights = [1.0", "ANOTHER = 1\nvalues, weights = [1.0"))
    assert "BUG_REPRODUCED\n```" not in report.render(one, is_draft=True)


def test_the_output_names_the_patch_that_gave_it(folder: Path) -> None:
    assert "# toykernel 1.0 with the patch, no GPU" in _rendered(folder, "{{script}}\n")
    _state(folder)
    assert "# toykernel 1.0 with fix.patch, no GPU" in _rendered(folder, "{{script}}\n"), "the diff is ask.patch"
    _, document = _receipt(folder)
    patch = receipt.hashed(folder / "ask.patch")
    document["upstream"] |= {"commit": COMMIT, "version": f"commit {COMMIT}", "origin": "git"}
    document["fix"] |= {"name": "ask.patch", "sha256": patch.sha256, "meaning": patch.meaning}
    (folder / "receipts/ask").mkdir()
    (folder / "receipts/ask/cpu.traced.json").write_text(json.dumps(document))
    assert f"# toykernel commit {COMMIT[:12]} with the patch, no GPU" in _rendered(folder, "{{script}}\n")
    environment = _rendered(folder, "{{environment}}\n")
    assert f"toykernel commit {COMMIT[:12]} of 2026-08-21 (no GPU: Python" in environment, "the tree of the output"
    assert "Same bug: 1.0. Not judged: default branch at " in environment
    for lane in document["lanes"].values():
        lane |= {"script": "UNSUPPORTED: needs a GPU", "printed": "UNSUPPORTED: needs a GPU"}
    (folder / "receipts/ask/cpu.traced.json").write_text(json.dumps(document))
    assert "# toykernel 1.0 with fix.patch, no GPU" in _rendered(folder, "{{script}}\n"), "it could judge there"


def test_a_script_that_cannot_judge_shows_what_it_says(folder: Path) -> None:
    path, document = _receipt(folder)
    for lane in document["lanes"].values():
        lane |= {"script": "UNSUPPORTED: needs a GPU", "printed": "UNSUPPORTED: needs a GPU"}
    path.write_text(json.dumps(document))
    assert _rendered(folder, "{{script}}\n").count("no GPU\nUNSUPPORTED: needs a GPU\n") == 1


def test_what_tilelang_logs_between_the_lines_of_a_script_is_left_out(folder: Path) -> None:
    path, document = _receipt(folder)
    logged = "2026-11-26 17:52:40  [TileLang:tilelang.jit.kernel:INFO]: TileLang begins to compile kernel `main`\n"
    document["lanes"]["pristine"]["printed"] = f"{logged}2026-11-26: a line of the script\n{logged}BUG_REPRODUCED"
    path.write_text(json.dumps(document))
    assert "no GPU\n2026-11-26: a line of the script\nBUG_REPRODUCED\n" in _rendered(folder, "{{script}}\n")


def test_without_any_receipt_the_next_step_is_said(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    ended = workbench.run("report", "1")
    assert (ended.returncode, "Next: runner.py run 01_confirmed" in ended.stderr) == (2, True), ended.stderr


def test_the_strength_is_that_of_the_record_and_stale_with_the_script(folder: Path) -> None:
    path = strengths.lay(folder)
    text = _rendered(folder, "{{verdicts}}\n")
    assert "| CONFIRMED | 38 of 40, 2026-11-21 |" in text
    (folder / "reproduce.py").write_text((folder / "reproduce.py").read_text() + "\nANOTHER = 1\n")
    text = _rendered(folder, "{{verdicts}}\n")
    assert "| CONFIRMED STALE | 38 of 40, 2026-11-21 STALE |" in text
    path.write_text("{}")
    assert "not measured" in _rendered(folder, "{{verdicts}}\n"), "check says why it cannot be read"


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


# --- the committed packs

PACKS = [load.load_pack(folder) for folder in sorted((REPOSITORY / "packs").glob("*_*"))]
#: A number with what only a measurement has: a unit of time, memory or speed, a per cent sign, or "times".
UNITS = r"ms|µs|us|ns|s|seconds|minutes|[KMGT]i?B(?:/s)?|[GT]FLOP/?s|times|x|\N{MULTIPLICATION SIGN}"
MEASURED = re.compile(rf"(?<![\w.#/-])[+-]?\d[\d.,]*\s?(?:%|per cent|(?:{UNITS})(?!\w))")
#: What looks measured in a template and is not, by pack: the text, and why.
GIVEN: dict[str, dict[str, str]] = {
    "12_dsa_indexer_memory": {
        "238.17 GiB": "the error of the linked issue",
        "79 GiB": "likewise",
        "256 MiB": "the budget in the patch",
        "80 GB": "the size of a GPU",
    },
    "16_megatron_float16_module": {"0.784 %": "exp(2^-7) - 1"},
}


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
    found = _typed(one.report_template.read_text(encoding="utf-8"))
    assert [text for text in found if text not in GIVEN.get(one.name, {})] == []


@pytest.mark.parametrize("one", PACKS, ids=lambda one: one.name)
def test_a_report_links_to_the_web_alone(one: Pack) -> None:
    """Above the line, which is pasted elsewhere: a relative link would lead nowhere from there."""
    above = report.for_upstream(one.report_template.read_text(encoding="utf-8"))
    assert [url for url in re.findall(r"\]\(([^)\s]*)\)", above) if not url.startswith("https://")] == []
