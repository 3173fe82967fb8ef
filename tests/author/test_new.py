"""A new pack from a script: what is resolved, what it shows, and the issue that comes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.author import script
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
from helper import VALUES

found = scale(VALUES, [1.0, 0.5])
print("found", found)
assert found == [1.0, 1.0]
'''


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
        """Make a new pack from a script with a file beside it."""
        folder = self.bench.folder / "scripts"
        folder.mkdir(exist_ok=True)
        (folder / "helper.py").write_text("VALUES = [1.0, 2.0]\n")
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
    failed = f"AssertionError (line {17}: assert found == [1.0, 1.0])"
    assert lines[0] == f"BUG_REPRODUCED on toykernel 1.0: {failed}"
    assert lines[-1] == "Next: runner.py run 01_toy_scale, then runner.py report 01_toy_scale --from last"
    folder = author.folder("toy_scale")
    text = (folder / "reproduce.py").read_text()
    header = '# /// script\n# requires-python = ">=3.10"\n# dependencies = ["toykernel==1.0"]\n# ///\n'
    assert text.replace(header, "") == SCRIPT, "nothing else is changed"
    assert text.startswith(f"#!/usr/bin/env python3\n{header}")
    assert (folder / "helper.py").exists()
    stated = tomllib.loads((folder / "pack.toml").read_text())
    assert (stated["ordinary"]["fails"], stated["targets"]["cpu"]["evidence"]) == ("AssertionError", ["traced"])
    pinned = load.load_pack(folder).definition.dependencies["default"]
    assert {"toyhelper"} <= set(pinned), "what the release requires, and nothing of its extras"
    assert "toyextra" not in pinned
    issue = author.issue("toy_scale")
    assert issue.returncode == 0, issue.stderr
    assert (
        f"With toykernel 1.0 the script below ends in `{failed}`. Expected: it ends without an error." in issue.stdout
    )
    assert "pip install toykernel==1.0\npython reproduce.py" in issue.stdout
    assert ", torch " not in _environment(issue.stdout), "the script does not import it"
    assert text in issue.stdout, "the script, verbatim"
    assert f"found [1.0, 2.0]\n{failed}\n```" in issue.stdout
    assert not [word for word in ("TODO", "BUG_REPRODUCED", "{{", str(author.bench.folder)) if word in issue.stdout]
    assert "open: **Cause.** TODO: the lines that do it" in issue.stderr
    assert "open: {{since}}: no release was compared. Next: runner.py versions 01_toy_scale --record" in issue.stderr
    saved = author.run("versions", "toy_scale", "--online", "--record")
    assert "bug in" in saved.stdout or "bug from" in saved.stdout, saved.stdout + saved.stderr
    assert "**Since.** Bug " in author.report("toy_scale").stdout


def _environment(issue: str) -> str:
    """Return the line of an issue that names what it was seen with."""
    start = "**Environment.** toykernel 1.0 (no GPU: "
    (line,) = [line for line in issue.splitlines() if line.startswith(start)]
    return line


WITH = ("--with", "toykernel==1.0")
TESTED = """import os
from toykernel.scale import scale
def test_scale():
    assert scale([1.0, 2.0], [1.0, 0.5]) == [1.0, 1.0], os.environ["MY_SWITCH"]
