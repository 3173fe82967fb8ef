"""Lists from receipts of several machines."""

from __future__ import annotations

import json

from testing.workbench import Workbench


def test_the_list_joins_machines_and_shows_the_strongest_evidence(workbench: Workbench) -> None:
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
    both = ("--from", str(workbench.packs), "--from", str(out.parent))
    assert "CONFIRMED (interpreted), fresh" in workbench.run("list", *both).stdout
    (document,) = json.loads(workbench.run("list", "--json").stdout)
    cells = document["targets"].values()
    assert [(cell["target"], cell["evidence"], cell["state"]) for cell in cells] == [("cpu", "traced", "fresh")]
    assert workbench.run("list", "--from", "/no/such/folder").returncode == 2
