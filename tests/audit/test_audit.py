"""The verb over environments, requirements and lock files: what it says of each version, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.audit import environment, findings, interpreter, lockfiles, records, requirements
from harness.audit.environment import Environment, Named
from harness.core.errors import HarnessError
from harness.core.words import Exit
from testing.workbench import REPOSITORY

FILE_OF = "x_WRONG-NUMERICS-{}.json"


def _record(number: str, package: str, judged: dict[str, str], *, silent: bool = True) -> dict[str, Any]:
    """Build a record as `runner.py advisories` writes them."""
    affected = [version for version, state in judged.items() if state == "affected"]
    period = {"first_affected": affected[0], "last_affected": affected[-1], "since": "since 1.0", "fixed": "fixed in 2"}
    return {
        "id": f"x_WRONG-NUMERICS-{number}",
        "summary": f"bug {number}",
        "affected": [{"package": {"ecosystem": "PyPI", "name": package}, "versions": affected}],
        "database_specific": {
            "pack": f"{number}_a",
            "kind": "wrong-result" if silent else "crash",
            "silent": silent,
            "report": f"packs/{number}_a/README.md",
            "workaround": "do without",
            "periods": [period],
            "judged": {
                version: {
                    "state": state,
                    "evidence": [] if state == "not judged" else ["traced on cpu"],
                    "reason": "ImportError: no such thing" if state == "not judged" else "",
                }
                for version, state in judged.items()
            },
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write records of two packages: a silent bug of toykernel and a crash of toyhelper."""
    made = tmp_path / "advisories"
    made.mkdir()
    toy = {"0.9": "not judged", "1.0": "affected", "1.2": "affected", "2.0": "not affected"}
    (made / FILE_OF.format("01")).write_text(json.dumps(_record("01", "toykernel", toy)), encoding="utf-8")
    crash = _record("02", "toyhelper", {"1.0": "affected"}, silent=False)
    (made / FILE_OF.format("02")).write_text(json.dumps(crash), encoding="utf-8")
    return made


def _audit(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(REPOSITORY / "runner.py"), "audit", "--advisories", str(folder)]
    ended = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, timeout=60, env=os.environ | environ
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended


def _refused(folder: Path, *arguments: str) -> str:
    ended = _audit(folder, *arguments)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stdout + ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Next: " in line
    return line


