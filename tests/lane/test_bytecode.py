"""The bytecode of torch is stored once, for lanes that store none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STORE = "from harness.lane import environment; environment.store_bytecode(print)"
FILES = ("torch/__init__.py", "torch/_inductor/__init__.py", "torch/_inductor/compile_fx.py", "triton/__init__.py")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Make a folder with a torch as uv installs it, without bytecode."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def _store(site: Path, before: str = "", **variables: str) -> tuple[str, set[str]]:
    """Return what `store` told after the code `before`, and the files whose bytecode is stored."""
    environment = {**os.environ, "PYTHONPATH": str(site), **variables}
    command = [sys.executable, "-c", before + STORE]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    stored = {path.relative_to(site) for path in site.rglob("*.pyc")}
    return told, {str(path.parent.parent / f"{path.name.split('.')[0]}.py") for path in stored}


def test_missing_bytecode_is_stored_once(site: Path) -> None:
    told, stored = _store(site, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=str(site / "elsewhere"))
    assert "storing the bytecode of torch" in told
    assert stored == set(FILES)
    assert _store(site) == ("", set(FILES))


def test_a_torch_that_cannot_be_imported_is_tried_once(site: Path) -> None:
    (site / "torch/__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    told, stored = _store(site)
    assert "storing the bytecode of torch" in told
    assert "torch/_inductor/compile_fx.py" in stored
    assert _store(site) == ("", stored)


def test_a_read_only_torch_is_left_alone(site: Path) -> None:
    read_only = "import os; access = os.access; os.access = lambda path, mode: mode != os.W_OK and access(path, mode); "
    assert _store(site, read_only) == ("", set())


def test_without_torch_nothing_is_done(site: Path) -> None:
    no_torch = "import importlib.util; importlib.util.find_spec = lambda name: None; "
    assert _store(site, no_torch) == ("", set())
