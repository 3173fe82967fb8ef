"""A new pack from a script: what is resolved, what it shows, and what is said to be missing."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.author import missing
from harness.core.words import Kind
from harness.pack import load, probe
from harness.pack.model import Pack
from testing import releases
from testing.workbench import Workbench, empty

SCRIPT = '''"""scale uses the first weight for every value."""
from toykernel.scale import scale

found = scale([1.0, 2.0], [1.0, 0.5])
assert found == [1.0, 1.0], found
'''
CONTROL = "from toykernel.scale import scale\nassert scale([2.0], [3.0]) == [6.0]\n"


@dataclass(frozen=True)
class Author:
    """Somebody with a script, a folder of packs, and an index that has the release."""

    bench: Workbench
    index: dict[str, str]
    git: dict[str, str]

    @property
    def folder(self) -> Path:
        """Where his files are."""
        return self.bench.folder

    def new(self, slug: str, *arguments: str, upstream: str = "toykernel==1.0") -> subprocess.CompletedProcess[str]:
        """Make a new pack."""
        places = ["--upstream", upstream, "--cache", str(self.bench.cache)]
        ended = self.bench.run("new", slug, *places, *arguments, **self.index, **self.git)
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended

    def rows(self, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        """Run packs, with the index to fetch their wheels from."""
        return self.bench.rows("--online", *arguments, **self.index)

    def pack(self, slug: str) -> Pack:
        """Load a pack by its slug."""
        (folder,) = load.select_packs(self.bench.packs, (slug,))
        return load.load_pack(folder)

    def file(self, name: str, text: str) -> str:
        """Write a file; return its path."""
        (self.folder / name).write_text(text)
        return str(self.folder / name)


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Author]:
    """Serve the toy release."""
    bench = empty(tmp_path_factory.mktemp("author"))
    archive = releases.sdist(bench.folder / "packs")
    made = Path(archive.rename(bench.folder / archive.name))
    (bench.folder / "packs/toykernel-1.0").rename(bench.folder / "toykernel-1.0")
    git = releases.repository(bench.folder)
    with releases.index([made], [releases.helper(bench.folder, "1.0")]) as index:
        yield Author(bench, index, git)


@pytest.fixture(scope="module")
def made(author: Author) -> Path:
    """Make a pack from the script, with upstream's fix; return its folder."""
    given = ["--from-script", author.file("bug.py", SCRIPT), "--control", author.file("right.py", CONTROL)]
    fix = releases.commit(author.folder, "main")
    ended = author.new("toy_scale", *given, "--fix-commit", fix)
    assert ended.returncode == 0, ended.stderr
    assert "to be admitted here: fix.patch: its subject" in ended.stdout
    assert (
        "note: target cpu is traced: the release's own code runs as it is, on real values; of toykernel" in ended.stdout
    )
    assert ended.stdout.splitlines()[-2:] == [
        "tried: BUG_REPRODUCED: the script fails on toykernel 1.0 (cpu, traced): AssertionError: [1.0, 2.0]",
        "Next: runner.py check 01_toy_scale",
    ]
    return author.bench.packs / "01_toy_scale"


def test_it_states_what_can_be_known(author: Author, made: Path) -> None:
    stated = tomllib.loads((made / "pack.toml").read_text())
    upstream = stated["upstream"]
    assert (upstream["source_root"], upstream["modules"], upstream["license"]) == ("src", ["toykernel"], "Apache-2.0")
    assert upstream["repository"] == releases.REPOSITORY
    assert upstream["commit"] == releases.commit(author.folder, "v1.0")
    assert (made / "requirements.in").read_text() == "toyhelper>=1.0\n"
    pinned = load.load_pack(made).definition.dependencies
    assert {name: [*one] for name, one in pinned.items()} == {"default": ["toyhelper"]}
    assert "http" not in (made / "requirements.txt").read_text(), "the index may be private"
    assert stated["targets"]["cpu"]["loads"] == ["src/toykernel/scale.py"]
    text = (made / "reproduce.py").read_text()
    assert 'STUBS = ("toykernel",)' in text
    assert max(map(len, text.splitlines())) <= 120
    found = probe.read(text)
    assert (found.errors, found.pins["toyhelper"], found.requires_python) == ((), "1.0", ">=3.10")
    report = (made / "report.in.md").read_text()
    assert report.startswith("# ")
    assert "{{script}}" in report
    assert "{{check:cpu:script}}" in report


