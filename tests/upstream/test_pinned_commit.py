"""A pack that pins a commit, which no release holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testing import histories, mirrors, toys
from testing.package_index import Shelf, served, settings
from testing.workbench import Workbench

RELEASE = 'version = "1.0"\nfile = "toykernel-1.0.zip"\n'


def _pinned(workbench: Workbench, behaviour: str = "01_confirmed") -> tuple[Path, str]:
    """Lay a sound pack, pinned to a commit that a mirror has."""
    pack = workbench.lay(behaviour)
    source = workbench.folder / "source"
    commit = mirrors.repository(source, {"README": "no release holds this\n"})
    mirrors.mirror(workbench.folder / "mirrors", source, [commit])
    stated = {RELEASE: "", f'sha256 = "{workbench.sha256}"\n': "date = 2026-08-22\n", "0" * 39 + "1": commit}
    for old, new in stated.items():
        toys.replace(pack / "pack.toml", old, new)
    toys.replace(pack / "reproduce.py", '["toykernel==1.0"]', "[]")
    return pack, commit


def test_every_verb_knows_a_pinned_commit(workbench: Workbench) -> None:
    pack, commit = _pinned(workbench)
    places = ("--mirrors", str(workbench.folder / "mirrors"))
    workbench.gives(0, "CONFIRMED", *places, "--record")
    found = json.loads((pack / "receipts/cpu.traced.json").read_text())
    assert "--mirrors $MIRRORS" in found["command"].replace("'", ""), found["command"]
    assert found["upstream"] | {"sha256": ""} == {
        "package": "toykernel",
        "version": f"commit {commit}",
        "origin": "pinned",
        "sha256": "",
        "commit": commit,
    }
    assert workbench.run("report", "1", "--write").returncode == 0
    checked = workbench.run("check", *places)
    assert "1 sound" in checked.stdout, checked.stdout
    assert f"toykernel commit {commit}" in workbench.run("list").stdout
    assert json.loads(workbench.run("list", "--json").stdout)["packs"][0]["targets"]["cpu"]["state"] == "fresh"
    report = workbench.run("report", "1")
    assert report.returncode == 0, report.stderr
    assert f"commit {commit[:12]} of" in report.stdout
    swept = workbench.run("sweep", "--latest", "--runs", str(workbench.folder / "sweeps"), *places)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert "1 cells: 1 CONFIRMED" in swept.stdout, "its code is in no release"
    filled = workbench.run("fetch", "--cache", str(workbench.folder / "filled"), *places)
    assert filled.returncode == 0, filled.stderr
    assert workbench.rows("--cache", str(workbench.folder / "filled"))[0] == 0


def test_a_host_that_cannot_be_reached_fails_no_run(workbench: Workbench) -> None:
    pack, _ = _pinned(workbench)
    workbench.lay("60_script_and_contract")
    toys.replace(pack / "pack.toml", mirrors.URL, "https://nowhere.invalid/toykernel")
    ended = workbench.run("run", "--target", "cpu", "--online")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 of 1 as expected: 1 CONFIRMED; 1 not judged: 1 UNAVAILABLE." in ended.stdout
    assert "Could not resolve host: nowhere.invalid. Next: --mirrors DIR" in ended.stderr
    assert "warning: 01_confirmed: fix.patch was not tried" in workbench.run("check", "1", "--online").stdout
    assert workbench.run("run", "1", "--target", "cpu", "--online").returncode == 5


def test_a_commit_is_laid_out_once(workbench: Workbench) -> None:
    _pinned(workbench)
    workbench.gives(0, "CONFIRMED", "--mirrors", str(workbench.folder / "mirrors"))
    shutil.rmtree(workbench.cache / "git")
    workbench.gives(0, "CONFIRMED")


def test_a_tag_is_no_commit(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    source = workbench.folder / "source"
    mirrors.repository(source, {})
    histories.git(source, "tag", "-a", "-m", "a tag", "v1")
    tag = histories.git(source, "rev-parse", "v1")
    mirror = mirrors.mirror(workbench.folder / "mirrors", source, [])
    histories.git(mirror, "fetch", "-q", source.as_uri(), "v1:refs/tags/v1")
    row = workbench.gives(
        1, "ERROR", "--upstream", f"git+{mirrors.URL}@{tag}", "--mirrors", str(workbench.folder / "mirrors")
    )
    assert "the name of a tag" in str(row), row


def test_wrong_fixes_are_judged_on_a_commit_that_only_a_mirror_has(workbench: Workbench) -> None:
    _pinned(workbench, "42_refuses_wrong_fixes")
    wanted = ("mutate", "--target", "cpu", "--generated", "0")
    assert workbench.run(*wanted).returncode == 1, "no cache has it yet"
    ended = workbench.run(*wanted, "--mirrors", str(workbench.folder / "mirrors"))
    assert ended.returncode == 0, ended.stderr
    assert "strength: killed 3 of 3" in ended.stdout


def test_releases_are_judged_beside_a_pinned_commit(workbench: Workbench) -> None:
    _pinned(workbench)
    archive = next((workbench.cache / "downloads").glob("*/*.zip"))
    with served(Shelf({"toykernel": {archive.name: archive.read_bytes()}})) as url:
        ended = workbench.run("versions", "1", "--online", "--json", **settings(url))
        assert ended.returncode == 0, ended.stderr
        assert [row["verdict"] for row in json.loads(ended.stdout)["rows"]] == ["BUG_REPRODUCED"]
        workbench.gives(0, "CONFIRMED", "--online", "--upstream", "toykernel==1.0", **settings(url))


def test_another_commit_makes_its_receipts_stale(workbench: Workbench) -> None:
    pack, commit = _pinned(workbench)
    assert workbench.rows("--mirrors", str(workbench.folder / "mirrors"), "--record")[0] == 0
    toys.replace(pack / "pack.toml", commit, "1" * 40)
    assert "the pinned release changed" in workbench.run("list").stdout


def test_a_pinned_commit_that_cannot_be_had_is_an_error(workbench: Workbench) -> None:
    _pinned(workbench)
    workbench.gives(1, "ERROR")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("date = 2026-08-22\n", "", "a commit has commit, date and an https:// repository"),
        ("date = 2026-08-22\n", 'version = "1.0"\n', "a release has version, file and sha256"),
        ('repository = "https', 'repository = "ext::https', "is not an http(s) URL"),
        (
            'modules = ["toykernel"]',
            'modules = ["toykernel"]\nfile = "a.zip"',
            "a release has version, file and sha256",
        ),
    ],
)
def test_half_a_release_is_refused(workbench: Workbench, old: str, new: str, reason: str) -> None:
    pack, _ = _pinned(workbench)
    toys.replace(pack / "pack.toml", old, new)
    assert reason in toys.refusal(pack)
