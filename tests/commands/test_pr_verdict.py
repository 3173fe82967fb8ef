"""``pr-verdict``: two trees of a maintainer's own, judged by the real runner over toy packs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from testing import histories, mirrors, toys
from testing.histories import STATES
from testing.workbench import Workbench

SCALE = "src/toykernel/scale.py"


def _tree(workbench: Workbench, name: str, state: str) -> str:
    """Lay out a plain folder of the toy upstream in one state; return it as a SPEC."""
    folder = workbench.folder / name
    shutil.copytree(histories.BASE, folder)
    (folder / SCALE).write_text(STATES[state], encoding="utf-8")
    return f"path:{folder}"


def _ended(workbench: Workbench, base: str, head: str, *arguments: str) -> tuple[int, list[str]]:
    trees = [f"--{name}={_tree(workbench, name, state)}" for name, state in (("base", base), ("head", head))]
    ended = workbench.run("pr-verdict", *trees, *(arguments or ("1",)))
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout.splitlines()


@pytest.mark.parametrize(
    ("base", "head", "status", "verdicts", "sentence"),
    [
        ("wrong", "right", 0, ("BUG_REPRODUCED", "FIX_VALIDATED"), "**this change fixes it**"),
        ("right", "wrong", 1, ("FIX_VALIDATED", "BUG_REPRODUCED"), "**this change brings it in**: `test_weights`"),
        ("wrong", "wrong", 0, ("BUG_REPRODUCED", "BUG_REPRODUCED"), "does not fix it; it was there before**"),
        ("wrong", "other API", 5, ("BUG_REPRODUCED", "UNSUPPORTED"), "what this change does is open**"),
    ],
)  # fmt: skip
def test_a_change_is_told_in_three_lines(  # noqa: PLR0917 - a row of the table
    workbench: Workbench, base: str, head: str, status: int, verdicts: tuple[str, str], sentence: str
) -> None:
    workbench.lay("01_confirmed")
    ended, (first, second, third) = _ended(workbench, base, head)
    assert f"base: `{verdicts[0]}`, head: `{verdicts[1]}`: " in first
    assert sentence in first
    assert second.startswith("- base is a folder that states no commit, head is")
    assert third.startswith("- Mutants that ")
    assert ended == status


def test_a_lane_that_hangs_is_an_error(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    status, lines = _ended(workbench, "right", "hanging", "1", "--timeout", "3")
    assert status == 1
    assert "head: `timed out after 3 s`" in lines[1]


def test_commits_are_named(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    base, head = histories.commits(workbench.folder / "history", ["wrong", "right"])
    mirrors.mirror(workbench.folder / "mirrors", workbench.folder / "history", [base, head])
    ended = workbench.run(
        "pr-verdict", "1", f"--base=git+{mirrors.URL}@{base}", f"--head=git+{mirrors.URL}@{head}",
        f"--mirrors={workbench.folder / 'mirrors'}",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for name, commit in (("base", base), ("head", head)):
        assert f"{name} is commit {commit[:12]}" in ended.stdout


def test_neither_tree_is_patched_and_nothing_is_written_into_them(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    (pack / "fix.patch").write_text("no patch at all\n")
    status, (first, *_) = _ended(workbench, "wrong", "right")
    assert (status, "this change fixes it" in first) == (0, True)
    assert not list(workbench.folder.glob("head/**/__pycache__"))
    assert not (pack / "receipts").exists()


def test_several_packs_and_the_files_that_choose_them(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    workbench.lay("30_control_fails")
    elsewhere = workbench.lay("01_confirmed", "09_elsewhere")
    toys.replace(elsewhere / "pack.toml", "timeout_s = 60", 'loads = ["src/toykernel/other.py"]')
    changed = workbench.folder / "changed"
    changed.write_text(f"README.md\n{SCALE}\n")
    named = workbench.run("pr-verdict", "--changed", str(changed))
    assert (named.returncode, named.stdout.split()) == (0, ["01_confirmed", "30_control_fails"])
    command = workbench.command("pr-verdict", "--changed", "-", "0*")
    piped = subprocess.run(command, input=f"{SCALE}\n", capture_output=True, text=True, check=False)
    assert (piped.returncode, piped.stdout) == (0, "01_confirmed\n")
    status, lines = _ended(workbench, "wrong", "right", "--changed", str(changed))
    assert status == 0
    assert (len(lines), lines[3]) == (7, "")
    assert "**a control fails in base, and a control fails in head: what this change does is open**" in lines[4]


@pytest.mark.parametrize("trees", [True, False])
def test_where_no_pack_is_concerned_it_says_nothing(workbench: Workbench, trees: bool) -> None:  # noqa: FBT001
    workbench.lay("01_confirmed")
    changed = workbench.folder / "changed"
    changed.write_bytes(b"docs/caf\xe9.md\n\nREADME.md\n")
    arguments = ["--base=path:/nowhere", "--head=path:/nowhere"] if trees else []
    ended = workbench.run("pr-verdict", "--changed", str(changed), *arguments)
    assert (ended.returncode, ended.stdout) == (5 if trees else 0, "")


def test_a_pack_that_this_host_cannot_judge_is_told_apart(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    workbench.lay("41_executes_on_a_gpu")
    status, lines = _ended(workbench, "wrong", "right", "*", "--target", "cpu")
    assert (status, len(lines)) == (0, 3)
    ended = workbench.run("pr-verdict", "41", "--base=path:x", "--head=path:y", "--target", "cpu")
    assert (ended.returncode, ended.stdout) == (5, "")
    assert "error: 41_executes_on_a_gpu: this pack lists sm_90a" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1",), "Next: --base SPEC --head SPEC, or --changed FILE"),
        (("1", "--base=path:x"), "Next: --base SPEC --head SPEC, or --changed FILE"),
        (("--base=path:x", "--head=path:x"), "no pack is named"),
        (("1", "--base=path:/nowhere/a", "--head=path:/nowhere/b"), "--base: path:/nowhere/a: no such folder"),
        (("1", "--base=git+-evil@main", "--head=path:x"), "is none of"),
        (("1", "--changed=/nowhere/list"), "No such file"),
    ],
)
def test_a_wrong_call_is_one_line(workbench: Workbench, arguments: tuple[str, ...], said: str) -> None:
    workbench.lay("01_confirmed")
    ended = workbench.run("pr-verdict", *arguments)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stdout
    assert said in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_a_broken_pack_stops_no_other(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    (workbench.lay("01_confirmed", "02_broken") / "pack.toml").write_text("schema = ")
    status, lines = _ended(workbench, "wrong", "right", "*")
    assert status == 2
    assert "this change fixes it" in lines[0]


def test_a_commit_that_nobody_has_is_an_error_of_its_side(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    base = f"git+https://example.org/toykernel@{'a' * 40}"
    ended = workbench.run("pr-verdict", "1", f"--base={base}", f"--head={_tree(workbench, 'head', 'right')}")
    assert ended.returncode == 0
    assert (
        "base: `ERROR`, head: `FIX_VALIDATED`: **the lane on base ends in an error, and head is right**" in ended.stdout
    )
    assert "not in the cache, and --offline forbids to fetch it" in ended.stdout


def test_an_interruption_ends_it_and_leaves_no_process(workbench: Workbench) -> None:
    workbench.lay("37_needs_long")
    trees = [f"--{name}={_tree(workbench, name, 'wrong')}" for name in ("base", "head")]
    assert workbench.interrupted("pr-verdict", "37", *trees, "--jobs", "2") == ""


def test_a_private_path_is_not_printed(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    folder = Path(_tree(workbench, "head", "right").removeprefix("path:"))
    (folder / SCALE).write_text(f"raise NotImplementedError('see {folder}/notes')\n")
    ended = workbench.run("pr-verdict", "1", f"--base={_tree(workbench, 'base', 'wrong')}", f"--head=path:{folder}")
    assert ended.returncode == 5
    assert str(workbench.folder) not in ended.stdout
