"""Strict structuring of TOML and JSON into frozen dataclasses, with all errors of a file at once."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar

import cattrs

Structured = TypeVar("Structured")


class StructureError(ValueError):
    """The errors of one document, each with its path."""

    def __init__(self, errors: list[str]) -> None:
        """Keep the errors apart: a command prints one line for each."""
        super().__init__("; ".join(errors))
        self.errors = errors


def _exactly(kind: type) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:  # noqa: ANN401 - any parsed value may stand here
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return structure


def _structure_enum(value: Any, kind: type[StrEnum]) -> StrEnum:  # noqa: ANN401 - any parsed value may stand here
    if value not in list(kind):
        raise ValueError(f"{value!r} is none of {', '.join(kind)}")
    return kind(value)


@functools.cache
def converter() -> cattrs.Converter:
    """Build a converter that coerces nothing and refuses unknown keys."""
    strict = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind in (str, int, float, bool, dt.date):
        strict.register_structure_hook(kind, _exactly(kind))
    strict.register_structure_hook(StrEnum, _structure_enum)
    strict.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)
    return strict


def structure(document: Any, kind: type[Structured]) -> Structured:  # noqa: ANN401 - a parsed document
    """Turn a parsed document into `kind`, or raise StructureError with every error in it."""
    try:
        return converter().structure(document, kind)
    except cattrs.BaseValidationError as error:
        raise StructureError(
            [_readable(line) for line in cattrs.transform_error(error, format_exception=_explain)]
        ) from None


def _explain(error: BaseException, kind: type | None) -> str:
    if isinstance(error, KeyError):
        return f"the key {error.args[0]!r} is missing"
    return cattrs.v.format_exception(error, kind) if not isinstance(error, (TypeError, ValueError)) else str(error)


def _readable(line: str) -> str:
    message, _, path = line.rpartition(" @ ")
    return f"{path.removeprefix('$').removeprefix('.') or 'top level'}: {message}"
