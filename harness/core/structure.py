"""Strict structuring of TOML and JSON into frozen dataclasses, with all errors of a file at once."""

import dataclasses
import datetime as dt
import functools
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar, get_args, get_origin

import cattrs
from cattrs.cols import homogenous_tuple_structure_factory, mapping_structure_factory
from cattrs.gen import make_dict_structure_fn

Structured = TypeVar("Structured")
Hook = Callable[[Any, Any], Any]
Factory = Callable[[Any, cattrs.Converter], Hook]
#: Characters of a value in an error.
SHOWN = 80


@dataclasses.dataclass(frozen=True)
class Form:
    """A condition on a value besides its type: `Annotated[str, Form("a version", Version)]`."""

    description: str  # in an error
    fits: Callable[[Any], object]  # whether a value meets it; ValueError says no, too


class StructureError(ValueError):
    """The errors of one document, each with its path."""

    def __init__(self, errors: list[str]) -> None:
        """Keep the errors apart: a command prints one line for each."""
        super().__init__("; ".join(errors))
        self.errors = errors


def _exact_hook(kind: type) -> Hook:
    def structure(value: Any, _: Any) -> Any:  # noqa: ANN401 - any parsed value may stand here
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return structure


def _structure_enum(value: Any, kind: type[StrEnum]) -> StrEnum:  # noqa: ANN401 - any parsed value may stand here
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{value!r} is none of {', '.join(kind)}") from None


def _formed_hook(kind: Any, strict: cattrs.Converter) -> Hook:  # noqa: ANN401 - an annotated type
    base, form = get_args(kind)
    inner = strict.get_structure_hook(base)

    def structure(value: Any, _: Any) -> Any:  # noqa: ANN401 - any parsed value may stand here
        structured = inner(value, base)
        try:
            fits = form.fits(structured)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"{str(structured)[:SHOWN]!r} is not {form.description}")
        return structured

    return structure


@functools.cache
def converter() -> cattrs.Converter:
    """Build a converter that coerces nothing and refuses unknown keys."""
    strict = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind in (str, int, float, bool, dt.date):
        strict.register_structure_hook(kind, _exact_hook(kind))
    strict.register_structure_hook(StrEnum, _structure_enum)
    strict.register_structure_hook_factory(lambda kind: hasattr(kind, "__metadata__"), _formed_hook)
    strict.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)

    def register(fits: Callable[[Any], bool], noun: str, kinds: type | tuple[type, ...], factory: Factory) -> None:
        """Refuse values of other kinds: a text would pass for a list of its letters."""

        def checked(kind: Any) -> Hook:  # noqa: ANN401 - a type
            inner = factory(kind, strict)

            def structure(value: Any, _: Any) -> Any:  # noqa: ANN401 - any parsed value may stand here
                if not isinstance(value, kinds):
                    raise TypeError(f"expected {noun}, got {type(value).__name__}")
                return inner(value, kind)

            return structure

        strict.register_structure_hook_factory(fits, checked)

    register(lambda kind: get_origin(kind) is tuple, "a list", (list, tuple), homogenous_tuple_structure_factory)
    register(lambda kind: get_origin(kind) is dict, "a table", dict, mapping_structure_factory)
    register(dataclasses.is_dataclass, "a table", dict, make_dict_structure_fn)
    return strict


def structure(document: Any, kind: type[Structured]) -> Structured:  # noqa: ANN401 - a parsed document
    """Turn a parsed document into `kind`; StructureError holds every error in it."""
    try:
        return converter().structure(document, kind)
    except cattrs.BaseValidationError as error:
        lines = cattrs.transform_error(error, format_exception=_explain)
        raise StructureError([_readable(line) for line in lines]) from None
    except (TypeError, ValueError) as error:
        raise StructureError([f"top level: {error}"]) from None


def _explain(error: BaseException, kind: type | None) -> str:
    if isinstance(error, KeyError):
        return f"the key {error.args[0]!r} is missing"
    return cattrs.v.format_exception(error, kind) if not isinstance(error, (TypeError, ValueError)) else str(error)


def _readable(line: str) -> str:
    message, _, path = line.rpartition(" @ ")
    return f"{path.removeprefix('$').removeprefix('.') or 'top level'}: {message}"
