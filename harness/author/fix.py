"""The patch of a new pack: upstream's own fix on the pinned release."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from harness.author.release import Release
from harness.core import git
from harness.core.errors import HarnessError, UnavailableError
from harness.upstream import patch

COMMIT = re.compile(r"[0-9a-f]{7,40}")
NO_SOURCE = re.compile(r"(?:^|/)(?:tests?|docs?|\.github|benchmarks?|examples?)/|\.(?:md|rst|txt|ipynb)$")


def refuse(wanted: str) -> None:
    """Raise HarnessError where ``--fix-commit`` names neither a file nor a commit."""
    if wanted and not Path(wanted).is_file() and not COMMIT.fullmatch(wanted):
        raise HarnessError(
            f"--fix-commit {wanted!r}: neither a file nor a commit. Next: save the patch, and name its file"
        )


def on_release(wanted: str, release: Release) -> tuple[Release, str]:
    """Return the source part of upstream's fix as a patch of a release, and the release with the root of its paths.

    `wanted` is a patch's file, or a commit of upstream's repository. Of a wheel, the fix tells in which folder of the
    repository its modules lie. HarnessError is raised where the fix cannot be had, names no source, or does not apply.
    """
    with tempfile.TemporaryDirectory(prefix="fix-") as text:
        scratch = Path(text)
        git.run(["init", "--quiet"], scratch, plain=True)
        file = Path(wanted)
        given = file.read_text("utf-8", "replace") if file.is_file() else _commit(wanted, release, scratch)
        listed = [one.path for one in patch.parse(given)]
        source = [path for path in listed if not NO_SOURCE.search(path)]
        if not source:
            raise HarnessError("the fix changes no source file. Next: write fix.patch by hand")
        top = f"{release.upstream.modules[0]}/"
        root = next((path.partition(top)[0] for path in source if top in path), "").rstrip("/")
        if release.upstream.is_wheel:
            release = replace(release, upstream=replace(release.upstream, source_root=root))
        for path in source:
            file = release.tree.folder / (path.removeprefix(f"{root}/") if release.upstream.is_wheel else path)
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            if file.is_file():
                shutil.copyfile(file, scratch / path)
        (scratch / ".git/given.patch").write_text(given, encoding="utf-8")
        git.run(["add", "--all", "--force"], scratch, plain=True)
        excluded = [f"--exclude={path}" for path in listed if path not in source]
        applied = git.run(["apply", *excluded, ".git/given.patch"], scratch, plain=True)
        if applied.returncode != 0:
            why = git.last_line(applied.stderr).removeprefix("error: ")
            raise HarnessError(f"the fix does not apply to the release: {why}. Next: adapt it, and name its file")
        git.run(["add", "--all", "--force", "--intent-to-add"], scratch, plain=True)
        shown = git.run(["diff", "--full-index", "--no-renames", "--no-color", "-U3"], scratch, plain=True)
        return release, shown.stdout


def _commit(wanted: str, release: Release, scratch: Path) -> str:
    repository = release.upstream.repository
    fetched = git.run(["fetch", "--quiet", "--depth=2", "--no-tags", "--", repository, wanted], scratch)
    shown = git.run(["diff", "--full-index", "FETCH_HEAD^", "FETCH_HEAD"], scratch, plain=True)
    if fetched.returncode or shown.returncode:
        why = git.last_line(fetched.stderr or shown.stderr)
        raise UnavailableError(
            f"--fix-commit {wanted}: {why}. Next: save {repository}/commit/{wanted}.patch, and name that file"
        )
    return shown.stdout
