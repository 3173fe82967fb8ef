"""Laying out what the lanes of a cell need, and running one lane: its process, its record, its scrubbed log."""

from __future__ import annotations

import datetime as dt
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from harness.core import files, room, seal
from harness.core.cache import Cache
from harness.core.seal import Layout
from harness.core.words import LaneName, LaneVerdict
from harness.host import host as this_host
from harness.host.host import Host
from harness.lane import built_environment, lane
from harness.lane.environment import Share
from harness.lane.lane import Lane, LaneRun
from harness.lane.record import LaneEnd, LaneRecord, LogRecord
from harness.receipt import writer
from harness.receipt.redaction import PrivateTextError
from harness.schedule.queue import Placement
from harness.schedule.task import Task
from harness.upstream import dependencies, patch, tree
from harness.upstream.dependencies import DependencySet
from harness.upstream.tree import Tree
from harness.verdict import lane_verdict
from harness.verdict.cell import Cell

#: Raw logs that could not be scrubbed, or whose lane ended in an error, are kept here for whoever runs it.
RAW_LOGS = "raw"
#: The caches whose keys hash what was compiled - the source with all that it refers to, options, compiler, target -
#: so that a result of the right fix is that of any tree with the same kernel.
LENT = ("triton", "tilelang", "inductor", "cuda")
#: How Triton's files begin that name the other files of one kernel, by their whole paths.
GROUP = "__grp__"


@dataclass(frozen=True)
class Prepared:
    """What the lanes of a cell share, laid out."""

    pristine: Tree  # the tree
    patched: Tree | None  # the same with the patch; None where no lane runs on it, or the patch does not apply
    patch: str  # the name of the patch's file
    stale: str  # why it does not apply
    loads: tuple[str, ...]  # files of the tree that the target runs
    must_load: tuple[str, ...]  # those of them that the patch changes: the probe has to load them in the patched lane
    dependency_set: DependencySet  # what the lanes import
    dependencies: Layout  # the folder of it
    #: the tree with the pack's own patch, where the cell has a wrong one: its lane's JIT results serve this one, too
    like: Tree | None = None


class Stopped(Enum):
    """Why a lane that began says nothing: the command was interrupted, or the budget ended."""

    ABANDONED = "abandoned"
    CUT = "the budget ended while it ran"


