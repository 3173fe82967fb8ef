"""Copying a tree out of a checkout, out of the runner's own environment, or out of a commit of a repository."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import re
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from harness.core import files, git, room
from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError, UnreachableError
from harness.core.words import Exit

#: A checkout may name a program that git would start to learn what changed.
NO_MONITOR = ("-c", "core.fsmonitor=false")
#: Characters of a name in a message.
SHOWN = 80
#: A mirror ``NAME.git`` stands for the repository at such a URL.
REPOSITORY = re.compile(r"https://[\w.-]+(?::\d+)?/(?:[\w.-]+/)*(?P<name>[A-Za-z0-9][\w.-]*?)(?:\.git)?/?")
COMMIT = re.compile(r"[0-9a-f]{40}")
#: What git says of a repository that does not have a commit.
LACKS = "not our ref"
#: What git says of a host without an answer, and of one that answered.
NO_ACCESS, ANSWERED = "unable to access", "returned error"
SKIPPED = {".git", "__pycache__", ".venv", "node_modules"}


def _tracked(folder: Path) -> list[str] | None:
    """List the tracked files of a git checkout, or None where `folder` is none."""
    if not (folder / ".git").exists():
        return None
    listed = git.run([*NO_MONITOR, "ls-files", "-z", "--cached"], folder)
    if listed.returncode != 0:
        raise UnavailableError(f"path:{folder}: git ls-files failed: {git.last_line(listed.stderr)}")
    return [name for name in listed.stdout.split("\0") if name]


def _every_file(folder: Path) -> list[str]:
    found: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [str((Path(parent) / name).relative_to(folder)) for name in names if not name.endswith(".pyc")]
    return found


def copy_path(folder: Path, destination: Path) -> str:
    """Copy the tracked files of a checkout as they are in its work tree, or every file of a plain folder.

    Links are left out: a tree holds regular files. Returns what is known of its version: the commit, and
    whether files were modified.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 - false of a path that is too long
        raise HarnessError(f"path:{str(folder)[:SHOWN]}: no such folder. Next: --upstream path:CHECKOUT")
    tracked = _tracked(folder)
    for name in _every_file(folder) if tracked is None else tracked:
        source, target = folder / name, destination / name
        try:
            if source.is_file() and not source.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        except OSError as error:
            if error.errno in room.NO_ROOM:
                raise
            raise HarnessError(f"path:{folder}: {name[:SHOWN]} cannot be copied: {error.strerror}") from None
    if tracked is None:
        return "path"
    commit = git.run(["rev-parse", "HEAD"], folder).stdout.strip() or "no commit"
    status = git.run([*NO_MONITOR, "status", "--porcelain", "--untracked-files=no"], folder)
    return f"path at {commit}" + (" with modified files" if status.stdout.strip() else "")


def copy_installed(package: str, destination: Path) -> str:
    """Copy the files that an installed distribution recorded; an editable one is copied from its checkout.

    Returns its version.
    """
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise UnavailableError(
            f"--upstream installed: {package} is not installed. Next: pip install {package}"
        ) from None
    source = json.loads(distribution.read_text("direct_url.json") or "{}")
    if source.get("dir_info", {}).get("editable"):
        folder = Path(unquote(urlsplit(source["url"]).path))
        return f"{distribution.version}, editable {copy_path(folder, destination)}"
    for file in distribution.files or []:
        path, target = Path(str(distribution.locate_file(file))), destination / file
        if ".." not in file.parts and file.suffix != ".pyc" and path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return f"{distribution.version}, installed"


def mirror_of(mirrors: Path, url: str) -> Path | None:
    """Return the mirror that stands for the repository at `url`; None where there is none."""
    match = REPOSITORY.fullmatch(url)
    folder = mirrors / f"{match['name']}.git" if match else None
    return folder if folder is not None and folder.is_dir() else None


def take(mirrors: Path, url: str, commit: str, repository: Path) -> bool:
    """Bring one commit from the mirror of `url` into a bare repository, made where needed; say whether it was there.

    A commit's name is the hash of what it holds: one from a mirror is the same commit. A branch, a tag or fewer digits
    are the upstream's own to resolve. HarnessError is raised where the mirror cannot be read.
    """
    folder = mirror_of(mirrors, url)
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


def _mirror(cache: Cache, url: str, commit: str) -> Path:
    """Return a bare clone in the cache that has the commit."""
    mirror = cache.entry("git", files.key_of(url))

    def has() -> bool:
        asked = ["cat-file", "-e", f"{commit}^{{commit}}"]
        return mirror.is_dir() and git.run(asked, mirror, plain=True).returncode == 0

    if has() or (cache.mirrors is not None and take(cache.mirrors, url, commit, mirror) and has()):
        return mirror
    if cache.offline:
        raise UnavailableError(f"git commit {commit}: not in the cache, and --offline forbids to fetch it")
    cache.tell(f"fetching commit {commit}")
    mirror.mkdir(parents=True, exist_ok=True)
    git.run(["init", "--quiet", "--bare"], mirror, plain=True)
    shallow = git.run(["fetch", "--quiet", "--depth=1", "--no-tags", "--", url, commit], mirror)
    if shallow.returncode == 0 and has():
        return mirror
    whole = git.run(["fetch", "--quiet", "--", url, "+refs/*:refs/upstream/*"], mirror)
    if whole.returncode != 0:
        is_away = NO_ACCESS in whole.stderr and ANSWERED not in whole.stderr
        kind = UnreachableError if is_away else UnavailableError
        raise kind(f"git+...@{commit}: cannot be fetched: {git.last_line(whole.stderr)}")
    if not has():
        raise UnavailableError(f"git+...@{commit}: the repository has no such commit. Next: name all 40 digits")
    return mirror


def date_of(cache: Cache, url: str, commit: str) -> dt.date:
    """Return the day, in UTC, on which a commit of a repository was committed; it is fetched where it is not here."""
    with cache.lock(f"git-{files.key_of(url)}"):
        mirror = _mirror(cache, url, commit)
        seconds = git.run(["show", "--no-patch", "--format=%ct", commit], mirror, plain=True).stdout.strip()
    return dt.datetime.fromtimestamp(int(seconds), dt.UTC).date()


def copy_commit(cache: Cache, url: str, commit: str, destination: Path) -> str:
    """Lay the files of one commit into `destination`; links become small files that hold their target's name.

    Returns the full commit.
    """
    with cache.lock(f"git-{files.key_of(url)}"):
        mirror = _mirror(cache, url, commit)
        full = git.run(["rev-parse", "--verify", f"{commit}^{{commit}}"], mirror, plain=True).stdout.strip()
        places = {"GIT_INDEX_FILE": str(destination.parent / "index"), "GIT_WORK_TREE": str(destination)}
        read = git.run(["read-tree", full], mirror, places, plain=True)
        arguments = ["-c", "core.bare=false", "-c", "core.symlinks=false", "-c", "core.autocrlf=false"]
        written = git.run([*arguments, "checkout-index", "--all"], mirror, places, plain=True)
        (destination.parent / "index").unlink(missing_ok=True)
    for step in (read, written):
        if step.returncode != 0:
            raise UnavailableError(f"git commit {commit}: {git.last_line(step.stderr)}")
    return f"commit {full}"
