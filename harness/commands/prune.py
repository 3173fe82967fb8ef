"""``runner.py prune``: keep the cache from growing for ever."""

from __future__ import annotations

import math

import click

from harness.commands import options
from harness.commands.options import Shared
from harness.core import prune, terminal
from harness.core.errors import HarnessError
from harness.core.words import Exit


@click.command("prune")
@click.option(
    "--days",
    type=click.FloatRange(1, 36500),
    default=30,
    show_default=True,
    metavar="N",
    help="Remove what was not used for N days.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@options.takes("cache_root")
def command(shared: Shared, days: float, dry_run: bool) -> int:
    """Remove from the cache what nobody uses.

    Run folders, JIT results, trees, dependency sets and downloads: each can be fetched or made again. What a lane
    used within the last N days stays. The run folders of `sweep` lie elsewhere and are not touched.
    """
    if math.isnan(days):
        raise HarnessError("--days nan: a number of days. Next: runner.py prune --days 30")
    cache = shared.cache()
    with cache.guard():
        found = prune.prune(cache, days, dry_run=dry_run)
    for one in found:
        if one.entries:
            terminal.echo(f"{one.entries:5} {prune.KINDS[one.kind]} ({one.kind}/), {one.size / 2**20:.0f} MiB")
    removed = "would be removed" if dry_run else "removed"
    terminal.echo(f"{sum(one.size for one in found) / 2**20:.0f} MiB {removed} from {cache.root}")
    return Exit.AS_EXPECTED
