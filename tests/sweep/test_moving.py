"""What moves from night to night: the newest release, the head of the default branch, and a cache that holds both."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path

import pytest

from testing import histories, mirrors, package_index, toys
from testing.workbench import Workbench


@pytest.fixture
def upstream(workbench: Workbench) -> Path:
    """Return a repository of the toy upstream with one commit, which has the bug."""
    workbench.lay("01_confirmed")
    histories.commits(workbench.folder / "toykernel", ["wrong"])
    return workbench.folder / "toykernel"


def _at(repository: Path) -> dict[str, str]:
    return histories.redirected(mirrors.URL, repository) | {"PIP_CONFIG_FILE": os.devnull}


def _today() -> dt.date:
    """Return the day in UTC, as the harness dates what it looks up."""
    return dt.datetime.now(dt.UTC).date()


def _since(begun: dt.date) -> set[str]:
    """Return the days from `begun` to today: a test that midnight interrupts finds either of two."""
    return {(begun + dt.timedelta(days=day)).isoformat() for day in range((_today() - begun).days + 1)}


def _day(repository: Path) -> str:
    """Return the day of the newest commit, in UTC."""
    seconds = int(histories.git(repository, "log", "-1", "--format=%ct"))
    return dt.datetime.fromtimestamp(seconds, dt.UTC).date().isoformat()


def test_the_head_of_tonight_is_judged_and_a_commit_that_fixes_the_bug_is_told(
    workbench: Workbench, upstream: Path
) -> None:
    begun = _today()
    assert workbench.sweep("--head", "--online", **_at(upstream)).returncode == 0
    head = workbench.cells()["01_confirmed/cpu@head"]
    commit = histories.git(upstream, "rev-parse", "HEAD")
    assert (head["verdict"], head["release"]) == ("CONFIRMED", "head")
    assert head["as_of"] in _since(begun)
    assert head["version"] == f"commit {commit[:12]} of {_day(upstream)}"
    scale = upstream / "src/toykernel/scale.py"
    scale.write_text(histories.RIGHT)
    histories.git(upstream, "commit", "-qam", "right")
    ended = workbench.sweep("--head", "--online", "--baseline", str(workbench.sweeps), **_at(upstream))
    head = workbench.cells()["01_confirmed/cpu@head"]
    assert (ended.returncode, head["verdict"]) == (1, "FIXED_UPSTREAM"), ended.stdout
    commit = histories.git(upstream, "rev-parse", "HEAD")
    assert ended.stdout.startswith(f"01_confirmed/cpu@head: FIXED UPSTREAM: toykernel commit {commit[:12]} of ")
    summary = (workbench.newest / "summary.md").read_text()
    assert f"of {_day(upstream)} (head, as of {head['as_of']})" in summary


def test_a_head_that_cannot_be_had_fails_nothing(workbench: Workbench, upstream: Path) -> None:
    for online in (["--online"], []):
        ended = workbench.sweep("--head", *online, **_at(upstream.with_name("nothing")))
        head = workbench.cells()["01_confirmed/cpu@head"]
        assert (ended.returncode, head["verdict"]) == (0, "UNAVAILABLE"), ended.stdout
    assert "Next: runner.py fetch --latest" in head["reason"]


def test_a_cache_that_fetch_filled_is_judged_without_network_and_says_of_which_day_it_is(
    workbench: Workbench, upstream: Path
) -> None:
    begun = _today()
    releases = histories.shelf(workbench.folder / "index", {"1.0": "wrong", "2.0": "right"})
    variables = _at(upstream)
    with package_index.served(releases) as url:
        given = ["--cache", str(workbench.folder / "filled"), "--latest"]
        filled = workbench.run("fetch", *given, **variables, PIP_INDEX_URL=url)
    assert filled.returncode == 0, filled.stderr
    (looked_up,) = [path for path in (workbench.folder / "filled/newest").iterdir() if "release" in path.read_text()]
    seen = json.loads(looked_up.read_text())["found"]["seen"]
    toys.replace(looked_up, seen, "2026-01-02")
    upstream.rename(upstream.with_name("gone"))
    cached = ["--cache", str(workbench.folder / "filled"), "--latest", "--head"]
    ended = workbench.sweep(*cached)
    assert ended.returncode == 0, (ended.stdout, ended.stderr)  # pack.toml says that 2.0 is fixed
    cells = workbench.cells()
    newest, head = cells["01_confirmed/cpu@latest"], cells["01_confirmed/cpu@head"]
    assert (newest["verdict"], newest["version"], newest["as_of"]) == ("FIXED_UPSTREAM", "2.0", "2026-01-02")
    assert head["verdict"] == "CONFIRMED"
    assert head["as_of"] in _since(begun)
    looked_up.write_text("{")
    workbench.sweep(*cached)
    assert workbench.cells()["01_confirmed/cpu@latest"]["verdict"] == "UNAVAILABLE"


def test_fetch_says_what_of_the_newest_it_could_not_have(workbench: Workbench, upstream: Path) -> None:
    with package_index.served(histories.shelf(workbench.folder / "index", {"1.0": "wrong"})) as url:
        given = ["--cache", str(workbench.folder / "filled"), "--latest"]
        filled = workbench.run("fetch", *given, **_at(upstream.with_name("nothing")), PIP_INDEX_URL=url)
    assert (filled.returncode, "the head of https://example.org/toykernel: " in filled.stderr) == (1, True)
