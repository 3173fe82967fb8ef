"""The folder of a sweep: resumed after a kill, locked while a sweep writes into it, read when it is finished."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import filelock

from harness.core import files, strict_json, structure
from harness.core.errors import HarnessError
from harness.receipt import receipt
from harness.schedule.session import GpuFault
from harness.sweep.results import NOT_RUN, SCHEMA, Results

STAMP = "%Y%m%dT%H%M%SZ"
#: An unfinished sweep that is older is not resumed: the command begins a new one.
LONGEST = dt.timedelta(hours=20)
#: A run whose start lies further in the future has a wrong date, and is not resumed.
CLOCKS_DIFFER = dt.timedelta(minutes=5)
#: What a sweep judges, in words. Only the same request resumes it.
Request = tuple[str, ...]
RECORD, JOURNAL, RESULTS = "run.json", "journal.jsonl", "results.json"


def now() -> dt.datetime:
    """Return the time, in UTC."""
    return dt.datetime.now(dt.UTC)


@dataclass(frozen=True)
class Record:
    """run.json."""

    started: str
    finished: bool
    request: Request
    faults: tuple[GpuFault, ...]


@dataclass(frozen=True)
class RunFolder:
    """The folder of one sweep."""

    path: Path
    started: dt.datetime  # in UTC
    request: Request
    faults: list[GpuFault] = field(default_factory=list)  # the GPUs that left the pool for good

    @property
    def name(self) -> str:
        """Its name, which sorts by time."""
        return self.path.name

    def note(self, fault: GpuFault) -> None:
        """Record that a GPU left the pool."""
        self.faults.append(fault)
        self.record(finished=False)

    def record(self, *, finished: bool) -> None:
        """Write run.json. After a finished sweep the same command begins a new one."""
        record = Record(self.started.isoformat(), finished, self.request, tuple(self.faults))
        files.write_atomic(self.path / RECORD, receipt.to_json(asdict(record)))


def is_run(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    return (folder / RECORD).exists()


def earlier(runs: Path, before: str | None = None) -> list[Path]:
    """List the folders of finished runs, the newest first; with `before` only those before the run of that name."""
    folders = sorted((path for path in runs.glob("*") if before is None or path.name < before), reverse=True)
    return [folder for folder in folders if (record := _read(folder)) and record.finished]


def _read(folder: Path) -> Record | None:
    """Read run.json; None if it is missing or damaged."""
    try:
        return structure.structure(strict_json.loads((folder / RECORD).read_bytes()), Record)
    except (OSError, ValueError):
        return None


def _unfinished(runs: Path, request: Request, moment: dt.datetime) -> RunFolder | None:
    """Find the run to resume: the newest one, apart from runs with a damaged record or a wrong date."""
    for folder in sorted(runs.glob("*"), reverse=True):
        record = _read(folder)
        started = receipt.parse_time(record.started) if record else None
        if record is None or started is None or started > moment + CLOCKS_DIFFER:
            continue
        if record.request != request or record.finished or moment - started >= LONGEST:
            return None
        return RunFolder(folder, started, request, list(record.faults))
    return None


@contextmanager
def open_run(runs: Path, request: Request, moment: dt.datetime) -> Iterator[RunFolder]:
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
            run = RunFolder(folder, moment, request)
            run.record(finished=False)
        yield run


def read(folder: Path) -> Results:
    """Read the results of one finished run.

    OSError is raised if they cannot be read, ValueError if they are damaged, of another schema, or unfinished.
    """
    document = strict_json.loads((folder / RESULTS).read_bytes())
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"no results of schema {SCHEMA}")
    results = structure.structure(document, Results)
    if not results.finished:
        raise ValueError("the sweep was interrupted")
    return results


def finished(
    runs: Path, before: str | None = None, pass_over: Callable[[Path, Exception], None] | None = None
) -> Iterator[tuple[Path, Results]]:
    """Yield the finished runs before the one named `before`, the newest first; call `pass_over` for unreadable runs."""
    for folder in earlier(runs, before):
        try:
            yield folder, read(folder)
        except (OSError, ValueError) as error:
            if pass_over is not None:
                pass_over(folder, error)


def cells_not_run(runs: Path, before: str) -> list[str]:
    """Name the cells that the newest finished run did not run."""
    newest = next((results for _, results in finished(runs, before)), None)
    return [cell.name for cell in newest.cells if cell.verdict == NOT_RUN] if newest else []