@dataclass(frozen=True)
class Runner:
    """Where lanes run."""

    cache: Cache  # of trees, dependency sets and JIT results
    host: Host  # what it is
    folder: Path  # of the run: its logs
    scratch: Path  # for output that is not scrubbed yet
    cancel: int | None = None  # a file descriptor; once it can be read, every lane is abandoned
    threads: int = 1  # that a lane's libraries use, the same in all lanes: sums depend on their number
    stop_at: float | None = None  # when the budget ends, on the monotonic clock; None without one
    keep_raw: bool = False  # whether the raw log of a lane that ended in an error stays in the run folder

    def prepare(self, cell: Cell) -> Prepared:
        """Fetch and unpack what the lanes of a cell need, and patch its tree.

        A compiled upstream is laid out in one folder with its dependency set: its libraries find those of other wheels
        by paths relative to their own. UnavailableError is raised where something cannot be had from outside,
        UnsupportedHereError where a dependency has no wheel for this Python.
        """
        definition, tag = cell.pack.definition, self.host.python_tag
        members = dependencies.chosen(self.cache, definition, cell.dependencies, cell.stated.dependencies, tag)
        upstream, python = definition.upstream, built_environment.interpreter(cell.environment)
        pristine = tree.materialize(self.cache, upstream, cell.source)
        together, merged = upstream.is_compiled and cell.source.is_release, members
        if together:
            merged = dependencies.with_wheel(members, upstream.package, pristine.version, pristine.sha256)
        layout = dependencies.layout(self.cache, merged, python, tag)
        layout.lay_out()
        pristine = tree.beside(pristine, layout) if together else pristine
        loads = tuple(pristine.path_here(path, upstream.source_root) for path in cell.stated.loads)
        prepared = Prepared(pristine, None, "", "", loads, (), members, layout)
        return self._patched(cell, prepared) if LaneName.PATCHED in cell.lanes else prepared

    def _patched(self, cell: Cell, prepared: Prepared) -> Prepared:
        """Add the patched tree: by the cell's own patch, or by the first of the pack's that fits the tree."""
        pack, upstream, pristine = cell.pack, cell.pack.definition.upstream, prepared.pristine
        likely = pack.patch_for(pristine.commit)
        candidates = [cell.patch] if cell.patch else [likely, *({pack.patch, pack.own_head_patch} - {likely})]
        if cell.source.is_pinned:
            candidates = candidates[:1]
        stale = f"{candidates[0].name} is missing: runner.py run --lane pristine shows the bug alone"
        stale = "" if candidates[0].exists() else stale
        for file in (path for path in candidates if path.exists()):
            try:
                patched = patch.apply(self.cache, pristine, upstream, file, exact=cell.fits_exactly)
            except patch.StalePatchError as error:
                stale = stale or str(error)
                continue
            changed = set(patch.changed_files(pristine, patched))
            must_load = tuple(path for path in prepared.loads if path in changed)
            like: Tree | None = None
            if cell.is_wrong_fix:
                with suppress(patch.StalePatchError, OSError):
                    like = patch.apply(self.cache, pristine, upstream, likely, exact=cell.source.is_pinned)
            return replace(prepared, patched=patched, patch=file.name, must_load=must_load, like=like)
        return replace(prepared, patch=candidates[0].name, stale=stale)

    def attempt(
        self, task: Task, prepared: Prepared, placement: Placement, locks: tuple[Path, ...]
    ) -> LaneEnd | Stopped:
        """Run a lane to its end; `locks` names a file for each of its GPUs that it shares."""
        started, clock = dt.datetime.now(dt.UTC), time.monotonic()
        cell, is_patched = task.cell, task.lane == LaneName.PATCHED
        base = LaneEnd(
            key=task.key,
            task=task.name,
            lane=task.lane,
            started=started.isoformat(timespec="milliseconds"),
            seconds=0.0,
            place=placement.name,
            gpus=tuple(device.gpu for device in placement.devices),
            version=prepared.pristine.version,
            tree=prepared.pristine.sha256,
            patch=prepared.patch if is_patched else "",
            record=None,
        )
        source = prepared.patched if is_patched else prepared.pristine
        if source is None:
            return replace(base, stale=prepared.stale)
        whole = cell.timeout or cell.stated.timeout_s
        left = self.stop_at - clock if self.stop_at is not None else whole
        visible = ",".join(device.token for device in placement.devices) or None
        wanted = Lane(
            pack=cell.pack,
            tree=source,
            dependency_set=prepared.dependency_set,
            dependencies=prepared.dependencies,
            target=cell.target,
            evidence=cell.known_evidence,
            must_load=prepared.must_load if is_patched else (),
            recorded=prepared.must_load or prepared.loads,
            timeout=max(0.1, min(whole, left)),
            locks=locks,
            cancel=self.cancel,
            share=Share(self.threads, min(task.processes, len(this_host.cores())), visible),
            environment=cell.environment,
            is_wrong_fix=cell.is_wrong_fix and is_patched,
            stops=cell.is_wrong_fix and not cell.judges_all and is_patched,
        )
        raw = self.scratch / f"{task.key}.log"
        with lent(self.cache, self.host, wanted, prepared.like) if wanted.is_wrong_fix else nullcontext():
            run = lane.run(self.cache, self.host, wanted, raw)
        if run.ended.reason == lane.ABANDONED:
            return Stopped.ABANDONED
        if wanted.timeout < whole and run.ended.reason == "timed out":
            return Stopped.CUT
        record, log = self._recorded(task, prepared, wanted, run)
        raw.unlink(missing_ok=True)
        seconds = round(time.monotonic() - clock - run.ended.waited, 3)
        return replace(base, record=record, log=log, seconds=seconds)

    def _recorded(self, task: Task, prepared: Prepared, wanted: Lane, run: LaneRun) -> tuple[LaneRecord, LogRecord]:
        """Judge a lane, scrub what it said, and write its log; what still looks private makes it an error."""
        record = lane_verdict.record_of(wanted, run)
        trees = {wanted.tree.folder: "$TREE"}
        scrub = writer.scrubber(task.cell.pack, self.cache, self.host, prepared.dependency_set, trees)
        raw = run.log.read_text("utf-8", errors="replace")
        try:
            text: str = scrub.document(raw, "log", writer.without_lane_folders)
            record = writer.scrubbed(scrub, "lane", record)
        except PrivateTextError as error:
            status, seconds, tree_sha256 = record.exit_status, record.seconds, record.tree
            record = LaneRecord(LaneVerdict.ERROR, str(error), status, seconds, 0, 0, tree_sha256, "")
            text = f"[left out: {error}]\n"
        if record.verdict == LaneVerdict.ERROR and self.keep_raw:  # readable to its owner alone
            path = self.folder / RAW_LOGS / Path(task.log).relative_to("logs")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)
            path.write_text(raw, encoding="utf-8")
        with room.guard(self.folder, "the run folder", "--cache DIR (of a sweep: --runs DIR)"):
            files.write_atomic(self.folder / task.log, text)  # the disk has it before the journal speaks of it
        return record, LogRecord(task.log, files.sha256_bytes(text.encode()))


def _copy(source: str, target: str) -> str:
    """Copy a file; write it anew where it names the folder that it lies in. A link would break the source's seal."""
    old, new = Path(source), Path(target)
    if old.name.startswith(GROUP):
        text = old.read_text(encoding="utf-8")
        new.write_text(text.replace(str(old.parents[0]), str(new.parents[0])), encoding="utf-8")
    else:
        shutil.copy2(old, new)
    return target


@contextmanager
def lent(cache: Cache, host: Host, wrong: Lane, like: Tree | None) -> Iterator[None]:
    """Let a lane on a wrong fix begin with the JIT results of the right one; remove its own, and its tree, behind it.

    What torch's C++ extensions build is not lent: ninja goes by the times of files.
    `like` is the tree with the right fix; None where it cannot be laid out.
    """
    own = lane.kept_key(wrong, host)
    target = cache.entry("jit", own)
    seal.forget(cache, "jit", own, target)  # of a runner that was killed meanwhile
    try:
        if like is not None:
            right = lane.kept_key(replace(wrong, tree=like), host)
            source = cache.entry("jit", right)
            if not target.exists() and source.is_dir() and seal.kept(cache, "jit", right, source):
                for name in (one for one in LENT if (source / one).is_dir()):
                    shutil.copytree(source / name, target / name, copy_function=_copy)
                target.mkdir(parents=True, exist_ok=True)
                seal.keep(cache, "jit", own, target)
        yield
    finally:
        seal.forget(cache, "jit", own, target)
        seal.forget(cache, tree.KIND, wrong.tree.key, cache.entry(tree.KIND, wrong.tree.key))
