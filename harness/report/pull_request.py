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
from harness.upstream.patch import NO_BLOB

#: What would make git work elsewhere than in the checkout.
ELSEWHERE = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE"}
#: A patch applies where its lines are, byte for byte, whatever the user's configuration says of whitespace.
EXACTLY = ("-c", "apply.whitespace=nowarn", "-c", "apply.ignoreWhitespace=no")
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
    branch = "fix-" + pack.name.partition("_")[2].replace("_", "-")
    folder, message = folder.resolve(), _message(fix.read_text(encoding="utf-8"))
    _require_clean(folder)
    with _branch(folder, branch):
        for path in (one for one in (fix, pack.upstream_test_patch) if one.exists()):
            _apply(folder, path)
        _commit(folder, message)
    commit, author = _answer(folder, "rev-parse", "HEAD"), _answer(folder, "show", "--no-patch", "--format=%an <%ae>")
    return [
        f"branch {branch}, commit {commit[:12]} by {author}",
        _answer(folder, "show", "--stat", "--format=%s", "HEAD"),
        f"left to you, when you have read the commit: git push YOUR-FORK {branch}, and gh pr create --draft --fill",
    ]


def _require_clean(folder: Path) -> None:
    """Refuse what is no checkout, or has changes in it; below its top git would leave out files without a word."""
    top = _git(folder, "rev-parse", "--show-toplevel") if folder.is_dir() else None
    if top is None or top.returncode != 0 or Path(top.stdout.rstrip("\n")).resolve() != folder:
        raise HarnessError(f"--pr {folder}: not the top of a git checkout. Next: git clone the upstream")
    changed = _answer(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=none")
    if changed:
        raise HarnessError(f"--pr {folder}: it has changes ({changed.splitlines()[0][3:]}). Next: git stash")


def _apply(folder: Path, path: Path) -> None:
    """Apply a patch where each of its lines is where it says, and hold the files to what its index lines say."""
    listed = patch.parse(path.read_text(encoding="utf-8"))
    exact = [one for one in listed if one.after and _blob(folder, one.path) == one.before]
    applied = _git(folder, *EXACTLY, "apply", "--verbose", "--index", str(path.resolve()))
    moved = [line.strip() for line in applied.stderr.splitlines() if "offset" in line or "fuzz" in line]
    if applied.returncode != 0 or moved:
        why = moved[0] if moved else _complaint(folder, path, applied.stderr)
        raise HarnessError(
            f"{path.name} does not fit the checkout's commit exactly: {why}. Next: git switch --detach to the commit "
            "that the pack's report names"
        )
    for one in exact:
        if _blob(folder, one.path) != one.after:
            raise HarnessError(f"{one.path} is not what the patch's index line says after applying it")


def _complaint(folder: Path, path: Path, said: str) -> str:
    if _git(folder, *EXACTLY, "apply", "--check", "--reverse", str(path.resolve())).returncode == 0:
        return "it holds these changes already"
    lines = [line.removeprefix("error:").strip() for line in said.splitlines() if line.startswith("error:")]
    return next((line for line in lines if not line.startswith("while searching")), _tail(said))


def _blob(folder: Path, path: str) -> str:
    """Return the blob of a file in the index."""
    return _git(folder, "rev-parse", "--verify", "--quiet", f":{path}").stdout.strip() or NO_BLOB


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
    ended = _git(folder, "commit", "--quiet", "--no-signoff", "--cleanup=whitespace", f"--message={message}")
    if ended.returncode != 0:
        said = _tail(ended.stderr + ended.stdout)
        raise HarnessError(f"git, or a hook of the checkout, refused the commit; the checkout is as it was: {said}")
