"""Pre-releases as columns beside the pinned release: of the upstream, of torch and of triton, each alone."""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.host.host import Host
from harness.pack import load
from harness.sweep import selection
from harness.sweep.columns import Moving, Prereleases
from harness.upstream.dependencies import DependencySet, Member
from harness.upstream.toolchain import Toolchain
from testing import days, histories, package_index, toys
from testing.package_index import Shelf
from testing.workbench import Workbench

NEWER = Host("3.11.7", "99.0.dev2+cpu", "3.6.0")
#: What the contract does besides: it imports a torch that is not the interpreter's, and says which one it is.
ASKS = """def test_ones(scale, figure):
    from importlib import metadata, util
    if "site-packages" not in util.find_spec("torch").origin:
        import torch
    figure("torch", int(metadata.version("torch").partition(".")[0]))
"""


NEEDS_TORCH = """
try:
    import torch
except ImportError as error:
    print(f"UNSUPPORTED: {error}")
    sys.exit(125)
"""


def _wheel(folder: Path, name: str, version: str, text: str = "", requires: str = "") -> tuple[str, bytes]:
    info, file = f"{name}-{version}.dist-info", f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    members = {f"{name}/__init__.py": f"{text}\n__version__ = {version!r}\n", f"{info}/METADATA": metadata}
    members |= {f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: toys\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    return file, toys.wheel(folder, file, {**members, f"{info}/RECORD": ""})[0].read_bytes()


@contextmanager
def _index(folder: Path, states: dict[str, str], *wheels: tuple[str, bytes]) -> Iterator[dict[str, str]]:
    """Serve releases of the toy upstream and wheels; yield the variables that make it pip's only index."""
    shelf = histories.shelf(folder / "index", states)
    for file, data in wheels:
        shelf.files.setdefault(file.partition("-")[0], {})[file] = data
    with _served(shelf) as variables:
        yield variables


@contextmanager
def _served(shelf: Shelf) -> Iterator[dict[str, str]]:
    with package_index.served(shelf) as url:
        own = {"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
        yield own | {"PIP_RETRIES": "0"}


@pytest.fixture
def bench(workbench: Workbench) -> Workbench:
    """Return a workbench with one sound pack, whose contract says which torch it imports."""
    toys.replace(workbench.lay("01_confirmed") / "contract.py", "def test_ones(scale):\n", ASKS)
    return workbench


def _sweep(bench: Workbench, *arguments: str, **variables: str) -> tuple[int, dict[str, Any], str]:
    runs = bench.folder / "sweeps"
    ended = bench.run("sweep", "--runs", str(runs), "--pre", *arguments, **variables)
    assert "Traceback" not in ended.stderr, ended.stderr
    newest = max(runs.glob("*/results.json"))
    return ended.returncode, {one["name"]: one for one in json.loads(newest.read_text())["cells"]}, ended.stdout


def _receipt(bench: Workbench, cell: dict[str, Any]) -> dict[str, Any]:
    path = max((bench.folder / "sweeps").glob("*/results.json")).parent / cell["receipt"]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_each_column_differs_from_the_pinned_one_in_one_thing_and_its_receipt_says_in_what(bench: Workbench) -> None:
    begun = days.today()
    wheels = [
        _wheel(bench.folder, "torch", "99.0rc1", requires="Requires-Dist: toyhelper>=1\n"),
        _wheel(bench.folder, "torch", "98.0"),
        _wheel(bench.folder, "toyhelper", "1.0"),
        _wheel(bench.folder, "toyhelper", "2.0rc1"),
    ]
    with _index(bench.folder, {"1.0": "wrong", "1.1rc1": "wrong"}, *wheels) as variables:
        status, cells, said = _sweep(bench, "--online", **variables)
    assert status == 0, said
    pinned, pre, under = (cells[f"01_confirmed/cpu{column}"] for column in ("", "@pre", "@pre-torch"))
    assert len(cells) == 3  # the pack does not ask for triton
    assert {one["verdict"] for one in cells.values()} == {"CONFIRMED"}
    assert [one["version"] for one in (pinned, pre, under)] == ["1.0", "1.1rc1", "1.0 with torch 99.0rc1"]
    assert pinned["as_of"] == ""
    assert {pre["as_of"], under["as_of"]} <= days.since(begun)
    hosts = [_receipt(bench, one)["host"]["torch"] for one in (pinned, pre, under)]
    assert hosts == [hosts[0], hosts[0], "99.0rc1"]
    assert hosts[0] != "99.0rc1"
    figures = {row["name"]: row["pristine"] for row in under["figures"]}
    assert figures["torch"] == 99  # what the lane had
    packages = _receipt(bench, under)["dependencies"]["packages"]
    assert packages == {"torch": "99.0rc1", "toyhelper": "1.0"}  # what it requires is final
    assert _receipt(bench, under)["command"] == "runner.py sweep --only 01_confirmed:cpu --pre"


def test_where_no_index_has_one_the_cell_says_why_and_fails_nothing(bench: Workbench) -> None:
    definition = bench.packs / "01_confirmed/pack.toml"
    definition.write_text(definition.read_text().replace('torch = ">=2"', 'torch = ">=2"\ntriton = ">=2"'))
    with _index(bench.folder, {"1.0": "wrong", "0.9rc1": "wrong"}, _wheel(bench.folder, "torch", "3.0")) as variables:
        status, cells, said = _sweep(bench, "--online", **variables)
    assert status == 0, said
    reasons = {name.partition("@")[2]: one["reason"] for name, one in cells.items() if one["verdict"] == "UNAVAILABLE"}
    assert reasons["pre"] == "toykernel: the newest on the package index is 1.0; no pre-release comes after it"
    assert reasons["pre-torch"] == "torch: the newest on the package index is 3.0; no pre-release comes after it"
    assert "satisfies the requirement triton (from versions: none)" in reasons["pre-triton"]


def test_a_release_candidate_that_breaks_the_pack_or_has_the_fix_is_told(bench: Workbench) -> None:
    broken = _wheel(bench.folder, "torch", "99.0rc1", "raise ImportError('another ABI')")
    toys.replace(bench.packs / "01_confirmed/reproduce.py", "import sys\n", f"import sys\n{NEEDS_TORCH}")
    skips = '\npytest.importorskip("torch", exc_type=ImportError)\n'
    stated = 'EVIDENCE_WITHOUT_GPU = "traced"\n'
    toys.replace(bench.packs / "01_confirmed/contract.py", stated, stated + skips)
    with _index(bench.folder, {"1.0": "wrong", "2.0rc1": "right"}, broken) as variables:
        status, cells, said = _sweep(bench, "--online", **variables)
    assert (status, cells["01_confirmed/cpu"]["verdict"]) == (1, "CONFIRMED")
    assert cells["01_confirmed/cpu@pre"]["verdict"] == "FIXED_UPSTREAM"
    assert cells["01_confirmed/cpu@pre-torch"]["verdict"] == "UNSUPPORTED"
    assert "01_confirmed/cpu@pre-torch: NEWLY UNSUPPORTED: toykernel 1.0 with torch 99.0rc1" in said


def test_what_cannot_be_downloaded_or_lies_outside_the_packs_range_is_not_judged_and_fails_nothing(
    bench: Workbench,
) -> None:
    definition = bench.packs / "01_confirmed/pack.toml"
    definition.write_text(definition.read_text().replace('torch = ">=2"', 'torch = ">=2,<50"'))
    shelf = histories.shelf(bench.folder / "index", {"1.0": "wrong", "1.1rc1": "wrong"})
    shelf.stated["toykernel-1.1rc1.zip"] = "0" * 64
    shelf.files["torch"] = dict([_wheel(bench.folder, "torch", "99.0rc1")])
    with _served(shelf) as variables:
        status, cells, said = _sweep(bench, "--online", **variables)
    pre, under = cells["01_confirmed/cpu@pre"], cells["01_confirmed/cpu@pre-torch"]
    assert (status, pre["verdict"], under["verdict"]) == (0, "UNAVAILABLE", "NOT_HERE"), said
    assert "wrong sha256" in pre["reason"]
    assert under["reason"] == "torch 99.0rc1 is outside the pack's range >=2,<50"


def test_a_cache_that_fetch_filled_serves_a_node_without_network_and_dates_what_there_is_not(bench: Workbench) -> None:
    with _index(bench.folder, {"1.0": "wrong"}, _wheel(bench.folder, "torch", "99.0rc1")) as variables:
        filled = bench.run("fetch", "--dest", str(bench.folder / "filled"), "--pre", **variables)
    assert filled.returncode == 0, filled.stderr
    assert "not fetched: toykernel: the newest on the package index is 1.0" in filled.stderr
    for looked_up in (bench.folder / "filled/newest").iterdir():
        days.replace(looked_up, "2026-01-02")
    status, cells, said = _sweep(bench, "--cache", str(bench.folder / "filled"))
    under, pre = cells["01_confirmed/cpu@pre-torch"], cells["01_confirmed/cpu@pre"]
    assert (status, under["verdict"], under["as_of"]) == (0, "CONFIRMED", "2026-01-02"), said
    assert pre["verdict"] == "UNAVAILABLE"
    assert pre["reason"].endswith("no pre-release comes after it, as of 2026-01-02")


def test_a_cache_without_a_look_up_says_how_to_have_one(bench: Workbench) -> None:
    status, cells, _ = _sweep(bench)
    assert (status, cells["01_confirmed/cpu"]["verdict"]) == (0, "CONFIRMED")
    for column in ("pre", "pre-torch"):
        assert "Next: runner.py fetch --latest --head --pre" in cells[f"01_confirmed/cpu@{column}"]["reason"]


@pytest.mark.parametrize(("pinned", "said"), [("1.0", "requires numpy>=2, and the pack pins 1.0"), ("2.1", "")])
def test_a_pinned_wheel_that_is_not_what_the_pre_release_requires_is_named(pinned: str, said: str) -> None:
    found = Toolchain("torch", "99.0rc1", (), ('numpy>=2; python_version >= "3.9"', "sympy"), dt.date(2026, 1, 2))
    of_pack = DependencySet("default", (Member("NumPy", pinned, ("0" * 64,)),))
    assert found.unmet(of_pack) == (f"torch 99.0rc1 {said}" if said else "")


def test_a_pre_release_that_is_no_newer_than_the_interpreters_own_is_not_tried(bench: Workbench) -> None:
    pack = load.load_pack(bench.packs / "01_confirmed")
    (cell,) = selection.cells([(pack, "cpu")], NEWER, None, Moving())  # type: ignore[arg-type]
    member = Member("torch", "99.0.dev1", ("0" * 64,))
    found = Toolchain("torch", member.version, (member,), (), dt.date(2026, 1, 2))
    (_, under) = Prereleases({("toykernel", False): "none"}, {"torch": found}).cells(cell, NEWER)
    assert under.evidence is None
    assert under.reason == "the interpreter's own torch 99.0.dev2+cpu is no older than 99.0.dev1"
