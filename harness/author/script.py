"""A script of one's own, as the body of a function of a probe: its lines stay as they are."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass

from harness.author import reach
from harness.core import python_ast
from harness.core.errors import HarnessError

INDENT = "    "
#: With a text or a status, a script's own way to say that it failed.
EXITS = ("sys.exit", "exit", "quit")


@dataclass(frozen=True)
class Script:
    """What a script says.

    Attributes:
        body: its lines, indented to stand in a function.
        imports: the modules that it imports, each with the names that it takes of it.
        docstring: its first paragraph; empty where it has none.
        fails: whether it can end in an assertion, an exception or an exit status of its own.
        problems: what keeps its text from working in a function.

    """

    body: str
    imports: tuple[tuple[str, tuple[str, ...]], ...]
    docstring: str
    fails: bool
    problems: tuple[str, ...]


def read(text: str, name: str) -> Script:
    """Take a script apart.

    Raises:
        HarnessError: it is no Python.

    """
    try:
        module = python_ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise HarnessError(f"{name}: no Python: {error}. Next: run it by itself first") from None
    found = reach.imported(text, "", is_package=False, every=True)
    return Script(
        body=_indented(_lines(text, module)),
        imports=tuple((one, taken) for one, taken in found if one),
        docstring=(ast.get_docstring(module) or "").partition("\n\n")[0],
        fails=any(map(_fails, ast.walk(module))) or "assert_" in text,
        problems=tuple(_problems(module)),
    )


def _fails(node: ast.AST) -> bool:
    ends = isinstance(node, ast.Call) and bool(node.args) and ast.unparse(node.func) in EXITS
    return ends or isinstance(node, ast.Assert | ast.Raise)


def _problems(module: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and any(one.name == "*" for one in node.names):
            found.append(f"line {node.lineno}: `import *` cannot stand in a function: name what it takes")
        elif isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: `global` means another variable in a function: pass the value")
        elif isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
            found.append(
                f"line {node.lineno}: the kernel {node.name} has to stand at the probe's top level: move it there"
            )
    return found


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def _lines(text: str, module: ast.Module) -> list[str]:
    """Return a script's lines without its docstring and ``__future__``; what stands under ``__main__`` stands alone."""
    lines, dropped, less = text.splitlines(), set[int](), dict[int, int]()
    for node in module.body:
        span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if (node is module.body[0] and ast.get_docstring(module) is not None) or (
            isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ):
            dropped |= {*span}
        elif isinstance(node, ast.If) and _is_main(node):
            dropped |= {*range(node.lineno, node.body[0].lineno)}
            less |= dict.fromkeys(span, node.body[0].col_offset)
    inside = _inside_strings(text)
    kept = [(number, line) for number, line in enumerate(lines, start=1) if number not in dropped]
    shorter = [line if number in inside else line[less.get(number, 0) :] for number, line in kept]
    marked = [f"\0{line}" if number in inside else line for (number, _), line in zip(kept, shorter, strict=True)]
    while marked and not marked[0].strip():
        marked.pop(0)
    while marked and not marked[-1].strip():
        marked.pop()
    return [line for line in marked if not line.startswith("#!")]


def _inside_strings(text: str) -> set[int]:
    """List the numbers of the lines that begin inside a string: an indentation would change it."""
    inside: set[int] = set()
    starts: list[int] = []
    middle = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            inside |= {*range(token.start[0] + 1, token.end[0] + 1)}
        elif token.type == middle[0]:
            starts.append(token.start[0])
        elif token.type == middle[1]:
            inside |= {*range(starts.pop() + 1, token.end[0] + 1)}
    return inside


def _indented(lines: list[str]) -> str:
    shown = (line[1:] if line.startswith("\0") else f"{INDENT}{line}".rstrip() for line in lines)
    return "\n".join(shown)
