"""Each operator, on a source of a few lines."""

from __future__ import annotations

import ast

import pytest

from harness.mutate import operators
from harness.mutate.operators import Source

CASES = [
    ("comparison", "a < b", {"a <= b", "a >= b"}),
    ("comparison", "a == b <= c", {"a != b <= c", "a == b < c", "a == b > c"}),
    ("comparison", "a is not None", {"a is None"}),
    ("comparison", "a not in b", {"a in b"}),
    ("comparison", "(a) >= (b)", {"(a) > (b)", "(a) < (b)"}),
    ("arithmetic", "a + b", {"a - b"}),
    ("arithmetic", "a // b % c", {"a * b % c", "a // b // c"}),
    ("arithmetic", "-a", {"+a"}),
    ("arithmetic", "x = a * b", {"x = -(a * b)", "x = a / b"}),
    ("arithmetic", "'text' + a", set()),
    ("arithmetic", "a += b", {"a -= b"}),
    ("assignment", "a += b", {"a = b"}),
    ("assignment", "a[0] = b", {"a[0] += b"}),
    ("assignment", "a = b", set()),
    ("constant", "f(3)", {"f(0)", "f(1)", "f(-1)", "f(6)", "f(4)"}),
    ("constant", "f(-2)", {"f(0)", "f(1)", "f(-1)", "f(-4)"}),
    ("constant", "f(0.5)", {"f(0.0)", "f(1.0)", "f(-0.5)"}),
    ("constant", "f(True)", {"f(False)"}),
    ("condition", "if a:\n    b()", {"if True:\n    b()", "if False:\n    b()"}),
    ("condition", "x = a if b else c", {"x = a if True else c", "x = a if False else c"}),
    ("condition", "[a for a in b if a]", {"[a for a in b if True]", "[a for a in b if False]"}),
    (
        "condition",
        "a and (b or c)",
        {"(a)", "(b or c)", "(a or (b or c))", "a and ((b))", "a and ((c))", "a and ((b and c))"},
    ),
    ("condition", "not a", {"(a)"}),
    ("condition", "while a:\n    b()", {"while False:\n    b()"}),
    ("statement", "a = b(\n    c)", {"pass"}),
    ("statement", '"""A docstring."""', set()),
    ("statement", "with torch.no_grad():\n    a()", {"if True:\n    a()", "with torch.no_grad():\n    pass"}),
    ("statement", "with a as b:\n    pass", set()),
    ("statement", "def f():\n    return a", {"def f():\n    return None"}),
    ("argument", "f(a, b=1, c=2)", {"f(b=1, c=2)", "f(a, c=2)", "f(a, b=1)"}),
    ("argument", "f(a, b,)", {"f(b,)", "f(a,)", "f(b, a,)"}),
    ("argument", "f(a)", {"f()"}),
    ("argument", "f(*a, b)", {"f(b)", "f(*a)"}),
    ("argument", "def f():\n    return a, b", {"def f():\n    return b, a"}),
    ("dtype", "torch.float32", {"torch.bfloat16"}),
    ("dtype", "a.double()", {"a.float()"}),
    ("dtype", "f('float32')", {"f('bfloat16')"}),
    ("method", "(a @ b).contiguous()", {"(a @ b)"}),
    ("method", "a.mul_(b)", {"a.mul(b)", "a.clone().mul_(b)"}),
    ("method", "x = torch.zeros(3)", {"x = torch.zeros(3).detach()"}),
    ("method", "x = a @ b", {"x = (a @ b).detach()"}),
    ("method", "x = f(3)", set()),
    ("axis", "a.sum(dim=-1)", {"a.sum(dim=0)", "a.sum(dim=1)"}),
    ("axis", "a.unsqueeze(0)", {"a.unsqueeze(1)", "a.unsqueeze(-1)"}),
    ("axis", "torch.cat([a, b], 1)", {"torch.cat([a, b], 0)", "torch.cat([a, b], -1)"}),
    ("axis", "a.view(0)", set()),
]


def _made(operator: str, text: str) -> set[str]:
    source = Source(text)
    every = set(range(1, text.count("\n") + 2))
    return {source.edited(edit) for edit in operators.edits(source, every) if edit.operator == operator}


@pytest.mark.parametrize(("operator", "text", "wanted"), CASES, ids=[f"{name} {text!r}" for name, text, _ in CASES])
def test_an_operator_makes_these_and_no_others(operator: str, text: str, wanted: set[str]) -> None:
    made = _made(operator, text)
    assert made == wanted
    for one in made:
        ast.parse(one)


def test_every_operator_has_a_case() -> None:
    assert {operator.__name__ for operator in operators.OPERATORS} == {name for name, _, _ in CASES}


def test_positions_are_right_behind_letters_of_several_bytes() -> None:
    assert "é = 'ü' if a <= b else c\n" in _made("comparison", "é = 'ü' if a < b else c\n")


def test_annotations_f_strings_and_messages_are_left_alone() -> None:
    text = 'def f(a: Literal[1] = 2) -> Literal[3]:\n    raise ValueError(4)\n    g(f"{a + 5}")\n    assert a, 6\n'
    made = _made("constant", text) | _made("arithmetic", text)
    assert made == {text.replace("= 2", f"= {value}") for value in (0, 1, -1, 4, 3)}


def test_only_added_lines_and_the_innermost_functions_around_them_are_touched() -> None:
    text = "a = 1\n\n\ndef f():\n    b = 2\n\n    def g():\n        c = 3\n        d = 4\n    return g\n\n\ne = 5\n"
    tree = ast.parse(text)
    assert operators.touched_lines(tree, {8}) == {7, 8, 9}
    assert operators.touched_lines(tree, {1}) == {1}
    assert operators.touched_lines(tree, {5, 13}) == {*range(4, 11), 13}
