"""A toy release with the metadata that a real one has, wheels that it requires, and its repository."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testing import toys
from testing.package_index import Shelf, served

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
Requires-Dist: halfworld
"""
#: The package's __init__ imports what nobody has; its module needs toyhelper alone.
INIT = "import halfworld\nfrom toykernel import other\n"


def sdist(folder: Path, metadata: str = METADATA, init: str = INIT) -> Path:
    """Build the sdist of a toy release whose parent package imports more than its module needs."""
    source = Path(shutil.copytree(toys.RESOURCES / "upstream/toykernel-1.0", folder / "toykernel-1.0"))
    (source / "PKG-INFO").write_text(metadata)
    (source / "src/toykernel/__init__.py").write_text(init)
    scale = source / "src/toykernel/scale.py"
    scale.write_text(f"{scale.read_text()}\n\nimport toyhelper\n")
    toys.zip_folder(source, folder / "toykernel-1.0.zip")
    return folder / "toykernel-1.0.zip"


def helper(folder: Path, version: str, requires: str = "") -> Path:
    """Build a wheel that the toy release requires."""
    info = f"toyhelper-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: toyhelper\nVersion: {version}\n{requires}"
    members = {"toyhelper/__init__.py": "", f"{info}/METADATA": metadata, f"{info}/RECORD": ""}
    members |= {f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: toys\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    return toys.wheel(folder, f"toyhelper-{version}-py3-none-any.whl", members)[0]


def repository(folder: Path) -> dict[str, str]:
    """Build the release's repository with its tag and, after it, the fix; return the variables that lead there."""
    here = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org"}
    here |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org", "GIT_CONFIG_NOSYSTEM": "1"}

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=source, env=os.environ | here, check=True, capture_output=True)

    source = Path(shutil.copytree(folder / "toykernel-1.0", folder / "repository"))
    git("init", "--quiet", "--initial-branch=main")
    git("add", ".")
    git("commit", "--quiet", "-m", "The release")
    git("tag", "-a", "v1.0", "-m", "1.0")
    module = source / "src/toykernel/scale.py"
    wrong, right = "value * weights[0] for value in values", "v * w for v, w in zip(values, weights)"
    module.write_text(module.read_text().replace(wrong, right))
    (source / "README.md").write_text("What is no source.\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "The fix")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    redirect = {"GIT_CONFIG_KEY_0": f"url.{source.as_uri()}.insteadOf", "GIT_CONFIG_VALUE_0": REPOSITORY}
    return {"GIT_CONFIG_COUNT": "1", **redirect}


def commit(folder: Path, name: str) -> str:
    """Return the commit that a name of the toy repository stands for."""
    asked = ["git", "rev-parse", f"{name}^{{commit}}"]
    return subprocess.run(asked, cwd=folder / "repository", capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def index(sdists: list[Path], helpers: list[Path]) -> Iterator[dict[str, str]]:
    """Serve a toy release and its wheels; yield the variables that make it pip's only index."""
    shelf = Shelf(
        {
            "toykernel": {path.name: path.read_bytes() for path in sdists},
            "toyhelper": {path.name: path.read_bytes() for path in helpers},
        }
    )
    with served(shelf) as url:
        own = {"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
        yield own | {"PIP_RETRIES": "0"}
