"""The operators: what a tired engineer gets wrong in one place, as edits of a Python source by its syntax tree.

Edits that only cost time or memory are left out as far as possible: ``.clone()`` is added only before a change in
place, and ``.contiguous()`` is only dropped.
"""

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

COMPARISONS = {
    "<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"), "==": ("!=",), "!=": ("==",),
    "is": ("is not",), "is not": ("is",), "in": ("not in",), "not in": ("in",),
}  # fmt: skip
COMPARISON = r"is\s+not\b|not\s+in\b|<=|>=|==|!=|<|>|is\b|in\b"
#: The signs that replace the sign of an operation, of the same precedence where possible.
ARITHMETIC = {
    "+": ("-",), "-": ("+",), "*": ("/",), "/": ("*",), "//": ("*",), "%": ("//",), "**": ("*",), "<<": (">>",),
    ">>": ("<<",), "&": ("|",), "|": ("&",), "^": ("|",),
}  # fmt: skip
OPERATION = r"\*\*|//|<<|>>|[-+*/%&|^]"
#: The same with assignment, and what replaces an assignment.
AUGMENTED = {f"{sign}=": (f"{new}=",) for sign, (new,) in ARITHMETIC.items()}
ASSIGNMENTS = {"=": ("+=",), "@=": ("=",)} | dict.fromkeys(AUGMENTED, ("=",))
ASSIGNMENT = rf"(?:{OPERATION}|@)?="
NARROWER = {
    "float64": "float32", "double": "float", "float32": "bfloat16", "float": "bfloat16", "int64": "int32",
    "long": "int", "int32": "int16",
}  # fmt: skip
#: Methods that matter for the sharing, the gradient, the layout or the dtype of a tensor.
DROPPED_METHODS = {"clone", "contiguous", "detach", "to", "float", "double", "type_as"}
#: A call of these methods returns a tensor; so does ``torch.NAME(...)``.
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
#: Functions whose second argument is an axis.
AXIS_FUNCTIONS = {"cat", "stack", "sum", "max", "min", "cumsum", "argmax"}
MOST_SHOWN = 60


@dataclass(frozen=True)
class Edit:
    """One change of a source: the bytes `start` to `end` become `new`."""

    operator: str
    line: int  # of `start`, from 1
    start: int
    end: int
    new: str
    description: str


Node = ast.expr | ast.stmt | ast.keyword


class Source:
    """A Python source. Its syntax tree counts positions in bytes."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.tree = ast.parse(text)
        lengths = (len(line) for line in self.data.splitlines(keepends=True))
        self._starts = [0, *itertools.accumulate(lengths)]

    def start(self, node: Node) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: Node) -> int:
        return self._starts[cast("int", node.end_lineno) - 1] + cast("int", node.end_col_offset)

    def between(self, start: int, end: int) -> str:
        return self.data[start:end].decode()

    def text_of(self, node: Node) -> str:
        return self.between(self.start(node), self.end(node))

    def excerpt(self, node: Node) -> str:
        """Return the text of a node in one line, shortened."""
        return _short(self.text_of(node))

    def edited(self, edit: Edit) -> str:
        """Return the source with one change."""
        return (self.data[: edit.start] + edit.new.encode() + self.data[edit.end :]).decode()

    def edit(self, start: int, end: int, new: str, description: str = "") -> Edit:
        """Build an edit, still without its operator; the default description is the old and the new text."""
        text = description or f"{_short(self.between(start, end))} -> {_short(new)}"
        return Edit("", self.data.count(b"\n", 0, start) + 1, start, end, new, text)

    def edit_node(self, node: Node, new: str, description: str = "") -> Edit:
        return self.edit(self.start(node), self.end(node), new, description)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= MOST_SHOWN else f"{words[: MOST_SHOWN - 3]}..."


def _number(node: ast.AST) -> int | float | None:
    """Return the value of a number in the source, with its sign; None where the node is no number."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and type(node.value) in {int, float}:
        return cast("int | float", node.value)
    return None


def _signs(
    source: Source, node: Node, sides: tuple[ast.expr, ast.expr], pattern: str, signs: Mapping[str, tuple[str, ...]]
) -> Iterator[Edit]:
    """Replace the sign between two sides in a node by each of its `signs`, if no comment is there."""
    start = source.end(sides[0])
    gap = source.between(start, source.start(sides[1]))
    match = None if "#" in gap else re.search(pattern, gap)
    if match:
        sign = " ".join(match[0].split())
        for new in signs[sign]:
            description = f"{sign} -> {new} in {source.excerpt(node)}"
            yield source.edit(start + match.start(), start + match.end(), new, description)


