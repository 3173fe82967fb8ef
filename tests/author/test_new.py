"""A new pack from a script: what is resolved, what it shows, and the issue that comes of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.author import release
from harness.core.errors import HarnessError
from harness.pack import load
from testing import histories, releases, toys
from testing.package_index import Shelf, served, settings
from testing.workbench import Workbench, empty

SCRIPT = '''#!/usr/bin/env python3
"""scale uses the first weight for every value.

More of it.
"""
from __future__ import annotations

from toykernel.scale import scale

found = scale([1.0, 2.0], [1.0, 0.5])
print("found", found)
assert found == [1.0, 1.0], found
'''
HEADER = '# /// script\n# requires-python = ">=3.10"\n# dependencies = ["toykernel==1.0"]\n# ///\n'


@dataclass(frozen=True)
class Author:
    """Somebody with a script, a folder of packs, and an index that has the release."""

    bench: Workbench
    variables: dict[str, str]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a verb, with the index to reach."""
        ended = self.bench.run(*arguments, **self.variables)
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended

    def new(self, slug: str, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Make a new pack from a script."""
        folder = self.bench.folder / "scripts"
        folder.mkdir(exist_ok=True)
        (folder / "bug.py").write_text(text)
        given = arguments or ("--with", "toykernel==1.0")
        return self.run("new", slug, "--from-script", str(folder / "bug.py"), "--cache", str(self.bench.cache), *given)

    def issue(self, slug: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a pack, which ends so, and report it from that run."""
        ran = self.run("run", slug, "--online")
        assert ran.returncode == status, ran.stdout + ran.stderr
        return self.report(slug)

    def report(self, slug: str) -> subprocess.CompletedProcess[str]:
        """Report a pack from its last run."""
        return self.run("report", slug, "--from", "last", "--cache", str(self.bench.cache))

    def folder(self, slug: str) -> Path:
        """Return a pack's folder by its slug."""
        (folder,) = load.select_packs(self.bench.packs, (slug,))
        return folder


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Author]:
    """Serve the toy release as an sdist, the wheels that it requires, and one that needs a later Python."""
    bench = empty(tmp_path_factory.mktemp("author"))
    folder = bench.folder
    sdist = releases.sdist(folder)
    git = releases.repository(folder)
    numpy = toys.wheel(folder, "numpy-2.3.0-py3-none-any.whl", {})[0]
    shelf = {"toykernel": {sdist.name: sdist.read_bytes()}, "numpy": {numpy.name: numpy.read_bytes()}}
    _wheel(folder, shelf, "toyhelper-1.0")
    _wheel(folder, shelf, "toylate-1.0", more="Requires-Python: >=4\n")
    with served(Shelf(shelf)) as url:
        yield Author(bench, settings(url) | git)


def _wheel(
    folder: Path, shelf: dict[str, dict[str, bytes]], release: str, text: str = "", *, more: str = "", file: str = ""
) -> None:
    """Put a wheel on a shelf: one module, more lines of its metadata, and an empty file besides where it is named."""
    name, _, version = release.partition("-")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}"
    members = {f"{name}/__init__.py": text, f"{release}.dist-info/METADATA": metadata} | ({file: ""} if file else {})
    wheel = toys.wheel(folder, f"{release}-py3-none-any.whl", members)[0]
    shelf.setdefault(name, {})[wheel.name] = wheel.read_bytes()


