"""Tasks: the lanes that a cell takes, what they have to wait for, and how long they take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from harness.core import files, strict_json
from harness.core.words import LaneName
from harness.host.host import Host
from harness.lane import built_environment
from harness.lane.cell import BOTH_LANES, Cell
from harness.pack import judges
from harness.pack.model import Pack
from harness.receipt import receipt
from harness.upstream import dependencies

#: What a lane is taken to last, in seconds, of which no receipt tells.
UNKNOWN = 120.0
#: In how many processes a wrong fix's probe may compile, or run cases, at once: its lane is over with the first check
#: that fails, and what other processes have begun by then is thrown away.
WRONG_FIX_PROCESSES = 2


#: How long the lanes of a pack took, by target with evidence, and lane.
Seconds = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Task:
    """One lane of one cell."""

    cell: Cell  # what it belongs to
    lane: LaneName  # which tree it runs on
    number: int  # which repetition it is, from 1
    key: str  # the hash of all that could change what it shows; two tasks of one key are one lane
    pristine: str  # the key of the pristine lane of the same repetition; its own where it is that lane
    #: the keys of the lanes that have to be over first: that one where it has to reproduce the bug first, and the same
    #: lane's run before, since both use the same JIT caches
    after: tuple[str, ...] = ()
    seconds: float | None = None  # how long it took before; None where no receipt tells
    urgent: bool = False  # it was left out last time
    isolated: bool = False  # it runs on GPUs of its own: one that it shared before had a fault

    @property
    def name(self) -> str:
        """Its name for people."""
        suffix = f".{self.number}" if self.number > 1 else ""
        return f"{self.cell.name} {self.lane}{suffix}"

    @property
    def exclusive(self) -> bool:
        """Whether it shares neither a GPU nor (without one) the cores."""
        return self.isolated or self.cell.exclusive

    @property
    def gpus(self) -> int:
        """How many GPUs it needs."""
        return self.cell.stated.gpus if self.cell.gpu else 0

    @property
    def processes(self) -> int:
        """In how many processes its probe may compile, or run cases, at once, where the host has as many cores.

        As many as pack.toml states; a wrong fix that others run beside has fewer.
        """
        stated = self.cell.stated.processes
        return min(stated, WRONG_FIX_PROCESSES) if self.cell.is_wrong_fix and not self.cell.alone else stated

    @property
    def cores(self) -> int:
        """As how many of the lanes that run at once it counts: one for each of its ranks.

        Lanes of wrong fixes are many of one kind, and count the processes that they compile in, too: as many lanes as
        cores would be several processes a core. Other lanes compile while their neighbours do something else.
        """
        return max(self.cell.stated.ranks, self.processes) if self.cell.is_wrong_fix else self.cell.stated.ranks

    @property
    def log(self) -> str:
        """The path of its log in the run folder."""
        cell, suffix = self.cell, f".{self.number}" if self.number > 1 else ""
        column = f".{cell.column}" if cell.column else ""
        return f"logs/{cell.pack.name}/{cell.target}.{cell.evidence}{column}.{self.lane}{suffix}.log"


def _key_base(cell: Cell, host: Host) -> tuple[str, ...]:
    """Return what all lanes of a cell share: probe, tree, dependencies, target, what pack.toml says."""
    definition, stated = cell.pack.definition, cell.stated
    members = dependencies.named(definition, stated.dependencies, host.python_tag) if not cell.dependencies else None
    gpu = next((gpu.name for gpu in host.gpus if gpu.target == cell.gpu), "")
    return (
        cell.pack.name,
        judges.sha256(cell.pack),
        cell.tree or f"{cell.source.kind} {cell.source.url} {cell.source.value}",
        members.sha256 if members else " ".join(cell.dependencies),
        cell.target,
        str(cell.evidence),
        *stated.loads,
        str(stated.gpus),
        *definition.claims,
        *definition.upstream.modules,
        built_environment.prefix(cell.environment),
        *(["alone"] if cell.alone else []),
        *(["all checks"] if cell.judges_all else []),
        host.python,
        str(host.torch),
        str(host.triton),
        host.cuda,
        host.driver if cell.gpu else "",
        gpu,
    )


def _change(cell: Cell) -> str:
    """Hash what the patched lane has besides: every patch that the pack might take for the tree, or the cell's own."""
    pack = cell.pack
    patches = [cell.patch] if cell.patch else [pack.patch, *([] if cell.source.is_pinned else [pack.own_head_patch])]
    return files.key_of(*(files.sha256_file(path) for path in patches if path.is_file()))


def tasks(
    cell: Cell, host: Host, repeat: int, known: Seconds = MappingProxyType({}), *, urgent: bool = False
) -> list[Task]:
    """List the lanes of a cell, for `repeat` runs of each; nothing where this host cannot judge it.

    The tree of the patched lane follows from the pristine one and the patch, so that the patch stands for it. `known`
    may be of another release: another release of the same kernels is the best guess there is.
    """
    if cell.evidence is None:
        return []
    base, change = _key_base(cell, host), _change(cell)
    waits = cell.lanes == BOTH_LANES and not cell.lanes_are_independent
    found: list[Task] = []
    before: dict[LaneName, str] = {}
    for number in range(1, repeat + 1):
        pristine = files.key_of(*base, LaneName.PRISTINE, number)
        keys = {
            LaneName.PRISTINE: pristine,
            LaneName.PATCHED: files.key_of(*base, LaneName.PATCHED, change, cell.source.kind, number),
        }
        for lane in cell.lanes:
            first = [pristine] if waits and lane == LaneName.PATCHED else []
            after = (*([before[lane]] if lane in before else []), *first)
            seconds = known.get((f"{cell.target}.{cell.evidence}", lane))
            found.append(Task(cell, lane, number, keys[lane], pristine, after, seconds, urgent))
        before = keys
    return found


def unique(every: Iterable[Task]) -> list[Task]:
    """List each task once: what two cells share (the newest release is the pinned one) comes once."""
    first: dict[str, Task] = {}
    for task in every:
        first.setdefault(task.key, task)
    return list(first.values())


def expected_seconds(task: Task) -> float:
    """Return how long a lane is taken to last."""
    return UNKNOWN if task.seconds is None else task.seconds


def at_least(tasks: Iterable[Task], jobs: int) -> float | None:
    """Return a bound below which no schedule of these tasks comes, in seconds; None where no duration is known."""
    known = [(task.seconds, min(task.cores, jobs)) for task in tasks if task.seconds is not None]
    together = sum(seconds * cores for seconds, cores in known) / jobs
    return max(together, *(seconds for seconds, _ in known)) if known else None


def seconds_of(pack: Pack) -> Seconds:
    """Read the seconds of a pack's lanes from its committed receipts; `check` tells of one that cannot be read."""
    found: dict[tuple[str, str], float] = {}
    for path in receipt.paths(pack.receipts):
        try:
            lanes = strict_json.loads(path.read_bytes())["lanes"]
            found |= {(path.stem, name): float(lane["seconds"]) for name, lane in lanes.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found
