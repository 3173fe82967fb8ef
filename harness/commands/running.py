"""The run folder and the session of a verb that runs lanes."""

import datetime as dt
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.commands.options import RUNS, Shared
from harness.core import Cache, errors
from harness.core.progress import Progress
from harness.host import host
from harness.host.nvml import gpu_pool
from harness.schedule.session import Journal, Session


def run_folder(cache: Cache) -> Path:
    """Make a folder in the cache for the logs and receipts of one call; the names sort by time.

    `new` and a `run` after it may begin within one second, and `--from last` has to order them.
    """
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    (cache.root / RUNS).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{stamp}-", dir=cache.root / RUNS))


@contextmanager
def session(shared: Shared, *, has_folder: bool = True) -> Iterator[Session]:
    """Yield the session of one call, with a journal of its own."""
    with Progress(sys.stderr) as progress, gpu_pool() as pool:
        cache = shared.cache(progress.tell)
        with cache.guard():
            yield Session(
                cache=cache,
                host=host.detect(pool),
                devices=pool.devices,
                folder=run_folder(cache) if has_folder else cache.root,
                journal=Journal(),
                command=lambda _: command_line(),
                progress=progress,
                jobs=shared.jobs,
                lost=tuple(pool.lost),
            )


def command_line() -> str:
    """Return the command line for a receipt: without the folder of the program, and without credentials."""
    return errors.mask_credentials(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))
