# ruff: noqa: FBT003 - a value of a receipt is no argument
"""`check --bundle`: an honest bundle holds, and each forged one is refuted by what lies in it.

A forger here is thorough: whatever a lie touches he makes fit, so the hashes of the log and of the manifest follow it,
unless the lie is that they do not.
"""

from __future__ import annotations

import hashlib
import io
import json
import stat
import zipfile
from collections.abc import Callable
from typing import Any

import pytest

from harness.pack import load
from harness.pack.model import Pack
from harness.report import bundle_check
from testing.workbench import Workbench, empty

TOY = "60_script_and_contract"
RECEIPT = "receipts/cpu.traced.json"
OTHER_HASH = "0123456789abcdef" * 4
Document = dict[str, Any]


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


def _zipped(content: dict[str, bytes], top: str = TOY, mode: int = 0o644 << 16) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, data in content.items():
            info = zipfile.ZipInfo(f"{top}/{name}" if top else name)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, mode
            opened.writestr(info, data)
    return stream.getvalue()


def _with_manifest(content: dict[str, bytes]) -> dict[str, bytes]:
    """Let the manifest follow the other members."""
    manifest = json.loads(content["MANIFEST.json"])
    manifest["files"] = {
        name: hashlib.sha256(data).hexdigest() for name, data in content.items() if name != "MANIFEST.json"
    }
    return content | {"MANIFEST.json": json.dumps(manifest).encode()}


def _forged(honest: dict[str, bytes], lie: Callable[[Document], None], log: tuple[str, str] = ("", "")) -> bytes:
    """Tell a lie in the receipt (and replace a text of its log), and let every hash follow."""
    content = dict(honest)
    document = json.loads(content.pop(RECEIPT))
    text = content.pop(f"receipts/{document['log']['file']}").decode().replace(*log) if log[0] else None
    data = text.encode() if text is not None else honest[f"receipts/{document['log']['file']}"]
    digest = hashlib.sha256(data).hexdigest()
    content.pop(f"receipts/{document['log']['file']}", None)
    document["log"] = {"file": f"cpu.traced.{digest[:12]}.log", "sha256": digest}
    content[f"receipts/{document['log']['file']}"] = data
    lie(document)
    content[RECEIPT] = json.dumps(document).encode()
    return _zipped(_with_manifest(content))


def _at(document: Document, keys: list[str]) -> Any:  # noqa: ANN401 - any value of a receipt
    """Return what lies in a receipt behind these keys and numbers."""
    place: Any = document
    for key in keys:
        place = place[int(key)] if isinstance(place, list) else place[key]
    return place


def _set(path: str, value: object, /) -> Callable[[Document], None]:
    """Return the lie that a value of the receipt is another; `path` names it by keys and numbers."""
    *parents, last = path.split(".")
    return lambda document: _at(document, parents).update({last: value})


def _drop(path: str) -> Callable[[Document], None]:
    *parents, last = path.split(".")

    def lie(document: Document) -> None:
        place = _at(document, parents)
        del place[int(last) if isinstance(place, list) else last]

    return lie


def _twice(path: str) -> Callable[[Document], None]:
    return lambda document: _at(document, path.split(".")).append(_at(document, [*path.split("."), "0"]))


def _swapped(document: Document) -> None:
    lanes = document["lanes"]
    lanes["pristine"], lanes["patched"] = lanes["patched"], lanes["pristine"]


