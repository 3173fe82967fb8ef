"""Parsing Python source, one thread at a time: CPython's `ast` keeps a count that threads share, up to 3.12.

Two threads in `ast.parse` at once can end in "SystemError: AST constructor recursion depth mismatch".
"""

import ast
import threading

_LOCK = threading.Lock()


def parse(source: str) -> ast.Module:
    """Parse a module as `ast.parse` does."""
    with _LOCK:
        return ast.parse(source)


def literal(text: str) -> object:
    """Evaluate a literal as `ast.literal_eval` does."""
    with _LOCK:
        return ast.literal_eval(text)
