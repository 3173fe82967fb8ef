"""From cells to arrays: one for each architecture, number of GPUs and of ranks, the longest first."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.core import files, strict_json, structure
from harness.core.errors import HarnessError
from harness.core.words import Evidence
from harness.host.gpus import Gpu
from harness.pack.model import Pack
from harness.schedule.estimates import expected_seconds
from harness.schedule.task import Task
from harness.upstream.source import Source
from harness.verdict.cell import Cell

SCHEMA = 1
#: Tasks of an array: Slurm's own limit (MaxArraySize) is 1001 where nobody set another.
MOST_TASKS = 1000
#: A lane may last so many times as long as it did before: another node, and a cache with nothing compiled.
MARGIN = 4.0
#: Seconds that a task has besides: Python on a cold file system, trees to be checked.
BESIDES = 300.0
#: Minutes, at least: clusters start short jobs no sooner than that.
SHORTEST = 10


@dataclass(frozen=True)
class PlannedCell:
    """A cell as a node has to judge it.

    Attributes:
        name: of the cell.
        pack: the name of its pack.
        target: what the verdict is about.
        evidence: that was planned; a node that cannot produce it says so.
        source: where its tree comes from.
        column: what tells it from the pack's cell on the pinned release.
        version: of its release, where it is known.
        tree: the sha256 of the release's archive, likewise.
        seen: the day on which a version that moves was looked up.
        keys: of its lanes, as the collector has them, in the order of the lanes.

    """

    name: str
    pack: str
    target: str
    evidence: Evidence
    source: Source
    column: str
    version: str
    tree: str
    seen: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Array:
    """One job array: what it is to do, and what became of it. Its file is the plan of its tasks as well.

    Attributes:
        schema: of the file.
        number: of the array in its sweep, from 1.
        name: of the job; no other job has it.
        target: the architecture of its GPUs; empty: none.
        gpus: that each task has.
        kind: what the cluster calls such a GPU.
        packs: the folder of the copies of packs, beside that of the arrays.
        cache: the folder of the cache.
        mirrors: that of the repositories; empty: there is none.
        repeat: how often each lane runs.
        jobs: how many lanes at once, one of several ranks counting as that many; and cores of a task.
        minutes: that each task may last.
        tasks: the cells of each task, by its number.
        job: Slurm's number; empty until it is known.
        cancelled: by this command.

    """

    schema: int
    number: int
    name: str
    target: str
    gpus: int
    kind: str
    packs: str
    cache: str
    mirrors: str
    repeat: int
    jobs: int
    minutes: int
    tasks: tuple[tuple[PlannedCell, ...], ...]
    job: str = ""
    cancelled: bool = False

    @property
    def gres(self) -> str:
        """What each task asks for, as ``--gres`` has it."""
        return ":".join(part for part in ("gpu", self.kind, str(self.gpus)) if part) if self.target else ""

    @property
    def place(self) -> str:
        """Where its lanes run, for people: ``gpu h200``, ``gpus h200,h200``, ``cpu``."""
        kind = self.kind or self.target
        return f"gpu{'s' if self.gpus > 1 else ''} {','.join([kind] * self.gpus)}" if self.target else "cpu"

    @property
    def cells(self) -> Iterable[tuple[int, int, PlannedCell]]:
        """Every cell, with the number of its task and its own in that task."""
        return [(task, at, cell) for task, cells in enumerate(self.tasks) for at, cell in enumerate(cells)]


@dataclass(frozen=True)
class Wanted:
    """A cell that is to be judged on a node, and its lanes with what is known of their durations."""

    cell: Cell
    tasks: tuple[Task, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its lanes: what tells one cell from the same after a change of its probe."""
        return tuple(task.key for task in self.tasks)

    @property
    def group(self) -> tuple[str, int, int]:
        """What it needs of a node: the architecture and number of its GPUs, and how many ranks its lanes have."""
        return self.cell.gpu, self.tasks[0].gpus, self.tasks[0].cores

    @property
    def expected(self) -> float:
        """How long its lanes are taken to last together, in seconds."""
        return sum(map(expected_seconds, self.tasks))

    @property
    def longest(self) -> float:
        """How long they may last, in seconds: no lane outlives its own time-out."""
        bound = self.cell.timeout or self.cell.stated.timeout_s
        return sum(bound if task.seconds is None else min(bound, MARGIN * task.seconds) for task in self.tasks)

    def planned(self) -> PlannedCell:
        """Return what a node is told of it."""
        cell = self.cell
        return PlannedCell(
            name=cell.name,
            pack=cell.pack.name,
            target=cell.target,
            evidence=cell.known_evidence,
            source=cell.source,
            column=cell.column,
            version=cell.version,
            tree=cell.tree,
            seen=cell.seen,
            keys=self.keys,
        )


