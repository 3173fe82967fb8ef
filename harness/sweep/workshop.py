"""Running one lane of a sweep: its tree, its process, its scrubbed log, its end; and the health of its GPU."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness import files, lane, patch, recording, strict
from harness.cache import Cache
from harness.companions import CompanionSet
from harness.errors import HarnessError
from harness.execute import Prepared, Runner
from harness.host import Host
from harness.judge import Judgement
from harness.lane import LaneResult
from harness.outcome import Outcome, Request
from harness.privacy import PrivateTextError
from harness.receipt import LaneRecord, LogRecord
from harness.sweep import health
from harness.sweep.cell import Cell, Task
from harness.sweep.lane_end import LaneEnd
from harness.sweep.nvml import Device
from harness.sweep.verdicts import Bench
from harness.words import LaneName, LaneVerdict, Verdict


@dataclass(frozen=True)
class Attempt:
    """What came of starting a lane: exactly one of these is set.

    Attributes:
        end: it ended, and says something.
        sick: why its GPU is sick: whatever it said does not count.
        taken: why its GPU cannot be had for a lane that measures.
        cut: the sweep's budget ended while it ran.
        abandoned: the sweep was interrupted.

    """

    end: LaneEnd | None = None
    sick: str = ""
    taken: str = ""
    cut: bool = False
    abandoned: bool = False


@dataclass(frozen=True)
class Workshop:
    """Where the lanes of a sweep run.

    Attributes:
        cache: of trees, companion sets and JIT results.
        host: what it is.
        bench: judges cells and writes their receipts.
        scratch: a folder for logs that are not scrubbed yet.
        cancel: a file descriptor; once it can be read, every lane is abandoned.
        stop_at: when the budget ends, on the monotonic clock; None without one.

    """

    cache: Cache
    host: Host
    bench: Bench
    scratch: Path
    cancel: int
    stop_at: float | None = None

    def warm(self, cell: Cell) -> None:
        """Fetch and unpack what the lanes of a cell need, and patch its tree, before they take a GPU or a core.

        Raises:
            UnavailableError: something cannot be had.

        """
        self._prepared(cell, LaneName.PRISTINE)
        try:
            self._prepared(cell, LaneName.PATCHED)
        except patch.StalePatchError:
            return  # its lane says so, and only where the bug is there

    def attempt(self, task: Task, device: Device | None) -> Attempt:
        """Run a lane on a GPU, or on the cores where `device` is None."""
        if device is None:
            return self._run(task, None)
        earlier, sick, taken = health.before(device, alone=task.cell.alone)
        if sick or taken:
            return Attempt(sick=sick, taken=taken)
        attempt = self._run(task, device)
        if attempt.abandoned:
            return attempt
        sick = health.after(device, earlier)
        return Attempt(sick=sick) if sick else attempt

    def settle(self, cell: Cell) -> None:
        """Write the receipt of a cell if that was its last lane; a refusal is told in the end."""
        judged = None if self.bench.missing(cell) else self.bench.judged(cell)
        if judged is not None:
            with contextlib.suppress(HarnessError):
                self.bench.receipt(cell, judged)

    def _runner(self, name: str, device: Device | None) -> Runner:
        logs = self.scratch / name
        return Runner(self.cache, self.host, logs, _silent, device.token if device else "", self.cancel)

    def _prepared(self, cell: Cell, name: LaneName) -> tuple[Prepared, tuple[str, ...]]:
        """Lay out what a lane needs; return it with the files that it has to load. The cache does each thing once."""
        runner = self._runner("", None)
        evidence = cell.evidence
        if evidence is None:
            raise ValueError(f"{cell.name} cannot be judged here")
        prepared = runner.prepare(cell.pack, cell.target, evidence, cell.origin, Request())
        if name == LaneName.PRISTINE:
            return prepared, ()
        tree, must_load = runner.patched_tree(prepared)
        return replace(prepared, pristine=tree), must_load

    def _run(self, task: Task, device: Device | None) -> Attempt:
        started, clock = dt.datetime.now(dt.UTC), time.monotonic()
        base = _blank(task, started, device)
        try:
            prepared, must_load = self._prepared(task.cell, task.lane)
        except patch.StalePatchError as error:
            return Attempt(end=replace(base, stale=str(error), seconds=round(time.monotonic() - clock, 3)))
        left = self.stop_at - time.monotonic() if self.stop_at is not None else prepared.timeout
        limited = replace(prepared, timeout=max(0.1, min(prepared.timeout, left)))
        runner = self._runner(task.key, device)
        result = runner.lane(limited, task.lane, prepared.pristine, must_load, task.number)
        if result.reason == lane.ABANDONED:
            return Attempt(abandoned=True)
        if limited.timeout < prepared.timeout and result.reason.startswith("timed out"):
            return Attempt(cut=True)
        record, log = self._record(task, prepared.companion_set, result)
        shutil.rmtree(runner.logs, ignore_errors=True)
        tree = result.tree
        seconds = round(time.monotonic() - clock, 3)
        return Attempt(
            end=replace(base, version=tree.version, tree_key=tree.key, record=record, log=log, seconds=seconds)
        )

    def _record(self, task: Task, companion_set: CompanionSet, result: LaneResult) -> tuple[LaneRecord, LogRecord]:
        """Scrub what a lane said and write its log; what still looks private makes it an error, and the log that."""
        cell = task.cell
        alone = Outcome(cell.pack, cell.target, cell.evidence, Judgement(Verdict.ERROR), pristine=result)
        scrub = recording.scrubber(replace(alone, companion_set=companion_set), self.cache, self.host)
        record = recording.lane_record(result)
        try:
            text = recording.without_lane_folders(scrub.scrub(result.log.read_text("utf-8", errors="replace")))
            scrub.require_clean("log", text)
            document = scrub.document(asdict(record))
        except PrivateTextError as error:
            kept = LaneRecord(LaneVerdict.ERROR, str(error), record.exit_status, record.seconds, 0, 0, record.tree, "")
            return kept, self._write_log(task, f"[left out: {error}]\n")
        return strict.structure(document, LaneRecord), self._write_log(task, text)

    def _write_log(self, task: Task, text: str) -> LogRecord:
        """Write a log and wait until the disk has it: the journal speaks of it next."""
        path = self.bench.night / task.log
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        return LogRecord(task.log, files.sha256_bytes(text.encode()))


def _silent(_: str) -> None:
    """Say nothing: a sweep tells of ends, not of steps."""


def _blank(task: Task, started: dt.datetime, device: Device | None) -> LaneEnd:
    cell = task.cell
    if cell.evidence is None:
        raise ValueError(f"{cell.name} cannot be judged here")
    capability = ".".join(str(part) for part in device.gpu.compute_capability) if device else ""
    return LaneEnd(
        key=task.key,
        task=task.name,
        target=cell.target,
        evidence=cell.evidence,
        lane=task.lane,
        number=task.number,
        started=started.isoformat(timespec="seconds"),
        seconds=0.0,
        place=device.place if device else "cpu",
        gpu=(device.gpu.name if device else "", capability),
        version=cell.version,
        tree_key="",
        record=None,
    )
