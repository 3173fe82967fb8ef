"""The form that upstream reads: its order, its words, and what the runner writes into it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from harness.core.errors import HarnessError
from harness.pack import load
from harness.receipt import receipt
from harness.report import blocks, form, placeholders, reports, written
from testing import toys
from testing.workbench import Workbench, confirmed

TITLE = "scale uses the first weight for every value"
TEMPLATE = """# {{title}}

The largest error is {{figure:cpu:max_error}}, and 0 is right. Equal weights are right.

{{script}}

**Cause.** It multiplies by [the first weight](https://example.org/toykernel/blob/v1.0/src/toykernel/scale.py#L9).

**Fix.** Take each value's own weight. {{diff}}

**Related.** {{threads}}

**Environment.** {{environment}}

**Not tested.** Other types.

---

## How this was checked

{{verdicts}}
"""
ACTION = '\n[action]\nkind = "{kind}"\ntext = "{text}"\n'
THREAD = """
[[threads]]
url = "https://github.com/{project}/issues/{number}"
state = "open"
date = 2026-11-20
says = "It reports the same."
"""


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Judge the sound toy pack once."""
    return confirmed(tmp_path_factory.mktemp("judged"))


@pytest.fixture
def bench(judged: Workbench, tmp_path: Path) -> Workbench:
    """Copy the judged pack, with a report in the form."""
    made = Workbench(Path(shutil.copytree(judged.folder, tmp_path / "bench", symlinks=True)), judged.sha256)
    _state(made, ACTION.format(kind="file", text="File an issue.") + _threads(1))
    (made.packs / "01_confirmed/report.in.md").write_text(TEMPLATE)
    return made


def _threads(number: int, project: str = "example/toykernel") -> str:
    return "".join(THREAD.format(project=project, number=one) for one in range(1, number + 1))


def _state(bench: Workbench, tables: str) -> None:
    """Let pack.toml state tables, in the place of those that it has of that kind."""
    path = bench.packs / "01_confirmed/pack.toml"
    text = path.read_text().replace("https://example.org/toykernel", "https://github.com/example/toykernel")
    text = re.sub(r"(?s)\n\[action\].*?(?=\n\[upstream\])", "", text)
    top, rest = text.split("\n[upstream]", 1)
    path.write_text(f"{top}{tables}\n[upstream]{rest}")


def _errors(bench: Workbench) -> str:
    one = load.load_pack(bench.packs / "01_confirmed")
    receipts = receipt.load_all(one.receipts)
    return "\n".join(placeholders.errors(one, receipts) + written.errors(one, receipts))


def _edit(bench: Workbench, file: str, old: str, new: str) -> None:
    toys.replace(bench.packs / "01_confirmed" / file, old, new)


def _receipt(bench: Workbench) -> tuple[Path, dict[str, Any]]:
    path = bench.packs / "01_confirmed/receipts/cpu.traced.json"
    return path, json.loads(path.read_text())


def test_a_report_is_rendered_and_printed_in_the_form(bench: Workbench) -> None:
    ended = bench.run("report", "1")
    assert ended.returncode == 0, ended.stderr
    folder = bench.packs / "01_confirmed"
    script, fix = (folder / "reproduce.py").read_text(), (folder / "fix.patch").read_text()
    diff = re.sub(r"(?m)^index .*\n", "", fix[fix.index("diff --git") :]).strip()
    _, document = _receipt(bench)
    torch = document["host"]["torch"]
    machine = f"torch {torch}" + (f", triton {document['host']['triton']}" if document["host"]["triton"] else "")
    assert (
        ended.stdout
        == f"""# {TITLE}

The largest error is 3, and 0 is right. Equal weights are right.

```python
{script.rstrip()}
```

```text
$ python reproduce.py   # toykernel 1.0
scaled: [1.0, 2.0, 3.0], right: [1.0, 1.0, 0.0]
BUG_REPRODUCED

$ python reproduce.py   # toykernel 1.0 with the patch
scaled: [1.0, 1.0, 0.0], right: [1.0, 1.0, 0.0]
FIX_VALIDATED
```

**Cause.** It multiplies by [the first weight](https://example.org/toykernel/blob/v1.0/src/toykernel/scale.py#L9).

**Fix.** Take each value's own weight.

```diff
{diff}
```

**Related.**
- [#1](https://github.com/example/toykernel/issues/1), open, 2026-11-20: It reports the same.

**Environment.** toykernel 1.0; {machine} (CPU).

**Not tested.** Other types.
"""
    )
    assert "no repository_url: set it before you file" in ended.stderr


def test_the_page_is_the_report_and_how_it_was_checked(bench: Workbench) -> None:
    (bench.packs / "01_confirmed/REPORT.md").write_text("an older form")
    assert "README.md: missing" in _errors(bench)
    assert "REPORT.md stands beside it" in _errors(bench)
    assert bench.run("report", "1", "--write").stdout == "01_confirmed/README.md: written\n"
    assert not (bench.packs / "01_confirmed/REPORT.md").exists()
    page = (bench.packs / "01_confirmed/README.md").read_text()
    above, line, below = page.partition("\n---\n")
    assert above == bench.run("report", "1").stdout
    assert line
    assert below.startswith("\n## How this was checked\n\n| target | evidence |")
    assert "| cpu | traced | CPU | CONFIRMED |" in below
    assert _errors(bench) == ""
    assert "unsound" not in bench.run("check", "1").stdout
    with (bench.packs / "01_confirmed/README.md").open("a") as stream:
        stream.write("Typed.\n")
    assert "README.md: not what report.in.md renders to from the receipts" in _errors(bench)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("# {{title}}", "# Another title", "its heading is not the title of pack.toml"),
        ("The largest error is {{figure:cpu:max_error}}, and 0 is right. Equal weights are right.", "", "no sentence"),
        ("**Cause.** It", "Cause: it", "**Cause.** stands 0 times"),
        ("**Not tested.** Other", "**Not tested.** One.\n\n**Not tested.** Other", "**Not tested.** stands 2 times"),
        (" {{diff}}", "", "**Fix.** lacks {{diff}}"),
        ("{{threads}}", "none", "**Related.** lacks {{threads}}"),
        ("{{environment}}", "torch 2", "**Environment.** lacks {{environment}}"),
        ("**Cause.** It", "**Not tested.** It", "its parts are in another order"),
        ("{{verdicts}}", "It was.", "below the line (---) stand ## How this was checked and {{verdicts}}"),
        ("## How this was checked", "## Checked", "below the line (---) stand"),
        ("---\n", "", "below the line (---) stand"),
        ("Equal weights", "word " * 300 + "Equal weights", "words beside code and output, more than 300"),
        ("Equal weights", "word\n" * 60 + "Equal weights", "lines beside script and diff, more than 60"),
        ("{{diff}}", "{{diff:../x.patch}}", "the pack has no ../x.patch"),
        ("{{diff}}", "{{diff:no.patch}}", "the pack has no no.patch"),
        ("{{script}}", "{{script}} TODO", "'TODO' is left in it"),
    ],
)
def test_what_leaves_the_form_is_refused(bench: Workbench, old: str, new: str, reason: str) -> None:
    assert reason not in _errors(bench)
    _edit(bench, "report.in.md", old, new)
    assert reason in _errors(bench)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("It is CONFIRMED.", "CONFIRMED"),
        ("It says BUG_REPRODUCED.", "BUG_REPRODUCED"),
        ("Its strength is 3.", "strength"),
        ("Both lanes are wrong.", "lanes"),
        ("The Evidence is traced.", "Evidence"),
        ("This pack shows it.", "pack"),
        ("The contract says so.", "contract"),
        ("The receipts say so.", "receipts"),
        ("Ten mutants died.", "mutants"),
        ("Probe it.", "Probe"),
        ("At first sight.", "At first sight"),
        ("Against it: nothing.", "Against it"),
    ],
)
def test_our_own_words_stay_below_the_line(bench: Workbench, text: str, word: str) -> None:
    where = "Equal weights are right."
    _edit(bench, "report.in.md", where, f"{where} {text}")
    assert f"{word!r} above the line is a word of this repository" in _errors(bench)
    _edit(bench, "report.in.md", f"{where} {text}", f"{where} It is packed: `pack`, [a](https://example.org/pack).")
    _edit(bench, "report.in.md", "{{verdicts}}", f"{{{{verdicts}}}}\n\n{text}")
    assert "a word of this repository" not in _errors(bench)


