"""Receipts that no runner of today wrote are refused, and the error names what is wrong."""

from __future__ import annotations

import json

import pytest

from harness.core.errors import HarnessError
from harness.receipt import receipt
from testing.workbench import REPOSITORY

RECEIPT = REPOSITORY / "packs/09_liger_flce_none/receipts/cpu.interpreted.json"
#: What a receipt has to say.
DOCUMENT = {key: value for key, value in json.loads(RECEIPT.read_bytes()).items() if key not in {"ranks", "repeats"}}


def test_what_a_receipt_leaves_out_has_its_default() -> None:
    one = receipt.parse(json.dumps(DOCUMENT), "toy.json")
    assert (one.ranks, one.repeats.of, one.about) == (1, 1, ())


@pytest.mark.parametrize("key", DOCUMENT)
def test_what_a_receipt_lacks_is_told(key: str) -> None:
    with pytest.raises(HarnessError, match=r"toy\.json"):
        receipt.parse(json.dumps({name: value for name, value in DOCUMENT.items() if name != key}), "toy.json")


@pytest.mark.parametrize("schema", [1, 2, "3", True, None])
def test_a_schema_that_nobody_knows_is_told(schema: object) -> None:
    with pytest.raises(HarnessError, match=r"other\.json: schema: "):
        receipt.parse(json.dumps(DOCUMENT | {"schema": schema}), "other.json")


@pytest.mark.parametrize(("key", "name"), [("log", "file"), ("fix", "name")])
@pytest.mark.parametrize("file", ["", "../fix.patch", "a/b"])
def test_a_file_that_is_not_beside_the_receipt_is_told(key: str, name: str, file: str) -> None:
    with pytest.raises(HarnessError, match=rf"toy\.json: {key}.*: .*{file}.* is not a file beside it"):
        receipt.parse(json.dumps(DOCUMENT | {key: DOCUMENT[key] | {name: file}}), "toy.json")
