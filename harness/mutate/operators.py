"""The operators: what a tired engineer gets wrong in one place, as edits of a Python source by its syntax tree.

What only costs time or memory is left out where it can be told: ``.clone()`` is added only before a change in place,
and ``.contiguous()`` only dropped.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from harness.core import python_ast

COMPARISONS = {
    "<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"), "==": ("!=",), "!=": ("==",),
    "is": ("is not",), "is not": ("is",), "in": ("not in",), "not in": ("in",),
}  # fmt: skip
COMPARISON = r"is\s+not\b|not\s+in\b|<=|>=|==|!=|<|>|is\b|in\b"
#: The sign of each operation, and what is written in its place: one of the same precedence where there is one.
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"), ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "|"),
}  # fmt: skip
NARROWER = {
    "float64": "float32", "double": "float", "float32": "bfloat16", "float": "bfloat16", "int64": "int32",
    "long": "int", "int32": "int16",
}  # fmt: skip
#: Methods without which a tensor is shared, tracked or laid out in another way, or of another dtype.
DROPPED_METHODS = {"clone", "contiguous", "detach", "to", "float", "double", "type_as"}
#: Methods of tensors by which a value is known to be one; ``torch.NAME(...)`` is another sign.
TENSOR_METHODS = DROPPED_METHODS | {
    "bmm", "expand", "flatten", "matmul", "mm", "mul", "permute", "reshape", "squeeze", "sum", "t", "transpose",
    "unsqueeze", "view",
}  # fmt: skip
AXIS_KEYWORDS = {"axis", "dim"}
#: Methods whose first whole number is an axis.
AXIS_METHODS = {
    "all", "amax", "amin", "any", "argmax", "chunk", "cumsum", "flip", "gather", "index_select", "log_softmax", "max",
    "mean", "min", "select", "size", "softmax", "split", "squeeze", "sum", "unsqueeze",
}  # fmt: skip
#: Functions whose second argument is one.
AXIS_FUNCTIONS = {"cat", "stack", "sum", "max", "min", "cumsum", "argmax"}
MOST_SHOWN = 60


@dataclass(frozen=True)
class Edit:
    """One change of a source: bytes `start` to `end` become `new`; `line` of the source, from 1, is where it begins."""

    operator: str
    line: int
    start: int
    end: int
    new: str
    what: str


Node = ast.expr | ast.stmt | ast.keyword


class Source:
    """A Python source, addressed by the positions of its syntax tree, which are counted in bytes."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.tree = python_ast.parse(text)
        lengths = (len(line) for line in self.data.splitlines(keepends=True))
        self._starts = [0, *itertools.accumulate(lengths)]

    def start(self, node: Node) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: Node) -> int:
        return self._starts[cast("int", node.end_lineno) - 1] + cast("int", node.end_col_offset)

    def between(self, start: int, end: int) -> str:
        return self.data[start:end].decode()

    def of(self, node: Node) -> str:
        return self.between(self.start(node), self.end(node))

    def shown(self, node: Node) -> str:
        """Return the text of a node in one line, shortened."""
        return _short(self.of(node))

    def edited(self, edit: Edit) -> str:
        """Return the source with one change."""
        return (self.data[: edit.start] + edit.new.encode() + self.data[edit.end :]).decode()

    def edit(self, start: int, end: int, new: str, what: str = "") -> Edit:
        """Build a change of no operator yet; `what` says it where old and new text do not."""
        said = what or f"{_short(self.between(start, end))} -> {_short(new)}"
        return Edit("", self.data.count(b"\n", 0, start) + 1, start, end, new, said)

    def replaced(self, node: Node, new: str, what: str = "") -> Edit:
        """Build the change of a whole node."""
        return self.edit(self.start(node), self.end(node), new, what)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= MOST_SHOWN else f"{words[: MOST_SHOWN - 3]}..."


