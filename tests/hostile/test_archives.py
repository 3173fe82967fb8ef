"""Archives, indexes and git URLs that lie: refused whole, in one line, and no command of theirs runs."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core.errors import UnavailableError
from harness.report import bundle
from harness.upstream import archive, package_index
from testing import toys
from testing.package_index import Shelf, answering, served, settings
from testing.workbench import Workbench

pytestmark = pytest.mark.hostile("archives, indexes and repositories")
ZIP, TAR = "toykernel-1.0.zip", "toykernel-1.0.tar.gz"
#: Bytes, of what is stated as less: more than the process has that starts the runner, since a child's peak counts it.
INFLATED = 768 << 20


def _tar(members: dict[str, bytes], edit: Callable[[tarfile.TarInfo], None] = lambda _: None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            edit(info)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def _link(info: tarfile.TarInfo) -> None:
    info.type, info.linkname, info.size = tarfile.SYMTYPE, "/etc/passwd", 0


def _zip(name: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as bundle:
        bundle.writestr(name, b"x")
    return stream.getvalue()


def _before_the_beginning(data: bytes) -> bytes:
    """Let a zip's directory say that it lies further back, so that its members would lie before the file."""
    return data[:-6] + (int.from_bytes(data[-6:-2], "little") + 256).to_bytes(4, "little") + data[-2:]


def _released(workbench: Workbench, path: Path) -> None:
    """Lay the sound pack, whose release is this archive."""
    definition = workbench.lay("01_confirmed") / "pack.toml"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    toys.seed(workbench.cache, path, digest)
    toys.replace(definition, workbench.sha256, digest)
    toys.replace(definition, ZIP, path.name)


@pytest.mark.parametrize(
    ("file", "data", "reason"),
    [
        (TAR, _tar({"a/../../evil.py": b"x"}), "leads out of the folder"),
        (TAR, _tar({"/srv/evil.py": b"x"}), "leads out of the folder"),
        (TAR, _tar({"a/link": b""}, _link), "is a link or a device"),
        (TAR, _tar({"a/x.py": b"x" * 9999})[:60], "damaged archive"),
        (TAR, _tar({f"a/{'x' * 300}": b""}), "that no file system takes"),
        (TAR, _tar({f"a/{'d/' * 5000}f.py": b"", "a/PKG-INFO": b""}), "refused whole"),
        (ZIP, _zip("../evil.py"), "leads out of the folder"),
        (ZIP, _zip("C:/evil.py"), "leads out of the folder"),
        (ZIP, b"no zip at all", "damaged archive"),
        (ZIP, _before_the_beginning(_zip("a/x.py")), "damaged archive: the member 'a/x.py': Invalid"),
    ],
    ids=[
        "above", "absolute", "link", "cut", "long name", "5000 folders", "zip above", "zip foreign", "no zip",
        "zip begins earlier",
    ],
)  # fmt: skip
def test_an_archive_that_lies_is_refused_whole(workbench: Workbench, file: str, data: bytes, reason: str) -> None:
    shutil.rmtree(workbench.cache)
    path = workbench.folder / file
    path.write_bytes(data)
    _released(workbench, path)
    workbench.gives(1, "ERROR", reason=reason)
    assert not list(workbench.cache.glob("trees/*"))
    assert not list(workbench.folder.rglob("evil.py"))


def test_of_a_member_that_unpacks_to_more_than_the_limit_little_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed, packed.open("x/zeros", "w") as member:
        for _ in range(64):
            member.write(bytes(1 << 20))
    monkeypatch.setattr(archive, "LARGEST_TREE", 10 << 20)
    with pytest.raises(UnavailableError, match="unpacks to more than"):
        archive.unpack(path, tmp_path / "out")
    assert (tmp_path / "out/x/zeros").stat().st_size <= 11 << 20