def test_from_a_script_to_an_issue(author: Author) -> None:
    ended = author.new("toy_scale", SCRIPT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    failed = "AssertionError in line 30: [1.0, 2.0]"
    assert lines[0] == f"BUG_REPRODUCED on toykernel 1.0: {failed}"
    assert lines[-1] == "Next: runner.py run 01_toy_scale, then runner.py report 01_toy_scale --from last"
    folder = author.folder("toy_scale")
    text = (folder / "reproduce.py").read_text()
    start, end = SCRIPT.split("annotations\n")
    assert text.startswith(f"#!/usr/bin/env python3\n{HEADER}")
    assert text.replace(HEADER, "").startswith(f"{start}annotations\n"), "what has to stay in front"
    assert text.endswith(f'{end}print("FIX_VALIDATED")\n'), "the author's lines are as they were"
    stated = tomllib.loads((folder / "pack.toml").read_text())
    assert (stated["kind"], stated["targets"]["cpu"]["evidence"]) == ("wrong-result", ["traced"])
    pinned = load.load_pack(folder).definition.dependencies["default"]
    assert {"toyhelper"} <= set(pinned), "what the release requires, and nothing of its extras"
    assert "toyextra" not in pinned
    issue = author.issue("toy_scale")
    assert issue.returncode == 0, issue.stderr
    assert "TODO: one sentence with the wrong and the right number" in issue.stdout
    assert "pip install toykernel==1.0\npython reproduce.py" in issue.stdout
    assert ", torch " not in _environment(issue.stdout), "the script does not import it"
    assert text in issue.stdout, "the script, verbatim"
    assert f"found [1.0, 2.0]\n{failed}\n```" in issue.stdout
    assert not [word for word in ("{{", str(author.bench.folder)) if word in issue.stdout]
    checked = author.run("check", "toy_scale")
    assert "to file an issue: report.in.md: one sentence with the wrong and the right number" in checked.stdout
    saved = author.run("versions", "toy_scale", "--online", "--record")
    assert "bug in" in saved.stdout or "bug from" in saved.stdout, saved.stdout + saved.stderr


def _environment(issue: str) -> str:
    """Return the line of an issue that names what it was seen with."""
    start = "**Environment.** toykernel 1.0 (no GPU: "
    (line,) = [line for line in issue.splitlines() if line.startswith(start)]
    return line


WITH = ("--with", "toykernel==1.0")


def test_the_environment_names_torch_where_it_is_imported(author: Author) -> None:
    assert author.new("toy_torch", SCRIPT.replace("from toykernel", "import torch\nfrom toykernel")).returncode == 0
    assert ", torch " in _environment(author.issue("toy_torch").stdout)
    assert '"toykernel==1.0", "torch==' in (author.folder("toy_torch") / "reproduce.py").read_text()


def test_another_exception_is_the_bug_only_where_it_is_named(author: Author) -> None:
    raises = SCRIPT.replace("assert found == [1.0, 1.0], found", "raise KeyError('scale\\nof two lines')")
    left_open = author.new("toy_raises", raises)
    assert left_open.returncode == 1
    said = "KeyError in line 30: 'scale\\nof two lines'"
    assert left_open.stdout.startswith(f"UNSUPPORTED on toykernel 1.0: {said}"), left_open.stdout
    assert "name the bug with --fails; remove 0" in left_open.stdout
    shutil.rmtree(author.folder("toy_raises"))
    named = author.new("toy_raises", raises, *WITH, "--fails", "KeyError")
    assert (named.returncode, named.stdout.splitlines()[0]) == (0, f"BUG_REPRODUCED on toykernel 1.0: {said}")
    assert 'kind = "crash"' in (author.folder("toy_raises") / "pack.toml").read_text()


def test_a_script_that_prints_its_own_sentinel_keeps_its_text(author: Author) -> None:
    own = SCRIPT.replace("assert found == [1.0, 1.0], found", 'print("BUG_REPRODUCED")\nraise SystemExit(10)')
    assert author.new("toy_own", own).returncode == 0
    text = (author.folder("toy_own") / "reproduce.py").read_text()
    assert text.replace(HEADER, "") == own
    again = author.new("toy_own_header", text)
    assert again.returncode == 0
    assert (author.folder("toy_own_header") / "reproduce.py").read_text() == text, "its header, too"


def test_a_fix_is_judged_and_its_diff_stands_in_the_issue(author: Author) -> None:
    assert author.new("toy_fixed", SCRIPT).returncode == 0
    folder = author.folder("toy_fixed")
    wanted = ("diff", "--full-index", "v1.0", "main", "--", "src")
    diff = histories.git(author.bench.folder / "repository", *wanted)
    head = "Subject: TODO: what the patch does\n\nSPDX-License-Identifier: Apache-2.0\n---\n"
    (folder / "fix.patch").write_text(f"{head}{diff}\n")
    toys.replace(folder / "pack.toml", 'fix = "none"\n', "")
    with (folder / "report.in.md").open("a") as report:
        report.write("\n{{diff}}\n")
    issue = author.issue("toy_fixed")
    assert "with the patch, no GPU\nfound [1.0, 1.0]\nFIX_VALIDATED\n```" in issue.stdout
    checked = author.run("check", "toy_fixed")
    assert "fix.patch: what the patch does" in checked.stdout


def test_a_script_that_does_not_fail_is_no_pack_yet(author: Author) -> None:
    passes = SCRIPT.replace("== [1.0, 1.0]", "")
    first = author.new("toy_again", passes)
    assert (first.returncode, first.stdout.splitlines()[0]) == (1, "the script does not fail on toykernel 1.0")
    assert "is there already. Next: remove it" in author.new("toy_again", SCRIPT).stderr


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (SCRIPT, ["--with", "toykernel==9"], "toykernel: no release 9 on the package index. It has 1.0"),
        (SCRIPT, ["--with", "toykernel=1"], "--with: "),
        (SCRIPT, ["--with", "toyhelper"], "the script imports no module of toyhelper 1.0: it imports __future__, toyk"),
        (SCRIPT, ["--with", "toylate==1.0"], "toylate 1.0 needs Python >=4, and this is 3."),
        (SCRIPT, ["--with", "toykernel", "--with", "nobodyknows"], "Next: --no-deps, and --with each package"),
        ("def (", ["--with", "toykernel"], "bug.py: no Python: "),
        ("def test_scale(): pass\n", ["--with", "toykernel"], "bug.py: nothing calls test_scale. Next: call it"),
        ("import bug\n", ["--with", "toykernel"], "bug.py imports bug.py beside it. Next: one file"),
    ],
)
def test_a_wrong_call_writes_nothing(author: Author, text: str, arguments: list[str], said: str) -> None:
    before = sorted(path.name for path in author.bench.packs.iterdir())
    ended = author.new("x", text, *arguments)
    assert (ended.returncode in {1, 2}, said in ended.stderr) == (True, True), ended.stderr
    assert sorted(path.name for path in author.bench.packs.iterdir()) == before


