"""What a script reaches in a release: read from imports, with nothing executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.author import reach

FILES = {
    "toy/__init__.py": "import halfworld\nfrom . import everything\n",
    "toy/everything.py": "import pandas\n",
    "toy/ops/__init__.py": "import json\nNAME = 1\n",
    "toy/ops/scale.py": """
import numpy as np
import json
from typing import TYPE_CHECKING
from .helper import one
from ..config import two
if TYPE_CHECKING:
    import onlytypes
try:
    import optional
except ImportError:
    optional = None
def later():
    import lazy
""",
    "toy/ops/helper.py": "import einops\none = 1\n",
    "toy/config.py": "two = 2\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Lay a toy package out."""
    for name, text in FILES.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text(text)
    return tmp_path / "src"


def test_imports_that_may_fail_or_come_later_do_not_count(root: Path) -> None:
    found = reach.of_modules(root, ["toy.ops.scale"], ("toy",))
    assert found.others == {"numpy": "toy.ops.scale", "einops": "toy.ops.helper"}
    assert set(found.files) == {"toy.ops", "toy.ops.scale", "toy.ops.helper", "toy.config"}


def test_only_the_parent_that_imports_half_the_world_is_stubbed(root: Path) -> None:
    assert reach.stubs_for(root, ["toy.ops.scale"], {"numpy"}) == ("toy",)
    (root / "toy/__init__.py").write_text("import json\n")
    assert reach.stubs_for(root, ["toy.ops.scale"], {"numpy"}) == ()


def test_a_parent_whose_own_names_are_taken_is_executed(root: Path) -> None:
    (root / "toy/config.py").write_text("from toy import __version__\n")
    assert reach.stubs_for(root, ["toy.ops.scale"], set()) == ()
    assert reach.stubs_for(root, ["toy"], set()) == ()


def test_the_folder_of_the_modules_is_found(root: Path) -> None:
    assert reach.source_root(root.parent, "toy") == "src"
    assert reach.source_root(root, "toy") == ""
    assert reach.source_root(root, "other") is None


def test_a_circle_ends(root: Path) -> None:
    (root / "toy/config.py").write_text("from toy.ops import scale\n")
    assert "toy.config" in reach.of_modules(root, ["toy.config"], ("toy",)).files
