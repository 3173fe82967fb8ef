"""What upstream says, and what it leaves behind: text that acts on whoever reads it, and files that end a runner."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pty
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

from harness.core.words import Exit
from testing import toys, workbench
from testing.workbench import Workbench

SOUND, OTHER = "01_confirmed", "02_other"
#: Before this line a script's own values are laid; what is planted stands there.
VALUES = "values, weights ="
#: Clears the screen, and names the window.
ESCAPES = "\x1b[2J\x1b]0;pwned\x07"
#: A heading, a link, an image, a tag, and three ways to mention somebody.
MARKUP = "\n# heading\n[x](http://evil) ![i](http://evil/t.png) <img src=x> @ada &#64;ada &commat;ada"
#: Longer than Python's recursion goes, and shorter than a path may be.
DEEP = 1500
#: Bytes, of what is stated as less: more than the process has that starts the runner, since a child's peak counts it.
INFLATED = 768 << 20
#: Folders of a lane, by the variable that names them to it.
FOLDERS = ("HOME", "TMPDIR", "TRITON_CACHE_DIR")


def _bench(folder: Path, planted: str) -> Workbench:
    """Build a workbench with a sound pack, and one whose script does more."""
    bench = workbench.empty(folder)
    toys.replace(bench.lay(SOUND) / "reproduce.py", VALUES, f"{planted}\n{VALUES}")
    bench.lay(SOUND, OTHER)
    return bench


def _released(folder: Path, archive: Path) -> Workbench:
    """Build a workbench with a sound pack whose release is this archive."""
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    (folder / "packs").mkdir()
    toys.seed(folder / "cache", archive, sha256)
    bench = Workbench(folder, sha256)
    bench.lay(SOUND)
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
    status, rows = _bench(folder, planted).rows("--lane", "pristine", "--jobs", "1")
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
    bench = _released(folder, archive)
    ((status, (row,)),) = [bench.rows()]
    assert (status, row["verdict"]) == (1, "ERROR"), row
    assert "refused whole" in row["reason"], row


def _peak(command: list[str]) -> tuple[int, str, int]:
    """Run a command; return its exit status, what it said, and the most bytes of memory that it held."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        said = child.stdout.read() if child.stdout else ""
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, said, usage.ru_maxrss * 1024


def inflating_member(folder: Path) -> None:
    """Check a bundle whose member states 10 bytes and holds INFLATED: it is refuted, and never held in memory."""
    path = folder / "bundle.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed, packed.open(f"{SOUND}/pack.toml", "w") as member:
        for _ in range(INFLATED >> 20):
            member.write(bytes(1 << 20))
    data = bytearray(path.read_bytes())
    for header, size in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = data.index(header) + size
        data[at : at + 4] = (10).to_bytes(4, "little")
    path.write_bytes(data)
    bench = workbench.empty(folder)
    bench.lay(SOUND)
    status, said, peak = _peak(bench.command("check", "--bundle", str(path)))
    assert (status, "it is no zip that can be read" in said) == (1, True), said
    assert peak < INFLATED, (peak, said)


def inflating_header(folder: Path, kind: bytes) -> None:
    """Lay out a release with a header of INFLATED bytes: it is refused, and never held in memory."""
    archive = folder / "toykernel-1.0.tar.gz"
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, INFLATED
    with gzip.open(archive, "wb", compresslevel=1) as stream:
        stream.write(header.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(INFLATED >> 20):
            stream.write(b"a" * (1 << 20))
    bench = _released(folder, archive)
    status, said, peak = _peak(bench.command("run"))
    assert (status, "Traceback" in said) == (1, False), said
    assert "a header of more than" in said, said
    assert peak < INFLATED, (peak, said)


def origin(folder: Path, spec: str) -> None:
    """Judge a tree from there: one line, exit status 2."""
    bench = workbench.empty(folder)
    bench.lay(SOUND)
    ended = bench.run("run", "--upstream", f"path:{spec}")
    assert ended.returncode == Exit.WRONG_CALL, ended
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "x" * 200 not in ended.stderr, ended.stderr


def acts_on_a_terminal(folder: Path) -> None:
    """Raise such a text where a terminal shows it: what cannot be seen is shown as its escape."""
    bench = _bench(folder, f"raise RuntimeError({ESCAPES!r})")
    ours, theirs = pty.openpty()
    with subprocess.Popen(bench.command("run", "--verbose"), stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # the terminal's other end is closed
            os.close(ours)
    assert b"RuntimeError" in shown, shown
    assert b"\x1b[2J" not in shown, shown
    assert b"\x1b]0" not in shown, shown


def acts_in_markdown(folder: Path) -> None:
    """Raise such a text in script and contract: the summary of a sweep shows it, and none of it is alive."""
    bench = _bench(folder, f"raise NotImplementedError({MARKUP!r})")
    line = "    total = scale.total(VALUES)\n"
    toys.replace(bench.packs / OTHER / "contract.py", line, f"    raise RuntimeError({MARKUP!r})\n")
    ended = bench.run("sweep", "--runs", str(folder / "sweeps"))
    assert ended.returncode == 1, ended
    summary = next((folder / "sweeps").glob("*/summary.md")).read_text(encoding="utf-8")
    assert "RuntimeError" in summary, summary
    not_code = re.sub(r"`[^`\n]*`", "", summary)
    for alive in ("\n# heading", "](http", "<img", "@ada", "&#64;", "&commat;"):
        assert alive not in not_code, (alive, summary)