def _number(node: ast.AST) -> int | float | None:
    """Return the value of a written number, with its sign; None where a node is none."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and type(node.value) in {int, float}:
        return cast("int | float", node.value)
    return None


def _signs(source: Source, left: ast.expr, right: ast.expr, sign: str) -> Iterator[tuple[int, int]]:
    """Find the operator between two operands by its pattern; none where a comment stands there."""
    start = source.end(left)
    gap = source.between(start, source.start(right))
    found = None if "#" in gap else re.search(sign, gap)
    if found:
        yield start + found.start(), start + found.end()


def comparison(source: Source, node: ast.AST) -> Iterator[Edit]:
    """``<`` to ``<=`` and ``>=``, ``==`` to ``!=``, and so on."""
    if not isinstance(node, ast.Compare):
        return
    for left, right in itertools.pairwise([node.left, *node.comparators]):
        for place in _signs(source, left, right, COMPARISON):
            sign = " ".join(source.between(*place).split())
            for other in COMPARISONS[sign]:
                yield source.edit(*place, other, f"{sign} -> {other} in {source.shown(node)}")


def arithmetic(source: Source, node: ast.AST) -> Iterator[Edit]:
    """``+`` to ``-``, ``*`` to ``/``, and the sign of a value."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
        sign, other = ARITHMETIC[type(node.op)]
        if isinstance(node, ast.BinOp):
            left, right = node.left, node.right
            texts = (ast.JoinedStr, ast.Constant)
            if any(isinstance(one, texts) and _number(one) is None for one in (left, right)):
                return  # texts are put together here
        else:
            left, right, sign, other = node.target, node.value, f"{sign}=", f"{other}="
        for place in _signs(source, left, right, re.escape(sign)):
            yield source.edit(*place, other, f"{sign} -> {other} in {source.shown(node)}")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and _number(node) is None:
        start = source.start(node)
        yield source.edit(start, start + 1, "+", f"sign of {source.shown(node)}")
    elif isinstance(node, (ast.Assign, ast.Return, ast.AugAssign)) and isinstance(node.value, ast.BinOp):
        yield source.replaced(node.value, f"-({source.of(node.value)})", f"sign of {source.shown(node.value)}")


def assignment(source: Source, node: ast.AST) -> Iterator[Edit]:
    """``+=`` to ``=``, and ``=`` to ``+=`` where a part of something is assigned."""
    if isinstance(node, ast.AugAssign):
        for place in _signs(source, node.target, node.value, r"\S+="):
            yield source.edit(*place, "=", f"{source.between(*place)} -> = in {source.shown(node)}")
    elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
        for place in _signs(source, node.targets[0], node.value, "="):
            yield source.edit(*place, "+=", f"= -> += in {source.shown(node)}")


