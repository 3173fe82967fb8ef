"""The commit of a release's tag, as upstream's repository names it."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.utils import canonicalize_name

from harness.core import git

#: A remote that asks for a password or does not answer is none.
SECONDS = {"GIT_HTTP_LOW_SPEED_LIMIT": "1", "GIT_HTTP_LOW_SPEED_TIME": "20"}


def commit_of(repository: str, package: str, version: str, folder: Path) -> str:
    """Return the commit that a release's tag names in the repository at a URL; empty where no such tag can be read.

    Some repositories name the package in the tag. `folder` is any, to run git in.
    """
    if not repository:
        return ""
    listed = git.run(["ls-remote", "--tags", "--", repository], folder, SECONDS)
    pairs = (line.partition("\t") for line in listed.stdout.splitlines())
    tags = {name.removeprefix("refs/tags/"): commit for commit, _, name in pairs}
    names = (f"{before}{version}" for before in ("v", "", "release-", f"{package}-", f"{package}-v", "core_v", "core_"))
    known = {canonicalize_name(tag): tag for tag in tags}
    for name in names:
        tag = known.get(canonicalize_name(name))
        found = tags.get(f"{tag}^{{}}", tags.get(tag or "", ""))  # what an annotated tag points at comes first
        if tag and re.fullmatch(r"[0-9a-f]{40}", found):
            return found
    return ""
