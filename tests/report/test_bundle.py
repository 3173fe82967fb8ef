"""A bundle that was sent is judged: an honest one holds, and each forged zip or text is refuted in one line.

Forged receipts are those of test_receipt_check.py, since one judge judges both.
"""

from __future__ import annotations

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable

import pytest

from harness.pack import load
from harness.pack.model import Pack
from harness.report import bundle
from testing.workbench import Workbench, empty

TOY = "60_script_and_contract"
RECEIPT = "receipts/cpu.traced.json"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Record the toy, and bundle it."""
    found = empty(tmp_path_factory.mktemp("bundle"))
    found.lay(TOY)
    found.recorded(TOY, "--target", "cpu")
    made = found.run("report", TOY, "--bundle", str(found.folder / "sent.zip"))
    assert made.returncode == 0, made.stdout + made.stderr
    return found


@pytest.fixture(scope="module")
def pack(bench: Workbench) -> Pack:
    return load.load_pack(bench.packs / TOY)


@pytest.fixture(scope="module")
def honest(bench: Workbench) -> dict[str, bytes]:
    with zipfile.ZipFile(bench.folder / "sent.zip") as opened:
        return {info.filename.partition("/")[2]: opened.read(info) for info in opened.infolist()}


def _zipped(
    content: dict[str, bytes], top: str = TOY, mode: int = 0o644 << 16, extra: bytes = b"", hidden: bytes = b""
) -> bytes:
    """Zip `content`; fix.patch has the field `extra`, and `hidden` stands before the directory."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, data in content.items():
            info = zipfile.ZipInfo(f"{top}/{name}" if top else name)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, mode
            info.extra = extra if name == "fix.patch" else b""
            opened.writestr(info, data)
        if hidden:
            opened.fp.write(hidden)  # type: ignore[union-attr]
            opened.start_dir += len(hidden)
    return stream.getvalue()


def _replaced(honest: dict[str, bytes], name: str, old: str, new: str) -> bytes:
    assert old.encode() in honest[name]
    return _zipped(honest | {name: honest[name].replace(old.encode(), new.encode())})


def _without(honest: dict[str, bytes], name: str) -> bytes:
    return _zipped({member: data for member, data in honest.items() if member != name})


def _log(honest: dict[str, bytes]) -> str:
    return next(name for name in honest if name.endswith(".log"))


