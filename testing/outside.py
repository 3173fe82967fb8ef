"""What upstream says, and what it leaves behind: text that acts on whoever reads it, and files that end a runner."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

from harness.core.words import Exit
from testing import toys, workbench
from testing.workbench import Workbench

SOUND, OTHER = "01_confirmed", "02_other"
#: Before this line a script's own values are laid; what is planted stands there.
VALUES = "values, weights ="
#: Longer than Python's recursion goes, and shorter than a path may be.
DEEP = 1500
#: Folders of a lane, by the variable that names them to it.
FOLDERS = ("HOME", "TMPDIR", "TRITON_CACHE_DIR")


def _bench(folder: Path, planted: str) -> Workbench:
    """Build a workbench with a sound pack, and one whose script does more."""
    bench = workbench.empty(folder)
    toys.replace(bench.lay(SOUND) / "reproduce.py", VALUES, f"{planted}\n{VALUES}")
    bench.lay(SOUND, OTHER)
    return bench


def nests(folder: Path, variable: str) -> None:
    """Nest folders in a folder of the lane: the packs are judged, now and afterwards, and nothing of it is left."""
    folders = f"for _ in range({DEEP}):\n    os.mkdir('d')\n    os.chdir('d')"
    there = f"import os\nhere = os.environ[{variable!r}]\nos.makedirs(here, exist_ok=True)\nos.chdir(here)"
    bench = _bench(folder, f"{there}\n{folders}")
    for _ in range(2):
        status, rows = bench.rows()
        assert (status, {row["verdict"] for row in rows}) == (0, {"CONFIRMED"}), rows
        assert not list(bench.cache.glob("work/*"))
        assert not list(bench.cache.glob("jit/**/d/d"))


def names_a_file_that_is_no_text(folder: Path) -> None:
    """Add such a file to the tree: this lane is an error that names it, and its receipt is written."""
    planted = (
        "import os, toykernel\n"
        "open(os.path.join(os.fsencode(os.path.dirname(toykernel.__file__)), b'\\xff.py'), 'w').close()"
    )
    status, rows = _bench(folder, planted).rows("--lane", "pristine")
    row, other = rows
    assert (status, row["verdict"], other["verdict"]) == (1, "ERROR", "REPRODUCED"), rows
    assert "\\udcff.py was added" in row["reason"], row
    assert Path(row["receipt"]).is_file()


def archive_of_5000_folders(folder: Path) -> None:
    """Lay out a release with a member that deep: it is refused whole."""
    archive = folder / "toykernel-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as bundle:
        for name in (f"toykernel-1.0/{'d/' * 5000}f.py", "toykernel-1.0/PKG-INFO"):
            bundle.addfile(tarfile.TarInfo(name), io.BytesIO())
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    (folder / "packs").mkdir()
    toys.seed(folder / "cache", archive, sha256)
    bench = Workbench(folder, sha256)
    bench.lay(SOUND)
    ((status, (row,)),) = [bench.rows()]
    assert (status, row["verdict"]) == (1, "ERROR"), row
    assert "refused whole" in row["reason"], row


def origin(folder: Path, spec: str) -> None:
    """Judge a tree from there: one line, exit status 2."""
    bench = workbench.empty(folder)
    bench.lay(SOUND)
    ended = bench.run("run", "--upstream", f"path:{spec}")
    assert ended.returncode == Exit.WRONG_CALL, ended
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "x" * 200 not in ended.stderr, ended.stderr
