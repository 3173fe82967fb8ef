"""Getting trees: from a real package index on loopback, from archives that lie, from checkouts and commits."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from testing import histories, mirrors, toys
from testing.package_index import Shelf, served, settings
from testing.workbench import Workbench

NAME = "toykernel-1.0.zip"


def _shelf(workbench: Workbench) -> Shelf:
    archive, _ = toys.sdist(workbench.folder)
    return Shelf({"toykernel": {NAME: archive.read_bytes()}})


def _empty(workbench: Workbench) -> Workbench:
    shutil.rmtree(workbench.cache)
    return workbench


def test_a_pack_is_fetched_from_the_users_ownsettings(workbench: Workbench) -> None:
    _empty(workbench).lay("01_confirmed")
    with served(_shelf(workbench)) as url:
        workbench.gives(0, "CONFIRMED", "--online", **settings(url))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda shelf: shelf.files.clear(), "toykernel: no such package on the package index"),
        (lambda shelf: shelf.stated.update({NAME: "0" * 64}), "the index has no such file with the sha256"),
        (lambda shelf: shelf.files["toykernel"].update({NAME: b"other"}), "the index has no such file with the sha256"),
        (lambda shelf: shelf.cut.add(NAME), "cannot be read (ChunkedEncodingError)"),
        (
            lambda shelf: (
                shelf.files["toykernel"].update({"toykernel-2.0.zip": shelf.files["toykernel"].pop(NAME)})
                or shelf.stated.update({"toykernel-2.0.zip": "1" * 64})
            ),
            "toykernel-1.0.zip: the index has no such file",
        ),
    ],
)
def test_what_the_index_lacks_or_spoils_is_named(
    workbench: Workbench, spoil: Callable[[Shelf], object], reason: str
) -> None:
    _empty(workbench).lay("01_confirmed")
    shelf = _shelf(workbench)
    spoil(shelf)
    with served(shelf) as url:
        row = workbench.gives(1, "ERROR", "--online", reason=reason, **settings(url))
    assert "127.0.0.1" not in row["reason"]
    assert not [*workbench.cache.glob("trees/*"), *workbench.cache.glob("downloads/*"), *workbench.cache.glob("work/*")]


def test_no_network_is_one_line(workbench: Workbench) -> None:
    _empty(workbench).lay("01_confirmed")
    index = settings("http://127.0.0.1:9/simple/")
    workbench.gives(1, "ERROR", "--online", reason="the package index cannot be read (ConnectionError)", **index)


def test_offline_names_what_the_cache_lacks(workbench: Workbench) -> None:
    _empty(workbench).lay("01_confirmed")
    row = workbench.gives(1, "ERROR", reason="toykernel-1.0.zip: not in the cache")
    assert "runner.py fetch --cache DIR" in row["reason"]


def test_a_version_that_does_not_exist_names_those_that_do(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    with served(_shelf(workbench)) as url:
        index, said = settings(url), "no release 9.9 on the package index. It has 1.0"
        workbench.gives(1, "ERROR", "--online", "--upstream", "toykernel==9.9", reason=said, **index)


def test_latest_is_the_newest_release_and_what_it_gives_is_no_deviation(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    shelf = histories.shelf(workbench.folder / "index", {"1.0": "wrong", "1.1": "right"})
    shelf.files["toykernel"]["toykernel-1.2-no-tags.whl"] = b"no wheel at all"
    with served(shelf) as url:
        row = workbench.gives(0, "FIXED_UPSTREAM", "--online", "--upstream", "latest", **settings(url))
    assert (row["patched"], "runs" in row["receipt"]) == ("", True)


def test_fetch_fills_a_cache_that_runs_offline(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    destination = workbench.folder / "elsewhere"
    with served(_shelf(workbench)) as url:
        filled = workbench.run("fetch", "1", "--cache", str(destination), "--python", "3.12", **settings(url))
    assert filled.returncode == 0, filled.stderr
    workbench.gives(0, "CONFIRMED", "--cache", str(destination))


def test_a_checkout_is_judged_as_it_is_in_its_work_tree(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    folder = workbench.folder / "checkout"
    mirrors.repository(folder, {})
    workbench.gives(0, "CONFIRMED", "--upstream", f"path:{folder}")
    histories.git(folder, "apply", str(pack / "fix.patch"))
    (folder / "untracked.py").write_text("raise RuntimeError\n")
    row = workbench.gives(0, "FIXED_UPSTREAM", "--upstream", f"path:{folder}")
    assert "with modified files" in Path(row["receipt"]).read_text()
    assert not list(pack.glob("receipts/*"))


@pytest.mark.parametrize("digits", [40, 9])
def test_a_commit_is_judged_through_gits_own_configuration(workbench: Workbench, digits: int) -> None:
    workbench.lay("01_confirmed")
    folder = workbench.folder / "checkout"
    upstream = f"git+{mirrors.URL}@{mirrors.repository(folder, {})[:digits]}"
    redirect = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{folder}.insteadOf",
        "GIT_CONFIG_VALUE_0": mirrors.URL,
    }
    workbench.gives(0, "CONFIRMED", "--online", "--upstream", upstream, **redirect)
    workbench.gives(0, "CONFIRMED", "--upstream", upstream)  # the second time it needs no network


def test_what_is_installed_is_judged_and_not_touched(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    site = workbench.folder / "site"
    shutil.copytree(toys.RESOURCES / "upstream/toykernel-1.0/src", site)
    record = site / "toykernel-1.5.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: toykernel\nVersion: 1.5\n")
    (record / "RECORD").write_text("toykernel/__init__.py,,\ntoykernel/scale.py,,\ntoykernel/other.py,,\n")
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    row = workbench.gives(0, "CONFIRMED", "--upstream", "installed", PYTHONPATH=str(site))
    assert '"version": "1.5, installed"' in Path(row["receipt"]).read_text()
    assert before == {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}


def test_a_full_disk_is_one_line_and_leaves_nothing(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    small = workbench.folder / "small"
    small.mkdir()
    archive, sha256 = toys.sdist(workbench.folder)
    inside = f"mount -t tmpfs -o size=64k none {small} && mkdir -p {small}/downloads/{sha256} && "
    inside += f'cp {archive} {small}/downloads/{sha256}/ && head -c 45000 /dev/zero > {small}/ballast; exec "$@"'
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("no mount namespaces here")
    command = ["unshare", "-rm", "sh", "-c", inside, "sh", *workbench.command("run", "--cache", str(small))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "no room in the cache" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
