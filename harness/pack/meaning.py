"""Freshness by meaning: comments, a docstring or a commit message do not make a receipt stale."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from pathlib import Path

from harness.core import python_ast
from harness.core.files import sha256_bytes


@functools.lru_cache(maxsize=64)
def probe_meaning(source: str) -> str:
    """Return the sha256 of a probe without its comments, blank lines and module docstring.

    It works on the text, since syntax trees and token streams differ between Python versions. SyntaxError is raised
    where the probe is no Python.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    tree = python_ast.parse(source)
    first = tree.body[0] if ast.get_docstring(tree) is not None else None
    dropped = range(first.lineno, (first.end_lineno or first.lineno) + 1) if first else ()
    lines = source.split("\n")  # as the tokenizer counts them: a form feed or U+2028 ends no line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    kept = [line.rstrip() for number, line in enumerate(lines, start=1) if number not in dropped and line.strip()]
    return sha256_bytes("\n".join(kept).encode())


def patch_meaning(text: str) -> str:
    """Return the sha256 of a patch from its first ``diff --git`` on."""
    start = text.find("diff --git ")
    return sha256_bytes(text[max(start, 0) :].encode())


def meaning(path: Path) -> str:
    """Return the sha256 of what a probe or a patch means; of its bytes where it cannot be read as either."""
    data = path.read_bytes()
    try:
        text = data.decode()
        return probe_meaning(text) if path.suffix == ".py" else patch_meaning(text)
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError):
        return sha256_bytes(data)
