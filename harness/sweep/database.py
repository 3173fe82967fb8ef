"""history.sqlite beside the run folders: verdicts and figures of every finished sweep, for questions over time.

It holds nothing that results.json does not hold: whoever deletes it loses nothing, and every reader first brings it
up to date with the folders, of which some may be new, written again, or gone. A damaged one is made anew.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import filelock

from harness.core.errors import HarnessError
from harness.core.words import LaneName
from harness.sweep import past_runs, run_folder
from harness.sweep.results import CellRow, FigureRow, Results

NAME, LOCK = "history.sqlite", ".history.lock"
#: Of the tables; a file with another number is made anew.
VERSION = 1
#: Seconds: reading a thousand runs takes less.
PATIENCE = 120.0
#: What is kept of the host of a run.
VERSIONS = ("python", "torch", "triton", "cuda", "driver")
TABLES = """
CREATE TABLE files (run TEXT PRIMARY KEY, size INTEGER NOT NULL, changed INTEGER NOT NULL, problem TEXT NOT NULL);
CREATE TABLE runs (
  run TEXT PRIMARY KEY REFERENCES files ON DELETE CASCADE, started TEXT NOT NULL, seconds REAL NOT NULL,
  status INTEGER NOT NULL, python TEXT NOT NULL, torch TEXT NOT NULL, triton TEXT NOT NULL, cuda TEXT NOT NULL,
  driver TEXT NOT NULL, gpus TEXT NOT NULL
);
CREATE TABLE cells (
  id INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, cell TEXT NOT NULL, pack TEXT NOT NULL,
  target TEXT NOT NULL, release TEXT NOT NULL, upstream TEXT NOT NULL, version TEXT NOT NULL, evidence TEXT NOT NULL,
  gpu TEXT NOT NULL, verdict TEXT NOT NULL, attention INTEGER NOT NULL, seconds REAL NOT NULL
);
CREATE TABLE figures (
  cell INTEGER NOT NULL REFERENCES cells ON DELETE CASCADE, figure TEXT NOT NULL, lane TEXT NOT NULL,
  unit TEXT NOT NULL, value REAL, spread REAL, text TEXT NOT NULL
);
CREATE INDEX cells_of_run ON cells (run);
CREATE INDEX cells_of_pack ON cells (pack);
CREATE INDEX figures_of_cell ON figures (cell);
"""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Measured:
    """One figure of one lane in one run.

    Attributes:
        name: the figure's.
        lane: pristine or patched.
        unit: as the probe printed it.
        value: None where it is no number.
        spread: in the same unit; None where the probe stated none.
        text: the value as JSON where it is no number.

    """

    name: str
    lane: str
    unit: str
    value: float | None
    spread: float | None
    text: str


@dataclass(frozen=True)
class CellRun:
    """One cell in one run.

    Attributes:
        run: the folder's name.
        started: ISO 8601, in UTC.
        name: of the cell, such as ``09_liger_flce_none/cpu``.
        release: pinned, latest or head.
        gpu: the names of the GPUs that its lanes ran on; empty for none.
        attention: whether it deviated and nobody had acknowledged that.
        seconds: of its lanes.
        versions: of python, torch, triton, cuda and driver, by these names.

    """

    run: str
    started: str
    name: str
    pack: str
    target: str
    release: str
    upstream: str
    version: str
    evidence: str
    gpu: str
    verdict: str
    attention: bool
    seconds: float
    versions: dict[str, str]
    figures: tuple[Measured, ...]


@dataclass(frozen=True)
class PassedOver:
    """A finished run whose results could not be read."""

    run: str
    reason: str


@dataclass(frozen=True)
class Past:
    """What the finished runs of a folder said.

    Attributes:
        packs: the names of all packs that any of the runs judged.
        cells: the oldest run first.
        passed_over: what could not be read.

    """

    packs: tuple[str, ...]
    cells: tuple[CellRun, ...]
    passed_over: tuple[PassedOver, ...]


def read(runs: Path, pack: str | None = None, since: str = "", before: str | None = None) -> Past:
    """Bring the database of a folder of runs up to date, and return what it says.

    Args:
        runs: the folder of the run folders.
        pack: only this one; None: all.
        since: ISO 8601 in UTC; only runs that began then or later.
        before: only runs whose name is smaller.

    Raises:
        HarnessError: another process keeps the database locked, or it can be neither read nor made anew.

    """
    return _asked(runs, lambda connection: _past(connection, pack, since, before))


def update(runs: Path) -> None:
    """Bring the database of a folder of runs up to date; errors as in `read`."""
    _asked(runs, lambda _: None)


def _asked(runs: Path, question: Callable[[sqlite3.Connection], Answer]) -> Answer:
    """Answer a question from the database as the folders are now."""
    if not os.access(runs, os.W_OK):  # a mounted artifact, say: there the database is made in memory, every time
        with closing(_connected(":memory:")) as connection:
            _filled(connection, runs)
            return question(connection)
    path = runs / NAME
    with _locked(runs):
        try:
            return _answer(path, runs, question)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_ERROR:  # no room, locked: nothing that a new one mends
                raise HarnessError(f"{path}: {error}. Next: free room, or delete it; it is made anew") from None
            _discarded(path)  # a table is missing
        except sqlite3.DatabaseError:  # damaged, or something else under that name
            _discarded(path)
        try:
            return _answer(path, runs, question)
        except sqlite3.Error as error:
            raise HarnessError(f"{path}: {error}. Next: delete it; it is made anew") from None


def _answer(path: Path, runs: Path, question: Callable[[sqlite3.Connection], Answer]) -> Answer:
    with closing(_connected(str(path))) as connection:
        _filled(connection, runs)
        return question(connection)


@contextmanager
def _locked(runs: Path) -> Iterator[None]:
    """Keep other processes from the database meanwhile: a sweep that ends, and whoever asks."""
    try:
        with filelock.FileLock(runs / LOCK, timeout=PATIENCE):
            yield
    except filelock.Timeout:
        raise HarnessError(f"another process writes {runs / NAME}. Next: wait for it, and call again") from None


def _discarded(path: Path) -> None:
    for one in (path, path.with_name(f"{path.name}-journal")):
        one.unlink(missing_ok=True)


def _connected(path: str) -> sqlite3.Connection:
    """Open the database; one of another version is emptied first."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            _emptied(connection)
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _emptied(connection: sqlite3.Connection) -> None:
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    connection.execute("BEGIN IMMEDIATE")
    for (name,) in tables:
        connection.execute('DROP TABLE "{}"'.format(name.replace('"', '""')))
    for statement in TABLES.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def _filled(connection: sqlite3.Connection, runs: Path) -> None:
    """Take in what is new or written again since, and drop what is gone, all or nothing."""
    known = {run: (size, changed) for run, size, changed in connection.execute("SELECT run, size, changed FROM files")}
    folders = {folder.name: folder for folder in run_folder.earlier(runs)}
    now = {name: _stamp(folder / run_folder.RESULTS) for name, folder in folders.items()}
    different = [name for name in known.keys() | now.keys() if known.get(name) != now.get(name)]
    if not different:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.executemany("DELETE FROM files WHERE run = ?", [(name,) for name in different])
        for name in sorted(name for name in different if name in folders):
            _add(connection, folders[name], now[name])
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def _stamp(path: Path) -> tuple[int, int]:
    """Return the size of a file in bytes and when it was changed, in ns; zeros where there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _add(connection: sqlite3.Connection, folder: Path, stamp: tuple[int, int]) -> None:
    """Take in one run; where it cannot be read, the reason."""
    problem, results = "", None
    try:
        results = past_runs.read(folder)
    except OSError as error:
        problem = f"{run_folder.RESULTS}: {error.strerror}"
    except ValueError as error:
        problem = f"{run_folder.RESULTS}: {error}"
    connection.execute("INSERT INTO files VALUES (?, ?, ?, ?)", (folder.name, *stamp, problem))
    if results is not None:
        _add_results(connection, folder.name, results)


def _add_results(connection: sqlite3.Connection, run: str, results: Results) -> None:
    host, began = results.host, past_runs.started(results).isoformat(timespec="seconds")
    names = ", ".join(sorted({gpu.name for gpu in results.gpus}))
    versions = (getattr(host, name) for name in VERSIONS)
    values = (run, began, float(results.seconds), results.status, *versions, names)
    connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    for one in cells_of(run, results):
        place = (one.run, one.name, one.pack, one.target, one.release, one.upstream, one.version, one.evidence)
        said = (one.gpu, one.verdict, one.attention, one.seconds)
        added = connection.execute(
            "INSERT INTO cells VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*place, *said)
        )
        lines = [(added.lastrowid, *_values(figure)) for figure in one.figures]
        connection.executemany("INSERT INTO figures VALUES (?, ?, ?, ?, ?, ?, ?)", lines)


def cells_of(run: str, results: Results) -> Iterator[CellRun]:
    """Yield the cells of one run, as `read` returns them."""
    host, began = results.host, past_runs.started(results).isoformat(timespec="seconds")
    gpus = {gpu.place: gpu.name for gpu in results.gpus}
    for row in results.cells:
        yield CellRun(
            run=run,
            started=began,
            name=row.name,
            pack=row.pack,
            target=row.target,
            release=row.release,
            upstream=row.upstream,
            version=row.version,
            evidence=row.evidence,
            gpu=_gpu(row, gpus),
            verdict=row.verdict,
            attention=row.needs_attention,
            seconds=float(row.seconds),
            versions={name: getattr(host, name) for name in VERSIONS},
            figures=tuple(one for figure in row.figures for one in _of_lanes(figure)),
        )


def _gpu(row: CellRow, gpus: dict[str, str]) -> str:
    """Name the GPUs that the lanes of a cell ran on, such as ``NVIDIA H200``, or ``2 x NVIDIA H200`` for one lane."""
    found = set()
    for lane in row.lanes:
        numbers = lane.place.partition(" ")[2].split(",")  # as `Placement.name` writes it: cpu, gpu 0, gpus 0,1
        names = Counter(gpus[f"gpu {number}"] for number in numbers if f"gpu {number}" in gpus)
        found.add(", ".join(f"{count} x {name}" if count > 1 else name for name, count in sorted(names.items())))
    return "; ".join(sorted(found - {""}))


def _of_lanes(figure: FigureRow) -> Iterator[Measured]:
    """Yield what each lane printed of a figure."""
    both = ((figure.pristine, figure.spread_pristine), (figure.patched, figure.spread_patched))
    for lane, (value, spread) in zip(LaneName, both, strict=True):
        if value is not None:
            number = _number(value)
            text = "" if number is not None else json.dumps(value, ensure_ascii=False)
            yield Measured(figure.name, lane, figure.unit, number, _number(spread), text)


def _values(one: Measured) -> tuple[object, ...]:
    return one.name, one.lane, one.unit, one.value, one.spread, one.text


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _past(connection: sqlite3.Connection, pack: str | None, since: str, before: str | None) -> Past:
    wanted = (pack, pack, since, before, before)
    which = "(? IS NULL OR pack = ?) AND started >= ? AND (? IS NULL OR run < ?)"
    figures: dict[int, list[Measured]] = {}
    for cell, *values in connection.execute(
        "SELECT figures.* FROM cells JOIN runs USING (run) JOIN figures ON figures.cell = cells.id "  # noqa: S608 - `which` is ours
        f"WHERE {which} ORDER BY figures.rowid",
        wanted,
    ):
        figures.setdefault(cell, []).append(Measured(*values))
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    cells = cursor.execute(
        "SELECT cells.*, started, python, torch, triton, cuda, driver "  # noqa: S608 - `which` is ours
        f"FROM cells JOIN runs USING (run) WHERE {which} ORDER BY started, run, id",
        wanted,
    )
    packs = connection.execute("SELECT DISTINCT pack FROM cells ORDER BY pack")
    problems = connection.execute("SELECT run, problem FROM files WHERE problem != '' ORDER BY run")
    return Past(
        packs=tuple(name for (name,) in packs),
        cells=tuple(_cell_run(row, tuple(figures.get(row["id"], ()))) for row in cells),
        passed_over=tuple(PassedOver(*row) for row in problems),
    )


def _cell_run(row: sqlite3.Row, figures: tuple[Measured, ...]) -> CellRun:
    return CellRun(
        run=row["run"],
        started=row["started"],
        name=row["cell"],
        pack=row["pack"],
        target=row["target"],
        release=row["release"],
        upstream=row["upstream"],
        version=row["version"],
        evidence=row["evidence"],
        gpu=row["gpu"],
        verdict=row["verdict"],
        attention=bool(row["attention"]),
        seconds=row["seconds"],
        versions={name: row[name] for name in VERSIONS},
        figures=figures,
    )
