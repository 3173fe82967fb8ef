"""Lay out the trees and dependencies of a cell, and run one lane: its process, its record, its scrubbed log."""

import datetime as dt
import time
from dataclasses import dataclass, replace
from pathlib import Path

from harness.core import LaneName, LaneVerdict, files, seal
from harness.core.seal import Layout
from harness.host import host as this_host
from harness.host.host import Device, place_name
from harness.lane import Cell, LaneEnd, LaneRecord, LogRecord, environment, lane
from harness.lane.environment import Share
from harness.lane.lane import Lane, LaneRun
from harness.pack.requirements import DependencySet
from harness.receipt import writer
from harness.receipt.redaction import PrivateTextError
from harness.schedule.session import Session
from harness.schedule.task import Devices, Task
from harness.upstream import dependencies, patch, tree
from harness.upstream.tree import Tree
from harness.verdict import lane_verdict


def raw_log(folder: Path, log: str) -> Path:
    """Return the path of the raw log in a run folder that belongs to a scrubbed one; it is never part of a receipt."""
    return folder / "raw" / Path(log).relative_to("logs")


@dataclass(frozen=True)
class Prepared:
    """The trees and the dependencies of a cell's lanes, laid out."""

    pristine: Tree
    patched: Tree | None  # None if no lane runs on it, or the patch does not apply
    patch: str  # the file name of the patch
    stale: str  # why the patch does not apply
    loads: tuple[str, ...]  # files of the tree that the target runs
    must_load: tuple[str, ...]  # files of `loads` that the patch changes: the patched lane has to load them
    dependency_set: DependencySet
    dependencies: Layout  # the folder of the dependency set


@dataclass(frozen=True)
class NoEnd:
    """A lane without a result: it is given up, it has to run again on other GPUs, or the command was interrupted."""

    reason: str = ""  # why it is given up
    faults: tuple[tuple[Device, str], ...] = ()  # each faulty GPU, with its fault
    busy: tuple[Device, ...] = ()  # the GPUs that another program uses, if the lane measures


#: Of a lane that was interrupted, with the command.
ABANDONED = NoEnd()


