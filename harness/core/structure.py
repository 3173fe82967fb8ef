"""Strict reading of files that others wrote: JSON, and TOML or JSON into frozen dataclasses, with all errors at once.

JSON that is ambiguous, or that cannot be written again, is refused; Python's reader takes more. 1e999 becomes an
infinity, which JSON cannot hold. A lone surrogate becomes a string that no file takes. 900 brackets become a document
that cannot be copied. Of two equal keys the last one wins.
"""

import dataclasses
import datetime as dt
import functools
import json
import math
import re
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
#: Nested brackets; the harness itself writes six.
DEEPEST = 32
#: Whole numbers have at most 64 bits: enough for a seed or a count of bytes, and every reader takes them.
LARGEST = 2**64
#: An escape that may be half a character, or that is NUL, which neither a path nor XML may hold.
SUSPECT = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")
SHOWN_OF_JSON = 40
CONTAINERS = {dict, list}


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


class StrictJsonError(ValueError):
    """A text is not JSON, or JSON that is refused."""


def _constant(text: str) -> float:
    raise StrictJsonError(f"{text} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise StrictJsonError(f"the key {double[:SHOWN_OF_JSON]!r} stands there twice")
    return document


def _integer(text: str) -> int:
    number = int(text)
    if abs(number) >= LARGEST:
        raise StrictJsonError(f"the number {text[:SHOWN_OF_JSON]} has more than 64 bits")
    return number


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise StrictJsonError("a number is too large for a float")
    return number


def _check_depth(document: object) -> None:
    """Refuse nesting that is too deep; only lists and objects are looked into."""
    level: list[Any] = [document] if type(document) in CONTAINERS else []
    for _ in range(DEEPEST):
        members = (outer.values() if type(outer) is dict else outer for outer in level)
        level = [inner for inners in members for inner in inners if type(inner) in CONTAINERS]
        if not level:
            return
    raise StrictJsonError(f"more than {DEEPEST} brackets inside each other")


def loads(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON
    """Parse one JSON document.

    StrictJsonError: it is not UTF-8, not JSON, or holds NaN, a number too large for a float or for 64 bits, one key
    twice, half a character, NUL, or more than `DEEPEST` nested brackets.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        document = json.loads(
            decoded, parse_constant=_constant, parse_int=_integer, parse_float=_float, object_pairs_hook=_object
        )
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except StrictJsonError:
        raise
    except ValueError as error:  # not JSON, or a number of more digits than Python reads
        raise StrictJsonError(f"not JSON: {error}") from None
    except RecursionError:
        raise StrictJsonError(f"more than {DEEPEST} brackets inside each other") from None
    _check_depth(document)
    if SUSPECT.search(decoded):
        decoded = json.dumps(document, ensure_ascii=False).replace(r"\\", "")  # without escaped backslashes
    if r"\u0000" in decoded:
        raise StrictJsonError("a text holds a NUL character")
    try:
        decoded.encode()
    except UnicodeEncodeError:
        raise StrictJsonError("a text holds half a character (a lone surrogate)") from None
    return document
