"""Pack 16's cases hold every pair of values of the factors that its probe names."""

from __future__ import annotations

import ast
import itertools

from testing.workbench import REPOSITORY

PROBE = REPOSITORY / "packs/16_megatron_float16_module/reproduce.py"


def _cases() -> list[tuple[object, ...]]:
    for node in ast.parse(PROBE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "CASES":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{PROBE.name} has no CASES")


def test_every_pair_of_values_is_in_a_case() -> None:
    # The type of the parameters is either the 16-bit type or float32.
    rows = [(*case[:4], case[4] == "float32") for case in _cases()]
    for one, other in itertools.combinations(range(5), 2):
        every = itertools.product({row[one] for row in rows}, {row[other] for row in rows})
        assert {(row[one], row[other]) for row in rows} == set(every), (one, other)


def test_what_is_no_float32_is_the_16_bit_type() -> None:
    assert all(case[4] in {"float32", case[0]} for case in _cases())
