"""Receipts: what they hold, what they never hold, and when they are stale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Workbench

from harness import files, freshness
from harness.privacy import PrivateTextError, Scrubber


def test_a_receipt_names_places_and_hashes_its_log(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    workbench.rows()
    path = pack / "receipts/cpu.traced.json"
    receipt = json.loads(path.read_text())
    assert str(workbench.folder) not in path.read_text()
    assert receipt["lanes"]["pristine"]["upstream"][0]["file"] == "$TREE/src/toykernel/scale.py"
    log = path.with_suffix(".log")
    assert receipt["log"] == {"file": log.name, "sha256": files.sha256_file(log)}
    assert str(workbench.folder) not in log.read_text()
    assert receipt["probe"]["sha256"] == files.sha256_file(pack / "reproduce.py")


def test_a_probe_that_prints_a_token_gets_no_receipt(workbench: Workbench) -> None:
    pack = workbench.lay("32_prints_secrets")
    value = "correct-horse-battery"
    ended = workbench.run("run", "--lane", "pristine", "--receipts", str(workbench.folder / "out"), MY_TOKEN=value)
    assert ended.returncode == 2
    assert "error: 32_prints_secrets cpu: refused to write: log holds a token" in ended.stderr
    assert "ghp_" not in ended.stderr
    assert not list(workbench.folder.glob("out/**/*"))
    assert not list(pack.glob("receipts/*"))
    (log,) = workbench.cache.glob("runs/*/*.log")
    assert value not in log.read_text(), "a lane does not even inherit it"


SCRUBBER = Scrubber({"/srv/ada": "$HOME"}, {"lovelace7": "the host's name"}, {"s3cr3t-value": "MY_TOKEN"})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("on lovelace7:", "the host's name"),
        ("token hf_" + "a" * 30, "a token"),
        ("Authorization: Bearer " + "x" * 24, "an authorization header"),
        ("https://ada:pw@example.org/simple", "a password in a URL"),
        ("GPU-3f2a9c11-0b7e-4a52-9d8c-0123456789ab", "a GPU UUID"),
        ("connect to 10.1.2.3 failed", "an IP address"),
        ("listening on fe80::1ff:fe23:4567:890a", "an IP address"),
        ("by ada@example.org", "an e-mail address"),
        ("in /home/ada/checkout", "a home folder"),
        ("got s3cr3t-value", "the value of MY_TOKEN"),
    ],
)
def test_what_looks_private_is_refused_by_field_and_not_repeated(text: str, what: str) -> None:
    with pytest.raises(PrivateTextError) as caught:
        SCRUBBER.document({"lanes": {"pristine": {"reason": text}}})
    assert f"receipt.lanes.pristine.reason holds {what}" in str(caught.value)
    assert text not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1", "nvidia-cublas==13.0.2.14", "std::vector<int>", "/srv/ada/x.py", "12:34:56", "a @ b.T"],
)
def test_what_only_resembles_it_is_not(text: str) -> None:
    assert "ada" not in str(SCRUBBER.document(text))


PROBE = '"""Doc."""\n\nimport os  # why\n\nx = """#no comment"""\nprint(f"{x}#")\n'


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (PROBE.replace("Doc.", "Another doc,\nof two lines."), True),
        (PROBE.replace("  # why", ""), True),
        (PROBE.replace("\n\nx", "\n# new\n\n\nx"), True),
        (PROBE.replace("#no", "# no"), False),
        (PROBE.replace("{x}#", "{x}"), False),
        (PROBE.replace("import os", "import sys"), False),
    ],
)
def test_a_probe_is_compared_by_meaning(changed: str, same: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert (freshness.probe_meaning(PROBE) == freshness.probe_meaning(changed)) == same


def _check(workbench: Workbench) -> tuple[int, str]:
    ended = workbench.run("check")
    return ended.returncode, ended.stdout


def test_a_sound_pack_is_sound_and_each_change_makes_it_stale(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    assert "no receipt. Next: runner.py run 01_confirmed --target cpu" in _check(workbench)[1]
    workbench.rows()
    assert _check(workbench) == (0, "1 pack(s) read, 1 sound\n")
    probe, patch = pack / "reproduce.py", pack / "fix.patch"
    original = probe.read_text()
    probe.write_text(original.replace("Compare `scale`", "Now compare `scale`").replace("Cause:", "The cause:"))
    assert "STALE: the probe changed" in _check(workbench)[1], "a function's docstring is code"
    probe.write_text(original.replace("Cause:", "The cause:"))
    assert _check(workbench)[0] == 0
    text = patch.read_text()
    patch.write_text(text.replace("multiplied every", "had multiplied every"))
    assert _check(workbench)[0] == 0, "a commit message is no part of the meaning"
    patch.write_text(text.replace("strict=True", "strict=1"))
    status, output = _check(workbench)
    assert status == 1
    assert "STALE: the patch changed" in output
    assert "not what the patch's index line says" in output


def test_a_receipt_that_was_edited_is_found(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    workbench.rows()
    log = pack / "receipts/cpu.traced.log"
    log.write_text(log.read_text() + "more\n")
    assert "its log cpu.traced.log is missing or has another hash" in _check(workbench)[1]
    receipt = pack / "receipts/cpu.traced.json"
    receipt.write_text(receipt.read_text().replace('"CONFIRMED"', '"PERFECT"'))
    assert "'PERFECT' is none of CONFIRMED" in _check(workbench)[1]


def test_an_error_never_replaces_a_receipt(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    workbench.rows()
    path = pack / "receipts/cpu.traced.json"
    before = path.read_bytes()
    (pack / "reproduce.py").write_text("print('hello')\n")
    status, (row,) = workbench.rows()
    assert (status, row["verdict"]) == (1, "ERROR")
    assert path.read_bytes() == before
    assert Path(row["receipt"]).is_relative_to(workbench.cache)


def test_the_table_joins_machines_and_shows_the_strongest_evidence(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    definition = pack / "pack.toml"
    definition.write_text(definition.read_text().replace('["traced"]', '["interpreted", "traced"]'))
    out = workbench.folder / "machine/01_confirmed"
    out.mkdir(parents=True)
    definition_text = definition.read_text()
    definition.write_text(definition_text.replace('["interpreted", "traced"]', '["traced"]'))
    workbench.rows()
    definition.write_text(definition_text)
    text = (
        (pack / "receipts/cpu.traced.json").read_text().replace('"evidence": "traced"', '"evidence": "interpreted"', 1)
    )
    (out / "cpu.interpreted.json").write_text(text)
    ended = workbench.run("table", str(workbench.packs), str(out.parent), "--format", "markdown")
    assert ended.returncode == 0, ended.stderr
    assert "| 01_confirmed | wrong-result | CONFIRMED (interpreted) |" in ended.stdout
    cells = json.loads(workbench.run("table", "--format", "json").stdout)
    assert [(cell["target"], cell["evidence"], cell["state"]) for cell in cells] == [("cpu", "traced", "fresh")]
    assert "traced" in workbench.run("table").stdout
    assert workbench.run("table", "/no/such/folder").returncode == 2
