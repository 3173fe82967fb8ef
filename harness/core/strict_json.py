"""Reading JSON that somebody else wrote: what cannot be written again, or means two things, is refused.

Python's reader takes more than JSON is, and more than the rest of a program bears: 1e999 becomes an infinity that no
JSON can hold, a lone surrogate a string that no file takes, 900 brackets a document that nothing can copy, and of two
keys of one name the last one wins.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

#: Brackets inside brackets; what the harness itself writes has six.
DEEPEST = 32
#: Whole numbers have at most 64 bits: a seed or a count of bytes has, and every other reader takes them.
LARGEST = 2**64
#: An escape that may be half a character, or NUL, which no path and no XML may hold.
SUSPECT = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")
SHOWN = 40


class StrictJsonError(ValueError):
    """A text is no JSON, or none that can be taken as it stands."""


def _constant(text: str) -> float:
    raise StrictJsonError(f"{text} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise StrictJsonError(f"the key {twice[:SHOWN]!r} stands there twice")
    return found


def _walk(document: object, *, strings: bool) -> None:
    """Refuse numbers that no reader holds, what is too deep, and (with `strings`) half a character or NUL."""
    level, depth = [document], 0
    while level:
        if depth > DEEPEST:
            raise StrictJsonError(f"more than {DEEPEST} brackets inside each other")
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, int) and abs(one) >= LARGEST:
                raise StrictJsonError(f"the number {str(one)[:SHOWN]} has more than 64 bits")
            elif isinstance(one, float) and not math.isfinite(one):
                raise StrictJsonError("a number is too large for a float")
            elif strings and isinstance(one, str):
                _whole(one)
        level, depth = inner, depth + 1


def _whole(text: str) -> None:
    if "\0" in text:
        raise StrictJsonError("a text holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise StrictJsonError("a text holds half a character (a lone surrogate)") from None


def loads(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON
    """Parse one JSON document.

    StrictJsonError is raised where it is not UTF-8, no JSON, or holds NaN, a number that no float or 64 bits hold, a
    key twice, half a character, NUL, or more than `DEEPEST` brackets inside each other.
    """
    try:
        whole = text.decode() if isinstance(text, bytes) else text
        document = json.loads(whole, parse_constant=_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except StrictJsonError:
        raise
    except ValueError as error:  # no JSON, or a number of more digits than Python reads
        raise StrictJsonError(f"not JSON: {error}") from None
    except RecursionError:
        raise StrictJsonError(f"more than {DEEPEST} brackets inside each other") from None
    _whole(whole)
    _walk(document, strings=SUSPECT.search(whole) is not None)
    return document
