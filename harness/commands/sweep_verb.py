"""``runner.py sweep``: everything that this host can judge, every night."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import click

from harness import host
from harness.commands import options
from harness.progress import Progress
from harness.sweep import digest, nvml
from harness.sweep.sweep import Order, Sweep
from harness.words import Exit

BUDGET = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smh]?)")
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _duration(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """Return a duration such as 90, 90s, 30m or 2h in seconds."""
    match = BUDGET.fullmatch(value) if value is not None else None
    if value is not None and match is None:
        raise click.BadParameter(f"{value!r} is no duration such as 90s, 30m or 2h")
    return float(match["number"]) * UNITS[match["unit"]] if match else None


@click.command("sweep")
@click.option("--only", multiple=True, metavar="PACK[:TARGET]", help="Only these (9, '0*:sm_90a', ':cpu'); repeatable.")
@options.packs_option
@options.cache_option
@options.offline_option
@click.option(
    "--nights",
    type=click.Path(path_type=Path),
    default=Path("nights"),
    show_default=True,
    metavar="DIR",
    help="Folder of the nights; each night is a folder in it.",
)
@click.option("--gpus", metavar="N,N", help="Only these GPUs, by NVML's numbers (default: all that this host shows).")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Lanes at once on the cores, besides those of the GPUs (default: one for each core that no GPU lane needs).",
)
@click.option(
    "--budget", callback=_duration, metavar="TIME", help="90s, 30m, 2h: what does not fit is reported as NOT_RUN."
)
@click.option(
    "--repeat", type=click.IntRange(1), default=1, metavar="N", help="Run each lane N times; FLAKY if they differ."
)
@click.option("--latest", is_flag=True, help="Judge upstream's newest releases too.")
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Compare with this night, or with the newest one in this folder of nights (default: the committed receipts).",
)
def command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    only: tuple[str, ...],
    packs: Path,
    cache_root: Path | None,
    offline: bool,  # noqa: FBT001 - click passes options by name
    nights: Path,
    gpus: str | None,
    jobs: int | None,
    budget: float | None,
    repeat: int,
    latest: bool,  # noqa: FBT001 - likewise
    baseline: Path | None,
) -> int:
    """Judge every pack on every target that this host can show, and say what changed.

    One lane at a time on each GPU, lanes that only compile or interpret on the cores beside them, the longest first.
    Each end is written at once: killed at any moment, the same command goes on where it was, within 20 hours.

    \b
    A night's folder holds:
      index.html               for people: packs against targets, and the nights before
      summary.md, junit.xml    for a build server
      results.json             for programs (harness/sweep/results.schema.json)
      receipts/, latest/       as `run --receipts` writes them
      logs/, journal.jsonl     each lane

    \b
    Exit status 1 when something changed for the worse or needs a person (an error, a fix that upstream shipped, a
    stale patch, a sick GPU, a lane that nobody could run), 0 otherwise.

    \b
    Examples:
      runner.py sweep
      runner.py sweep --latest --baseline nights --budget 2h
      runner.py sweep --only 9 --only ':sm_90a' --gpus 0,2
    """
    chosen, broken = options.sound_packs(packs, ())
    options.complain(broken)
    with Progress(sys.stderr) as progress, nvml.pool(gpus) as pool:
        devices = pool.devices
        here = replace(host.detect(), gpus=tuple(device.gpu for device in devices))
        cores = len(host.cores())
        order = Order(
            packs=chosen,
            folder=packs,
            only=only,
            latest=latest,
            repeat=repeat,
            budget=budget,
            jobs=jobs or max(1, cores - len(devices)),
            nights=nights.absolute(),
            baseline=baseline,
            notes=(*(str(error) for error in broken), *pool.lost),
        )
        cache = options.the_cache(cache_root, offline=offline)
        with cache.guard():
            results, tonight = Sweep(order, cache, here, devices, progress.tell).run()
    for line in digest.change_lines(results):
        click.echo(line)
    click.echo(digest.headline(results))
    click.echo(tonight.folder / "index.html")
    if results.status == Exit.INTERRUPTED:
        raise KeyboardInterrupt
    return results.status
