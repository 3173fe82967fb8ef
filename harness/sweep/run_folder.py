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

from harness.core import files, strict_json, structure
from harness.core.errors import HarnessError
from harness.core.structure import Form
from harness.receipt import receipt
from harness.schedule.session import GpuFault
from harness.sweep.results import NOT_RUN, Results

STAMP = "%Y%m%dT%H%M%SZ"
#: An unfinished sweep that is older is not resumed: the command begins a new one.
LONGEST = dt.timedelta(hours=20)
RECORD, JOURNAL, RESULTS = "run.json", "journal.jsonl", "results.json"


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
            yield RunFolder(folder, structure.structure(strict_json.loads((folder / RECORD).read_bytes()), Record))


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
    return structure.structure(strict_json.loads((folder / RESULTS).read_bytes()), Results)


def cells_not_run(runs: Path) -> list[str]:
    """Name the cells that the newest finished run with readable results did not run."""
    for folder in finished(runs):
        with contextlib.suppress(OSError, ValueError):
            return [cell.name for cell in read(folder).cells if cell.verdict == NOT_RUN]
    return []
