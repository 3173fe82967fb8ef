"""Reading JSON from others: a document that is ambiguous, or that cannot be written again, is refused.

Python's reader takes more. 1e999 becomes an infinity, which JSON cannot hold. A lone surrogate becomes a string that no
file takes. 900 brackets become a document that cannot be copied. Of two equal keys the last one wins.
"""

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
CONTAINERS = {dict, list}


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


def _integer(text: str) -> int:
    number = int(text)
    if abs(number) >= LARGEST:
        raise StrictJsonError(f"the number {text[:SHOWN]} has more than 64 bits")
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
        members = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for inners in members for inner in inners if type(inner) in CONTAINERS]
    if level:
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
