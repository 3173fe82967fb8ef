"""What a script reaches in an unpacked release: read from its imports, nothing is executed.

Only what is imported while a module is loaded counts: an import inside a function, under TYPE_CHECKING, or one whose
failure the module catches may stay away.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.core import python_ast

#: Folders of a repository in which its packages may lie; a wheel has them at its top.
ROOTS = ("", "src", "python", "lib")
STANDARD = sys.stdlib_module_names


@dataclass(frozen=True)
class Reach:
    """What loading some modules of a release loads.

    Attributes:
        files: of the release, by module.
        others: import names of other packages, with the module of the release that asks for each first.
        named: packages of which some module takes a name that is none of their modules: these have to be executed.

    """

    files: dict[str, Path]
    others: dict[str, str]
    named: frozenset[str]


def source_root(folder: Path, module: str) -> str | None:
    """Return the folder of a tree in which an import name lies; None where it is in none of the usual ones."""
    inner = sorted(path.name for path in folder.iterdir() if path.is_dir())
    for root in (*ROOTS, *inner):
        if _file(folder / root, module) is not None or ((folder / root / module).is_dir() and root in ROOTS[:2]):
            return root
    return None


def _file(root: Path, module: str) -> Path | None:
    """Return the source of a module; None where it has none here (a folder without __init__, a compiled module)."""
    place = root.joinpath(*module.split("."))
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)


def _is_package(path: Path | None) -> bool:
    return path is None or path.name == "__init__.py"


def parents(module: str) -> list[str]:
    """List the packages that a module lies in, the outermost first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def imported(source: str, module: str, *, is_package: bool, every: bool = False) -> list[tuple[str, tuple[str, ...]]]:
    """List what a module's text imports: each module, and the names that are taken from it.

    Args:
        source: its text.
        module: its own name, for relative imports; empty for a script.
        is_package: whether it is a package's ``__init__``.
        every: also what a function imports.

    """
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in _statements(python_ast.parse(source).body, every=every):
        if isinstance(node, ast.Import):
            found += [(name.name, ()) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            outer = base[: len(base) - node.level + is_package] if node.level else []
            found.append(
                (".".join([*outer, *([node.module] if node.module else [])]), tuple(n.name for n in node.names))
            )
    return found


def _statements(body: list[ast.stmt], *, every: bool) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif isinstance(node, ast.Try) and any(_catches(one) for one in node.handlers):
            yield from _statements([*node.orelse, *node.finalbody], every=every)
        elif every or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(node, name, [])
                yield from _statements(inner if isinstance(inner, list) else [], every=every)


def _catches(handler: ast.ExceptHandler) -> bool:
    names = ast.unparse(handler.type) if handler.type else "Exception"
    return any(word in names for word in ("ImportError", "ModuleNotFoundError", "Exception"))


def of_modules(root: Path, wanted: list[str], stubs: tuple[str, ...] = ()) -> Reach:
    """Follow the imports of modules through a release.

    Args:
        root: the folder of a tree that goes on PYTHONPATH.
        wanted: the modules that a script names.
        stubs: packages that are found and not executed.

    """
    own = {name.partition(".")[0] for name in wanted}
    waiting = [(name, name) for name in wanted]
    files: dict[str, Path] = {}
    others: dict[str, str] = {}
    seen: set[str] = set()
    named: set[str] = set()
    while waiting:
        module, asker = waiting.pop(0)
        if module in seen:
            continue
        seen.add(module)
        if module.partition(".")[0] not in own:
            others.setdefault(module.partition(".")[0], asker)
            continue
        waiting += [(one, asker) for one in parents(module)]
        path = _file(root, module)
        if path is None or module in stubs:
            continue
        files[module] = path
        source = path.read_text(encoding="utf-8", errors="replace")
        for name, taken in imported(source, module, is_package=_is_package(path)):
            waiting.append((name, module))
            inner = [one for one in taken if _file(root, f"{name}.{one}") is not None]
            waiting += [(f"{name}.{one}", module) for one in inner]
            named |= {name} if len(inner) < len(taken) else set()
    return Reach(files, {k: v for k, v in others.items() if k not in sys.stdlib_module_names}, frozenset(named))


def stubs_for(root: Path, wanted: list[str], given: set[str]) -> tuple[str, ...]:
    """Name the parents of modules that had better not be executed: they import packages that the modules do not need.

    Args:
        root: the folder of a tree that goes on PYTHONPATH.
        wanted: the modules that a script names; none of these is stubbed.
        given: import names that are there in any case.

    """
    candidates = tuple(dict.fromkeys(one for module in wanted for one in parents(module) if one not in wanted))
    named = of_modules(root, wanted, candidates).named
    kept = [one for one in candidates if one in named]
    least = set(of_modules(root, wanted, tuple(one for one in candidates if one not in named)).others) | given
    for one in (name for name in candidates if name not in named):
        stubbed = tuple(other for other in candidates if other != one and other not in kept)
        if set(of_modules(root, wanted, stubbed).others) <= least:
            kept.append(one)
    return tuple(one for one in candidates if one not in kept)
