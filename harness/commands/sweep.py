"""``runner.py sweep``: every pack on every target that this host can judge."""

import datetime as dt
import functools
import itertools
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from harness.commands import options, running
from harness.commands.options import Shared
from harness.core import Exit, HarnessError, files, terminal
from harness.host.gpu_health import GpuWatch
from harness.host.host import place_name
from harness.lane.cell import BOTH_LANES, Cell
from harness.receipt import redaction
from harness.schedule import lanes
from harness.schedule.lanes import Account
from harness.schedule.selection import HEAD, LATEST, copied_inputs, select, sweep_cells
from harness.schedule.session import Journal, Session
from harness.sweep import outputs, run_folder
from harness.sweep.collector import Collector, find_baseline

BUDGET = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _duration(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """Return a duration such as 90, 90s, 30m or 2h in seconds."""
    if value is None:
        return None
    match = BUDGET.fullmatch(value)
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= options.LONGEST:
        raise click.BadParameter(f"{value[:40]!r} is no duration such as 90s, 30m or 2h, of at most a month")
    return seconds


def _cluster(
    base: Session, gpu_types: tuple[str, ...], slurm_options: tuple[str, ...]
) -> tuple[Session, Callable[[Session, list[Cell]], Account]]:
    """Return the session of a cluster, and the engine that runs lanes there."""
    try:
        from harness.schedule import slurm, slurm_engine  # noqa: PLC0415 - submitit comes with an extra
    except ImportError:
        raise HarnessError("--slurm needs submitit. Next: pip install -e '.[slurm]'") from None
    settings = slurm.settings(gpu_types, slurm_options)
    nodes = replace(base.host, gpus=settings.gpus)
    session = replace(base, host=nodes, devices=[], lost=(), jobs=base.jobs or len(BOTH_LANES))
    return session, functools.partial(slurm_engine.run, settings)


@click.command("sweep")
@click.argument("selectors", metavar="[PACK[:TARGET]]...", nargs=-1)
@options.takes(*options.PLACES, "jobs")
@click.option(
    "--runs",
    type=options.FOLDER,
    default=Path("sweeps"),
    show_default=True,
    metavar="DIR",
    help="Folder of the run folders; each sweep is one of them.",
)
@click.option("--budget", callback=_duration, metavar="TIME", help="90s, 30m, 2h: the rest is NOT_RUN.")
@click.option(
    "--repeat", type=options.REPEATS, default=1, metavar="N", help="Run each lane N times; FLAKY if they differ."
)
@click.option("--latest", is_flag=True, help="Judge upstream's newest releases too.")
@click.option("--head", is_flag=True, help="Judge the heads of default branches too.")
@click.option("--slurm", is_flag=True, help="Let Slurm run the lanes, from a login node.")
@click.option(
    "--gpu-type",
    "gpu_types",
    multiple=True,
    metavar="ARCH[=TYPE]",
    help="The cluster's type (sm_90a=h200); repeatable.",
)
@click.option(
    "--slurm-option",
    "slurm_options",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Of sbatch (partition=gpu); repeatable.",
)
@click.option("--baseline", type=options.FOLDER, metavar="DIR", help="Compare with this run, or with those below.")
def command(
    shared: Shared,
    selectors: tuple[str, ...],
    runs: Path,
    budget: float | None,
    repeat: int,
    latest: bool,
    head: bool,
    slurm: bool,
    gpu_types: tuple[str, ...],
    slurm_options: tuple[str, ...],
    baseline: Path | None,
) -> int:
    """Judge all packs on all targets, and say what changed.

    Or only what is named, all of it together: 9, '0*:sm_90a', ':cpu'. Killed, the same command goes on within 20 hours.
    The run folder holds index.html for people, summary.md for a build server, and results.json for programs.

    \b
    Examples:
      runner.py sweep --latest --baseline sweeps --budget 2h
      runner.py sweep 9:sm_90a ':cpu'
      runner.py sweep --slurm --slurm-option partition=gpu --gpu-type sm_90a=h200

    Exit status 1: something is worse or needs attention; 0: nothing. What pack.toml calls `known` does not count,
    unless it is an error.
    """
    if (gpu_types or slurm_options) and not slurm:
        raise HarnessError("--gpu-type, --slurm-option: no cluster was asked for. Next: runner.py sweep --slurm ...")
    packs, errors = options.load_packs(shared.packs, ())
    options.print_errors(errors)
    moving = tuple(itertools.compress((LATEST, HEAD), (latest, head)))
    stop_at = None if budget is None else time.monotonic() + budget
    runs = runs.absolute()
    with running.session(shared, has_folder=False) as base, copied_inputs(base.cache, packs) as copies:
        place, engine = _cluster(base, gpu_types, slurm_options) if slurm else (base, lanes.run)
        cells = sweep_cells(select(copies, selectors), place.host, place.cache, *moving)
        choices = (*moving, f"--repeat {repeat}", f"--slurm {slurm}", *gpu_types, *slurm_options, *selectors)
        request = (files.key_of(shared.packs.resolve()), *choices)
        with (
            files.guard(runs, "the folder of runs", "--runs DIR"),
            run_folder.open_run(runs, request, dt.datetime.now(dt.UTC)) as folder,
            Journal(folder.path / run_folder.JOURNAL) as journal,
        ):
            faulty = {fault.place for fault in folder.record.faults}
            session = replace(
                place,
                devices=[device for device in place.devices if place_name(device) not in faulty],
                folder=folder.path,
                journal=journal,
                command=functools.partial(_command, repeat),
                note=folder.note,
                repeat=repeat,
                urgent=run_folder.cells_not_run(runs),
                stop_at=stop_at,
                watch=GpuWatch(),
            )
            reference = find_baseline(baseline)
            session.progress.tell(
                f"run folder {folder.path}: {len(cells)} cells, {len(journal.ends)} lanes ended before"
            )
            account = engine(session, cells)
            places = {**session.cache.places, shared.packs.absolute(): "$PACKS", runs: "$RUNS"}
            collector = Collector(session, account, reference, redaction.host_scrubber(places))
            results = collector.results(folder, cells, (*map(str, errors), *session.lost))
            outputs.write(results, folder.path)
            if results.finished:
                folder.finish()
    for line in outputs.change_lines(results):
        terminal.echo(line)
    terminal.echo(outputs.headline(results))
    terminal.echo(folder.path / "index.html")
    if results.status == Exit.INTERRUPTED:
        raise KeyboardInterrupt("the same command goes on from here")
    return results.status


def _command(repeat: int, cell: Cell) -> str:
    """Return the command that makes a cell's receipt anew."""
    column = f" --{cell.column}" if cell.column else ""
    return f"runner.py sweep {cell.pack.name}:{cell.target}{column}{f' --repeat {repeat}' if repeat > 1 else ''}"
