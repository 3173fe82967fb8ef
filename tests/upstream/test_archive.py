"""Archives that lie are refused whole."""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import zipfile
from collections.abc import Callable

import pytest

from testing import toys
from testing.workbench import Workbench

ZIP, TAR = "toykernel-1.0.zip", "toykernel-1.0.tar.gz"


def _tar(members: dict[str, bytes], edit: Callable[[tarfile.TarInfo], None]) -> bytes:
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


@pytest.mark.parametrize(
    ("file", "data", "reason"),
    [
        (TAR, _tar({"a/../../evil.py": b"x"}, lambda _: None), "leads out of the folder"),
        (TAR, _tar({"/srv/evil.py": b"x"}, lambda _: None), "leads out of the folder"),
        (TAR, _tar({"a/link": b""}, _link), "is a link or a device"),
        (TAR, _tar({"a/x.py": b"x" * 9999}, lambda _: None)[:60], "damaged archive"),
        (ZIP, _zip("../evil.py"), "leads out of the folder"),
        (ZIP, _zip("C:/evil.py"), "leads out of the folder"),
        (ZIP, b"no zip at all", "damaged archive"),
        (ZIP, _before_the_beginning(_zip("a/x.py")), "damaged archive: the member 'a/x.py': Invalid"),
    ],
    ids=["above", "absolute", "link", "cut", "zip above", "zip foreign", "no zip", "zip begins earlier"],
)
def test_an_archive_that_lies_is_refused_whole(workbench: Workbench, file: str, data: bytes, reason: str) -> None:
    shutil.rmtree(workbench.cache)
    pack = workbench.lay("01_confirmed")
    archive = workbench.folder / file
    archive.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    toys.seed(workbench.cache, archive, digest)
    toys.replace(pack / "pack.toml", workbench.sha256, digest)
    toys.replace(pack / "pack.toml", ZIP, file)
    workbench.gives(1, "ERROR", reason=reason)
    assert not list(workbench.cache.glob("trees/*"))
    assert not list(workbench.folder.rglob("evil.py"))
