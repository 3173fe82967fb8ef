"""Copying a tree out of a checkout, out of the runner's own environment, or out of a commit of a repository."""

import datetime as dt
import importlib.metadata
import json
import os
import re
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from harness.core import Cache, Exit, files, git
from harness.core.errors import HarnessError, UnavailableError, UnreachableError

#: A checkout's own configuration may name a program that git would start to find changed files.
NO_MONITOR = ("-c", "core.fsmonitor=false")
#: Characters of a name in a message.
SHOWN = 80
#: The URL of a repository for which a mirror ``NAME.git`` may stand.
REPOSITORY = re.compile(r"https://[\w.-]+(?::\d+)?/(?:[\w.-]+/)*(?P<name>[A-Za-z0-9][\w.-]*?)(?:\.git)?/?")
COMMIT = re.compile(r"[0-9a-f]{40}")
#: Git's message about a repository that lacks a commit.
LACKS = "not our ref"
#: Git's messages about a host that cannot be reached, and about one that answered.
NO_ACCESS, ANSWERED = "unable to access", "returned error"
SHALLOW = ("fetch", "--quiet", "--depth=1", "--no-tags")
SKIPPED = {".git", "__pycache__", ".venv", "node_modules"}


def _tracked(folder: Path) -> list[str] | None:
    """List the tracked files of a git checkout; None if `folder` is not one."""
    if not (folder / ".git").exists():
        return None
    listing = git.run([*NO_MONITOR, "ls-files", "-z", "--cached"], folder)
    if listing.returncode != 0:
        raise UnavailableError(f"path:{folder}: git ls-files failed: {git.last_line(listing.stderr)}")
    return [name for name in listing.stdout.split("\0") if name]


