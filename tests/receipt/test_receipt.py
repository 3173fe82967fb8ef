"""Receipts: what they hold, what they never hold, and when they are stale."""

from __future__ import annotations

import json
from pathlib import Path

from harness.core import files
from harness.pack import judges, load
from testing.workbench import Workbench


def test_a_receipt_names_places_and_hashes_its_log(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    workbench.recorded()
    path = pack / "receipts/cpu.traced.json"
    receipt = json.loads(path.read_text())
    assert str(workbench.folder) not in path.read_text()
    loaded = [line["file"] for line in receipt["lanes"]["pristine"]["upstream"]]
    assert loaded == ["$TREE/src/toykernel/__init__.py", "$TREE/src/toykernel/scale.py"]
    (log,) = path.parent.glob("*.log")
    assert receipt["log"] == {"file": log.name, "sha256": files.sha256_file(log)}
    assert log.name == f"cpu.traced.{files.sha256_file(log)[:12]}.log"
    assert str(workbench.folder) not in log.read_text()
    assert receipt["probe"]["sha256"] == judges.sha256(load.load_pack(pack))


def _check(workbench: Workbench) -> tuple[int, str]:
    completed = workbench.run("check")
    return completed.returncode, completed.stdout


def test_a_sound_pack_is_sound_and_each_change_makes_it_stale(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    assert "to be admitted here: runner.py run 01_confirmed --record" in _check(workbench)[1]
    workbench.recorded()
    assert _check(workbench) == (0, "1 pack(s) read, 1 sound\n")
    probe, patch = pack / "reproduce.py", pack / "fix.patch"
    original = probe.read_text()
    probe.write_text(original.replace("scaled:", "scaled to:").replace("Cause:", "The cause:"))
    assert "STALE: the script or the contract changed" in _check(workbench)[1], "what it prints is code"
    bundle = workbench.run("report", "1", "--bundle", str(workbench.folder / "sent.zip"))
    assert (bundle.returncode, (workbench.folder / "sent.zip").exists()) == (1, False)
    message = "STALE: the script or the contract changed. Next: runner.py run 01_confirmed --target cpu --record"
    assert message in bundle.stderr
    probe.write_text(original.replace("Cause:", "The cause:"))
    assert "STALE" not in _check(workbench)[1], "a docstring is no part of the meaning"
    assert "README.md: not what report.in.md renders to" in _check(workbench)[1], "but of the report"
    assert workbench.run("report", "1", "--write").returncode == 0
    assert _check(workbench)[0] == 0
    text = patch.read_text()
    patch.write_text(text.replace("multiplied every", "had multiplied every"))
    assert _check(workbench)[0] == 0, "a commit message is no part of the meaning, nor of the report"
    patch.write_text(text.replace("strict=True", "strict=1"))
    status, output = _check(workbench)
    assert status == 1
    assert "STALE: the patch changed" in output
    assert "not what the patch's index line says" in output


def test_a_receipt_that_was_edited_is_found(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    workbench.recorded()
    (log,) = pack.glob("receipts/*.log")
    log.write_text(log.read_text() + "more\n")
    assert f"its log {log.name} is missing or has another hash" in _check(workbench)[1]
    receipt = pack / "receipts/cpu.traced.json"
    receipt.write_text(receipt.read_text().replace('"CONFIRMED"', '"PERFECT"'))
    assert "'PERFECT' is none of CONFIRMED" in _check(workbench)[1]


def test_a_log_that_no_receipt_names_is_found(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    workbench.recorded()
    (log,) = pack.glob("receipts/*.log")
    log.with_name("cpu.traced.0123456789ab.log").write_text("of a run before\n")
    status, output = _check(workbench)
    assert status == 1
    assert "receipts/cpu.traced.0123456789ab.log: no receipt names it. Next: remove it" in output
    log.write_text("changed\n")
    assert "receipts/cpu.traced.0123456789ab.log: no receipt names it" in _check(workbench)[1], "beside another error"
    (pack / "receipts/cpu.traced.json").write_text("{")
    assert "no receipt names it" not in _check(workbench)[1], "it may be that of the receipt which cannot be read"


def test_an_error_never_replaces_a_receipt(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    workbench.recorded()
    path = pack / "receipts/cpu.traced.json"
    before = path.read_bytes()
    (pack / "reproduce.py").write_text("print('hello')\n")
    status, (row,) = workbench.rows("--record")
    assert (status, row["verdict"]) == (1, "ERROR")
    assert path.read_bytes() == before
    assert Path(row["receipt"]).is_relative_to(workbench.cache)


def test_what_a_script_prints_is_scrubbed_as_everything_else(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    script = pack / "reproduce.py"
    script.write_text(script.read_text().replace('print(f"scaled', 'print(scale.__file__)\nprint(f"scaled'))
    workbench.recorded()
    document = json.loads((pack / "receipts/cpu.traced.json").read_text())
    for lane in document["lanes"].values():
        assert lane["printed"].startswith("$TREE/src/toykernel/scale.py\nscaled: ")
    script.write_text(script.read_text().replace("print(scale.__file__)", "print('ghp_' + 'a' * 36)"))
    completed = workbench.run("run", "1", "--record")
    assert "holds a token" in completed.stdout + completed.stderr
