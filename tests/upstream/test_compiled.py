"""A compiled upstream: a wheel for one platform, laid out in one folder with the wheels of its dependency set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testing import toys
from testing.package_index import Shelf, served, settings
from testing.workbench import Workbench

NAME = "46_compiled_upstream"


@pytest.fixture
def pack(workbench: Workbench) -> Path:
    """Lay the toy pack whose upstream is a wheel for this platform, and fill the cache with its wheels."""
    archive, sha256 = toys.compiled_wheel(workbench.folder / "wheels", "1.0")
    library = {"toyhelper/library.txt": "a library\n"}
    helper, helper_sha256 = toys.wheel(archive.parent, "toyhelper-1.0-py3-none-any.whl", library)
    toys.seed(workbench.cache, archive, sha256)
    toys.seed(workbench.cache, helper, helper_sha256)
    folder = toys.lay(workbench.packs, NAME, sha256)
    toys.replace(folder / "pack.toml", "@WHEEL@", archive.name)
    toys.pin(folder, "toyhelper", "1.0", helper_sha256)
    return folder


def test_it_finds_what_lies_beside_it(workbench: Workbench, pack: Path) -> None:
    workbench.recorded(NAME)
    found = json.loads((pack / "receipts/cpu.traced.json").read_text())
    assert found["verdict"] == "REPRODUCED"
    loaded = [line["file"] for line in found["lanes"]["pristine"]["upstream"]]
    assert loaded == ["$TREE/toykernel/__init__.py"]
    assert found["dependencies"]["packages"] == {"toyhelper": "1.0"}, "the upstream is no dependency of itself"
    assert workbench.run("check").stdout == "1 pack(s) read, 1 sound\n"


@pytest.mark.usefixtures("pack")
def test_a_file_that_was_changed_in_the_cache_is_an_error(workbench: Workbench) -> None:
    assert workbench.rows()[0] == 0
    (changed,) = (workbench.cache / "dependencies").glob("*/site/toykernel/scale.py")
    changed.chmod(0o644)
    text = changed.read_text()
    changed.unlink()
    changed.write_text(text + "# edited\n")
    workbench.gives(1, "ERROR", reason="scale.py was edited")
    assert workbench.rows()[0] == 0, "it has been laid out anew"


@pytest.mark.usefixtures("pack")
def test_other_releases_are_judged_by_their_wheels(workbench: Workbench) -> None:
    folder = workbench.folder / "index"
    wheels = [toys.compiled_wheel(folder, "1.0")[0], toys.compiled_wheel(folder, "2.0", right=True)[0]]
    files = {path.name: path.read_bytes() for path in wheels}
    files["toykernel-2.0.zip"] = b"an sdist that needs a compiler"
    with served(Shelf({"toykernel": files})) as url:
        ended = workbench.run("versions", NAME, "--online", "--json", **settings(url))
        workbench.gives(0, "FIXED_UPSTREAM", "--online", "--upstream", "latest", **settings(url))
    rows = {one["label"]: one["verdict"] for one in json.loads(ended.stdout)["rows"]}
    assert rows == {"1.0": "BUG_REPRODUCED", "2.0": "FIX_VALIDATED"}, ended.stderr


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('fix = "none"', 'fix = "patch"', "fix, head: a compiled wheel is judged as it is"),
        ("license = ", 'commit = "abc"\nlicense = ', "upstream.commit: 'abc' is not 40 lower-case hexadecimal digits"),
        (
            "[requires]",
            f'[head]\ncommit = "{"1" * 40}"\ndate = 2026-11-21\nverdict = "REPRODUCED"\n\n[requires]',
            "fix, head: a compiled wheel is judged as it is",
        ),
    ],
)
def test_what_no_wheel_can_give_is_refused(pack: Path, old: str, new: str, reason: str) -> None:
    toys.replace(pack / "pack.toml", old, new)
    assert reason in toys.refusal(pack)