def copy_path(folder: Path, destination: Path) -> str:
    """Copy the tracked files of a checkout as they are in its work tree, or every file of a plain folder.

    Links are left out: a tree holds regular files. Return the version: the commit and whether files were modified, or
    ``path`` for a plain folder.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 - false of a path that is too long
        raise HarnessError(f"path:{str(folder)[:SHOWN]}: no such folder. Next: path:CHECKOUT")
    tracked = _tracked(folder)
    destination.mkdir()
    try:
        walked = (path for path, _ in files.walk(folder) if SKIPPED.isdisjoint(path.split("/")))
        names = tracked if tracked is not None else [path for path in walked if not path.endswith(".pyc")]
        for path in names:  # up to the first that cannot be copied: `cp` would go on through /proc
            source, target = folder / path, destination / path
            if source.is_file() and not source.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    except OSError as error:
        if error.errno in files.NO_ROOM:
            raise
        name = str(error.filename)[-SHOWN:]
        raise HarnessError(f"path:{folder}: {name} cannot be copied: {error.strerror}") from None
    if tracked is None:
        return "path"
    commit = git.run(["rev-parse", "HEAD"], folder).stdout.strip() or "no commit"
    status = git.run([*NO_MONITOR, "status", "--porcelain", "--untracked-files=no"], folder)
    return f"path at {commit}" + (" with modified files" if status.stdout.strip() else "")


def copy_installed(package: str, destination: Path) -> str:
    """Copy the files of an installed distribution, or the checkout of an editable one; return its version."""
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
    paths = [str(file) for file in distribution.files or [] if ".." not in file.parts and file.suffix != ".pyc"]
    site = Path(str(distribution.locate_file("")))
    files.copy(site, [path for path in paths if (site / path).is_file()], destination)
    return f"{distribution.version}, installed"


def find_mirror(mirrors: Path, url: str) -> Path | None:
    """Return the mirror that stands for the repository at `url`; None if there is none."""
    match = REPOSITORY.fullmatch(url)
    folder = mirrors / f"{match['name']}.git" if match else None
    return folder if folder is not None and folder.is_dir() else None


def _init(repository: Path) -> None:
    repository.mkdir(parents=True, exist_ok=True)
    git.run(["init", "--quiet", "--bare"], repository, plain=True)


def fetch_from_mirror(mirrors: Path, url: str, commit: str, repository: Path) -> bool:
    """Fetch one commit from the mirror of `url` into a bare repository; return whether the mirror has it.

    A commit's name is the hash of its content, so that a mirror has the same commit. A branch, a tag or fewer digits
    are left to the upstream to resolve. HarnessError: the mirror cannot be read.
    """
    folder = find_mirror(mirrors, url)
    if folder is None or not COMMIT.fullmatch(commit):
        return False
    _init(repository)
    fetched = git.run([*SHALLOW, "--update-shallow", "--", folder.absolute().as_uri(), commit], repository)
    if fetched.returncode != 0 and LACKS not in fetched.stderr:
        message = f"the mirror {folder.name} is refused: {git.last_line(fetched.stderr)}. Next: without --mirrors"
        raise HarnessError(message, status=Exit.DEVIATES)
    return fetched.returncode == 0


def _clone(cache: Cache, url: str, commit: str) -> Path:
    clone = cache.entry("git", files.key_of(url))

    def has_commit() -> bool:
        arguments = ["cat-file", "-e", f"{commit}^{{commit}}"]
        return clone.is_dir() and git.run(arguments, clone, plain=True).returncode == 0

    if has_commit() or (cache.mirrors and fetch_from_mirror(cache.mirrors, url, commit, clone) and has_commit()):
        return clone
    if cache.offline:
        raise UnavailableError(f"git commit {commit}: not in the cache, and --offline forbids to fetch it")
    cache.tell(f"fetching commit {commit}")
    _init(clone)
    if git.run([*SHALLOW, "--", url, commit], clone).returncode == 0 and has_commit():
        return clone
    fetched = git.run(["fetch", "--quiet", "--", url, "+refs/*:refs/upstream/*"], clone)
    if fetched.returncode != 0:
        message = f"commit {commit[:12]} cannot be fetched: {git.last_line(fetched.stderr)}"
        if NO_ACCESS in fetched.stderr and ANSWERED not in fetched.stderr:
            raise UnreachableError(f"{message}. Next: --mirrors DIR (CONTRIBUTING.md, Commits without network)")
        raise UnavailableError(message)
    if not has_commit():
        raise UnavailableError(f"commit {commit}: the repository has no such commit. Next: name all 40 digits")
    return clone


def commit_date(cache: Cache, url: str, commit: str) -> dt.date:
    """Return the day, in UTC, of a commit, which is fetched if the cache lacks it."""
    with cache.lock(f"git-{files.key_of(url)}"):
        clone = _clone(cache, url, commit)
        seconds = git.run(["show", "--no-patch", "--format=%ct", commit], clone, plain=True).stdout.strip()
    return dt.datetime.fromtimestamp(int(seconds), dt.UTC).date()


def full_commit(cache: Cache, url: str, commit: str) -> str:
    """Return the 40 digits of a commit, which is fetched if the cache lacks it."""
    with cache.lock(f"git-{files.key_of(url)}"):
        clone = _clone(cache, url, commit)
        return git.run(["rev-parse", "--verify", f"{commit}^{{commit}}"], clone, plain=True).stdout.strip()


def copy_commit(cache: Cache, url: str, commit: str, destination: Path) -> None:
    """Lay the files of one commit into a new folder; a link becomes a small file that holds the name of its target."""
    destination.mkdir()
    variables = {"GIT_INDEX_FILE": str(destination.parent / "index"), "GIT_WORK_TREE": str(destination)}
    settings = ["-c", "core.bare=false", "-c", "core.symlinks=false", "-c", "core.autocrlf=false"]
    with cache.lock(f"git-{files.key_of(url)}"):
        clone = _clone(cache, url, commit)
        for arguments in (["read-tree", commit], [*settings, "checkout-index", "--all"]):
            step = git.run(arguments, clone, variables, plain=True)
            if step.returncode != 0:
                raise UnavailableError(f"git commit {commit}: {git.last_line(step.stderr)}")
    (destination.parent / "index").unlink(missing_ok=True)
