"""Bundles and receipts from strangers: verify.py over sound and tampered ones, and the two lines that rerun one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toys
from conftest import REPOSITORY, Workbench, confirmed

Content = dict[str, bytes]
NAME = "01_confirmed"


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle a toy pack in a repository of its own, with verify.py at its root; return that repository."""
    folder = tmp_path_factory.mktemp("sent")
    ended = confirmed(folder).run("bundle", "1", "-o", str(folder / "sent.zip"))
    assert ended.returncode == 0, ended.stderr
    shutil.copy(REPOSITORY / "verify.py", folder)
    return folder


def _verify(repository: Path, file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-W", "error", str(repository / "verify.py"), str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def _read(bundle: Path) -> Content:
    with zipfile.ZipFile(bundle) as opened:
        return {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}


def _write(bundle: Path, content: Content, *, manifest: bool = True) -> None:
    """Write a bundle, with a manifest that agrees: a forger would not forget it."""
    if manifest:
        listed = {name: hashlib.sha256(data).hexdigest() for name, data in content.items() if name != "MANIFEST.json"}
        content["MANIFEST.json"] = json.dumps({"schema": 1, "files": listed}).encode()
    with zipfile.ZipFile(bundle, "w") as opened:
        for name, data in content.items():
            opened.writestr(f"{NAME}/{name}", data)


RECEIPT = "receipts/cpu.traced.json"


def _edit(content: Content, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(content[RECEIPT])
    change(document)
    content[RECEIPT] = json.dumps(document).encode()


def test_a_sound_bundle_and_its_receipt_pass_and_the_same_pack_gives_the_same_bytes(sent: Path) -> None:
    assert _verify(sent, sent / "sent.zip").returncode == 0
    assert _verify(sent, sent / "packs" / NAME / RECEIPT).returncode == 0
    workbench = Workbench(sent, "")
    assert workbench.run("bundle", "1", "-o", str(sent / "again.zip")).returncode == 0
    assert (sent / "again.zip").read_bytes() == (sent / "sent.zip").read_bytes()
    members = set(_read(sent / "sent.zip"))
    assert members >= {"README.md", "MANIFEST.json", "reproduce.py", "fix.patch", "report.upstream.md", RECEIPT}
    assert workbench.run("verify", str(sent / "nothing.zip")).returncode == 2


TAMPERED: dict[str, tuple[Callable[[Content], object], str]] = {
    "probe": (
        lambda one: one.update({"reproduce.py": one["reproduce.py"] + b"\n"}),
        "reproduce.py: not the one in this",
    ),
    "patch": (
        lambda one: one.update({"fix.patch": one["fix.patch"].replace(b"zip", b"map")}),
        "fix.patch: not the one",
    ),
    "pins": (lambda one: one.update({"pack.toml": one["pack.toml"] + b"#"}), "pack.toml: not the one"),
    "probe gone": (lambda one: one.pop("reproduce.py"), "reproduce.py: not the one"),
    "log": (
        lambda one: one.update({"receipts/cpu.traced.log": b"else"}),
        "its log cpu.traced.log is missing or another",
    ),
    "log gone": (lambda one: one.pop("receipts/cpu.traced.log"), "its log cpu.traced.log is missing"),
    "no receipt": (lambda one: one.pop(RECEIPT), "no receipt in it"),
    "not JSON": (lambda one: one.update({RECEIPT: b"{"}), "not JSON"),
    "NaN": (
        lambda one: one.update({RECEIPT: one[RECEIPT].replace(b'"schema": 1', b'"schema": NaN')}),
        "receipt.schema",
    ),
    "verdict": (lambda one: _edit(one, lambda doc: doc.update(verdict="FIXED_UPSTREAM")), "does not follow"),
    "lane's verdict": (
        lambda one: _edit(one, lambda doc: doc["lanes"]["patched"].update(verdict="BUG_REPRODUCED")),
        "patched lane: BUG_REPRODUCED with exit status 0",
    ),
    "check": (
        lambda one: _edit(one, lambda doc: doc["lanes"]["patched"]["checks"][0].update(ok=False)),
        "its checks imply CONTROL_FAILED",
    ),
    "output": (
        lambda one: _edit(one, lambda doc: doc["lanes"]["patched"]["outputs"][0].update(sha256="0")),
        "the verdict CONFIRMED does not follow",
    ),
    "lane gone": (lambda one: _edit(one, lambda doc: doc["lanes"].pop("patched")), "does not follow"),
    "release": (
        lambda one: _edit(one, lambda doc: doc["upstream"].update(sha256="0")),
        "another release than pack.toml",
    ),
    "made with another probe": (
        lambda one: _edit(one, lambda doc: doc.update(probe={"sha256": "0", "meaning": "0"})),
        "made with another reproduce.py",
    ),
    "made with another patch": (
        lambda one: _edit(one, lambda doc: doc.update(patch={"sha256": "0", "meaning": "0"})),
        "made with another fix.patch",
    ),
    "unknown key": (lambda one: _edit(one, lambda doc: doc.update(more=1)), "has the unknown more"),
    "missing key": (lambda one: _edit(one, lambda doc: doc["host"].pop("python")), "receipt.host lacks python"),
    "type": (
        lambda one: _edit(one, lambda doc: doc["lanes"]["pristine"].update(seconds="1")),
        "receipt.lanes.pristine",
    ),
    "schema": (lambda one: _edit(one, lambda doc: doc.update(schema=2)), "schema 2 is not the known 1"),
    "another pack": (lambda one: _edit(one, lambda doc: doc.update(pack="../99_none")), "no pack '../99_none'"),
    "escapes": (lambda one: one.update({"\x1b[2Jx": b""}), "no such line"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_bundle_is_told(sent: Path, tmp_path: Path, what: str) -> None:
    change, said = TAMPERED[what]
    content = _read(sent / "sent.zip")
    change(content)
    _write(tmp_path / "tampered.zip", content)
    ended = _verify(sent, tmp_path / "tampered.zip")
    assert "\x1b" not in ended.stdout
    if what == "escapes":
        assert ended.returncode == 0, "one more file that the manifest lists harms nobody"
        return
    assert (ended.returncode, ended.stderr) == (1, ""), ended.stderr
    assert said in ended.stdout


def test_a_manifest_that_does_not_fit_is_told(sent: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "tampered.zip"
    for change, said in (
        (lambda one: one.update({"more.txt": b"x"}), "more.txt: has another hash than the manifest says, or is not in"),
        (lambda one: one.update({"README.md": b"x"}), "README.md: has another hash"),
        (lambda one: one.pop("README.md"), "README.md: missing"),
        (lambda one: one.update({"MANIFEST.json": b"[]"}), "cannot be read: AttributeError"),
    ):
        content = _read(sent / "sent.zip")
        change(content)
        _write(bundle, content, manifest=False)
        ended = _verify(sent, bundle)
        assert (ended.returncode, said in ended.stdout, ended.stderr) == (1, True, ""), ended.stdout


def test_a_damaged_or_hostile_zip_is_told(sent: Path, tmp_path: Path) -> None:
    whole = (sent / "sent.zip").read_bytes()
    bundle = tmp_path / "hostile.zip"
    for data in (whole[: len(whole) // 2], b"PK", whole.replace(b"PK\x01\x02", b"PK\x01\x03", 1), b""):
        bundle.write_bytes(data)
        ended = _verify(sent, bundle)
        assert (ended.returncode, ended.stderr) == (1, "")
    for name in ("/etc/passwd", f"{NAME}/../../x", "other/x"):
        shutil.copy(sent / "sent.zip", bundle)
        with zipfile.ZipFile(bundle, "a") as opened:
            opened.writestr(name, b"x")
        assert "a name leads out of its one folder" in _verify(sent, bundle).stdout
    with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr(f"{NAME}/bomb", b"0" * (65 << 20))
    assert "unpacks to more than" in _verify(sent, bundle).stdout


def test_the_two_lines_of_a_bundle_show_both_sentinels(sent: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(sent / "sent.zip") as opened:
        opened.extractall(tmp_path)
    folder = tmp_path / NAME
    shutil.copytree(toys.RESOURCES / "upstream/toykernel-1.0", folder / "CHECKOUT")
    (block,) = re.findall(r"```sh\n(.*?)\n```", (folder / "README.md").read_text(), re.DOTALL)
    lines = block.replace("uv run", sys.executable).splitlines()
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder)}
    ended = [
        subprocess.run(["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False)
        for line in lines
    ]
    assert [one.returncode for one in ended] == [10, 0], ended
    assert [one.stdout.splitlines()[-1].split()[0] for one in ended] == ["BUG_REPRODUCED", "FIX_VALIDATED"]


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "packs").glob("*/receipts/**/*.json")), ids=lambda path: path.name
)
def test_every_committed_receipt_holds(path: Path) -> None:
    ended = _verify(REPOSITORY, path)
    assert ended.returncode == 0, ended.stdout


def test_verify_is_one_file_of_the_standard_library() -> None:
    text = (REPOSITORY / "verify.py").read_text(encoding="utf-8")
    imported = set(re.findall(r"(?m)^\s*(?:from|import) (\w+)", text)) - {"__future__"}
    assert imported <= sys.stdlib_module_names
    assert len(text.splitlines()) <= 200
