"""Lists from receipts."""

from __future__ import annotations

import json

from testing.workbench import Workbench


def test_the_list_shows_the_strongest_evidence(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    definition = pack / "pack.toml"
    definition.write_text(definition.read_text().replace('["traced"]', '["interpreted", "traced"]'))
    definition_text = definition.read_text()
    definition.write_text(definition_text.replace('["interpreted", "traced"]', '["traced"]'))
    workbench.recorded()
    definition.write_text(definition_text)
    text = (
        (pack / "receipts/cpu.traced.json").read_text().replace('"evidence": "traced"', '"evidence": "interpreted"', 1)
    )
    (document,) = json.loads(workbench.run("list", "--json").stdout)
    cells = document["targets"].values()
    assert [(cell["target"], cell["evidence"], cell["state"]) for cell in cells] == [("cpu", "traced", "fresh")]
    (pack / "receipts/cpu.interpreted.json").write_text(text)
    assert "CONFIRMED (interpreted), fresh" in workbench.run("list").stdout
