"""A record of wrong fixes, as `mutate --record` would have left it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from harness.core.words import Evidence
from harness.pack import load
from harness.receipt import receipt
from harness.receipt.strength import Fate, MutantRecord, Strength, counts


def lay(folder: Path) -> Path:
    """Record that a toy pack refuses 38 of 40 wrong fixes; return the file."""
    pack = load.load_pack(folder)
    fates = {"own": [Fate.SURVIVED] + [Fate.KILLED] * 9, "generated": [Fate.UNJUDGED] + [Fate.KILLED] * 29}
    mutants = [MutantRecord("name", origin, "", "why", "0", fate) for origin in fates for fate in fates[origin]]
    record = Strength(
        1, folder.name, "cpu", Evidence.TRACED, "2026-11-21", 1, 40, *counts(mutants),
        receipt.judged_by(pack), receipt.hashed(pack.patch), pack.definition.upstream.sha256,
        "3.11", "2", "3", "", 1.0, "runner.py mutate", tuple(mutants),
    )  # fmt: skip
    pack.receipts.mkdir(exist_ok=True)
    path = pack.receipts / record.name
    path.write_text(receipt.to_json(asdict(record)))
    return path
