"""The script of an author: its imports, the files beside it, and its text with a PEP 723 header."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.core import python_ast
from harness.core.errors import HarnessError
from harness.lane import ordinary
from harness.pack.script_text import HEADER

#: The lines that have to stay before a header: the interpreter's, and the encoding's.
PREAMBLE = re.compile(r"(?:#![^\n]*\n)?(?:#[^\n]*coding[:=][^\n]*\n)?")


@dataclass(frozen=True)
class Script:
    """A script, read."""

    text: str  # of the file
    title: str  # the first line of its docstring, or empty
    imports: tuple[str, ...]  # the names of the packages that it imports, at its top or in a function
    beside: tuple[str, ...]  # the files that it imports or names, by their paths in its folder

    @property
    def is_test(self) -> bool:
        """Whether pytest has to run it."""
        return bool(ordinary.test_names(python_ast.parse(self.text)))

    def with_header(self, requires_python: str, packages: tuple[str, ...], day: str) -> str:
        """Return the text with a PEP 723 header, which limits uv to a day. A script that has a header keeps it."""
        if HEADER.search(self.text):
            return self.text
        head = [f'# requires-python = "{requires_python}"', f"# dependencies = {json.dumps(packages)}"]
        head += ["# [tool.uv]", f'# exclude-newer = "{day}"'] if day else []
        preamble = PREAMBLE.match(self.text)
        end = preamble.end() if preamble else 0
        return "\n".join([self.text[:end] + "# /// script", *head, "# ///", self.text[end:]])


def read(path: Path) -> Script:
    """Read a script. HarnessError: it is no Python."""
    try:
        text = path.read_text(encoding="utf-8")
        module = python_ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise HarnessError(f"{path.name}: no Python: {error}. Next: run it by itself first") from None
    beside = tuple(sorted(set(_beside(path.absolute(), module, {path.absolute()}))))
    title = (ast.get_docstring(module) or "").partition("\n")[0].strip().rstrip(".")
    return Script(text, title, tuple(dict.fromkeys(_imports(module))), beside)


def _imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _beside(path: Path, module: ast.Module, visited: set[Path]) -> Iterator[str]:
    """Yield the files in the folder of the script `path` that a module imports or names, and so on for each module."""
    texts = {node.value for node in ast.walk(module) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    paths = {name for name in texts if re.fullmatch(r"[\w-][\w./-]{0,100}", name) and ".." not in name}
    for name in (*paths, *(f"{name}.py" for name in _imports(module)), *_imports(module)):
        place = path.parent / name
        files = sorted(place.rglob("*.py")) if place.is_dir() and name not in paths else [place]
        for file in files:
            if file.is_file() and file not in visited:
                visited.add(file)
                yield file.relative_to(path.parent).as_posix()
                if file.suffix == ".py":
                    yield from _beside(path, python_ast.parse(file.read_text(encoding="utf-8")), visited)
