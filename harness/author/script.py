"""A script of one's own: what it imports, what lies beside it, and its text with the header of a pack's script."""

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

#: What has to stay before a header: the line of the interpreter, and that of the encoding.
FIRST = re.compile(r"(?:#![^\n]*\n)?(?:#[^\n]*coding[:=][^\n]*\n)?")


@dataclass(frozen=True)
class Script:
    """What a script says."""

    text: str  # the whole file
    title: str  # the first line of its docstring; empty where it has none
    imports: tuple[str, ...]  # the import names of the packages that it imports, at its top or in a function
    beside: tuple[str, ...]  # files that it imports or names, by their paths in its folder

    @property
    def is_test(self) -> bool:
        """Whether it leaves its tests to pytest."""
        return bool(ordinary.test_names(python_ast.parse(self.text)))

    def with_header(self, requires_python: str, packages: tuple[str, ...], day: str) -> str:
        """Return the text with a PEP 723 header, whose packages uv takes as of a day; a header of its own stays."""
        if HEADER.search(self.text):
            return self.text
        head = [f'# requires-python = "{requires_python}"', f"# dependencies = {json.dumps(packages)}"]
        head += ["# [tool.uv]", f'# exclude-newer = "{day}"'] if day else []
        place = FIRST.match(self.text)
        end = place.end() if place else 0
        return "\n".join([self.text[:end] + "# /// script", *head, "# ///", self.text[end:]])


def read(path: Path) -> Script:
    """Read a script; HarnessError: it is no Python."""
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
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _beside(path: Path, module: ast.Module, seen: set[Path]) -> Iterator[str]:
    """Name the modules and files in a script's folder that it, or a module of these, imports or names in a text."""
    named = {node.value for node in ast.walk(module) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    likely = {name for name in named if re.fullmatch(r"[\w-][\w./-]{0,100}", name) and ".." not in name}
    for name in (*likely, *(f"{name}.py" for name in _imports(module)), *_imports(module)):
        place = path.parent / name
        inner = sorted(place.rglob("*.py")) if place.is_dir() and name not in likely else [place]
        for file in inner:
            if file.is_file() and file not in seen:
                seen.add(file)
                yield file.relative_to(path.parent).as_posix()
                if file.suffix == ".py":
                    yield from _beside(path, python_ast.parse(file.read_text(encoding="utf-8")), seen)