BUNDLES: dict[str, tuple[Callable[[dict[str, bytes]], bytes], str]] = {
    "an edited script": (
        lambda sent: _replaced(sent, "reproduce.py", "import sys", "import os"),
        "reproduce.py: it",
    ),
    "an edited contract": (lambda sent: _replaced(sent, "contract.py", "6.0", "7.0"), "contract.py: it differs"),
    "an edited patch": (lambda sent: _replaced(sent, "fix.patch", "+", "+ "), "fix.patch: it differs"),
    "an edited definition": (lambda sent: _replaced(sent, "pack.toml", "cpu", "cpu "), "pack.toml: it differs"),
    "an edited report": (lambda sent: _replaced(sent, "README.md", "CONFIRMED", "REFUTED"), "README.md: it differs"),
    "an edited first page": (lambda sent: _replaced(sent, "RERUN.md", "CONFIRMED", "PROVEN"), "RERUN.md: it differs"),
    "no script": (lambda sent: _without(sent, "reproduce.py"), "reproduce.py: it is missing"),
    "no contract": (lambda sent: _without(sent, "contract.py"), "contract.py: it is missing"),
    "no report": (lambda sent: _without(sent, "README.md"), "README.md: it is missing"),
    "no receipts": (lambda sent: _without(sent, RECEIPT), "no receipt to bundle"),
    "no log": (lambda sent: _without(sent, _log(sent)), "is missing or has another hash"),
    "an edited log": (lambda sent: _replaced(sent, _log(sent), "FIX_VALIDATED", "FIX VALIDATED"), "another hash"),
    "a foreign script": (lambda sent: _zipped(sent | {"run.sh": b"rm"}), "run.sh: no bundle of this"),
    "a foreign receipt": (
        lambda sent: _zipped(sent | {"receipts/x/cpu.traced.json": sent[RECEIPT]}),
        "receipts/x/cpu.traced.json",
    ),
    "another folder": (lambda sent: _zipped(sent, "01_confirmed"), "of no pack of this repository"),
    "no folder": (lambda sent: _zipped(sent, ""), "of no pack of this repository"),
    "a link": (lambda sent: _zipped(sent, mode=(stat.S_IFLNK | 0o644) << 16), "no plain file"),
    "a program": (lambda sent: _zipped(sent, mode=0o755 << 16), "no plain file"),
    "a name that climbs": (
        lambda sent: _zipped(sent | {"receipts/../../x.json": b""}),
        "no bundle of this pack has it",
    ),
    "an absolute name": (lambda sent: _zipped({"/etc/x": b""} | sent, ""), "of no pack of this repository"),
    "a name with a backslash": (lambda sent: _zipped(sent | {"a\\b": b""}), "no bundle of this pack has it"),
    "a name on a drive": (lambda sent: _zipped(sent | {"c:x": b""}), "no bundle of this pack has it"),
    "a name with an escape": (lambda sent: _zipped(sent | {"\x1b[2J": b""}), "no bundle of this pack has it"),
    "two names but for case": (lambda sent: _zipped(sent | {"README.MD": b""}), "no bundle of this pack has it"),
    "a name twice": (
        lambda sent: _zipped(sent | {"README.mx": b""}).replace(b"README.mx", b"README.md"),
        "stands there twice",
    ),
    "a file that is a folder, too": (
        lambda sent: _zipped(sent | {"receipts/x": b"", "receipts/x/y": b""}),
        "receipts/x: no bundle of this pack has it",
    ),
    "a folder": (lambda sent: _zipped(sent | {"more/": b""}), "no bundle of this pack has it"),
    "more than 128 MiB": (lambda sent: _zipped(sent | {"x": bytes(128 << 20)}), "or 134217728 bytes"),
    "a thousand members": (lambda sent: _zipped(sent | {f"x{n}": b"" for n in range(1000)}), "more than 500 members"),
    "something behind the zip": (lambda sent: _zipped(sent) + b"more" * 20_000, "no zip"),
    "something before the zip": (lambda sent: b"#!/bin/sh\n" + _zipped(sent), "something stands around the zip"),
    "a name that unzip alone reads": (
        lambda sent: _zipped(
            sent, extra=struct.pack("<HHBL4s", 0x7075, 9, 1, zlib.crc32(f"{TOY}/fix.patch".encode()), b"evil")
        ),
        "something stands beside its members",
    ),
    "a member that no directory lists": (
        lambda sent: _zipped(sent, hidden=_zipped({"run.sh": b"rm"}, "").partition(b"PK\x01\x02")[0]),
        "something stands beside its members",
    ),
    "half a zip": (lambda sent: _zipped(sent)[: len(_zipped(sent)) // 2], "no zip"),
    "nothing": (lambda _: b"", "no zip"),
    "half a receipt": (lambda sent: _zipped(sent | {RECEIPT: sent[RECEIPT][:500]}), RECEIPT),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_a_forged_bundle_is_refuted(honest: dict[str, bytes], pack: Pack, name: str) -> None:
    forge, words = BUNDLES[name]
    found = bundle.errors(forge(honest), [pack])
    assert any(words in error for error in found), found


def test_no_flipped_bit_raises(honest: dict[str, bytes], pack: Pack) -> None:
    data = _zipped(honest)
    for place in range(0, len(data), max(1, len(data) // 100)):
        forged = data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :]
        assert all(isinstance(error, str) for error in bundle.errors(forged, [pack]))


def test_an_honest_bundle_holds_and_a_forged_one_is_refuted_line_by_line(
    bench: Workbench, honest: dict[str, bytes]
) -> None:
    ended = bench.run("check", "--bundle", str(bench.folder / "sent.zip"))
    assert (ended.returncode, ended.stdout.strip()) == (0, "sent.zip: it holds"), ended.stdout
    forged = bench.folder / "forged.zip"
    forged.write_bytes(_replaced(honest, RECEIPT, '"kind": "', '"kind": "\\u001b[2J'))
    ended = bench.run("check", "--bundle", str(forged))
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "refuted: " in ended.stdout
    assert "\x1b" not in ended.stdout
    assert bench.run("check", "--bundle", str(bench.folder / "absent.zip")).returncode == 2


def test_the_same_pack_gives_the_same_bytes(bench: Workbench) -> None:
    bench.run("report", TOY, "--bundle", str(bench.folder / "again.zip"))
    assert (bench.folder / "again.zip").read_bytes() == (bench.folder / "sent.zip").read_bytes()
