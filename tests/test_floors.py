"""The folders are the flow of data: each imports from its own floor and those below it, never in a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from testing.workbench import REPOSITORY

#: The floors, the ground first; folders of one floor do not import each other unless the tuple's order allows it.
FLOORS = (
    "core", "pack", "host", "upstream", "lane", "verdict", "receipt", "schedule", "suites",
    "mutate", "versions", "sweep", "report", "author", "commands",
)  # fmt: skip
#: Folders that stand beside each other though they are listed in an order.
APART = {("versions", "mutate"), ("report", "sweep")}
#: Modules that a lane copies or runs by path, and that therefore import nothing of the harness.
ALONE = {"harness/lane/supervisor.py"}


def _imports(path: Path) -> set[str]:
    """Return the modules of the harness that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("harness"):
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                is_module = (REPOSITORY / inner.replace(".", "/")).with_suffix(".py").exists()
                found.add(inner if is_module else node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("harness")}
    return found


MODULES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path
    for path in sorted((REPOSITORY / "harness").rglob("*.py"))
}
IMPORTS = {name: _imports(path) for name, path in MODULES.items()}


def _floor(module: str) -> str:
    return module.split(".")[1] if module.count(".") > 1 else ""


@pytest.mark.parametrize("folder", FLOORS)
def test_a_folder_imports_from_its_own_floor_and_those_below(folder: str) -> None:
    below = FLOORS[: FLOORS.index(folder) + 1]
    upwards = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if _floor(module) == folder and _floor(other) and _floor(other) not in below
    ]
    apart = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if (_floor(module), _floor(other)) in APART
    ]
    assert upwards + apart == []


def test_every_folder_has_its_floor() -> None:
    assert {path.name for path in (REPOSITORY / "harness").iterdir() if path.is_dir() and path.name[0] != "_"} == {
        *FLOORS
    }


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        list(TopologicalSorter(IMPORTS).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def test_what_is_copied_or_run_by_path_imports_nothing_of_ours() -> None:
    for name in ALONE:
        assert _imports(REPOSITORY / name) == set()
