"""results.json, the results of a sweep for programs: `Results` is the document, each other class an object in it."""

from dataclasses import dataclass
from typing import Annotated

from harness.core.structure import Form
from harness.core.words import UNJUDGED, Exit
from harness.schedule.session import GpuFault

SCHEMA = 5
#: Verdicts of a cell besides those of a pack.
FLAKY, NOT_RUN, NOT_HERE = "FLAKY", "NOT_RUN", "NOT_HERE"


@dataclass(frozen=True)
class FigureRow:
    """One figure of both lanes; the value is null if the lane did not print it."""

    name: str
    unit: str
    pristine: object
    patched: object
    spread_pristine: object
    spread_patched: object


@dataclass(frozen=True)
class LaneRow:
    """One lane: its verdict in every run, and the seconds, the place and the log of its last run."""

    lane: str
    verdicts: tuple[str, ...]
    seconds: float
    place: str
    log: str


@dataclass(frozen=True)
class ChangeRow:
    """One difference from the baseline; `worse` says that it needs attention."""

    kind: str
    worse: bool
    text: str


@dataclass(frozen=True)
class CellRow:
    """One pack on one target and release.

    `verdict` is a pack's verdict, or FLAKY (`agreeing` of `runs` runs agree), NOT_RUN (this host could judge it and did
    not, `reason` says why), NOT_HERE (this host cannot judge it).
    """

    name: str
    pack: str
    title: str
    kind: str
    upstream: str
    release: str
    version: str
    target: str
    evidence: str
    verdict: str
    reason: str
    changes: tuple[ChangeRow, ...] = ()
    deviation: str = ""  # how it differs from what pack.toml states
    claims: tuple[str, ...] = ()
    agreeing: int = 0
    runs: int = 0
    seconds: float = 0.0
    figure: str = ""
    baseline: str = ""  # the verdict that it is compared with
    lanes: tuple[LaneRow, ...] = ()
    figures: tuple[FigureRow, ...] = ()
    receipt: str = ""
    known: str = ""  # the thread of its deviation, as pack.toml names it
    as_of: str = ""  # the day on which the newest release or the head was looked up

    @property
    def says(self) -> str:
        """The verdict; if not all runs agree, with their number."""
        return f"{self.verdict} {self.agreeing}/{self.runs}" if self.agreeing < self.runs else self.verdict

    @property
    def needs_attention(self) -> bool:
        """Whether it deviates, and the deviation is not known."""
        return self.deviates and not self.known

    @property
    def deviates(self) -> bool:
        """Whether it is worse than the baseline, or differs from what pack.toml states."""
        return bool(self.deviation) or any(change.worse for change in self.changes)


@dataclass(frozen=True)
class HostRow:
    """Where the sweep ran."""

    python: str
    torch: str
    triton: str
    cuda: str
    driver: str
    jobs: int


@dataclass(frozen=True)
class Results:
    """A sweep; `finished` is false if it was interrupted, `status` is the command's exit status."""

    schema: Annotated[int, Form(f"{SCHEMA}, which this runner knows", SCHEMA.__eq__)]
    run: str
    started: str
    seconds: float
    finished: bool
    status: int
    baseline: str
    lanes_run: int
    lanes_resumed: int
    host: HostRow
    gpus: tuple[GpuFault, ...]
    notes: tuple[str, ...]
    cells: tuple[CellRow, ...]

    @property
    def attention(self) -> int:
        """How many things need attention: cells, GPUs and notes."""
        return (
            sum(row.needs_attention for row in self.cells)
            + sum(bool(gpu.reason) for gpu in self.gpus)
            + len(self.notes)
        )

    @property
    def has_judged(self) -> bool:
        return any(row.verdict not in UNJUDGED | {NOT_HERE, NOT_RUN} for row in self.cells)

    @property
    def exit_status(self) -> Exit:
        if not self.finished:
            return Exit.INTERRUPTED
        if self.attention:
            return Exit.DEVIATES
        return Exit.AS_EXPECTED if self.has_judged else Exit.NOTHING_JUDGED
