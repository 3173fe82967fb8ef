"""What judges a pack: its script, its contract, and the modules of the kit that the contract imports."""

from __future__ import annotations

import ast
from pathlib import Path

from harness.core import files, python_ast
from harness.pack import meaning
from harness.pack.model import Pack

#: Every contract runs under it, and it decides nothing: a change of it makes no receipt stale.
PLUGIN = "kit.plugin"
REPOSITORY = Path(__file__).parents[2]


def _imported(source: str) -> set[str]:
    """Return the names of the kit's modules that a file may import, and names in them."""
    found: set[str] = set()
    for node in ast.walk(python_ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] == "kit"}


def _file(module: str) -> Path | None:
    path = REPOSITORY.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def kit_files(contract: Path) -> list[Path]:
    """Return the files of the kit that a contract imports, directly or not, in the order of their names.

    Raises:
        SyntaxError: one of them is no Python.

    """
    found: set[Path] = set()
    waiting = [contract]
    while waiting:
        for module in _imported(waiting.pop().read_text(encoding="utf-8")) - {PLUGIN}:
            file = _file(module)
            if file is not None and file not in found:
                found.add(file)
                waiting.append(file)
    return sorted(found)


def files_of(pack: Pack) -> list[Path]:
    """Return what judges a pack: its script, its contract, and in the order of their names the kit's files for that."""
    if not pack.contract.is_file():
        return [pack.probe]
    try:
        return [pack.probe, pack.contract, *kit_files(pack.contract)]
    except (SyntaxError, ValueError):  # no Python, or not UTF-8: running it will say so
        return [pack.probe, pack.contract]


def _joined(hashes: list[str]) -> str:
    return hashes[0] if len(hashes) == 1 else files.sha256_bytes("\n".join(hashes).encode())


def sha256(pack: Pack) -> str:
    """Return one hash of the bytes of what judges a pack.

    Raises:
        OSError: the script cannot be read.

    """
    return _joined([files.sha256_file(path) for path in files_of(pack)])


def meaning_of(pack: Pack) -> str:
    """Return one hash of what these files mean, without comments and module docstrings.

    Raises:
        OSError: the script cannot be read.

    """
    return _joined([meaning.meaning(path) for path in files_of(pack)])