def _environment(root: Path, packages: dict[str, str], origins: dict[str, str] | None = None) -> Path:
    """Make a virtual environment whose packages end the process of whoever imports them; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    (site,) = (root / "lib").glob("python*/site-packages")
    for name, version in packages.items():
        info = site / f"{name}-{version or 'none'}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" if version else "nonsense"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        (site / f"{name}.py").write_text("import os\nos._exit(77)\n", encoding="utf-8")
        if origins and name in origins:
            (info / "direct_url.json").write_text(origins[name], encoding="utf-8")
    return root / "bin/python"


def _states(packages: Sequence[Named], folder: Path) -> dict[str, str]:
    found = findings.find(Environment("", tuple(packages)), records.load_all(folder))
    return {f"{one.package} {one.version}".rstrip(): f"{one.state}: {one.reason}" for one in found}


def test_an_environment_in_one_line_for_each_bug(folder: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path / "env", {"toykernel": "1.0", "toyhelper": "1.0", "other": "3"})
    ended = _audit(folder, "--python", str(python))
    first, second, words, last = ended.stdout.splitlines()
    assert first == (
        "toykernel 1.0: AFFECTED, in silence (wrong-result): bug 01; since 1.0; fixed in 2; "
        "evidence: traced on cpu; packs/01_a/README.md; workaround: do without"
    )
    assert second.startswith("toyhelper 1.0: AFFECTED (crash): bug 02; ")
    assert words == "(traced: the real Python code ran on a CPU, kernels aside)"
    assert last.endswith(
        "3 package(s), 2 with records (toyhelper, toykernel): 2 affected, 1 of these in silence; "
        "0 not affected; 0 not judged"
    )
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("packages", "status"),
    [
        ({"toykernel": "1.2"}, 1),
        ({"toykernel": "2.0"}, 0),
        ({"toykernel": "1.1"}, 5),
        ({"toykernel": "0.9"}, 5),
        ({"toykernel": "1.1", "toyhelper": "1.0"}, 0),
        ({"other": "1.0"}, 0),
    ],
)
def test_the_exit_status(folder: Path, packages: dict[str, str], status: int) -> None:
    named = tuple(environment.named(name, version) for name, version in packages.items())
    assert findings.status(findings.find(Environment("", named), records.load_all(folder))) == Exit(status)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.0", "affected: "),
        ("1.0.0", "affected: "),
        ("1.1", "not judged: nobody judged this version"),
        ("1.0rc1", "not judged: nobody judged this version"),
        ("1.0.post1", "not judged: nobody judged this version"),
        ("2.0", "not affected: "),
        ("0.9", "not judged: the test cannot judge it: ImportError: no such thing"),
        ("1.0+cu12", "affected: a local build (cu12) of the release that was judged"),
    ],
)
def test_only_what_was_judged_is_claimed(folder: Path, version: str, said: str) -> None:
    assert list(_states([environment.named("ToyKernel", version)], folder).values()) == [said]


def test_no_release_is_no_claim(folder: Path, tmp_path: Path) -> None:
    origins = {
        "toykernel": '{"url": "https://x/y", "vcs_info": {"vcs": "git", "commit_id": "0"}}',
        "toyhelper": '{"url": "file:///x", "dir_info": {"editable": true}}',
    }
    python = _environment(tmp_path / "env", {"toykernel": "1.0", "toyhelper": "1.0", "broken": ""}, origins)
    found = interpreter.installed(python)
    assert _states(found.packages, folder) == {
        "toykernel 1.0": "not judged: installed from a checkout",
        "toyhelper 1.0": "not judged: installed from a folder",
    }
    assert found.unread == ("1 installed package(s) whose metadata cannot be read",)


def test_the_folder_it_runs_in_is_not_imported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = _environment(tmp_path / "env", {"toykernel": "1.0"})
    (tmp_path / "json.py").write_text("raise SystemExit(77)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert _states(interpreter.installed(python).packages, folder) == {"toykernel 1.0": "affected: "}


def test_the_usual_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("active", "here/.venv", "path"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python").write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / name / "bin/python").chmod(0o755)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "active"))
    assert interpreter.usual(tmp_path / "here") == tmp_path / "active/bin/python"
    monkeypatch.delenv("VIRTUAL_ENV")
    assert interpreter.usual(tmp_path / "here") == tmp_path / "here/.venv/bin/python"
    own = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{own}{os.pathsep}{tmp_path / 'path/bin'}")
    assert interpreter.usual(tmp_path) == tmp_path / "path/bin/python"
    monkeypatch.setenv("PATH", str(own))
    with pytest.raises(HarnessError, match=r"no Python here.*Next: --python BIN"):
        interpreter.usual(tmp_path)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo hello", "does not answer as Python does"),
        ("echo '[]'", "does not answer as Python does"),
        ("""echo '{"rows": [7, ["a"]]}'""", "2 installed package(s) whose metadata cannot be read"),
        ("echo no such option >&2; exit 3", "exit status 3: no such option"),
    ],
)
def test_what_is_no_python_is_told(folder: Path, tmp_path: Path, script: str, said: str) -> None:
    binary = tmp_path / "python"
    binary.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    binary.chmod(0o755)
    ended = _audit(folder, "--python", str(binary))
    assert said in ended.stdout + ended.stderr
    assert ended.returncode == (0 if "rows" in script else 2)


def test_no_such_interpreter(folder: Path, tmp_path: Path) -> None:
    assert "it cannot be run" in _refused(folder, "--python", str(tmp_path / "nothing"))


REQUIREMENTS = """\
# toykernel==9.9
--index-url https://example.org/simple
toykernel==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb   # a comment
toyhelper[extra] == 1.0 ; python_version >= "3.8"
-r more/base.txt
-r https://example.org/other.txt
-c constraints.txt
a==1.*
b>=1,<2
c
d @ https://example.org/d-1.0.whl
-e git+https://example.org/e.git#egg=e
-e .
f~=1.0
not a requirement
g===1.0
"""


def test_a_requirements_file_as_pip_reads_it(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "requirements.txt").write_text("\ufeff" + REQUIREMENTS, encoding="utf-8")
    (tmp_path / "more/base.txt").write_text("h==2\n-r ../requirements.txt\n", encoding="utf-8")
    (tmp_path / "constraints.txt").write_text("c==3\nunused==1\n", encoding="utf-8")
    found = requirements.read(tmp_path / "requirements.txt")
    by_name = {one.name: one for one in found.packages}
    versions = {name: one.version for name, one in by_name.items() if one.version}
    assert versions == {"toykernel": "1.0", "toyhelper": "1.0", "c": "3", "g": "1.0", "h": "2"}
    assert (by_name["toykernel"].place, by_name["c"].place) == ("requirements.txt:3", "constraints.txt:1")
    assert by_name["toyhelper"].marker == 'python_version >= "3.8"'
    reasons = {name: one.reason for name, one in by_name.items() if one.reason}
    assert reasons == {
        "a": "not pinned (==1.*)",
        "b": "not pinned (<2,>=1)",
        "d": "from a URL, not a release of the package index",
        "e": "installed from a checkout",
        "f": "not pinned (~=1.0)",
    }
    assert [text.partition(": ")[0] for text in found.unread] == [
        "requirements.txt:8",
        "requirements.txt:15",
        "requirements.txt:17",
    ]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("r.txt", None, "it cannot be read (No such file or directory)"),
        ("r.txt", b"-r nowhere.txt\n", "nowhere.txt: it cannot be read"),
        ("r.txt", b"\xff\xfe\x00", "not UTF-8 text"),
    ],
)
def test_a_requirements_file_that_cannot_be_read(
    folder: Path, tmp_path: Path, name: str, data: bytes | None, said: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    assert said in _refused(folder, "-r", str(tmp_path / name))


LOCKS = {
    "uv.lock": """
