"""The record of wrong fixes: kept in the pack, stale when what it speaks of changed, and read by every table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testing import toys
from testing import workbench as benches
from testing.workbench import Workbench

REFUSES = "42_refuses_wrong_fixes"
EQUIVALENT = '[[equivalent]]\nname = "{}"\nreason = "Nobody adds up nothing."\n'


def _lay(workbench: Workbench, behaviour: str) -> Path:
    """Lay a pack whose sample is empty, with its receipt and strength."""
    pack = workbench.lay(behaviour)
    definition = pack / "pack.toml"
    definition.write_text(definition.read_text() + "\n[strength]\ngenerated = 0\n", encoding="utf-8")
    workbench.recorded()
    assert workbench.run("mutate", "--target", "cpu", "--record").returncode in {0, 1}
    return pack


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Judge a pack that refuses every wrong fix."""
    made = benches.empty(tmp_path_factory.mktemp("judged"))
    _lay(made, REFUSES)
    return made


def test_every_table_shows_the_strength_and_no_reader_takes_it_for_a_receipt(
    judged: Workbench, recorded: Workbench
) -> None:
    pack = recorded.packs / REFUSES
    found = json.loads((pack / "receipts/strength.cpu.traced.json").read_text(encoding="utf-8"))
    assert found["own"]["killed"] == 3
    assert str(judged.folder) not in json.dumps(found)
    assert "CONFIRMED (traced), fresh; mutants: 3 of 3, 20" in recorded.run("list").stdout
    assert recorded.run("report", "42", "--write").returncode == 0
    assert recorded.findings() == ""
    assert recorded.run("report", "42", "--bundle", str(recorded.folder / "bundle.zip")).returncode == 0


def test_a_record_is_stale_when_what_it_speaks_of_changed(recorded: Workbench) -> None:
    pack = recorded.packs / REFUSES
    toys.replace(pack / "contract.py", "2.0, 3.0]", "2.0, 4.0]")
    assert "STALE: the script or the contract changed" in recorded.run("list").stdout
    toys.replace(pack / "contract.py", "2.0, 4.0]", "2.0, 3.0]")
    own = pack / "mutants/adds_the_weight.patch"
    text = own.read_text(encoding="utf-8")
    toys.replace(own, "value + weight", "value - weight")
    assert "adds_the_weight.patch: it does not fit the release with fix.patch: " in recorded.findings()
    own.unlink()
    assert "STALE: its own wrong fixes changed" in recorded.findings()
    own.write_text(text, encoding="utf-8")
    assert "STALE" not in recorded.findings()
    toys.replace(pack / "pack.toml", "generated = 0", "generated = 1")
    assert "STALE: pack.toml states another sample" in recorded.findings()


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "a year to come": ({"date": "2099-12-31"}, "is not a day that has begun"),
    "a day that does not exist": ({"date": "2026-99-99"}, "is not a day that has begun"),
    "more than there are": ({"own": {"killed": 9999, "of": 9999}}, "its numbers are not those of its mutants"),
    "another pack": ({"pack": "01_confirmed"}, "it speaks of 01_confirmed"),
}


@pytest.mark.hostile("receipts")
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_record_is_refused(recorded: Workbench, name: str) -> None:
    lie, reason = FORGED[name]
    path = recorded.packs / REFUSES / "receipts/strength.cpu.traced.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    lie = {key: {**document[key], **value} if isinstance(value, dict) else value for key, value in lie.items()}
    path.write_text(json.dumps(document | lie), encoding="utf-8")
    assert reason in recorded.findings()


def test_check_refuses_survivors_that_nobody_explains(workbench: Workbench) -> None:
    pack = _lay(workbench, "43_lets_wrong_fixes_pass")
    said = workbench.findings()
    assert "loses_an_empty_total: survived, and mutants/equivalent.toml does not say why" in said
    assert "rounds_the_total: survived" in said
    (pack / "mutants/equivalent.toml").write_text(EQUIVALENT.format("loses_an_empty_total"), encoding="utf-8")
    assert "loses_an_empty_total: survived" not in workbench.findings()
    (pack / "mutants/equivalent.toml").write_text(EQUIVALENT.format("nobody_made_this"), encoding="utf-8")
    assert "mutants/equivalent.toml: no mutant 'nobody_made_this'" in workbench.findings()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("mutants/x.patch", "diff --git a/y b/y\n", "stands one line: why it is wrong"),
        ("mutants/x.patch", "One.\nTwo.\ndiff --git a/y b/y\n", "stands one line: why it is wrong"),
        ("mutants/x.patch", "Why.\n", "it changes nothing"),
        ("mutants/x.patch", "Why \N{REPLACEMENT CHARACTER}.\n", "mutants/x.patch: it is not UTF-8"),
        ("mutants/equivalent.toml", "[[equal]]\n", "equal"),
        ("mutants/equivalent.toml", EQUIVALENT.format("x") + 'targets = ["sm_90a"]\n', "x: no target sm_90a"),
    ],
)
def test_check_refuses_mutants_that_are_none(workbench: Workbench, name: str, text: str, reason: str) -> None:
    pack = workbench.lay(REFUSES)
    (pack / name).write_text(text, encoding="utf-8")
    assert reason in workbench.findings()
