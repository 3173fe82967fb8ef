"""Mirrors: a commit from one is the same commit; what is not there comes from the upstream, or is not to be had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.upstream import checkout as ours
from testing import histories, mirrors
from testing.workbench import Workbench


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make the upstream's repository, of two commits."""
    folder = tmp_path / "source"
    mirrors.repository(folder, {})
    mirrors.commit(folder, {"src/toykernel/scale.py": histories.RIGHT})
    return folder


def _commits(source: Path) -> tuple[str, str]:
    """Return the wrong commit, and the right one after it."""
    return histories.git(source, "rev-parse", "HEAD~"), histories.git(source, "rev-parse", "HEAD")


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_commit_comes_from_a_mirror(workbench: Workbench, source: Path, how: str) -> None:
    workbench.lay("01_confirmed")
    wrong, right = _commits(source)
    folder = workbench.folder / "mirrors"
    mirrors.mirror(folder, source, [wrong, right])
    option = ("--mirrors", str(folder)) if how == "option" else ()
    variables = {"REPRODUCER_PACKS_MIRRORS": str(folder)} if how == "variable" else {}
    for commit, verdict in ((wrong, "CONFIRMED"), (right, "FIXED_UPSTREAM")):
        row = workbench.gives(0, verdict, "--upstream", f"git+{mirrors.URL}@{commit}", *option, **variables)
        assert json.loads(Path(row["receipt"]).read_text())["upstream"]["commit"] == commit


def test_without_the_setting_a_commit_comes_from_the_upstream_alone(workbench: Workbench, source: Path) -> None:
    workbench.lay("01_confirmed")
    wrong, _ = _commits(source)
    mirrors.mirror(workbench.folder / "mirrors", source, [wrong])
    workbench.gives(1, "ERROR", "--upstream", f"git+{mirrors.URL}@{wrong}")


@pytest.mark.parametrize("is_head", [True, False])
def test_a_head_that_no_mirror_has_is_unavailable_and_any_other_commit_an_error(
    workbench: Workbench, source: Path, *, is_head: bool
) -> None:
    pack = workbench.lay("01_confirmed")
    wrong, right = _commits(source)
    mirrors.mirror(workbench.folder / "mirrors", source, [right])
    with (pack / "pack.toml").open("a") as stream:
        stream.write(f'[head]\ncommit = "{wrong}"\ndate = 2026-08-22\nverdict = "CONFIRMED"\n')
    origin = "head" if is_head else f"git+{mirrors.URL}@{'1' * 40}"
    status, verdict = (5, "UNAVAILABLE") if is_head else (1, "ERROR")
    workbench.gives(status, verdict, "--upstream", origin, "--mirrors", str(workbench.folder / "mirrors"))


@pytest.mark.hostile("archives, indexes and repositories")
def test_a_name_that_lies_gives_no_other_commit(workbench: Workbench, source: Path) -> None:
    workbench.lay("01_confirmed")
    wrong, right = _commits(source)
    folder = mirrors.mirror(workbench.folder / "mirrors", source, [right])
    histories.git(folder, "branch", "-m", f"at-{right[:10]}", f"at-{wrong[:10]}")
    arguments = ("--upstream", f"git+{mirrors.URL}@{wrong}", "--mirrors", str(folder.parent))
    workbench.gives(1, "ERROR", *arguments, reason=f"git commit {wrong}: not in the cache")


def test_a_mirror_that_cannot_be_read_is_refused(workbench: Workbench, source: Path) -> None:
    workbench.lay("01_confirmed")
    wrong, _ = _commits(source)
    folder = mirrors.mirror(workbench.folder / "mirrors", source, [wrong])
    shutil.rmtree(folder / "objects")
    arguments = ("--upstream", f"git+{mirrors.URL}@{wrong}", "--mirrors", str(folder.parent))
    workbench.gives(1, "ERROR", *arguments, reason="the mirror toykernel.git is refused")


@pytest.mark.hostile("archives, indexes and repositories")
@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/..",
        "https://example.org/../toykernel",
        "https://example.org/a/-toykernel",
        "https://example.org/",
        "file:///toykernel",
        "ext::sh -c toykernel",
        "git@example.org:a/toykernel",
    ],
)
def test_a_name_never_leads_anywhere_else(tmp_path: Path, url: str) -> None:
    for name in ("toykernel.git", "...git", "-toykernel.git", ".git"):
        (tmp_path / "mirrors" / name).mkdir(parents=True, exist_ok=True)
    found = ours.find_mirror(tmp_path / "mirrors", url)
    assert found is None or found == tmp_path / "mirrors/toykernel.git"
    assert ours.find_mirror(tmp_path / "mirrors", url.replace("toykernel", "..")) is None


@pytest.mark.parametrize("commit", ["main", "--upload-pack=x", "HEAD", "1234567"])
def test_only_whole_commits_are_looked_up(tmp_path: Path, source: Path, commit: str) -> None:
    wrong, _ = _commits(source)
    mirrors.mirror(tmp_path / "mirrors", source, [wrong])
    assert not ours.fetch_from_mirror(tmp_path / "mirrors", mirrors.URL, commit, tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_a_folder_of_mirrors_that_is_not_there_is_a_wrong_call(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    assert workbench.run("run", "--mirrors", str(workbench.folder / "none")).returncode == 2