def test_it_shows_the_bug_and_the_fix_and_refuses_its_wrong_fix(author: Author, made: Path) -> None:
    assert "README" not in (made / "fix.patch").read_text()
    status, (row,) = author.rows("1")
    assert (status, row["verdict"], row["reason"]) == (0, "CONFIRMED", "")
    mutated = author.bench.run("mutate", "1", "--only-own")
    assert "killed 1 of 1" in mutated.stdout, mutated.stdout + mutated.stderr


def test_check_says_what_is_missing_the_next_step_first(author: Author, made: Path) -> None:
    ended = author.bench.run("check", "1")
    lines = ended.stdout.splitlines()
    first = "01_toy_scale: to file an issue: pack.toml: searched, and [[threads]]"
    assert (ended.returncode, lines[0].startswith(first)) == (1, True)
    assert "01_toy_scale: to be admitted here: reproduce.py: Cause: the lines that do it." in lines
    assert not [line for line in lines if "TODO" in line or "there is no receipt" in line]
    assert lines[-1] == "1 pack(s) read, 0 sound"
    assert missing.is_half_written(load.load_pack(made))


def test_check_keeps_what_an_issue_needs_apart_from_what_is_asked_here(author: Author, made: Path) -> None:
    told = [
        line.split(": ")[1:3] for line in author.bench.run("check", made.name).stdout.splitlines() if ": to " in line
    ]
    doors = [door for door, _ in told]
    assert doors == sorted(doors, key=["to file an issue", "to be admitted here"].index)
    assert {what for door, what in told if door == "to file an issue"} == {
        "pack.toml",
        "report.in.md",
        "the issue itself. Next",
    }
    assert {"reproduce.py", "fix.patch", "mutants/", "README.md. Next"} <= {
        what for door, what in told if door != doors[0]
    }


def test_without_a_fix_the_bug_is_shown_alone(author: Author) -> None:
    ended = author.new("toy_alone", "--from-script", author.file("bug.py", SCRIPT))
    assert ended.returncode == 0, ended.stderr
    assert "to be admitted here: reproduce.py: a control of its own" in ended.stdout
    assert "to file an issue: fix.patch: the fix" in ended.stdout
    status, (row,) = author.rows("toy_alone", "--lane", "pristine")
    assert (status, row["verdict"]) == (0, "REPRODUCED")


def test_a_script_that_breaks_before_its_assertion_shows_nothing(author: Author) -> None:
    broken = SCRIPT.replace("[1.0, 0.5])", "[])")  # an IndexError of the release, and no verdict of the script's own
    ended = author.new("toy_broken", "--from-script", author.file("broken.py", broken))
    assert "tried: CONTROL_FAILED: nothing is shown on toykernel 1.0 (cpu, traced): repeats" in ended.stdout
    assert "Next: mend what that says, then runner.py run" in ended.stdout
    status, (row,) = author.rows("toy_broken", "--lane", "pristine")
    assert (status, row["verdict"]) == (1, "CONTROL_FAILED")


def test_without_a_script_the_probe_decides_nothing(author: Author) -> None:
    ended = author.new("toy_empty", "--module", "toykernel")
    assert "to file an issue: reproduce.py: script() holds nothing yet" in ended.stdout
    assert "tried:" not in ended.stdout
    status, (row,) = author.rows("toy_empty", "--lane", "pristine")
    assert (status, row["verdict"]) == (5, "UNSUPPORTED")


def test_a_fix_that_does_not_apply_is_left_to_the_author(author: Author) -> None:
    other = author.file("other.patch", SOURCE_PATCH.replace("weights[0]", "weights[9]"))
    given = ["--from-script", author.file("bug.py", SCRIPT), "--fix-commit", other]
    ended = author.new("toy_stale", *given)
    assert "note: the fix does not apply to toykernel 1.0" in ended.stdout
    assert not (author.bench.packs / "03_toy_stale/fix.patch").exists()


SOURCE_PATCH = """diff --git a/src/toykernel/scale.py b/src/toykernel/scale.py
--- a/src/toykernel/scale.py
+++ b/src/toykernel/scale.py
@@ -3,5 +3,5 @@

 def scale(values, weights):
     \"\"\"Multiply each value by its weight.\"\"\"
-    return [value * weights[0] for value in values]
+    return [value for value in values]

"""


