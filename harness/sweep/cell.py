"""Cells and tasks: what a sweep judges, and the lanes that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness import companions, files, made
from harness.companions import CompanionSet
from harness.host import Host
from harness.origin import Origin
from harness.pack import Pack
from harness.words import Evidence, LaneName, Verdict


class Release(StrEnum):
    """Which release of its upstream a cell judges."""

    PINNED = "pinned"
    LATEST = "latest"


@dataclass(frozen=True)
class Cell:
    """One pack on one target, judged on one release.

    Attributes:
        pack: the pack.
        target: what the verdict is about.
        evidence: the strongest that this host can produce; None where it cannot judge the cell at all.
        release: the pinned one, or upstream's newest.
        origin: where its tree comes from.
        version: of the release.
        tree: the sha256 of its archive.
        reason: why it cannot be judged, where `evidence` is None.
        broken: whether that is an error (the index cannot be reached) and not a property of this host.
        environment: the one that its target names, where it has been made here.

    """

    pack: Pack
    target: str
    evidence: Evidence | None
    release: Release
    origin: Origin
    version: str
    tree: str
    reason: str = ""
    broken: bool = False
    environment: Path | None = None

    @property
    def name(self) -> str:
        """Its name in every output, the same from night to night."""
        suffix = "" if self.release == Release.PINNED else f"@{self.release}"
        return f"{self.pack.name}/{self.target}{suffix}"

    @property
    def alone(self) -> bool:
        """Whether nothing may run beside its lanes: they measure, on their GPU or (target cpu) on the cores."""
        measures = self.evidence == Evidence.EXECUTED or self.target == "cpu"
        return measures and self.pack.definition.targets[self.target].exclusive

    @property
    def gpu(self) -> str:
        """The architecture of the GPU that its lanes need; empty where they run on the cores alone."""
        return self.target if self.evidence == Evidence.EXECUTED else ""

    @property
    def lanes_are_independent(self) -> bool:
        """Whether the patched lane need not wait: pack.toml says that the pristine one reproduces the bug."""
        expected = self.pack.definition.targets[self.target].verdict
        return self.origin.is_pinned and expected == Verdict.CONFIRMED

    def companion_set(self, host: Host) -> CompanionSet:
        """Return the companion set that the target names."""
        definition = self.pack.definition
        return companions.named(definition, definition.targets[self.target].companions, host.python_tag)


@dataclass(frozen=True)
class Task:
    """One lane of one cell.

    Attributes:
        cell: what it belongs to.
        lane: which tree it runs on.
        number: which repetition it is, from 1.
        key: the hash of all that could change what it shows; two tasks of one key are one lane.
        pristine: the key of the pristine lane of the same repetition; its own where it is that lane.
        waits: whether that lane has to reproduce the bug first.
        after: the keys of the lanes that have to be over first: that one where it waits, and the same lane's run
            before, since both use the same JIT caches.
        seconds: how long it took before; None where no receipt tells.
        urgent: it was left out last night.

    """

    cell: Cell
    lane: LaneName
    number: int
    key: str
    pristine: str
    waits: bool = False
    after: tuple[str, ...] = ()
    seconds: float | None = None
    urgent: bool = False

    @property
    def name(self) -> str:
        """Its name for people and for log files."""
        suffix = f".{self.number}" if self.number > 1 else ""
        return f"{self.cell.name} {self.lane}{suffix}"

    @property
    def log(self) -> str:
        """The path of its log in the folder of the night."""
        cell, suffix = self.cell, f".{self.number}" if self.number > 1 else ""
        release = "" if cell.release == Release.PINNED else f".{cell.release}"
        return f"logs/{cell.pack.name}/{cell.target}.{cell.evidence}{release}.{self.lane}{suffix}.log"


def key_base(cell: Cell, host: Host) -> tuple[str, ...]:
    """Return what all lanes of a cell share: probe, tree, companions, target, toolchain, pack.toml's words on them."""
    definition = cell.pack.definition
    wanted = definition.targets[cell.target]
    gpu = next((gpu.name for gpu in host.gpus if gpu.target == cell.gpu), "")
    return (
        cell.pack.name,
        files.sha256_file(cell.pack.probe),
        cell.tree,
        cell.companion_set(host).sha256,
        cell.target,
        str(cell.evidence),
        *wanted.loads,
        *definition.claims,
        *definition.upstream.modules,
        made.prefix(cell.environment),
        host.python,
        str(host.torch),
        str(host.triton),
        host.cuda,
        host.driver if cell.gpu else "",
        gpu,
    )


def tasks(cell: Cell, host: Host, repeat: int) -> list[Task]:
    """List the lanes of a cell, for `repeat` runs of both; nothing where this host cannot judge it.

    The tree of the patched lane follows from the pristine one and the patch, so that the patch stands for it.
    """
    if cell.evidence is None:
        return []
    base, patch = key_base(cell, host), cell.pack.patch
    change = files.sha256_file(patch) if patch.exists() else "no patch"
    waits = not cell.lanes_are_independent
    found: list[Task] = []
    for number in range(1, repeat + 1):
        before = [task.key for task in found[-2:]] or ["", ""]
        pristine = files.key_of(*base, LaneName.PRISTINE, number)
        patched = files.key_of(*base, LaneName.PATCHED, change, cell.origin.kind, number)
        first, second = (tuple(key for key in keys if key) for keys in ([before[0]], [before[1], waits * pristine]))
        found.append(Task(cell, LaneName.PRISTINE, number, pristine, pristine, after=first))
        found.append(Task(cell, LaneName.PATCHED, number, patched, pristine, waits, second))
    return found
