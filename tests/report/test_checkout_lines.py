"""The command lines that lay out a release which no commit identifies: they are run as they stand in the report."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from harness.author import draft
from harness.pack.model import Upstream
from harness.report import checkout_lines

FILES = {
    "toy-1.0.tar.gz": "toy-1.0/src/toy.py",
    "toy-1.0.zip": "toy-1.0/src/toy.py",
    "toy-1.0-py3-none-any.whl": "toy.py",
}
PATCH = """diff --git a/src/toy.py b/src/toy.py
--- a/src/toy.py
+++ b/src/toy.py
@@ -1 +1 @@
-value = 1
+value = 2
"""


def _release(folder: Path, file: str) -> Upstream:
    """Build a release of one module; return what pack.toml states of it."""
    (folder / "toy.py").write_text("value = 1\n")
    if file.endswith(".tar.gz"):
        with tarfile.open(folder / file, "w:gz") as archive:
            archive.add(folder / "toy.py", FILES[file])
    else:
        with zipfile.ZipFile(folder / file, "w") as zipped:
            zipped.write(folder / "toy.py", FILES[file])
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    return Upstream("toy", "https://example.org/toy", "", "MIT", ("toy",), "1.0", file, digest, source_root="src")


def _ended(lines: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-ec", "\n".join(lines)]
    return subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("file", [*FILES])
def test_the_release_is_laid_out_and_patched(tmp_path: Path, file: str) -> None:
    upstream = _release(tmp_path, file)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)  # the report's reader is in a clone
    (tmp_path / "fix.patch").write_text(PATCH)
    shown = 'cat "$PYTHONPATH/toy.py"'
    patched = f'{checkout_lines.applied(upstream)} "$PWD/fix.patch"'
    lines = [*checkout_lines.laid_out(upstream), shown, patched, shown]
    ended = _ended(lines, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, f"{file}: OK\nvalue = 1\nvalue = 2\n"), ended.stderr


def test_another_file_of_that_name_is_refused(tmp_path: Path) -> None:
    upstream = _release(tmp_path, "toy-1.0.zip")
    shutil.copy(tmp_path / "toy.py", tmp_path / upstream.file)
    ended = _ended(checkout_lines.laid_out(upstream), tmp_path)
    assert f"{upstream.file}: FAILED" in ended.stdout
    assert not (tmp_path / "checkout").exists()


def test_only_a_url_that_anybody_can_reach_is_kept() -> None:
    public = "https://files.pythonhosted.org/packages/ab/toy-1.0.zip"
    assert draft.public_url(["http://user:word@mirror.example/toy-1.0.zip", f"{public}#sha256=00"]) == public
    assert not draft.public_url(["https://mirror.example/toy-1.0.zip", "https://files.pythonhosted.org.example/x"])
    upstream = Upstream("toy", "", "", "MIT", ("toy",), "1.0", "toy-1.0.zip", "0" * 64, url=public)
    assert checkout_lines.laid_out(upstream)[0] == f"curl -sSLO {public}"