"""


def test_the_issue_of_a_file_of_tests_says_how_it_is_run(author: Author) -> None:
    ended = author.new("toy_tested", TESTED, "--with", "toykernel==1.0", "--env", "MY_SWITCH=1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    issue = author.issue("toy_tested").stdout
    assert "pip install toykernel==1.0 pytest\nMY_SWITCH=1 python -m pytest reproduce.py\n" in issue
    assert '# dependencies = ["toykernel==1.0", "pytest"]' in issue
    assert "$ MY_SWITCH=1 python -m pytest reproduce.py  # toykernel 1.0, no GPU" in issue
    assert "1 failed" in issue


def test_the_environment_names_torch_where_it_is_imported(author: Author) -> None:
    assert author.new("toy_torch", SCRIPT.replace("from helper", "import torch\nfrom helper")).returncode == 0
    assert ", torch " in _environment(author.issue("toy_torch").stdout)


def test_a_report_says_where_the_script_does_not_fail(author: Author) -> None:
    assert author.new("toy_right", SCRIPT.replace("== [1.0, 1.0]", "")).returncode == 1
    issue = author.issue("toy_right", status=1)
    assert "open: {{ending}}: the script does not fail in what is reported" in issue.stderr
    assert "Expected: " not in issue.stdout


def test_the_issue_of_a_hang_says_within_what_it_should_end(author: Author) -> None:
    hangs = SCRIPT.replace("assert found == [1.0, 1.0]", "while found != [1.0, 1.0]: pass")
    assert author.new("toy_hang", hangs, *WITH, "--timeout", "2").returncode == 0
    issue = author.issue("toy_hang").stdout
    assert "in `timeout: no end after 2 s`. Expected: it ends within 2 s." in issue


def test_how_often_it_fails_is_what_the_run_counted(author: Author) -> None:
    odd = "import os\nassert os.urandom(1)[0] % 2 or found == [1.0, 1.0]\n"
    made = author.new("toy_odd", SCRIPT.replace("assert found == [1.0, 1.0]\n", odd), *WITH, "--repeat", "20")
    assert made.returncode == 0, made.stdout
    text = (author.folder("toy_odd") / "report.in.md").read_text()
    assert "{{ending}} Expected: it ends without an error." in text
    issue = author.issue("toy_odd").stdout
    count = re.search(r"(?m)^(\d+ of 20 runs): AssertionError", issue)
    assert count, issue
    assert f"With toykernel 1.0 {count[1]} of the script below end in `AssertionError (line " in issue


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
    assert "with the patch, no GPU\nfound [1.0, 1.0]\n(it ends without an error)\n```" in issue.stdout
    assert "FIX_VALIDATED" not in issue.stdout
    checked = author.run("check", "toy_fixed")
    assert "fix.patch: what the patch does" in checked.stdout


def test_a_pack_is_made_anew(author: Author) -> None:
    passes = SCRIPT.replace("== [1.0, 1.0]", "")
    first = author.new("toy_again", passes)
    assert (first.returncode, first.stdout.splitlines()[0]) == (1, "the script does not fail on toykernel 1.0")
    assert "is there already. Next: remove it" in author.new("toy_again", SCRIPT).stderr
    folder = author.folder("toy_again")
    shutil.rmtree(folder)
    ended = author.new("toy_again", SCRIPT, "--with", "toykernel==1.0", "--env", "MY_SWITCH=1", "--repeat", "2")
    assert (ended.returncode, author.folder("toy_again")) == (0, folder), ended.stdout + ended.stderr
    assert ended.stdout.startswith("BUG_REPRODUCED on toykernel 1.0: 2 of 2 runs: AssertionError")
    stated = tomllib.loads((folder / "pack.toml").read_text())["ordinary"]
    assert (stated["environment"], stated["repeat"], stated["fails"]) == ({"MY_SWITCH": "1"}, 2, "AssertionError")


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (SCRIPT, ["--with", "toykernel==9"], "toykernel: no release 9 on the package index. It has 1.0"),
        (SCRIPT, ["--with", "toykernel=1"], "--with: "),
        (SCRIPT, ["--with", "toyhelper"], "the script imports no module of toyhelper 1.0: it imports __future__, toyk"),
        (SCRIPT, ["--with", "toylate==1.0"], "toylate 1.0 needs Python >=4, and this is 3."),
        (SCRIPT, ["--with", "toykernel", "--with", "nobodyknows"], "Next: --no-deps, and --with each package"),
        (SCRIPT, ["--with", "toykernel", "--env", "PATH=x"], "--env PATH: no variable that a script may set"),
        (SCRIPT, ["--with", "toykernel", "--env", "X"], "--env X: no variable that a script may set"),
        (SCRIPT, ["--with", "toykernel", "--env", "X", "--env", "Y=1"], "--env X: no variable that a script may set"),
        ("def (", ["--with", "toykernel"], "bug.py: no Python: "),
    ],
)
def test_a_wrong_call_writes_nothing(author: Author, text: str, arguments: list[str], said: str) -> None:
    before = sorted(path.name for path in author.bench.packs.iterdir())
    ended = author.new("x", text, *arguments)
    assert (ended.returncode in {1, 2}, said in ended.stderr) == (True, True), ended.stderr
    assert sorted(path.name for path in author.bench.packs.iterdir()) == before


def test_what_a_script_names_beside_it_is_found(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/__init__.py").write_text("import other\n")
    (tmp_path / "other.py").write_text("import parts\n")
    (tmp_path / "data.json").write_text("{}")
    (tmp_path / "bug.py").write_text("import torch, parts\nopen('data.json')\nopen('../data.json')\n")
    found = script.read(tmp_path / "bug.py")
    assert found.beside == ("data.json", "other.py", "parts/__init__.py")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(HarnessError, match=r"latin.py: no Python: .* Next: run it by itself first"):
        script.read(tmp_path / "latin.py")


def test_another_release_is_tried_with_what_it_requires_itself(tmp_path: Path) -> None:
    bench, shelf = empty(tmp_path), dict[str, dict[str, bytes]]()
    for version in ("1.0", "1.1"):
        text = f"import toyhelper\nif toyhelper.VERSION != {version!r}: raise ImportError\n"
        _wheel(tmp_path, shelf, f"toynew-{version}", text, more=f"Requires-Dist: toyhelper=={version}\n")
        _wheel(tmp_path, shelf, f"toyhelper-{version}", f"VERSION = {version!r}\n")
    with served(Shelf(shelf)) as url:
        author = Author(bench, settings(url))
        made = author.new("toy_new", "import toynew\nassert not toynew\n", "--with", "toynew==1.0")
        assert made.returncode == 0, made.stdout + made.stderr
        ended = author.run("versions", "toy_new", "--online")
        assert (ended.returncode, "bug from 1.0 or earlier, not fixed in 1.1" in ended.stdout) == (0, True), ended


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
    assert "open: what it requires is of today: of the release's day no wheels run on Python" in made.stderr
    assert "exclude-newer" not in (author.folder("toy_new") / "reproduce.py").read_text()
    assert "pip install toynew==1.0 toyhelper==1.0\n" in (author.folder("toy_new") / "report.in.md").read_text()


def test_native_code_that_is_not_built_is_named(tmp_path: Path) -> None:
    bench, shelf = empty(tmp_path), dict[str, dict[str, bytes]]()
    script = "import toysrc\nassert not toysrc\n"
    source = tmp_path / "toysrc-1.0"
    (source / "toysrc").mkdir(parents=True)
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: toysrc\nVersion: 1.0\n")
    (source / "toysrc/__init__.py").write_text("")
    (source / "toysrc/kernel.cu").write_text("")
    archive = tmp_path / "toysrc-1.0.zip"
    toys.zip_folder(source, archive)
    shelf["toysrc"] = {archive.name: archive.read_bytes()}
    with served(Shelf(shelf)) as url:
        author = Author(bench, settings(url))
        made = author.new("toy_src", script, "--with", "toysrc==1.0")
        assert "open: native code is not built, such as toysrc/kernel.cu: the script ran without it" in made.stderr
