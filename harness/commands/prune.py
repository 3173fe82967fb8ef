"""``runner.py prune``: keep the cache from growing for ever."""

import time

import click

from harness.commands import options
from harness.commands.options import Shared
from harness.core import Cache, Exit, files, terminal

#: The folders of the cache whose entries are pruned.
KINDS = ("runs", "mutate", "jit", "trees", "dependencies", "environments", "git", "downloads")
DAY = 24 * 3600.0
#: Entries that were not used for so many days are removed.
DAYS = 30


def prune(cache: Cache, kind: str, days: int) -> tuple[int, int]:
    """Remove the entries of a kind that were not used for `days` days; return their number and size in bytes."""
    oldest = time.time() - days * DAY
    entries = [path for path in sorted((cache.root / kind).glob("*")) if path.lstat().st_mtime < oldest]
    size = 0
    for entry in entries:
        with cache.lock(f"{kind}-{entry.name}"):  # a file with another hard link frees no room
            size += sum(status.st_size for _, status in files.walk(entry) if status and status.st_nlink == 1)
            files.remove_tree(entry)
    return len(entries), size


@click.command("prune")
@options.takes("cache_root")
def command(shared: Shared) -> int:
    """Remove from the cache what nobody uses.

    Run folders, JIT results, trees, dependency sets, clones, downloads: each can be fetched or made again. What a lane
    used within the last 30 days stays. The run folders of `sweep` lie elsewhere and are not touched.
    """
    cache, total = shared.cache(), 0
    with cache.guard():
        cache.sweep()
        for kind in KINDS:
            entries, size = prune(cache, kind, DAYS)
            total += size
            if entries:
                terminal.echo(f"{entries:5} of {kind}/, {size / 2**20:.0f} MiB")
    terminal.echo(f"{total / 2**20:.0f} MiB removed from {cache.root}")
    return Exit.AS_EXPECTED