#: What the receipt says instead, and words of the refusal. Check 2 is the defect, the others are controls.
RECEIPTS: dict[str, tuple[Callable[[Document], None], str]] = {
    "another verdict": (_set("verdict", "REPRODUCED"), "the lanes say CONFIRMED"),
    "no fix though it worked": (_set("verdict", "FIX_INEFFECTIVE"), "the lanes say CONFIRMED"),
    "an unknown verdict": (_set("verdict", "PROVEN"), "verdict"),
    "a reason without need": (_set("reason", "because"), "the lanes say CONFIRMED"),
    "a claim that no lane made": (_set("claims", ["BITWISE_IDENTICAL"]), "claims"),
    "no lanes": (_set("lanes", {}), "CONFIRMED without a lane"),
    "one lane": (_drop("lanes.patched"), "the lanes say REPRODUCED"),
    "a third lane": (_set("lanes.other", {}), "lanes"),
    "swapped lanes": (_swapped, "the lanes say FIXED_UPSTREAM"),
    "a patched lane with the bug": (_set("lanes.patched.checks.2.ok", False), "script and checks say FIX_INCOMPLETE"),
    "a patched lane with a wrong control": (_set("lanes.patched.checks.0.ok", False), "CONTROL_FAILED"),
    "an unpatched lane without the bug": (_set("lanes.pristine.checks.2.ok", True), "script and checks say ERROR"),
    "another sentinel": (_set("lanes.patched.script", "BUG_REPRODUCED"), "script and checks say ERROR"),
    "no sentinel": (_set("lanes.patched.script", "FIXED"), "is no sentinel"),
    "a sentinel with a reason": (_set("lanes.patched.script", "FIX_VALIDATED: yes"), "is no sentinel"),
    "no script": (_set("lanes.patched.script", ""), "it has no script"),
    "another status": (_set("lanes.patched.exit_status", 10), "exit_status: 10, not 0"),
    "a killed lane": (_set("lanes.patched.exit_status", -9), "exit_status: -9, not 0"),
    "a lane verdict of nobody": (_set("lanes.patched.verdict", "GOOD"), "verdict"),
    "no checks": (_set("lanes.patched.checks", []), "is gone"),
    "a check that is gone": (_drop("lanes.patched.checks.3"), "is gone"),
    "a defect that is gone": (_drop("lanes.patched.checks.2"), "is gone"),
    "a check of another name": (_set("lanes.patched.checks.2.name", "test_other"), "is gone"),
    "a defect that became a control": (_set("lanes.patched.checks.2.role", "control"), "and is a control"),
    "a control that became a defect": (_set("lanes.patched.checks.0.role", "defect"), "and is a defect"),
    "a role of nobody": (_set("lanes.patched.checks.0.role", "witness"), "role"),
    "a check that is not judged": (_set("lanes.patched.checks.2.ok", None), "gives no reason"),
    "a check twice": (_twice("lanes.patched.checks"), "stands there twice"),
    "a figure twice": (_twice("lanes.patched.figures"), "stands there twice"),
    "another pack": (_set("pack", "01_confirmed"), "pack: 01_confirmed"),
    "a pack that climbs": (_set("pack", "../60"), "pack: ../60"),
    "another kind": (_set("kind", "crash"), "kind: crash"),
    "another package": (_set("upstream.package", "torch"), "upstream.package: torch"),
    "another release": (_set("upstream.version", "2.0"), "upstream.version: 2.0"),
    "another origin": (_set("upstream.origin", "git"), "upstream.origin: git"),
    "another archive": (_set("upstream.sha256", OTHER_HASH), "the pinned release changed"),
    "a tree of nobody": (_set("lanes.pristine.tree", OTHER_HASH), "ran on another tree"),
    "one tree in both lanes": (
        lambda document: document["lanes"]["patched"].update(tree=document["lanes"]["pristine"]["tree"]),
        "both ran on one tree",
    ),
    "another target": (_set("target", "sm_90a"), "lists no traced evidence"),
    "a target that does not exist": (_set("target", "sm_1"), "is no target"),
    "other evidence": (_set("evidence", "compiled"), "lists no compiled evidence"),
    "executed without a GPU": (_set("evidence", "executed"), "0 with executed evidence"),
    "a GPU on the CPU": (
        _set("host.gpus", [{"name": "H100", "memory": 1, "compute_capability": "9.0"}]),
        "host.gpus",
    ),
    "a strength of nobody": (
        _set("strength", {"killed": 9, "of": 9, "unjudged": 0, "seed": 1, "date": "2026-11-21"}),
        "strength",
    ),
    "more ranks": (_set("ranks", 8), "ranks: pack.toml states"),
    "no ranks": (_set("ranks", 0), "ranks: pack.toml states"),
    "a command for another pack": (
        _set("command", "runner.py run 01_confirmed --target cpu"),
        "does not run this pack",
    ),
    "a command for another target": (_set("command", f"runner.py run {TOY} --target sm_80"), "does not run this pack"),
    "other dependencies": (_set("dependencies.packages", {"numpy": "1.0"}), "other versions than the pack pins"),
    "a dependency set of nobody": (_set("dependencies.name", "mine"), "dependencies"),
    "another script and contract": (
        _set("probe", {"sha256": OTHER_HASH, "meaning": OTHER_HASH}),
        "the script or the contract changed",
    ),
    "another patch": (
        lambda document: document["fix"].update(sha256=OTHER_HASH, meaning=OTHER_HASH),
        "the patch changed",
    ),
    "a patch that climbs": (_set("fix.name", "../fix.patch"), "is no file beside the receipt"),
    "a patch for another tree": (_set("fix.name", "fix.head.patch"), "no patch of the pack for that tree"),
    "no patch": (_set("fix", None), "a patched lane has one"),
    "no modules": (_set("lanes.patched.upstream", []), "nothing says what was judged"),
    "a module from outside": (
        _set("lanes.patched.upstream.0.file", "/lib/toykernel/scale.py"),
        "no module under test",
    ),
    "a module that climbs": (_set("lanes.patched.upstream.0.file", "$TREE/../scale.py"), "no module under test"),
    "a module of another package": (_set("lanes.patched.upstream.0.module", "json"), "no module under test"),
    "the patched file as it was": (
        lambda document: document["lanes"]["patched"].update(upstream=document["lanes"]["pristine"]["upstream"]),
        "did not load two versions",
    ),
    "runs that differ": (_set("repeats", {"agreeing": 1, "of": 2}), "1 of 2 runs agree"),
    "more runs than there were": (_set("repeats", {"agreeing": 3, "of": 2}), "between 1 and of"),
    "no runs": (_set("repeats", {"agreeing": 0, "of": 0}), "between 1 and of"),
    "a negative time": (_set("seconds", -1.0), "is negative"),
    "a lane of negative memory": (_set("lanes.patched.peak_memory", -1), "a negative time, memory"),
    "less time than its lanes": (_set("seconds", 0.0), "less than its lanes took"),
    "the future": (_set("started", "2100-01-01T00:00:00+00:00"), "in the future"),
    "no date": (_set("started", "yesterday"), "is no date"),
    "another schema": (_set("schema", 7), "receipt of schema 7"),
    "a boolean schema": (_set("schema", True), "receipt of schema True"),
    "a string for a number": (_set("seconds", "1"), "seconds"),
    "a list for a lane": (_set("lanes.patched", []), "lanes"),
    "a key of nobody": (_set("proof", 1), "proof"),
    "a missing key": (_drop("upstream"), "upstream"),
    "a log of nobody": (_set("log.file", "cpu.traced.000000000000.log"), "is missing or has another hash"),
    "a log elsewhere": (_set("log.file", "../log"), "is no file beside the receipt"),
}


