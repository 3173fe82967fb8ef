"""What tasks publish: one file for each attempt at a cell, whole or not there, under a name that no other attempt has.

A task that Slurm starts again is another attempt, so that a copy which runs on after its node was lost can neither
overwrite the newer one's file nor be taken for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.core import files, strict_json, structure
from harness.host.host import Host
from harness.schedule.journal import LaneEnd
from harness.schedule.scheduler import GpuFault
from harness.schedule.workers import Failure

SCHEMA = 1
NAME = re.compile(r"(?P<array>\d+)\.(?P<task>\d+)\.(?P<cell>\d+)\.(?P<job>\d+)\.(?P<restart>\d+)\.json")


@dataclass(frozen=True, order=True)
class Attempt:
    """One attempt at a cell; of two at the same cell the larger one is newer.

    Attributes:
        array: the number of the array in its sweep.
        task: that of the task in the array.
        cell: that of the cell in the task.
        job: Slurm's number of the task.
        restart: how often Slurm had started it again before.

    """

    array: int
    task: int
    cell: int
    job: int
    restart: int

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.array:04d}.{self.task}.{self.cell}.{self.job}.{self.restart}.json"

    @property
    def at(self) -> tuple[int, int, int]:
        """Which cell it is about."""
        return self.array, self.task, self.cell


def attempt_of(name: str) -> Attempt | None:
    """Return the attempt that a file's name states; None where it is none."""
    match = NAME.fullmatch(name)
    return Attempt(*map(int, match.groups())) if match else None


@dataclass(frozen=True)
class Published:
    """What an attempt showed.

    Attributes:
        schema: of the file.
        keys: of the cell's lanes, as the plan has them.
        host: the node.
        ends: of its lanes, under those keys.
        logs: the scrubbed log of each, by its path in the run folder.
        not_run: why a lane was not run, by its key.
        faults: of the GPUs that the task had.
        failure: why the cell could not be laid out.
        refused: why the node cannot judge it: it has other GPUs than were asked for.

    """

    schema: int
    keys: tuple[str, ...]
    host: Host
    ends: tuple[LaneEnd, ...] = ()
    logs: dict[str, str] | None = None
    not_run: dict[str, str] | None = None
    faults: tuple[GpuFault, ...] = ()
    failure: Failure | None = None
    refused: str = ""


def publish(folder: Path, attempt: Attempt, published: Published) -> None:
    """Publish an attempt: the file appears as a whole, and the disk has it.

    Where the folder is gone, the sweep was finished without this attempt, and nobody waits for it.
    """
    if not folder.is_dir():
        return
    text = json.dumps(asdict(published), ensure_ascii=False, allow_nan=False) + "\n"
    files.write_atomic(folder / attempt.file, text)


def listed(folder: Path) -> Iterator[Attempt]:
    """Yield every attempt that was published."""
    if folder.is_dir():
        found = (attempt_of(path.name) for path in folder.iterdir())
        yield from (attempt for attempt in found if attempt is not None)


def newest(folder: Path) -> dict[tuple[int, int, int], Attempt]:
    """Return the newest attempt at each cell that was published, by the cell's place in the plan."""
    return {attempt.at: attempt for attempt in sorted(listed(folder))}


def read(folder: Path, attempt: Attempt, keys: tuple[str, ...]) -> Published:
    """Read what an attempt published about the lanes of these keys.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, of another schema, or about something else.

    """
    document = strict_json.loads((folder / attempt.file).read_bytes())
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{attempt.file} is none of schema {SCHEMA}")
    found = structure.structure(document, Published)
    ended = [end.key for end in found.ends]
    if found.keys != keys or len(set(ended)) != len(ended) or not set(ended) <= set(keys):
        raise ValueError(f"{attempt.file} is about other lanes")
    for end in found.ends:
        if end.log is not None and files.sha256_bytes(log_of(found, end).encode()) != end.log.sha256:
            raise ValueError(f"{attempt.file}: the log of {end.task} is not that which its lane wrote")
    return found


def log_of(published: Published, end: LaneEnd) -> str:
    """Return the log of a lane; empty where it has none."""
    return (published.logs or {}).get(end.log.file, "") if end.log is not None else ""
