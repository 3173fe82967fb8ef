"""What moves from night to night: the newest release, the head of the default branch, and a cache that holds both."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from testing import days, histories, package_index
from testing.workbench import Workbench


@pytest.fixture
def upstream(workbench: Workbench) -> Path:
    """Return a repository of the toy upstream with one commit, which has the bug."""
    workbench.lay("01_confirmed")
    histories.commits(workbench.folder / "toykernel", ["wrong"])
    return workbench.folder / "toykernel"


def _at(repository: Path) -> dict[str, str]:
    """Return what makes git find the toy upstream's repository, as a user's configuration may."""
    rule = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf"}
    return rule | {"GIT_CONFIG_VALUE_0": "https://example.org/toykernel", "PIP_CONFIG_FILE": os.devnull}


def _day(repository: Path) -> str:
    """Return the day of the newest commit, in UTC."""
    seconds = int(histories.git(repository, "log", "-1", "--format=%ct"))
    return dt.datetime.fromtimestamp(seconds, dt.UTC).date().isoformat()


def _sweep(bench: Workbench, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    ended = bench.run("sweep", "--runs", str(bench.folder / "sweeps"), *arguments, **variables)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended


def _cells(bench: Workbench) -> dict[str, Any]:
    newest = max((bench.folder / "sweeps").glob("*/results.json"))
    return {cell["name"]: cell for cell in json.loads(newest.read_text())["cells"]}


def test_the_head_of_tonight_is_judged_and_a_commit_that_fixes_the_bug_is_told(
    workbench: Workbench, upstream: Path
) -> None:
    begun = days.today()
    assert _sweep(workbench, "--head", "--online", **_at(upstream)).returncode == 0
    head = _cells(workbench)["01_confirmed/cpu@head"]
    commit = histories.git(upstream, "rev-parse", "HEAD")
    assert (head["verdict"], head["release"]) == ("CONFIRMED", "head")
    assert head["as_of"] in days.since(begun)
    assert head["version"] == f"commit {commit[:12]} of {_day(upstream)}"
    scale = upstream / "src/toykernel/scale.py"
    scale.write_text(histories.RIGHT)
    histories.git(upstream, "commit", "-qam", "right")
    ended = _sweep(workbench, "--head", "--online", "--baseline", str(workbench.folder / "sweeps"), **_at(upstream))
    head = _cells(workbench)["01_confirmed/cpu@head"]
    assert (ended.returncode, head["verdict"]) == (1, "FIXED_UPSTREAM"), ended.stdout
    commit = histories.git(upstream, "rev-parse", "HEAD")
    assert ended.stdout.startswith(f"01_confirmed/cpu@head: FIXED UPSTREAM: toykernel commit {commit[:12]} of ")
    newest = max((workbench.folder / "sweeps").glob("*/summary.md"))
    assert f"of {_day(upstream)} (head, as of {head['as_of']})" in newest.read_text()


def test_a_head_that_cannot_be_had_fails_nothing(workbench: Workbench, upstream: Path) -> None:
    for online in (["--online"], []):
        ended = _sweep(workbench, "--head", *online, **_at(upstream.with_name("nothing")))
        head = _cells(workbench)["01_confirmed/cpu@head"]
        assert (ended.returncode, head["verdict"]) == (0, "UNAVAILABLE"), ended.stdout
    assert "Next: runner.py fetch --latest --head" in head["reason"]


def test_a_cache_that_fetch_filled_is_judged_without_network_and_says_of_which_day_it_is(
    workbench: Workbench, upstream: Path
) -> None:
    begun = days.today()
    releases = histories.shelf(workbench.folder / "index", {"1.0": "wrong", "2.0": "right"})
    variables = _at(upstream)
    with package_index.served(releases) as url:
        given = ["--cache", str(workbench.folder / "filled"), "--latest", "--head"]
        filled = workbench.run("fetch", *given, **variables, PIP_INDEX_URL=url)
    assert filled.returncode == 0, filled.stderr
    (looked_up,) = [path for path in (workbench.folder / "filled/newest").iterdir() if "release" in path.read_text()]
    days.replace(looked_up, "2026-01-02")
    upstream.rename(upstream.with_name("gone"))
    cached = ["--cache", str(workbench.folder / "filled"), "--latest", "--head"]
    ended = _sweep(workbench, *cached)
    assert ended.returncode == 0, (ended.stdout, ended.stderr)  # pack.toml says that 2.0 is fixed
    cells = _cells(workbench)
    newest, head = cells["01_confirmed/cpu@latest"], cells["01_confirmed/cpu@head"]
    assert (newest["verdict"], newest["version"], newest["as_of"]) == ("FIXED_UPSTREAM", "2.0", "2026-01-02")
    assert head["verdict"] == "CONFIRMED"
    assert head["as_of"] in days.since(begun)
    looked_up.write_text("{")
    _sweep(workbench, *cached)
    assert _cells(workbench)["01_confirmed/cpu@latest"]["verdict"] == "UNAVAILABLE"


def test_fetch_says_what_of_the_newest_it_could_not_have(workbench: Workbench, upstream: Path) -> None:
    with package_index.served(histories.shelf(workbench.folder / "index", {"1.0": "wrong"})) as url:
        given = ["--cache", str(workbench.folder / "filled"), "--head"]
        filled = workbench.run("fetch", *given, **_at(upstream.with_name("nothing")), PIP_INDEX_URL=url)
    assert (filled.returncode, "the head of https://example.org/toykernel: " in filled.stderr) == (1, True)