def test_three_threads_matter(bench: Workbench) -> None:
    action = ACTION.format(kind="file", text="File an issue.")
    _state(bench, action + _threads(3))
    assert "threads" not in _errors(bench)
    _state(bench, action + _threads(4))
    assert "pack.toml has 4 threads; the 3 that matter are enough" in _errors(bench)
    _state(bench, action + _threads(1, "another/project"))
    assert "- [another/project#1](https://github.com/another/project/issues/1), open" in bench.run("report", "1").stdout
    _state(bench, action)
    assert "{{threads}}: pack.toml has neither [[threads]] nor searched" in _errors(bench)


@pytest.mark.parametrize(("kind", "text"), [("fixed", "Fixed in 2.0 by #3."), ("nothing", "The size is a choice.")])
def test_a_report_that_asks_for_nothing_says_so_first(bench: Workbench, kind: str, text: str) -> None:
    _state(bench, ACTION.format(kind=kind, text=text) + _threads(1))
    assert bench.run("report", "1").stdout.startswith(f"# {TITLE}\n\n*{text}*\n\nThe largest error is 3,")
    _edit(bench, "report.in.md", "**Fix.** Take each value's own weight. {{diff}}\n\n", "")
    assert "**Fix.**" not in _errors(bench)
    _state(bench, ACTION.format(kind="filed", text=text) + _threads(1))
    assert text not in bench.run("report", "1").stdout
    assert "**Fix.** stands 0 times" in _errors(bench)
    _state(bench, _threads(1))
    assert "pack.toml has no [action]" in _errors(bench)


