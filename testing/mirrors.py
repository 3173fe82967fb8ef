"""Repositories of the toy upstream, and mirrors of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from testing.histories import BASE, git

#: Where the toy packs' upstream would be, if it were anywhere.
URL = "https://example.org/toykernel"


def repository(folder: Path, files: dict[str, str]) -> str:
    """Make a repository of the toy upstream with these files besides, as one commit; return its hash."""
    shutil.copytree(BASE, folder)
    git(folder, "init", "-q", "-b", "main")
    return commit(folder, files)


def commit(folder: Path, files: dict[str, str]) -> str:
    """Write files into a repository and commit them; return the hash."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "a commit")
    return git(folder, "rev-parse", "HEAD")


def mirror(mirrors: Path, source: Path, commits: list[str], name: str = "toykernel", digits: int = 10) -> Path:
    """Make a shallow bare mirror of a repository that holds these commits, each as a branch ``at-COMMIT``."""
    folder = mirrors / f"{name}.git"
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "--bare")
    git(source, "config", "uploadpack.allowAnySHA1InWant", "true")
    for one in commits:
        git(folder, "fetch", "-q", "--depth=1", source.as_uri(), f"{one}:refs/heads/at-{one[:digits]}")
    return folder


def diff(source: Path, files: dict[str, str]) -> str:
    """Return the patch, with full index lines, that writes these files into a repository; leave that as it was."""
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    git(source, "add", "-A")
    text = git(source, "diff", "--cached", "--full-index")
    git(source, "reset", "-q", "--hard")
    return f"{text}\n"
