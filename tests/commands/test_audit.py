"""The verb over environments and requirements files: what it adds to pip-audit, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.commands import audit, cli
from harness.core.errors import HarnessError
from harness.core.words import Exit
from testing.workbench import REPOSITORY

STATES = {"0.9": "not judged", "1.0": "affected", "1.2": "affected", "2.0": "not affected"}
PINNED = ("--no-deps", "--disable-pip")


def _record(number: str, package: str, judged: dict[str, str]) -> dict[str, Any]:
    """Build a record as `check --write` writes them."""
    return {
        "schema_version": "1.7.0",
        "id": f"x_WRONG-NUMERICS-{number}",
        "summary": f"bug {number}",
        "affected": [
            {
                "package": {"ecosystem": "PyPI", "name": package},
                "versions": [version for version, state in judged.items() if state == "affected"],
                "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "1.0"}, {"fixed": "2.0"}]}],
            }
        ],
        "database_specific": {
            "silent": True,
            "report": f"packs/{number}_a/README.md",
            "workaround": "do without",
            "judged": {
                version: {"state": state, "evidence": [] if state == "not judged" else ["traced on cpu"]}
                for version, state in judged.items()
            },
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two records of toykernel."""
    made = tmp_path / "advisories"
    made.mkdir()
    for number, judged in (("01", STATES), ("02", {"1.0": "affected", "1.2": "not affected"})):
        text = json.dumps(_record(number, "toykernel", judged))
        (made / f"x_WRONG-NUMERICS-{number}.json").write_text(text, encoding="utf-8")
    return made


def _audit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(REPOSITORY / "runner.py"), "audit", "--advisories", str(folder)]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended


def _pins(tmp_path: Path, text: str) -> tuple[str, ...]:
    (tmp_path / "r.txt").write_text(text, encoding="utf-8")
    return "-r", str(tmp_path / "r.txt"), *PINNED


def _site(root: Path, packages: dict[str, str]) -> Path:
    """Make a folder of installed packages; importing one would end the process."""
    for name, version in packages.items():
        info = root / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        (root / f"{name}.py").write_text("import os\nos._exit(77)\n", encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("toykernel==1.0\n", 1, "toykernel 1.0: affected: x_WRONG-NUMERICS-01"),
        ("toykernel==1.2\nother==3\n", 1, "toykernel 1.2: not affected: x_WRONG-NUMERICS-02"),
        ("Toykernel==1.0+fork\n", 1, "toykernel 1.0+fork (counted as 1.0): affected: x_WRONG-NUMERICS-01"),
        ("toykernel==2.0\n", 0, "toykernel 2.0: not affected: x_WRONG-NUMERICS-01"),
        ("toykernel==2.0\n", 0, "toykernel 2.0: not judged: x_WRONG-NUMERICS-02"),
        ("toykernel==0.9\n", 5, "toykernel 0.9: not judged: x_WRONG-NUMERICS-01"),
        ("toykernel==1.1\n", 5, "toykernel 1.1: not judged"),
        ("other==3\n# toykernel==1.0\nother-too==1 # for toykernel\n", 0, "No known vulnerabilities"),
        # What pip-audit skips: it says nothing of these, or that they have no version.
        ("- toykernel==1.0\nother==3\n", 5, "not judged, since pip-audit skips it: - toykernel==1.0"),
        ("git+https://host.invalid/a.git#egg=toykernel\ntoykernel @ git+https://host.invalid/b\n", 5, "skips it"),
        ("toykernel-cu12==1.0\n", 5, "skips it: toykernel-cu12==1.0"),
        # What it cannot read.
        ("toykernel>=1\n", 2, "is not pinned to an exact version"),
        ("-r nested.txt\n", 2, "--disable-pip skips the files that r.txt names. Next: one -r for each of them"),
        ("  --constraint=c.txt\ntoykernel==2.0\n", 2, "skips the files that r.txt names"),
        ("", 2, "pip-audit read no package"),
    ],
)
def test_a_requirements_file(folder: Path, tmp_path: Path, text: str, status: int, said: str) -> None:
    ended = _audit(folder, *_pins(tmp_path, text))
    assert said in ended.stderr
    assert ended.returncode == status, ended.stderr


def test_what_only_the_record_has_stands_beside_pip_audits_table(folder: Path, tmp_path: Path) -> None:
    ended = _audit(folder, *_pins(tmp_path, "toykernel==1.0\n"))
    assert "no error or warning tells; shown: traced on cpu; report: packs/01_a/README.md" in ended.stderr
    assert "workaround: do without" in ended.stderr
    assert "x_WRONG-NUMERICS-01 2.0" in ended.stdout


def test_every_file_is_read_and_json_stays_json(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "first.txt").write_text("toykernel==1.0\n", encoding="utf-8")
    ended = _audit(folder, f"-r{tmp_path / 'first.txt'}", *_pins(tmp_path, "other==3\n"), "-fjson")
    assert ended.returncode == 1
    packages = {one["name"]: [bug["id"] for bug in one["vulns"]] for one in json.loads(ended.stdout)["dependencies"]}
    assert packages == {"toykernel": ["x_WRONG-NUMERICS-01", "x_WRONG-NUMERICS-02"], "other": []}


