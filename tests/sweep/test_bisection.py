"""A verdict that changed overnight is bisected: by releases, then by commits, within its time."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from testing import histories, mirrors, package_index, toys
from testing.workbench import Workbench

#: Of four releases the third fixes the bug.
RELEASES = {"1.0": "wrong", "1.1": "wrong", "1.2": "right", "1.3": "right"}
#: The commits of the toy upstream, with the tags that stand on them.
COMMITS = {"wrong": "v1.0", "wrong ": "v1.1", "wrong  ": "", "right": "", "right ": "v1.2", "right  ": "v1.3"}


def _repository(bench: Workbench) -> list[str]:
    """Make the toy upstream's repository with tags; return its commits."""
    found = histories.commits(bench.folder / "toykernel", [state.strip() for state in COMMITS])
    for commit, tag in zip(found, COMMITS.values(), strict=True):
        if tag:
            histories.git(bench.folder / "toykernel", "tag", tag, commit)
    return found


def _variables(bench: Workbench, url: str) -> dict[str, str]:
    """Return what makes the runner find the index and the toy upstream's repository."""
    index = {"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull}
    return index | histories.redirected(mirrors.URL, bench.folder / "toykernel")


def _arguments(bench: Workbench, *arguments: str) -> list[str]:
    return ["--online", "--baseline", str(bench.sweeps), "--jobs", "1", *arguments]


def _night(bench: Workbench, states: dict[str, str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Sweep while the index has these releases; return the exit status, the cells and what was said."""
    number = len(list(bench.folder.glob("index-*")))
    with package_index.served(histories.shelf(bench.folder / f"index-{number}", states)) as url:
        ended = bench.sweep(*_arguments(bench, *arguments), **_variables(bench, url))
    return ended.returncode, bench.cells(), ended.stdout


def _logs(bench: Workbench) -> list[str]:
    return [end["task"] for end in bench.ends()]


def _first(states: dict[str, str], count: int) -> dict[str, str]:
    return dict(list(states.items())[:count])


def test_a_release_that_fixes_the_bug_is_named_and_its_commit(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    commits = _repository(workbench)
    assert _night(workbench, _first(RELEASES, 1), "--latest", "--bisect", "5m")[0] == 0
    status, cells, said = _night(workbench, RELEASES, "--latest", "--bisect", "5m")
    row = cells["01_confirmed/cpu@latest"]
    assert (status, row["version"], row["verdict"]) == (1, "1.3", "FIXED_UPSTREAM")
    assert row["bisected"].startswith(f"fixed in 1.2; its commit: {commits[3][:12]} (")
    assert row["bisected"].endswith(", number 3, right)")
    assert cells["01_confirmed/cpu"]["bisected"] == ""
    for name in ("summary.md", "index.html"):
        assert f"fixed in 1.2; its commit: {commits[3][:12]}" in (workbench.newest / name).read_text(), name
    assert said.splitlines()[:2] == [
        "01_confirmed/cpu@latest: FIXED UPSTREAM: toykernel 1.3: was CONFIRMED",
        f"01_confirmed/cpu@latest: {row['bisected']}",
    ]
    tasks = _logs(workbench)
    assert len(tasks) == len(set(tasks)), "the newest and the pinned release are not run again"
    assert tasks.index("01_confirmed/cpu@latest pristine") < tasks.index("01_confirmed/cpu@1.2 pristine")
    _, cells, _ = _night(workbench, RELEASES, "--latest", "--bisect", "5m")
    assert cells["01_confirmed/cpu@latest"]["bisected"] == "", "nothing changed the morning after"


def test_a_release_that_brings_the_bug_back_needs_attention_and_is_named(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    states = {"1.0": "wrong", "1.1": "right", "1.2": "unimportable", "1.3": "wrong"}
    _night(workbench, _first(states, 2), "--latest")
    status, cells, _ = _night(workbench, states, "--latest", "--bisect", "5m")
    row = cells["01_confirmed/cpu@latest"]
    assert (status, row["verdict"], row["changes"][0]["kind"]) == (1, "CONFIRMED", "has the bug")
    told, _, why = row["bisected"].partition("; ")
    assert told == "bug from 1.3 (or 1.2, not judged)"
    assert why.startswith("which commit did it cannot be told ("), "there is no repository"
    assert str(workbench.folder) not in row["bisected"]


def test_the_commit_behind_a_head_that_moved_is_named(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    repository = workbench.folder / "toykernel"
    commits = _repository(workbench)
    histories.git(repository, "checkout", "-q", "-B", "main", commits[0])
    _night(workbench, _first(RELEASES, 1), "--head", "--bisect", "5m")
    histories.git(repository, "reset", "-q", "--hard", commits[-1])
    _, cells, _ = _night(workbench, _first(RELEASES, 1), "--head", "--bisect", "5m")
    row = cells["01_confirmed/cpu@head"]
    assert row["verdict"] == "FIXED_UPSTREAM"
    assert row["bisected"].startswith(f"fixed in {commits[3][:12]} (")


def test_what_did_not_change_upstream_is_told_from_what_did(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    _night(workbench, _first(RELEASES, 1), "--latest")
    toys.blind(pack)  # something here changed, not upstream
    _, cells, _ = _night(workbench, RELEASES, "--latest", "--bisect", "5m")
    row = cells["01_confirmed/cpu@latest"]
    assert (row["verdict"], row["bisected"]) == (
        "FIXED_UPSTREAM",
        "no release did it: 1.0 gives FIX_VALIDATED now as well, so something else here changed",
    )


def test_a_release_that_cannot_be_judged_is_not_bisected(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    _night(workbench, _first(RELEASES, 1), "--latest")
    _, cells, _ = _night(workbench, {"1.0": "wrong", "1.1": "crashing"}, "--latest", "--bisect", "5m")
    row = cells["01_confirmed/cpu@latest"]
    assert (row["verdict"], row["bisected"]) == ("ERROR", "not bisected: ERROR is neither right nor wrong")


def test_a_bisection_ends_in_time_and_says_what_is_left_to_do(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    _night(workbench, _first(RELEASES, 1), "--latest")
    _, cells, said = _night(workbench, {"1.0": "wrong", "1.1": "hanging", "1.2": "right"}, "--latest", "--bisect", "2s")
    told = cells["01_confirmed/cpu@latest"]["bisected"]
    assert told.startswith("which release of toykernel from 1.0 to 1.2 did it cannot be told (no time was left: ")
    assert told.endswith(". Next: runner.py versions 01 --target cpu --range '>=1.0,<=1.2'")
    assert told in said


@pytest.mark.parametrize(("how", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_sweep_that_ends_while_it_bisects_goes_on_where_it_was(
    workbench: Workbench, how: signal.Signals, status: int
) -> None:
    pack = workbench.lay("01_confirmed")
    _night(workbench, _first(RELEASES, 1), "--latest")
    slow = {"1.0": "wrong", "1.1": "wrong", "1.2": "hanging", "1.3": "right", "1.4": "right"}
    toml = pack / "pack.toml"
    toml.write_text(toml.read_text().replace("timeout_s = 60", "timeout_s = 15"))
    command = workbench.command("sweep", *_arguments(workbench, "--latest", "--bisect", "5m"))
    with package_index.served(histories.shelf(workbench.folder / "index", slow)) as url:
        environment = os.environ | _variables(workbench, url)
        killed = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert killed.stderr is not None
        assert any("1.4 FIX_VALIDATED" in line for line in killed.stderr), "both ends are judged"
        killed.send_signal(how)
        killed.communicate()
        assert killed.returncode == status
        before = _logs(workbench)
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in ended.stderr, ended.stderr
    tasks = _logs(workbench)
    assert (tasks[: len(before)], len(tasks)) == (before, len(set(tasks)))
    assert "01_confirmed/cpu@1.2 pristine" in tasks[len(before) :]
    assert len(list((workbench.folder / "sweeps").glob("*/run.json"))) == 2
    assert workbench.cells()["01_confirmed/cpu@latest"]["bisected"].startswith("fixed in 1.3 (or 1.2, not judged); ")


def test_a_sweep_of_pinned_releases_alone_has_nothing_to_bisect(workbench: Workbench) -> None:
    ended = workbench.run("sweep", "--bisect", "5m")
    assert (ended.returncode, "Next: runner.py sweep --latest --bisect 30m" in ended.stderr) == (2, True)
