"""The folder of a `mutate` command in the cache: its journal, logs and patches. It outlasts a killed command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.core import files
from harness.core.cache import Cache, mark_used
from harness.core.errors import HarnessError

KIND = "mutate"


@dataclass(frozen=True)
class State:
    """One command's folder."""

    path: Path

    @property
    def journal(self) -> Path:
        """The ends of lanes. The same command skips the lanes in it."""
        return self.path / "journal.jsonl"

    @property
    def patches(self) -> Path:
        """The folder of the patches that were judged."""
        return self.path / "patches"

    def settle(self) -> None:
        """Make the same command begin anew."""
        self.journal.replace(self.path / "settled.jsonl")


@contextmanager
def open_state(cache: Cache, *words: object) -> Iterator[State]:
    """Yield the folder of a command, locked. HarnessError is raised where the same command runs already.

    Its journal may be old: lanes of other checks, patches or toolchains have other keys.
    """
    key = files.key_of(*words)
    path = cache.entry(KIND, key)
    path.mkdir(parents=True, exist_ok=True)
    mark_used(path)
    with ExitStack() as stack:
        try:
            stack.enter_context(cache.lock(f"judging-{key}", timeout=0))
        except TimeoutError:
            raise HarnessError("the same mutants are being judged by another runner. Next: wait for it") from None
        yield State(path)