def test_a_title_has_neither_a_tag_nor_a_version(bench: Workbench) -> None:
    _edit(bench, "pack.toml", f'"{TITLE}"', '"[BUG] scale of 1.0 is wrong"')
    assert "the title begins with a tag" in _errors(bench)
    assert "the title names a version" in _errors(bench)


def test_a_long_diff_is_folded(bench: Workbench) -> None:
    fix = (bench.packs / "01_confirmed/fix.patch").read_text()
    head, hunk = fix.rsplit("\n@@", 1)[0], "@@ -1,1 +1,26 @@\n line\n" + "+a line\n" * 26
    assert "```diff" in bench.run("report", "1").stdout
    (bench.packs / "01_confirmed/fix.patch").write_text(f"{head}\n{hunk}")
    text = bench.run("report", "1").stdout
    assert "\n\n<details>\n<summary>src/toykernel/scale.py (+26 -0)</summary>\n\n```diff\n" in text
    assert text.count("+a line") == 26


def test_output_that_no_receipt_holds_is_a_draft_and_fails_check(bench: Workbench) -> None:
    path, document = _receipt(bench)
    for lane in document["lanes"].values():
        assert lane.pop("printed").splitlines()[-1] == lane["script"]
    path.write_text(json.dumps(document))
    ended = bench.run("report", "1")
    assert "\n```\n\n(output is not recorded yet)\n\n**Cause.**" in ended.stdout
    assert "a draft: no receipt holds what the script printed" in ended.stderr
    assert "(output is not recorded yet)" not in _errors(bench)
    assert "{{script}}: no receipt holds what today's script printed; record again. Next: runner.py run" in _errors(
        bench
    )
    assert bench.run("report", "1", "--write").returncode == 0
    assert bench.run("check", "1").returncode == 1
    one = load.load_pack(bench.packs / "01_confirmed")
    with pytest.raises(HarnessError, match="record again"):
        written.render(one, reports.of_pack(one)[""])
    assert bench.run("bundle", "1").returncode != 0


def test_the_output_of_another_script_is_not_shown(bench: Workbench) -> None:
    _edit(bench, "reproduce.py", "values, weights = [1.0", "ANOTHER = 1\nvalues, weights = [1.0")
    assert "(output is not recorded yet)" in bench.run("report", "1").stdout


def _renewed(bench: Workbench, name: str, **changes: Any) -> None:  # noqa: ANN401 - parts of a JSON document
    """Write a receipt beside that of the CPU: `script` and `printed` are of both lanes."""
    path, document = _receipt(bench)
    lanes = {key: changes.pop(key) for key in ("script", "printed") if key in changes}
    for lane in document["lanes"].values():
        lane.update(lanes)
    document |= {"command": "runner.py run 1", **changes}
    target = path.parent / name
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(document))


