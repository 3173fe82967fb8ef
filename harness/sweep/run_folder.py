"""The folder of one sweep: found again after a kill, locked while a sweep writes into it, read when it is finished."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock

from harness.core import files, strict_json, structure
from harness.core.errors import HarnessError
from harness.receipt import receipt
from harness.schedule.scheduler import GpuFault
from harness.schedule.task import Estimates
from harness.sweep.results import NOT_RUN, SCHEMA, Results

STAMP = "%Y%m%dT%H%M%SZ"
#: An unfinished sweep that began longer ago than this is left as it is: today is another sweep.
LONGEST = dt.timedelta(hours=20)
#: A run that began later than this after now was dated by a clock that was wrong: it is no run to go on with.
CLOCKS_DIFFER = dt.timedelta(minutes=5)
#: How many runs tell how long a lane takes.
LOOKED_AT = 10
#: What a sweep was requested to judge, in words; it is continued by the same request only.
Request = tuple[str, ...]
RECORD, JOURNAL, FAULTS, RESULTS = "run.json", "journal.jsonl", "gpus.jsonl", "results.json"


def now() -> dt.datetime:
    """Return the time, in UTC."""
    return dt.datetime.now(dt.UTC)


@dataclass(frozen=True)
class RunFolder:
    """One sweep's folder."""

    path: Path  # where everything goes
    started: dt.datetime  # when it began, in UTC
    request: Request  # what it judges

    @property
    def name(self) -> str:
        """Its name, which sorts by time."""
        return self.path.name

    def gpu_faults(self) -> list[GpuFault]:
        """List the GPUs that left the pool earlier in this sweep."""
        path = self.path / FAULTS
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
        found = []
        for line in lines:
            with suppress(ValueError):  # a kill left half of it
                found.append(structure.structure(strict_json.loads(line), GpuFault))
        return found

    def note(self, fault: GpuFault) -> None:
        """Keep on disk that a GPU left the pool: a continued sweep does not take it back."""
        with (self.path / FAULTS).open("a", encoding="utf-8") as stream:
            stream.write("\n" + json.dumps(asdict(fault)) + "\n")  # a kill may have left half a line before it
            stream.flush()
            os.fsync(stream.fileno())

    def record(self, *, finished: bool) -> None:
        """Write down what it is; after a finished sweep the same command begins a new one."""
        document = {"schema": 1, "started": self.started.isoformat(), "finished": finished, "request": self.request}
        files.write_atomic(self.path / RECORD, json.dumps(document, indent=1) + "\n")


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (folder / RECORD).exists()


def earlier(runs: Path, before: str | None = None) -> list[Path]:
    """List the folders of finished runs, the newest first; only those before the run named `before`."""
    found = sorted((path for path in runs.glob("*") if is_run(path)), reverse=True)
    return [folder for folder in found if (before is None or folder.name < before) and _read(folder).get("finished")]


def _read(folder: Path) -> dict[str, object]:
    try:
        document = strict_json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _unfinished(runs: Path, request: Request, moment: dt.datetime) -> RunFolder | None:
    """Find the run to go on with: the newest, whatever clock that was wrong or broken record lies beside it."""
    for folder in sorted((path.parent for path in runs.glob(f"*/{RECORD}")), reverse=True):
        found = _read(folder)
        started = receipt.moment(found.get("started"))
        if started is None or started > moment + CLOCKS_DIFFER:
            continue
        goes_on = found.get("request") == list(request) and not found.get("finished") and moment - started < LONGEST
        return RunFolder(folder, started, request) if goes_on else None
    return None


@contextmanager
def opened(runs: Path, request: Request, moment: dt.datetime) -> Iterator[RunFolder]:
    """Yield the unfinished run of the same request, or a new one; nobody else writes into `runs` meanwhile.

    HarnessError is raised where another sweep does.
    """
    runs.mkdir(parents=True, exist_ok=True)
    try:
        lock = filelock.FileLock(runs / ".lock", timeout=0).acquire()
    except filelock.Timeout:
        raise HarnessError(f"another sweep writes into {runs}. Next: wait for it, or name another --runs") from None
    with lock:
        run = _unfinished(runs, request, moment)
        for half_written in (path for path in run.path.rglob(".*") if path.is_file()) if run else ():
            half_written.unlink(missing_ok=True)  # what a kill left of a file that was to appear as a whole
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

    OSError is raised where they cannot be read, ValueError where they are damaged, of another schema, or unfinished.
    """
    document = strict_json.loads((folder / RESULTS).read_bytes())
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"no results of schema {SCHEMA}")
    found = structure.structure(document, Results)
    if not found.finished:
        raise ValueError("the sweep was interrupted")
    return found


def finished(
    runs: Path, before: str | None = None, pass_over: Callable[[Path, Exception], None] | None = None
) -> Iterator[tuple[Path, Results]]:
    """Yield the finished runs before the one named `before`, the newest first; `pass_over` hears of unreadable ones."""
    for folder in earlier(runs, before):
        try:
            yield folder, read(folder)
        except (OSError, ValueError) as error:
            if pass_over is not None:
                pass_over(folder, error)


def estimates(runs: Path, before: str) -> Estimates:
    """Return how long each lane took in the newest run that ran it, and which cells the newest run left out."""
    newest = [results for _, results in itertools.islice(finished(runs, before), LOOKED_AT)]
    seconds: dict[tuple[str, str, str], float] = {}
    for cell in (cell for results in newest for cell in results.cells):
        for lane in cell.lanes:
            seconds.setdefault((cell.name, cell.evidence, lane.lane), lane.seconds)
    left_out = [cell.name for results in newest[:1] for cell in results.cells if cell.verdict == NOT_RUN]
    return Estimates(seconds, left_out)
