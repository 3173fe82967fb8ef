"""What lies in the cache's ``work``: removed where its owner was killed at any moment, kept where it lives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.core.cache import Cache

OWNER = """
import sys
from pathlib import Path
from harness.core.cache import Cache

for number in range(400):
    with Cache(Path(sys.argv[1])).scratch("toy-") as folder:
        (folder / "file").write_text(str(number))
        assert (folder / "file").read_text() == str(number)
"""


def test_what_a_killed_runner_left_is_removed_and_what_lives_is_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for name in ("before_its_lock", "while_removed/content"):
        (tmp_path / "work" / name).mkdir(parents=True)
    with cache.scratch("mine-") as mine:
        cache.sweep()
        assert [path.name for path in (tmp_path / "work").iterdir()] == [mine.parent.name]
        assert mine.is_dir()
    assert not list((tmp_path / "work").iterdir())


def test_runners_side_by_side_remove_nothing_of_each_other(tmp_path: Path) -> None:
    owners = [subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)]) for _ in range(6)]
    assert [owner.wait(timeout=60) for owner in owners] == [0] * 6
    assert not list((tmp_path / "work").iterdir())