def _peak(command: list[str]) -> tuple[int, str, int]:
    """Run a command; return its exit status, what it said, and the most bytes of memory that it held."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        said = child.stdout.read() if child.stdout else ""
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, said, usage.ru_maxrss * 1024


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME], ids=["pax header", "GNU name"])
def test_a_header_that_inflates_is_never_held_in_memory(workbench: Workbench, kind: bytes) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, INFLATED
    with gzip.open(workbench.folder / TAR, "wb", compresslevel=1) as stream:
        stream.write(header.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(INFLATED >> 20):
            stream.write(b"a" * (1 << 20))
    _released(workbench, workbench.folder / TAR)
    status, said, peak = _peak(workbench.command("run"))
    assert (status, "Traceback" in said) == (1, False), said
    assert "a header of more than" in said, said
    assert peak < INFLATED, (peak, said)


def test_a_bundle_that_inflates_is_never_held_in_memory(workbench: Workbench) -> None:
    """Its member states 10 bytes."""
    path = workbench.folder / "bundle.zip"
    info = zipfile.ZipInfo("01_confirmed/x", bundle.DATE)
    info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, bundle.PLAIN_FILE
    with zipfile.ZipFile(path, "w") as packed, packed.open(info, "w") as member:
        for _ in range(INFLATED >> 20):
            member.write(bytes(1 << 20))
    data = bytearray(path.read_bytes())
    for header, size in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = data.index(header) + size
        data[at : at + 4] = (10).to_bytes(4, "little")
    path.write_bytes(data)
    workbench.lay("01_confirmed")
    status, said, peak = _peak(workbench.command("check", "--bundle", str(path)))
    assert (status, "it does not hold what it states" in said) == (1, True), said
    assert peak < INFLATED, (peak, said)


def test_no_command_of_an_archives_git_configuration_runs(workbench: Workbench) -> None:
    ran = workbench.folder / "ran"
    settings = f'[filter "x"]\n clean = touch {ran}; cat\n smudge = touch {ran}; cat\n required = true\n'
    members = {
        ".git/config": f"[core]\n bare = false\n fsmonitor = touch {ran}\n{settings}".encode(),
        ".git/HEAD": b"ref: refs/heads/main\n",
        ".git/objects/x": b"",
        ".git/refs/x": b"",
        ".gitattributes": b"* filter=x\n",
    }
    base = toys.RESOURCES / "upstream/toykernel-1.0"
    members |= {str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()}
    path = workbench.folder / TAR
    path.write_bytes(_tar({f"toykernel-1.0/{name}": data for name, data in members.items()}))
    _released(workbench, path)
    parameters = f"'filter.x.clean=touch {ran}; cat' 'filter.x.required=true'"
    workbench.gives(0, "CONFIRMED", GIT_CONFIG_PARAMETERS=parameters)
    assert not ran.exists(), "a command of the archive, or of the environment, ran"
    assert not list(workbench.cache.glob("trees/*/content/.git")), ".git left its archive"


@pytest.mark.parametrize("text", ["git+--upload-pack=touch {}@./", "git+./@--upload-pack=touch {}", "git+./@-x"])
def test_no_url_and_no_commit_is_an_option_of_git(workbench: Workbench, text: str) -> None:
    workbench.lay("01_confirmed")
    ran = workbench.folder / "ran"
    ended = workbench.run("run", "--online", "--upstream", text.format(ran))
    assert ended.returncode in {1, 2}, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert not ran.exists()


def test_a_name_of_the_index_leads_out_of_no_cache(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    data = (workbench.folder / ZIP).read_bytes()
    shutil.rmtree(workbench.cache)
    victim = workbench.folder / "victim"
    victim.write_text("mine")
    with served(Shelf({"toykernel": {"../../../victim": data}})) as url:
        ended = workbench.run("run", "--online", **settings(url))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    assert victim.read_text() == "mine"


JSON = "application/vnd.pypi.simple.v1+json"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/plain", b"hello"),
        (JSON, b'{"meta": {"api-version": "9.0"}, "name": "toykernel", "files": []}'),
        (JSON, b'{"meta": {"api-version": "1.0"}, "name": "toykernel", "files": "none"}'),
        (JSON, b'{"meta": {"api-version": "1.0"}, "name": "toykernel", "files": [{"filename": 5}]}'),
        (JSON, b"{"),
        (JSON, b"[" * 5000),
        ("text/html", b'<html><head><meta name="pypi:repository-version" content="9.0"></head></html>'),
    ],
)
def test_a_page_of_another_form_is_one_line_without_the_password(
    monkeypatch: pytest.MonkeyPatch, kind: str, body: bytes
) -> None:
    with answering(kind, body) as url:
        for name, value in settings(url.replace("http://", "http://ada:correct-horse@")).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UnavailableError, match=r"toykernel: (the package index cannot be read|no such)") as raised:
            package_index.offers("toykernel")
    assert "correct-horse" not in str(raised.value)
