"""Pins that are looked up anew: what differs is said, and written only when that is asked for."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest

from testing import releases, toys
from testing.workbench import Workbench

TABLE = """
[dependencies.default.toyhelper] # a comment that stays
version = "1.0"
sha256 = { any = "%s" }

[targets.cpu]"""


@pytest.fixture
def helpers(tmp_path: Path) -> list[Path]:
    """Build two wheels, the newer of which requires what only torch has."""
    return [releases.helper(tmp_path, "1.0"), releases.helper(tmp_path, "1.1", "Requires-Dist: torch\n")]


@pytest.fixture
def pack(workbench: Workbench, helpers: list[Path], tmp_path: Path) -> Path:
    """Lay a pack that pins the older wheel, and a release that limits nothing."""
    archive = releases.sdist(tmp_path / "made")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    folder = toys.lay(workbench.packs, "01_confirmed", sha256)
    toys.seed(workbench.cache, archive, sha256)
    text = (folder / "pack.toml").read_text()
    digest = hashlib.sha256(helpers[0].read_bytes()).hexdigest()
    (folder / "pack.toml").write_text(text.replace("\n[targets.cpu]", TABLE % digest))
    return folder


def _pins(workbench: Workbench, helpers: list[Path], *arguments: str) -> tuple[int, str, str]:
    shelf = [path for path in helpers if "torch" not in path.name]
    with releases.index([], shelf) as index:
        ended = workbench.run("pins", "1", "--cache", str(workbench.cache), *arguments, **index)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout, ended.stderr


def test_what_differs_is_said_and_written_when_asked(workbench: Workbench, helpers: list[Path], pack: Path) -> None:
    helpers = [helpers[0], releases.helper(workbench.folder / "newer", "1.2")]
    before = (pack / "pack.toml").read_text()
    status, text, _ = _pins(workbench, helpers)
    assert (status, (pack / "pack.toml").read_text()) == (1, before)
    assert "01_confirmed: toyhelper 1.0 -> 1.2" in text
    assert "--update, which makes its receipts STALE" in text
    status, text, errors = _pins(workbench, helpers, "--update")
    assert (status, errors.count("error")) == (0, 0), errors
    stated = tomllib.loads((pack / "pack.toml").read_text())["dependencies"]["default"]["toyhelper"]
    assert stated == {"version": "1.2", "sha256": {"any": hashlib.sha256(helpers[1].read_bytes()).hexdigest()}}
    assert "[dependencies.default.toyhelper] # a comment that stays" in (pack / "pack.toml").read_text()
    assert '# dependencies = ["toykernel==1.0", "toyhelper==1.2"]' in (pack / "reproduce.py").read_text()
    assert _pins(workbench, helpers)[:2] == (0, "01_confirmed: nothing differs\n")


def test_a_header_of_a_line_each(workbench: Workbench, helpers: list[Path], pack: Path) -> None:
    probe = pack / "reproduce.py"
    lines = '# dependencies = [\n#   "toykernel==1.0",\n#   "toyhelper==1.0",\n# ]\n'
    probe.write_text(probe.read_text().replace('# dependencies = ["toykernel==1.0"]\n', lines))
    newer = [helpers[0], releases.helper(workbench.folder / "newer", "1.2")]
    assert _pins(workbench, newer, "--update")[0] == 0
    assert lines.replace("toyhelper==1.0", "toyhelper==1.2") in probe.read_text()


def test_kept_versions_stay(workbench: Workbench, helpers: list[Path], pack: Path) -> None:
    helpers = [helpers[0], releases.helper(workbench.folder / "newer", "1.2")]
    assert _pins(workbench, helpers, "--keep")[:2] == (0, "01_confirmed: nothing differs\n")
    assert pack.exists()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--set", "other"], 2, "no dependency set 'other'"),
        (["--python", "two"], 2, "a version such as 3.12"),
        ([], 1, "no wheels for Python"),
    ],
)
def test_a_wrong_call_changes_nothing(
    workbench: Workbench, pack: Path, arguments: list[str], status: int, said: str
) -> None:
    before = (pack / "pack.toml").read_text()
    found, _, errors = _pins(workbench, [], *arguments)
    assert (found, said in errors) == (status, True), errors
    assert (pack / "pack.toml").read_text() == before


def test_tables_in_another_form_are_left_alone(workbench: Workbench, helpers: list[Path], pack: Path) -> None:
    helpers = [helpers[0], releases.helper(workbench.folder / "newer", "1.2")]
    path = pack / "pack.toml"
    digest = hashlib.sha256(helpers[0].read_bytes()).hexdigest()
    inline = (
        f'\n[dependencies.default]\ntoyhelper = {{ version = "1.0", sha256 = {{ any = "{digest}" }} }}\n\n[targets.cpu]'
    )
    path.write_text(path.read_text().replace(TABLE % digest, inline))
    before = path.read_text()
    status, _, errors = _pins(workbench, helpers, "--update")
    assert (status, "no table [dependencies.default.toyhelper]" in errors) == (2, True), errors
    assert path.read_text() == before
