"""Pairwise cases: few rows in which each two values of different factors stand together once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from allpairspy import AllPairs


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return rows that cover each pair of values of two factors; the same factors give the same rows."""
    return [dict(zip(factors, row, strict=True)) for row in AllPairs([list(values) for values in factors.values()])]
