"""The verb over environments and requirements files: what it adds to pip-audit, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.audit import records
from harness.core.errors import HarnessError
from testing.workbench import REPOSITORY

STATES = {"0.9": "not judged", "1.0": "affected", "1.2": "affected", "2.0": "not affected"}
PINNED = ("--no-deps", "--disable-pip")


def _record(number: str, package: str, judged: dict[str, str]) -> dict[str, Any]:
    """Build a record as `runner.py advisories` writes them."""
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
    ("pins", "status", "said"),
    [
        ("toykernel==1.0\n", 1, "toykernel 1.0: affected by x_WRONG-NUMERICS-01, without an error or a warning, shown"),
        ("toykernel==1.2\nother==3\n", 1, "toykernel 1.2: not affected by x_WRONG-NUMERICS-02"),
        ("Toykernel==1.0+fork\n", 1, "toykernel 1.0+fork: affected by x_WRONG-NUMERICS-01"),
        ("toykernel==2.0\n", 0, "toykernel 2.0: not judged for x_WRONG-NUMERICS-02"),
        ("toykernel==0.9\n", 5, "toykernel 0.9: not judged for x_WRONG-NUMERICS-01, x_WRONG-NUMERICS-02"),
        ("toykernel==1.1\n", 5, "toykernel 1.1: not judged"),
        ("other==3\n", 0, "no package that a record names"),
    ],
)
def test_pins(folder: Path, tmp_path: Path, pins: str, status: int, said: str) -> None:
    ended = _audit(folder, *_pins(tmp_path, pins))
    assert said in ended.stderr
    assert ended.returncode == status, ended.stderr


def test_the_workaround_the_report_and_pip_audits_own_table(folder: Path, tmp_path: Path) -> None:
    ended = _audit(folder, *_pins(tmp_path, "toykernel==1.0\n"))
    assert "Workaround: do without. Report: packs/01_a/README.md" in ended.stderr
    assert "x_WRONG-NUMERICS-01 2.0" in ended.stdout


def test_every_file_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "first.txt").write_text("toykernel==1.0\n", encoding="utf-8")
    first = ("-r", str(tmp_path / "first.txt"))
    assert _audit(folder, *first, *_pins(tmp_path, "other==3\n")).returncode == 1


def test_a_file_that_another_names_is_refused_where_pip_audit_would_skip_it(folder: Path, tmp_path: Path) -> None:
    ended = _audit(folder, *_pins(tmp_path, "-r nested.txt\n"))
    assert ended.returncode == 2
    assert "r.txt names another file" in ended.stderr


def test_json_of_pip_audit_stays_json(folder: Path, tmp_path: Path) -> None:
    ended = _audit(folder, *_pins(tmp_path, "toykernel==1.0\n"), "-f", "json")
    (package,) = json.loads(ended.stdout)["dependencies"]
    assert [one["id"] for one in package["vulns"]] == ["x_WRONG-NUMERICS-01", "x_WRONG-NUMERICS-02"]


def test_a_folder_of_packages_of_which_none_is_imported(folder: Path, tmp_path: Path) -> None:
    ended = _audit(folder, "--path", str(_site(tmp_path / "site", {"toykernel": "1.0", "other": "3"})))
    assert ended.returncode == 1, ended.stderr


def test_another_interpreter(folder: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    _site(site, {"toykernel": "1.0"})
    ended = _audit(folder, "--python", str(tmp_path / "env/bin/python"))
    assert ended.returncode == 1, ended.stderr


@pytest.mark.parametrize("text", ["toykernel>=1\n", "name: a\ndependencies:\n- toykernel==1.0\n", "FROM python\n"])
def test_what_pip_audit_cannot_read_is_no_pass(folder: Path, tmp_path: Path, text: str) -> None:
    ended = _audit(folder, *_pins(tmp_path, text))
    assert ended.returncode == 2, ended.stderr


@pytest.mark.parametrize("name", ["uv.lock", "poetry.lock", "Pipfile.lock", "environment.yml"])
def test_a_lock_file_is_refused_with_the_command_that_exports_it(folder: Path, tmp_path: Path, name: str) -> None:
    for arguments in (("-r", str(tmp_path / name)), (f"--requirement={tmp_path / name}",)):
        ended = _audit(folder, *arguments)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert f"pip-audit does not read {name}. Next: " in ended.stderr


def test_a_record_that_contradicts_itself_is_refused(folder: Path, tmp_path: Path) -> None:
    record = _record("03", "toykernel", STATES)
    record["affected"][0]["versions"] = ["1.0"]
    (folder / "x_WRONG-NUMERICS-03.json").write_text(json.dumps(record), encoding="utf-8")
    ended = _audit(folder, *_pins(tmp_path, "toykernel==2.0\n"))
    assert ended.returncode == 2
    assert "affected.versions are not the versions that database_specific.judged calls affected" in ended.stderr


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 1}', '{"affected": [], "database_specific": {}}'])
def test_a_record_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x_WRONG-NUMERICS-01.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(HarnessError, match="Next: "):
        records.load_all(tmp_path)


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    assert _audit(tmp_path).returncode == 2
