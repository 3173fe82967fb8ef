"""``runner.py sweep``: everything that this host can judge, every night."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import click

from harness.cluster import engine, plan, submitting
from harness.cluster.slurm import Settings
from harness.commands import options, running
from harness.core.errors import HarnessError
from harness.core.progress import Progress
from harness.core.words import Exit
from harness.host import host
from harness.host.gpus import GpuPool, gpu_pool
from harness.sweep import text_outputs
from harness.sweep.columns import Moving
from harness.sweep.sweep import Engine, Order, Sweep, ThisHost

BUDGET = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smh]?)")
#: What Slurm takes as the type of a GPU.
GPU_TYPE = re.compile(r"[\w.-]*", re.ASCII)
NO_GPUS = GpuPool([], "", [])
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _duration(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """Return a duration such as 90, 90s, 30m or 2h in seconds."""
    match = BUDGET.fullmatch(value) if value is not None else None
    if value is not None and match is None:
        raise click.BadParameter(f"{value!r} is no duration such as 90s, 30m or 2h")
    seconds = float(match["number"]) * UNITS[match["unit"]] if match else None
    if seconds is not None and not 0 < seconds <= options.LONGEST:
        raise click.BadParameter(f"{value[:40] if value else value!r}: more than nothing, and at most a month")
    return seconds


def _settings(
    partition: str | None, account: str | None, constraint: str | None, gpu_types: tuple[str, ...], poll: float | None
) -> Settings:
    """Return how jobs are submitted.

    Raises:
        HarnessError: a GPU's type is no pair of an architecture and a name of Slurm's.

    """
    types: dict[str, str] = {}
    for text in gpu_types:
        target, _, kind = text.partition("=")
        if target in types or not GPU_TYPE.fullmatch(kind):
            raise HarnessError(f"--gpu-type {text}: name each architecture once. Next: --gpu-type sm_90a=h200")
        plan.gpu_of(target, kind)
        types[target] = kind
    given = Settings(partition or "", account or "", constraint or "", tuple(types.items()))
    return given if poll is None else replace(given, poll_s=poll)


def _fit_together(slurm: bool, here: Mapping[str, object], cluster: Mapping[str, object]) -> None:  # noqa: FBT001 - the option itself
    """Refuse options of this host's sweep with --slurm, and those of a cluster's without."""
    for name, value in (here if slurm else cluster).items():
        if value:
            raise HarnessError(
                f"{name}: with --slurm the lanes run elsewhere. Next: leave it out"
                if slurm
                else f"{name}: no cluster was asked for. Next: runner.py sweep --slurm {name} ..."
            )


@click.command("sweep")
@click.option("--only", multiple=True, metavar="PACK[:TARGET]", help="Only these (9, '0*:sm_90a', ':cpu'); repeatable.")
@options.packs_option
@options.cache_option
@options.offline_option
@options.mirrors_option
@options.runs_option
@click.option("--gpus", metavar="N,N", help="Only these GPUs, by NVML's numbers (default: all that this host shows).")
@click.option(
    "--jobs",
    type=options.JOBS,
    metavar="N",
    help="Lanes at once, on cores and GPUs together (default: as many as the cores and the memory allow); with "
    "--slurm those of one task, and its cores (default: 2).",
)
@click.option(
    "--budget", callback=_duration, metavar="TIME", help="90s, 30m, 2h: what does not fit is reported as NOT_RUN."
)
@click.option(
    "--repeat",
    type=options.REPEATS,
    default=1,
    metavar="N",
    help="Run each lane N times; FLAKY if they differ.",
)
@click.option("--latest", is_flag=True, help="Judge upstream's newest releases too.")
@click.option("--head", is_flag=True, help="Judge the heads of upstream's default branches too, as they are now.")
@click.option(
    "--mutants",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Put N wrong fixes of each pack through its probe too, those not run for longest first.",
)
@click.option(
    "--bisect",
    callback=_duration,
    metavar="TIME",
    help="Find the release, then the commit, that changed a verdict of --latest or --head, within this time.",
)
@click.option("--slurm", is_flag=True, help="Let Slurm run the lanes, as job arrays; run this on a login node.")
@click.option("--partition", metavar="P", help="Of the cluster (default: its own).")
@click.option("--account", metavar="A", help="To be charged (default: the user's).")
@click.option("--constraint", metavar="C", help="Features that a node must have, as sbatch has them.")
@click.option(
    "--gpu-type",
    "gpu_types",
    multiple=True,
    metavar="ARCH[=TYPE]",
    help="What the cluster calls a GPU of an architecture (sm_90a=h200); repeatable.",
)
@click.option(
    "--poll", type=click.FloatRange(0.2, 600), metavar="SECONDS", help="How often squeue is asked (default: every 5 s)."
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Compare with this run folder, or with the newest one in this folder (default: the committed receipts).",
)
def command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    only: tuple[str, ...],
    packs: Path,
    cache_root: Path | None,
    offline: bool,  # noqa: FBT001 - click passes options by name
    mirrors: Path | None,
    runs: Path,
    gpus: str | None,
    jobs: int | None,
    budget: float | None,
    repeat: int,
    latest: bool,  # noqa: FBT001 - likewise
    head: bool,  # noqa: FBT001 - likewise
    mutants: int,
    bisect: float | None,
    slurm: bool,  # noqa: FBT001 - likewise
    partition: str | None,
    account: str | None,
    constraint: str | None,
    gpu_types: tuple[str, ...],
    poll: float | None,
    baseline: Path | None,
) -> int:
    """Judge every pack on every target that this host can show, and say what changed.

    Lanes share the cores and the GPUs, the longest first; what is timed has its GPU for itself meanwhile.
    Each end is written at once: killed at any moment, the same command goes on where it was, within 20 hours.

    \b
    The run folder holds:
      index.html               for people: packs against targets, and the runs before
      summary.md, junit.xml    for a build server
      results.json             for programs (harness/sweep/results.schema.json)
      receipts/, latest/       as `run --receipts` writes them
      logs/, journal.jsonl     each lane

    \b
    Exit status 1 when something changed for the worse or needs attention (an error, a fix that upstream shipped,
    a stale patch, a GPU with a fault, a lane that nobody could run), 0 otherwise. A pack
    whose pack.toml says `known` does not count, except for an error.

    \b
    Examples:
      runner.py sweep
      runner.py sweep --slurm --partition gpu --gpu-type sm_80=a100 --gpu-type sm_90a=h200
      runner.py sweep --latest --baseline sweeps --budget 2h
      runner.py sweep --latest --head --baseline sweeps --bisect 30m
      runner.py sweep --only 9 --only ':sm_90a' --gpus 0,2
    """
    if bisect is not None and not latest and not head:
        raise HarnessError("--bisect: pinned releases do not move. Next: runner.py sweep --latest --bisect 30m")
    settings = _settings(partition, account, constraint, gpu_types, poll) if slurm else None
    _fit_together(
        slurm,
        {"--gpus": gpus, "--mutants": mutants, "--bisect": bisect},
        {
            "--partition": partition,
            "--account": account,
            "--constraint": constraint,
            "--gpu-type": gpu_types,
            "--poll": poll,
        },
    )
    chosen, broken = options.sound_packs(packs, ())
    options.complain(broken)
    with Progress(sys.stderr) as progress, nullcontext(NO_GPUS) if slurm else gpu_pool(gpus) as pool:
        order = Order(
            packs=chosen,
            folder=packs,
            only=only,
            moving=Moving(latest, head),
            repeat=repeat,
            budget=budget,
            jobs=jobs or (submitting.JOBS if settings else None),
            runs=runs.absolute(),
            baseline=baseline,
            mutants=mutants,
            bisect=bisect,
            cluster=settings.request if settings else (),
            notes=(*(str(error) for error in broken), *pool.lost),
        )
        cache = options.the_cache(cache_root, offline=offline, tell=progress.tell, mirrors=mirrors)
        listener = running.listener(progress)
        here = host.detect(pool)
        runs_lanes: Engine = ThisHost()
        if settings is not None:
            here = replace(here, gpus=plan.promised(settings.gpu_types, chosen))
            runs_lanes = engine.SlurmEngine(settings, progress.tell)
        with cache.guard():
            results, folder = Sweep(order, cache, here, pool.devices, listener, progress, runs_lanes).run()
    for line in text_outputs.change_lines(results):
        click.echo(line)
    click.echo(text_outputs.headline(results))
    click.echo(folder.path / "index.html")
    if results.status == Exit.INTERRUPTED:
        raise KeyboardInterrupt
    return results.status
