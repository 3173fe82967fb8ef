"""The folder of one `mutate` command in the cache: its journal, logs and patches, found again after a kill."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.core import files
from harness.core.cache import Cache, used
from harness.core.errors import HarnessError

KIND = "mutate"
FINISHED, JOURNAL, PATCHES = "finished", "journal.jsonl", "patches"


@dataclass(frozen=True)
class State:
    """One command's folder."""

    path: Path
    resumed: bool  # an earlier command of the same words was killed before it ended, or ended with survivors

    @property
    def journal(self) -> Path:
        """The file of the ends of lanes."""
        return self.path / JOURNAL

    def finish(self, *, is_settled: bool) -> None:
        """Let the same command begin anew if it is settled; else it goes on from what has been judged."""
        if is_settled:
            files.write_atomic(self.path / FINISHED, "")


@contextmanager
def opened(cache: Cache, *words: object) -> Iterator[State]:
    """Yield the folder of a command, for nobody else meanwhile; what an earlier one that ended left there is removed.

    What its journal holds is believed by key: lanes of another probe, patch or toolchain have other keys.
    HarnessError is raised where the same command runs already.
    """
    key = files.key_of(*words)
    path = cache.entry(KIND, key)
    path.mkdir(parents=True, exist_ok=True)
    used(path)
    with ExitStack() as held:
        try:
            held.enter_context(cache.lock(f"judging-{key}", timeout=0))
        except TimeoutError:
            raise HarnessError("the same mutants are being judged by another runner. Next: wait for it") from None
        if (path / FINISHED).exists():
            for name in ("logs", PATCHES):
                shutil.rmtree(path / name, ignore_errors=True)
            (path / JOURNAL).unlink(missing_ok=True)
            (path / FINISHED).unlink()
        yield State(path, resumed=(path / JOURNAL).exists())