def test_the_service_is_ours_whatever_the_call_and_the_environment_say(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there: whoever asks elsewhere fails
    ended = _audit(folder, "-s", "pypi", "--osv-url=http://host.invalid", *_pins(tmp_path, "toykernel==1.0\n"))
    assert ended.returncode == 1, ended.stderr


def test_a_pylock_and_what_it_has_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    lock = 'lock-version = "1.0"\ncreated-by = "a"\n[[packages]]\nname = "other"\nversion = "3"\n[[packages]]\n'
    path = tmp_path / "pylock.toml"
    path.write_text(lock + 'name = "toykernel"\nversion = "1.0"\n', encoding="utf-8")
    assert _audit(folder, "--locked", str(tmp_path)).returncode == 1
    git = 'name = "toykernel"\nvcs = { type = "git", url = "https://host.invalid/a", commit-id = "1" }\n'
    path.write_text(lock + git, encoding="utf-8")
    ended = _audit(folder, "--locked", str(tmp_path))
    assert (ended.returncode, 'skips it: name = "toykernel"' in ended.stderr) == (5, True), ended.stderr


@pytest.mark.hostile("environments that are audited")
def test_an_environment_without_pip_of_which_nothing_is_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    assert _audit(folder, "--path", str(site)).returncode == 2, "no package at all"
    _site(site, {"toykernel": "1.0", "other": "3"})
    executed = "import pathlib; pathlib.Path({!r}).touch()\n"
    (site / "hostile.pth").write_text(executed.format(str(tmp_path / "pth")))
    (site / "sitecustomize.py").write_text(executed.format(str(tmp_path / "sitecustomize")))
    assert _audit(folder, "--path", str(site)).returncode == 1
    assert _audit(folder, "--python", str(tmp_path / "env/bin/python")).returncode == 1
    shim = tmp_path / "shim"
    shim.write_text(f'#!/bin/sh\nexec {tmp_path}/env/bin/python "$@"\n')
    shim.chmod(0o755)
    assert _audit(folder, "--python", str(shim)).returncode == 1, "a shim, as pyenv's"
    _site(tmp_path / "elsewhere", {"toykernel": "1.0"})
    shutil.rmtree(site / "toykernel-1.0.dist-info")
    (site / "named.pth").write_text(f"{tmp_path}/elsewhere\n")
    assert _audit(folder, "--python", str(shim)).returncode == 1, "a folder that a .pth names"
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "env"))
    ended = _audit(folder)
    assert (ended.returncode, f"environment: {tmp_path}/env/bin/python" in ended.stderr) == (1, True)
    assert not [name for name in ("pth", "sitecustomize") if (tmp_path / name).exists()]


@pytest.mark.parametrize("name", ["uv.lock", "uv.cpu.lock", "poetry.lock", "Pipfile.lock", "pyproject.toml", "env.yml"])
def test_what_pip_audit_does_not_read_is_refused_with_the_command_that_exports_it(folder: Path, name: str) -> None:
    for arguments in (("-r", f"some/{name}"), (f"-rsome/{name}",), (f"--requirement=some/{name}",)):
        with pytest.raises(HarnessError, match=rf"pip-audit does not read {re.escape(name)}. Next: ") as error:
            cli.main(["audit", "--advisories", str(folder), *arguments], standalone_mode=False)
        assert error.value.status == Exit.WRONG_CALL


def test_a_project_whose_extras_pip_audit_skips(folder: Path, tmp_path: Path) -> None:
    text = '[project]\nname = "a"\nversion = "1"\noptional-dependencies.gpu = ["toykernel==1.0"]\n'
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    ended = _audit(folder, str(tmp_path))
    assert (ended.returncode, "skips it: optional-dependencies.gpu" in ended.stderr) == (5, True), ended.stderr


def test_an_environment_is_not_changed(folder: Path) -> None:
    assert "audit changes no environment" in _audit(folder, "--fix").stderr


@pytest.mark.parametrize(("pin", "status"), [("tilelang==0.1.15", 1), ("tilelang==9", 5), ("numpy==1.0", 0)])
def test_the_real_records(tmp_path: Path, pin: str, status: int) -> None:
    assert _audit(audit.FOLDER, *_pins(tmp_path, f"{pin}\n")).returncode == status


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 1}', '{"affected": [], "database_specific": {"judged": {}}}'])
def test_a_record_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x_WRONG-NUMERICS-01.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(HarnessError, match="Next: "):
        audit.load(path)


def test_a_record_that_contradicts_itself_is_refused(folder: Path, tmp_path: Path) -> None:
    record = _record("03", "toykernel", {"1.0": "affected", "1.2": "affected"})
    record["affected"][0]["versions"] = ["1.0"]
    (folder / "x_WRONG-NUMERICS-03.json").write_text(json.dumps(record), encoding="utf-8")
    ended = _audit(folder, *_pins(tmp_path, "toykernel==2.0\n"))
    assert "not the versions that database_specific.judged calls affected" in ended.stderr
    assert ended.returncode == 2


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    assert "no advisories in" in _audit(tmp_path).stderr
