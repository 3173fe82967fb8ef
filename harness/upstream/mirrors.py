"""Mirrors: bare repositories in a folder of the user's own that stand for upstreams' repositories.

``NAME.git`` stands for ``https://HOST/.../NAME`` (or ``NAME.git``). A commit's name is the hash of what it holds: one
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
#: What git says of a repository that does not have a commit.
LACKS = "not our ref"


def folder_of(mirrors: Path, url: str) -> Path | None:
    """Return the mirror that stands for the repository at `url`; None where there is none."""
    match = URL.fullmatch(url)
    folder = mirrors / f"{match['name']}.git" if match else None
    return folder if folder is not None and folder.is_dir() else None


def take(mirrors: Path, url: str, commit: str, repository: Path) -> bool:
    """Bring one commit from the mirror of `url` into a bare repository, made where needed; say whether it was there.

    A commit has 40 digits: a branch, a tag or fewer digits are the upstream's own to resolve. HarnessError is raised
    where the mirror cannot be read.
    """
    folder = folder_of(mirrors, url)
    if folder is None or not COMMIT.fullmatch(commit):
        return False
    repository.mkdir(parents=True, exist_ok=True)
    git.run(["init", "--quiet", "--bare"], repository)
    arguments = ["fetch", "--quiet", "--depth=1", "--no-tags", "--update-shallow"]
    fetched = git.run([*arguments, "--", folder.absolute().as_uri(), commit], repository)
    if fetched.returncode != 0 and LACKS not in fetched.stderr:
        why = git.last_line(fetched.stderr)
        raise HarnessError(f"the mirror {folder.name} is refused: {why}. Next: without --mirrors", status=Exit.DEVIATES)
    return fetched.returncode == 0
