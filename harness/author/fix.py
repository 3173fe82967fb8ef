"""Patches for a new pack: upstream's own fix on the pinned release, and a wrong fix to begin with."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from harness.core import git
from harness.core.errors import HarnessError, UnavailableError
from harness.pack.model import Upstream
from harness.upstream import patch
from harness.upstream.tree import Tree

COMMIT = re.compile(r"[0-9a-f]{7,40}")
NO_SOURCE = re.compile(r"(?:^|/)(?:tests?|docs?|\.github|benchmarks?|examples?)/|\.(?:md|rst|txt|ipynb)$")
WRONG_FIX = "# A wrong fix: it changes nothing that runs."


def refuse(wanted: str | None) -> None:
    """Raise HarnessError where ``--fix-commit`` names neither a file nor a commit."""
    if wanted is not None and not Path(wanted).expanduser().is_file() and not COMMIT.fullmatch(wanted):
        raise HarnessError(
            f"--fix-commit {wanted!r}: neither a file nor a commit. Next: save the patch, and name its file"
        )


def diff_of(wanted: str, repository: str, scratch: Path) -> str:
    """Return the diff that ``--fix-commit`` names: a file with a patch, or a commit of the upstream's repository.

    Raises:
        HarnessError: the release links no repository.
        UnavailableError: the repository does not give the commit.

    """
    path = Path(wanted).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    if not repository:
        raise HarnessError("--fix-commit: the release links no repository. Next: --repository URL, or a patch's file")
    git.run(["init", "--quiet", "--bare"], scratch)
    fetched = git.run(["fetch", "--quiet", "--depth=2", "--no-tags", "--", repository, wanted], scratch)
    shown = git.run(["diff", "--full-index", "FETCH_HEAD^", "FETCH_HEAD"], scratch, plain=True)
    if fetched.returncode or shown.returncode:
        why = git.last_line(fetched.stderr or shown.stderr)
        raise UnavailableError(
            f"--fix-commit {wanted}: {why}. Next: save {repository}/commit/{wanted}.patch, and name that file"
        )
    return shown.stdout


def on_release(tree: Tree, upstream: Upstream, diff: str, scratch: Path) -> str:
    """Return the source part of a diff as a patch made on a release, with whole blob hashes and no offset.

    Raises:
        HarnessError: it names no source, or does not apply.

    """
    listed = [one.path for one in patch.parse(diff) if not NO_SOURCE.search(one.path)]
    left_out = [one.path for one in patch.parse(diff) if one.path not in listed]
    if not listed:
        raise HarnessError("the fix changes no source file. Next: write fix.patch by hand")
    (scratch / "given.patch").write_text(diff, encoding="utf-8")
    here = {path: tree.path_here(path, upstream.source_root) for path in listed}
    content = _copied(tree, list(here.values()), scratch)
    strip = 1 + (len(upstream.source_root.split("/")) if upstream.source_root and not tree.source_root else 0)
    excluded = [f"--exclude={path}" for path in left_out]
    arguments = ["apply", f"-p{strip}", *excluded, str(scratch / "given.patch")]
    applied = git.run(arguments, content, plain=True)
    if applied.returncode != 0:
        why = git.last_line(applied.stderr).removeprefix("error: ")
        raise HarnessError(
            f"the fix does not apply to {upstream.package} {upstream.version}: {why}. Next: adapt it by hand"
        )
    return _diff(content, tree, upstream)


def wrong_fix(tree: Tree, upstream: Upstream, file: str, scratch: Path) -> str:
    """Return a patch that adds a comment to a file of the repository: the first mutant of a new pack."""
    here = tree.path_here(file, upstream.source_root)
    content = _copied(tree, [here], scratch)
    path = content / here
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    ended = text if not text or text.endswith("\n") else f"{text}\n"
    path.write_text(f"{ended}{WRONG_FIX}\n", encoding="utf-8", errors="surrogateescape")
    return _diff(content, tree, upstream)


def _copied(tree: Tree, paths: list[str], scratch: Path) -> Path:
    """Copy files of a tree into a repository whose index holds them as they are."""
    content = scratch / "content"
    content.mkdir()
    git.run(["init", "--quiet"], content, plain=True)
    for path in paths:
        if (tree.folder / path).is_file():
            (content / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree.folder / path, content / path)
    git.run(["add", "--all", "--force"], content, plain=True)
    return content


def _diff(content: Path, tree: Tree, upstream: Upstream) -> str:
    git.run(["add", "--all", "--force", "--intent-to-add"], content, plain=True)
    before = f"{upstream.source_root}/" if upstream.source_root and not tree.source_root else ""
    prefixes = [f"--src-prefix=a/{before}", f"--dst-prefix=b/{before}"]
    shown = git.run(["diff", "--full-index", "--no-renames", "--no-color", "-U3", *prefixes], content, plain=True)
    return shown.stdout
