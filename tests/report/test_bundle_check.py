"""A bundle that was sent is judged: an honest one holds, and each forged zip or text is refuted in one line.

Forged receipts are those of test_receipt_check.py, since one judge judges both.
"""

from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import Callable

import pytest

from harness.pack import load
from harness.pack.model import Pack
from harness.report import bundle_check
from testing.workbench import Workbench, empty

TOY = "60_script_and_contract"
RECEIPT = "receipts/cpu.traced.json"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Record the toy, and bundle it."""
    bench = empty(tmp_path_factory.mktemp("bundle"))
    bench.lay(TOY)
    bench.recorded(TOY, "--target", "cpu")
    completed = bench.run("report", TOY, "--bundle", str(bench.folder / "sent.zip"))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return bench


@pytest.fixture(scope="module")
def pack(bench: Workbench) -> Pack:
    return load.load_pack(bench.packs / TOY)


@pytest.fixture(scope="module")
def honest(bench: Workbench) -> dict[str, bytes]:
    with zipfile.ZipFile(bench.folder / "sent.zip") as archive:
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}


def _zip(content: dict[str, bytes], top: str = TOY, mode: int = 0o644 << 16) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            info = zipfile.ZipInfo(f"{top}/{name}" if top else name)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, mode
            archive.writestr(info, data)
    return stream.getvalue()


def _replace(honest: dict[str, bytes], name: str, old: str, new: str) -> bytes:
    assert old.encode() in honest[name]
    return _zip(honest | {name: honest[name].replace(old.encode(), new.encode())})


def _remove(honest: dict[str, bytes], name: str) -> bytes:
    return _zip({member: data for member, data in honest.items() if member != name})


def _log_name(honest: dict[str, bytes]) -> str:
    return next(name for name in honest if name.endswith(".log"))


def _edit(honest: dict[str, bytes], old: str, new: str) -> bytes:
    """Replace a text of the receipt, whatever becomes of its JSON."""
    return _replace(honest, RECEIPT, old, new)


BUNDLES: dict[str, tuple[Callable[[dict[str, bytes]], bytes], str]] = {
    "an edited script": (
        lambda sent: _replace(sent, "reproduce.py", "import sys", "import os"),
        "reproduce.py: it",
    ),
    "an edited contract": (lambda sent: _replace(sent, "contract.py", "6.0", "7.0"), "contract.py: it differs"),
    "an edited patch": (lambda sent: _replace(sent, "fix.patch", "+", "+ "), "fix.patch: it differs"),
    "an edited definition": (lambda sent: _replace(sent, "pack.toml", "cpu", "cpu "), "pack.toml: it differs"),
    "an edited report": (lambda sent: _replace(sent, "README.md", "CONFIRMED", "REFUTED"), "README.md: it differs"),
    "an edited first page": (lambda sent: _replace(sent, "RERUN.md", "CONFIRMED", "PROVEN"), "RERUN.md: it differs"),
    "no script": (lambda sent: _remove(sent, "reproduce.py"), "reproduce.py: it is missing"),
    "no contract": (lambda sent: _remove(sent, "contract.py"), "contract.py: it is missing"),
    "no report": (lambda sent: _remove(sent, "README.md"), "README.md: it is missing"),
    "no receipts": (lambda sent: _remove(sent, RECEIPT), "no receipt to bundle"),
    "no log": (lambda sent: _remove(sent, _log_name(sent)), "is missing or has another hash"),
    "an edited log": (lambda sent: _replace(sent, _log_name(sent), "FIX_VALIDATED", "FIX VALIDATED"), "another hash"),
    "a foreign script": (lambda sent: _zip(sent | {"run.sh": b"rm"}), "run.sh: no bundle of this"),
    "a foreign receipt": (
        lambda sent: _zip(sent | {"receipts/x/cpu.traced.json": sent[RECEIPT]}),
        "receipts/x/cpu.traced.json",
    ),
    "another folder": (lambda sent: _zip(sent, "01_confirmed"), "of no pack of this repository"),
    "no folder": (lambda sent: _zip(sent, ""), "of no pack of this repository"),
    "a link": (lambda sent: _zip(sent, mode=(stat.S_IFLNK | 0o644) << 16), "no plain file of"),
    "a program": (lambda sent: _zip(sent, mode=0o755 << 16), "no plain file of"),
    "a name that climbs": (lambda sent: _zip(sent | {"../x": b""}), "no plain file of"),
    "an absolute name": (lambda sent: _zip({"/etc/x": b""} | sent, ""), "no plain file of"),
    "a name with a backslash": (lambda sent: _zip(sent | {"a\\b": b""}), "no plain file of"),
    "a name on a drive": (lambda sent: _zip(sent | {"c:x": b""}), "no plain file of"),
    "a name with an escape": (lambda sent: _zip(sent | {"\x1b[2J": b""}), "no plain file of"),
    "two names but for case": (lambda sent: _zip(sent | {"README.MD": b""}), "stands there twice"),
    "a file that is a folder, too": (
        lambda sent: _zip(sent | {"receipts/x": b"", "receipts/x/y": b""}),
        "receipts/x is a file and a folder",
    ),
    "a folder": (lambda sent: _zip(sent | {"more/": b""}), "no plain file of"),
    "forty megabytes": (lambda sent: _zip(sent | {"x": bytes(40 << 20)}), "larger than"),
    "a thousand members": (lambda sent: _zip(sent | {f"x{n}": b"" for n in range(1000)}), "more than 500 members"),
    "something behind the zip": (lambda sent: _zip(sent) + b"more" * 20_000, "no zip"),
    "something before the zip": (lambda sent: b"#!/bin/sh\n" + _zip(sent), "something stands around the zip"),
    "half a zip": (lambda sent: _zip(sent)[: len(_zip(sent)) // 2], "no zip"),
    "nothing": (lambda _: b"", "no zip"),
    "a figure that is no number": (lambda sent: _edit(sent, '"seconds": ', '"seconds": NaN, "s": '), RECEIPT),
    "a number of 5000 digits": (lambda sent: _edit(sent, '"schema": 2', '"schema": 2' + "0" * 5000), RECEIPT),
    "a key twice": (lambda sent: _edit(sent, '"schema": 2', '"schema": 2, "schema": 2'), RECEIPT),
    "half a receipt": (lambda sent: _zip(sent | {RECEIPT: sent[RECEIPT][:500]}), RECEIPT),
    "a receipt that is no text": (lambda sent: _zip(sent | {RECEIPT: b"\xff\xfe"}), RECEIPT),
    "a deep receipt": (lambda sent: _zip(sent | {RECEIPT: b"[" * 100_000}), RECEIPT),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_a_forged_bundle_is_refuted(honest: dict[str, bytes], pack: Pack, name: str) -> None:
    forge, words = BUNDLES[name]
    errors = bundle_check.errors(forge(honest), [pack])
    assert any(words in error for error in errors), errors


def test_no_flipped_bit_raises(honest: dict[str, bytes], pack: Pack) -> None:
    data = _zip(honest)
    for position in range(0, len(data), max(1, len(data) // 100)):
        forged = data[:position] + bytes([data[position] ^ 0x20]) + data[position + 1 :]
        assert all(isinstance(error, str) for error in bundle_check.errors(forged, [pack]))


def test_an_honest_bundle_holds_and_a_forged_one_is_refuted_line_by_line(
    bench: Workbench, honest: dict[str, bytes]
) -> None:
    completed = bench.run("check", "--bundle", str(bench.folder / "sent.zip"))
    assert (completed.returncode, completed.stdout.strip()) == (0, "sent.zip: it holds"), completed.stdout
    forged = bench.folder / "forged.zip"
    forged.write_bytes(_edit(honest, '"kind": "', '"kind": "\\u001b[2J'))
    completed = bench.run("check", "--bundle", str(forged))
    assert (completed.returncode, completed.stderr) == (1, "")
    assert "refuted: " in completed.stdout
    assert "\x1b" not in completed.stdout
    assert bench.run("check", "--bundle", str(bench.folder / "absent.zip")).returncode == 2


def test_the_same_pack_gives_the_same_bytes(bench: Workbench) -> None:
    bench.run("report", TOY, "--bundle", str(bench.folder / "again.zip"))
    assert (bench.folder / "again.zip").read_bytes() == (bench.folder / "sent.zip").read_bytes()
