"""One commit in the user's checkout: a pack's patch and its test, ready to be signed and pushed by the user.

The checkout and the commit are the user's: only here git runs with the user's configuration, identity and hooks.
Nothing is pushed, nothing is signed off.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.core import HarnessError, git
from harness.pack import Pack, patch_text
from harness.report import report
from harness.upstream import patch

#: Variables that would make git work outside the checkout.
ELSEWHERE = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE"}
#: Options by which a patch applies byte for byte, whatever the user's configuration says about whitespace.
EXACTLY = ("-c", "apply.whitespace=nowarn", "-c", "apply.ignoreWhitespace=no")


def _run_git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in a checkout, with the user's environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    environment["LC_ALL"] = "C.UTF-8"  # an offset is read from its messages
    return git.start([*arguments], folder, environment)


def _git_output(folder: Path, *arguments: str) -> str:
    """Return what git prints on standard output, or raise HarnessError with its error."""
    completed = _run_git(folder, *arguments)
    if completed.returncode != 0:
        raise HarnessError(f"git {arguments[0]}: {_last_lines(completed.stderr or completed.stdout)}")
    return completed.stdout.rstrip("\n")


def _last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-12:]) or "it said nothing"


def _commit_message(text: str) -> str:
    """Return the commit message of a patch, which stands before its ``---``."""
    head = re.split(r"(?m)^(?:---$|diff --git )", text, maxsplit=1)[0].strip()
    if not head.startswith("Subject: "):
        raise HarnessError("the patch does not open with 'Subject: '. Next: runner.py check")
    subject, _, body = head.removeprefix("Subject: ").partition("\n\n")
    return f"{' '.join(subject.split())}\n\n{body.strip()}".rstrip("\n") + "\n"


def make(pack: Pack, folder: Path) -> list[str]:
    """Make a branch with one commit in a checkout; return lines that say so, and what is left to the user.

    The branch is named after the slug of the pack. After an error the checkout is as it was.
    """
    fix = pack.ask_patch or pack.patch
    if not pack.definition.has_patch or not fix.exists():
        raise HarnessError(f"{pack.name}: it has no patch. Next: runner.py report {pack.name}")
    template = pack.report_template
    if template.exists() and report.QUOTED.search(template.read_text(encoding="utf-8")):
        raise HarnessError(
            f"{pack.name}: the text to file has another patch, or none. Next: runner.py report {pack.name}"
        )
    branch = "fix-" + pack.name.partition("_")[2].replace("_", "-")
    folder, message = folder.resolve(), _commit_message(fix.read_text(encoding="utf-8"))
    _require_clean(folder)
    with _new_branch(folder, branch):
        for path in filter(Path.exists, (fix, pack.upstream_test_patch)):
            _apply(folder, path)
        options = ("--quiet", "--no-signoff", "--cleanup=whitespace", f"--message={message}")
        completed = _run_git(folder, "commit", *options)  # with the user's own identity and hooks
        if completed.returncode != 0:
            output = _last_lines(completed.stderr + completed.stdout)
            raise HarnessError(
                f"git, or a hook of the checkout, refused the commit; the checkout is as it was: {output}"
            )
    form = f"--format=branch {branch}, commit %h by %an <%ae>%n%s"
    return [
        _git_output(folder, "show", "--stat", "--abbrev=12", form, "HEAD"),
        f"left to you, when you have read the commit: git push YOUR-FORK {branch}, and gh pr create --draft --fill",
    ]


def _require_clean(folder: Path) -> None:
    """Refuse a folder that is no clean checkout; in a folder below the top git leaves out files silently."""
    top = _run_git(folder, "rev-parse", "--show-toplevel")
    if top.returncode != 0 or Path(top.stdout.rstrip("\n")).resolve() != folder:
        raise HarnessError(f"--pr {folder}: not the top of a git checkout. Next: git clone the upstream")
    changes = _git_output(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=none")
    if changes:
        raise HarnessError(f"--pr {folder}: it has changes ({changes.splitlines()[0][3:]}). Next: git stash")


def _apply(folder: Path, path: Path) -> None:
    """Apply a patch without offset or fuzz, and compare the files with its index lines."""
    files = patch_text.parse(path.read_text(encoding="utf-8"))
    verifiable = [file for file in files if file.after and _blob(folder, file.path) == file.before]
    completed = _run_git(folder, *EXACTLY, "apply", "--verbose", "--index", str(path.resolve()))
    offsets = [line.strip() for line in completed.stderr.splitlines() if "offset" in line or "fuzz" in line]
    if completed.returncode != 0 or offsets:
        reason = offsets[0] if offsets else patch.refusal(folder, path.resolve(), [], completed.stderr)
        raise HarnessError(
            f"{path.name} does not fit the checkout's commit exactly: {reason}. "
            "Next: git switch --detach to the commit that the pack's report names"
        )
    for file in verifiable:
        if _blob(folder, file.path) != file.after:
            raise HarnessError(f"{file.path} is not what the patch's index line says after applying it")


def _blob(folder: Path, path: str) -> str:
    """Return the hash of a file's blob in the index."""
    return _run_git(folder, "rev-parse", "--verify", "--quiet", f":{path}").stdout.strip() or patch_text.NO_BLOB


@contextmanager
def _new_branch(folder: Path, branch: str) -> Iterator[None]:
    """Make a branch and stay on it; after an error, leave the checkout as it was."""
    commit = _git_output(folder, "rev-parse", "HEAD")
    back = _git_output(folder, "branch", "--show-current") or commit
    _git_output(folder, "switch", "--quiet", "--create", branch)
    try:
        yield
    except BaseException:
        _run_git(folder, "reset", "--quiet", "--hard", commit)
        _run_git(folder, "checkout", "--quiet", back, "--")
        _run_git(folder, "branch", "--quiet", "-D", branch)
        raise
