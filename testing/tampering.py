"""Hostile cases of the cache, archives, git, the index, processes and upstream's own words.

`testing.hostile` lists them with the others.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil

from harness.core.words import Exit
from testing import package_index, toys
from testing import workbench as benches
from testing.package_index import Shelf
from testing.workbench import Workbench, until

SOUND = "01_confirmed"
LOADS = "from toykernel import scale\n"
#: A wheel whose one module the toy probe imports.
WHEEL = "beside-1.0-py3-none-any.whl"


def with_a_dependency(folder: Path) -> Workbench:
    """Build a workbench whose toy pack has a dependency set of one wheel."""
    bench = benches.sound(folder)
    wheel, sha256 = toys.wheel(folder, WHEEL, {"beside/__init__.py": "VALUE = 1\n"})
    toys.seed(bench.cache, wheel, sha256)
    toys.pin(bench.packs / SOUND, "beside", "1.0", sha256)
    toys.replace(bench.packs / SOUND / "reproduce.py", LOADS, f"{LOADS}import beside\n")
    return bench


# --- the cache


def one(bench: Workbench, pattern: str) -> Path:
    """Return the only file of the cache of that pattern."""
    (found,) = bench.cache.glob(pattern)
    return found


def append(path: Path) -> None:
    """Edit a file and give it back the time that it had."""
    stat = path.stat()
    with path.open("a") as stream:
        stream.write("\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def tree(bench: Workbench, *, patched: bool = False) -> Path:
    """Return the root of one of the two trees."""
    every = bench.cache.glob("trees/*/content/src/toykernel/scale.py")
    (found,) = (path for path in every if ("zip(" in path.read_text()) == patched)
    return found.parents[2]


def scale(bench: Workbench, *, patched: bool = False) -> Path:
    """Return the file under test in one of the two trees."""
    return tree(bench, patched=patched) / "src/toykernel/scale.py"


def _with_its_seal(bench: Workbench) -> None:
    """Edit a file and the seal that speaks of it, as somebody would who knows the form but not the key."""
    append(scale(bench))
    for path in bench.cache.glob("seals/*/trees-*.json"):
        code, _, body = path.read_text().partition("\n")
        data = json.loads(body)
        for name in data["stats"]:
            data["stats"][name][0] += 1
        path.write_text(code + "\n" + json.dumps(data))


def _without_its_seal(bench: Workbench) -> None:
    append(scale(bench))
    shutil.rmtree(bench.cache / "seals")


SITE = "dependencies/*/site/beside"
#: By what is changed: how, and what the reason says of it.
CHANGES: dict[str, tuple[Callable[[Workbench], object], str]] = {
    "a dependency is edited": (lambda bench: append(one(bench, f"{SITE}/__init__.py")), "__init__.py was edited"),
    "bytecode is edited": (lambda bench: append(one(bench, f"{SITE}/__pycache__/*.pyc")), ".pyc was edited"),
    "a dependency's file is deleted": (lambda bench: one(bench, f"{SITE}/__init__.py").unlink(), "was deleted"),
    "the pristine tree is edited": (lambda bench: append(scale(bench)), "toykernel/scale.py was edited"),
    "the patched tree is edited": (lambda bench: append(scale(bench, patched=True)), "toykernel/scale.py was edited"),
    "a file is added that no probe reports": (
        lambda bench: (tree(bench) / "src/sitecustomize.py").write_text("x = 1\n"),
        "sitecustomize.py was added",
    ),
    "a link is added": (
        lambda bench: (tree(bench) / "src/sitecustomize.py").symlink_to("/dev/null"),
        "sitecustomize.py was added",
    ),
    "a file and its seal are edited": (_with_its_seal, "toykernel/scale.py was edited"),
    "a file is edited and its seal deleted": (_without_its_seal, "toykernel/scale.py was edited"),
}


def changed(folder: Path, what: str) -> None:
    """Change a byte of the cache: that run has no verdict, and names the file; the next has it laid out anew."""
    change, named = CHANGES[what]
    bench = with_a_dependency(folder)
    bench.gives(0, "CONFIRMED")
    change(bench)
    assert "laid out anew" in bench.gives(1, "ERROR", reason=named)["reason"]
    bench.gives(0, "CONFIRMED")


def flipped_download(folder: Path) -> None:
    """Flip one bit of a download behind which there is no tree yet."""
    bench = benches.sound(folder)
    (archive,) = (bench.cache / "downloads" / bench.sha256).iterdir()
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    bench.gives(1, "ERROR", reason="no longer has its sha256")


#: What a probe does to what it imports.
WRITES = {
    "its tree": 'import pathlib; pathlib.Path(scale.__file__).with_name("new.py").write_text("x = 1")',
    "its dependencies": 'import beside, pathlib; pathlib.Path(beside.__file__).write_text("VALUE = 1\\n")',
    "a file, and back": "import pathlib; file = pathlib.Path(scale.__file__); file.write_text(file.read_text())",
}


def writes(folder: Path, where: str) -> None:
    """Let a probe write there: an error in that run, not in the next."""
    bench = with_a_dependency(folder)
    probe = bench.packs / SOUND / "reproduce.py"
    text = probe.read_text()
    toys.replace(probe, LOADS, f"{LOADS}{WRITES[where]}\n")
    bench.gives(1, "ERROR", reason="while it ran")
    probe.write_text(text)
    bench.gives(0, "CONFIRMED")


# --- archives, git, the index


def released(folder: Path, archive: Path) -> Workbench:
    """Build a workbench with a sound pack whose release is this archive."""
    bench = benches.sound(folder)
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    toys.seed(bench.cache, archive, sha256)
    for old, new in ((bench.sha256, sha256), ("toykernel-1.0.zip", archive.name)):
        toys.replace(bench.packs / SOUND / "pack.toml", old, new)
    return bench


def _packed(folder: Path, members: dict[str, bytes]) -> Workbench:
    """Build a workbench whose upstream is a .tar.gz of the toy's files and these."""
    archive = folder / "toykernel-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(toys.RESOURCES / "upstream/toykernel-1.0", "toykernel-1.0")
        for name, data in members.items():
            info = tarfile.TarInfo(f"toykernel-1.0/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return released(folder, archive)


def git_configuration(folder: Path) -> None:
    """Ship a repository's configuration with filters inside an archive: no command of it runs."""
    ran = folder / "ran"
    settings = f'[filter "x"]\n clean = touch {ran}; cat\n smudge = touch {ran}; cat\n required = true\n'
    members = {
        ".git/config": f"[core]\n bare = false\n fsmonitor = touch {ran}\n{settings}".encode(),
        ".git/HEAD": b"ref: refs/heads/main\n",
        ".git/objects/x": b"",
        ".git/refs/x": b"",
        ".gitattributes": b"* filter=x\n",
    }
    bench = _packed(folder, members)
    parameters = f"'filter.x.clean=touch {ran}; cat' 'filter.x.required=true'"
    bench.gives(0, "CONFIRMED", GIT_CONFIG_PARAMETERS=parameters)
    assert not ran.exists(), "a command of the archive, or of the environment, ran"
    assert not list(bench.cache.glob("trees/*/content/.git")), ".git left its archive"


def option_for_a_url(folder: Path) -> None:
    """Name options of git where a URL or a commit belongs."""
    bench = benches.sound(folder)
    ran = folder / "ran"
    for text in (f"git+--upload-pack=touch {ran}@./", f"git+./@--upload-pack=touch {ran}", "git+./@-x"):
        ended = bench.run("run", "--online", "--upstream", text)
        assert ended.returncode in {1, 2}, ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr
    assert not ran.exists()


def bomb(folder: Path) -> None:
    """Pack more than the limit into one member; little of it is ever written."""
    from harness.core.errors import UnavailableError  # noqa: PLC0415 - the limit is set for this case alone
    from harness.upstream import archive  # noqa: PLC0415 - likewise

    path = folder / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed, packed.open("x/zeros", "w") as member:
        for _ in range(64):
            member.write(bytes(1 << 20))
    largest, archive.LARGEST_TREE = archive.LARGEST_TREE, 10 << 20
    said = ""
    try:
        archive.unpack(path, folder / "out")
    except UnavailableError as error:
        said = str(error)
    finally:
        archive.LARGEST_TREE = largest
    assert "unpacks to more than" in said, said
    assert (folder / "out/x/zeros").stat().st_size <= 11 << 20


def long_name(folder: Path) -> None:
    """Name a member with 300 characters."""
    _packed(folder, {"x" * 300: b""}).gives(1, "ERROR", reason="that no file system takes")


def name_outside(folder: Path) -> None:
    """Let an index name a file outside the cache, with the right sha256."""
    bench = benches.sound(folder)
    (archive,) = (bench.cache / "downloads" / bench.sha256).iterdir()
    data = archive.read_bytes()
    shutil.rmtree(bench.cache)
    victim = folder / "victim"
    victim.write_text("mine")
    shelf = Shelf({"toykernel": {"../../../victim": data}})
    with package_index.served(shelf) as url:
        ended = bench.run("run", "--online", PIP_INDEX_URL=url, PIP_RETRIES="0", PIP_CONFIG_FILE=os.devnull)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    assert victim.read_text() == "mine"


# --- processes


def killed_supervisor(folder: Path) -> None:
    """Kill the supervisor of a lane: neither the probe nor what it started goes on."""
    bench = benches.empty(folder)
    pack = bench.lay("37_needs_long")
    files = [pack / name for name in ("pid", "grandchild")]
    command = bench.command("run", "--lane", "pristine", "--timeout", "60")
    with subprocess.Popen(command, stdout=-3, stderr=-3) as runner:
        until(lambda: all(file.exists() and file.read_text() for file in files), 60)
        pids = [int(file.read_text()) for file in files]
        psutil.Process(psutil.Process(pids[0]).ppid()).kill()
        assert runner.wait(60) == 1
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


# --- the two lanes


#: What a contract does in its patched lane instead of judging what it judged in the pristine one.
UNLIKE = {
    "leaves its defect out": ("del test_weights", "test_weights is gone"),
    "does not judge its defect": (
        "@pytest.mark.defect\n    def test_weights():\n        pytest.skip('no')",
        "test_weights was judged and is not",
    ),
    "calls its defect a control": (
        "@pytest.mark.control\n    def test_weights():\n        pass",
        "test_weights was a defect and is a control",
    ),
}
KNOWS_ITS_LANE = """

import importlib.util, pathlib

if "zip(" in pathlib.Path(importlib.util.find_spec("toykernel.scale").origin).read_text():
    {}

    @pytest.mark.defect
    def test_other():
        pass
"""


def unlike(folder: Path, how: str) -> None:
    """Let a contract that knows its lane judge less in the patched one."""
    bench = benches.sound(folder)
    less, why = UNLIKE[how]
    with (bench.packs / SOUND / "contract.py").open("a") as stream:
        stream.write(KNOWS_ITS_LANE.format(less))
    assert "the lanes made other checks" in bench.gives(1, "ERROR", reason=why)["reason"]


# --- what upstream says, and what it leaves behind


OTHER = "02_other"
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
    bench = benches.sound(folder)
    toys.replace(bench.packs / SOUND / "reproduce.py", VALUES, f"{planted}\n{VALUES}")
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
    bench = released(folder, archive)
    status, (row,) = bench.rows()
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
    bench = benches.sound(folder)
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
    bench = released(folder, archive)
    status, said, peak = _peak(bench.command("run"))
    assert (status, "Traceback" in said) == (1, False), said
    assert "a header of more than" in said, said
    assert peak < INFLATED, (peak, said)


def origin(folder: Path, spec: str) -> None:
    """Judge a tree from there: one line, exit status 2."""
    ended = benches.sound(folder).run("run", "--upstream", f"path:{spec}")
    assert ended.returncode == Exit.WRONG_CALL, ended
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "x" * 200 not in ended.stderr, ended.stderr


def acts_on_a_terminal(folder: Path) -> None:
    """Raise such a text where a terminal shows it: what cannot be seen is shown as its escape."""
    bench = _bench(folder, f"raise RuntimeError({ESCAPES!r})")
    ours, theirs = pty.openpty()
    with subprocess.Popen(bench.command("run"), stdin=theirs, stdout=theirs, stderr=theirs):
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
    bench.swept(status=1)
    summary = (bench.newest / "summary.md").read_text(encoding="utf-8")
    assert "RuntimeError" in summary, summary
    not_code = re.sub(r"`[^`\n]*`", "", summary)
    for alive in ("\n# heading", "](http", "<img", "@ada", "&#64;", "&commat;"):
        assert alive not in not_code, (alive, summary)