LOGS = {
    "no sentinel": ("FIX_VALIDATED", "done", "its log does not say FIX_VALIDATED in the patched lane"),
    "no patched lane": ("== patched lane ==", "==", "its log does not say FIX_VALIDATED in the patched lane"),
    "the other sentinel": ("BUG_REPRODUCED", "FIX_VALIDATED", "does not say BUG_REPRODUCED in the pristine lane"),
}


def _refute(data: bytes, pack: Pack, words: str) -> None:
    found = bundle_check.errors(data, [pack])
    assert any(words in error for error in found), found


@pytest.mark.parametrize("name", RECEIPTS)
def test_a_forged_receipt_is_refuted(honest: dict[str, bytes], pack: Pack, name: str) -> None:
    lie, words = RECEIPTS[name]
    _refute(_forged(honest, lie), pack, words)


@pytest.mark.parametrize("name", LOGS)
def test_a_forged_log_is_refuted(honest: dict[str, bytes], pack: Pack, name: str) -> None:
    old, new, words = LOGS[name]
    _refute(_forged(honest, lambda _: None, (old, new)), pack, words)


def _replaced(honest: dict[str, bytes], name: str, old: str, new: str) -> bytes:
    assert old.encode() in honest[name]
    return _zipped(_with_manifest(honest | {name: honest[name].replace(old.encode(), new.encode())}))


