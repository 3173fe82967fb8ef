"""Pairwise cases: few rows in which each two values of different factors stand together once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allpairspy import AllPairs


def _nothing(_row: dict[str, Any]) -> bool:
    return False


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    excluded: Callable[[dict[str, Any]], bool] = _nothing,
    also: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return rows that cover each pair of values of two factors; the same arguments give the same rows.

    Args:
        factors: the values of each factor, by its name.
        excluded: is given a row, or the beginning of one with some factors missing, and says whether it cannot be.
        also: rows that stand there besides, first.

    Raises:
        ValueError: a row of `also` has other factors.

    """
    for row in also:
        if row.keys() != factors.keys():
            raise ValueError(f"a row has {', '.join(row)}; the factors are {', '.join(factors)}")
    names = list(factors)

    def admitted(values: list[Any]) -> bool:
        return not excluded(dict(zip(names, values, strict=False)))

    covering = AllPairs([list(values) for values in factors.values()], filter_func=admitted)
    return [*(dict(row) for row in also), *(dict(zip(names, row, strict=True)) for row in covering)]