@dataclass(frozen=True)
class Runner:
    """Lays out cells and runs lanes."""

    session: Session

    def prepare(self, cell: Cell) -> Prepared:
        """Fetch and unpack the trees and the dependencies of a cell.

        A compiled upstream is laid out in one folder with its dependency set: its libraries find those of other wheels
        by relative paths. UnavailableError is raised if a file cannot be fetched or is damaged, UnsupportedHereError
        if a dependency has no wheel for this Python.
        """
        upstream, python = cell.pack.definition.upstream, environment.interpreter(cell.environment)
        members = self.session.dependency_set(cell)
        pristine = tree.materialize(self.session.cache, upstream, cell.source)
        is_merged, wheels = upstream.is_compiled and cell.source.is_release, members
        if is_merged:
            wheels = dependencies.add_wheel(members, upstream.package, pristine.version, pristine.sha256)
        layout = dependencies.layout(self.session.cache, wheels, python, self.session.host.python_tag)
        layout.lay_out()
        pristine = tree.tree_in_set(pristine, layout) if is_merged else pristine
        loads = tuple(pristine.path_here(path, upstream.source_root) for path in cell.stated.loads)
        prepared = Prepared(pristine, None, "", "", loads, (), members, layout)
        return self._patched(cell, prepared) if LaneName.PATCHED in cell.lanes else prepared

    def _patched(self, cell: Cell, prepared: Prepared) -> Prepared:
        """Add the patched tree, made by the cell's own patch or by the first patch of the pack that applies."""
        pack, upstream, pristine = cell.pack, cell.pack.definition.upstream, prepared.pristine
        best = pack.patch_for(pristine.commit)
        candidates = [cell.patch or best]
        if not cell.fits_exactly:
            candidates += {pack.patch, pack.own_head_patch} - {best}
        stale = f"{candidates[0].name} is missing: runner.py run --lane unpatched shows the bug alone"
        stale = "" if candidates[0].exists() else stale
        for file in (path for path in candidates if path.exists()):
            try:
                patched = patch.apply(self.session.cache, pristine, upstream, file, exact=cell.fits_exactly)
            except patch.StalePatchError as error:
                stale = stale or str(error)
                continue
            # A wrong fix may leave a file unused. What it computes says what it is.
            changed = set() if cell.is_wrong_fix else set(patch.changed_files(pristine, patched))
            must_load = tuple(path for path in prepared.loads if path in changed)
            return replace(prepared, patched=patched, patch=file.name, must_load=must_load)
        return replace(prepared, patch=candidates[0].name, stale=stale)

    def run(self, task: Task, prepared: Prepared, devices: Devices, cancel: int) -> LaneEnd | NoEnd:
        """Run a lane on GPUs that are healthy before it and after it.

        `cancel` is a file descriptor: the lane is abandoned once it can be read.
        """
        watch = self.session.watch
        if watch is None:
            return self.attempt(task, prepared, devices, cancel)
        entries = [(device, *watch.enter(device, measures=task.cell.measures)) for device in devices]
        faults = [(device, fault) for device, fault, _ in entries if fault]
        busy = [device for device, fault, is_taken in entries if is_taken and not fault]
        entered = [device for device, fault, is_taken in entries if not is_taken and not fault]
        result: LaneEnd | NoEnd = ABANDONED
        try:
            if not faults and not busy:
                result = self.attempt(task, prepared, devices, cancel)
        finally:
            for device in entered:
                fault = watch.leave(device, look=result != ABANDONED)
                faults += [(device, fault)] if fault else []
        return NoEnd("", tuple(faults), tuple(busy)) if faults or busy else result

    def attempt(self, task: Task, prepared: Prepared, devices: Devices, cancel: int) -> LaneEnd | NoEnd:
        started, clock = dt.datetime.now(dt.UTC), time.monotonic()
        cell, is_patched = task.cell, task.lane == LaneName.PATCHED
        base = LaneEnd(
            key=task.key,
            task=task.name,
            lane=task.lane,
            started=started.isoformat(timespec="milliseconds"),
            seconds=0.0,
            place=place_name(*devices),
            host=self.session.host,
            gpus=tuple(device.gpu for device in devices),
            version=prepared.pristine.version,
            tree=prepared.pristine.sha256,
            patch=prepared.patch if is_patched else "",
            record=None,
        )
        source = prepared.patched if is_patched else prepared.pristine
        if source is None:
            return replace(base, stale=prepared.stale)
        limit = cell.timeout or cell.stated.timeout_s
        remaining = self.session.stop_at - clock if self.session.stop_at is not None else limit
        spec = Lane(
            cell=cell,
            tree=source,
            dependency_set=prepared.dependency_set,
            dependencies=prepared.dependencies,
            must_load=prepared.must_load if is_patched else (),
            recorded=prepared.must_load or prepared.loads,
            timeout=max(0.1, min(limit, remaining)),
            locks=() if task.exclusive else self.session.lock_files(devices),
            cancel=cancel,
            share=Share(
                threads=self.session.threads_of_lane,
                processes=min(task.processes, len(this_host.cores())),
                visible=",".join(device.token for device in devices),
            ),
        )
        try:
            run = lane.run(self.session.cache, self.session.host, spec)
        finally:
            if cell.is_wrong_fix:  # no other lane uses its tree
                seal.forget(self.session.cache, tree.KIND, source.key, self.session.cache.entry(tree.KIND, source.key))
        if run.ended.reason == lane.ABANDONED:
            return ABANDONED
        if spec.timeout < limit and run.ended.reason == "timed out":
            return NoEnd("the budget ended while it ran")
        record, log = self._record(task, prepared, spec, run)
        seconds = round(time.monotonic() - clock - run.ended.waited, 3)
        return replace(base, record=record, log=log, seconds=seconds)

    def _record(self, task: Task, prepared: Prepared, spec: Lane, run: LaneRun) -> tuple[LaneRecord, LogRecord]:
        """Judge a lane, scrub its output, and write its log. Text that still looks private makes the lane an error."""
        record = lane_verdict.record_of(spec, run)
        trees = {spec.tree.folder: "$TREE"}
        scrub = writer.scrubber(task.cell.pack, self.session.cache, self.session.host, prepared.dependency_set, trees)
        try:
            text: str = scrub.document(run.ended.log, "log", writer.without_lane_folders)
            record = scrub.document(record, "lane", writer.without_lane_folders)
        except PrivateTextError as error:
            status, seconds, tree_sha256 = record.exit_status, record.seconds, record.tree
            record = LaneRecord(LaneVerdict.ERROR, str(error), status, seconds, 0, 0, tree_sha256, "")
            text = f"[left out: {error}]\n"
        if record.verdict == LaneVerdict.ERROR and self.session.keep_raw:  # readable to its owner alone
            path = raw_log(self.session.folder, task.log)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)
            path.write_text(run.ended.log, encoding="utf-8")
        with files.guard(self.session.folder, "the run folder", "--cache DIR (of a sweep: --runs DIR)"):
            files.write_atomic(self.session.folder / task.log, text)  # on disk before the journal names it
        return record, LogRecord(task.log, files.sha256_bytes(text.encode()))
