"""Receipts that an older runner wrote say the same in today's words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.core.errors import HarnessError
from harness.core.words import Kind
from harness.receipt import receipt

COMMIT = "0123456789" * 4
OLD: dict[str, Any] = {
    "schema": 1,
    "pack": "01_toy",
    "title": "a toy",
    "kind": "robustness",
    "target": "sm_90a",
    "evidence": "executed",
    "verdict": "CONFIRMED",
    "reason": "",
    "claims": ["BITWISE_IDENTICAL"],
    "upstream": {"package": "toykernel", "version": f"commit {COMMIT}", "origin": "git", "sha256": "ab"},
    "probe": {"sha256": "1", "meaning": "2"},
    "patch": {"sha256": "3", "meaning": "4"},
    "companions": {"name": "default", "sha256": "5", "packages": {"numpy": "2.3.5"}},
    "lanes": {},
    "host": {
        "python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "driver": "580",
        "gpu": "NVIDIA H200", "compute_capability": "9.0", "system": "", "cudnn": "", "nccl": "",
    },
    "log": {"file": "sm_90a.executed.log", "sha256": "6"},
    "command": "runner.py run 1",
    "started": "2026-01-01T00:00:00+00:00",
    "seconds": 1.0,
    "repeats": {"agreeing": 3, "of": 3},
}  # fmt: skip


def test_a_receipt_of_schema_1_is_read_in_the_words_of_schema_2() -> None:
    one = receipt.parse(json.dumps(OLD), "old.json")
    assert (one.schema, one.kind, one.upstream.commit) == (2, Kind.CLEANUP, COMMIT)
    assert one.fix == receipt.FixRecord(receipt.FixKind.PATCH, "", "3", "4")
    assert (one.dependencies.packages, one.host.gpu) == ({"numpy": "2.3.5"}, "NVIDIA H200")
    assert (one.ranks, one.strength) == (1, None)
    assert one.log.file == "sm_90a.executed.log"


@pytest.mark.parametrize("key", [key for key in OLD if key not in ("schema", "repeats")])
def test_what_a_receipt_of_schema_1_lacks_is_told(key: str) -> None:
    with pytest.raises(HarnessError, match=r"old\.json"):
        receipt.parse(json.dumps({name: value for name, value in OLD.items() if name != key}), "old.json")


def test_a_schema_that_nobody_knows_is_told() -> None:
    with pytest.raises(HarnessError, match="receipt of schema 3; this runner knows 1 and 2"):
        receipt.parse(json.dumps(OLD | {"schema": 3}), "new.json")
