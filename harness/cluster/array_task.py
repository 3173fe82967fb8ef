"""One task of an array, on its node: judge each of its cells with the ordinary worker, and publish what it showed.

Slurm runs it as ``python -m harness.cluster.array_task ARRAYS/0001.json``; which task it is stands in its variables.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from harness.cluster import attempts, plan
from harness.cluster.attempts import Attempt, Published
from harness.cluster.plan import Array, PlannedCell
from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.host import host as this_host
from harness.host.gpu_health import GpuWatch
from harness.host.gpus import GpuPool, gpu_pool
from harness.host.host import Host
from harness.lane import built_environment
from harness.pack import load
from harness.receipt import redaction
from harness.schedule.journal import MemoryJournal
from harness.schedule.scheduler import Account, GpuFault
from harness.schedule.session import Session
from harness.verdict.cell import Cell, lanes_of

#: What a sweep's folder for Slurm holds besides the files of its arrays.
RESULTS, OUTPUT = "results", "output"


@dataclass(frozen=True)
class Node:
    """Where a task runs: what the node is, and the GPUs that Slurm gave the task."""

    host: Host
    pool: GpuPool


def _cell(planned: PlannedCell, packs: Path, cache: Cache, here: Host) -> Cell:
    """Build the cell that was planned."""
    pack = load.load_pack(packs / planned.pack)
    stated = pack.definition.stated(planned.target)
    return Cell(
        pack=pack,
        target=planned.target,
        evidence=planned.evidence,
        source=planned.source,
        column=planned.column,
        version=planned.version,
        tree=planned.tree,
        lanes=lanes_of(pack),
        environment=built_environment.environment(cache, here, stated.environment),
        seen=planned.seen,
    )


def judged(array: Array, planned: PlannedCell, packs: Path, node: Node) -> Published | None:
    """Judge a cell; None where the task was told to stop meanwhile."""
    base = Published(attempts.SCHEMA, planned.keys, node.host)
    if array.target and node.host.count(array.target) < array.gpus:
        if node.pool.lost:
            fault = GpuFault(array.place, array.kind or array.target, node.pool.lost[0], planned.name)
            return replace(base, faults=(fault,), not_run=dict.fromkeys(planned.keys, fault.reason))
        names = ", ".join(sorted({f"{gpu.name} ({gpu.target})" for gpu in node.host.gpus})) or "no GPU"
        return replace(base, refused=f"Slurm gave {names} for {array.gres}, and not {array.gpus} of {array.target}")
    cache = Cache(Path(array.cache), offline=True, mirrors=Path(array.mirrors) if array.mirrors else None)
    cell = _cell(planned, packs, cache, node.host)
    with tempfile.TemporaryDirectory(prefix="reproducer-") as text:
        folder = Path(text)
        session = Session(
            cache=cache,
            host=node.host,
            devices=node.pool.devices,
            folder=folder,
            journal=MemoryJournal(),
            command=lambda _: "",
            jobs=array.jobs,
            repeat=array.repeat,
            watch=GpuWatch(),
            threads=1,
            locks=folder / "locks",  # the GPUs are this task's alone, and their numbers every node's
        )
        account = session.run([cell], receipts=False)
        return None if account.interrupted else _published(base, array, session, account, cell)


def _published(base: Published, array: Array, session: Session, account: Account, cell: Cell) -> Published:
    """Put together what the lanes of a cell showed, under the keys that the plan has for them."""
    key_of = {task.key: key for task, key in zip(session.tasks([cell]), base.keys, strict=True)}
    failure = account.failed.get(cell.name)
    found = {key: session.journal.read(own) for own, key in key_of.items()}
    ends = tuple(replace(end, key=key, place=array.place) for key, end in found.items() if end is not None)
    logs = {end.log.file: (session.folder / end.log.file).read_text("utf-8") for end in ends if end.log is not None}
    return replace(
        base,
        ends=ends,
        logs=logs,
        not_run={key_of[own]: reason for own, reason in account.not_run.items()},
        faults=tuple(replace(fault, place=array.place) for fault in account.faults),
        failure=replace(failure, reason=_clean(failure.reason, session.cache)) if failure is not None else None,
    )


def _clean(reason: str, cache: Cache) -> str:
    """Take what is private to this node out of a text, or leave it out."""
    scrub = redaction.of_host(cache.places)
    text = scrub.scrub(reason)
    return "[left out: it names something private]" if any(scrub.findings(text)) else text


def run(path: Path, variables: Mapping[str, str]) -> Exit:
    """Judge and publish the cells of a task that no attempt has published yet.

    Args:
        path: the file of the array.
        variables: Slurm's: which task it is, and how often Slurm started it before.

    Raises:
        HarnessError: Slurm's variables are missing, or the file cannot be read.

    """
    folder = path.parents[1]
    try:
        array = plan.read(path)
        task, job = int(variables["SLURM_ARRAY_TASK_ID"]), int(variables["SLURM_JOB_ID"])
        restart = int(variables.get("SLURM_RESTART_COUNT", "0"))
    except (KeyError, OSError, ValueError) as error:
        raise HarnessError(f"{path.name}: {error}. Next: let Slurm run this; runner.py sweep --slurm") from None
    if not array.target:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Slurm says NoDevFiles, or nothing, where no GPU was asked for
    results = folder / RESULTS
    sys.stdout.write(f"{socket.gethostname()}: task {task} of {array.name}, started again {restart} times\n")
    with gpu_pool() as pool:
        node = Node(this_host.detect(pool), pool)
        for at, planned in enumerate(array.tasks[task]):
            attempt = Attempt(array.number, task, at, job, restart)
            if attempt.at in attempts.newest(results):
                continue
            found = judged(array, planned, folder / array.packs, node)
            if found is None:
                return Exit.INTERRUPTED
            attempts.publish(results, attempt, found)
    return Exit.AS_EXPECTED


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    """Run the task that Slurm's variables name; return the exit status."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(run(Path(arguments[0]), os.environ))
    except HarnessError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.status)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return int(Exit.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
