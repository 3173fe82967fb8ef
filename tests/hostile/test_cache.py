"""A cache that somebody changed: an ERROR that names the file, never a verdict, and the entry is laid out anew."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core import files, seal
from harness.core.cache import Cache
from harness.pack import judges, load
from testing import toys
from testing.workbench import Workbench

pytestmark = pytest.mark.hostile("caches that somebody changed")
LINE = "from toykernel import scale\n"
SITE = "dependencies/*/site/beside"


def _edit(path: Path) -> None:
    """Change the last byte of a file, and give it back the time that it had."""
    stat, data = path.stat(), path.read_bytes()
    with path.open("r+b") as stream:
        stream.write(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _one(workbench: Workbench, pattern: str) -> Path:
    """Return the only file of the cache of that pattern."""
    (found,) = workbench.cache.glob(pattern)
    return found


def _scale(workbench: Workbench, *, patched: bool = False) -> Path:
    """Return the file under test in one of the two trees."""
    every = workbench.cache.glob("trees/*/content/src/toykernel/scale.py")
    (found,) = (path for path in every if ("zip(" in path.read_text()) == patched)
    return found


@pytest.fixture
def pack(workbench: Workbench) -> Path:
    """Lay the sound pack with a dependency set of one wheel, which its script imports."""
    folder = workbench.lay("01_confirmed")
    wheel, sha256 = toys.wheel(workbench.folder, "beside-1.0-py3-none-any.whl", {"beside/__init__.py": "VALUE = 1\n"})
    toys.seed(workbench.cache, wheel, sha256)
    toys.pin(folder, "beside", "1.0", sha256)
    toys.replace(folder / "reproduce.py", LINE, f"{LINE}import beside\n")
    return folder


@pytest.fixture
def layout(tmp_path: Path) -> seal.Layout:
    """Return an entry of one file."""

    def build(entry: Path) -> None:
        (entry / "content").mkdir(parents=True)
        (entry / "content/kernel.py").write_text("x = 1\n")

    return seal.Layout(Cache(tmp_path / "cache"), "trees", "key", build, "the tree")


def _with_its_seal(layout: seal.Layout) -> None:
    """Edit a file and the seal that speaks of it, as somebody would who knows the form but not the key."""
    _edit(layout.folder / "kernel.py")
    (path,) = layout.cache.root.glob("seals/*/trees-*.json")
    code = path.read_text().partition("\n")[0]
    entries, stats = seal.hashes(layout.folder, ["kernel.py"]), seal.stats(layout.folder)
    path.write_text(f"{code}\n{json.dumps({'entries': entries, 'stats': stats})}")


def _without_its_seal(layout: seal.Layout) -> None:
    _edit(layout.folder / "kernel.py")
    shutil.rmtree(layout.cache.root / "seals")


CHANGES: dict[str, tuple[Callable[[seal.Layout], object], str]] = {
    "a file is edited": (lambda entry: _edit(entry.folder / "kernel.py"), "kernel.py was edited"),
    "a file is deleted": (lambda entry: (entry.folder / "kernel.py").unlink(), "kernel.py was deleted"),
    "a file is added": (lambda entry: (entry.folder / "new.py").write_text("x = 1\n"), "new.py was added"),
    "a link is added": (lambda entry: (entry.folder / "new.py").symlink_to("/dev/null"), "new.py was added"),
    "a file and its seal are edited": (_with_its_seal, "kernel.py was edited"),
    "a file is edited and its seal deleted": (_without_its_seal, "kernel.py was edited"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_entry_that_was_changed_is_named_and_laid_out_anew(layout: seal.Layout, what: str) -> None:
    change, said = CHANGES[what]
    layout.lay_out()
    change(layout)
    with pytest.raises(seal.ChangedError, match=rf"the tree in the cache .*{said}. It has been laid out anew"):
        layout.lay_out()
    assert [(path.name, path.read_text()) for path in layout.folder.iterdir()] == [("kernel.py", "x = 1\n")]
    layout.lay_out()


def test_a_file_that_is_written_again_while_a_lane_runs_is_a_change(layout: seal.Layout) -> None:
    before, file = layout.lay_out(), layout.folder / "kernel.py"
    file.write_text(file.read_text())
    with pytest.raises(seal.ChangedError, match=r"kernel.py was written anew"):
        layout.check(before, while_it_ran=True)


def test_an_entry_is_laid_out_anew_where_what_it_is_made_from_has_changed_too(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(entry: Path) -> None:
        (entry / "content").mkdir(parents=True)
        built.append(entry)
        if len(built) == 2:  # the release that a patched tree is copied from was changed, and is laid out anew now
            raise seal.ChangedError("the release changed")
        (entry / "content/kernel.py").write_text("x = 1\n")

    layout = seal.Layout(Cache(tmp_path / "cache"), "trees", "key", build, "the patched tree")
    before = layout.lay_out()
    (layout.folder / "new.py").write_text("x = 1\n")
    with pytest.raises(seal.ChangedError, match=r"the patched tree .* new.py was added"):
        layout.check(before, while_it_ran=True)
    assert [path.name for path in layout.folder.iterdir()] == ["kernel.py"]


@pytest.mark.usefixtures("pack")
def test_whatever_a_lane_imports_is_checked_before_it(workbench: Workbench) -> None:
    workbench.gives(0, "CONFIRMED")
    for changed, said in (
        (_one(workbench, f"{SITE}/__init__.py"), "__init__.py was edited"),
        (_one(workbench, f"{SITE}/__pycache__/*.pyc"), ".pyc was edited"),
        (_scale(workbench), "toykernel/scale.py was edited"),
        (_scale(workbench, patched=True), "toykernel/scale.py was edited"),
    ):
        _edit(changed)
        assert "laid out anew" in workbench.gives(1, "ERROR", reason=said)["reason"]
    workbench.gives(0, "CONFIRMED")


@pytest.mark.parametrize(
    "writes",
    [
        'import pathlib; pathlib.Path(scale.__file__).with_name("new.py").write_text("x = 1")',
        'import beside, pathlib; pathlib.Path(beside.__file__).write_text("VALUE = 1\\n")',
    ],
    ids=["its tree", "its dependencies"],
)
def test_a_lane_that_writes_into_what_it_imports_is_an_error(workbench: Workbench, pack: Path, writes: str) -> None:
    script = pack / "reproduce.py"
    text = script.read_text()
    toys.replace(script, LINE, f"{LINE}{writes}\n")
    workbench.gives(1, "ERROR", reason="while it ran")
    script.write_text(text)
    workbench.gives(0, "CONFIRMED")


def test_a_patched_lane_that_writes_into_its_tree_changes_no_other(workbench: Workbench) -> None:
    script = workbench.lay("01_confirmed") / "reproduce.py"
    workbench.gives(0, "CONFIRMED")
    pristine = _scale(workbench).parents[2]
    before = seal.hashes(pristine, seal.stats(pristine))
    writes = 'import pathlib; file = pathlib.Path(scale.__file__); other = file.with_name("other.py")\n'
    toys.replace(script, LINE, f'{LINE}{writes}if "zip(" in file.read_text(): other.write_text("x = 1")\n')
    workbench.gives(1, "ERROR", reason="other.py was edited")
    assert seal.hashes(pristine, seal.stats(pristine)) == before


def test_a_flipped_bit_of_a_download_is_seen_before_it_is_unpacked(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    archive = _one(workbench, f"downloads/{workbench.sha256}/*")
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    workbench.gives(1, "ERROR", reason="no longer has its sha256")


@pytest.mark.usefixtures("pack")
def test_a_cache_from_elsewhere_is_built_again_and_compared(workbench: Workbench, tmp_path: Path) -> None:
    workbench.gives(0, "CONFIRMED")
    workbench.gives(0, "CONFIRMED", XDG_STATE_HOME=str(tmp_path / "state of another user"))
    _edit(_scale(workbench))
    workbench.gives(1, "ERROR", XDG_STATE_HOME=str(tmp_path / "a third user"))


def test_jit_results_that_somebody_touched_are_not_used(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    jit = 'import os, pathlib\nkept = pathlib.Path(os.environ["TRITON_CACHE_DIR"], "x")\n'
    jit += "kept.parent.mkdir(exist_ok=True)\n"
    jit += 'print("FOUND", kept.read_text() if kept.exists() else None)\nkept.write_text("made")\n'
    toys.replace(pack / "reproduce.py", LINE, LINE + jit)

    def found() -> list[str]:
        logs = [Path(log).read_text() for log in workbench.rows()[1][0]["logs"]]
        return [line for log in logs for line in log.splitlines() if line.startswith("FOUND")]

    assert found() == ["FOUND None", "FOUND None"]
    assert found() == ["FOUND made", "FOUND made"]
    for path in workbench.cache.glob("jit/*/triton/x"):
        path.write_text("poisoned")
    assert found() == ["FOUND None", "FOUND None"]


def test_what_runs_is_what_the_receipt_states(workbench: Workbench) -> None:
    """The first lane edits the script and the patch: the second one runs what the command began with."""
    pack = workbench.lay("01_confirmed")
    script, patch = pack / "reproduce.py", pack / "fix.patch"
    edits = f"for name in {[str(script), str(patch)]}:\n    open(name, 'w').write('raise SystemExit(0)')\n"
    toys.replace(script, LINE, LINE + edits)
    ran = [judges.sha256(load.load_pack(pack)), files.sha256_file(patch)]
    workbench.gives(0, "CONFIRMED", "--jobs", "1")
    assert [path.read_text() for path in (script, patch)] == ["raise SystemExit(0)"] * 2
    text = next(workbench.receipts.rglob("*.json")).read_text()
    document = json.loads(text)
    assert [document["probe"]["sha256"], document["fix"]["sha256"]] == ran
    assert "inputs-" not in text


def test_a_lane_cannot_tell_which_one_it_is_by_its_paths(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    shown = 'print("PATHS", scale.__file__, __file__, sys.path)\n'
    toys.replace(pack / "reproduce.py", LINE, LINE + shown)
    status, (row,) = workbench.rows()
    assert status == 0
    for log in row["logs"]:
        assert "patched" not in next(line for line in Path(log).read_text().splitlines() if line.startswith("PATHS"))
