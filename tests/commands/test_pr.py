"""One commit in the user's own checkout of an upstream: real git repositories, and everything that is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.pack import patch_text
from testing import histories, toys
from testing.workbench import Workbench

SUBJECT = "Scale each value by its own weight"
TEST = """Subject: Test that each value has its own weight

SPDX-License-Identifier: Apache-2.0
---
diff --git a/tests/test_scale.py b/tests/test_scale.py
new file mode 100644
index 0000000000000000000000000000000000000000..{blob}
--- /dev/null
+++ b/tests/test_scale.py
@@ -0,0 +1,2 @@
+def test_each_value_has_its_own_weight():
+    assert True
"""
SOURCE = "src/toykernel/scale.py"
RIGHT_LINE = "[value * weight for value, weight in zip(values, weights, strict=True)]"


@dataclass(frozen=True)
class Clone:
    """The user's checkout of the toy upstream, with the user's own identity, and a home of its own."""

    folder: Path
    workbench: Workbench

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.folder.parent), "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    def pr(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.workbench.run(
            "report", "1", "--pr", str(self.folder), *arguments, **(self.environment | environment)
        )

    def edit(self, old: str, new: str) -> None:
        """Edit the source that the patch is about, and commit it."""
        toys.replace(self.folder / SOURCE, old, new)
        self.git("commit", "--quiet", "--all", "--message=Edit it")

    def state(self) -> tuple[str, ...]:
        """Everything that a refused call must leave as it was."""
        head = (self.folder / ".git/HEAD").read_text()
        files = sorted(str(path) for path in self.folder.rglob("*") if ".git" not in path.parts)
        return (head, self.git("rev-parse", "HEAD"), self.git("branch"), self.git("diff", "HEAD"), *files)


@pytest.fixture
def clone(workbench: Workbench) -> Clone:
    workbench.lay("01_confirmed")
    folder = workbench.folder / "home" / "toykernel"
    folder.parent.mkdir()
    shutil.copytree(toys.RESOURCES / "upstream/toykernel-1.0", folder)
    made = Clone(folder, workbench)
    made.git("init", "--quiet", "--initial-branch=main")
    made.git("config", "user.name", "A Maintainer")
    made.git("config", "user.email", "maintainer@example.org")
    made.git("add", ".")
    made.git("commit", "--quiet", "--message=Release 1.0")
    made.git("remote", "add", "origin", "https://github.com/example/toykernel.git")
    made.git("remote", "add", "mine", "git@github.com:a-maintainer/toykernel.git")
    return made


def _pack(clone: Clone) -> Path:
    return clone.workbench.packs / "01_confirmed"


def test_a_branch_with_one_commit_of_the_patch_and_its_test(clone: Clone) -> None:
    blob = patch_text.blob("def test_each_value_has_its_own_weight():\n    assert True\n")
    (_pack(clone) / "upstream_test.patch").write_text(TEST.format(blob=blob))
    (clone.folder / "notes.txt").write_text("mine\n")
    base = clone.git("rev-parse", "HEAD")
    ended = clone.pr()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert clone.git("branch", "--show-current") == "fix-confirmed"
    assert clone.git("rev-parse", "HEAD^") == base
    assert clone.git("diff", "--name-only", "HEAD^").splitlines() == [SOURCE, "tests/test_scale.py"]
    message = clone.git("show", "--no-patch", "--format=%B")
    assert message.splitlines()[0] == SUBJECT
    assert "multiplied every value by the first weight." in message
    assert "Signed-off-by" not in message
    assert clone.git("show", "--no-patch", "--format=%an %ae %cn") == (
        "A Maintainer maintainer@example.org A Maintainer"
    )
    assert clone.git("status", "--porcelain") == "?? notes.txt"
    assert "left to you, when you have read the commit: git push YOUR-FORK fix-confirmed" in ended.stdout
    before = clone.state()
    again = clone.pr()
    assert (again.returncode, clone.state()) == (2, before)
    assert "a branch named 'fix-confirmed' already exists" in again.stderr


def test_the_patch_that_upstream_is_asked_to_merge_goes_before_fix_patch(clone: Clone) -> None:
    pack = _pack(clone)
    (pack / "ask.patch").write_text((pack / "fix.patch").read_text().replace(SUBJECT, "Ask for less"))
    toys.replace(
        pack / "pack.toml",
        "[upstream]",
        '[ask]\npatch = "ask.patch"\nchecks = ["scale"]\ndate = 2026-01-01\n'
        f'origin = "git+https://example.org/toykernel@{"1" * 40}"\n\n[upstream]',
    )
    ended = clone.pr()
    assert ended.returncode == 0, ended.stderr
    assert clone.git("show", "--no-patch", "--format=%s") == "Ask for less"


def test_a_pack_whose_text_is_for_another_place_has_no_commit_to_make(clone: Clone) -> None:
    question = "## The question to another upstream\n\nTitle: Is this meant?\n\n> Is it?\n"
    (_pack(clone) / "report.in.md").write_text(f"# A bug\n\nText.\n\n---\n\n{question}")
    before = clone.state()
    ended = clone.pr()
    assert (ended.returncode, clone.state()) == (2, before)
    assert "01_confirmed: the text to file has another patch, or none. Next: runner.py report" in ended.stderr


def _staged(clone: Clone) -> None:
    (clone.folder / "new.py").write_text("new\n")
    clone.git("add", "new.py")


def _of_something_else(clone: Clone) -> None:
    clone.git("rm", "--quiet", "-r", "src")
    (clone.folder / "other.py").write_text("other\n")
    clone.git("add", ".")
    clone.git("commit", "--quiet", "--message=Another project")


def _moved(clone: Clone) -> None:
    path = clone.folder / SOURCE
    path.write_text("# one line more\n" * 3 + path.read_text())
    clone.git("commit", "--quiet", "--all", "--message=Move it down")


def _reindented(clone: Clone) -> None:
    clone.git("config", "apply.ignoreWhitespace", "change")
    clone.edit("def scale(values, weights)", "def scale(values,  weights)")


def _hook(clone: Clone) -> None:
    hook = clone.folder / ".git/hooks/pre-commit"
    hook.write_text("#!/bin/sh\necho the hook wants a ticket number\nexit 1\n")
    hook.chmod(0o755)


def _nameless(clone: Clone) -> None:
    clone.git("config", "--unset", "user.name")
    clone.git("config", "--unset", "user.email")
    clone.git("config", "user.useConfigOnly", "true")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda clone: (clone.folder / SOURCE).write_text("changed\n"), f"it has changes ({SOURCE}). Next: git stash"),
        (_staged, "it has changes (new.py). Next: git stash"),
        (
            lambda clone: (clone.folder / ".git/MERGE_HEAD").write_text("1" * 40),
            "cannot switch branch while merging",
        ),
        (_of_something_else, f"does not fit the checkout's commit exactly: {SOURCE}: does not exist in index"),
        (_moved, "does not fit the checkout's commit exactly: Hunk #1 succeeded at 6 (offset 3 lines)"),
        (
            lambda clone: clone.edit("weights[0]", "weights[-1]"),
            f"does not fit the checkout's commit exactly: patch failed: {SOURCE}",
        ),
        (
            lambda clone: clone.edit(histories.WRONG_LINE, RIGHT_LINE),
            "does not fit the checkout's commit exactly: the tree holds its changes already, or the patch is",
        ),
        (_reindented, f"does not fit the checkout's commit exactly: patch failed: {SOURCE}"),
        (_hook, "the checkout is as it was: the hook wants a ticket number"),
        (_nameless, "Please tell me who you are"),
        (
            lambda clone: toys.replace(_pack(clone) / "fix.patch", "..7a2983fc", "..7a2983fd"),
            f"{SOURCE} is not what the patch's index line says after applying it",
        ),
        (lambda clone: (_pack(clone) / "fix.patch").unlink(), "it has no patch. Next: runner.py report"),
    ],
)
def test_what_is_refused_and_left_as_it_was(clone: Clone, spoil: Callable[[Clone], object], reason: str) -> None:
    spoil(clone)
    before = clone.state()
    ended = clone.pr()
    assert ended.returncode == 2, ended.stdout
    assert reason in ended.stderr
    assert clone.state() == before


def test_a_folder_below_the_top_and_a_plain_folder_are_refused(clone: Clone) -> None:
    for folder, reason in ((clone.folder / "src", "not the top of a git checkout"), (clone.folder.parent, "not the")):
        ended = clone.workbench.run("report", "1", "--pr", str(folder), **clone.environment)
        assert (ended.returncode, reason in ended.stderr) == (2, True), ended.stderr
    assert clone.git("branch") == "* main"


def test_a_detached_head_is_where_it_was_when_a_hook_refuses(clone: Clone) -> None:
    clone.git("switch", "--quiet", "--detach", "HEAD")
    _hook(clone)
    before = clone.state()
    assert clone.pr().returncode == 2
    assert clone.state() == before