def _without(honest: dict[str, bytes], name: str) -> bytes:
    return _zipped(_with_manifest({member: data for member, data in honest.items() if member != name}))


def _log(honest: dict[str, bytes]) -> str:
    return next(name for name in honest if name.endswith(".log"))


def _manifest(honest: dict[str, bytes], **values: object) -> bytes:
    return _zipped(honest | {"MANIFEST.json": json.dumps(json.loads(honest["MANIFEST.json"]) | values).encode()})


def _text(honest: dict[str, bytes], old: str, new: str) -> bytes:
    """Replace a text of the receipt, whatever becomes of its JSON."""
    return _replaced(honest, RECEIPT, old, new)


BUNDLES: dict[str, tuple[Callable[[dict[str, bytes]], bytes], str]] = {
    "an edited script": (
        lambda sent: _replaced(sent, "reproduce.py", "import sys", "import os"),
        "reproduce.py: it",
    ),
    "an edited contract": (lambda sent: _replaced(sent, "contract.py", "6.0", "7.0"), "contract.py: it differs"),
    "an edited patch": (lambda sent: _replaced(sent, "fix.patch", "+", "+ "), "fix.patch: it differs"),
    "an edited definition": (lambda sent: _replaced(sent, "pack.toml", "cpu", "cpu "), "pack.toml: it differs"),
    "an edited report": (lambda sent: _replaced(sent, "REPORT.md", "CONFIRMED", "REFUTED"), "REPORT.md: it differs"),
    "an edited first page": (lambda sent: _replaced(sent, "README.md", "CONFIRMED", "PROVEN"), "README.md: it differs"),
    "no script": (lambda sent: _without(sent, "reproduce.py"), "reproduce.py: it is missing"),
    "no contract": (lambda sent: _without(sent, "contract.py"), "contract.py: it is missing"),
    "no report": (lambda sent: _without(sent, "REPORT.md"), "REPORT.md: it is missing"),
    "no receipts": (lambda sent: _without(sent, RECEIPT), "no receipt to bundle"),
    "no log": (lambda sent: _without(sent, _log(sent)), "is missing or has another hash"),
    "an edited log": (lambda sent: _replaced(sent, _log(sent), "FIX_VALIDATED", "FIX VALIDATED"), "another hash"),
    "a foreign script": (lambda sent: _zipped(_with_manifest(sent | {"run.sh": b"rm"})), "run.sh: no bundle of this"),
    "a foreign receipt": (
        lambda sent: _zipped(_with_manifest(sent | {"receipts/x/cpu.traced.json": sent[RECEIPT]})),
        "receipts/x/cpu.traced.json",
    ),
    "a member beside the manifest": (lambda sent: _zipped(sent | {"run.sh": b"rm"}), "run.sh: the zip and"),
    "no manifest": (
        lambda sent: _zipped({name: data for name, data in sent.items() if name != "MANIFEST.json"}),
        "MANIFEST.json",
    ),
    "a manifest that is none": (lambda sent: _zipped(sent | {"MANIFEST.json": b"{"}), "MANIFEST.json"),
    "a manifest of another schema": (lambda sent: _manifest(sent, schema=2), "schema 2, not 1"),
    "a manifest of another pack": (lambda sent: _manifest(sent, pack="01_confirmed"), "it is of 01_confirmed"),
    "a manifest with more": (lambda sent: _manifest(sent, signed=True), "other keys"),
    "another folder": (lambda sent: _zipped(sent, "01_confirmed"), "of no pack of this repository"),
    "no folder": (lambda sent: _zipped(sent, ""), "of no pack of this repository"),
    "a link": (lambda sent: _zipped(sent, mode=(stat.S_IFLNK | 0o644) << 16), "no plain file"),
    "a program": (lambda sent: _zipped(sent, mode=0o755 << 16), "can be executed"),
    "a name that climbs": (lambda sent: _zipped(sent | {"../x": b""}), "no name of a file"),
    "an absolute name": (lambda sent: _zipped({"/etc/x": b""} | sent, ""), "no name of a file"),
    "a name with a backslash": (lambda sent: _zipped(sent | {"a\\b": b""}), "no name of a file"),
    "a name on a drive": (lambda sent: _zipped(sent | {"c:x": b""}), "no name of a file"),
    "a name with an escape": (lambda sent: _zipped(sent | {"\x1b[2J": b""}), "no name of a file"),
    "two names but for case": (lambda sent: _zipped(sent | {"README.MD": b""}), "stands there twice"),
    "a folder": (lambda sent: _zipped(sent | {"more/": b""}), "no name of a file"),
    "forty megabytes": (lambda sent: _zipped(sent | {"x": bytes(40 << 20)}), "larger than"),
    "a thousand members": (lambda sent: _zipped(sent | {f"x{n}": b"" for n in range(1000)}), "more than 500 members"),
    "something behind the zip": (lambda sent: _zipped(sent) + b"more" * 20_000, "no zip"),
    "something before the zip": (lambda sent: b"#!/bin/sh\n" + _zipped(sent), "something stands around the zip"),
    "half a zip": (lambda sent: _zipped(sent)[: len(_zipped(sent)) // 2], "no zip"),
    "nothing": (lambda _: b"", "no zip"),
    "a figure that is no number": (lambda sent: _text(sent, '"seconds": ', '"seconds": NaN, "s": '), RECEIPT),
    "a number of 5000 digits": (lambda sent: _text(sent, '"schema": 2', '"schema": 2' + "0" * 5000), RECEIPT),
    "a key twice": (lambda sent: _text(sent, '"schema": 2', '"schema": 2, "schema": 2'), RECEIPT),
    "half a receipt": (lambda sent: _zipped(_with_manifest(sent | {RECEIPT: sent[RECEIPT][:500]})), RECEIPT),
    "a receipt that is no text": (lambda sent: _zipped(_with_manifest(sent | {RECEIPT: b"\xff\xfe"})), RECEIPT),
    "a deep receipt": (lambda sent: _zipped(_with_manifest(sent | {RECEIPT: b"[" * 100_000})), RECEIPT),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_a_forged_bundle_is_refuted(honest: dict[str, bytes], pack: Pack, name: str) -> None:
    forge, words = BUNDLES[name]
    _refute(forge(honest), pack, words)


def test_no_flipped_bit_raises(honest: dict[str, bytes], pack: Pack) -> None:
    data = _zipped(honest)
    for place in range(0, len(data), max(1, len(data) // 100)):
        forged = data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :]
        assert all(isinstance(error, str) for error in bundle_check.errors(forged, [pack]))


def test_an_honest_bundle_holds_and_a_forged_one_is_refuted_line_by_line(
    bench: Workbench, honest: dict[str, bytes]
) -> None:
    ended = bench.run("check", "--bundle", str(bench.folder / "sent.zip"))
    assert (ended.returncode, ended.stdout.strip()) == (0, "sent.zip: it holds"), ended.stdout
    forged = bench.folder / "forged.zip"
    forged.write_bytes(_forged(honest, _set("kind", "\x1b[2J")))
    ended = bench.run("check", "--bundle", str(forged))
    assert ended.returncode == 1
    assert "refuted: " in ended.stdout
    assert ended.stderr == ""
    assert bench.run("check", "--bundle", str(bench.folder / "absent.zip")).returncode == 2


@pytest.mark.parametrize(("key", "value"), [("title", "Another"), ("command", f"reproducer-packs run {TOY} --record")])
def test_a_title_may_have_changed_and_the_runner_be_installed(
    honest: dict[str, bytes], pack: Pack, key: str, value: str
) -> None:
    assert bundle_check.errors(_forged(honest, _set(key, value)), [pack]) == []


def test_the_same_pack_gives_the_same_bytes(bench: Workbench) -> None:
    bench.run("report", TOY, "--bundle", str(bench.folder / "again.zip"))
    assert (bench.folder / "again.zip").read_bytes() == (bench.folder / "sent.zip").read_bytes()
