"""Pruning removes what nobody used for a while, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

from harness.commands.prune import DAY, prune
from harness.core import cache
from harness.core.cache import Cache
from testing.workbench import Workbench


def _age(entry: Path, days: float) -> None:
    moment = time.time() - days * DAY
    os.utime(entry, (moment, moment))


def test_what_was_not_used_is_removed_and_what_was_used_stays(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    for name in ("old", "used", "new"):
        entry = store.entry("trees", name)
        entry.mkdir(parents=True)
        (entry / "file").write_bytes(b"x" * 1000)
        if name != "new":
            _age(entry, 40)
    store.populate("trees", "used", lambda _: None)
    assert prune(store, "trees", 30) == (1, 1000)
    assert sorted(path.name for path in (tmp_path / "trees").iterdir()) == ["new", "used"]


def test_a_file_that_another_entry_shares_frees_nothing(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    for kind in ("unpacked", "dependencies"):
        store.entry(kind, "one").mkdir(parents=True)
    (store.entry("unpacked", "one") / "file").write_bytes(b"x" * 1000)
    (store.entry("dependencies", "one") / "file").hardlink_to(store.entry("unpacked", "one") / "file")
    _age(store.entry("dependencies", "one"), 40)
    assert prune(store, "dependencies", 30) == (1, 0)
    assert (store.entry("unpacked", "one") / "file").exists()


def test_an_entry_is_used_again_after_it_was_pruned(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    assert workbench.run("run").returncode == 0
    for entry in workbench.cache.glob("*/*"):
        _age(entry, 40)
    ended = workbench.run("prune", "--cache", str(workbench.cache))
    assert ended.returncode == 0, ended.stderr
    assert " of runs/, " in ended.stdout
    assert not list(workbench.cache.glob("trees/*"))
    archive = next(workbench.folder.glob("*.zip"))
    from testing import toys  # noqa: PLC0415 - the download was pruned as well

    toys.seed(workbench.cache, archive, workbench.sha256)
    assert workbench.run("run").returncode == 0


def test_a_cache_that_cannot_be_written_is_used_all_the_same(tmp_path: Path) -> None:
    cache.mark_used(tmp_path / "missing")