def grouped(cells: Iterable[Wanted]) -> list[list[list[Wanted]]]:
    """Part cells into arrays, and each array into tasks of one cell, or of a few where there are too many."""
    groups: dict[tuple[str, int, int], list[Wanted]] = {}
    for wanted in cells:
        groups.setdefault(wanted.group, []).append(wanted)
    arrays = []
    for some in groups.values():
        some.sort(key=lambda one: (not any(task.urgent for task in one.tasks), -one.expected))
        size = math.ceil(len(some) / MOST_TASKS)
        arrays.append([some[start : start + size] for start in range(0, len(some), size)])
    return arrays


def minutes(tasks: Iterable[Sequence[Wanted]]) -> int:
    """Return the time limit of an array, in minutes: that of its longest task."""
    longest = max(sum(one.longest for one in task) for task in tasks)
    return max(SHORTEST, math.ceil((BESIDES + longest) / 60))


def gpu_of(target: str, kind: str) -> Gpu:
    """Return a GPU as a cluster promises it: its name is the cluster's word for it.

    Raises:
        HarnessError: `target` names no architecture.

    """
    match = re.fullmatch(r"sm_(\d+)(\d)a?", target)
    gpu = Gpu(kind or target, (int(match[1]), int(match[2]))) if match else None
    if gpu is None or gpu.target != target:
        raise HarnessError(f"--gpu-type {target}={kind}: no architecture such as sm_80. Next: --gpu-type sm_90a=h200")
    return gpu


def promised(gpu_types: Iterable[tuple[str, str]], packs: Iterable[Pack]) -> tuple[Gpu, ...]:
    """List the GPUs that nodes are taken to have: of each architecture as many as any target of it needs."""
    most: dict[str, int] = {}
    for pack in packs:
        for target, stated in pack.definition.targets.items():
            most[target] = max(most.get(target, 1), stated.gpus)
    return tuple(gpu_of(target, kind) for target, kind in gpu_types for _ in range(most.get(target, 1)))


def freeze(packs: Iterable[Pack], folder: Path) -> None:
    """Copy what nodes read of packs: what was submitted is what runs, whatever is edited meanwhile."""
    for pack in packs:
        target = folder / pack.name
        target.mkdir(parents=True, exist_ok=True)
        inputs = pack.inputs or pack.folder
        stated = (pack.folder / "pack.toml", *pack.folder.glob("requirements*"))
        judging = (inputs / "reproduce.py", inputs / "contract.py", *inputs.glob("*.patch"))
        for path in (*stated, *judging):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def path_of(folder: Path, number: int) -> Path:
    """Return where an array's file lies."""
    return folder / "arrays" / f"{number:04d}.json"


def write(folder: Path, array: Array) -> None:
    """Write the file of an array, as a whole."""
    files.write_atomic(path_of(folder, array.number), json.dumps(asdict(array), ensure_ascii=False) + "\n")


def read(path: Path) -> Array:
    """Read the file of an array.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or of another schema.

    """
    document = strict_json.loads(path.read_bytes())
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} is no plan of schema {SCHEMA}")
    return structure.structure(document, Array)


def read_all(folder: Path) -> list[Array]:
    """Read every array of a sweep, in their order.

    Raises:
        HarnessError: one of them cannot be read.

    """
    try:
        return [read(path) for path in sorted((folder / "arrays").glob("*.json"))]
    except (OSError, ValueError) as error:
        raise HarnessError(f"{folder}: {error}. Next: remove that folder; its lanes are then submitted again") from None
