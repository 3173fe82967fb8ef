"""Hostile cases of the cache, archives, git, the index and processes; `testing.hostile` lists them with the others."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil

from testing import package_index, toys
from testing import workbench as benches
from testing.package_index import Shelf
from testing.workbench import Workbench

SOUND = "01_confirmed"
LOADS = "from toykernel import scale\n"
#: A wheel whose one module the toy probe imports.
WHEEL = "beside-1.0-py3-none-any.whl"


def with_a_dependency(folder: Path) -> Workbench:
    """Build a workbench whose toy pack has a dependency set of one wheel."""
    bench = benches.empty(folder)
    pack = bench.lay(SOUND)
    wheel, sha256 = toys.wheel(folder, WHEEL, {"beside/__init__.py": "VALUE = 1\n"})
    toys.seed(bench.cache, wheel, sha256)
    toys.pin(pack, "beside", "1.0", sha256)
    edit_probe(bench, "import beside\n")
    return bench


def edit_probe(bench: Workbench, lines: str, *, after: str = LOADS) -> None:
    """Put lines behind the import of the toy upstream."""
    probe = bench.packs / SOUND / "reproduce.py"
    text = probe.read_text()
    assert after in text
    probe.write_text(text.replace(after, after + lines, 1))


def verdict(bench: Workbench, wanted: str, *words: str, **environment: str) -> None:
    """Run the toy pack and require its verdict, and words of its reason."""
    status, (row,) = bench.rows(**environment)
    assert (status, row["verdict"]) == (int(wanted == "ERROR"), wanted), row
    for word in words:
        assert word in row["reason"], row["reason"]


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
    verdict(bench, "CONFIRMED")
    change(bench)
    verdict(bench, "ERROR", named, "laid out anew")
    verdict(bench, "CONFIRMED")


def flipped_download(folder: Path) -> None:
    """Flip one bit of a download behind which there is no tree yet."""
    bench = benches.empty(folder)
    bench.lay(SOUND)
    (archive,) = (bench.cache / "downloads" / bench.sha256).iterdir()
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    verdict(bench, "ERROR", "no longer has its sha256")


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
    edit_probe(bench, f"{WRITES[where]}\n")
    verdict(bench, "ERROR", "while it ran")
    probe.write_text(text)
    verdict(bench, "CONFIRMED")


# --- archives, git, the index


def _released(folder: Path, members: dict[str, bytes]) -> Workbench:
    """Build a workbench whose upstream is a .tar.gz of the toy's files and these."""
    bench = benches.empty(folder)
    pack = bench.lay(SOUND)
    archive = folder / "toykernel-1.0.tar.gz"
    source = toys.RESOURCES / "upstream" / "toykernel-1.0"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, "toykernel-1.0")
        for name, data in members.items():
            info = tarfile.TarInfo(f"toykernel-1.0/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    toys.seed(bench.cache, archive, sha256)
    definition = pack / "pack.toml"
    text = definition.read_text().replace(bench.sha256, sha256).replace("toykernel-1.0.zip", archive.name)
    definition.write_text(text)
    return bench


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
    bench = _released(folder, members)
    parameters = "'filter.x.clean=touch " + str(ran) + "; cat' 'filter.x.required=true'"
    verdict(bench, "CONFIRMED", GIT_CONFIG_PARAMETERS=parameters)
    assert not ran.exists(), "a command of the archive, or of the environment, ran"
    assert not list(bench.cache.glob("trees/*/content/.git")), ".git left its archive"


def option_for_a_url(folder: Path) -> None:
    """Name options of git where a URL or a commit belongs."""
    bench = benches.empty(folder)
    bench.lay(SOUND)
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
    bench = _released(folder, {"x" * 300: b""})
    verdict(bench, "ERROR", "a name that no file system takes")


def name_outside(folder: Path) -> None:
    """Let an index name a file outside the cache, with the right sha256."""
    bench = benches.empty(folder)
    bench.lay(SOUND)
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


def _supervisor_of(pid: int) -> psutil.Process:
    found = psutil.Process(pid).parent()
    assert found is not None
    return found


def _waiting(bench: Workbench, names: tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = bench.command("run", "--lane", "pristine", "--timeout", "60")
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not all((bench.packs / "37_needs_long" / name).exists() for name in names) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    return started


def killed_supervisor(folder: Path) -> None:
    """Kill the supervisor of a lane: neither the probe nor what it started goes on."""
    bench = benches.empty(folder)
    pack = bench.lay("37_needs_long")
    with _waiting(bench, ("pid", "grandchild")) as runner:
        pids = [int((pack / name).read_text()) for name in ("pid", "grandchild")]
        _supervisor_of(pids[0]).send_signal(signal.SIGKILL)
        assert runner.wait(60) == 1
    _gone(pids)


def _gone(pids: list[int]) -> None:
    end = time.monotonic() + 10
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, f"processes are left: {left}"


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
    bench = benches.empty(folder)
    less, why = UNLIKE[how]
    with (bench.lay(SOUND) / "contract.py").open("a") as stream:
        stream.write(KNOWS_ITS_LANE.format(less))
    verdict(bench, "ERROR", "the lanes made other checks", why)