@pytest.mark.parametrize(
    ("slug", "arguments", "upstream", "said"),
    [
        ("Toy", [], "toykernel==1.0", "'Toy' is no slug. Next: lower-case letters"),
        ("toy_scale", [], "toykernel==1.0", "01_toy_scale is there already. Next: runner.py check 01_toy_scale"),
        ("x", [], "toykernel", "name one release. Next: --upstream PACKAGE==VERSION"),
        ("x", [], "toykernel==9", "toykernel: no release 9 on the package index. It has 1.0"),
        ("x", ["--module", "nothing"], "toykernel==1.0", "toykernel 1.0 has no module nothing. It has toykernel"),
        ("x", ["--fix-commit", "nothing"], "toykernel==1.0", "--fix-commit 'nothing': neither a file nor a commit"),
        ("x", ["--commit", "v1.0"], "toykernel==1.0", "not 40 lower-case hexadecimal digits"),
        ("x", ["--commit", "0" * 40], "toykernel==1.0", "the tag of 1.0 is "),
        ("x", ["--no-fix", "--fix-commit", "0" * 40], "toykernel==1.0", "there is a fix, or there is none"),
        ("x", ["--from-script", "{folder}/toykernel-1.0.zip"], "toykernel==1.0", "not UTF-8"),
    ],
)
def test_a_wrong_call_writes_nothing(  # noqa: PLR0917 - pytest passes them by name
    author: Author, made: Path, slug: str, arguments: list[str], upstream: str, said: str
) -> None:
    before = sorted(path.name for path in made.parent.iterdir())
    ended = author.new(slug, *(one.format(folder=author.folder) for one in arguments), upstream=upstream)
    assert ended.returncode in (1, 2)
    assert said in ended.stderr
    assert sorted(path.name for path in made.parent.iterdir()) == before


def test_a_module_of_another_release_is_named(author: Author) -> None:
    text = SCRIPT.replace("toykernel.scale", "toykernel.elsewhere")
    ended = author.new("toy_other", "--from-script", author.file("other.py", text))
    assert ended.returncode == 2
    assert (
        "toykernel 1.0 has no module toykernel.elsewhere. Next: --upstream the package that has it (this"
        in ended.stderr
    )


def test_a_package_that_nobody_names_is_not_guessed(author: Author) -> None:
    text = f"import nobodyknows\n{SCRIPT}"
    ended = author.new("toy_guess", "--from-script", author.file("guess.py", text))
    assert (
        "the script imports nobodyknows, which neither the release's requirements nor this Python name" in ended.stdout
    )
    said = "tried: UNSUPPORTED: nothing is shown on toykernel 1.0 (cpu, traced): ModuleNotFoundError: No module named"
    assert said in ended.stdout


def test_where_nobody_has_a_fix_none_is_asked_for(author: Author) -> None:
    ended = author.new("toy_none", "--no-fix", "--kind", "crash", "--from-script", author.file("bug.py", SCRIPT))
    assert (ended.returncode, "fix.patch" in ended.stdout, "mutants" in ended.stdout) == (0, False, False), ended.stdout
    folder = author.pack("toy_none").folder
    assert not [*folder.rglob("*.patch")]
    assert author.pack("toy_none").definition.kind == Kind.CRASH
    ended = author.bench.run("run", "toy_none", "--online", **author.index)
    said = "has the bug on cpu; no patch was judged."
    assert (ended.returncode, said in ended.stdout) == (0, True), ended.stdout
    checked = author.bench.run("check", "toy_none").stdout
    assert "docstring" not in checked
    assert "fix" not in checked


def test_a_script_that_passes_is_said_to(author: Author) -> None:
    given = author.file("passes.py", SCRIPT.replace("found == [1.0, 1.0]", "found"))
    ended = author.new("toy_passes", "--from-script", given)
    assert "tried: the script does not fail on toykernel 1.0 (cpu, traced)\n" in ended.stdout
    assert "tried:" not in author.new("toy_untried", "--from-script", given, "--no-try").stdout
    ended = author.bench.run("run", "toy_passes", "--lane", "pristine", "--online", **author.index)
    assert (ended.returncode, "FIXED_UPSTREAM" in ended.stdout) == (1, False), ended.stdout
    assert "cpu: does not fail on toykernel 1.0; no receipt of this pack records" in ended.stdout


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (
            'sys.exit(f"wrong: {found}")',
            "tried: BUG_REPRODUCED: the script fails on toykernel 1.0 (cpu, traced): SystemExit: wrong: [",
        ),
        ("sys.exit(3)", "(cpu, traced): SystemExit: 3"),
        ("sys.exit(0)", "tried: the script does not fail on toykernel 1.0"),
        ("raise SystemExit", "tried: the script does not fail on toykernel 1.0"),
    ],
)
def test_what_a_script_says_to_sys_exit_is_how_it_failed(author: Author, ending: str, said: str) -> None:
    text = f"import sys\n{SCRIPT.partition('assert')[0]}if found != [1.0, 1.0]:\n    {ending}\n"
    ended = author.new(f"toy_exit_{abs(hash(ending))}", "--from-script", author.file("exits.py", text))
    assert said in ended.stdout