def comparison(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Change ``<`` to ``<=`` and ``>=``, ``==`` to ``!=``, and so on."""
    if isinstance(node, ast.Compare):
        for sides in itertools.pairwise([node.left, *node.comparators]):
            yield from _signs(source, node, sides, COMPARISON, COMPARISONS)


def arithmetic(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Change ``+`` to ``-``, ``*`` to ``/``, and so on; negate a value."""
    if isinstance(node, ast.BinOp):
        sides, constants = (node.left, node.right), (ast.JoinedStr, ast.Constant)
        if not any(isinstance(side, constants) and _number(side) is None for side in sides):  # it formats no text
            yield from _signs(source, node, sides, OPERATION, ARITHMETIC)
    elif isinstance(node, ast.AugAssign) and not isinstance(node.op, ast.MatMult):
        yield from _signs(source, node, (node.target, node.value), ASSIGNMENT, AUGMENTED)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and _number(node) is None:
        start = source.start(node)
        yield source.edit(start, start + 1, "+", f"sign of {source.excerpt(node)}")
    elif isinstance(node, (ast.Assign, ast.Return, ast.AugAssign)) and isinstance(node.value, ast.BinOp):
        yield source.edit_node(node.value, f"-({source.text_of(node.value)})", f"sign of {source.excerpt(node.value)}")


def assignment(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Change ``+=`` to ``=``, and ``=`` to ``+=`` where an item is assigned."""
    if isinstance(node, ast.AugAssign):
        yield from _signs(source, node, (node.target, node.value), ASSIGNMENT, ASSIGNMENTS)
    elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
        yield from _signs(source, node, (node.targets[0], node.value), ASSIGNMENT, ASSIGNMENTS)


def axis(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Choose another axis of a reduction or a view."""
    if not isinstance(node, ast.Call):
        return
    axes: list[ast.expr] = [keyword.value for keyword in node.keywords if keyword.arg in AXIS_KEYWORDS]
    if isinstance(node.func, ast.Attribute):
        is_module = isinstance(node.func.value, ast.Name) and node.func.value.id in {"torch", "tl", "F", "T", "np"}
        if is_module and node.func.attr in AXIS_FUNCTIONS:
            axes += node.args[1:2]
        elif not is_module and node.func.attr in AXIS_METHODS:
            axes += node.args[:1]
    for place in axes:
        value = _number(place)
        if isinstance(value, int):
            for number in sorted({0, 1, -1} - {value}):
                yield source.edit_node(place, str(number), f"axis {value} -> {number} in {source.excerpt(node)}")


def constant(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Replace a number by 0, 1, -1, its double, and others like that; a truth value by the other."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.edit_node(node, str(not node.value))
    value = _number(node)
    if value is None or not isinstance(node, ast.expr):
        return
    is_whole = isinstance(value, int)
    numbers = [0, 1, -1, 2 * value, value + 1] if is_whole else [0.0, 1.0, -value, 2 * value]
    for number in dict.fromkeys(number for number in numbers if number != value):
        yield source.edit_node(node, repr(number))


def condition(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Make a condition constant; leave out a part of it, or ``not``; change ``and`` to ``or``."""
    tests = [node.test] if isinstance(node, (ast.If, ast.IfExp, ast.While)) else []
    for test in node.ifs if isinstance(node, ast.comprehension) else tests:
        for value in ("False",) if isinstance(node, ast.While) else ("True", "False"):
            yield source.edit_node(test, value)
    if isinstance(node, ast.BoolOp):
        for index, left_out in enumerate(node.values):
            remaining = [*node.values[:index], *node.values[index + 1 :]]
            new = ast.unparse(ast.BoolOp(node.op, remaining) if len(remaining) > 1 else remaining[0])
            yield source.edit_node(node, f"({new})", f"without {source.excerpt(left_out)}")
        operator = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield source.edit_node(node, f"({ast.unparse(ast.BoolOp(operator, node.values))})")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.edit_node(node, f"({source.text_of(node.operand)})", f"without not: {source.excerpt(node)}")


def statement(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Delete a statement, return None, run the body of a ``with`` without its context."""
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Raise, ast.Assert, ast.Delete)
    if isinstance(node, (*simple, ast.Break, ast.Continue)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):  # a docstring
            yield source.edit_node(node, "pass", f"deleted: {source.excerpt(node)}")
    elif isinstance(node, ast.Return) and node.value is not None:
        yield source.edit_node(node, "return None", f"deleted: {source.excerpt(node)}")
    elif isinstance(node, ast.With) and all(item.optional_vars is None for item in node.items):
        colon = source.data.find(b":", source.end(node.items[-1].context_expr))
        description = f"without {_short(', '.join(source.text_of(item.context_expr) for item in node.items))}"
        yield source.edit(source.start(node), colon + 1, "if True:", description)


def argument(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Drop an argument, so that its default takes its place; swap two neighbours, also in a returned tuple."""
    if isinstance(node, ast.Call):
        arguments: list[ast.expr | ast.keyword] = sorted([*node.args, *node.keywords], key=source.start)
        if any(isinstance(value, ast.GeneratorExp) for value in arguments):
            return
        for index, value in enumerate(arguments):
            if index + 1 < len(arguments):
                start, end = source.start(value), source.start(arguments[index + 1])
            else:
                start = source.end(arguments[index - 1]) if index else source.start(value)
                end = source.end(value) if index else source.end(node) - 1
            yield source.edit(start, end, "", f"without {source.excerpt(value)} in {source.excerpt(node)}")
        yield from _swapped(source, node.args, node)
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        yield from _swapped(source, node.value.elts, node)


def _swapped(source: Source, values: list[ast.expr], node: Node) -> Iterator[Edit]:
    for left, right in itertools.pairwise(values):
        if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
            continue
        gap = source.between(source.end(left), source.start(right))
        new = f"{source.text_of(right)}{gap}{source.text_of(left)}"
        description = f"{source.excerpt(left)} and {source.excerpt(right)} swapped in {source.excerpt(node)}"
        yield source.edit(source.start(left), source.end(right), new, description)


def dtype(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Narrow a dtype: ``torch.float32`` to ``torch.bfloat16``, ``.double()`` to ``.float()``, ``"float32"``."""
    if isinstance(node, ast.Attribute) and node.attr in NARROWER:
        end = source.end(node)
        narrower = NARROWER[node.attr]
        yield source.edit(end - len(node.attr), end, narrower, f"{source.excerpt(node)} -> {narrower}")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NARROWER:
        yield source.edit_node(node, repr(NARROWER[node.value]))


def method(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Drop ``.clone()``, ``.contiguous()``, ``.detach()`` or a cast; add ``.detach()``; change in place or not."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, value, end = node.func.attr, node.func.value, source.end(node.func)
        dot = source.data.rfind(b".", source.end(value), end)
        if name in DROPPED_METHODS and not (isinstance(value, ast.Name) and value.id in {"torch", "tl"}):
            yield source.edit(dot, source.end(node), "", f"without .{name} in {source.excerpt(node)}")
        if name.endswith("_") and not name.endswith("__"):
            yield source.edit(end - 1, end, "", f".{name} -> .{name[:-1]} in {source.excerpt(node)}")
            yield source.edit(dot, dot, ".clone()", f".clone() before .{name} in {source.excerpt(node)}")
    if isinstance(node, (ast.Assign, ast.Return)) and node.value is not None and _is_tensor(node.value):
        wrapped = isinstance(node.value, ast.BinOp)
        new = f"({source.text_of(node.value)}).detach()" if wrapped else f"{source.text_of(node.value)}.detach()"
        yield source.edit_node(node.value, new, f".detach() behind {source.excerpt(node.value)}")


def _is_tensor(node: ast.expr) -> bool:
    """Whether an expression is a tensor, as far as its text tells."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value
    return node.func.attr in TENSOR_METHODS or (isinstance(owner, ast.Name) and owner.id == "torch")


#: In their order: where two operators give the same code, the mutant has the name of the first.
OPERATORS: tuple[Callable[[Source, ast.AST], Iterator[Edit]], ...] = (
    comparison, condition, arithmetic, assignment, axis, constant, statement, argument, dtype, method,
)  # fmt: skip
#: Fields of the syntax tree that no operator changes: annotations, and the text of an assertion.
SKIPPED_FIELDS = {"annotation", "returns", "msg", "type_params"}


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that operators change, outer nodes first."""
    yield node
    if isinstance(node, (ast.JoinedStr, ast.Raise)):  # up to Python 3.11 positions inside an f-string are wrong
        return
    if isinstance(node, ast.UnaryOp) and _number(node) is not None:
        return
    for value in (value for name, value in ast.iter_fields(node) if name not in SKIPPED_FIELDS):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child)


def touched_lines(tree: ast.Module, added: set[int]) -> set[int]:
    """Return the added lines, and all lines of the innermost functions around them."""
    spans = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    innermost = (min((span for span in spans if line in span), key=len, default=()) for line in added)
    return added.union(*innermost)


def edits(source: Source, lines: set[int]) -> list[Edit]:
    """List the edits of the nodes that begin in `lines`, in the order of the source."""
    ranked = [
        (edit.line, edit.start, number, edit.description, replace(edit, operator=operator.__name__))
        for node in _nodes(source.tree)
        if getattr(node, "lineno", None) in lines or isinstance(node, ast.comprehension)
        for number, operator in enumerate(OPERATORS)
        for edit in operator(source, node)
        if edit.line in lines
    ]
    return [edit for *_, edit in sorted(ranked, key=lambda row: row[:-1])]
