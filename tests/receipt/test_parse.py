"""Receipts that no runner of today wrote are refused, and the error names what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.core.errors import HarnessError
from harness.receipt import receipt

COMMIT = "0123456789" * 4
DOCUMENT: dict[str, Any] = {
    "schema": 2,
    "pack": "01_toy",
    "title": "a toy",
    "kind": "cleanup",
    "target": "sm_90a",
    "evidence": "executed",
    "verdict": "CONFIRMED",
    "reason": "",
    "claims": ["BITWISE_IDENTICAL"],
    "upstream": {
        "package": "toykernel", "version": f"commit {COMMIT}", "origin": "git", "sha256": "ab", "commit": COMMIT,
    },
    "probe": {"sha256": "1", "meaning": "2"},
    "fix": {"kind": "patch", "name": "fix.patch", "sha256": "3", "meaning": "4"},
    "dependencies": {"name": "default", "sha256": "5", "packages": {"numpy": "2.3.5"}},
    "lanes": {},
    "host": {
        "python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "driver": "580",
        "gpus": [{"name": "NVIDIA H200", "compute_capability": "9.0"}], "system": "", "cudnn": "", "nccl": "",
    },
    "log": {"file": "sm_90a.executed.log", "sha256": "6"},
    "command": "runner.py run 1",
    "started": "2026-01-01T00:00:00+00:00",
    "seconds": 1.0,
    "repeats": {"agreeing": 3, "of": 3},
}  # fmt: skip


def test_what_a_receipt_leaves_out_has_its_default() -> None:
    parsed = receipt.parse(json.dumps(DOCUMENT), "toy.json")
    assert (parsed.ranks, parsed.about) == (1, ())


@pytest.mark.parametrize("key", [key for key in DOCUMENT if key != "repeats"])
def test_what_a_receipt_lacks_is_told(key: str) -> None:
    with pytest.raises(HarnessError, match=r"toy\.json"):
        receipt.parse(json.dumps({name: value for name, value in DOCUMENT.items() if name != key}), "toy.json")


@pytest.mark.parametrize("schema", [1, 3, "2", True, None])
def test_a_schema_that_nobody_knows_is_told(schema: object) -> None:
    with pytest.raises(HarnessError, match=r"other\.json: schema: "):
        receipt.parse(json.dumps(DOCUMENT | {"schema": schema}), "other.json")


@pytest.mark.parametrize(("key", "name"), [("log", "file"), ("fix", "name")])
@pytest.mark.parametrize("file", ["", "../fix.patch", "a/b"])
def test_a_file_that_is_not_beside_the_receipt_is_told(key: str, name: str, file: str) -> None:
    with pytest.raises(HarnessError, match=rf"{key}\.{name}: .* is no file beside it"):
        receipt.parse(json.dumps(DOCUMENT | {key: DOCUMENT[key] | {name: file}}), "toy.json")
