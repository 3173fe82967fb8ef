"""Mirrors: bare repositories in a folder of the user's own that stand for upstreams' repositories.

``NAME.git`` stands for ``https://HOST/.../NAME`` (or ``NAME.git``), and holds each of its commits as a branch
``at-COMMIT``, by as many of the commit's first digits as it likes. A commit's name is the hash of what it holds: one
from a mirror is the same commit. Branches and tags of the upstream itself are never looked up here.
"""

from __future__ import annotations

import re
from pathlib import Path

from harness.core import git
from harness.core.errors import HarnessError
from harness.core.words import Exit

URL = re.compile(r"https://[\w.-]+(?::\d+)?/(?:[\w.-]+/)*(?P<name>[A-Za-z0-9][\w.-]*?)(?:\.git)?/?")
COMMIT = re.compile(r"[0-9a-f]{40}")
BRANCH = re.compile(r"refs/heads/at-(?P<digits>[0-9a-f]{7,40})")


def folder_of(mirrors: Path, url: str) -> Path | None:
    """Return the mirror that stands for the repository at `url`; None where there is none."""
    match = URL.fullmatch(url)
    folder = mirrors / f"{match['name']}.git" if match else None
    return folder if folder is not None and folder.is_dir() else None


def take(mirrors: Path, url: str, commit: str, repository: Path) -> bool:
    """Bring one commit from the mirror of `url` into a bare repository; say whether the mirror has it.

    Args:
        mirrors: the folder of the mirrors.
        url: of the upstream's repository.
        commit: in 40 digits; a branch, a tag or fewer digits are the upstream's own to resolve.
        repository: where it goes, made where it is not there.

    Raises:
        HarnessError: the mirror cannot be read, or holds another commit under this one's name.

    """
    folder = folder_of(mirrors, url)
    if folder is None or not COMMIT.fullmatch(commit):
        return False
    for branch, held in _branches(folder).items():
        if commit.startswith(branch.removeprefix("refs/heads/at-")):
            if held != commit:
                raise _refused(folder, f"its branch {branch.removeprefix('refs/heads/')} holds the commit {held}")
            _fetch(folder, branch, commit, repository)
            return True
    return False


def _branches(folder: Path) -> dict[str, str]:
    """Map the branches of a mirror that are named for a commit to the commit that each holds."""
    listed = git.run(["for-each-ref", "--format=%(refname) %(objectname)", "refs/heads/"], folder, _own(folder))
    if listed.returncode != 0:
        raise _refused(folder, git.last_line(listed.stderr))
    pairs = (line.rpartition(" ") for line in listed.stdout.splitlines())
    return {branch: held for branch, _, held in pairs if BRANCH.fullmatch(branch)}


def _own(folder: Path) -> dict[str, str]:
    """Look for the repository in `folder` itself, never above it."""
    return {"GIT_DIR": str(folder)}


def _fetch(folder: Path, branch: str, commit: str, repository: Path) -> None:
    repository.mkdir(parents=True, exist_ok=True)
    git.run(["init", "--quiet", "--bare"], repository)
    arguments = ["fetch", "--quiet", "--depth=1", "--no-tags", "--update-shallow"]
    fetched = git.run([*arguments, "--", folder.absolute().as_uri(), branch], repository)
    if fetched.returncode != 0:
        raise _refused(folder, f"the commit {commit} cannot be read: {git.last_line(fetched.stderr)}")
    brought = git.run(["rev-parse", "--verify", "--quiet", "FETCH_HEAD^{commit}"], repository).stdout.strip()
    if brought != commit:
        raise _refused(folder, f"it gave the commit {brought or 'of no name'} for {commit}")


def _refused(folder: Path, why: str) -> HarnessError:
    return HarnessError(f"the mirror {folder.name} is refused: {why}. Next: without --mirrors", status=Exit.DEVIATES)