def test_a_script_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(HarnessError, match=r"latin.py: no Python: .* Next: run it by itself first"):
        release.read_script(tmp_path / "latin.py")


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("x = 1\n", 0),
        ("#!/usr/bin/env python3\n# coding: utf-8\nx = 1\n", 2),
        (f"{HEADER}x = 1\n", 4),
        (f'{HEADER}"""Says\n\nso."""\nx = 1\n', 7),
        ('"""Says so."""\nfrom __future__ import annotations\nx = 1\n', 2),
    ],
)
def test_the_sentinel_stands_behind_what_has_to_be_in_front(tmp_path: Path, text: str, head: int) -> None:
    (tmp_path / "bug.py").write_text(text)
    read = release.read_script(tmp_path / "bug.py")
    assert read.body == head
    ended = subprocess.run(
        [sys.executable, "-c", read.as_reproducer(">=3.10", (), "AssertionError")], capture_output=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, b"FIX_VALIDATED\n"), ended


def test_what_no_wheel_of_that_day_meets_is_taken_as_of_today(tmp_path: Path) -> None:
    bench, shelf = empty(tmp_path), dict[str, dict[str, bytes]]()
    _wheel(tmp_path, shelf, "toynew-1.0", "import toyhelper\n", more="Requires-Dist: toyhelper\n")
    _wheel(tmp_path, shelf, "toyhelper-1.0")
    uploaded = {"toynew-1.0-py3-none-any.whl": "2020-01-01T00:00:00Z"}
    uploaded["toyhelper-1.0-py3-none-any.whl"] = "2022-01-01T00:00:00Z"
    with served(Shelf(shelf, uploaded=uploaded)) as url:
        author = Author(bench, settings(url))
        given = ("--with", "toynew==1.0", "--with", "toyhelper<2")
        made = author.new("toy_new", "import toynew\nassert not toynew\n", *given)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "pip install toynew==1.0 toyhelper==1.0\n" in (author.folder("toy_new") / "report.in.md").read_text()
