"""What the verbs that run lanes share: the run folder, and how the scheduler's progress is shown."""

from __future__ import annotations

import datetime as dt
import sys
import tempfile
from pathlib import Path

from harness.commands.options import RUNS
from harness.core import urls
from harness.core.cache import Cache
from harness.core.progress import Progress
from harness.host.gpus import GpuPool
from harness.host.host import Host
from harness.schedule.journal import Journal
from harness.schedule.scheduler import Listener
from harness.schedule.session import Session


def run_folder(cache: Cache) -> Path:
    """Make a folder in the cache for the logs and receipts of one call; names sort by their time.

    A run often follows the one that `new` tries within a second, and `--from last` has to tell them apart.
    """
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    (cache.root / RUNS).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{stamp}-", dir=cache.root / RUNS))


def session(cache: Cache, here: Host, pool: GpuPool, progress: Progress, jobs: int | None) -> Session:
    """Return where the lanes of one call run: a run folder of its own, and a journal that ends with the call."""
    return Session(
        cache=cache,
        host=here,
        devices=pool.devices,
        folder=run_folder(cache),
        journal=Journal(),
        command=lambda _: command_line(),
        listener=listener(progress),
        jobs=jobs,
    )


def listener(progress: Progress) -> Listener:
    """Let the scheduler tell a progress display."""
    return Listener(
        began=lambda task, place: progress.start(task.key, f"{task.name} on {place}", task.seconds),
        ended=lambda task, line: progress.end(task.key, line),
        failed=lambda name, reason: progress.tell(f"{name}: {reason}"),
        fault=lambda fault: progress.tell(f"{fault.place} leaves the pool after {fault.task}: {fault.reason}"),
    )


def command_line() -> str:
    """Return the command line as a receipt shows it."""
    return urls.without_credentials(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))
