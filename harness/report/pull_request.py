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


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in a checkout, as the user would."""
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    return git.start([*arguments], folder, environment)


def _answer(folder: Path, *arguments: str) -> str:
    """Return what git prints, or raise with what it says."""
    ended = _git(folder, *arguments)
    if ended.returncode != 0:
        raise HarnessError(f"git {arguments[0]}: {_tail(ended.stderr or ended.stdout)}")
    return ended.stdout.rstrip("\n")


def _tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-TAIL_LINES:]) or "it said nothing"


def _message(text: str) -> str:
    """Return the commit message that a patch carries before its ``---``."""
    head = re.split(r"(?m)^(?:---$|diff --git )", text, maxsplit=1)[0].strip()
    if not head.startswith("Subject: "):
        raise HarnessError("the patch does not open with 'Subject: '. Next: runner.py check")
    subject, _, body = head.removeprefix("Subject: ").partition("\n\n")
    return f"{' '.join(subject.split())}\n\n{body.strip()}".rstrip("\n") + "\n"


def make(pack: Pack, folder: Path) -> list[str]:
    """Make a branch with one commit in a checkout; return lines that say so, and what is left to the user.

    HarnessError is raised where the pack has no patch, or the checkout is no clone of it, is not clean, has the branch
    already, is at a commit that the patch does not fit exactly, or git or a hook refuses. The checkout is then as it
    was. The branch is named for the pack by its slug.
    """
    fix = pack.ask_patch or pack.patch
    if not pack.definition.has_patch or not fix.exists():
        raise HarnessError(f"{pack.name}: it has no patch. Next: runner.py report {pack.name}")
    test = pack.upstream_test_patch
    chosen = [fix, *([test] if test.exists() else [])]
    branch = "fix-" + pack.name.partition("_")[2].replace("_", "-")
    folder = folder.resolve()
    _require_whole(folder, branch)
    listed = [(path, list(patch.parse(path.read_text(encoding="utf-8")))) for path in chosen]
    exact = [one for path, files in listed for one in _fitting(folder, path, files)]
    message = _message(fix.read_text(encoding="utf-8"))
    touched = list(dict.fromkeys(one.path for _, files in listed for one in files))
    with _branch(folder, branch):
        for path in chosen:
            _answer(folder, *EXACTLY, "apply", "--index", str(path.resolve()))
        for one in exact:  # what git did is what the patches say, where the files were as they say before
            found = _git(folder, "rev-parse", "--verify", "--quiet", f":{one.path}").stdout.strip()
            if (found or NO_BLOB) != one.after:
                raise HarnessError(f"{one.path} is not what the patch's index line says after applying it")
        _commit(folder, message)
        committed = _answer(folder, "diff-tree", "--no-commit-id", "--name-only", "-r", "HEAD").splitlines()
        if sorted(committed) != sorted(touched):
            raise HarnessError(f"the commit changes {', '.join(committed)}, the patches {', '.join(touched)}")
    commit, author = _answer(folder, "rev-parse", "HEAD"), _answer(folder, "show", "--no-patch", "--format=%an <%ae>")
    return [
        f"branch {branch}, commit {commit[:12]} by {author}",
        _answer(folder, "show", "--stat", "--format=%s", "HEAD"),
        "left to you, when you have read the commit:",
        *_left(folder, pack, branch),
    ]


def _require_whole(folder: Path, branch: str) -> None:
    """Refuse what is no checkout, has changes or something unfinished in it, or has the branch already."""
    top = _git(folder, "rev-parse", "--show-toplevel") if folder.is_dir() else None
    if top is None or top.returncode != 0 or Path(top.stdout.rstrip("\n")).resolve() != folder:
        raise HarnessError(f"--pr {folder}: not the top of a git checkout. Next: git clone the upstream")
    if _git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}").returncode != 0:
        raise HarnessError(f"--pr {folder}: it has no commit. Next: git clone the upstream")
    for unfinished in UNFINISHED:
        if (folder / _answer(folder, "rev-parse", "--git-path", unfinished)).exists():
            raise HarnessError(f"--pr {folder}: {unfinished} says that something is unfinished. Next: git status")
    changed = _answer(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=none")
    if changed:
        first = changed.splitlines()[0][3:]
        raise HarnessError(f"--pr {folder}: it has changes ({first}). Next: git stash")
    if _git(folder, "show-ref", "--verify", "--quiet", f"refs/heads/{branch}").returncode == 0:
        raise HarnessError(f"--pr {folder}: it has a branch {branch}. Next: git branch -m {branch} another")


def _fitting(folder: Path, path: Path, files: list[PatchedFile]) -> list[PatchedFile]:
    """Return the files of a patch that are, here, what its index lines say; refuse a base that it does not fit.

    Where a file has changed since, the patch still has to find each of its lines where it says they are.
    """
    if not files:
        raise HarnessError(f"{path.name} names no file. Next: runner.py check")
    missing = [one.path for one in files if one.before != NO_BLOB and not _blob(folder, one.path)]
    if missing:
        raise HarnessError(
            f"--pr {folder}: no clone of that upstream, or at a commit of another time: it lacks "
            f"{missing[0]}, which {path.name} changes. Next: git switch its default branch"
        )
    tried = _git(folder, *EXACTLY, "apply", "--check", "--verbose", "--index", str(path.resolve()))
    moved = [line.strip() for line in tried.stderr.splitlines() if "offset" in line or "fuzz" in line]
    if tried.returncode != 0 or moved:
        why = moved[0] if moved else _complaint(folder, path, tried.stderr)
        raise HarnessError(
            f"{path.name} does not fit the checkout's commit exactly: {why}. Next: git switch --detach to the commit "
            "that the pack's report names"
        )
    return [one for one in files if one.after and _blob(folder, one.path) == one.before.replace(NO_BLOB, "")]


def _complaint(folder: Path, path: Path, said: str) -> str:
    if _git(folder, *EXACTLY, "apply", "--check", "--reverse", str(path.resolve())).returncode == 0:
        return "it holds these changes already"
    lines = [line.removeprefix("error:").strip() for line in said.splitlines() if line.startswith("error:")]
    return next((line for line in lines if not line.startswith("while searching")), _tail(said))


def _blob(folder: Path, path: str) -> str:
    """Return the blob of a file in HEAD; empty where there is none."""
    found = _git(folder, "rev-parse", "--verify", "--quiet", f"HEAD:{path}")
    return found.stdout.strip() if found.returncode == 0 else ""


@contextmanager
def _branch(folder: Path, branch: str) -> Iterator[None]:
    """Make a branch and stay on it; where anything fails, leave the checkout as it was."""
    named = _git(folder, "symbolic-ref", "--quiet", "--short", "HEAD")
    commit = _answer(folder, "rev-parse", "HEAD")
    back = [named.stdout.strip()] if named.returncode == 0 else ["--detach", commit]
    _answer(folder, "switch", "--quiet", "--create", branch)
    try:
        yield
    except BaseException:
        _git(folder, "reset", "--quiet", "--hard", commit)
        _git(folder, "switch", "--quiet", *back)
        _git(folder, "branch", "--quiet", "-D", branch)
        raise


def _commit(folder: Path, message: str) -> None:
    """Commit with the user's own identity and hooks."""
    if _git(folder, "var", "GIT_AUTHOR_IDENT").returncode != 0:
        raise HarnessError("git does not know who you are. Next: git config user.name and user.email")
    ended = _git(folder, "commit", "--quiet", "--no-signoff", "--cleanup=whitespace", f"--message={message}")
    if ended.returncode != 0:
        said = _tail(ended.stderr + ended.stdout)
        raise HarnessError(
            f"git, or a hook of the checkout, refused the commit; the checkout is as it was. It said: {said}\nNext: "
            "see to what it asks for, and call this again"
        )


def _left(folder: Path, pack: Pack, branch: str) -> tuple[str, str]:
    asked, upstream = pack.definition.ask, pack.definition.upstream
    origin = asked.origin.removeprefix("git+").rpartition("@")[0] if asked else ""
    project = _project_of(origin or upstream.repository)
    remotes = _answer(folder, "remote").splitlines()
    urls = {remote: _git(folder, "remote", "get-url", "--", remote).stdout.strip() for remote in remotes}
    forks = [remote for remote, url in urls.items() if not project or _project_of(url).lower() != project.lower()]
    push = f"git -C {folder} push --set-upstream {forks[0] if forks else 'YOUR-FORK'} {branch}"
    where = f" --repo {project}" if project else ""
    return f"  {push}", f"  (cd {folder} && gh pr create{where} --draft --fill)"


def _project_of(url: str) -> str:
    """Return OWNER/NAME of a project on GitHub; empty where a URL is of none."""
    match = GITHUB.search(url)
    return match["project"] if match else ""
