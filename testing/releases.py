"""A toy release with the metadata that a real one has, and its repository."""

from __future__ import annotations

import shutil
from pathlib import Path

from testing import histories, toys
from testing.histories import git

REPOSITORY = "https://github.com/example/toykernel"
METADATA = f"""Metadata-Version: 2.4
Name: toykernel
Version: 1.0
License-Expression: Apache-2.0
Project-URL: Homepage, https://example.org/
Project-URL: Source, {REPOSITORY}.git
Requires-Python: >=3.9
Requires-Dist: toyhelper>=1.0
Requires-Dist: torch>=2
Requires-Dist: toyextra; extra == 'more'
"""


def sdist(folder: Path) -> Path:
    """Build the sdist of a toy release whose module needs toyhelper."""
    source = Path(shutil.copytree(histories.BASE, folder / "toykernel-1.0"))
    (source / "PKG-INFO").write_text(METADATA)
    (source / "src/toykernel/__init__.py").write_text("")
    with (source / "src/toykernel/scale.py").open("a") as scale:
        scale.write("\n\nimport toyhelper\n")
    toys.zip_folder(source, folder / "toykernel-1.0.zip")
    return folder / "toykernel-1.0.zip"


def repository(folder: Path) -> dict[str, str]:
    """Build the release's repository with its tag and, after it, the fix; return the variables that lead there."""
    source = Path(shutil.copytree(folder / "toykernel-1.0", folder / "repository"))
    git(source, "init", "--quiet", "--initial-branch=main")
    git(source, "add", ".")
    git(source, "commit", "--quiet", "-m", "The release")
    git(source, "tag", "-a", "v1.0", "-m", "1.0")
    toys.replace(source / "src/toykernel/scale.py", histories.WRONG_LINE, histories.RIGHT_LINE)
    git(source, "add", ".")
    git(source, "commit", "--quiet", "-m", "The fix")
    return histories.redirected(REPOSITORY, source)
