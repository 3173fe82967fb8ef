"""Tables from receipts of several machines."""

from __future__ import annotations

import json

from testing.workbench import Workbench


def test_the_table_joins_machines_and_shows_the_strongest_evidence(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    definition = pack / "pack.toml"
    definition.write_text(definition.read_text().replace('["traced"]', '["interpreted", "traced"]'))
    out = workbench.folder / "machine/01_confirmed"
    out.mkdir(parents=True)
    definition_text = definition.read_text()
    definition.write_text(definition_text.replace('["interpreted", "traced"]', '["traced"]'))
    workbench.recorded()
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