def test_a_release_that_the_script_never_imports_is_refused(author: Author) -> None:
    given = author.file("other_package.py", "import json\nimport toyhelper.part\nassert not toyhelper\n")
    ended = author.new("toy_never", "--from-script", given)
    assert ended.returncode == 2
    assert "the script imports no module of toykernel 1.0: it imports toyhelper. Next: --upstream" in ended.stderr
    nothing = author.new("toy_never", "--from-script", author.file("nothing.py", "import json\nassert False\n"))
    assert "it imports no package at all" in nothing.stderr
    ended = author.new("toy_never", "--from-script", given, "--module", "toykernel", "--no-try")
    assert ended.returncode == 0, ended.stderr


UNREACHABLE = "https://127.0.0.1:9/example/toykernel"


def _fileable(author: Author, slug: str, *arguments: str) -> tuple[Path, str]:
    """Make a pack whose issue lacks nothing but the commit; return its folder and the issue."""
    given = ["--no-fix", "--from-script", author.file("bug.py", SCRIPT)]
    ended = author.new(slug, *given, *arguments)
    assert ended.returncode == 0, ended.stderr
    folder = author.pack(slug).folder
    stated = (folder / "pack.toml").read_text()
    searched = 'searched = { date = 2026-01-01, queries = ["scale"] }\n'
    (folder / "pack.toml").write_text(stated.replace("\n[upstream]", f"{searched}\n[upstream]", 1))
    assert author.rows(slug)[0] == 0
    issue = author.bench.run("report", slug, "--from", "last", "--cache", str(author.bench.cache))
    assert issue.returncode == 0, issue.stderr
    return folder, issue.stdout


def test_an_issue_names_the_release_where_no_commit_is_known(author: Author) -> None:
    folder, issue = _fileable(author, "toy_nowhere", "--repository", UNREACHABLE)
    stated = tomllib.loads((folder / "pack.toml").read_text())["upstream"]
    assert (stated["commit"], stated["commit_unchecked"], "url" in stated) == ("", True, False)
    assert "**Environment.** toykernel 1.0; CPU: Python" in issue
    assert "It ends in `AssertionError: [1.0, 2.0]`." in issue
    assert "On target cpu (traced) the release's own code runs as it is, on real values" not in issue


def test_a_commit_that_nothing_was_compared_with_is_marked_where_it_stands(author: Author) -> None:
    typed = "1" * 40
    folder, _ = _fileable(author, "toy_typed", "--repository", UNREACHABLE, "--commit", typed)
    step = "to be admitted here: pack.toml: upstream.commit: compare it with the release's tag"
    assert step in author.bench.run("check", "toy_typed").stdout
    definition = folder / "pack.toml"
    definition.write_text(re.sub(r"commit_unchecked.*\n", "", definition.read_text()))
    assert step not in author.bench.run("check", "toy_typed").stdout
    known = releases.commit(author.folder, "v1.0")
    assert author.new("toy_compared", "--commit", known, "--module", "toykernel").returncode == 0
    compared = author.pack("toy_compared")
    assert (compared.definition.upstream.commit, compared.definition.upstream.commit_unchecked) == (known, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Upstream: TODO. For a checkout: x", "Upstream: For a checkout: x"),
        ("Upstream: TODO", "Upstream: TODO still stands there"),
        ("Upstream: TODO.\n", "Upstream: TODO still stands there"),
        ("Cause: TODO: the lines.", "Cause: the lines."),
    ],
)
def test_no_missing_line_is_garbled(author: Author, made: Path, text: str, said: str) -> None:
    probe_text = (made / "reproduce.py").read_text()
    (made / "reproduce.py").write_text(probe_text.replace('"""', f'"""{text}\n', 1))
    told = author.bench.run("check", "1").stdout
    (made / "reproduce.py").write_text(probe_text)
    assert f"01_toy_scale: to be admitted here: reproduce.py: {said}\n" in told
