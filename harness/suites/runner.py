"""Running upstream's tests as lanes of the one scheduler: which cells there are, and what a lane of them does."""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass, replace
from pathlib import Path

from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnsupportedHereError
from harness.core.words import Evidence, LaneName, LaneVerdict
from harness.host.eligibility import out_of_range
from harness.host.host import Host
from harness.lane import built_environment
from harness.lane.lane import ABANDONED
from harness.lane.record import LaneRecord
from harness.pack.model import Pack, UpstreamTests
from harness.receipt import writer
from harness.receipt.receipt import LogRecord
from harness.receipt.redaction import PrivateTextError
from harness.schedule.lane_runner import Attempt, Prepared, Runner
from harness.schedule.places import Placement
from harness.schedule.task import Task
from harness.suites import lane, report
from harness.suites.lane import Place, SuiteRun, Wanted
from harness.upstream import dependencies, patch
from harness.upstream.source import of_git, pinned
from harness.upstream.tree import Tree
from harness.verdict.cell import Cell

#: The columns of a suite's cells: its list of tests without the pack's own, and its runs without and with the patch.
KNOWN, BEFORE, AFTER = "tests-known", "tests-before", "tests-after"


def suite_of(pack: Pack) -> UpstreamTests:
    """Return what pack.toml names of upstream's tests.

    Raises:
        HarnessError: it names nothing.

    """
    suite = pack.definition.upstream_tests
    if suite is None:
        raise HarnessError(f"{pack.name}: pack.toml has no [upstream_tests]. Next: see CONTRIBUTING.md")
    return suite


def cells_of(pack: Pack, host: Host, cache: Cache, timeout: float | None, *, gpu: bool = False) -> list[Cell]:
    """Build the cells of a pack's suite, each of one lane: without the patch, and with it.

    With `gpu` the tests see this host's GPU also where they do not need one: some skip themselves without it.
    Where the pack brings a test of its own, both have it, and a third cell first lists the tests without it.

    Raises:
        HarnessError: pack.toml names no suite.

    """
    suite, definition = suite_of(pack), pack.definition
    wanted = suite.gpu or gpu
    target = host.auto_target if wanted else "cpu"
    reason = out_of_range(pack, host)
    if wanted and target == "cpu":
        reason = "no GPU here, and upstream's tests need one" if suite.gpu else "no GPU here"
    try:
        dependencies.named(definition, suite.dependencies, host.python_tag)
    except UnsupportedHereError as error:
        reason = str(error)
    evidence = Evidence.EXECUTED if wanted else Evidence.TRACED
    cell = Cell(
        pack=pack,
        target=target,
        evidence=None if reason else evidence,
        source=of_git(suite.origin) if suite.origin else pinned(definition),
        dependencies=(suite.dependencies,),
        timeout=timeout or suite.timeout_s,
        patch=pack.suite_patch(suite),
        reason=reason,
    )
    stated = cell.stated.environment
    cell = replace(cell, environment=built_environment.environment(cache, host, stated) if stated else None)
    alone, with_patch = (LaneName.PRISTINE,), (LaneName.PATCHED,)
    after = replace(cell, column=AFTER, lanes=with_patch)
    if not pack.upstream_test_patch.exists():
        return [replace(cell, column=BEFORE, lanes=alone), after]
    known = replace(cell, column=KNOWN, lanes=alone)
    return [known, replace(cell, column=BEFORE, lanes=with_patch, patch=pack.upstream_test_patch), after]


@dataclass(frozen=True)
class SuiteRunner(Runner):
    """Runs a lane's suite where a probe would run; the tests become the checks of its record, by their ids."""

    def attempt(self, task: Task, prepared: Prepared, placement: Placement, locks: tuple[Path, ...]) -> Attempt:
        """Run a suite to its end."""
        started, clock = dt.datetime.now(dt.UTC), time.monotonic()
        base = self._blank(task, prepared, placement, started)
        tree = prepared.pristine if task.lane == LaneName.PRISTINE else prepared.patched
        if tree is None:
            return Attempt(end=replace(base, stale=f"{prepared.patch}: {prepared.stale}"))
        try:
            tree = self._with_tests(task, tree)
        except patch.StalePatchError as error:
            return Attempt(end=replace(base, stale=f"on top of {prepared.patch}, upstream_test.patch: {error}"))
        devices = ",".join(device.token for device in placement.devices) or None
        python = built_environment.interpreter(task.cell.environment)
        place = Place(devices, locks, self.cancel, self.threads, python, task.cell.target)
        raw = self.scratch / f"{task.key}.log"
        suite = suite_of(task.cell.pack)
        wanted = Wanted(suite, tree, prepared, task.cell.timeout or suite.timeout_s, task.cell.column == KNOWN)
        run = lane.run(self.cache, self.host, wanted, place, raw)
        if run.ended.reason == ABANDONED:
            return Attempt(abandoned=True)
        record, log = self._told(task, prepared, tree, run)
        raw.unlink(missing_ok=True)
        seconds = round(time.monotonic() - clock - run.ended.waited, 3)
        return Attempt(end=replace(base, record=record, log=log, seconds=seconds))

    def _with_tests(self, task: Task, patched: Tree) -> Tree:
        """Put the pack's own test on top of its patch; they may touch the same file."""
        pack = task.cell.pack
        if task.cell.column != AFTER or not pack.upstream_test_patch.exists():
            return patched
        return patch.apply(self.cache, patched, pack.definition.upstream, pack.upstream_test_patch, exact=False)

    def _told(self, task: Task, prepared: Prepared, tree: Tree, run: SuiteRun) -> tuple[LaneRecord, LogRecord]:
        """Make a lane's record of a run, scrub it, and write its log; what still looks private makes it an error."""
        ended, found = run.ended, report.checks(run.report)
        record = LaneRecord(
            verdict=LaneVerdict.ERROR if run.problem else report.verdict(found),
            reason=run.problem,
            exit_status=ended.status,
            seconds=round(ended.seconds, 3),
            peak_memory=ended.peak_memory,
            left_behind=ended.left_behind,
            tree=tree.sha256,
            device="",
            checks=found,
            waited=round(ended.waited, 3),
        )
        scrub = writer.scrubber(task.cell.pack, self.cache, self.host, prepared.dependency_set, {run.tree: "$TREE"})
        text = run.log.read_text("utf-8", errors="replace")
        try:
            clean = writer.scrubbed_text(scrub, "log", text)
            record = writer.scrubbed(scrub, "tests", record)
        except PrivateTextError as error:
            self._keep(task, text)
            refused = replace(record, verdict=LaneVerdict.ERROR, reason=str(error), checks=())
            return refused, self._write_log(task, f"[left out: {error}]\n")
        if record.verdict == LaneVerdict.ERROR:
            self._keep(task, text)
        return record, self._write_log(task, clean)