def test_the_output_is_the_cpus_where_the_script_judged_there(bench: Workbench) -> None:
    target = '[targets.sm_90a]\nevidence = ["executed"]\nverdict = "CONFIRMED"\nloads = ["src/toykernel/scale.py"]\n'
    _edit(bench, "pack.toml", "[targets.cpu]", f"{target}\n[targets.cpu]")
    gpu = {"host": _receipt(bench)[1]["host"] | {"gpus": [{"name": "NVIDIA H100", "compute_capability": "9.0"}]}}
    _renewed(bench, "sm_90a.executed.json", target="sm_90a", evidence="executed", printed="of the GPU\n", **gpu)
    text = bench.run("report", "1").stdout
    assert "of the GPU" not in text
    assert "(NVIDIA H100, CPU)." in text
    _renewed(bench, "cpu.traced.json", script="UNSUPPORTED: needs a GPU", printed="UNSUPPORTED: needs a GPU\n")
    text = bench.run("report", "1").stdout
    assert text.count("of the GPU") == 2
    (bench.packs / "01_confirmed/receipts/sm_90a.executed.json").unlink()
    assert bench.run("report", "1").stdout.count("UNSUPPORTED: needs a GPU\n") >= 2


def test_the_output_is_of_the_patch_that_is_asked_for(bench: Workbench) -> None:
    commit, ask = "1" * 40, 'patch = "ask.patch"\ndate = 2026-08-21\n'
    ask += f'origin = "git+https://github.com/example/toykernel@{commit}"\n'
    _state(bench, ACTION.format(kind="file", text="File it.") + _threads(1) + f"\n[ask]\n{ask}")
    folder = bench.packs / "01_confirmed"
    (folder / "ask.patch").write_text((folder / "fix.patch").read_text().replace("+    return [", "+    return  ["))
    text = bench.run("report", "1").stdout
    assert "# toykernel 1.0 with fix.patch" in text, "the shown patch is another"
    assert "+    return  [" in text
    _, document = _receipt(bench)
    patch = receipt.hashed(folder / "ask.patch")
    upstream = document["upstream"] | {"commit": commit, "version": f"1.0 at {commit}", "origin": "git"}
    fix = document["fix"] | {"name": "ask.patch", "sha256": patch.sha256, "meaning": patch.meaning}
    _renewed(bench, "ask/cpu.traced.json", upstream=upstream, fix=fix)
    text = bench.run("report", "1").stdout
    assert f"# toykernel at {commit[:12]} of 2026-08-21\n" in text
    assert f"# toykernel at {commit[:12]} of 2026-08-21 with the patch\n" in text
    assert f"**Environment.** toykernel 1.0; default branch at {commit[:12]} of 2026-08-21; torch" in text


def test_the_report_of_a_run_says_what_it_judged_beside_the_text(bench: Workbench) -> None:
    assert bench.run("run", "1").returncode == 0
    shutil.rmtree(bench.packs / "01_confirmed/receipts")
    ended = bench.run("report", "1", "--from", "last", "--cache", str(bench.cache))
    assert ended.returncode == 0, ended.stderr
    assert "FIX_VALIDATED\n```" in ended.stdout
    assert "Filled from one run, which judged cpu (traced)." in ended.stderr
    assert "Filled from" not in ended.stdout


def test_a_bundle_holds_the_report_and_an_output_that_the_log_has_not_is_refuted(bench: Workbench) -> None:
    def bundled() -> subprocess.CompletedProcess[str]:
        ended = bench.run("bundle", "1", "-o", str(bench.folder / "b.zip"))
        assert ended.returncode == 0, ended.stderr
        return bench.run("check", "--bundle", str(bench.folder / "b.zip"))

    _renewed(bench, "cpu.traced.json")
    ended = bundled()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with zipfile.ZipFile(bench.folder / "b.zip") as opened:
        text = opened.read("01_confirmed/REPORT.md").decode()
    assert "FIX_VALIDATED\n```" in text
    assert text.startswith(f"# {TITLE}\n")
    path, document = _receipt(bench)
    document["lanes"]["pristine"]["printed"] = "scaled: [9.0], right: [1.0]\nBUG_REPRODUCED\n"
    path.write_text(json.dumps(document))
    ended = bundled()
    assert ended.returncode == 1
    assert "pristine lane: printed: its log has no line 'scaled: [9.0], right: [1.0]'" in ended.stdout
    document["lanes"]["pristine"]["printed"] = "FIX_VALIDATED\n"
    path.write_text(json.dumps(document))
    assert "printed: its last line is no BUG_REPRODUCED" in bundled().stdout


def test_words_are_those_beside_code_and_output() -> None:
    text = "# One two\n\nthree `code of many words` [four](https://example.org/a_b) five.\n\n```text\na b c\n```\n"
    assert list(form.text_errors(text)) == []
    assert list(form.text_errors(text + "word " * 295)) == ["301 words beside code and output, more than 300"]
    assert blocks.NOT_YET == "(output is not recorded yet)"