def axis(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Another axis of a reduction or a view."""
    if not isinstance(node, ast.Call):
        return
    places: list[ast.expr] = [one.value for one in node.keywords if one.arg in AXIS_KEYWORDS]
    if isinstance(node.func, ast.Attribute):
        module = isinstance(node.func.value, ast.Name) and node.func.value.id in {"torch", "tl", "F", "T", "np"}
        if module and node.func.attr in AXIS_FUNCTIONS:
            places += node.args[1:2]
        elif not module and node.func.attr in AXIS_METHODS:
            places += node.args[:1]
    for place in places:
        value = _number(place)
        if isinstance(value, int):
            for other in sorted({0, 1, -1} - {value}):
                yield source.replaced(place, str(other), f"axis {value} -> {other} in {source.shown(node)}")


def constant(source: Source, node: ast.AST) -> Iterator[Edit]:
    """0, 1, -1, one more and twice as much for a whole number; likewise for others; the other truth value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.replaced(node, str(not node.value))
    value = _number(node)
    if value is None or not isinstance(node, ast.expr):
        return
    whole = isinstance(value, int)
    others = [0, 1, -1, 2 * value, value + 1] if whole else [0.0, 1.0, -value, 2 * value]
    for other in dict.fromkeys(one for one in others if one != value):
        yield source.replaced(node, repr(other))


def condition(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Let a condition always or never hold; leave out a part of it, or ``not``; ``and`` to ``or``."""
    tests: Sequence[ast.expr] = ()
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    for test in tests:
        for value in ("False",) if isinstance(node, ast.While) else ("True", "False"):
            yield source.replaced(test, value)
    if isinstance(node, ast.BoolOp):
        for index, left_out in enumerate(node.values):
            rest = [*node.values[:index], *node.values[index + 1 :]]
            new = ast.unparse(ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0])
            yield source.replaced(node, f"({new})", f"without {source.shown(left_out)}")
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield source.replaced(node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.replaced(node, f"({source.of(node.operand)})", f"without not: {source.shown(node)}")


def statement(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Delete a statement, return nothing, let a ``with`` only hold its body."""
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Raise, ast.Assert, ast.Delete)
    if isinstance(node, (*simple, ast.Break, ast.Continue)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):  # a docstring
            yield source.replaced(node, "pass", f"deleted: {source.shown(node)}")
    elif isinstance(node, ast.Return) and node.value is not None:
        yield source.replaced(node, "return None", f"deleted: {source.shown(node)}")
    elif isinstance(node, ast.With) and all(item.optional_vars is None for item in node.items):
        colon = source.data.find(b":", source.end(node.items[-1].context_expr))
        said = f"without {_short(', '.join(source.of(item.context_expr) for item in node.items))}"
        yield source.edit(source.start(node), colon + 1, "if True:", said)


def argument(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Drop an argument, so that its default stands in; swap two neighbours, also in what is returned."""
    if isinstance(node, ast.Call):
        given: list[ast.expr | ast.keyword] = sorted([*node.args, *node.keywords], key=source.start)
        if any(isinstance(one, ast.GeneratorExp) for one in given):
            return
        for index, one in enumerate(given):
            if index + 1 < len(given):
                start, end = source.start(one), source.start(given[index + 1])
            else:
                start = source.end(given[index - 1]) if index else source.start(one)
                end = source.end(one) if index else source.end(node) - 1
            yield source.edit(start, end, "", f"without {source.shown(one)} in {source.shown(node)}")
        yield from _swapped(source, node.args, node)
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        yield from _swapped(source, node.value.elts, node)


def _swapped(source: Source, given: list[ast.expr], whole: Node) -> Iterator[Edit]:
    for left, right in itertools.pairwise(given):
        if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
            continue
        gap = source.between(source.end(left), source.start(right))
        new = f"{source.of(right)}{gap}{source.of(left)}"
        said = f"{source.shown(left)} and {source.shown(right)} swapped in {source.shown(whole)}"
        yield source.edit(source.start(left), source.end(right), new, said)


def dtype(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Narrow a dtype: ``torch.float32`` to ``torch.bfloat16``, ``.double()`` to ``.float()``, ``"float32"``."""
    if isinstance(node, ast.Attribute) and node.attr in NARROWER:
        end = source.end(node)
        narrower = NARROWER[node.attr]
        yield source.edit(end - len(node.attr), end, narrower, f"{source.shown(node)} -> {narrower}")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NARROWER:
        yield source.replaced(node, repr(NARROWER[node.value]))


def method(source: Source, node: ast.AST) -> Iterator[Edit]:
    """``.clone()``, ``.contiguous()``, ``.detach()``, a cast dropped; ``.detach()`` added; in place or not."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, value, end = node.func.attr, node.func.value, source.end(node.func)
        dot = source.data.rfind(b".", source.end(value), end)
        if name in DROPPED_METHODS and not (isinstance(value, ast.Name) and value.id in {"torch", "tl"}):
            yield source.edit(dot, source.end(node), "", f"without .{name} in {source.shown(node)}")
        if name.endswith("_") and not name.endswith("__"):
            yield source.edit(end - 1, end, "", f".{name} -> .{name[:-1]} in {source.shown(node)}")
            yield source.edit(dot, dot, ".clone()", f".clone() before .{name} in {source.shown(node)}")
    if isinstance(node, (ast.Assign, ast.Return)) and node.value is not None and _is_tensor(node.value):
        wrapped = isinstance(node.value, ast.BinOp)
        new = f"({source.of(node.value)}).detach()" if wrapped else f"{source.of(node.value)}.detach()"
        yield source.replaced(node.value, new, f".detach() behind {source.shown(node.value)}")


def _is_tensor(node: ast.expr) -> bool:
    """Whether an expression is a tensor, as far as its text tells."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value
    return node.func.attr in TENSOR_METHODS or (isinstance(owner, ast.Name) and owner.id == "torch")


#: Where two of them give the same code, the first names it.
OPERATORS: tuple[Callable[[Source, ast.AST], Iterator[Edit]], ...] = (
    comparison, condition, arithmetic, assignment, axis, constant, statement, argument, dtype, method,
)  # fmt: skip
#: What no operator changes: annotations, the text of an assertion, and below it what says nothing of a result.
SKIPPED_FIELDS = {"annotation", "returns", "msg", "type_params"}


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """List the nodes that operators change, outer ones first."""
    yield node
    if isinstance(node, (ast.JoinedStr, ast.Raise)):  # up to Python 3.11 positions inside an f-string are wrong
        return
    if isinstance(node, ast.UnaryOp) and _number(node) is not None:
        return
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) and name not in SKIPPED_FIELDS else [value]:
            if isinstance(child, ast.AST) and name not in SKIPPED_FIELDS:
                yield from _nodes(child)


def touched_lines(tree: ast.Module, added: set[int]) -> set[int]:
    """Return the lines that are added, and those of the innermost functions that have one."""
    spans = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    found = set(added)
    for line in added:
        around = sorted((span for span in spans if line in span), key=len)
        found.update(*around[:1])
    return found


def edits(source: Source, lines: set[int]) -> list[Edit]:
    """List what the operators make of the nodes that begin in `lines`, in the order of the source."""
    found = [
        (edit.line, edit.start, number, edit.what, replace(edit, operator=operator.__name__))
        for node in _nodes(source.tree)
        if getattr(node, "lineno", None) in lines or isinstance(node, ast.comprehension)
        for number, operator in enumerate(OPERATORS)
        for edit in operator(source, node)
        if edit.line in lines
    ]
    return [edit for *_, edit in sorted(found, key=lambda one: one[:-1])]
