"""One commit in the user's own checkout: a pack's patch and its test, ready to be pushed by the one who signs it.

Unlike everywhere else git runs here with the user's own configuration, identity and hooks: the checkout and the commit
are the user's. Nothing is pushed, nothing is signed off.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.core import git
from harness.core.errors import HarnessError
from harness.pack.model import Pack
from harness.upstream import patch
from harness.upstream.patch import NO_BLOB, PatchedFile

#: What would make git work elsewhere than in the checkout.
ELSEWHERE = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE"}
UNFINISHED = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "BISECT_LOG", "rebase-merge", "rebase-apply")
#: A patch applies where its lines are, byte for byte, whatever the user's configuration says of whitespace.
EXACTLY = ("-c", "apply.whitespace=nowarn", "-c", "apply.ignoreWhitespace=no")
GITHUB = re.compile(r"github\.com[/:](?P<project>[\w.-]+/[\w.-]+?)(?:\.git)?/?$", re.IGNORECASE)
TAIL_LINES = 12


@dataclass(frozen=True)
class Checkout:
    """A clone of an upstream in the user's hands."""

    folder: Path

    def git(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run git there, as the user would."""
        environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
        return git.start([*arguments], self.folder, environment)

    def answer(self, *arguments: str) -> str:
        """Return what git prints, or raise with what it says."""
        ended = self.git(*arguments)
        if ended.returncode != 0:
            raise HarnessError(f"git {arguments[0]}: {tail(ended.stderr or ended.stdout)}")
        return ended.stdout.rstrip("\n")


@dataclass(frozen=True)
class Commit:
    """What was made.

    Attributes:
        branch: its name.
        commit: its hash.
        author: as git recorded it.
        stat: what it changes, as git shows it.
        left: the two commands that are the user's.

    """

    branch: str
    commit: str
    author: str
    stat: str
    left: tuple[str, str]


def tail(text: str) -> str:
    """Return the last lines of what a program said."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-TAIL_LINES:]) or "it said nothing"


def message_of(text: str) -> str:
    """Return the commit message that a patch carries before its ``---``."""
    head = re.split(r"(?m)^(?:---$|diff --git )", text, maxsplit=1)[0].strip()
    if not head.startswith("Subject: "):
        raise HarnessError("the patch does not open with 'Subject: '. Next: runner.py check")
    subject, _, body = head.removeprefix("Subject: ").partition("\n\n")
    return f"{' '.join(subject.split())}\n\n{body.strip()}\n".rstrip("\n") + "\n"


def default_branch(pack: Pack) -> str:
    """Name the branch for a pack: its slug, which says what it is about."""
    return "fix-" + pack.name.partition("_")[2].replace("_", "-")


def make(pack: Pack, folder: Path, branch: str | None) -> Commit:
    """Make a branch with one commit in a checkout.

    Args:
        pack: whose patch it is.
        folder: the checkout's top.
        branch: to make; None is named for the pack.

    Raises:
        HarnessError: the pack has no patch, or the checkout is no clone of it, is not clean, has the
            branch already, is at a commit that the patch does not fit exactly, or git or a hook refuses. The checkout
            is then as it was.

    """
    fix = pack.ask_patch or pack.patch
    if not pack.definition.has_patch or not fix.exists():
        raise HarnessError(f"{pack.name}: it has no patch. Next: runner.py report {pack.name}")
    test = pack.upstream_test_patch
    chosen = [fix, *([test] if test.exists() else [])]
    branch, checkout = branch or default_branch(pack), Checkout(folder.resolve())
    _require_whole(checkout, branch)
    listed = [(path, list(patch.parse(path.read_text(encoding="utf-8")))) for path in chosen]
    exact = [one for path, files in listed for one in _fitting(checkout, path, files)]
    message = message_of(fix.read_text(encoding="utf-8"))
    touched = list(dict.fromkeys(one.path for _, files in listed for one in files))
    with _branch(checkout, branch):
        for path in chosen:
            checkout.answer(*EXACTLY, "apply", "--index", str(path.resolve()))
        _require_blobs(checkout, exact)
        _commit(checkout, message)
        committed = checkout.answer("diff-tree", "--no-commit-id", "--name-only", "-r", "HEAD").splitlines()
        if sorted(committed) != sorted(touched):
            raise HarnessError(f"the commit changes {', '.join(committed)}, the patches {', '.join(touched)}")
    return Commit(
        branch=branch,
        commit=checkout.answer("rev-parse", "HEAD"),
        author=checkout.answer("show", "--no-patch", "--format=%an <%ae>", "HEAD"),
        stat=checkout.answer("show", "--stat", "--format=%s", "HEAD"),
        left=_left(checkout, pack, branch),
    )


def _require_whole(checkout: Checkout, branch: str) -> None:
    """Refuse what is no checkout, has changes or something unfinished in it, or has the branch already."""
    folder = checkout.folder
    top = checkout.git("rev-parse", "--show-toplevel") if folder.is_dir() else None
    if top is None or top.returncode != 0 or Path(top.stdout.rstrip("\n")).resolve() != folder:
        raise HarnessError(f"--checkout {folder}: not the top of a git checkout. Next: git clone the upstream")
    if checkout.git("rev-parse", "--verify", "--quiet", "HEAD^{commit}").returncode != 0:
        raise HarnessError(f"--checkout {folder}: it has no commit. Next: git clone the upstream")
    for unfinished in UNFINISHED:
        if (folder / checkout.answer("rev-parse", "--git-path", unfinished)).exists():
            raise HarnessError(f"--checkout {folder}: {unfinished} says that something is unfinished. Next: git status")
    changed = checkout.answer("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=none")
    if changed:
        first = changed.splitlines()[0][3:]
        raise HarnessError(f"--checkout {folder}: it has changes ({first}). Next: git stash")
    if checkout.git("check-ref-format", "--branch", branch).returncode != 0:
        raise HarnessError(f"--branch {branch}: git takes no such name. Next: --branch fix-what-is-wrong")
    if checkout.git("show-ref", "--verify", "--quiet", f"refs/heads/{branch}").returncode == 0:
        raise HarnessError(f"--checkout {folder}: it has a branch {branch}. Next: --branch another, or git branch -D")


def _fitting(checkout: Checkout, path: Path, files: list[PatchedFile]) -> list[PatchedFile]:
    """Return the files of a patch that are, here, what its index lines say; refuse a base that it does not fit.

    Where a file has changed since, the patch still has to find each of its lines where it says they are.
    """
    if not files:
        raise HarnessError(f"{path.name} names no file. Next: runner.py check")
    missing = [one.path for one in files if one.before != NO_BLOB and not _blob(checkout, one.path)]
    if missing:
        raise HarnessError(
            f"--checkout {checkout.folder}: no clone of that upstream, or at a commit of another time: it lacks "
            f"{missing[0]}, which {path.name} changes. Next: git switch its default branch"
        )
    tried = checkout.git(*EXACTLY, "apply", "--check", "--verbose", "--index", str(path.resolve()))
    moved = [line.strip() for line in tried.stderr.splitlines() if "offset" in line or "fuzz" in line]
    if tried.returncode != 0 or moved:
        why = moved[0] if moved else _complaint(checkout, path, tried.stderr)
        raise HarnessError(
            f"{path.name} does not fit the checkout's commit exactly: {why}. Next: git switch --detach to the commit "
            "that the pack's report names"
        )
    return [one for one in files if one.after and _blob(checkout, one.path) == one.before.replace(NO_BLOB, "")]


def _complaint(checkout: Checkout, path: Path, said: str) -> str:
    if checkout.git(*EXACTLY, "apply", "--check", "--reverse", str(path.resolve())).returncode == 0:
        return "it holds these changes already"
    lines = [line.removeprefix("error:").strip() for line in said.splitlines() if line.startswith("error:")]
    return next((line for line in lines if not line.startswith("while searching")), tail(said))


def _blob(checkout: Checkout, path: str) -> str:
    """Return the blob of a file in HEAD; empty where there is none."""
    found = checkout.git("rev-parse", "--verify", "--quiet", f"HEAD:{path}")
    return found.stdout.strip() if found.returncode == 0 else ""


def _require_blobs(checkout: Checkout, files: list[PatchedFile]) -> None:
    """Compare what git did with what the patches say, for the files that were as they say before."""
    for one in files:
        found = checkout.git("rev-parse", "--verify", "--quiet", f":{one.path}").stdout.strip()
        if (found or NO_BLOB) != one.after:
            raise HarnessError(f"{one.path} is not what the patch's index line says after applying it")


@contextmanager
def _branch(checkout: Checkout, branch: str) -> Iterator[None]:
    """Make a branch and stay on it; where anything fails, leave the checkout as it was."""
    named = checkout.git("symbolic-ref", "--quiet", "--short", "HEAD")
    commit = checkout.answer("rev-parse", "HEAD")
    back = [named.stdout.strip()] if named.returncode == 0 else ["--detach", commit]
    checkout.answer("switch", "--quiet", "--create", branch)
    try:
        yield
    except BaseException:
        checkout.git("reset", "--quiet", "--hard", commit)
        checkout.git("switch", "--quiet", *back)
        checkout.git("branch", "--quiet", "-D", branch)
        raise


def _commit(checkout: Checkout, message: str) -> None:
    """Commit with the user's own identity and hooks."""
    if checkout.git("var", "GIT_AUTHOR_IDENT").returncode != 0:
        raise HarnessError("git does not know who you are. Next: git config user.name and user.email")
    ended = checkout.git("commit", "--quiet", "--no-signoff", "--cleanup=whitespace", f"--message={message}")
    if ended.returncode != 0:
        said = tail(ended.stderr + ended.stdout)
        raise HarnessError(
            f"git, or a hook of the checkout, refused the commit; the checkout is as it was. It said: {said}\nNext: "
            "see to what it asks for, and call this again"
        )


# --- what is left to the user


def _left(checkout: Checkout, pack: Pack, branch: str) -> tuple[str, str]:
    """Write the two commands that push the branch and open the pull request."""
    project = _project(pack)
    remotes = checkout.answer("remote").splitlines()
    urls = {remote: checkout.git("remote", "get-url", "--", remote).stdout for remote in remotes}
    forks = [remote for remote, url in urls.items() if not project or not _is_of(url, project)]
    push = f"git -C {checkout.folder} push --set-upstream {forks[0] if forks else 'YOUR-FORK'} {branch}"
    where = f" --repo {project}" if project else ""
    return push, f"(cd {checkout.folder} && gh pr create{where} --draft --fill)"


def _is_of(url: str, project: str) -> bool:
    match = GITHUB.search(url.strip())
    return match is not None and match["project"].lower() == project.lower()


def _project(pack: Pack) -> str:
    """Return OWNER/NAME of a project on GitHub, as far as pack.toml tells it; empty where it does not."""
    asked, upstream = pack.definition.ask, pack.definition.upstream
    url = asked.origin.removeprefix("git+").rpartition("@")[0] if asked and asked.origin else upstream.repository
    match = GITHUB.search(url)
    return match["project"] if match else ""
