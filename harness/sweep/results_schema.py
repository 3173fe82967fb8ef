"""The JSON schema of results.json, built from its dataclasses.

``python -m harness.sweep.results_schema`` writes it anew.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

from harness.sweep.results import SCHEMA, Results

PATH = Path(__file__).with_name("results.schema.json")
PLAIN: dict[object, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    object: {},
}


def _of_type(kind: Any, found: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - a type, or one of typing's
    if kind in PLAIN:
        return PLAIN[kind]
    if typing.get_origin(kind) is tuple:
        return {"type": "array", "items": _of_type(typing.get_args(kind)[0], found)}
    found[kind.__name__] = _of_class(kind, found)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _of_class(kind: type, found: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return {
        "type": "object",
        "description": " ".join((kind.__doc__ or "").split()),
        "properties": {name: _of_type(hints[name], found) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def document() -> dict[str, Any]:
    """Return the schema."""
    found: dict[str, Any] = {}
    whole = _of_class(Results, found)
    whole["properties"]["schema"] = {"const": SCHEMA}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, "$defs": found}


def text() -> str:
    """Return the schema as it stands in the repository."""
    return json.dumps(document(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
