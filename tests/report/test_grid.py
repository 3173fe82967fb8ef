"""Lists from receipts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from testing import toys
from testing.workbench import Workbench


def test_the_list_shows_the_strongest_evidence(recorded: Workbench) -> None:
    pack = recorded.packs / "01_confirmed"
    toys.replace(pack / "pack.toml", '["traced"]', '["interpreted", "traced"]')
    (document,) = json.loads(recorded.run("list", "--json").stdout)["packs"]
    cells = document["targets"].values()
    assert [(cell["target"], cell["evidence"], cell["state"]) for cell in cells] == [("cpu", "traced", "fresh")]
    stronger = Path(shutil.copy(pack / "receipts/cpu.traced.json", pack / "receipts/cpu.interpreted.json"))
    toys.replace(stronger, '"evidence": "traced"', '"evidence": "interpreted"')
    assert "CONFIRMED (interpreted), fresh" in recorded.run("list").stdout
