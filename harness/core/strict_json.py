"""Reading JSON from others: a document that is ambiguous, or that cannot be written again, is refused.

Python's reader takes more. 1e999 becomes an infinity, which JSON cannot hold. A lone surrogate becomes a string that no
file takes. 900 brackets become a document that cannot be copied. Of two equal keys the last one wins.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

#: Nested brackets; the harness itself writes six.
DEEPEST = 32
#: Whole numbers have at most 64 bits: enough for a seed or a count of bytes, and every reader takes them.
LARGEST = 2**64
#: An escape that may be half a character, or that is NUL, which neither a path nor XML may hold.
SUSPECT = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")
SHOWN = 40


class StrictJsonError(ValueError):
    """A text is not JSON, or JSON that is refused."""


def _constant(text: str) -> float:
    raise StrictJsonError(f"{text} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise StrictJsonError(f"the key {double[:SHOWN]!r} stands there twice")
    return document


def _check_values(document: object, *, strings: bool) -> None:
    """Refuse numbers that are too large, nesting that is too deep, and with `strings` half a character or NUL."""
    level, depth = [document], 0
    while level:
        if depth > DEEPEST:
            raise StrictJsonError(f"more than {DEEPEST} brackets inside each other")
        next_level: list[object] = []
        for value in level:
            if isinstance(value, dict):
                next_level += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                next_level += value
            elif isinstance(value, int) and abs(value) >= LARGEST:
                raise StrictJsonError(f"the number {str(value)[:SHOWN]} has more than 64 bits")
            elif isinstance(value, float) and not math.isfinite(value):
                raise StrictJsonError("a number is too large for a float")
            elif strings and isinstance(value, str):
                _check_text(value)
        level, depth = next_level, depth + 1


def _check_text(text: str) -> None:
    if "\0" in text:
        raise StrictJsonError("a text holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise StrictJsonError("a text holds half a character (a lone surrogate)") from None


def loads(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON
    """Parse one JSON document.

    StrictJsonError: it is not UTF-8, not JSON, or holds NaN, a number too large for a float or for 64 bits, one key
    twice, half a character, NUL, or more than `DEEPEST` nested brackets.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        document = json.loads(decoded, parse_constant=_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except StrictJsonError:
        raise
    except ValueError as error:  # not JSON, or a number of more digits than Python reads
        raise StrictJsonError(f"not JSON: {error}") from None
    except RecursionError:
        raise StrictJsonError(f"more than {DEEPEST} brackets inside each other") from None
    _check_text(decoded)
    _check_values(document, strings=SUSPECT.search(decoded) is not None)
    return document