version = 1
[[package]]
name = "toykernel"
version = "1.0"
source = { registry = "https://pypi.org/simple" }
[[package]]
name = "toyhelper"
version = "1.0"
source = { git = "https://example.org/x?rev=1#2" }
[[package]]
name = "project"
source = { editable = "." }
""",
    "poetry.lock": """
[[package]]
name = "ToyKernel"
version = "1.0"
[[package]]
name = "toyhelper"
version = "1.0"
[package.source]
type = "git"
url = "https://example.org/x"
""",
    "pylock.gpu.toml": """
lock-version = "1.0"
created-by = "somebody"
[[packages]]
name = "toykernel"
version = "1.0"
[[packages]]
name = "toyhelper"
vcs = { type = "git", url = "https://example.org/x", commit-id = "0" }
""",
    "Pipfile.lock": json.dumps(
        {
            "_meta": {"sources": []},
            "default": {"toykernel": {"version": "==1.0", "hashes": []}},
            "develop": {"toyhelper": {"git": "https://example.org/x", "ref": "0"}},
        }
    ),
}


@pytest.mark.parametrize("name", LOCKS)
def test_lock_files(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LOCKS[name], encoding="utf-8")
    states = _states(lockfiles.read(tmp_path / name).packages, folder)
    assert states.pop("toykernel 1.0") == "affected: "
    assert list(states.values()) == [f"not judged: {lockfiles.CHECKOUT}"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("conda-lock.yml", "", "known by their names are uv.lock, poetry.lock, Pipfile.lock, pylock.toml"),
        ("uv.lock", "version = ", "Invalid value"),
        ("uv.lock", "version = 1", "it has no list of packages"),
        ("poetry.lock", "[[package]]\nversion = '1'", "a package has no name"),
        ("pylock.toml", "packages = []", "no lock-version"),
        ("Pipfile.lock", "{}", "no _meta"),
        ("Pipfile.lock", "{", "not JSON"),
        ("Pipfile.lock", "[" * 10000, "brackets inside each other"),
    ],
)
def test_a_lock_file_that_is_none(folder: Path, tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert said in _refused(folder, "--lock", str(tmp_path / name))


def test_one_environment_a_call(folder: Path) -> None:
    assert "give one of them" in _refused(folder, "-r", "a", "--lock", "uv.lock")


def test_records_that_are_missing_or_broken_say_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("toykernel==1.0\n", encoding="utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no advisories in" in _refused(empty, "-r", str(tmp_path / "r.txt"))
    path = folder / FILE_OF.format("01")
    whole = json.loads(path.read_text(encoding="utf-8"))
    for broken, said in (
        ("{", "not JSON"),
        ("[]", "affected: expected list"),
        (json.dumps(whole | {"summary": 7}), "summary: expected str, got int"),
        (json.dumps(whole | {"database_specific": {}}), "judged: expected dict"),
        (json.dumps(whole).replace('"1.2"', '"newest"'), "Invalid version"),
        (json.dumps(whole).replace('"versions": ["1.0", "1.2"]', '"versions": ["1.0"]'), "affected.versions: not the"),
        (json.dumps(whole).replace('"not affected"', '"perhaps"'), "'perhaps' is not a valid State"),
    ):
        path.write_text(broken, encoding="utf-8")
        assert said in _refused(folder, "-r", str(tmp_path / "r.txt"))


def test_no_file_steers_a_terminal(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("\x1b]0;title\x07 is no package\n", encoding="utf-8")
    ended = _audit(folder, "-r", str(tmp_path / "r.txt"))
    assert "not read: r.txt:1: ?]0;title? is no package" in ended.stdout


def test_json(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("toykernel==1.0\ntoyhelper>=1\nnot a line\n", encoding="utf-8")
    ended = _audit(folder, "-r", str(tmp_path / "r.txt"), "--json")
    found = json.loads(ended.stdout)
    assert (found["exit_status"], ended.returncode, found["packages"]) == (1, 1, 2)
    assert [(one["package"], one["state"]) for one in found["findings"]] == [
        ("toykernel", "affected"),
        ("toyhelper", "not judged"),
    ]
    assert found["unread"] == ["r.txt:3: not a line: not a package's name with its version"]


def test_the_script_imports_click_and_packaging_alone() -> None:
    program = (
        "import sys; from harness.commands import audit; "
        "print(*{name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    ours = {name for name in ended.stdout.split() if not name.startswith("_")}
    assert ours == {"click", "harness", "packaging"}
