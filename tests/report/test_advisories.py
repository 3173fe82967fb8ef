"""The OSV records: as wide as what was judged, as their packs say, and of the shape that OSV has."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.commands import audit
from harness.core.errors import HarnessError
from harness.pack import judges, load
from harness.pack.model import Pack
from harness.receipt.receipt import to_json
from harness.report import advisories
from testing import toys
from testing.workbench import REPOSITORY, Workbench

SCHEMA = REPOSITORY / "tests/report/record.schema.json"
RECORDS = sorted(audit.FOLDER.glob("*.json"))
VERDICTS = {"B": "BUG_REPRODUCED", "r": "FIX_VALIDATED", "?": "UNSUPPORTED", "E": "ERROR", "C": "CONTROL_FAILED"}


def _pack(recorded: Workbench) -> Pack:
    return load.load_pack(recorded.packs / "01_confirmed")


def _keep(recorded: Workbench, verdicts: dict[str, str], target: str = "cpu", **changed: object) -> Path:
    """Write what `runner.py versions --record` would keep: one letter of `VERDICTS` for each version."""
    pack = _pack(recorded)
    document: dict[str, Any] = {
        "schema": 1,
        "pack": pack.name,
        "target": target,
        "evidence": "traced" if target == "cpu" else "executed",
        "over": "release",
        "line": "",
        "probe": judges.sha256(pack),
        "python": "3.11",
        "torch": "2.13",
        "triton": "",
        "command": "runner.py versions 1 --record",
        "rows": [
            {"label": label, "date": "", "verdict": VERDICTS[letter], "figure": "", "reason": "", "seconds": 1.0}
            for label, letter in verdicts.items()
        ],
    }
    path = pack.folder / "data" / f"history.{target}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(to_json(document | changed), encoding="utf-8")
    return path


def _document(recorded: Workbench) -> dict[str, Any]:
    found = advisories.document(_pack(recorded))
    assert found is not None
    return found


def _edit(recorded: Workbench, old: str, new: str) -> None:
    toys.replace(recorded.packs / "01_confirmed/pack.toml", old, new)


def _valid(document: object, schema: Path = SCHEMA) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(document, json.loads(schema.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_the_shape_that_osv_has(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    _valid(document)
    assert audit.load(path).document["id"] == path.stem
    whole = os.environ.get("OSV_SCHEMA")  # a copy of upstream's own schema.json, which is not kept here
    if whole:
        _valid(document, Path(whole))


def test_the_schema_refuses_what_osv_and_the_reader_would(recorded: Workbench) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    good = _document(recorded) | {"modified": "2026-11-22T00:00:00Z", "published": "2026-11-22T00:00:00Z"}
    _valid(good)
    for broken in (
        {"modified": "yesterday"},
        {"id": "CVE-2026-1"},
        {"affected": [good["affected"][0] | {"versions": []}]},
        {"references": [{"type": "WEB", "url": "packs/01_confirmed/README.md"}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            _valid(good | broken)


def test_a_receipt_alone_says_nothing_of_other_versions(recorded: Workbench) -> None:
    found = _document(recorded)
    assert found["affected"][0]["versions"] == ["1.0"]
    assert "ranges" not in found["affected"][0]
    (period,) = found["database_specific"]["periods"]
    assert period["since"] == "since 1.0 or earlier"
    assert period["fixed"] == "fixed in 2.0, as the pack states"
    assert found["database_specific"]["judged"]["1.0"]["evidence"] == ["traced on cpu"]


@pytest.mark.parametrize(
    ("verdicts", "since", "fixed", "exact"),
    [
        ({"0.9": "r", "1.0": "B", "2.0": "r"}, "since 1.0", "fixed in 2.0", True),
        (
            {"0.9": "r", "0.9.1": "?", "1.0": "B", "1.1": "E", "2.0": "r"},
            "since 1.0 or earlier, after 0.9",
            "fixed in 2.0 or earlier, after 1.0",
            False,
        ),
        ({"0.9": "?", "1.0": "B"}, "since 1.0 or earlier", "fixed in 2.0, as the pack states", False),
        ({"0.8": "B", "0.9": "C", "1.0": "B", "2.0": "r"}, "since 0.8 or earlier", "fixed in 2.0", True),
    ],
)
def test_the_ends_are_as_exact_as_the_verdicts(
    recorded: Workbench, verdicts: dict[str, str], since: str, fixed: str, *, exact: bool
) -> None:
    _keep(recorded, verdicts)
    found = _document(recorded)
    (period,) = found["database_specific"]["periods"]
    assert (period["since"], period["fixed"]) == (since, fixed)
    affected = found["affected"][0]
    assert affected["versions"] == [label for label, letter in verdicts.items() if letter == "B"]
    assert ("ranges" in affected) == exact
    if exact:
        assert affected["ranges"] == [{"type": "ECOSYSTEM", "events": [{"introduced": "1.0"}, {"fixed": "2.0"}]}]


def test_versions_of_two_files_are_no_neighbours(recorded: Workbench) -> None:
    _keep(recorded, {"1.4": "r", "1.5": "r"})
    found = _document(recorded)
    assert "ranges" not in found["affected"][0], "between 1.0, of the receipt, and 1.4 lies what nobody listed"
    assert found["database_specific"]["periods"][0]["fixed"] == "fixed in 1.4 or earlier, after 1.0"


def test_a_bug_that_one_target_shows_is_there(recorded: Workbench) -> None:
    _keep(recorded, {"0.9": "r", "1.0": "r", "1.1": "r"})
    _keep(recorded, {"0.9": "B", "1.0": "B", "1.1": "?"}, target="sm_90a")
    found = _document(recorded)
    assert found["affected"][0]["versions"] == ["0.9", "1.0"]
    said = found["database_specific"]["judged"]
    assert said["1.0"]["evidence"] == ["executed on sm_90a", "traced on cpu"]
    assert said["1.1"]["state"] == "not affected"


def test_what_could_not_be_judged_is_kept_with_its_reason(recorded: Workbench) -> None:
    path = _keep(recorded, {"0.7": "?", "0.8": "E", "0.9": "C", "1.0": "B"})
    found = json.loads(path.read_text(encoding="utf-8"))
    found["rows"][2]["reason"] = "a, b, c, d"
    path.write_text(json.dumps(found), encoding="utf-8")
    said = _document(recorded)["database_specific"]["judged"]
    assert said["0.7"] == {"state": "not judged", "evidence": [], "reason": "UNSUPPORTED"}
    assert said["0.8"]["reason"] == "ERROR"
    assert said["0.9"]["reason"] == "CONTROL_FAILED a, b, c, d"


def test_an_older_script_is_told_and_gives_way_to_todays(recorded: Workbench) -> None:
    _keep(recorded, {"0.9": "B", "1.0": "r"}, probe="0" * 64)
    said = _document(recorded)["database_specific"]["judged"]
    assert said["0.9"]["evidence"] == ["traced on cpu (the script or the contract changed since)"]
    assert said["1.0"]["state"] == "affected"
    _keep(recorded, {"1.0": "B"}, probe="0" * 64)
    assert _document(recorded)["database_specific"]["judged"]["1.0"]["evidence"] == ["traced on cpu"]
    _keep(recorded, {"0.9": "B"}, probe="0" * 64, meaning=judges.meaning_of(_pack(recorded)))
    judged = _document(recorded)["database_specific"]["judged"]
    assert judged["0.9"]["evidence"] == ["traced on cpu"], "a comment changed, and no check"


def test_commits_are_no_versions(recorded: Workbench) -> None:
    _keep(recorded, {"0123456789ab": "B"}, over="commit")
    assert _document(recorded)["affected"][0]["versions"] == ["1.0"]


def test_a_pack_that_pins_a_commit_warns_of_no_release(recorded: Workbench) -> None:
    for line in ('version = "1.0"', 'file = "toykernel-1.0.zip"', f'sha256 = "{recorded.sha256}"'):
        _edit(recorded, line, "date = 2026-01-01" if line.startswith("file") else "")
    assert advisories.document(_pack(recorded)) is None


def test_a_cleanup_is_no_bug_and_a_pack_without_one_has_no_record(recorded: Workbench) -> None:
    _edit(recorded, 'kind = "wrong-result"', 'advisory = false\nkind = "wrong-result"')
    assert advisories.document(_pack(recorded)) is None
    _edit(recorded, 'advisory = false\nkind = "wrong-result"', 'kind = "cleanup"')
    assert advisories.document(_pack(recorded)) is None
    _edit(recorded, 'kind = "cleanup"', 'kind = "crash"')
    assert _document(recorded)["database_specific"]["silent"] is False
    shutil.rmtree(recorded.packs / "01_confirmed/receipts")
    assert advisories.document(_pack(recorded)) is None


def test_a_workaround_is_said_only_where_a_control_shows_it(recorded: Workbench) -> None:
    (receipt,) = (recorded.packs / "01_confirmed/receipts").glob("cpu.*.json")
    checks = json.loads(receipt.read_text(encoding="utf-8"))["lanes"]["pristine"]["checks"]
    control = next(one["name"] for one in checks if one["role"] == "control")
    defect = next(one["name"] for one in checks if one["role"] == "defect")
    stated = f'workaround = {{ text = "do it otherwise", checks = ["{control}"] }}\n'
    _edit(recorded, "fixed_in", stated + "fixed_in")
    assert _document(recorded)["database_specific"]["workaround"] == "do it otherwise (shown on 1.0)"
    _edit(recorded, f'["{control}"]', f'["{control}", "{defect}"]')
    with pytest.raises(HarnessError, match="no receipt has a control named"):
        advisories.document(_pack(recorded))
    assert "unsound: 01_confirmed: 01_confirmed/pack.toml: workaround.checks" in recorded.run("check").stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('workaround = { text = " ", checks = ["a"] }', "workaround.text"),
        ('workaround = { text = "a", checks = [] }', "workaround.checks"),
        ('workaround = "a"', "workaround: expected a table"),
    ],
)
def test_a_workaround_that_nothing_shows_is_refused(recorded: Workbench, line: str, said: str) -> None:
    _edit(recorded, "fixed_in", f"{line}\nfixed_in")
    with pytest.raises(HarnessError, match=said):
        _pack(recorded)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ('{"schema": 1', "not JSON"),
        ('{"schema": 1}', "is missing"),
        ("[]", "expected a table"),
    ],
)
def test_a_broken_history_is_one_line(recorded: Workbench, text: str, said: str) -> None:
    _keep(recorded, {"1.0": "B"}).write_text(text, encoding="utf-8")
    with pytest.raises(HarnessError, match=rf"^01_confirmed/data/history.cpu.json: .*{said}[^\n]*$"):
        advisories.document(_pack(recorded))


def test_a_history_of_what_is_no_version_is_refused(recorded: Workbench) -> None:
    _keep(recorded, {"main": "B"})
    with pytest.raises(HarnessError, match=r"Next: runner.py versions --record"):
        advisories.document(_pack(recorded))


def test_the_verb_writes_keeps_the_times_and_deletes_what_has_no_pack(recorded: Workbench) -> None:
    folder = recorded.folder / "advisories"
    folder.mkdir()
    stale = "x_WRONG-NUMERICS-01.json: is missing. Next: runner.py check --write\n"
    assert f"unsound: advisories: {stale}" in recorded.run("check").stdout
    written = recorded.run("check", "--write")
    assert (written.returncode, written.stdout) == (0, "x_WRONG-NUMERICS-01.json: is missing; written\n")
    path = folder / "x_WRONG-NUMERICS-01.json"
    _valid(json.loads(path.read_text(encoding="utf-8")))
    old = path.read_text(encoding="utf-8").replace('"published": "2', '"published": "1')
    path.write_text(old, encoding="utf-8")
    assert "advisories" not in recorded.run("check").stdout, "times are no part of what a record says"
    _keep(recorded, {"1.0": "B", "2.0": "r"})
    (folder / "x_WRONG-NUMERICS-77.json").write_text("{}", encoding="utf-8")
    assert "advisories: x_WRONG-NUMERICS-77.json: has no pack" in recorded.run("check").stdout
    assert recorded.run("check", "--write").returncode == 0
    assert [one.name for one in folder.iterdir()] == [path.name]
    assert json.loads(path.read_text(encoding="utf-8"))["published"].startswith("1")
    path.write_text("no JSON", encoding="utf-8")
    assert "advisories: x_WRONG-NUMERICS-01.json: differs" in recorded.run("check").stdout
