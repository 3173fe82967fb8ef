"""The script of an author, and how it becomes reproduce.py: with a PEP 723 header and a sentinel."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.core import python_ast
from harness.core.errors import HarnessError
from harness.pack.script_text import HEADER

#: The lines that have to stay before a header: the interpreter's, and the encoding's.
PREAMBLE = re.compile(r"(?:#![^\n]*\n)?(?:#[^\n]*coding[:=][^\n]*\n)?")
#: Prints the sentinel of a script that ends in an exception; it stands before the script's own imports.
HOOK = '''
import os
import sys


def print_sentinel(kind, error, trace):
    """Say BUG_REPRODUCED where the script ends in {fails}, and UNSUPPORTED where it ends in another exception."""
    sys.__excepthook__(kind, error, trace)
    word, status = ("BUG_REPRODUCED", 10) if kind.__name__ == "{fails}" else ("UNSUPPORTED", 125)
    print(f"{{word}}: {{kind.__name__}} in line {{trace.tb_lineno}}: {{' '.join(str(error).split())}}", flush=True)
    os._exit(status)


sys.excepthook = print_sentinel
'''


@dataclass(frozen=True)
class Script:
    """A script, read."""

    text: str  # of the file
    title: str  # the first line of its docstring, or empty
    imports: tuple[str, ...]  # the names of the packages that it imports, at its top or in a function
    body: int  # the number of lines before its first statement, without docstring and __future__ imports

    @property
    def is_interpreted(self) -> bool:
        """Whether it runs Triton kernels in Triton's interpreter where there is no GPU."""
        return "TRITON_INTERPRET" in self.text

    def as_reproducer(self, requires_python: str, packages: tuple[str, ...], fails: str) -> str:
        """Return the text of reproduce.py.

        A script that has a header keeps it, and one that says BUG_REPRODUCED prints its own sentinel. The bug of any
        other script is that it ends in the exception `fails`.
        """
        text = self.text
        if "BUG_REPRODUCED" not in text:
            lines = text.splitlines(keepends=True)
            end = [*lines[self.body :], "" if text.endswith("\n") else "\n", 'print("FIX_VALIDATED")\n']
            text = "".join([*lines[: self.body], HOOK.format(fails=fails), *end])
        if HEADER.search(text):
            return text
        stated = f'# requires-python = "{requires_python}"\n# dependencies = {json.dumps(packages)}'
        return PREAMBLE.sub(lambda preamble: f"{preamble[0]}# /// script\n{stated}\n# ///\n", text, count=1)


def read(path: Path) -> Script:
    """Read a script. HarnessError: it is no Python, has tests that it does not call, or needs a module beside it."""
    try:
        text = path.read_text(encoding="utf-8")
        module = python_ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise HarnessError(f"{path.name}: no Python: {error}. Next: run it by itself first") from None
    called = {ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)}
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    tests = [name for name in functions if name.startswith("test") and name not in called]
    if tests:
        raise HarnessError(f"{path.name}: nothing calls {tests[0]}. Next: call it at the end of the file")
    imports = tuple(dict.fromkeys(_imports(module)))
    beside = [name for name in imports if (path.parent / f"{name}.py").is_file()]
    if beside:
        raise HarnessError(f"{path.name} imports {beside[0]}.py beside it. Next: one file, which upstream can paste")
    title = (ast.get_docstring(module) or "").partition("\n")[0].strip().rstrip(".")
    return Script(text, title, imports, _lines_of_head(module, text))


def _imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _lines_of_head(module: ast.Module, text: str) -> int:
    """Count the lines that have to stay in front: comments, the docstring, imports from __future__."""
    head: list[ast.stmt] = [
        node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    if ast.get_docstring(module) is not None:
        head.append(module.body[0])
    if head:
        return max(node.end_lineno or 0 for node in head)
    header = HEADER.search(text)
    preamble = PREAMBLE.match(text)
    return text.count("\n", 0, header.end() + 1 if header else preamble.end() if preamble else 0)
