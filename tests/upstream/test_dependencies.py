"""Dependency sets: merged, chosen, and pinned for this Python."""

from __future__ import annotations

import hashlib
import io
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.upstream import dependencies
from testing import toys
from testing.package_index import Shelf, served, settings
from testing.workbench import Workbench


def _dependency(workbench: Workbench, version: str) -> str:
    file = f"toyhelper-{version}-py3-none-any.whl"
    members = {
        "toyhelper.py": f"VERSION = {version!r}\n",
        f"toyhelper-{version}.data/purelib/toyextra.py": "HERE = True\n",
    }
    archive, digest = toys.wheel(workbench.folder, file, members)
    toys.seed(workbench.cache, archive, digest)
    return digest


def test_a_dependency_set_is_merged_and_another_one_can_be_asked_for(workbench: Workbench) -> None:
    folder = workbench.lay("01_confirmed")
    for name, version in (("default", "1.0"), ("newer", "2.0")):
        digest = _dependency(workbench, version)
        toys.pin(folder, "toyhelper", version, digest, name=name)
    script = folder / "reproduce.py"
    shown = "import toyextra, toyhelper\nprint(toyhelper.VERSION, toyextra.HERE)\nvalues, weights ="
    script.write_text(script.read_text().replace("values, weights =", shown))
    assert workbench.rows()[0] == 0
    status, (row,) = workbench.rows("--with", "newer")
    assert status == 0
    assert "2.0 True" in Path(row["logs"][0]).read_text()
    assert "runs" in row["receipt"], "another set's receipt is not the pack's"


def _pinning(workbench: Workbench, wheels: list[str], *, among: int = 2) -> tuple[Path, list[Path]]:
    """Lay a pack that pins toy wheels of these tags, and other hashes besides; return it and the wheels."""
    folder = workbench.lay("01_confirmed")
    made = [toys.wheel(workbench.folder / "index", f"toyhelper-1.0-{tag}.whl", {"toyhelper.py": ""}) for tag in wheels]
    hashes = [sha256 for _, sha256 in made] + [str(number) * 64 for number in range(len(made), among)]
    toys.pin(folder, "toyhelper", "1.0", *hashes)
    return folder, [path for path, _ in made]


def _gives(workbench: Workbench, served_files: list[Path], status: int, verdict: str, reason: str = "") -> None:
    """Run the pack with an index that has these files alone."""
    with served(Shelf({"toyhelper": {path.name: path.read_bytes() for path in served_files}})) as url:
        workbench.gives(status, verdict, "--online", reason=reason, **settings(url))


def test_a_python_without_a_pinned_wheel_is_unsupported(workbench: Workbench) -> None:
    _, wheels = _pinning(workbench, ["cp39-cp39-manylinux2014_x86_64"])
    _gives(workbench, wheels, 5, "UNSUPPORTED", "toyhelper 1.0: the requirements file pins no wheel for cp3")


def test_the_wheel_for_this_python_and_the_newest_glibc_is_taken_and_remembered(workbench: Workbench) -> None:
    tags = ["cp311-cp311-win_amd64", "py3-none-manylinux2014_x86_64", "py3-none-manylinux_2_28_x86_64"]
    _, wheels = _pinning(workbench, [*tags, "py3-none-any"])
    _gives(workbench, wheels, 0, "CONFIRMED")
    downloads = [path.name for path in workbench.cache.glob("downloads/*/toyhelper*")]
    assert downloads == ["toyhelper-1.0-py3-none-manylinux_2_28_x86_64.whl"]
    assert workbench.rows()[0] == 0, "offline"
    shutil.rmtree(workbench.cache / "releases")
    assert workbench.rows()[0] == 0, "what the cache has is enough"


@pytest.mark.parametrize("kept", ["[{", '[{"name": "a field of another version"}]', '{"schema": 2}'])
def test_a_list_of_releases_in_another_form_is_asked_for_again(workbench: Workbench, kept: str) -> None:
    _, wheels = _pinning(workbench, ["py2-none-any", "py3-none-any"])
    listed = workbench.cache / "releases" / "toyhelper.json"
    listed.parent.mkdir(parents=True)
    listed.write_text(kept)
    _gives(workbench, wheels, 0, "CONFIRMED")


def test_a_wheel_of_another_sha256_is_refused(workbench: Workbench) -> None:
    _, (wheel,) = _pinning(workbench, ["py3-none-any"])
    wheel.write_bytes(wheel.read_bytes() + b"x")
    said = "toyhelper 1.0: wrong sha256: the index has no file of one that is pinned"
    _gives(workbench, [wheel], 1, "ERROR", said)
    assert not list(workbench.cache.glob("downloads/*/toyhelper*"))


def test_a_wheel_that_is_not_in_the_cache_is_missed_offline(workbench: Workbench) -> None:
    _pinning(workbench, ["py3-none-any"])
    row = workbench.gives(1, "ERROR", reason="toyhelper 1.0: not in the cache")
    assert "--offline forbids to download it. Next: runner.py fetch --cache DIR" in row["reason"]


def test_an_sdist_is_neither_built_nor_executed(workbench: Workbench) -> None:
    executed = workbench.folder / "executed"
    archive = workbench.folder / "toyhelper-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        text = f"open({str(executed)!r}, 'w')\n".encode()
        info = tarfile.TarInfo("toyhelper-1.0/setup.py")
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
    folder = workbench.lay("01_confirmed")
    toys.pin(folder, "toyhelper", "1.0", hashlib.sha256(archive.read_bytes()).hexdigest(), "0" * 64)
    _gives(workbench, [archive], 1, "ERROR", "toyhelper 1.0: it has no wheel, and an sdist is never built")
    assert not executed.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda wheels: next(wheels.iterdir()).unlink(), "toyhelper"),
        (lambda wheels: toys.wheel(wheels, "toyhelper-1.0-py3-none-any.whl", {"toyhelper.py": "1"}), "Hash mismatch"),
        (lambda wheels: next(wheels.iterdir()).rename(wheels / "toyhelper-1.0.tar.gz"), "toyhelper"),
    ],
    ids=["a wheel is missing", "a wheel is another one", "an sdist stands for it"],
)
def test_uv_itself_takes_nothing_but_the_pinned_wheel(
    tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    wheels, given = tmp_path / "wheels", tmp_path / "requirements.txt"
    _, sha256 = toys.wheel(wheels, "toyhelper-1.0-py3-none-any.whl", {"toyhelper.py": ""})
    given.write_text(f"toyhelper==1.0 --hash=sha256:{sha256}\n")
    python = Path(sys.executable)
    dependencies.lay_out(given, wheels, tmp_path / "sound", python, tmp_path / "uv")
    assert (tmp_path / "sound/toyhelper.py").exists()
    change(wheels)
    with pytest.raises(dependencies.UvError, match=said):
        dependencies.lay_out(given, wheels, tmp_path / "site", python, tmp_path / "another")
    assert not (tmp_path / "site/toyhelper.py").exists()


def test_two_wheels_with_one_file_of_two_contents_are_refused(workbench: Workbench) -> None:
    folder, (wheel,) = _pinning(workbench, ["py3-none-any"], among=1)
    other, sha256 = toys.wheel(workbench.folder, "another-1.0-py3-none-any.whl", {"toyhelper.py": "OTHER = 1"})
    toys.pin(folder, "another", "1.0", sha256)
    for path in (wheel, other):
        toys.seed(workbench.cache, path, hashlib.sha256(path.read_bytes()).hexdigest())
    workbench.gives(1, "ERROR", reason="toyhelper.py stands in another-1.0-py3-none-any.whl with other content")
