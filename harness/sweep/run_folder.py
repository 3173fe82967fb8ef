"""The folder of a sweep: resumed after a kill, locked while a sweep writes into it, read when it is finished."""

import contextlib
import datetime as dt
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import filelock

from harness.core import UNJUDGED, Exit, HarnessError, LaneName, files, structure
from harness.core.structure import Form
from harness.receipt import receipt
from harness.schedule.session import GpuFault

STAMP = "%Y%m%dT%H%M%SZ"
#: An unfinished sweep that is older is not resumed: the command begins a new one.
LONGEST = dt.timedelta(hours=20)
RECORD, JOURNAL, RESULTS = "run.json", "journal.jsonl", "results.json"
#: Of results.json: `Results` is the document, the other rows are objects in it.
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

    lane: LaneName
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


@dataclass(frozen=True)
class Record:
    """run.json."""

    started: Annotated[str, Form("a date and time with its zone", receipt.parse_time)]
    finished: bool
    request: tuple[str, ...]  # what it judges, in words: only the same request resumes it
    faults: tuple[GpuFault, ...]  # the GPUs that left the pool for good


@dataclass
class RunFolder:
    """The folder of one sweep."""

    path: Path
    record: Record

    @property
    def started(self) -> dt.datetime:
        return dt.datetime.fromisoformat(self.record.started)

    def note(self, fault: GpuFault) -> None:
        """Record that a GPU left the pool."""
        self.write(replace(self.record, faults=(*self.record.faults, fault)))

    def finish(self) -> None:
        """Record that the sweep is finished: the same command begins a new one."""
        self.write(replace(self.record, finished=True))

    def write(self, record: Record) -> None:
        self.record = record
        files.write_atomic(self.path / RECORD, receipt.to_json(asdict(record)))


def _runs(runs: Path) -> Iterator[RunFolder]:
    """Yield the runs, the newest first, apart from those whose run.json is damaged."""
    for folder in sorted(runs.glob("*"), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            yield RunFolder(folder, structure.structure(structure.loads((folder / RECORD).read_bytes()), Record))


def finished(runs: Path) -> list[Path]:
    """List the folders of finished runs, the newest first."""
    return [run.path for run in _runs(runs) if run.record.finished]


def _unfinished(runs: Path, request: tuple[str, ...], moment: dt.datetime) -> RunFolder | None:
    """Find the newest run of a request that is unfinished, and began within `LONGEST` of `moment`."""
    same = (run for run in _runs(runs) if run.record.request == request and not run.record.finished)
    return next((run for run in same if abs(moment - run.started) < LONGEST), None)


@contextmanager
def open_run(runs: Path, request: tuple[str, ...], moment: dt.datetime) -> Iterator[RunFolder]:
    """Yield the unfinished run of the same request, or a new one. No other sweep can open `runs` meanwhile.

    HarnessError is raised if another sweep has it open.
    """
    runs.mkdir(parents=True, exist_ok=True)
    try:
        lock = filelock.FileLock(runs / ".lock", timeout=0).acquire()
    except filelock.Timeout:
        raise HarnessError(f"another sweep writes into {runs}. Next: wait for it, or name another --runs") from None
    with lock:
        run = _unfinished(runs, request, moment)
        for half_written in (path for path in run.path.rglob(".*") if path.is_file()) if run else ():
            half_written.unlink(missing_ok=True)  # a kill came before the file was renamed
        if run is None:
            stamp, numbers = moment.strftime(STAMP), itertools.count(2)
            folder = runs / stamp
            while folder.exists():
                folder = runs / f"{stamp}_{next(numbers)}"
            run = RunFolder(folder, Record(moment.isoformat(), finished=False, request=request, faults=()))
            run.write(run.record)
        yield run


def read(folder: Path) -> Results:
    """Read the results of one run; OSError: they cannot be read, ValueError: they are damaged or of another schema."""
    return structure.structure(structure.loads((folder / RESULTS).read_bytes()), Results)


def cells_not_run(runs: Path) -> list[str]:
    """Name the cells that the newest finished run with readable results did not run."""
    for folder in finished(runs):
        with contextlib.suppress(OSError, ValueError):
            return [cell.name for cell in read(folder).cells if cell.verdict == NOT_RUN]
    return []
