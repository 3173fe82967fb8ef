"""Receipts: what they hold, what they never hold, and when they are stale."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.core import files
from harness.pack import judges, load
from harness.receipt import receipt, writer
from testing import toys
from testing.workbench import REPOSITORY, Workbench


def test_a_receipt_names_places_and_hashes_its_log(judged: Workbench) -> None:
    pack = judged.packs / "01_confirmed"
    path = pack / "receipts/cpu.traced.json"
    document = json.loads(path.read_text())
    assert str(judged.folder) not in path.read_text()
    loaded = [line["file"] for line in document["lanes"]["pristine"]["upstream"]]
    assert loaded == ["$TREE/src/toykernel/__init__.py", "$TREE/src/toykernel/scale.py"]
    (log,) = path.parent.glob("*.log")
    assert document["log"] == {"file": log.name, "sha256": files.sha256_file(log)}
    assert log.name == f"cpu.traced.{files.sha256_file(log)[:12]}.log"
    assert str(judged.folder) not in log.read_text()
    assert document["probe"]["sha256"] == judges.sha256(load.load_pack(pack))


def test_a_log_leaves_out_the_tracebacks_whose_reasons_the_receipt_has(judged: Workbench) -> None:
    receipts = judged.packs / "01_confirmed/receipts"
    (log,) = receipts.glob("*.log")
    text, pristine = log.read_text(), json.loads((receipts / "cpu.traced.json").read_text())["lanes"]["pristine"]
    assert any(check["ok"] is False and check["reason"] for check in pristine["checks"])
    assert "FAILURES" not in text
    assert "BUG_REPRODUCED" in text
    assert " failed" in text, "pytest's last line stays"


def test_an_object_of_plain_values_stands_on_one_line() -> None:
    check = {"name": 'a[x{"\n]', "ok": None, "seconds": 0.5}
    document = {"checks": [check, check | {"inner": {"a": [1]}}], "none": {}}
    text = receipt.to_json(document)
    assert json.loads(text) == document
    assert f"  {json.dumps(check)},\n" in text
    assert '   "inner": {\n' in text, "an object with a list in it keeps its lines"


def _check(workbench: Workbench) -> tuple[int, str]:
    ended = workbench.run("check")
    return ended.returncode, ended.stdout


def test_a_sound_pack_is_sound_and_each_change_makes_it_stale(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    assert "to be admitted here: runner.py run 01_confirmed --record" in _check(workbench)[1]
    workbench.recorded()
    assert _check(workbench) == (0, "1 pack(s) read, 1 sound\n")
    script, patch = pack / "reproduce.py", pack / "fix.patch"
    original = script.read_text()
    script.write_text(original.replace("scaled:", "scaled to:").replace("Cause:", "The cause:"))
    assert "STALE: the script or the contract changed" in _check(workbench)[1], "what it prints is code"
    bundle = workbench.run("report", "1", "--bundle", str(workbench.folder / "sent.zip"))
    assert (bundle.returncode, (workbench.folder / "sent.zip").exists()) == (1, False)
    said = "STALE: the script or the contract changed. Next: runner.py run 01_confirmed --target cpu --record"
    assert said in bundle.stderr
    script.write_text(original.replace("Cause:", "The cause:"))
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


def test_a_receipt_that_was_edited_is_found(recorded: Workbench) -> None:
    pack = recorded.packs / "01_confirmed"
    (log,) = pack.glob("receipts/*.log")
    log.write_text(log.read_text() + "more\n")
    assert f"its log {log.name} is missing or has another hash" in _check(recorded)[1]
    toys.replace(pack / "receipts/cpu.traced.json", '"CONFIRMED"', '"PERFECT"')
    assert "'PERFECT' is none of CONFIRMED" in _check(recorded)[1]


def test_a_log_that_no_receipt_names_is_found(recorded: Workbench) -> None:
    pack = recorded.packs / "01_confirmed"
    (log,) = pack.glob("receipts/*.log")
    log.with_name("cpu.traced.0123456789ab.log").write_text("of a run before\n")
    status, output = _check(recorded)
    assert status == 1
    assert "receipts/cpu.traced.0123456789ab.log: no receipt names it. Next: remove it" in output
    log.write_text("changed\n")
    assert "receipts/cpu.traced.0123456789ab.log: no receipt names it" in _check(recorded)[1], "beside another error"
    (pack / "receipts/cpu.traced.json").write_text("{")
    assert "no receipt names it" not in _check(recorded)[1], "it may be that of the receipt which cannot be read"


def test_runners_at_once_on_one_folder_leave_one_whole_pair(tmp_path: Path) -> None:
    document = json.loads((REPOSITORY / "packs/09_liger_flce_none/receipts/cpu.interpreted.json").read_bytes())
    made = []
    for number in range(3):
        digest = files.sha256_bytes(f"log {number}".encode())
        log = tmp_path / f"{number}/cpu.interpreted.{digest[:12]}.log"
        log.parent.mkdir()
        log.write_text(f"log {number}")
        made.append(log.with_name("cpu.interpreted.json"))
        made[-1].write_text(json.dumps(document | {"log": {"file": log.name, "sha256": digest}}))
    folder = tmp_path / "receipts"
    with ThreadPoolExecutor(len(made)) as runners:
        for _ in range(30):
            list(runners.map(lambda path: writer.publish(path, folder), made))
            kept = receipt.load(folder / "cpu.interpreted.json").log
            assert {path.name for path in folder.iterdir()} == {"cpu.interpreted.json", kept.file}
            assert files.sha256_file(folder / kept.file) == kept.sha256


def test_an_error_never_replaces_a_receipt(recorded: Workbench) -> None:
    pack = recorded.packs / "01_confirmed"
    path = pack / "receipts/cpu.traced.json"
    before = path.read_bytes()
    (pack / "reproduce.py").write_text("print('hello')\n")
    status, (row,) = recorded.rows("--record")
    assert (status, row["verdict"]) == (1, "ERROR")
    assert path.read_bytes() == before
    assert Path(row["receipt"]).is_relative_to(recorded.cache)


def test_what_a_script_prints_is_scrubbed_as_everything_else(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    script = pack / "reproduce.py"
    script.write_text(script.read_text().replace('print(f"scaled', 'print(scale.__file__)\nprint(f"scaled'))
    workbench.recorded()
    document = json.loads((pack / "receipts/cpu.traced.json").read_text())
    for lane in document["lanes"].values():
        assert lane["printed"].startswith("$TREE/src/toykernel/scale.py\nscaled: ")
