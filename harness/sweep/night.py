"""The folder of one night: found again after a kill, locked while a sweep writes into it."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock

from harness import files
from harness.errors import HarnessError
from harness.sweep.account import Sickness

STAMP = "%Y%m%dT%H%M%SZ"
#: An unfinished night that began longer ago than this is left as it is: tonight is another night.
LONGEST_NIGHT = dt.timedelta(hours=20)
RECORD, JOURNAL, EVENTS, RESULTS = "night.json", "journal.jsonl", "gpus.jsonl", "results.json"


def now() -> dt.datetime:
    """Return the time, in UTC."""
    return dt.datetime.now(dt.UTC)


@dataclass(frozen=True)
class Wish:
    """What a sweep was asked to judge; a night is continued by the same wish only."""

    packs: str
    only: tuple[str, ...]
    latest: bool
    repeat: int


@dataclass(frozen=True)
class Night:
    """One night.

    Attributes:
        folder: where everything goes.
        started: when it began, in UTC.
        resumed: whether an earlier command began it.

    """

    folder: Path
    started: dt.datetime
    resumed: bool

    @property
    def name(self) -> str:
        """Its name, which sorts by time."""
        return self.folder.name

    def sicknesses(self) -> list[Sickness]:
        """List the GPUs that left the pool earlier in this night."""
        path = self.folder / EVENTS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [Sickness(**json.loads(line)) for line in lines if line.endswith("}")]

    def note(self, sickness: Sickness) -> None:
        """Keep on disk that a GPU left the pool: a continued night does not take it back."""
        with (self.folder / EVENTS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(sickness)) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def finish(self, wish: Wish) -> None:
        """Mark it finished: the same command begins a new night from now on."""
        _record(self.folder, self.started, wish, finished=True)


def _record(folder: Path, started: dt.datetime, wish: Wish, *, finished: bool) -> None:
    document = {"schema": 1, "started": started.isoformat(), "finished": finished, "wish": asdict(wish)}
    files.write_atomic(folder / RECORD, json.dumps(document, indent=1) + "\n")


def earlier(nights: Path, before: str | None = None) -> list[Path]:
    """List the folders of finished nights, the newest first; only those before the night named `before`."""
    found = sorted((path.parent for path in nights.glob(f"*/{RECORD}")), reverse=True)
    return [folder for folder in found if (before is None or folder.name < before) and _read(folder).get("finished")]


def _read(folder: Path) -> dict[str, object]:
    try:
        document = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _unfinished(nights: Path, wish: Wish, moment: dt.datetime) -> Night | None:
    newest = max((path.parent for path in nights.glob(f"*/{RECORD}")), default=None)
    found = _read(newest) if newest else {}
    if newest is None or found.get("finished") or found.get("wish") != json.loads(json.dumps(asdict(wish))):
        return None
    started = dt.datetime.fromisoformat(str(found["started"]))
    return Night(newest, started, resumed=True) if moment - started < LONGEST_NIGHT else None


def _unused(nights: Path, stamp: str) -> Path:
    numbers = itertools.count(2)
    folder = nights / stamp
    while folder.exists():
        folder = nights / f"{stamp}-{next(numbers)}"
    return folder


@contextmanager
def opened(nights: Path, wish: Wish, moment: dt.datetime) -> Iterator[Night]:
    """Yield the unfinished night of the same wish, or a new one; nobody else writes into `nights` meanwhile.

    Raises:
        HarnessError: another sweep does.

    """
    nights.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(nights / ".lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise HarnessError(f"another sweep writes into {nights}. Next: wait for it, or name another --nights") from None
    try:
        night = _unfinished(nights, wish, moment)
        for half_written in night.folder.rglob(".*") if night else ():
            half_written.unlink(missing_ok=True)  # what a kill left of a file that was to appear as a whole
        if night is None:
            night = Night(_unused(nights, moment.strftime(STAMP)), moment, resumed=False)
            _record(night.folder, moment, wish, finished=False)
        yield night
    finally:
        lock.release()
