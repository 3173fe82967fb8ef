"""Dependency sets: merged, chosen, and pinned for this Python."""

from __future__ import annotations

import zipfile
from pathlib import Path

from testing import toys
from testing.workbench import Workbench


def _dependency(workbench: Workbench, version: str) -> str:
    archive = workbench.folder / f"toyhelper-{version}-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr(zipfile.ZipInfo("toyhelper.py"), f"VERSION = {version!r}\n")
        bundle.writestr(zipfile.ZipInfo(f"toyhelper-{version}.data/purelib/toyextra.py"), "HERE = True\n")
    digest = toys.hashlib.sha256(archive.read_bytes()).hexdigest()
    toys.seed(workbench.cache, archive, digest)
    return digest


def test_a_dependency_set_is_merged_and_another_one_can_be_asked_for(workbench: Workbench) -> None:
    folder = workbench.lay("01_confirmed")
    definition = folder / "pack.toml"
    sets = ""
    for name, version in (("default", "1.0"), ("newer", "2.0")):
        digest = _dependency(workbench, version)
        sets += f'\n[dependencies.{name}.toyhelper]\nversion = "{version}"\nsha256 = {{ any = "{digest}" }}\n'
    definition.write_text(definition.read_text() + sets)
    probe = folder / "reproduce.py"
    shown = "import toyextra, toyhelper\nprint(toyhelper.VERSION, toyextra.HERE)\nvalues, weights ="
    probe.write_text(probe.read_text().replace("values, weights =", shown))
    assert workbench.rows()[0] == 0
    status, (row,) = workbench.rows("--with", "newer")
    assert status == 0
    assert "2.0 True" in Path(row["logs"][0]).read_text()
    assert "runs" in row["receipt"], "another set's receipt is not the pack's"


def test_a_python_without_a_pinned_wheel_is_unsupported(workbench: Workbench) -> None:
    folder = workbench.lay("01_confirmed")
    digest = "0" * 64
    extra = f'\n[dependencies.default.toyhelper]\nversion = "1.0"\nsha256 = {{ cp39 = "{digest}" }}\n'
    definition = folder / "pack.toml"
    definition.write_text(definition.read_text() + extra)
    status, (row,) = workbench.rows()
    assert (status, row["verdict"]) == (5, "UNSUPPORTED")
    assert "pack.toml pins no wheel for cp3" in row["reason"]
